"""What a request's options do to the logits of a position, before it is sampled.

Order, everywhere (greedy rows stop before the temperature and take the largest, of equal ones the lowest id):

    raw logits -> mask (grammar) -> custom logits processor -> repetition, frequency and presence penalty
    -> logit_bias, suppressed tokens -> min_tokens -> temperature -> top_k -> top_p -> min_p

This file is the part up to `min_tokens`, `specplug.runtime.sampler` the rest. At a drafted position the
tokens drafted above it count as output, so a draft is judged by the logits that plain decoding would
have seen there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specplug.generation import Suppressed
from specplug.sampling import SamplingParams

NOTHING = Suppressed()
log = logging.getLogger("specplug")

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""``fn(tokens, logits) -> logits``: prompt and output so far (drafts above the position included), and float32 [V]
to change in place or replace. Called once per visited position; must be a function of its arguments."""


class ProcessorError(Exception):
    """A request's own processors leave nothing to choose from; ends that request and no other."""


class Ban(NamedTuple):
    """Token ids that are forbidden before the output has `least` tokens."""

    ids: np.ndarray
    """int64, ascending."""
    least: int


class Processors:
    """One request's logits processors, with the token counts that its penalties need.

    Counts are kept per distinct token: a committed token costs O(1), a visited position O(its depth in
    the draft) and one vectorised pass over the distinct tokens.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        *,
        ends: Collection[int],
        vocab: int,
        custom: LogitsProcessor | None = None,
        never: Suppressed = NOTHING,
    ) -> None:
        """`ends`: token ids that end the answer, banned before `min_tokens`; `custom`: runs first.

        `never`: what the model must not say; a suppressed token has a bias of minus infinity.
        """
        self._sampling = sampling
        self._custom = custom
        self._text = list(prompt) if custom else []
        self._length = 0  # output tokens
        early = {token for token in ends if token < vocab} if sampling.min_tokens else set()
        first = set(never.first) - early  # no id is banned twice
        self.bans = tuple(
            Ban(np.array(sorted(tokens), dtype=np.int64), least)
            for tokens, least in ((early, sampling.min_tokens), (first, 1))
            if tokens
        )
        """What is forbidden before the output has some length."""
        bias = {**sampling.logit_bias, **dict.fromkeys(never.always, -math.inf)}
        self.bias_ids = np.fromiter(bias, dtype=np.int64)
        """Token ids whose logits are added to, distinct, at every position."""
        self.bias = np.fromiter(bias.values(), dtype=np.float32)
        """What is added; minus infinity for what is suppressed."""
        self._repeats = sampling.repetition_penalty != 1.0
        self._counts_output = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        # Distinct tokens in the order they were first seen: dict and arrays hold the same places.
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        if self._repeats:
            for token in prompt:
                self._count(token, 0)

    @property
    def active(self) -> bool:
        """Whether any processor still has something to do; a `min_tokens` that was reached has not."""
        return (
            self._custom is not None
            or self._repeats
            or self._counts_output
            or len(self.bias) > 0
            or any(self._length < ban.least for ban in self.bans)
        )

    @property
    def custom(self) -> bool:
        """Whether a function of the caller's runs first."""
        return self._custom is not None

    @property
    def counts(self) -> dict[int, int]:
        """Output token -> how often the penalties count it."""
        found = {token: int(self._counts[place]) for token, place in self._place.items()}
        return {token: count for token, count in found.items() if count}

    def commit(self, token: int) -> None:
        """Count a token of the output."""
        self._length += 1
        if self._custom:
            self._text.append(token)
        if self._repeats or self._counts_output:
            self._count(token, 1)

    def apply(self, logits: Tensor, path: Sequence[int], allowed: Tensor | None = None) -> Tensor:
        """Return new logits [V] for the position below `path`, the drafts accepted since the last commit.

        `logits`: float32 [V], already masked by `allowed` (bool [V]), which a custom processor cannot widen.
        Raises ProcessorError when the custom processor fails or no token is left.
        """
        values = logits.clone()
        if self._custom:
            values = self._customised(self._custom, values, path)
            if allowed is not None:
                values.masked_fill_(~allowed, -math.inf)
        if self._repeats or self._counts_output:
            self._penalise(values, path)
        if len(self.bias):
            values.index_add_(0, torch.from_numpy(self.bias_ids), torch.from_numpy(self.bias))
        for ban in self.bans:
            if self._length + len(path) < ban.least:
                values.index_fill_(0, torch.from_numpy(ban.ids), -math.inf)
        if not math.isfinite(float(values.max())):
            raise ProcessorError(
                f"no token is left at output position {self._length + len(path)}: "
                "min_tokens, the mask, the logits processor and what the model suppresses together forbid all"
            )
        return values

    def _customised(self, custom: LogitsProcessor, logits: Tensor, path: Sequence[int]) -> Tensor:
        shape = logits.shape
        try:
            made = custom([*self._text, *path], logits)
        except Exception as cause:
            log.warning("a logits processor failed", exc_info=True)
            raise ProcessorError(f"the logits processor raised {type(cause).__name__}: {cause}") from cause
        if not isinstance(made, Tensor) or made.shape != shape:
            got = f"shape {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise ProcessorError(f"the logits processor returned {got}, not a tensor of shape {list(shape)}")
        # A copy: what it returns may be its own, and is changed below.
        values = made.detach().to(logits.device, torch.float32, copy=True)
        if not math.isfinite(float(values.max())):  # max() of anything with NaN is NaN
            raise ProcessorError("the logits processor returned NaN, +inf, or no token that is not -inf")
        return values

    def _penalise(self, values: Tensor, path: Sequence[int]) -> None:
        known = len(self._place)
        for token in path:
            self._count(token, 1)
        size = len(self._place)
        if size:
            ids = torch.from_numpy(self._ids[:size])
            counts = torch.from_numpy(self._counts[:size])
            seen = values[ids]
            if self._repeats:
                penalty = self._sampling.repetition_penalty
                seen = torch.where(seen > 0, seen / penalty, seen * penalty)
            seen -= self._sampling.frequency_penalty * counts
            seen -= self._sampling.presence_penalty * (counts > 0)
            values.index_copy_(0, ids, seen)
        for token in path:
            self._count(token, -1)
        while len(self._place) > known:  # the newest are the path's
            self._place.popitem()

    def _count(self, token: int, change: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += change


def processors_for(
    sampling: SamplingParams,
    prompt: Sequence[int],
    *,
    ends: Collection[int],
    vocab: int,
    custom: LogitsProcessor | None = None,
    never: Suppressed = NOTHING,
) -> Processors | None:
    """Return the request's processors, or None where it has none, so that its rows pay nothing."""
    made = Processors(sampling, prompt, ends=ends, vocab=vocab, custom=custom, never=never)
    return made if made.active else None
