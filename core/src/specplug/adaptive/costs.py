"""What rounds take: tables of seconds that are measured, refreshed, and read between their entries."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence

from specplug.adaptive.config import Measured

NEWEST, NEWEST_STALE = 0.1, 0.3
"""Weight of a new time, once there are many: of fewer, it is that of one among them."""
STALE = 16
"""Newer times of other places from which what is known of a place is stale: more may have changed since."""
SURE = 2
"""Times after which one is believed: the first holds what happens once."""
DRAWN = 2.0
"""Times that a place's neighbours weigh as much as, while it was timed a few times only."""
SETTLED = 16
"""Times from which a place stands by itself."""
DOUBTED = 1.25
"""A place's only time counts as at most this multiple of what its neighbours say."""
MOST, MOST_STALE = 1.05, 1.25
"""A new time counts as at most this multiple of what was known, and at least its inverse: a hiccup is no trend."""
RECENT = 9
"""Newest times whose median ratio to what was known tells whether everything takes another time now."""
JUMP = 1.5
"""That ratio, or its inverse, from which all that is known is scaled by it."""


class Line:
    """Seconds over one number (tokens, or depth), known at some places: timed in real rounds, or taken for granted.

    What is taken for granted was timed under other circumstances (on empty steps, in another run), so its
    shape is trusted and its level is not: it is moved by what real times at other places came out above it.
    """

    def __init__(self) -> None:
        self._at: list[int] = []  # all known places, and those that are sure, both ascending
        self._sure: list[int] = []
        self._seconds: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._times = 0
        self._last: dict[int, int] = {}  # how many times there were when a place was timed last
        self._granted: dict[int, float] = {}
        self._moved: float | None = 0.0  # None: to be computed

    @property
    def entries(self) -> int:
        """How many places are known."""
        return len(self._at)

    def has(self, place: int, times: int = 1) -> bool:
        """Say whether `place` itself is known: from at least so many real times, or taken for granted."""
        return place in self._granted or self._count.get(place, 0) >= times

    def grant(self, place: int, seconds: float) -> None:
        """Take a time for granted until there are real ones."""
        _insert(self._at, place)
        self._granted[place] = seconds
        _insert(self._sure, place)

    def add(self, place: int, seconds: float) -> None:
        """Take in a real time. The second one may only lower the first, which often held what happens once."""
        _insert(self._at, place)
        count = self._count[place] = self._count.get(place, 0) + 1
        if count == SURE:
            _insert(self._sure, place)
        old = self._seconds.get(place, seconds)
        if count <= SURE:
            self._seconds[place] = min(old, seconds)
        else:
            stale = self._times - self._last[place] >= STALE
            most, weight = (MOST_STALE, NEWEST_STALE) if stale else (MOST, NEWEST)
            bounded = min(max(seconds, old / most), old * most)
            self._seconds[place] = old + max(weight, 1.0 / count) * (bounded - old)
        self._times += 1
        self._last[place] = self._times
        self._moved = None

    def get(self, place: int) -> float:
        """Return the seconds at `place`: its own times, drawn to the line through its neighbours while they are few."""
        own, count = self._seconds.get(place), self._count.get(place, 0)
        if own is None:
            return self._beside(place, self._at)
        if count >= SETTLED:
            return own
        if place in self._granted:
            others = self._taken(place)
        else:
            # The first place is that of plain steps, which take another way.
            known = [at for at in self._sure if at != place and at != self._at[0]]
            if len(known) < 2 or place == self._at[0]:
                return own
            others = self._beside(place, known)
        if count < SURE:
            own = min(own, DOUBTED * others)
        return (count * own + DRAWN * others) / (count + DRAWN)

    def times(self) -> Mapping[int, float]:
        """Return what is known."""
        return {place: self.get(place) for place in self._at}

    def _beside(self, place: int, at: Sequence[int]) -> float:
        """Return what the times at `at` (ascending) say of `place`; beyond the ends never less than there."""
        if place in self._granted:
            return self._taken(place)
        if len(at) == 1:
            return self._known(at[0])
        right = min(max(bisect_left(at, place), 1), len(at) - 1)
        low, high = at[right - 1], at[right]
        below, above = self._known(low), self._known(high)
        slope = (above - below) / (high - low)
        if low <= place <= high:
            return below + slope * (place - low)
        if place < low:
            return max(0.0, below - max(slope, 0.0) * (low - place))
        overall = (above - self._known(at[0])) / (high - at[0])  # two neighbours may differ by chance alone
        return above + max(slope, overall, 0.0) * (place - high)

    def _known(self, place: int) -> float:
        found = self._seconds.get(place)
        return self._taken(place) if found is None else found

    def _taken(self, place: int) -> float:
        """Return what was granted, moved by what real times came out above it."""
        if self._moved is None:
            above = [self._seconds[at] - was for at, was in self._granted.items() if self._count.get(at, 0) >= SURE]
            self._moved = sum(above) / len(above) if above else 0.0
        return max(0.0, self._granted[place] + self._moved)


class Paced(Line):
    """A `Line` that is scaled as a whole once most of the newest times say that everything takes another time now.

    Otherwise places that were timed before and after do not compare: the machine has got other work, or contexts of
    another length. Smaller changes are left to each place: what one place alone takes must not be blamed on all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ratios: deque[float] = deque(maxlen=RECENT)  # new times over what was known of their places

    def add(self, place: int, seconds: float) -> None:
        """See `Line`."""
        if self._count.get(place, 0) >= SURE and self._seconds[place] > 0.0:
            self._ratios.append(seconds / self._seconds[place])
            pace = sorted(self._ratios)[RECENT // 2] if len(self._ratios) == RECENT else 1.0
            if not 1.0 / JUMP <= pace <= JUMP:
                self._seconds = {at: pace * was for at, was in self._seconds.items()}
                self._granted = {at: pace * was for at, was in self._granted.items()}
                self._ratios.clear()
        super().add(place, seconds)


class Costs:
    """Seconds of a forward by (rows, tokens), and between a decision and the next forward by (rows, depth)."""

    def __init__(self, measured: Measured) -> None:
        """`measured`: what is known beforehand, and taken for granted."""
        self._verify: dict[int, Paced] = {}
        self._between: dict[int, Line] = {}
        for (rows, tokens), seconds in measured.verify.items():
            self.grant_verify(rows, tokens, seconds)
        for (rows, depth), seconds in measured.draft.items():
            self.grant_between(rows, depth, seconds)

    def knows_plain(self, rows: int) -> bool:
        """Say whether plain steps of so many rows were timed, more than one."""
        return self._has(self._verify, rows, rows) and self._has(self._between, rows, 0)

    def knows_draft(self, rows: int, depth: int) -> bool:
        """Say whether a round of this depth was timed, with so many rows or at the nearest number that was."""
        line = self._drafting(rows)
        return line is not None and line.has(depth)

    def grant_verify(self, rows: int, tokens: int, seconds: float) -> None:
        """Take the time of a forward for granted until real ones are known."""
        self._verify.setdefault(rows, Paced()).grant(_coarse(rows, tokens), seconds)

    def grant_between(self, rows: int, depth: int, seconds: float) -> None:
        """Take the time between a decision and the next forward for granted until real ones are known."""
        self._between.setdefault(rows, Line()).grant(depth, seconds)

    def add_verify(self, rows: int, tokens: int, seconds: float) -> None:
        """Take in the time of a forward."""
        self._verify.setdefault(rows, Paced()).add(_coarse(rows, tokens), seconds)

    def add_between(self, rows: int, depth: int, seconds: float) -> None:
        """Take in the time between a decision and the next forward."""
        self._between.setdefault(rows, Line()).add(depth, seconds)

    def plain(self, rows: int) -> float:
        """Return the seconds of a plain step; it must be known."""
        return self.round(rows, rows, 0)

    def verify(self, rows: int, tokens: int) -> float:
        """Return the seconds of a forward; 0.0 where nothing is known."""
        line = _nearest(self._verify, rows)
        if line is None:
            return 0.0
        found = line.get(_coarse(rows, tokens))
        if line.entries == 1 and tokens > rows:  # what more tokens take is as with another number of rows
            wide = _nearest({at: other for at, other in self._verify.items() if other.entries > 1}, rows)
            if wide is not None:
                found += max(0.0, wide.get(tokens) - wide.get(rows))
        return found

    def between(self, rows: int, depth: int) -> float:
        """Return the seconds from a decision for `depth` to the next forward; 0.0 where nothing is known."""
        line = _nearest(self._between, rows)
        if line is None:
            return 0.0
        found = line.get(depth)
        wide = self._drafting(rows)
        if wide is not None and wide is not line and depth > 0:
            found += max(0.0, wide.get(depth) - wide.get(0))
        return found

    def round(self, rows: int, tokens: int, depth: int) -> float:
        """Return the seconds of a round: drafts of `depth`, and a forward over `tokens` tokens."""
        return self.verify(rows, tokens) + self.between(rows, depth)

    def measured(self) -> Measured:
        """Return all that is known."""
        return Measured(
            {(rows, at): took for rows, line in self._verify.items() for at, took in line.times().items()},
            {(rows, at): took for rows, line in self._between.items() for at, took in line.times().items()},
        )

    def _drafting(self, rows: int) -> Line | None:
        """Return the nearest line that knows of any depth but 0."""
        line = self._between.get(rows)
        if line is not None and line.entries > line.has(0):
            return line
        return _nearest({at: line for at, line in self._between.items() if line.entries > line.has(0)}, rows)

    def _has(self, lines: Mapping[int, Line], rows: int, at: int) -> bool:
        line = lines.get(rows)
        return line is not None and line.has(at, SURE)


def _insert(places: list[int], place: int) -> None:
    """Put `place` where it belongs, unless it is there."""
    at = bisect_left(places, place)
    if at == len(places) or places[at] != place:
        places.insert(at, place)


def _coarse(rows: int, tokens: int) -> int:
    """Return `tokens` in steps of a quarter of the rows, so that a large batch's totals share entries.

    Rounded up, so that the entry of plain steps is theirs alone: with few drafts in it a forward takes longer by more
    than these tokens (another kernel or graph, rows of two widths), and plain steps would look as dear.
    """
    step = max(1, rows // 4)
    return rows - (rows - tokens) // step * step


def _nearest(lines: Mapping[int, Line], rows: int) -> Line | None:
    found = lines.get(rows)
    if found is None and lines:
        found = lines[min(lines, key=lambda other: abs(other - rows))]
    return found
