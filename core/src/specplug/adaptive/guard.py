"""A bound on what trying may cost: no window of steps may be slower than plain decoding by more than a share."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

WINDOW = 200
"""Steps over which the bound holds."""
BOUND = 0.03
"""Most time lost in a window, as a share of plain decoding's."""
USUAL = 0.7
"""Share of the bound that ordinary rounds may use up."""
TRYING = 0.93
"""Share of the bound that tries may use up as well: what is left of it brings drafting back after losses."""


class Guard:
    """Counts what rounds lost against plain decoding, in plain steps, and says what may be risked.

    A round that takes t plain steps and emits e tokens a row loses t - e. Whatever comes next may be plain,
    which neither loses nor gains, so every run of recent rounds has to stay within the bound by itself: gains
    before it do not count.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW - 1)
        self._most = 0.0  # what has been lost is no more than this

    def add(self, loss: float) -> None:
        """Take in a finished round; negative is a gain."""
        self._losses.append(loss)
        self._most = max(0.0, self._most + loss)

    @property
    def lost(self) -> float:
        """The most that any run of rounds up to now has lost; at least 0.0."""
        if self._most > 0.0:
            self._most = max(0.0, max(accumulate(reversed(self._losses)), default=0.0))
        return self._most

    @property
    def usual(self) -> float:
        """What an ordinary round may lose now."""
        return USUAL * BOUND * WINDOW - self.lost

    @property
    def trying(self) -> float:
        """What a try may lose now."""
        return TRYING * BOUND * WINDOW - self.lost
