"""Models with recurrent state: transformers' modules over transformers' own cache, one cache per slot.

Such state is the whole past in one piece. It cannot be laid out in pages, nor taken back to an earlier
length, so these targets decode plain: `specplug.facts` leaves out ``rollback``, and no draft gets here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specplug.facts import has_recurrent_state
from specplug.models.anatomy import (
    MISFITS,
    base_name,
    check_head,
    close,
    head_logits,
    head_of,
    lent_part,
    most_positions,
    refusal,
)
from specplug.models.base import BatchRow, ForwardBatch, TargetModel
from specplug.models.store import reason

NO_LIMIT = 2**17
"""Most positions of a model whose config names no length: a size for tables, not a property of the model."""

# Argument of the forward and field of its output, newest first: transformers up to 5.17 has `past_key_values` and
# `cache_params`, 5.24 has `cache` for both; one old family hands its state about as a list.
_CACHES = ("cache", "past_key_values", "cache_params", "state")
_PREFIX, _CHUNKS, _APART = 5, (2, 3), 7919
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class _Past:
    """What a slot holds after `length` tokens."""

    cache: Any
    length: int


class RecurrentTarget(TargetModel):
    """A `PreTrainedModel` that keeps recurrent state, alone or beside attention, as a target.

    Each row is a forward of its own. `ForwardBatch.state` holds a `_Past` for each slot that has begun.
    """

    recurrent = True

    def __init__(self, model: PreTrainedModel, config: Mapping[str, Any], *, max_position: int | None = None) -> None:
        """`config`: the checkpoint's. A model that cannot be run right, row by row, is a `UserError` that says why."""
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.config = dict(config)
        longest = most_positions(model.config, NO_LIMIT)
        self.max_position = longest if max_position is None else min(max_position, longest)
        self.kv_layers = ()
        # Outside the module tree, or the weights would be registered twice.
        self._head: tuple[nn.Module] = (head_of(model),)
        self._call = _Call(type(model).__name__, model.get_submodule(base_name(model)))
        with torch.inference_mode():
            self._learn()

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states after the final norm [T, H]; no taps.

        A row that does not go on where its slot's state ends is a RuntimeError: nothing can be taken back.
        """
        if batch.taps or sum(row.length for row in batch.rows) != len(batch.tokens):
            raise ValueError("a target with recurrent state needs the batch's rows, and has no taps")
        hidden, at = [], 0
        for row in batch.rows:
            part = slice(at, at + row.length)
            hidden.append(self._run_row(row, batch.tokens[part], batch.positions[part], batch.state))
            at += row.length
        return torch.cat(hidden), ()

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 [*, V] for `hidden` [*, H], in `out` where given: all that the model's head does."""
        return head_logits(self._head[0], hidden, out)

    def part(self, name: str) -> nn.Module:
        """Return ``embed_tokens`` (scaled, where the model scales) or ``lm_head`` (the linear map alone), shared."""
        return lent_part(self.model, name)

    # --- one row -----------------------------------------------------------------------------------------------

    def _run_row(self, row: BatchRow, tokens: Tensor, positions: Tensor, state: dict[int, Any]) -> Tensor:
        # Taken out while it changes: after an exception half a row must not pass for a whole one.
        past: _Past | None = state.pop(row.slot, None)
        if row.start == 0:
            past = _Past(None, 0)
        if past is None or past.length != row.start:
            held = past.length if past else 0
            raise RuntimeError(f"slot {row.slot} holds the state after {held} tokens; its row begins at {row.start}")
        hidden, cache = self._advance(tokens, positions, past.cache)
        state[row.slot] = _Past(cache, row.start + row.length)
        return hidden

    def _advance(self, tokens: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Run tokens [n] that follow what `cache` holds (None: nothing); returns [n, H] and the cache after them."""
        if cache is None or len(tokens) == 1 or self._continues:
            return self._call(tokens, positions, cache)
        hidden = []
        for at in range(len(tokens)):
            one, cache = self._call(tokens[at : at + 1], positions[at : at + 1], cache)
            hidden.append(one)
        return torch.cat(hidden), cache

    # --- what is learned at load -------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Find the sizes, refuse state outside the cache, and see whether several tokens can follow a cache.

        Many models drop their state when more than one token comes after the first forward: they are written
        for a prompt in one piece and single tokens behind it. `generate` calls them no other way.
        """
        who, total = type(self.model).__name__, _PREFIX + sum(_CHUNKS)
        embedding = self.model.get_input_embeddings().weight
        ids = torch.arange(2 * total, device=embedding.device) * _APART % embedding.shape[0]
        mine, other = ids[:total], ids[total:]
        singly = (_PREFIX, *(1,) * sum(_CHUNKS))
        try:
            whole = self._pieces([mine], (total,))[0]
            alone = self._pieces([mine], singly)[0]
            mixed = self._pieces([mine, other], singly)[0]
        except MISFITS as error:
            raise refusal(who, f"its forward does not take what is passed to it: {reason(error)}") from error
        if not close(mixed, alone):
            raise refusal(who, "it keeps state in its modules, where requests would mix")
        self.hidden_size = whole.shape[-1]
        self.vocab_size = check_head(
            who, self._head[0], whole, lambda: self.model(input_ids=mine[None], use_cache=False).logits[0]
        )
        # In half precision rounding alone can be as large as what a lost state changes, so it is measured.
        rounding = max(_ROUNDING, 2 * _distance(alone, whole))
        try:
            self._continues = _distance(self._pieces([mine], (_PREFIX, *_CHUNKS))[0], whole) <= rounding
        except MISFITS:
            self._continues = False

    def _pieces(self, sequences: list[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
        """Run `sequences` [n] in pieces of `lengths`, taking turns; returns the hidden states of each."""
        caches: list[Any] = [None] * len(sequences)
        hidden: list[list[Tensor]] = [[] for _ in sequences]
        at = 0
        for length in lengths:
            positions = torch.arange(at, at + length, device=sequences[0].device)
            for number, tokens in enumerate(sequences):
                out, caches[number] = self._call(tokens[at : at + length], positions, caches[number])
                hidden[number].append(out)
            at += length
        return [torch.cat(parts) for parts in hidden]


class _Call:
    """Calls a base model with a cache, whatever its version of transformers calls it. Not a module, on purpose."""

    def __init__(self, who: str, base: Callable[..., Any]) -> None:
        self._who = who
        self._base = base
        known = inspect.signature(base.forward if isinstance(base, nn.Module) else base).parameters
        self._cache = next((name for name in _CACHES if name in known), None)
        if self._cache is None:
            raise refusal(who, "its forward takes no cache")
        self._takes_positions = "position_ids" in known

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Run tokens [n] after `cache` (None: a sequence begins); returns hidden [n, H] and the cache after them."""
        given: dict[str, Any] = {"input_ids": tokens[None], "use_cache": True, str(self._cache): cache}
        if self._takes_positions:
            given["position_ids"] = positions[None]
        out = self._base(**given)
        kept = next((held for name in _CACHES if (held := getattr(out, name, None)) is not None), None)
        if kept is None:
            raise refusal(self._who, "it keeps its state in its modules, where requests would mix")
        return out.last_hidden_state[0], kept


def keeps_state(model: PreTrainedModel) -> bool:
    """Whether `model` carries state that cannot be cut back to a length, by its class or by its config."""
    return bool(model._is_stateful) or has_recurrent_state(model.config.to_dict())


def check_recurrent(model: PreTrainedModel) -> None:
    """Refuse, by the structure of `model` on the meta device, what `RecurrentTarget` would refuse at load."""
    call = _Call(type(model).__name__, model.get_submodule(base_name(model)))
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    # Models that look at the numbers on their way cannot be asked here.
    with torch.inference_mode(), contextlib.suppress(*MISFITS):
        call(ids, ids, None)


def _distance(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference, as a share of that of `other`."""
    apart, size = (one.float() - other.float()).square().mean(), other.float().square().mean()
    return float((apart / size).sqrt())
