"""FlashInfer's kernels behind the layers, and where they can stand in for plain torch.

A layer asks `fits` of the tensor at hand and takes its own few lines of torch where the answer is no: on a
CPU, in float32, without FlashInfer, for sizes the kernels refuse. Whether FlashInfer is there is decided once
per process, at the first half-precision tensor on CUDA; nothing here imports it earlier. Its kernels are
compiled at their first call, so that call must not lie inside the capture of a graph.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_HALF = (torch.float16, torch.bfloat16)
_CHUNK = 16
"""Bytes that the kernels load at a time: rows begin and end at multiples of it."""
_ROTARY_DIMS = (64, 128, 256, 512)


class Kernels(NamedTuple):
    """FlashInfer's functions, by their own names."""

    rmsnorm: Callable[..., Any]
    fused_add_rmsnorm: Callable[..., Any]
    apply_rope: Callable[..., Any]
    silu_and_mul: Callable[..., Any]


@functools.cache
def kernels() -> Kernels | None:
    """Return FlashInfer's kernels, or None where it is not installed or cannot be imported (logged once)."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        norm, rope, activation = (
            importlib.import_module(f"flashinfer.{name}") for name in ("norm", "rope", "activation")
        )
        return Kernels(
            norm.rmsnorm, norm.fused_add_rmsnorm, rope.apply_rope_with_cos_sin_cache_inplace, activation.silu_and_mul
        )
    except (AttributeError, ImportError, OSError) as error:
        _log.warning("FlashInfer is installed and cannot be used (%s): layers run in plain torch, slower", error)
        return None


def fits(x: Tensor) -> bool:
    """Whether the kernels take `x` [*, n]: on CUDA, half precision, every row a whole number of 16-byte chunks.

    A strided view will do in 2 and 3 dimensions. Reads nothing from the device.
    """
    return (
        x.is_cuda
        and x.dtype in _HALF
        and x.numel() > 0
        and (x.is_contiguous() or x.dim() in (2, 3))
        and x.stride(-1) == 1
        and all(size * x.itemsize % _CHUNK == 0 for size in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        and kernels() is not None
    )


def fits_rotary(x: Tensor) -> bool:
    """Whether `rotate_` takes `x` [T, heads, head_dim]."""
    return x.dim() == 3 and x.shape[1] > 1 and x.shape[2] in _ROTARY_DIMS and fits(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Return ``x / rms(x) * weight`` over the last dimension, in `out` where given (it may be `x`)."""
    result = torch.empty_like(x) if out is None else out
    flat = x.is_contiguous() and result.is_contiguous()
    rows, into = (part.view(-1, part.shape[-1]) if flat else part for part in (x, result))
    _found().rmsnorm(rows, weight, eps, out=into)
    return result


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Add `x` to `residual`, then make `x` the normalised sum. Both [T, size], both overwritten."""
    _found().fused_add_rmsnorm(x, residual, weight, eps)


def rotate_(x: Tensor, table: Tensor, positions: Tensor) -> None:
    """Rotate `x` [T, heads, head_dim] in place by the rows `positions` int64 [T] of `table`, float32 cosines | sines.

    The kernel wants queries and keys; heads are all alike to it, so the last one plays the keys.
    """
    _found().apply_rope(positions, x[:, :-1], x[:, -1:], x.shape[-1], table)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` [*, n] for `gate_up` [*, 2 n], contiguous, gate first."""
    return _found().silu_and_mul(gate_up)  # type: ignore[no-any-return]


def _found() -> Kernels:
    found = kernels()
    assert found is not None, "`fits` was not asked"
    return found
