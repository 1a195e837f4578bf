"""The shapes that steps are padded to, so that a few graphs serve every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """Rows and tokens of a padded step."""

    rows: int
    tokens: int


class Buckets:
    """A ladder of row counts, and for each a ladder of token totals that ragged rows share."""

    def __init__(self, slots: int, width: int, most: int) -> None:
        """`slots`: most rows; `width`: most tokens of a row that verifies, the root included; `most`: buckets at most.

        Where the ladders have more rungs than `most`, token totals between the plain step's and the widest
        are given up first, those of few rows last; then the widest; then row counts, every other one.
        """
        self.rows = row_ladder(slots)
        while len(self.rows) > most:
            self.rows = self.rows[::-2][::-1]
        every = {rows: token_ladder(rows, width) for rows in self.rows}
        kept = {rows: [totals[0]] for rows, totals in every.items()}
        left = most - len(kept)
        # The widest rung of each next, then those between, always of the fewest rows first.
        widest = [Bucket(rows, totals[-1]) for rows, totals in every.items()]
        between = [Bucket(rows, total) for rows, totals in every.items() for total in totals[1:-1]]
        for rows, total in (*widest, *between):
            if left > 0 and total not in kept[rows]:
                kept[rows].append(total)
                left -= 1
        self._totals: dict[int, Sequence[int]] = {rows: sorted(totals) for rows, totals in kept.items()}
        self.all = sorted((Bucket(rows, total) for rows, totals in kept.items() for total in totals), reverse=True)
        """Every bucket, largest first: the order in which memory of one pool is reused best."""

    @property
    def tokens(self) -> int:
        """Most tokens of a bucket: not always the first one's, where few rows draft and many do not."""
        return max(bucket.tokens for bucket in self.all)

    def rows_for(self, rows: int) -> int:
        """Return the smallest rung that holds `rows`."""
        return next(rung for rung in self.rows if rung >= rows)

    def fit(self, rows: int, tokens: int) -> Bucket | None:
        """Return the smallest bucket that holds a step, of the fewest rows that have one; None if there is none."""
        for rung in self.rows:
            if rung >= rows:
                total = next((total for total in self._totals[rung] if total >= tokens), None)
                if total is not None:
                    return Bucket(rung, total)
        return None


def row_ladder(slots: int) -> list[int]:
    """Return 1, 2, 4, 8, then steps of half a power of two, up to `slots`."""
    found = [1, 2, 4, 8]
    while found[-1] < slots:
        top = found[-1]
        found += [top + top // 2, 2 * top]
    return [*(rows for rows in found if rows < slots), slots]


def token_ladder(rows: int, width: int) -> list[int]:
    """Return token totals for `rows` rows of 1 to `width` tokens: a plain step, a few wide rows, all of them wide."""
    found = [rows]
    one = rows + width - 1  # one row drafts, the others do not
    if width > 1:
        found.append(-(-one // 8) * 8 if rows > 1 else one)
    each = 2
    while each < width:
        found.append(rows * each)
        each *= 2
    found.append(rows * width)
    return sorted({min(total, rows * width) for total in found})
