"""The cost policy: for every step the depth with the most expected tokens per second, plain decoding included.

Expected tokens of a row at depth d are 1 + sum over j <= d of the product of the first j conditional
acceptance shares; seconds are those of drafting d and of a forward over all rows' tokens (`Costs`). With
one row this is the choice of the speculation length in section 3 of Leviathan et al. 2023
(arXiv 2211.17192), with measured costs in place of a constant ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from specplug.adaptive.acceptance import ByDepth, ByRow, expected
from specplug.adaptive.config import Measured
from specplug.adaptive.costs import Costs
from specplug.adaptive.guard import BOUND, USUAL, WINDOW, Guard
from specplug.adaptive.policy import Decision, Result, Round
from specplug.adaptive.tiers import Tier, tier_at

PROBE_SHARE = 0.004
"""Most time that is given to trying drafts where plain decoding is fastest, as a share."""
PROBE_LEAST = 16
"""Fewest plain rounds between two such tries."""
RETURN_LEAST, RETURN_MOST = 4, 64
"""Plain rounds before a try where drafts are believed to pay and losses hold them back; doubled by every failure."""
REFRESH = 256
"""Drafted rounds after which a plain one is run, so that it is known what that takes now."""
UNKNOWN_RISK = 2.0
"""Plain steps that a round of unknown cost is taken to lose at most."""
MOST_LOST = USUAL * BOUND * WINDOW
"""Plain steps that one round counts as at most: more is a hiccup of the machine's, not a price of drafting."""
DOUBT = 512
"""Plain rounds after which costs that leave nothing to gain are measured again, in case they were a hiccup."""


@dataclass(slots=True)
class _Choice:
    """A depth, what it would yield, and the drafts it would give each slot."""

    depth: int
    tokens: float
    """Expected, of all rows together."""
    seconds: float
    risk: float
    """Plain steps that are lost if every draft is rejected."""
    limits: Mapping[int, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else float("inf")


class CostPolicy:
    """A `Policy`."""

    name = "cost"

    def __init__(
        self,
        nodes: Mapping[int, int],
        tiers: Sequence[Tier],
        padded: Sequence[int],
        start: int | None,
        measured: Measured,
    ) -> None:
        """`nodes`: most drafts by depth; `padded`: batch sizes that there are, ascending, the last one all slots.

        `start`: the depth to try first.
        """
        self._nodes = nodes
        self._tiers = tiers
        self._padded = padded
        self._start = start or 1
        self.costs = Costs(measured)
        deepest, known = max(nodes), measured.acceptance
        self._shares = [
            ByDepth(deepest, known[min(known, key=lambda rows: abs(rows - tier.least))] if known else ())
            for tier in tiers
        ]
        self._rows = ByRow(padded[-1])
        self._filled = dict.fromkeys(nodes, 1.0)  # by depth, the share of the drafts asked for that are made
        self._guard = Guard()
        self._since_plain = 0
        self._idle = 0  # plain rounds since drafts were last asked for
        self._pause = RETURN_LEAST
        self._doubt = DOUBT
        self._paid = False  # the newest drafted round gained
        self._last = Decision(0)
        self._counts = dict.fromkeys(sorted({0, *nodes}), 0)
        self._probes = self._held = 0

    # --- choosing ------------------------------------------------------------------------------------------------

    def decide(self, rows: int, slots: Sequence[int]) -> Decision:
        """See `Policy`."""
        padded = self._pad(rows)
        tier = tier_at(self._tiers, padded)
        self._last = self._decide(rows, padded, tier, slots)
        self._counts[self._last.depth] += 1
        return self._last

    def _decide(self, rows: int, padded: int, tier: int, slots: Sequence[int]) -> Decision:
        depths = [depth for depth in self._tiers[tier].candidates if depth > 0]
        plain = Decision(0, tier)
        if not depths or not slots or not self.costs.knows_plain(padded) or self._since_plain >= REFRESH:
            return plain
        if not any(self.costs.knows_draft(padded, depth) for depth in depths):
            depths = [min(depths, key=lambda depth: (abs(depth - self._start), depth))]
        by_depth = self._shares[tier]
        reach = expected(by_depth.shares(), self._rows.factors(slots, by_depth.pooled))
        base = self.costs.plain(padded)
        choices = self._choices(depths, rows, padded, len(slots), reach, base)
        better = [choice for choice in choices if choice.rate * base > rows]
        usual = self._guard.usual if better else 0.0
        allowed = [choice for choice in better if choice.risk <= usual]
        if allowed:
            best = max(allowed, key=lambda choice: choice.rate)
            best = self._pruned(best, rows, padded, slots, reach, base)
            return Decision(best.depth, tier, best.limits)
        if better:
            self._held += 1
            best = max(better, key=lambda choice: choice.rate / max(choice.risk, 1e-3))
            due = self._paid or self._idle >= self._pause
            return self._tried(best, tier) if due else plain
        return self._probe(choices, tier)

    def _choices(
        self, depths: Sequence[int], rows: int, padded: int, wanting: int, reach: np.ndarray, base: float
    ) -> list[_Choice]:
        tokens = (rows + np.cumsum(reach.sum(0))).tolist()
        found = []
        for depth in depths:
            width = padded + wanting * self._nodes[depth] * self._filled[depth]
            seconds = self.costs.round(padded, round(width), depth)
            risk = seconds / base - 1.0
            if not self.costs.knows_draft(padded, depth):
                risk = max(risk, UNKNOWN_RISK)
            found.append(_Choice(depth, tokens[depth - 1], seconds, risk))
        return found

    def _pruned(
        self, choice: _Choice, rows: int, padded: int, slots: Sequence[int], reach: np.ndarray, base: float
    ) -> _Choice:
        """Take drafts from rows where they are worth less than the time they cost, if the whole gains by it."""
        depth, nodes = choice.depth, self._nodes[choice.depth]
        width = len(slots) * nodes * self._filled[depth]
        if len(slots) < 2 or width <= 0:
            return choice
        each = (self.costs.verify(padded, round(padded + width)) - self.costs.verify(padded, padded)) / width
        worth = choice.rate * each  # tokens that one more token in the forward has to yield
        if worth <= 0.0:
            return choice
        reach = reach[:, :depth]
        if nodes == depth:  # a chain, of which every leading part is one
            wanted = reach >= worth
        else:
            wanted = np.broadcast_to((reach.sum(1) >= worth * nodes)[:, None], reach.shape)
        most = wanted.sum(1)
        if nodes != depth:
            most = np.where(most > 0, nodes, 0)
        drafts = int(most.sum())
        seconds = self.costs.round(padded, round(padded + drafts * self._filled[depth]), depth)
        limits = {slot: each for slot, each in zip(slots, most.tolist(), strict=True) if each < nodes}
        pruned = _Choice(depth, rows + float(reach[wanted].sum()), seconds, seconds / base - 1.0, limits)
        return pruned if drafts and pruned.rate > choice.rate else choice

    def _probe(self, choices: Sequence[_Choice], tier: int) -> Decision:
        """Ask for drafts now and then where plain decoding is fastest: only so it is learned that it no longer is."""
        best, most = None, 0.0
        for choice in choices:
            worth = (choice.depth - choice.risk) / max(choice.risk, 1e-3)  # with every draft accepted
            if worth > most:
                best, most = choice, worth
        if best is None:
            if self._idle < self._doubt or self._guard.trying < UNKNOWN_RISK:
                return Decision(0, tier)
            self._doubt *= 2
            self._probes += 1
            return Decision(min(choices, key=lambda choice: choice.risk).depth, tier)
        due = self._paid or self._idle >= max(PROBE_LEAST, ceil(best.risk / PROBE_SHARE))
        return self._tried(best, tier) if due else Decision(0, tier)

    def _tried(self, choice: _Choice, tier: int) -> Decision:
        if choice.risk > self._guard.trying:
            return Decision(0, tier)
        self._probes += 1
        return Decision(choice.depth, tier)

    # --- learning ------------------------------------------------------------------------------------------------

    def observe(self, round: Round) -> None:
        """See `Policy`."""
        if not round.results:
            return
        decision = max((result.decision for result in round.results), key=lambda decision: decision.depth)
        depth, padded = decision.depth, self._pad(round.rows)
        width = round.tokens + padded - round.rows  # as the tables count: a plain round is as wide as its padded rows
        if round.verify is not None:
            self.costs.add_verify(padded, width, round.verify)
        if round.between is not None:
            self.costs.add_between(padded, depth, round.between)
        asked = [result for result in round.results if result.limit > 0 and result.decision is decision]
        if not asked:
            self._since_plain = 0
            self._idle += 1
            self._shares[decision.tier].idle()
            self._guard.add(0.0)
            return
        self._since_plain += 1
        self._learn(asked, round.results, decision)
        if self.costs.knows_plain(padded):
            took = self.costs.round(padded, width, depth) / self.costs.plain(padded)
            emitted = 1.0 + sum(result.accepted for result in round.results) / round.rows
            self._guard.add(min(took - emitted, MOST_LOST))
            self._paid = emitted > took
            if self._paid:
                self._pause = RETURN_LEAST
            elif self._idle:
                self._pause = min(2 * self._pause, RETURN_MOST)
        self._idle = 0

    def _learn(self, asked: Sequence[Result], every: Sequence[Result], decision: Decision) -> None:
        depth = decision.depth
        chain = self._nodes.get(depth, depth) == depth

        def arrays(results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray]:
            limits = np.array([result.limit for result in results])
            limits = np.minimum(limits, depth) if chain else np.where(limits > 0, depth, 0)
            return limits, np.array([result.accepted for result in results])

        self._shares[decision.tier].add(*arrays(asked))
        self._rows.add(np.array([result.slot for result in every]), *arrays(every))
        filled = sum(result.drafted for result in asked) / sum(result.limit for result in asked)
        self._filled[depth] += 0.1 * (filled - self._filled[depth])

    def forget(self, slot: int) -> None:
        """See `Policy`."""
        self._rows.forget(slot)

    def report(self) -> dict[str, Any]:
        """See `Policy`."""
        return {
            "policy": self.name,
            "depth": self._last.depth,
            "rounds": {str(depth): count for depth, count in self._counts.items()},
            "tries": self._probes,
            "held_back": self._held,
            "lost": self._guard.lost,
            "tiers": [
                {"least": tier.least, "candidates": tier.candidates, "acceptance_by_depth": shares.shares()}
                for tier, shares in zip(self._tiers, self._shares, strict=True)
            ],
            "measured": self.costs.measured().as_json(),
        }

    def _pad(self, rows: int) -> int:
        return next((each for each in self._padded if each >= rows), rows)
