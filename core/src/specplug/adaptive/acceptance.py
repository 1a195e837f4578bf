"""How many drafts will be accepted: shares by depth, for requests by how well their newest drafts did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEMORY = 512
"""Rows after which an observation has lost most of its weight, as long as newer ones do not contradict it."""
EVIDENCE = 8.0
"""Logarithm of how much more likely newer observations have to be with another share, to be believed alone."""
PRIOR, PRIOR_MADE = 0.6, 0.99
"""Share of drafts accepted, and of drafts made, that is expected where nothing is known."""
PRIOR_ROWS = 2.0
"""Observations that the prior weighs as much as."""
KNOWN_ROWS = 6.0
"""Observations in each grade that shares from a file weigh as much as."""
POOLED_ROWS = 12.0
"""Observations that the share of all grades weighs as much as in that of one grade."""
EDGES = np.array((0.2, 0.5, 0.8))
"""Scores that part one grade of requests from the next."""
NEUTRAL = 0.5
"""Score of a request before its first drafts."""
NEWEST = 0.3
"""Weight of a request's newest round in its score."""
UNASKED = 8
"""Rounds without being asked for drafts after which a request is in a grade with those that nothing is known of."""
UNKNOWN = len(EDGES) + 1
"""That grade: the last one."""
GRADES = UNKNOWN + 1
_EVERY_GRADE = np.arange(GRADES)[:, None]
_LOWER_HIGHER = np.array((0.0, 0.5))[:, None, None]
SURE = 0.995
"""No share is believed to be above."""


class Scores:
    """How well each slot's newest drafts did, between 0 and 1, in grades.

    Drafts do well or badly for many rounds on end, be it that a request is an easy one or that it just repeats its
    prompt, so the newest rounds tell what to expect of the next, and by how much is learned (`ByDepth`). What they
    tell is soon out of date: a request that was not asked for a while is no better known than a new one.
    """

    def __init__(self, slots: int) -> None:
        self._scores = np.full(slots, NEUTRAL)
        self._unasked = np.full(slots, UNASKED)
        self.grades = np.full(slots, UNKNOWN)
        """int [slots]. Replaced when a grade changes, never in place: an array that was handed out stays as it was."""

    def add(self, slots: np.ndarray, most: np.ndarray, accepted: np.ndarray) -> None:
        """Take in the rows of one forward that had asked for drafts, [n] each: how many could and how many did pass.

        To be asked for drafts and to have none is as bad as a rejection.
        """
        self._scores[slots] += NEWEST * (accepted / np.maximum(1, most) - self._scores[slots])
        self._unasked[slots] = 0
        self._grade(slots)

    def skip(self, slots: np.ndarray) -> None:
        """Take in the rows of one forward that had not been asked for any, [n]."""
        self._unasked[slots] += 1
        self._grade(slots)

    def forget(self, slot: int) -> None:
        """Drop what is known of a slot."""
        self._unasked[slot] = UNASKED
        self._grade(np.array([slot]))

    def _grade(self, slots: np.ndarray) -> None:
        unknown = self._unasked[slots] >= UNASKED
        self._scores[slots[unknown]] = NEUTRAL
        grades = np.where(unknown, UNKNOWN, np.searchsorted(EDGES, self._scores[slots]))
        if (grades != self.grades[slots]).any():
            self.grades = self.grades.copy()
            self.grades[slots] = grades


class Shares:
    """Conditional shares by grade and number: of rows that came as far as a number, those that came to the next.

    A share is that of a long time, which tells numbers apart that are nearly as good, until observations since some
    time are much more likely with one half as high, or with half as many that fail: then it is theirs. (Cumulative
    sums of log-likelihood ratios, Page 1954, Biometrika 41.) A grade's shares are drawn towards those of all grades
    while it was seen a few times only.
    """

    def __init__(self, most: int, prior: float, known: Sequence[float] = ()) -> None:
        """`known`: shares to begin with, from number 1 on."""
        self._numbers = np.arange(1, most + 1)
        self._prior = prior
        begin = np.array(known[:most], dtype=float)
        # [2, grades, numbers]: rows that tried, and that came there.
        self._long = np.zeros((2, GRADES, most))
        self._long[:, :, : len(begin)] = KNOWN_ROWS * np.stack((np.ones(len(begin)), begin))[:, None]
        # [lower or higher, grades, numbers]: what speaks for such a share, and what was seen since it began to.
        self._evidence = np.zeros((2, GRADES, most))
        self._since = np.zeros((2, 2, GRADES, most))
        self._found: tuple[np.ndarray, list[float]] | None = None  # computed when asked for

    def add(self, grades: np.ndarray, limits: np.ndarray, came: np.ndarray) -> None:
        """Take in one forward's rows, [n] each: how far they could come, and how far they came."""
        of_grade = (grades == _EVERY_GRADE).astype(float)
        seen = of_grade @ (np.minimum(limits, (came + 1, came))[:, :, None] >= self._numbers)
        tried, got = seen
        share = np.minimum(SURE, np.maximum(1.0 - SURE, self.shares()))
        other = 0.5 * share + _LOWER_HIGHER
        ratio = got * np.log(other / share) + (tried - got) * np.log((1.0 - other) / (1.0 - share))
        # One forward's rows are often alike, so that many of them say less than as many forwards.
        self._evidence = np.maximum(0.0, self._evidence + ratio / np.sqrt(np.maximum(1.0, tried)))
        self._since = (self._since + seen) * (self._evidence > 0.0)[:, None]
        self._long = (1.0 - 1.0 / max(MEMORY, 2 * len(limits))) ** tried * self._long + seen
        if self._evidence.max() > EVIDENCE:
            for evidence, since in zip(self._evidence, self._since, strict=True):
                changed = evidence > EVIDENCE
                self._long[:, changed] = since[:, changed]
                self._evidence[:, changed] = self._since[:, :, changed] = 0.0
        self._found = None

    def shares(self) -> np.ndarray:
        """Return the share by grade and number, [grades, numbers], [:, 0] for number 1."""
        return self._computed()[0]

    def pooled(self) -> list[float]:
        """Return the share of all grades by number, [0] for 1; what is not known is as at the number before."""
        return self._computed()[1]

    def _computed(self) -> tuple[np.ndarray, list[float]]:
        if self._found is None:
            pooled, before = [], self._prior
            for tried, came in self._long.sum(1).T.tolist():
                before = (came + PRIOR_ROWS * before) / (tried + PRIOR_ROWS)
                pooled.append(before)
            tried, came = self._long
            self._found = (came + POOLED_ROWS * np.array(pooled)) / (tried + POOLED_ROWS), pooled
        return self._found


class ByDepth:
    """What is known of drafts in one tier."""

    def __init__(self, deepest: int, most: int, known: Sequence[float] = ()) -> None:
        """`most`: drafts of a row. `known`: shares accepted to begin with, from depth 1 on."""
        self.accepted = Shares(deepest, PRIOR, known)
        """Of drafts at a depth below an accepted one, those that are accepted."""
        self.drafted = Shares(most, PRIOR_MADE, [1.0] * most if known else ())
        """Of rows that ask for so many drafts and get all before, those that get it: what is not made costs nothing."""


def expected(shares: np.ndarray) -> np.ndarray:
    """Return the expected drafts accepted at each depth by each row, [n, depths] as `shares`, falling along a row."""
    return np.cumprod(np.minimum(SURE, shares), axis=1)
