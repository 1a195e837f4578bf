"""The acceptance ledger: what drafting was worth, with fixed definitions (docs/explanation/ledger.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MEANS = ("tokens_per_target_step", "accept_length", "draft_coverage", "accept_rate")
"""Figures of a report that are also given as the mean over requests."""


@dataclass(slots=True)
class Ledger:
    """Counts of one request, or of many added together. Every number is an integer; ratios are derived.

    A *round* is one decode forward of a request's row (drafts or none). Tokens that the stop rules cut
    are counted nowhere.
    """

    requests: int = 1
    output_tokens: int = 0
    prefill_forwards: int = 0
    returned: int = 0
    """Tokens sampled by the last prompt chunk of a request that came back from a preemption: no round's."""
    rounds: int = 0
    drafted_rounds: int = 0
    drafted: int = 0
    """Nodes verified."""
    path: int = 0
    """Sum over drafted rounds of the longest path offered."""
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    """[depth - 1]: drafted rounds in which a draft at this depth stood below an accepted one (or the root)."""
    accepted_at: list[int] = field(default_factory=list)
    """[depth - 1]: drafts accepted at this depth."""
    rounds_at: list[int] = field(default_factory=list)
    """[depth]: rounds for which drafts of this depth were wanted; 0: none were."""

    def add_round(self, drafted: int, path: int, reached: int, depth: int = 0) -> None:
        """Count one decode forward: nodes verified, its longest path, and the deepest level that was compared.

        `depth`: the longest path that was wanted, whatever was made of it.
        """
        self.rounds += 1
        _grow(self.rounds_at, depth + 1)
        self.rounds_at[depth] += 1
        if drafted:
            self.drafted_rounds += 1
            self.drafted += drafted
            self.path += path
            _grow(self.reached, reached)
            for depth in range(reached):
                self.reached[depth] += 1

    def settle(self, depths: Iterable[int]) -> None:
        """Set what follows from the kept output: for each token its depth in the draft, 0 if it was sampled."""
        self.output_tokens = self.accepted = 0
        self.accepted_at = [0] * len(self.reached)
        for depth in depths:
            self.output_tokens += 1
            if depth:
                self.accepted += 1
                self.accepted_at[depth - 1] += 1

    def __add__(self, other: Ledger) -> Ledger:
        """Return the pooled counts of both."""
        pooled = Ledger()
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                mine, theirs = list(mine), list(theirs)
                _grow(mine, len(theirs))
                _grow(theirs, len(mine))
                setattr(pooled, name, [a + b for a, b in zip(mine, theirs, strict=True)])
            else:
                setattr(pooled, name, mine + theirs)
        return pooled

    def report(self) -> dict[str, Any]:
        """Return the counts and the derived figures; a ratio over nothing is 0.0, never NaN."""
        counts = {name: getattr(self, name) for name in self.__slots__}
        first = min(self.requests + self.returned, self.output_tokens)  # what no round emitted
        return counts | {
            "tokens_per_target_step": _ratio(self.output_tokens - first, self.rounds),
            "accept_length": 1.0 + _ratio(self.accepted, self.drafted_rounds) if self.drafted_rounds else 1.0,
            "draft_coverage": _ratio(self.drafted_rounds, self.rounds),
            "accept_rate": _ratio(self.accepted, self.drafted),
            "path_accept_rate": _ratio(self.accepted, self.path),
            "acceptance_by_depth": [
                {"conditional": _ratio(hit, seen), "unconditional": _ratio(hit, self.drafted_rounds)}
                for hit, seen in zip(self.accepted_at, self.reached, strict=True)
            ],
        }


class Book:
    """The ledger of a whole engine: pooled counts, means over requests, and where the host's time went."""

    def __init__(self) -> None:
        self.finished = Ledger(requests=0)
        self._sums = dict.fromkeys(MEANS, 0.0)
        self._counted = 0
        self._seconds: dict[str, float] = {}

    def finish(self, ledger: Ledger) -> None:
        """Take in the settled ledger of a request that ended."""
        self.finished = self.finished + ledger
        if ledger.rounds:
            report = ledger.report()
            self._counted += 1
            for name in MEANS:
                self._sums[name] += report[name]

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Take in one step's host time by stage."""
        for stage, spent in seconds.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + spent

    def report(self, running: Iterable[Ledger] = ()) -> dict[str, Any]:
        """Return the pooled report of all requests, with ``mean_of_requests`` (finished ones) and ``time_share``."""
        spent = sum(self._seconds.values())
        return pooled([self.finished, *running]).report() | {
            "mean_of_requests": {
                name: total / self._counted if self._counted else 0.0 for name, total in self._sums.items()
            },
            "time_share": {stage: part / spent if spent else 0.0 for stage, part in self._seconds.items()},
        }


def pooled(ledgers: Iterable[Ledger]) -> Ledger:
    """Return the sum of many ledgers."""
    return sum(ledgers, Ledger(requests=0))


def _grow(counts: list[int], size: int) -> None:
    if size > len(counts):
        counts.extend([0] * (size - len(counts)))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
