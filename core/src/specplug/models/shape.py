"""The shape of a causal language model that is to draft, from its checkpoint's facts. Torch-free at import."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

from specplug.errors import UserError
from specplug.models.family import NotCoveredError, decoder_config, refuse_quantized
from specplug.spec import Checkpoint, Facts, KVLayers, ModelShape, Refusal

_WHOLE = ("embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight")
"""Tensors, but for a leading ``model.``, without which a checkpoint of the built-in decoder's is no whole model."""


class Geometry(Protocol):
    """A layer's KV: a `KVGeometry`, or what looks like one."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def k_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def window(self) -> int | None: ...


def model_shape(checkpoint: Checkpoint, name: str = "the draft model") -> ModelShape | Refusal:
    """Return the shape of the language model in `checkpoint`, or why the core cannot run it; never raises.

    `name` stands for the model in the reason. For the built-in decoder's families ``config.json`` says everything;
    for others transformers builds the model without weights, which imports torch and takes a second or so.
    """
    try:
        return _shape(checkpoint, name)
    except UserError as error:
        reason = str(error).replace(f"MODEL {checkpoint.path!r}", name).replace("MODEL", name)
        return Refusal(reason=reason, try_instead="--speculative-draft-model-path with a causal language model")


def last_draft_position(facts: Facts, max_position: int) -> int | None:
    """Return the last token index to draft at, for a plan's `max_position`; None where no text gets that far.

    `max_position`: positions that the draft was made for. The texts are bounded by the context length that was asked
    for and by the target's window.
    """
    bounds = (facts.target.config.get("max_position_embeddings"), facts.limits.context_length)
    known = [bound for bound in bounds if isinstance(bound, int)]
    return None if known and min(known) <= max_position else max_position - 1


def grouped(layers: Iterable[Geometry]) -> tuple[KVLayers, ...]:
    """Return `layers` as a plan's `kv`: one entry for each run of equal ones."""
    found = []
    for sizes, run in groupby(layers, key=lambda layer: (layer.kv_heads, layer.k_dim, layer.v_dim, layer.window)):
        heads, k_dim, v_dim, window = sizes
        found.append(KVLayers(layers=len(list(run)), kv_heads=heads, k_dim=k_dim, v_dim=v_dim, window=window))
    return tuple(found)


def _shape(checkpoint: Checkpoint, name: str) -> ModelShape:
    refuse_quantized(checkpoint.config)
    try:
        sizes = decoder_config(checkpoint.config)
    except NotCoveredError:
        if not checkpoint.path:
            raise
        from specplug.models.transformers import shape_of

        return shape_of(checkpoint.path)
    if checkpoint.tensors is not None:
        stored = {tensor.removeprefix("model.") for tensor in checkpoint.tensors}
        lacking = [tensor for tensor in _WHOLE if tensor not in stored]
        if lacking:
            raise UserError(f"{name} in {checkpoint.path} is no whole language model: it holds no {', '.join(lacking)}")
    heads, head = sizes.kv_heads, sizes.head_dim
    return ModelShape(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        max_position=sizes.max_position,
        kv=grouped(KVLayers(layers=1, kv_heads=heads, k_dim=head, v_dim=head, window=each) for each in sizes.windows),
    )
