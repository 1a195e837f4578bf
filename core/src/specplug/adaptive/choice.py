"""What a round of each depth is expected to yield and to take, for the requests that decode now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specplug.adaptive.costs import Costs

UNKNOWN_RISK = 2.0
"""Plain steps that a round of unknown cost is taken to lose at most."""
SELDOM = 0.01
"""Numbers of rows with drafts that are less likely than this are left out of what a round is expected to take."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A depth, what it would yield, and the drafts it would give each slot."""

    depth: int
    tokens: float
    """Expected, of all rows together."""
    seconds: float
    """Expected, too: not every row that asks for drafts gets them."""
    loss: float
    """Plain steps that are lost on average if every draft is rejected."""
    risk: float
    """The most that are lost then."""
    limits: Mapping[int, int] = field(default_factory=dict)
    """As in `Decision`."""

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else float("inf")


@dataclass(frozen=True)
class Offers:
    """One batch, and what is known of it at one time; the time of its plain steps must be known."""

    costs: Costs
    nodes: Mapping[int, int]
    """Most drafts of a row, by depth."""
    rows: int
    padded: int
    tier: int
    slots: Sequence[int]
    """Slots of the rows that may have drafts."""
    depths: Sequence[int]
    """That may be chosen, without 0."""
    reach: np.ndarray
    """float [len(slots), depths]: chance that a row that asks for it has its draft at each depth accepted."""
    made: np.ndarray
    """float [len(slots), most drafts]: chance that a row that asks for so many drafts gets as many."""

    @cached_property
    def plain(self) -> float:
        """Seconds of a plain step."""
        return self.costs.plain(self.padded)

    @cached_property
    def drafting(self) -> Sequence[float]:
        """Chance that no row gets any drafts, that one does, that two do, ..., if all ask for some."""
        return _counts(self.made[:, 0])

    @cached_property
    def choices(self) -> Sequence[Choice]:
        """What comes of every row asking for all drafts of each depth; the fastest first."""
        tokens = (self.rows + self.reach.sum(0).cumsum()).tolist()
        made, count = self.made.sum(0).cumsum().tolist(), len(self.slots)
        found = []
        for depth in self.depths:
            nodes = self.nodes[depth]
            found.append(self._choice(depth, tokens[depth - 1], count * nodes, made[nodes - 1], self.drafting))
        return sorted(found, key=lambda choice: choice.rate, reverse=True)

    @cached_property
    def fastest(self) -> Choice:
        """The first of `choices`, pruned."""
        return self.pruned(self.choices[0])

    @cached_property
    def better(self) -> Sequence[Choice]:
        """Those of `choices` that are expected to be faster than plain decoding."""
        plain = self.rows / self.plain
        return [choice for choice in self.choices if choice.rate > plain]

    def pruned(self, choice: Choice, whole: bool = False) -> Choice:
        """Take drafts from rows where they are worth less than the time they cost, if the whole gains by it.

        `whole`: a row gets all drafts or none. What is thought of deep drafts is not learned without any.
        """
        depth, nodes, count = choice.depth, self.nodes[choice.depth], len(self.slots)
        if count < 2:
            return choice
        made, reach = self.made[:, :nodes], self.reach[:, :depth]
        width = float(made.sum())
        wide, bare = (self.costs.verify(self.padded, round(self.padded + more)) for more in (width, 0))
        if wide <= bare:
            return choice
        price = choice.rate * (wide - bare) / width * made  # tokens that one more draft asked for has to yield
        if nodes == depth and not whole:  # a chain, of which every leading part is one
            wanted = np.logical_and.accumulate(reach >= price, axis=1)
            most = wanted.sum(1)
        else:
            wanted = np.broadcast_to((reach.sum(1) >= price.sum(1))[:, None], reach.shape)
            most = np.where(wanted[:, 0], nodes, 0)
        drafts = int(most.sum())
        if drafts in (0, count * nodes):
            return choice
        limits = {slot: each for slot, each in zip(self.slots, most.tolist(), strict=True) if each < nodes}
        tokens = self.rows + float(reach[wanted].sum())
        width = float(made[np.arange(nodes) < most[:, None]].sum())
        drafting = self.drafting if most.all() else _counts(made[most > 0, 0])
        pruned = self._choice(depth, tokens, drafts, width, drafting, limits)
        return pruned if pruned.rate > choice.rate else choice

    def _choice(
        self,
        depth: int,
        tokens: float,
        drafts: int,
        made: float,
        drafting: Sequence[float],
        limits: Mapping[int, int] | None = None,
    ) -> Choice:
        """Return a round for which all rows together ask for `drafts`.

        `made`: how many are expected of these; `drafting`: chance that so many rows get any. A forward's time is not
        in proportion to its tokens, so that with few rows that get some it is not that of the mean width.
        """
        costs, padded = self.costs, self.padded
        between = costs.between(padded, depth)
        each = made / max(sum(rows * chance for rows, chance in enumerate(drafting)), 1e-9)
        likely = [(rows, chance) for rows, chance in enumerate(drafting) if chance >= SELDOM]
        forward = sum(chance * costs.verify(padded, round(padded + rows * each)) for rows, chance in likely)
        seconds = between + forward / sum(chance for _, chance in likely)
        base = self.plain
        risk = max(seconds, between + costs.verify(padded, padded + drafts)) / base - 1.0
        if not costs.knows_draft(padded, depth):
            risk = max(risk, UNKNOWN_RISK)
        return Choice(depth, tokens, seconds, seconds / base - 1.0, risk, limits or {})


def _counts(chances: np.ndarray) -> Sequence[float]:
    """Return the chances that 0, 1, ... of independent events happen, given each one's.

    Their generating function, a product, at the roots of unity, and back (Fernandez & Williams 2010, IEEE TAES 46).
    """
    numbers = len(chances) + 1
    roots = np.exp(-2j * np.pi / numbers * np.arange(numbers))[:, None]
    found: list[float] = np.fft.ifft((1.0 - chances + chances * roots).prod(1)).real.tolist()
    return found
