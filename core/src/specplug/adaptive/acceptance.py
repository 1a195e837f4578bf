"""How many drafts will be accepted: shares by depth, for requests by how well their newest drafts did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEMORY = 48
"""Rows after which a recent observation has lost most of its weight; a large batch's rows count as one another's."""
LONG_MEMORY = 512
"""The same for what is believed as long as recent observations do not contradict it."""
IDLE_MEMORY = 64
"""Rounds after which recent observations of what is not observed any more have lost most of their weight."""
CHANGE = 3.0
"""Standard deviations by which recent observations must differ from what is believed to take its place."""
PRIOR = 0.6
"""Share expected where nothing is known."""
PRIOR_ROWS = 2.0
"""Observations that the prior weighs as much as."""
POOLED_ROWS = 12.0
"""Observations that the share of all grades weighs as much as in that of one grade."""
EDGES = np.array((0.2, 0.5, 0.8))
"""Scores that part one grade of requests from the next."""
NEUTRAL = 0.5
"""Score of a request that nothing is known of."""
NEWEST = 0.3
"""Weight of a request's newest round in its score."""
FADING = 0.03
"""Share of the way to `NEUTRAL` that a score goes in a drafted round of others: so it is asked for some again."""
GRADES = len(EDGES) + 1
_EVERY_GRADE = np.arange(GRADES)[:, None]
SURE = 0.995
"""No share is believed to be above."""


class Scores:
    """How well each slot's newest drafts did, between 0 and 1, in grades.

    Drafts do well or badly for many rounds on end, be it that a request is an easy one or that it just repeats its
    prompt, so the newest rounds tell what to expect of the next, and by how much is learned (`ByDepth`).
    """

    def __init__(self, slots: int) -> None:
        self._scores = np.full(slots, NEUTRAL)
        self.grades = np.searchsorted(EDGES, self._scores)
        """int [slots]. The array is replaced, never changed in place: one that was handed out stays as it was."""

    def add(self, slots: np.ndarray, asked: np.ndarray, most: np.ndarray, accepted: np.ndarray) -> None:
        """Take in one forward's rows, [n] each: if drafts were asked for, how many could and how many did pass.

        To be asked for drafts and to have none is as bad as a rejection.
        """
        scores = self._scores[slots]
        weight, aim = np.where(asked, NEWEST, FADING), np.where(asked, accepted / np.maximum(1, most), NEUTRAL)
        self._set(slots, scores + weight * (aim - scores))

    def forget(self, slot: int) -> None:
        """Drop what is known of a slot."""
        self._set(np.array([slot]), np.array([NEUTRAL]))

    def _set(self, slots: np.ndarray, scores: np.ndarray) -> None:
        self._scores[slots] = scores
        self.grades = self.grades.copy()
        self.grades[slots] = np.searchsorted(EDGES, scores)


class ByDepth:
    """Conditional acceptance by grade and depth in one tier: accepted at j, of what stood below an accepted draft.

    A share is that of a long time, which tells depths apart that are nearly as good, until recent observations differ
    from it by more than chance: then it is theirs. (Two windows that are compared, as in ADWIN, Bifet & Gavalda 2007.)
    A grade's shares are drawn towards those of all grades while it was seen a few times only. How many drafts there
    are of those that were asked for is counted apart, in `made`: those that are not cost nothing.
    """

    def __init__(self, deepest: int, most: int, known: Sequence[float] = ()) -> None:
        """`most`: drafts of a row. `known`: shares to begin with, from depth 1 on."""
        self._depths = np.arange(1, deepest + 1)
        begin = np.array(known[:deepest], dtype=float)
        rows = MEMORY / 2 / GRADES
        # [2, grades, depths]: tried and accepted.
        self._long = np.zeros((2, GRADES, deepest))
        self._long[:, :, : len(begin)] = rows * np.stack((np.ones(len(begin)), begin))[:, None]
        self._recent = self._long.copy()
        self._found: tuple[np.ndarray, list[float]] | None = None  # computed when asked for
        # [2, grades, most]: rows that had asked for so many drafts and got all before this one, and that got it.
        self._made = np.full((2, GRADES, most), rows if len(begin) else 1.0 / GRADES)
        self._numbers = np.arange(1, most + 1)

    def add(self, grades: np.ndarray, limits: np.ndarray, accepted: np.ndarray) -> None:
        """Take in one forward's rows, [n] each."""
        seen = _seen(grades, limits, accepted, self._depths)
        tried, least = seen[0], 2 * len(limits)
        keep = (1.0 - 1.0 / max(MEMORY, least)) ** tried
        keep[tried == 0] = 1.0 - 1.0 / IDLE_MEMORY
        self._recent = keep * self._recent + seen
        self._long = (1.0 - 1.0 / max(LONG_MEMORY, least)) ** tried * self._long + seen
        tries, hits = self._recent
        share = np.minimum(1.0, self._long[1] / np.maximum(self._long[0], 1e-9))
        changed = abs(hits - tries * share) > 1.0 + CHANGE * np.sqrt(tries * share * (1.0 - share))
        self._long[:, changed] = self._recent[:, changed]
        self._found = None

    def fill(self, grades: np.ndarray, limits: np.ndarray, drafted: np.ndarray) -> None:
        """Take in a forward's rows that had asked for drafts, [n] each: how many, and how many there were."""
        seen = _seen(grades, limits, drafted, self._numbers)
        self._made = (1.0 - 1.0 / max(MEMORY, 2 * len(limits))) ** seen[0] * self._made + seen

    def idle(self) -> None:
        """Let recent observations lose weight: nothing was observed."""
        self._recent *= 1.0 - 1.0 / IDLE_MEMORY

    @property
    def made(self) -> np.ndarray:
        """Share of the rows that get at least 1, 2, ... drafts, of those that ask for as many, [grades, most]."""
        asked, got = self._made
        pooled = got.sum(0) / asked.sum(0)
        return np.cumprod((got + POOLED_ROWS * pooled) / (asked + POOLED_ROWS), axis=1)

    def shares(self) -> np.ndarray:
        """Return the share by grade and depth, [grades, depths], [:, 0] for depth 1."""
        return self._computed()[0]

    def pooled(self) -> list[float]:
        """Return the share of all grades by depth, [0] for depth 1; what is not known is as at the depth above."""
        return self._computed()[1]

    def _computed(self) -> tuple[np.ndarray, list[float]]:
        if self._found is None:
            pooled, above = [], PRIOR
            for tried, hits in self._long.sum(1).T.tolist():
                above = (hits + PRIOR_ROWS * above) / (tried + PRIOR_ROWS)
                pooled.append(above)
            tries, accepted = self._long
            self._found = (accepted + POOLED_ROWS * np.array(pooled)) / (tries + POOLED_ROWS), pooled
        return self._found


def _seen(grades: np.ndarray, limits: np.ndarray, came: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Count rows that could come as far as each number, and that did, [2, grades, numbers]; all others are [n]."""
    of_grade = (grades == _EVERY_GRADE).astype(float)
    found: np.ndarray = of_grade @ (np.minimum(limits, (came + 1, came))[:, :, None] >= numbers)
    return found


def expected(shares: np.ndarray) -> np.ndarray:
    """Return the expected drafts accepted at each depth by each row, [n, depths] as `shares`, falling along a row."""
    return np.cumprod(np.minimum(SURE, shares), axis=1)
