"""The alarm for dead drafts: text is healthy, speculation is on, and nothing is ever accepted."""

from __future__ import annotations

import logging

log = logging.getLogger("specplug")

WINDOW = 200
"""Drafted rows after which the share is judged."""


class AcceptanceAlarm:
    """Rings when, over a window of drafted rows, fewer first drafts than `floor` (a share) were accepted.

    Depth 1 is what is watched: it is tried in every drafted row, and all deeper acceptance hangs on it.
    """

    def __init__(self, floor: float, owner: str) -> None:
        """`floor` 0 switches it off; `owner` is named in the log."""
        self.ringing = False
        """The newest window was below the floor."""
        self._floor = floor
        self._owner = owner
        self._rows = self._accepted = 0

    def add(self, rows: int, accepted: int) -> None:
        """Count one step's drafted rows, and those whose first draft was accepted."""
        self._rows += rows
        self._accepted += accepted
        if self._rows < WINDOW:
            return
        share = self._accepted / self._rows
        rings = share < self._floor
        if rings and not self.ringing:
            log.warning(
                "%s: %.1f %% of the first drafts were accepted over the last %d drafted rows, the floor is %.1f %%: "
                "check that the draft belongs to this model, or decode without it",
                *(self._owner, 100 * share, self._rows, 100 * self._floor),
            )
        self.ringing = rings
        self._rows = self._accepted = 0
