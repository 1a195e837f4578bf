"""How many drafts will be accepted: shares by depth, and how much single requests differ from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEMORY = 48
"""Rows after which an observation has lost most of its weight; a large batch's rows count as one another's."""
IDLE_MEMORY = 64
"""Rounds after which what is not observed any more has lost most of its weight, so that it is tried again."""
PRIOR = 0.6
"""Share expected where nothing is known."""
PRIOR_ROWS = 2.0
"""Observations that the prior weighs as much as."""
ROW_MEMORY = 24
"""Rounds after which an observation of a single request has lost most of its weight."""
ROW_PRIOR = 8.0
"""Observations that the tier's share weighs as much as, for a single request."""
SURE = 0.995
"""No share is believed to be above."""


class ByDepth:
    """Conditional acceptance by depth in one tier: accepted at j, of what stood below an accepted draft.

    Rows that asked for drafts and got none are counted apart, in `made`: they cost nothing, and say nothing of
    the drafts that there are.
    """

    def __init__(self, deepest: int, known: Sequence[float] = ()) -> None:
        """`known`: shares to begin with, from depth 1 on."""
        self._tried = np.zeros(deepest)
        self._hits = np.zeros(deepest)
        self._depths = np.arange(1, deepest + 1)
        begin = np.array(known[:deepest], dtype=float)
        self._tried[: len(begin)] = MEMORY / 2
        self._hits[: len(begin)] = MEMORY / 2 * begin
        self._shares: list[float] | None = None  # computed when asked for
        self._asked = self._made = MEMORY / 2 if len(begin) else 1.0

    def add(self, limits: np.ndarray, accepted: np.ndarray) -> None:
        """Take in one forward's rows, [n] each. Depths without an observation lose weight slowly."""
        reached = np.minimum(limits, accepted + 1)
        tried = (reached[:, None] >= self._depths).sum(0)
        hits = (np.minimum(accepted, limits)[:, None] >= self._depths).sum(0)
        keep = (1.0 - 1.0 / max(MEMORY, 2 * len(limits))) ** tried
        keep[tried == 0] = 1.0 - 1.0 / IDLE_MEMORY
        self._tried = keep * self._tried + tried
        self._hits = keep * self._hits + hits
        self._shares = None

    @property
    def made(self) -> float:
        """Share of the rows that get any drafts, of those that are asked for some."""
        return self._made / self._asked

    def fill(self, asked: int, made: int) -> None:
        """Take in how many rows of a forward had asked for drafts, and how many of them got any."""
        keep = (1.0 - 1.0 / max(MEMORY, 2 * asked)) ** asked
        self._asked = keep * self._asked + asked
        self._made = keep * self._made + made

    def idle(self) -> None:
        """Let all that is known lose weight: nothing was observed."""
        self._tried *= 1.0 - 1.0 / IDLE_MEMORY
        self._hits *= 1.0 - 1.0 / IDLE_MEMORY
        self._shares = None

    def shares(self) -> list[float]:
        """Return the share by depth, [0] for depth 1; what is not known is as at the depth above."""
        if self._shares is None:
            self._shares = self._computed()
        return self._shares

    def _computed(self) -> list[float]:
        found, above = [], PRIOR
        for tried, hits in zip(self._tried.tolist(), self._hits.tolist(), strict=True):
            above = (hits + PRIOR_ROWS * above) / (tried + PRIOR_ROWS)
            found.append(above)
        return found

    @property
    def pooled(self) -> float:
        """The share over all depths together."""
        return float((self._hits.sum() + PRIOR_ROWS * PRIOR) / (self._tried.sum() + PRIOR_ROWS))


class ByRow:
    """How a slot's request differs from its tier: a factor on every share.

    It is what was accepted of its drafts over what the tier's shares had let expect of the same drafts, so that a
    request is not taken for a better one because less was asked of it.
    """

    def __init__(self, slots: int) -> None:
        self._due = np.zeros(slots)
        self._hits = np.zeros(slots)

    def add(self, slots: np.ndarray, limits: np.ndarray, accepted: np.ndarray, shares: Sequence[float]) -> None:
        """Take in one forward's rows, [n] each, and the tier's `shares` by depth before it.

        Limit 0: nothing was tried, and what is known loses weight.
        """
        keep = 1.0 - 1.0 / ROW_MEMORY
        due = np.cumsum([0.0, *shares])[np.minimum(limits, accepted + 1)]
        self._due[slots] = keep * self._due[slots] + due
        self._hits[slots] = keep * self._hits[slots] + np.minimum(limits, accepted)

    def forget(self, slot: int) -> None:
        """Drop what is known of a slot."""
        self._due[slot] = self._hits[slot] = 0.0

    def factors(self, slots: Sequence[int], pooled: float) -> np.ndarray:
        """Return each slot's share over the tier's, [n]; 1.0 where nothing is known of it.

        `pooled`: the tier's share over all depths, at which `ROW_PRIOR` observations are expected.
        """
        at = list(slots)
        prior = ROW_PRIOR * pooled
        return (self._hits[at] + prior) / (self._due[at] + prior)


def expected(shares: Sequence[float], factors: np.ndarray) -> np.ndarray:
    """Return the expected drafts accepted at each depth by each row, [n, depths], falling along a row."""
    each = np.minimum(SURE, factors[:, None] * np.asarray(shares))
    return np.cumprod(each, axis=1)
