"""Is the text the same in every column? And where it is not, how near a tie was the first difference?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specplug.bench.gate import Gate, TextChanges, first_difference, text_changes
from specplug.bench.measure import Answer as Answered
from specplug.bench.measure import BatchRun, Sampling
from specplug.bench.report import Answer
from specplug.bench.workload import Item
from specplug.runtime.device.noise import gumbel_rows
from specplug.runtime.engine import Engine
from specplug.runtime.sampler import processed_logits
from specplug.sampling import SamplingParams

TIES = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
"""Distance of two logits (log p + noise for a sampled row) within which a first difference is a tie, by dtype.

Widths of a forward change the shapes of its matrix products, and with them the last bits of a logit.
"""


@dataclass(slots=True)
class TextCheck:
    """One column's answers against the first column's."""

    answers: int = 0
    different: int = 0
    gaps: list[float] = field(default_factory=list)
    """Per different answer, how far apart the first column's values of the two tokens are where they part."""
    tie: float = 0.0
    """Largest gap that counts as a tie."""
    skipped: str = ""
    """Why texts are not compared; empty if they are."""

    @property
    def faults(self) -> int:
        """Differences that are no ties."""
        return sum(gap > self.tie for gap in self.gaps)

    @property
    def verdict(self) -> str:
        """In words."""
        if self.skipped:
            return "not compared"
        if not self.different:
            return "identical"
        what = "DIFFERENT" if self.faults else "ties"
        return f"{what} {self.different}/{self.answers}, gap {max(self.gaps):.1e}"

    def report(self) -> dict[str, Any]:
        """Return it as JSON holds it; a gap without bound (an answer that merely ends early) is None."""
        gaps = [gap if math.isfinite(gap) else None for gap in self.gaps]
        return {
            "verdict": self.verdict,
            "answers": self.answers,
            "different": self.different,
            "faults": self.faults,
            "gaps": gaps,
            "tie": self.tie,
            "skipped": self.skipped,
        }


def check_texts(
    runs: Mapping[str, Sequence[BatchRun]], engine: Engine, sampling: Sampling, dtype: str, skipped: str = ""
) -> dict[str, TextCheck]:
    """Compare every answer of every column and repetition with the first column's first answer to the same item.

    `engine` is the first column's, idle: it computes the logits where texts part. `skipped`: why there is
    nothing to compare.
    """
    wanted: dict[tuple[int, int], Answered] = {}
    for answer in _answers(next(iter(runs.values()))):
        wanted.setdefault((answer.item.source.number, answer.item.turn), answer)
    found = {}
    for label, each in runs.items():
        check = found[label] = TextCheck(tie=TIES[dtype], skipped=skipped)
        known: dict[tuple[int, int, int, int | None], float] = {}
        for answer in [] if skipped else _answers(each):
            check.answers += 1
            key = answer.item.source.number, answer.item.turn
            ours, theirs = wanted[key].ids, answer.ids
            if ours == theirs:
                continue
            check.different += 1
            at = first_difference(ours, theirs)
            parting = *key, at, theirs[at] if at < len(theirs) else None
            if parting not in known:  # repetitions part alike
                known[parting] = parting_gap(engine, answer.item, ours, theirs, at, sampling)
            check.gaps.append(known[parting])
    return found


def check_gate(
    gate: Gate,
    size: int,
    runs: Mapping[str, Sequence[BatchRun]],
    rows: Sequence[Mapping[str, Any]],
    engine: Engine,
    sampling: Sampling,
) -> TextChanges:
    """Compare `rows`, what was answered at this batch size, with the baseline, and tell how near a tie each change is.

    `rows` are `specplug.bench.identity.answer_rows` of `runs`. `engine` is the first column's, idle.
    """
    now = [Answer.model_validate(row) for row in rows]
    found = text_changes(size, list(gate.baseline.columns), gate.batch(size).answers, now)
    said = {(row.prompt, row.turn): row for row in now}
    asked = {
        (answer.item.source.number, answer.item.turn): answer.item for answer in _answers(next(iter(runs.values())))
    }
    known: dict[object, float] = {}
    for index, parting in enumerate(found.partings):
        key, at = (parting.prompt, parting.turn), parting.at
        if parting.was is None or parting.now is None or parting.was >= engine.target.model.vocab_size:
            continue
        begin = said[key].of(parting.label)[:at]
        pair = (*begin, parting.was), (*begin, parting.now)
        if (key, pair) not in known:  # columns part alike
            known[key, pair] = parting_gap(engine, asked[key], *pair, at, sampling)
        found.partings[index] = replace(parting, gap=known[key, pair])
    return found


def _answers(runs: Sequence[BatchRun]) -> list[Answered]:
    return [answer for run in runs for answer in run.answers]


def parting_gap(
    engine: Engine, item: Item, ours: Sequence[int], theirs: Sequence[int], at: int, sampling: Sampling
) -> float:
    """Return how far the lower of two tokens lies below the largest value where two answers to `item` part.

    `engine` must be idle: it computes the logits behind the ids that both begin with, ``ours[:at]``. Sampled rows
    are compared with their noise added. Infinite where one answer is the beginning of the other.
    """
    if at >= min(len(ours), len(theirs)):
        return math.inf  # the same tokens and another end: no rounding explains that
    prefix = [*item.ids, *ours[:at]]
    kept: list[Tensor] = []

    def keep(tokens: Sequence[int], logits: Tensor) -> Tensor:
        kept.append(logits.clone())
        return logits

    # min_tokens is not among the options of a comparison, so these are the logits that decided.
    options = {**sampling, "max_tokens": 1, "seed": item.seed}
    request = engine.submit(prefix, options, max_drafted=0, logits_processor=keep)
    while request.output.finish_reason is None:
        engine.step()
    values, params = kept[0], SamplingParams.model_validate(options)
    if not params.greedy:
        seed, choice, index = torch.tensor([[item.seed], [0], [len(prefix)]], device=engine.run.facts.device)
        noise = gumbel_rows(seed, choice, index, "target", len(values))[0]
        values = processed_logits(values, params).to(noise.device) + noise
    return float(values.max() - values[[ours[at], theirs[at]]].min())
