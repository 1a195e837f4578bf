"""What a policy is told and asked, once a step. Numbers of the host only; no policy waits for anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Decision(NamedTuple):
    """How far to draft for one round. Travels with its drafts, so that what comes of them is told apart."""

    depth: int
    """Longest path wanted; 0: no drafts."""
    tier: int = 0
    """Index of the tier in which it was made."""
    limits: Mapping[int, int] = {}
    """Slot -> most drafts, for slots that shall have fewer than the plan of this depth."""


class Result(NamedTuple):
    """What became of one request's row in a decode forward. Set by the engine."""

    slot: int
    decision: Decision
    """Under which its drafts were made; its depth is 0 where none were wanted of the step."""
    limit: int
    """Most drafts that were asked for; 0 for a row that could not have any."""
    drafted: int
    """Drafts that were verified."""
    accepted: int
    """Longest accepted path, whatever the stop rules made of it."""


class Round(NamedTuple):
    """One target forward over decode rows. Set by the engine after its results are known."""

    rows: int
    """Rows of the forward that decode."""
    tokens: int
    """Tokens of these rows, drafts included."""
    results: Sequence[Result]
    verify: float | None = None
    """Seconds of the forward and of what decides on it; None where other work was in it, or it is not known."""
    between: float | None = None
    """Seconds from the decision before to the begin of this forward, drafting included; None likewise."""


class Policy(Protocol):
    """Chooses depths. One per engine, called in the order of the steps."""

    urgent: bool
    """A step is to be told before the next decision, not after it. Set by the policy; the device may wait for it."""

    def decide(self, rows: int, slots: Sequence[int]) -> Decision:
        """Choose for the next round: `rows` requests decode, those in `slots` may have drafts."""

    def observe(self, round: Round) -> None:
        """Take in what a forward came to. Several decisions may have been made since those it verified."""

    def learn(self) -> None:
        """Work out beforehand what `decide` can be spared. Called after `observe`.

        Where steps overlap the device has its next step by then, while it may wait for `decide`.
        """

    def forget(self, slot: int) -> None:
        """A slot is another request's from now on."""

    def report(self) -> dict[str, Any]:
        """Return what it is doing, as plain JSON data."""


class Forced:
    """Depths given beforehand, one for each round; the last one stays."""

    name = "fixed"
    urgent = False

    def __init__(self, depths: Iterable[int]) -> None:
        self._depths = list(depths)
        self._at = 0
        self._decisions = [Decision(depth) for depth in self._depths]

    def decide(self, rows: int, slots: Sequence[int]) -> Decision:
        """See `Policy`."""
        at = self._at
        if at + 1 < len(self._decisions):
            self._at += 1
        return self._decisions[at]

    def observe(self, round: Round) -> None:
        """See `Policy`: nothing is learned."""

    def learn(self) -> None:
        """See `Policy`."""

    def forget(self, slot: int) -> None:
        """See `Policy`."""

    def report(self) -> dict[str, Any]:
        """See `Policy`."""
        return {"policy": self.name, "depth": self._decisions[self._at].depth}
