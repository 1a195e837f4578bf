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
from specplug.models.base import ForwardBatch, KVGeometry, TargetModel


@dataclass(frozen=True, slots=True)
class Reading:
    """A declared way for a model to read its KV. Made by `DraftModel.reading`."""

    kv: KVView
    patterns: Mapping[int | None, Any]
    """One for each window among the model's layers."""


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
        return Reading(kv, patterns)

    def forward(self, tokens: Tensor, positions: Tensor, *parts: tuple[Reading, Tensor | None]) -> Tensor:
        """Return the states after the final norm [n, H] of `tokens` int64 [n] at `positions` int64 [n].

        Each part is the queries of one reading, in the order of `tokens`, and the token indices at which their K and V
        are written, as `KVView.write` takes them; None (the step's own tokens, at their own indices) for one part at
        most. In every layer all parts are written before any attends, and where two write one row the later stays.
        """
        others = sum(index.numel() for _, index in parts if index is not None)
        sizes = [len(tokens) - others if index is None else index.numel() for _, index in parts]
        attention = _Attention(parts, sizes, self._model.kv_layers)
        hidden: Tensor = self._model(ForwardBatch(tokens, positions, attention))[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [*, V] of states [*, H] that `forward` returned."""
        return self._model.logits(hidden)


class _Attention:
    """The `AttentionStep` of a forward over a drafter's KV."""

    def __init__(
        self, parts: Sequence[tuple[Reading, Tensor | None]], sizes: list[int], layers: Sequence[KVGeometry]
    ) -> None:
        self._parts = parts
        self._sizes = sizes
        self._layers = layers

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.models.base.AttentionStep`."""
        if k is not None and v is not None:
            split = zip(self._parts, torch.split(k, self._sizes), torch.split(v, self._sizes), strict=True)
            for (reading, index), keys, values in split:
                reading.kv.write(layer, keys, values, index)
        window = self._layers[layer].window
        found = [
            reading.kv.attend(reading.patterns[window], layer, queries, scale=scale)
            for (reading, _), queries in zip(self._parts, torch.split(q, self._sizes), strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)
