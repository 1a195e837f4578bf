"""Log-probabilities of output tokens, of the model's own distribution: before mask, processors and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token. Log-probabilities are natural logarithms."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The `top_logprobs` likeliest tokens of that position, likeliest first, of equal ones the lowest id first."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return one entry per token: row i of the raw float32 `logits` [m, V] is the position that yielded tokens[i]."""
    values = torch.log_softmax(logits.float(), 1)
    return [
        TokenLogprob(token, float(row[token]), _likeliest(raw, row, top))
        for token, raw, row in zip(tokens, logits, values, strict=True)
    ]


def _likeliest(raw: Tensor, values: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    count = min(count, len(raw))
    if not count:
        return ()
    # topk leaves the order of equal values open.
    edge = torch.topk(raw, count).values[-1]
    above = torch.nonzero(raw > edge).flatten()
    ids = torch.cat((above, torch.nonzero(raw == edge).flatten()[: count - len(above)]))
    ids = ids[torch.sort(raw[ids], descending=True, stable=True).indices]
    return tuple(zip(ids.tolist(), values[ids].tolist(), strict=True))
