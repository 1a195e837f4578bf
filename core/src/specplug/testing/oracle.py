"""What an answer must be: `specplug.reference` for the tokens, and the stop rules applied by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specplug import reference
from specplug.sampling import SamplingParams

TIE = 1e-4
"""Logits closer than this may swap places between two ways to sum the same numbers."""


@dataclass(frozen=True, slots=True)
class Expected:
    """An answer: ids, text ("" without a tokenizer) and why it ended."""

    ids: list[int]
    text: str
    finish_reason: str


def expected(
    logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    context: int,
    eos: Collection[int] = (),
    tokenizer: Any = None,
) -> Expected:
    """Return the reference's answer, cut at the first of EOS, stop string, `max_tokens` and `context`.

    With stop strings every token must decode to exactly one character.
    """
    most = min(sampling.max_tokens or context, context - len(prompt))
    ids = reference.decode(logits, prompt, sampling.model_copy(update={"max_tokens": most}), eos)
    ended = ids[-1] in reference.Around(len(prompt), eos).ends(sampling)
    text = ""
    if tokenizer is not None:
        text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
        ends = [(at + len(word), at) for word in sampling.stop if (at := text.find(word)) >= 0]
        if ends:
            # The word that is complete first stops the answer; of those, the one that begins first cuts it.
            first = min(end for end, _ in ends)
            at = min(begin for end, begin in ends if end == first)
            return Expected(ids[:at], text[:at], "stop")
    return Expected(ids, text, "stop" if ended else "length")


def check_greedy(
    logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    wanted: Sequence[int],
    got: Sequence[int],
    who: str,
) -> None:
    """Assert equal ids; a difference where the two best logits are within `TIE` is printed and let pass."""
    if list(wanted) == list(got):
        return
    at = next((at for at, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    best = torch.topk(logits([*prompt, *wanted[:at]])[-1], 2).values
    gap = float(best[0] - best[1])
    line = f"{who}: output token {at} differs, expected {list(wanted)} got {list(got)}; top-two gap {gap:.3g}"
    assert at < min(len(wanted), len(got)), line
    assert 0.0 < gap < TIE, line
    print(line)


def chi_square_p(counts: dict[Any, int], probabilities: dict[Any, float]) -> float:
    """Return the p-value of `counts` under `probabilities` (over the same cells); rare cells are pooled.

    A count in a cell of probability 0 gives 0.0.
    """
    draws = sum(counts.values())
    if any(cell not in probabilities or probabilities[cell] == 0.0 for cell in counts):
        return 0.0
    statistic, cells, rare_expected, rare_count = 0.0, 0, 0.0, 0
    for cell, probability in probabilities.items():
        mean, seen = probability * draws, counts.get(cell, 0)
        if mean < 5.0:
            rare_expected += mean
            rare_count += seen
            continue
        statistic += (seen - mean) ** 2 / mean
        cells += 1
    if rare_expected >= 5.0:
        statistic += (rare_count - rare_expected) ** 2 / rare_expected
        cells += 1
    if cells < 2:
        raise ValueError(f"{draws} draws over {len(probabilities)} cells are too few for a chi-square")
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def sequence_probabilities(
    logits: Callable[[Sequence[int]], Tensor], prompt: Sequence[int], sampling: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """Return the exact probability of every continuation of `length` tokens that has any."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for head, mass in found.items():
            p = reference.distribution(logits([*prompt, *head])[-1], sampling)
            for token in torch.nonzero(p).flatten().tolist():
                longer[*head, token] = mass * float(p[token])
        found = longer
    return found
