"""What each query of the CPU's attention sees, by values that say which keys were averaged."""

import torch

from specplug.models.base import KVGeometry
from specplug.runtime.attention.torch import AttentionRow, RowPlan
from specplug.runtime.kv import PagePool


def seen(rows: list[AttentionRow], tokens: list[int], window: int | None = None) -> list[float]:
    """Return for each query the sum of ``2 ** index`` over the tokens it sees; `tokens`: how many each slot holds."""
    pages = PagePool(slots=len(rows), pages=16, page_size=2, max_tokens=16)
    keys = torch.zeros(pages.rows_with_trash, 1, 1)
    values = torch.full((pages.rows_with_trash, 1, 16), float("nan"))  # of what nobody holds
    for row, count in zip(rows, tokens, strict=True):
        assert pages.reserve(row.slot, count)
        values[torch.from_numpy(pages.rows(row.slot, 0, count)), 0] = torch.eye(16)[:count]
    queries = torch.zeros(sum(row.q_len for row in rows), 1, 1)  # so that all that is seen weighs the same
    found = RowPlan(rows, pages).attend(keys, values, KVGeometry(1, 1, 16, window), queries)
    return [float((2.0 ** torch.arange(16))[weights > 0].sum()) for weights in found[:, 0].nan_to_num(nan=1.0)]


def bits(*indices: int) -> float:
    return float(sum(2**index for index in indices))


def test_a_short_row_beside_a_long_one_reads_nothing_of_others() -> None:
    # Breaks with: padding that points at pages of nobody, whose NaN comes through a weight of 0.
    rows = [AttentionRow(0, 1, 2), AttentionRow(1, 9, 2)]
    assert seen(rows, [3, 11]) == [bits(0, 1), bits(0, 1, 2), bits(*range(10)), bits(*range(11))]


def test_a_window_counts_positions_and_not_places_in_a_tree() -> None:
    # Nodes 2, 3 and 4 are a path below two siblings: at indices 7, 8, 9, at positions 5, 6, 7.
    tree = AttentionRow(0, 4, 6, parents=[-1, -1, -1, 2, 3])
    assert seen([tree], [10], window=2) == [bits(3, 4), bits(4, 5), bits(4, 6), bits(4, 7), bits(7, 8), bits(8, 9)]
    assert seen([tree], [10])[-1] == bits(0, 1, 2, 3, 4, 7, 8, 9)
    chain = AttentionRow(0, 4, 3, parents=[-1, 0])
    assert seen([chain], [7], window=2) == seen([AttentionRow(0, 4, 3)], [7], window=2)
