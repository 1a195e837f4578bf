"""A policy that drafts as deep as it is told and keeps what every round took and yielded."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from specplug.adaptive.config import Measured
from specplug.adaptive.policy import Decision, Round


class Watching:
    """A `Policy` for measuring. Set `depth`; drafts that were made under another one are not counted."""

    name = "measuring"
    urgent = False

    def __init__(self, padded: Sequence[int]) -> None:
        """`padded`: batch sizes that there are, ascending."""
        self.depth = 0
        self._padded = padded
        self._verify: dict[tuple[int, int], list[float]] = {}
        self._between: dict[tuple[int, int], list[float]] = {}
        self._rows: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (padded rows, depth) -> (limit, accepted)
        self._decisions: dict[int, Decision] = {}

    def decide(self, rows: int, slots: Sequence[int]) -> Decision:
        """See `Policy`."""
        return self._decisions.setdefault(self.depth, Decision(self.depth))

    def observe(self, round: Round) -> None:
        """See `Policy`."""
        if any(result.decision.depth != self.depth for result in round.results):
            return
        padded = next((each for each in self._padded if each >= round.rows), round.rows)
        at = padded, self.depth
        if round.verify is not None:
            width = round.tokens + padded - round.rows
            self._verify.setdefault((padded, width), []).append(round.verify)
        if round.between is not None:
            self._between.setdefault(at, []).append(round.between)
        self._rows.setdefault(at, []).extend((one.limit, one.accepted) for one in round.results if one.limit)

    def learn(self) -> None:
        """See `Policy`: nothing was left."""

    def forget(self, slot: int) -> None:
        """See `Policy`."""

    def report(self) -> dict[str, Any]:
        """See `Policy`."""
        return {"policy": self.name, "depth": self.depth}

    def measured(self) -> Measured:
        """Return medians of the times, and by batch size the acceptance of the deepest drafts."""
        deepest: dict[int, int] = {}
        for padded, depth in self._rows:
            deepest[padded] = max(depth, deepest.get(padded, 0))
        return Measured(
            {at: median(times) for at, times in self._verify.items()},
            {at: median(times) for at, times in self._between.items()},
            {rows: shares(self._rows[rows, depth], depth) for rows, depth in deepest.items() if depth},
        )

    def clear(self) -> None:
        """Forget what was measured, as after a warm-up."""
        for kept in (self._verify, self._between, self._rows):
            kept.clear()

    def accept_length(self, rows: int, depth: int) -> float:
        """Return the mean tokens of a drafted round, the bonus counted; 1.0 where none was."""
        found = self._rows.get((next((each for each in self._padded if each >= rows), rows), depth), [])
        return 1.0 + sum(accepted for _, accepted in found) / len(found) if found else 1.0


def shares(rows: Sequence[tuple[int, int]], depth: int) -> list[float]:
    """Return conditional acceptance by depth of (limit, accepted) pairs, up to the deepest that was tried."""
    found = []
    for at in range(1, depth + 1):
        tried = sum(limit >= at and accepted >= at - 1 for limit, accepted in rows)
        if not tried:
            break
        found.append(sum(limit >= at and accepted >= at for limit, accepted in rows) / tried)
    return found


def chance(accept_length: float, depth: int) -> float:
    """Return the constant chance of acceptance that makes a chain of `depth` drafts this long, the bonus counted."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**at for at in range(depth + 1)) < accept_length else (low, middle)
    return (low + high) / 2


def length(by_depth: Sequence[float], depth: int) -> float:
    """Return the tokens of a round of a chain of `depth` drafts, the bonus counted; unknown depths are as the last."""
    total, reach = 1.0, 1.0
    for at in range(depth):
        reach *= by_depth[min(at, len(by_depth) - 1)] if by_depth else 0.0
        total += reach
    return total
