"""The cost policy: for every step the depth with the most expected tokens per second, plain decoding included.

Expected tokens of a row at depth d are 1 + m * (sum over j <= d of the product of the first j conditional
acceptance shares), m being the share of rows that get any drafts at all, both of rows whose newest drafts did as
well (`Scores`); seconds are those of drafting d and of a forward over all rows' tokens (`Costs`), the mean over how
many rows may get drafts (`Offers`). With one row that always gets drafts this is the choice of the speculation length
in section 3 of Leviathan et al. 2023 (arXiv 2211.17192), with measured costs in place of a constant ratio.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np

from specplug.adaptive.acceptance import ByDepth, Scores, expected
from specplug.adaptive.choice import UNKNOWN_RISK, Choice, Offers
from specplug.adaptive.config import Measured
from specplug.adaptive.costs import Costs
from specplug.adaptive.guard import BOUND, USUAL, WINDOW, Guard
from specplug.adaptive.policy import Decision, Result, Round
from specplug.adaptive.tiers import Tier, tier_at

PROBE_SHARE = 0.004
"""Most time that is given to trying drafts where plain decoding is fastest, as a share."""
PROBE_NEWEST = 0.25
"""Weight of the newest try in what tries lose."""
PROBE_LEAST = 16
"""Fewest plain rounds between two such tries."""
RETURN_LEAST, RETURN_MOST = 4, 64
"""Plain rounds before a try where drafts are believed to pay and losses hold them back; doubled by every failure."""
REFRESH_SHARE, REFRESH_LEAST = 0.003, 16
"""Most time that is given to plain rounds where drafts pay, as a share, so that it is known what they take now; and
fewest drafted rounds between two of them. Where plain decoding is nearly as fast it has to be known best."""
MOST_LOST = USUAL * BOUND * WINDOW
"""Plain steps that one round counts as at most: more is a hiccup of the machine's, not a price of drafting."""
DOUBT = 512
"""Plain rounds after which costs that leave nothing to gain are measured again, in case they were a hiccup."""
LOOKS = 2
"""Rounds of a look at a depth that is not the best one, so that what it costs and yields is no belief."""
LOOK_SHARE = 0.001
"""Most time that is given to looking at a depth, as a share: what is slower is looked at less often."""
LOOK_LEAST = 256
"""Fewest rounds between two looks at the same depth."""
STALE = 16
"""Plain rounds after which what is expected of drafts is worked out anew: costs may have changed."""
FIRST_NEAR = 0.25
"""A depth that was not looked at yet is so at once if it is believed slower than the best by at most this share."""


class _Chosen(NamedTuple):
    """A decision, and why it was made."""

    decision: Decision
    risk: float = 0.0
    """Plain steps that it may lose."""
    why: Literal["plain", "best", "looked at", "held back", "tried", "doubted"] = "plain"
    behind: float = 0.0
    """Share by which it is believed to be slower than the best depth."""
    grades: np.ndarray = np.zeros(0, dtype=int)
    """Of all slots, when it was asked for; set by `decide`."""


class CostPolicy:
    """A `Policy`."""

    name = "cost"
    urgent = True

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
            ByDepth(
                deepest,
                max(nodes.values()),
                known[min(known, key=lambda rows: abs(rows - tier.least))] if known else (),
            )
            for tier in tiers
        ]
        self._scores = Scores(padded[-1])
        self._rounds = 0
        # (padded rows, depth) -> rounds of the look that goes on, and the round from which there may be the next.
        self._looks: dict[tuple[int, int], tuple[int, int]] = {}
        self._guard = Guard()
        self._since_plain = 0
        self._idle = 0  # plain rounds since drafts were last asked for
        self._lost = 0.0  # plain steps that a try with drafts has lost of late
        self._pause = RETURN_LEAST
        self._doubt = DOUBT
        self._paid = False  # the newest drafted round gained
        self._last = Decision(0)
        self._asked: tuple[int, Sequence[int]] = 0, ()
        self._offers: Offers | None = None  # for what was asked last; None: nothing but plain decoding
        self._observed = self._weighed = 0  # rounds, and how many there were when the offers were made
        self._flying: deque[_Chosen] = deque(maxlen=8)  # not observed yet
        self._learned = False  # something of acceptance since the offers were made
        self._ready: _Chosen | None = None  # what is to be decided next, if the same is asked
        self._counts = dict.fromkeys(sorted({0, *nodes}), 0)
        self._reasons: Counter[str] = Counter()

    # --- choosing ------------------------------------------------------------------------------------------------

    def decide(self, rows: int, slots: Sequence[int]) -> Decision:
        """See `Policy`."""
        chosen, self._ready = self._ready, None
        if chosen is None or self._asked != (rows, slots):
            if self._offers is None or self._asked != (rows, slots):
                self._weigh(rows, slots)
            chosen = self._chosen()
        self._last = chosen.decision
        self._flying.append(chosen._replace(grades=self._scores.grades))
        self._counts[chosen.decision.depth] += 1
        self._reasons[chosen.why] += 1
        if chosen.why == "doubted":
            self._doubt *= 2
        self._look(self._pad(rows), chosen)
        return chosen.decision

    def _may(self, risk: float, flying: Sequence[float]) -> bool:
        """Say whether an ordinary round may lose `risk`, while those in flight may lose `flying`.

        They count as no less than this one: what fits only beside a cheaper round could not be kept up.
        """
        open_risk = max(sum(flying), len(flying) * risk)
        return risk <= self._guard.usual and risk + open_risk <= self._guard.trying

    def _weigh(self, rows: int, slots: Sequence[int]) -> None:
        """Work out what is expected of each depth, if anything is known of it."""
        self._asked = rows, slots
        self._offers, self._weighed = None, self._observed
        padded = self._pad(rows)
        tier = tier_at(self._tiers, padded)
        depths = [depth for depth in self._tiers[tier].candidates if depth > 0]
        if not depths or not slots or not self.costs.knows_plain(padded):
            return
        if not any(self.costs.knows_draft(padded, depth) for depth in depths):
            depths = [min(depths, key=lambda depth: (abs(depth - self._start), depth))]
        by_depth = self._shares[tier]
        grades = self._scores.grades[list(slots)]
        made = np.cumprod(by_depth.drafted.shares()[grades], axis=1)
        reach = made[:, :1] * expected(by_depth.accepted.shares()[grades])
        self._offers = Offers(self.costs, self._nodes, rows, padded, tier, slots, depths, reach, made)

    def _chosen(self) -> _Chosen:
        """Choose for what was asked last."""
        offers, flying = self._offers, [chosen.risk for chosen in self._flying]  # what rounds on their way may lose
        if offers is None:
            return _Chosen(Decision(0, tier_at(self._tiers, self._pad(self._asked[0]))))
        tier, better = offers.tier, offers.better
        best = next((choice for choice in better if self._may(choice.risk, flying)), None)
        if best is not None:
            behind = 1.0 - offers.rows / offers.plain / best.rate
            on_its_way = any(chosen.decision.depth == 0 for chosen in self._flying)
            if self._since_plain >= max(REFRESH_LEAST, behind / REFRESH_SHARE) and not on_its_way:
                return _Chosen(Decision(0, tier))
            look = self._look_at(best, offers, flying)
            if look is not None:
                given, behind = offers.pruned(look, whole=True), 1.0 - look.rate / best.rate
                return _Chosen(Decision(given.depth, tier, given.limits), given.risk, "looked at", behind)
            given = offers.fastest if best is offers.choices[0] else offers.pruned(best)
            return _Chosen(Decision(given.depth, tier, given.limits), given.risk, "best")
        if better:
            safest = max(better, key=lambda choice: choice.rate / max(choice.risk, 1e-3))
            due = self._paid or self._idle >= self._pause
            return self._tried(safest, tier, flying) if due else _Chosen(Decision(0, tier), why="held back")
        return self._probe(offers, flying)

    def _look_at(self, best: Choice, offers: Offers, flying: Sequence[float]) -> Choice | None:
        """Return a depth that is due to be looked at instead of the best, if its few rounds may be risked now."""
        most = min(self._guard.usual, self._guard.trying - sum(flying))
        for choice in offers.choices:
            at = offers.padded, choice.depth
            due = self._looks.get(at)
            if choice is best or choice.risk > most or (due is not None and self._rounds < due[1]):
                continue
            behind = 1.0 - choice.rate / best.rate
            if due is not None or behind <= FIRST_NEAR:
                return choice
            self._looks[at] = 0, self._rounds + _pause(behind)
        return None

    def _probe(self, offers: Offers, flying: Sequence[float]) -> _Chosen:
        """Ask for drafts now and then where plain decoding is fastest: only so it is learned that it no longer is."""
        tier = offers.tier
        best = next((choice for choice in offers.choices if choice.depth > choice.loss), None)  # with all accepted
        if best is None:
            if self._idle < self._doubt or self._guard.trying - sum(flying) < UNKNOWN_RISK:
                return _Chosen(Decision(0, tier))
            depth = min(offers.choices, key=lambda choice: choice.risk).depth
            return _Chosen(Decision(depth, tier), UNKNOWN_RISK, "doubted")
        # Plain steps that are lost, as far as is known, if any drafts are made: without them it is asked again at once.
        some = max(1.0 - offers.drafting[0], 1e-3)
        lost = max(self._lost, (best.loss + 1.0 - best.tokens / offers.rows) / some)
        due = self._paid or self._idle >= max(PROBE_LEAST, ceil(lost / PROBE_SHARE))
        return self._tried(best, tier, flying) if due else _Chosen(Decision(0, tier))

    def _tried(self, choice: Choice, tier: int, flying: Sequence[float]) -> _Chosen:
        if choice.risk > self._guard.trying - sum(flying):
            return _Chosen(Decision(0, tier), why="held back")
        return _Chosen(Decision(choice.depth, tier), choice.risk, "tried")

    # --- learning ------------------------------------------------------------------------------------------------

    def observe(self, round: Round) -> None:
        """See `Policy`."""
        self._ready = None
        if not round.results:
            return
        self._observed += 1
        decision = max((result.decision for result in round.results), key=lambda decision: decision.depth)
        known = _Chosen(decision, grades=self._scores.grades)
        if any(chosen.decision is decision for chosen in self._flying):
            while (known := self._flying.popleft()).decision is not decision:
                pass
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
            before = self._scores.grades
            self._scores.skip(np.array([result.slot for result in round.results]))
            self._learned |= self._scores.grades is not before
            self._guard.add(0.0)
            return
        self._since_plain += 1
        self._rounds += 1
        made = any(result.drafted for result in asked)
        if self.costs.knows_plain(padded):
            took = self.costs.round(padded, width, depth) / self.costs.plain(padded)
            emitted = 1.0 + sum(result.accepted for result in round.results) / round.rows
            lost = min(took - emitted, MOST_LOST)
            self._guard.add(lost)
            if made:
                if known.why == "tried":
                    self._lost += PROBE_NEWEST * (lost - self._lost)
                self._paid = emitted > took
                if self._paid:
                    self._pause = RETURN_LEAST
                elif self._idle:
                    self._pause = min(2 * self._pause, RETURN_MOST)
        # A try without any drafts was none: the next one is not put off.
        self._idle = 0 if made else self._idle + 1
        self._learn(round.results, decision, known.grades)

    def learn(self) -> None:
        """See `Policy`: chooses what `decide` returns if it is asked for the same rows again.

        Where three rounds on their way could lose more than is allowed, each is counted as soon as it has ended.
        """
        if self._offers is None or self._learned or self._observed - self._weighed >= STALE:
            self._weigh(*self._asked)
        self._learned = False
        self._ready = self._chosen()
        risks = [choice.risk for choice in self._offers.better] if self._offers is not None else []
        self.urgent = 3.0 * max(risks, default=0.0) > self._guard.trying

    def _look(self, padded: int, chosen: _Chosen) -> None:
        """Count a round of a depth, be it a look or the best: what is timed anyway need not be looked at."""
        at = padded, chosen.decision.depth
        if chosen.decision.depth == 0 or chosen.why not in ("best", "looked at"):
            return
        rounds, due = self._looks.get(at, (0, 0))
        over = rounds + 1 >= LOOKS or self._rounds < due
        self._looks[at] = (0, self._rounds + _pause(chosen.behind)) if over else (rounds + 1, due)

    def _learn(self, results: Sequence[Result], decision: Decision, grades: np.ndarray) -> None:
        """Take in acceptance: of the rows that got drafts for the tier, and of every row for its request.

        `grades`: by slot, when drafts were asked for.
        """
        self._learned = True
        depth, shares = decision.depth, self._shares[decision.tier]
        slots, limits, drafted, accepted = np.array([(r.slot, r.limit, r.drafted, r.accepted) for r in results]).T
        asked = (limits > 0) & [result.decision is decision for result in results]
        made = asked & (drafted > 0)
        chain = self._nodes.get(depth, depth) == depth
        longest = np.minimum(limits, depth) if chain else np.where(limits > 0, depth, 0)  # path
        self._scores.add(slots[asked], np.minimum(drafted, longest)[asked], accepted[asked])
        if not asked.all():
            self._scores.skip(slots[~asked])
        grades = grades[slots]
        shares.drafted.add(grades[asked], limits[asked], drafted[asked])
        if made.any():
            shares.accepted.add(grades[made], longest[made], accepted[made])

    def forget(self, slot: int) -> None:
        """See `Policy`."""
        self._scores.forget(slot)
        self._offers = self._ready = None

    def report(self) -> dict[str, Any]:
        """See `Policy`."""
        return {
            "policy": self.name,
            "depth": self._last.depth,
            "rounds": {str(depth): count for depth, count in self._counts.items()},
            "looks": self._reasons["looked at"],
            "tries": self._reasons["tried"] + self._reasons["doubted"],
            "held_back": self._reasons["held back"],
            "lost": self._guard.lost,
            "tiers": [
                {"least": tier.least, "candidates": tier.candidates, "acceptance_by_depth": shares.accepted.pooled()}
                for tier, shares in zip(self._tiers, self._shares, strict=True)
            ],
            "measured": self.costs.measured().as_json(),
        }

    def _pad(self, rows: int) -> int:
        return next((each for each in self._padded if each >= rows), rows)


def _pause(behind: float) -> int:
    """Return the rounds until the next look at a depth that is slower than the best one by the share `behind`."""
    return max(LOOK_LEAST, ceil(LOOKS * behind / LOOK_SHARE))
