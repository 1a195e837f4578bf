"""The EMA policy: per tier of batch size, the depth follows a moving average of accepted lengths.

Behaves as SGLang's adaptive steps do, update rule and defaults included, except that results of drafts
that were made under another depth than the present one are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specplug.adaptive.policy import Decision, Round
from specplug.adaptive.tiers import Tier, tier_at


class Steps:
    """The depth of one tier."""

    def __init__(self, tier: Tier, start: int | None) -> None:
        """`start`: where to begin if it is a candidate; else in the middle of the candidates."""
        self.tier = tier
        found = tier.candidates
        self.depth = start if start in found else found[len(found) // 2]
        self.ema = float(self.depth - 1)
        """Mean accepted drafts of a row, recent ones weighing most."""
        self._seen = 0

    def update(self, accepted: Sequence[int]) -> None:
        """Take in the accepted drafts of each row of one verify at the present depth."""
        if not accepted:
            return
        tier = self.tier
        if self.depth > 0:
            mean = sum(accepted) / len(accepted)
            self.ema = (1 - tier.ema_alpha) * self.ema + tier.ema_alpha * mean
        self._seen += 1
        past = self._seen - tier.warmup_batches
        if past > 0 and past % tier.update_interval == 0:
            self._recompute()

    def _recompute(self) -> None:
        found, tier = self.tier.candidates, self.tier
        at = before = found.index(self.depth)
        if self.depth == 0:  # nothing is observed at 0, so that it has to be left to learn anything
            at = min(at + 1, len(found) - 1)
            if self.ema < 0:
                self.ema = float(found[at] - 1)
        else:
            while at > 0 and self.ema <= _enough(found[at - 1]) + tier.down_hysteresis:
                at -= 1
            if at == before:
                while at + 1 < len(found) and self.ema > found[at] - 0.5 + tier.up_hysteresis:
                    at += 1
        if tier.ceiling_coeff > 0 and at <= before:
            ceiling = max(1, math.ceil(self.ema * tier.ceiling_coeff))
            while at > 0 and found[at] > ceiling:
                at -= 1
        self.depth = found[at]


def _enough(shallower: int) -> float:
    """Return the mean accepted length up to which the shallower candidate loses nothing."""
    return 0.5 if shallower == 0 else shallower - 0.5


class EmaPolicy:
    """A `Policy`. Which tier counts follows from the batch size, padded as the batch shapes are."""

    name = "ema"
    urgent = False

    def __init__(self, tiers: Sequence[Tier], padded: Sequence[int], start: int | None) -> None:
        """`padded`: batch sizes that there are, ascending; `start`: see `Steps`."""
        self._tiers = tiers
        self._padded = padded
        self.steps = [Steps(tier, start) for tier in tiers]
        self._at = 0
        self._moves = 0

    def decide(self, rows: int, slots: Sequence[int]) -> Decision:
        """See `Policy`."""
        size = next((each for each in self._padded if each >= rows), rows)
        self._at = tier_at(self._tiers, size)
        return Decision(self.steps[self._at].depth, self._at)

    def observe(self, round: Round) -> None:
        """See `Policy`."""
        accepted: dict[int, list[int]] = {}
        for result in round.results:
            depth, tier, _ = result.decision
            if depth == self.steps[tier].depth and (result.limit or not depth):
                accepted.setdefault(tier, []).append(result.accepted)
        for tier, each in accepted.items():
            steps = self.steps[tier]
            before = steps.depth
            steps.update(each)
            self._moves += steps.depth != before

    def learn(self) -> None:
        """See `Policy`: there is nothing to work out."""

    def forget(self, slot: int) -> None:
        """See `Policy`: nothing is kept per slot."""

    def report(self) -> dict[str, Any]:
        """See `Policy`."""
        return {
            "policy": self.name,
            "depth": self.steps[self._at].depth,
            "changes": self._moves,
            "tiers": [
                {"least": steps.tier.least, "depth": steps.depth, "ema": steps.ema, "candidates": steps.tier.candidates}
                for steps in self.steps
            ],
        }
