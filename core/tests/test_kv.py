"""The page pool and the KV tensors: who holds which rows, what a move does, and where writes to nowhere go."""

import random

import numpy as np
import pytest
import torch

from specplug.models.base import KVGeometry
from specplug.runtime.kv import KVPool, PagePool, tokens_that_fit

LAYERS = (KVGeometry(kv_heads=2, k_dim=3, v_dim=3), KVGeometry(kv_heads=1, k_dim=4, v_dim=2))


def pool(slots=3, pages=8, page_size=4, max_tokens=20):
    return PagePool(slots, pages, page_size, max_tokens)


@pytest.mark.parametrize("tokens", range(1, 21))
def test_reserve_takes_the_pages_that_the_tokens_need_and_no_more(tokens):
    # Breaks with: floor division, or one page too many at a page's border.
    made = pool()
    assert made.reserve(0, tokens)
    assert made.held[0] == (tokens + 3) // 4
    assert made.free == 8 - made.held[0]


def test_reserve_keeps_what_is_held_and_never_gives_back():
    # Breaks with: held set to the newest wish, which would leak the pages above it.
    made = pool()
    assert made.reserve(0, 9)
    before = made.table[0].copy()
    assert made.reserve(0, 2)
    assert made.held[0] == 3
    assert (made.table[0] == before).all()
    assert made.reserve(0, 17)
    assert (made.table[0, :3] == before[:3]).all()
    made.release(0)
    assert made.free == made.pages


def test_a_reservation_that_does_not_fit_changes_nothing():
    # Breaks with: pages popped before the check, so that a refused wish keeps some.
    made = pool(pages=5)
    assert made.reserve(0, 12)
    table, held = made.table.copy(), list(made.held)
    assert not made.reserve(1, 9)
    assert (made.free, made.held) == (2, held)
    assert (made.table == table).all()
    assert made.reserve(1, 8)  # exactly what is left
    assert made.free == 0


def test_a_slot_holds_at_most_a_longest_request():
    # Breaks with: a write past the slot's row of the table.
    made = pool(max_tokens=9)
    assert not made.reserve(0, 13)
    assert made.free == made.pages
    assert made.reserve(0, 12)  # whole pages: 9 tokens take three


def test_rows_follow_the_pages_in_order():
    # Breaks with: page index and offset swapped, or the slot's pages taken for contiguous.
    made = pool()
    for slot, tokens in ((0, 4), (1, 4), (0, 8), (1, 8), (0, 12)):
        made.reserve(slot, tokens)
    assert made.table[0, :3].tolist() == [0, 2, 4]
    assert made.rows(0, 2, 10).tolist() == [2, 3, 8, 9, 10, 11, 16, 17]
    assert made.rows(1, 3, 5).tolist() == [7, 12]
    assert made.rows(1, 5, 5).tolist() == []
    assert made.rows(0, 0, 12).dtype == np.int64


def test_what_is_not_held_points_at_the_trash_page():
    # Breaks with: stale or zero entries behind a slot's pages, through which one request writes into another's.
    made = pool()
    made.reserve(0, 4)
    trash = range(made.trash_row, made.rows_with_trash)
    assert all(row in trash for row in made.rows(0, 4, 20))
    assert all(row in trash for row in made.rows(2, 0, 20))
    made.reserve(0, 20)
    made.release(0)
    assert all(row in trash for row in made.rows(0, 0, 20))
    assert made.trash_row == made.pages * made.page_size
    assert made.rows_with_trash - made.trash_row == made.page_size


def test_release_returns_every_page_once():
    # Breaks with: a page released twice (two owners later), or a slot released again.
    made = pool()
    for _ in range(5):
        made.reserve(0, 20)
        made.reserve(1, 12)
        made.release(0)
        made.release(0)  # holds nothing: a second time changes nothing
        made.release(1)
        assert made.free == made.pages
        assert sorted(made._free) == list(range(made.pages))


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_no_row_has_two_owners_whatever_comes_and_goes(page_size):
    # A recount after each of 300 random wishes; breaks with any page handed out twice or lost.
    rng = random.Random(page_size)
    made = PagePool(4, 30, page_size, 12 * page_size)
    for _ in range(300):
        slot = rng.randrange(4)
        if rng.random() < 0.3:
            made.release(slot)
        else:
            wanted, free = rng.randrange(1, 12 * page_size + 1), made.free
            missing = max(0, -(-wanted // page_size) - made.held[slot])
            assert made.reserve(slot, wanted) == (missing <= free)
        rows = [row for slot in range(4) for row in made.rows(slot, 0, made.held[slot] * page_size).tolist()]
        assert len(rows) == len(set(rows)) == (made.pages - made.free) * page_size
        assert max(rows, default=0) < made.trash_row


def filled(rows=12):
    made = KVPool(LAYERS, rows, torch.float32, torch.device("cpu"))
    for number, part in enumerate((*made.k, *made.v)):
        part.copy_(torch.arange(rows, dtype=torch.float32)[:, None, None].expand_as(part) + 100 * number)
    return made


def test_the_pool_has_every_layer_in_its_own_shape():
    made = KVPool(LAYERS, 5, torch.float16, torch.device("cpu"))
    assert [tuple(part.shape) for part in made.k] == [(5, 2, 3), (5, 1, 4)]
    assert [tuple(part.shape) for part in made.v] == [(5, 2, 3), (5, 1, 2)]
    assert {part.dtype for part in (*made.k, *made.v)} == {torch.float16}
    assert all((part == 0).all() for part in (*made.k, *made.v))


def test_move_copies_k_and_v_of_every_layer():
    # Breaks with: the first layer only, or K without V.
    made = filled()
    made.move(np.array([7, 9]), np.array([2, 3]))
    for number, part in enumerate((*made.k, *made.v)):
        assert part[:, 0, 0].tolist() == [row + 100 * number for row in (0, 1, 7, 9, 4, 5, 6, 7, 8, 9, 10, 11)]


def test_move_reads_everything_before_it_writes():
    # An accepted path 1, 3, 4 of a tree: sources and targets overlap. Breaks with: a copy row after row.
    made = filled()
    made.move(np.array([2, 1, 4, 5]), np.array([1, 2, 3, 4]))
    assert made.k[0][:, 0, 0].tolist() == [0, 2, 1, 4, 5, 5, 6, 7, 8, 9, 10, 11]


def test_how_many_tokens_fit():
    # 2 * (3 + 3) + 1 * (4 + 2) = 18 numbers a token. Breaks with: K's width counted for V.
    assert KVPool.bytes_per_token(LAYERS, torch.float32) == 72
    assert KVPool.bytes_per_token(LAYERS, torch.bfloat16) == 36
    assert tokens_that_fit(LAYERS, torch.float32, 719) == 9
    assert tokens_that_fit((), torch.float32, 1) == 2**31
