"""The machine's floor: how fast plain decoding could be if reading weights and KV were all it did."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from specplug.models.target import Target

_CACHES = 64 * 2**20
"""Weights below this many bytes may stay in the processor's caches; memory bandwidth is then no bound."""
_PROBE = (8192, 8192)
"""Matrix read to measure bandwidth: 256 MiB of float32."""
_COPIES = 8
"""Copies in a row of a matrix four times as large, on a device: launching and waiting then do not count."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes that a plain step must read, and how fast they can be read."""

    weights: int
    """Bytes of weights per step."""
    kv: int
    """Bytes of KV per token of context."""
    bandwidth: float
    """Bytes per second, measured: see `bandwidth`."""

    def step_seconds(self, rows: float, context: float) -> float:
        """Return the least time of a plain step over `rows` rows of `context` tokens."""
        return (self.weights + rows * context * self.kv) / self.bandwidth

    def report(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {"weight_bytes": self.weights, "kv_bytes_per_token": self.kv, "bandwidth": self.bandwidth}


def floor_of(target: Target) -> Floor | str:
    """Measure it for `target`, or say why it is not known."""
    config = target.model.config
    if any("expert" in name for name in config):
        return "not known for a mixture of experts: which weights a step reads depends on its tokens"
    weights = weight_bytes(target)
    if weights < _CACHES:
        return f"not known: {weights / 2**20:.1f} MiB of weights may stay in the processor's caches"
    first = next(target.model.parameters())
    kv = sum(g.kv_heads * (g.k_dim + g.v_dim) for g in target.model.kv_layers) * first.element_size()
    return Floor(weights, kv, bandwidth(first.device))


def weight_bytes(target: Target) -> int:
    """Return the bytes of weights that one step reads: all, but of an embedding with a head of its own only rows."""
    model = target.model
    sizes = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    try:
        embedding, head = (
            {parameter.data_ptr() for parameter in model.part(name).parameters()}
            for name in ("embed_tokens", "lm_head")
        )
    except KeyError:
        return sum(sizes.values())
    return sum(size for at, size in sizes.items() if at not in embedding - head)


@torch.inference_mode()
def bandwidth(device: torch.device, repeat: int = 5) -> float:
    """Return the bytes per second at which `device` reads a large matrix, the best of `repeat` tries.

    On a CPU the matrix is multiplied with a vector; on a device it is copied, read and written bytes counted.
    """
    if device.type == "cuda":
        return _copy_bandwidth(device, repeat)
    matrix, vector = torch.ones(_PROBE, device=device), torch.ones(_PROBE[1], device=device)
    best = 0.0
    for _ in range(repeat + 1):  # the first one pays for start-up
        begin = perf_counter()
        torch.mv(matrix, vector)
        best = max(best, matrix.nbytes / (perf_counter() - begin))
    return best


def _copy_bandwidth(device: torch.device, repeat: int) -> float:
    source = torch.ones(4 * _PROBE[0], _PROBE[1], device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(repeat + 1):  # the first one pays for start-up
        torch.cuda.synchronize(device)
        begin = perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        torch.cuda.synchronize(device)
        best = max(best, 2 * _COPIES * source.nbytes / (perf_counter() - begin))
    return best
