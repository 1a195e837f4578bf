"""How many drafts will be accepted: shares by depth, and how much single requests differ from them."""

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
ROW_MEMORY = 24
"""Rounds after which an observation of a single request has lost most of its weight."""
SPREAD = 0.1
"""Variance between requests' factors that is expected at first."""
SPREAD_DUE = 256.0
"""Due drafts, squared, that this expectation weighs as much as."""
SPREAD_MEMORY = 512
"""Rounds after which an observation of how much requests differ has lost most of its weight."""
SURE = 0.995
"""No share is believed to be above."""


class ByDepth:
    """Conditional acceptance by depth in one tier: accepted at j, of what stood below an accepted draft.

    A share is that of a long time, which tells depths apart that are nearly as good, until recent observations differ
    from it by more than chance: then it is theirs. (Two windows that are compared, as in ADWIN, Bifet & Gavalda 2007.)
    Rows that asked for drafts and got none are counted apart, in `made`: they cost nothing, and say nothing of
    the drafts that there are.
    """

    def __init__(self, deepest: int, known: Sequence[float] = ()) -> None:
        """`known`: shares to begin with, from depth 1 on."""
        self._depths = np.arange(1, deepest + 1)
        # [2, depths]: tried and accepted.
        self._long = np.zeros((2, deepest))
        begin = np.array(known[:deepest], dtype=float)
        self._long[:, : len(begin)] = MEMORY / 2 * np.stack((np.ones(len(begin)), begin))
        self._recent = self._long.copy()
        self._shares: list[float] | None = None  # computed when asked for
        self._asked = self._made = MEMORY / 2 if len(begin) else 1.0

    def add(self, limits: np.ndarray, accepted: np.ndarray) -> None:
        """Take in one forward's rows, [n] each."""
        seen = (np.minimum(limits, (accepted + 1, accepted))[:, :, None] >= self._depths).sum(1)
        tried, least = seen[0], 2 * len(limits)
        keep = (1.0 - 1.0 / max(MEMORY, least)) ** tried
        keep[tried == 0] = 1.0 - 1.0 / IDLE_MEMORY
        self._recent = keep * self._recent + seen
        self._long = (1.0 - 1.0 / max(LONG_MEMORY, least)) ** tried * self._long + seen
        tries, hits = self._recent
        share = np.minimum(1.0, self._long[1] / np.maximum(self._long[0], 1e-9))
        changed = abs(hits - tries * share) > 1.0 + CHANGE * np.sqrt(tries * share * (1.0 - share))
        self._long[:, changed] = self._recent[:, changed]
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
        """Let recent observations lose weight: nothing was observed."""
        self._recent *= 1.0 - 1.0 / IDLE_MEMORY

    def shares(self) -> list[float]:
        """Return the share by depth, [0] for depth 1; what is not known is as at the depth above."""
        if self._shares is None:
            self._shares = self._computed()
        return self._shares

    def _computed(self) -> list[float]:
        found, above = [], PRIOR
        for tried, hits in self._long.T.tolist():
            above = (hits + PRIOR_ROWS * above) / (tried + PRIOR_ROWS)
            found.append(above)
        return found


class ByRow:
    """How a slot's request differs from its tier: a factor on every share.

    It is what was accepted of its drafts over what the tier's shares let expect of the same drafts, so that a
    request is not taken for a better one because less was asked of it; and it is drawn towards 1 by as much as such
    a difference is chance, given how much requests were seen to differ (empirical Bayes, normal on normal).
    """

    def __init__(self, slots: int, deepest: int) -> None:
        # [slots, depths]: drafts that stood below an accepted one, and the same with squared weights.
        self._tried = np.zeros((slots, deepest))
        self._squared = np.zeros((slots, deepest))
        self._hits = np.zeros(slots)
        self._depths = np.arange(1, deepest + 1)
        # Sums over rounds: what was above expectation, squared and less what chance gives; what was due, squared. Their
        # ratio is the variance between factors.
        self._spread, self._due = SPREAD * SPREAD_DUE, SPREAD_DUE

    def add(self, slots: np.ndarray, limits: np.ndarray, accepted: np.ndarray, shares: Sequence[float]) -> None:
        """Take in one forward's rows, [n] each, and the tier's `shares` by depth.

        Limit 0: nothing was tried, and what is known loses weight.
        """
        keep = 1.0 - 1.0 / ROW_MEMORY
        tried = np.minimum(limits, accepted + 1)[:, None] >= self._depths
        self._tried[slots] = keep * self._tried[slots] + tried
        self._squared[slots] = keep**2 * self._squared[slots] + tried
        self._hits[slots] = keep * self._hits[slots] + np.minimum(limits, accepted)
        due, above, chance = self._against(slots, shares)
        keep = 1.0 - 1.0 / SPREAD_MEMORY
        self._spread = keep * self._spread + float((above**2 - chance).mean())
        self._due = keep * self._due + float((due**2).mean())

    def forget(self, slot: int) -> None:
        """Drop what is known of a slot."""
        self._tried[slot] = self._squared[slot] = self._hits[slot] = 0.0

    def factors(self, slots: Sequence[int], shares: Sequence[float]) -> np.ndarray:
        """Return each slot's share over the tier's `shares` by depth, [n]; 1.0 where nothing is known of it."""
        due, above, chance = self._against(np.array(slots, dtype=int), shares)
        between = max(0.0, self._spread / self._due)
        weight = between * due / np.maximum(between * due**2 + chance, 1e-9)
        found: np.ndarray = np.maximum(0.0, 1.0 + weight * above)
        return found

    def _against(self, slots: np.ndarray, shares: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, [n] each: accepted drafts that were due, how many more there were, and the variance of that."""
        known = np.asarray(shares)
        due = self._tried[slots] @ known
        return due, self._hits[slots] - due, self._squared[slots] @ (known * (1.0 - known))


def expected(shares: Sequence[float], factors: np.ndarray) -> np.ndarray:
    """Return the expected drafts accepted at each depth by each row, [n, depths], falling along a row."""
    each = np.minimum(SURE, factors[:, None] * np.asarray(shares))
    return np.cumprod(each, axis=1)
