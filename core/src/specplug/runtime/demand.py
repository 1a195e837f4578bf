"""What a run takes of a device's memory beside its KV pages, in bytes, from sizes alone. Torch-free.

Whether it is found before anything is loaded (`specplug doctor`) or at start, the sums are these.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from specplug.errors import UserError
from specplug.models.family import DecoderConfig, decoder_config
from specplug.options import EngineOptions
from specplug.spec import Checkpoint, DraftPlan

if TYPE_CHECKING:
    import torch

_GRAPHS_FIXED, _GRAPH = 256 * 2**20, 16 * 2**20
_WORKSPACE, _MOST_WORKSPACE = 256 * 2**20, 2**30
_LOGIT_COPIES = 3
"""Logits in float32: as computed, as the request's options changed them, and what sorting them takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run takes beside the KV pages. Set by `demand_of`."""

    weights: int
    """Of the target, which is loaded when the pool is sized."""
    kv_token: int
    """Per token in all layers of the target; 0 where its KV is not paged."""
    draft_kv_token: int = 0
    """Per token in all layers of the drafter's own."""
    proposal: int = 0
    """The proposal of every slot, and q where it is recorded."""
    draft_weights: int = 0
    draft_fixed: int = 0
    draft_slots: int = 0
    graphs: int = 0
    """Graphs, and the buffers that they and attention keep."""
    activations: int = 0
    """What the largest forward takes while it runs; outside ``--mem-fraction-static``."""

    @property
    def to_come(self) -> int:
        """What will be taken after the pool was sized, activations apart."""
        return self.proposal + self.draft_weights + self.draft_fixed + self.draft_slots + self.graphs

    @property
    def token(self) -> int:
        """One token's KV, the drafter's included."""
        return self.kv_token + self.draft_kv_token


def demand_of(
    plan: DraftPlan | None,
    options: EngineOptions,
    *,
    weights: int,
    kv_token: int,
    vocab: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    draft_weights: int = 0,
    on_device: bool = True,
) -> Demand:
    """Return what a run of `plan` (None: plain decoding) takes.

    `weights`: bytes of the target, as `model_bytes` counts them once it is loaded; `kv_token`: as
    `KVPool.bytes_per_token` of its layers; `vocab`, `hidden`, `intermediate`: the target's sizes in elements;
    `itemsize`: bytes of an element in the run's dtype; `draft_weights`: as `weight_bytes` of the draft checkpoint, 0
    where there is none or it is not known. Graphs and activations are counted `on_device` only.
    """
    slots, nodes = options.max_running_requests, plan.nodes if plan else 0
    drafting = plan is not None and nodes > 0
    q = drafting and plan is not None and plan.needs.proposal_probs == "dense" and options.acceptance == "rejection"
    kv = sum(group.layers * group.kv_heads * (group.k_dim + group.v_dim) for group in plan.kv) if plan else 0
    logit_rows = slots * (1 + nodes)
    static = 0
    if on_device:
        taps = len(plan.needs.taps) if plan else 0
        # FlashInfer's partial results: float32 of a tile of 64 queries for each of the largest bucket's tokens.
        static = _WORKSPACE + min(_MOST_WORKSPACE, 256 * hidden * logit_rows)
        static += (options.chunked_prefill_size + logit_rows) * taps * hidden * itemsize
        static += 0 if options.disable_cuda_graph else 4 * vocab * logit_rows  # logits that graphs write to
    tokens = max(options.chunked_prefill_size, logit_rows)
    return Demand(
        weights=weights,
        kv_token=kv_token,
        draft_kv_token=kv * itemsize if drafting else 0,
        proposal=proposal_bytes(slots, nodes, vocab, q=q) if drafting else 0,
        draft_weights=draft_weights if drafting else 0,
        draft_fixed=plan.bytes_fixed if drafting and plan else 0,
        draft_slots=(slots + 1) * plan.bytes_per_slot if drafting and plan else 0,
        graphs=graph_bytes(options) + static if on_device else 0,
        activations=activation_bytes(tokens, logit_rows, vocab, hidden, intermediate, itemsize) if on_device else 0,
    )


def proposal_bytes(slots: int, nodes: int, vocab: int, *, q: bool) -> int:
    """Return the bytes of a `Proposal`; `q`: the drafts' distributions are recorded, [slots + 1, nodes, vocab]."""
    per_slot = nodes * (8 + 8) + 8 + 8 + 1  # tokens, parents; num_valid, limit, dense
    return (slots + 1) * (per_slot + (4 * nodes * vocab if q else 0))


def graph_bytes(options: EngineOptions) -> int:
    """Return what is set aside for CUDA graphs: one pool and one workspace, and little for each graph."""
    return 0 if options.disable_cuda_graph else _GRAPHS_FIXED + options.max_cuda_graphs * _GRAPH


def activation_bytes(tokens: int, logit_rows: int, vocab: int, hidden: int, intermediate: int, itemsize: int) -> int:
    """Return what a forward of `tokens` tokens with `logit_rows` rows of logits takes while it runs, on the high side.

    Layers run one after another: the residual, its norm, the fused q, k, v and what attention returns, then gate, up
    and their product.
    """
    return tokens * (6 * hidden + 3 * intermediate) * itemsize + _LOGIT_COPIES * 4 * logit_rows * vocab


def weight_bytes(checkpoint: Checkpoint, itemsize: int) -> int | None:
    """Return the bytes of a checkpoint's weights in a dtype of `itemsize` bytes, before anything is loaded.

    From the headers of its tensors; without any (load format ``dummy``) from its config, and None where that is not
    one of the built-in decoder's.
    """
    if checkpoint.tensors is not None:
        return sum(prod(info.shape) for info in checkpoint.tensors.values()) * itemsize
    try:
        return decoder_parameters(decoder_config(checkpoint.config)) * itemsize
    except UserError:
        return None


def decoder_parameters(sizes: DecoderConfig) -> int:
    """Return how many parameters the built-in decoder of these sizes has."""
    hidden, inner, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    queries, fused = sizes.heads * head, (sizes.heads + 2 * sizes.kv_heads) * head
    layer = hidden * fused + queries * hidden + 3 * hidden * inner + 2 * hidden
    layer += fused * sizes.qkv_bias + hidden * sizes.o_bias + (2 * inner + hidden) * sizes.mlp_bias
    layer += 2 * head * sizes.qk_norm
    heads = 1 if sizes.tied else 2
    return heads * sizes.vocab_size * hidden + len(sizes.windows) * layer + hidden


def model_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a loaded module's parameters and buffers; what is shared counts once."""
    return sum({part.data_ptr(): part.nbytes for part in (*module.parameters(), *module.buffers())}.values())
