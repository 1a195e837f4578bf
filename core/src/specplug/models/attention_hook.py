"""How transformers' attention layers reach a step of ours, and what they are found to do with it.

transformers calls one registered function per attention layer and forward. The step to attend in travels
down to it as a keyword of the model's forward, so nothing here is global and models do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from specplug.errors import UserError
from specplug.models.anatomy import refusal
from specplug.models.base import AttentionStep, KVGeometry

PAGED = "specplug_paged"
"""Attention implementation of a model that runs. It has no mask function: transformers then builds no mask."""
PROBED = "specplug_probed"
"""The same with a mask that says what each layer sees; for `Probe` only."""
STEP = "specplug_step"
"""Keyword of the model's forward that carries the step."""

_FAR = 2**20
"""A window this long or longer is none."""
_NO_WINDOW, _NOT_CAUSAL = 0, -1
_PASSED_ALONG = frozenset(
    {
        STEP,
        "cache",
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "scaling",
        "sliding_window",  # the mask says it, and is what transformers' own CPU paths go by
        "use_cache",
    }
)
"""Keywords that change nothing in what an attention layer computes here."""


class StepLostError(Exception):
    """The model did not hand the keyword `STEP` down to its attention layers."""


class LayerStep(Protocol):
    """What an attention layer of transformers talks to."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Return [1, T, q_heads, v_dim] for `q` [1, q_heads, T, k_dim], `k` and `v` [1, kv_heads, T, dim]."""


@dataclass(frozen=True, slots=True)
class KVUse:
    """Which KV layer an attention module uses, and whether it writes it or reads what another one wrote."""

    layer: int
    writes: bool


class PagedStep:
    """The step of one forward: hands each module's tensors to the layer of its KV."""

    def __init__(self, attention: AttentionStep, uses: Mapping[nn.Module, KVUse]) -> None:
        self._attention = attention
        self._uses = uses

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """See `LayerStep`."""
        use = self._uses[module]
        keys, values = (k[0].transpose(0, 1), v[0].transpose(0, 1)) if use.writes else (None, None)
        return self._attention.attend(use.layer, q[0].transpose(0, 1), keys, values, options.get("scaling"))[None]


@dataclass(frozen=True, slots=True)
class Call:
    """One attention layer's part in a forward. Set by `Probe`."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    geometry: KVGeometry


class Probe:
    """A step in which every token attends to itself alone; notes what the layers ask for.

    Refuses by name, in `attend`, what paged attention does not compute.
    """

    def __init__(self, who: str, *, masks: bool = True) -> None:
        """`who` names the model in errors; without `masks` the window of every layer counts as none."""
        self._who = who
        self._masks = masks
        self.calls: list[Call] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """See `LayerStep`."""
        refused = sorted(name for name, value in options.items() if not _changes_nothing(name, value))
        if refused:
            raise self._refusal(f"asks its attention for {', '.join(refused)}")
        if any(call.module is module for call in self.calls):
            raise self._refusal("attends twice in one layer")
        if not q.shape[2] == k.shape[2] == v.shape[2] or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
            raise self._refusal(f"attends with shapes {[list(part.shape) for part in (q, k, v)]}")
        window = self._window(mask) if self._masks else None
        self.calls.append(Call(module, q, k, v, KVGeometry(k.shape[1], k.shape[3], v.shape[3], window, q.shape[1])))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    def uses(self) -> tuple[tuple[KVGeometry, ...], dict[nn.Module, KVUse]]:
        """Return the KV layers, and each module's use of them; a layer that is handed another's KV shares it."""
        layers: list[KVGeometry] = []
        owners: list[Call] = []
        uses: dict[nn.Module, KVUse] = {}
        for call in self.calls:
            owner = next((at for at, other in enumerate(owners) if _same(call.k, other.k)), None)
            if owner is None:
                uses[call.module] = KVUse(len(layers), writes=True)
                layers.append(call.geometry)
                owners.append(call)
            elif call.geometry != layers[owner] or not _same(call.v, owners[owner].v):
                raise self._refusal("has layers that share keys but not values, window or heads")
            else:
                uses[call.module] = KVUse(owner, writes=False)
        return tuple(layers), uses

    def _window(self, mask: Tensor | None) -> int | None:
        if mask is None or mask.dtype != torch.int64:
            raise self._refusal("makes its attention masks itself")
        code = int(mask.flatten()[0])
        if code == _NOT_CAUSAL:
            raise self._refusal("has layers whose mask is neither causal nor a sliding window (chunks, for example)")
        return None if code == _NO_WINDOW else code

    def _refusal(self, what: str) -> UserError:
        return refusal(self._who, f"it {what}, which paged attention does not compute here")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    step: LayerStep | None = options.get(STEP)
    if step is None:
        raise StepLostError
    return step.attend(module, query, key, value, attention_mask, options), None


def _mask_code(*, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], **rest: Any) -> Tensor:
    """Return int64 [1, 1, q, kv], in every cell the window of `mask_function`, `_NO_WINDOW` or `_NOT_CAUSAL`."""
    return torch.full((1, 1, q_length, kv_length), _window_code(mask_function), device=rest.get("device"))


def _window_code(mask_function: Callable[..., Tensor]) -> int:
    """Ask the mask what queries see, near the start and far out: a window is what fits all of them."""
    at = torch.arange(_FAR + 2)
    zero = torch.zeros((), dtype=torch.int64)
    try:
        seen = {query: mask_function(zero, zero, torch.tensor(query), at) for query in (0, 5, _FAR - 1, _FAR)}
        window = int(seen[_FAR].sum())
        if window > 0 and all(
            torch.equal(row.expand(at.shape), (at <= query) & (at > query - window)) for query, row in seen.items()
        ):
            return _NO_WINDOW if window > _FAR else window
    except (IndexError, RuntimeError, TypeError):
        pass  # a mask that looks things up in this forward's input is none of ours
    return _NOT_CAUSAL


def _changes_nothing(name: str, value: Any) -> bool:
    if name == "is_causal":
        return value is None or value is True
    return value is None or value is False or name in _PASSED_ALONG


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one; known on the meta device too, where addresses are all alike."""
    if one is other:
        return True
    if one.is_meta:
        return (
            one.untyped_storage()._cdata == other.untyped_storage()._cdata
            and one.storage_offset() == other.storage_offset()
            and one.shape == other.shape
        )
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(PROBED, _attention)
AttentionMaskInterface.register(PROBED, _mask_code)
