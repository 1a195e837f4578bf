"""A language model that drafts: the code that runs targets, over KV that a drafter keeps.

n tokens of a forward, R rows of the step, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specplug.drafter import KVView
from specplug.models.base import ForwardBatch, TargetModel


@dataclass(frozen=True, slots=True)
class KVPart:
    """Queries of one forward that read alike, and where their K and V go."""

    pattern: Any
    """What `KVView.pattern` returned; a tuple has one for each layer."""
    index: Tensor | None = None
    """Token indices, as `KVView.write` takes them; None, in one part at most: the step's own tokens."""
    visible: Tensor | None = None
    """What `KVView.attend` is told with the mask ``ancestors``."""


class KVStep:
    """Attention over a drafter's KV for layers that take an `attention`, such as `specplug.layers.SelfAttention`.

    The tokens of the forward are those of the parts, in their order. In every layer all parts are written before any
    attends, and where two write one row the later stays.
    """

    def __init__(self, kv: KVView, parts: Sequence[KVPart]) -> None:
        self._kv = kv
        self._parts = parts
        self._others = sum(part.index.numel() for part in parts if part.index is not None)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """Write `k` [n, kv_heads, k_dim] and `v` [n, kv_heads, v_dim], if given, and attend with `q` [n, q_heads,
        k_dim]; returns [n, q_heads, v_dim]. `scale` defaults to ``k_dim ** -0.5``."""
        sizes = [len(q) - self._others if part.index is None else part.index.numel() for part in self._parts]
        if k is not None and v is not None:
            for part, keys, values in zip(self._parts, torch.split(k, sizes), torch.split(v, sizes), strict=True):
                self._kv.write(layer, keys, values, part.index)
        found = [
            self._kv.attend(
                part.pattern[layer] if isinstance(part.pattern, tuple) else part.pattern,
                layer,
                queries,
                part.visible,
                scale,
            )
            for part, queries in zip(self._parts, torch.split(q, sizes), strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True, slots=True)
class Reading:
    """A declared way for a model to read its KV. Made by `DraftModel.reading`."""

    kv: KVView
    patterns: tuple[Any, ...]
    """One for each layer."""


class DraftModel:
    """A loaded causal language model whose layer i keeps its KV in layer i of a `KVView`. Made by ``ctx.model``."""

    def __init__(self, model: TargetModel) -> None:
        """`model`: loaded, without recurrent state."""
        self._model = model
        self.config: Mapping[str, Any] = model.config
        """The checkpoint's ``config.json``."""
        self.vocab_size: int = model.vocab_size
        """Rows of its output head, padding included."""
        self.hidden_size: int = model.hidden_size
        self.max_position: int = model.max_position
        """Positions it can be run at; `forward` is not to be given one at or above."""

    def reading(self, kv: KVView, name: str, q_len: int | None, offset: int = 0) -> Reading:
        """Declare, in `Drafter.allocate`, causal reading as `KVView.pattern` does, with each layer's own window."""
        windows = dict.fromkeys(layer.window for layer in self._model.kv_layers)
        patterns = {
            window: kv.pattern(name if window is None else f"{name}, window {window}", q_len, "causal", window, offset)
            for window in windows
        }
        return Reading(kv, tuple(patterns[layer.window] for layer in self._model.kv_layers))

    def forward(self, tokens: Tensor, positions: Tensor, *parts: tuple[Reading, Tensor | None]) -> Tensor:
        """Return the states after the final norm [n, H] of `tokens` int64 [n] at `positions` int64 [n].

        Each part is the queries of one reading, in the order of `tokens`, and the token indices at which their K and V
        are written, as `KVView.write` takes them; None (the step's own tokens, at their own indices) for one part at
        most. In every layer all parts are written before any attends, and where two write one row the later stays.
        """
        attention = KVStep(parts[0][0].kv, [KVPart(reading.patterns, index) for reading, index in parts])
        hidden: Tensor = self._model(ForwardBatch(tokens, positions, attention))[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [*, V] of states [*, H] that `forward` returned."""
        return self._model.logits(hidden)
