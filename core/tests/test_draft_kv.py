"""Draft KV against attention written down as its definition: which rows each query sees, and where writes land."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from specplug.drafter import SamplingView, StepView
from specplug.models.base import KVGeometry
from specplug.runtime.arena import DraftArena
from specplug.runtime.draft_kv import PagedView, PartView, StepRows, geometries
from specplug.runtime.kv import KVPool, PagePool
from specplug.spec import Capabilities, DraftPlan, KVLayers

PAGE, LONGEST, SLOTS = 4, 40, 4
LAYERS = (KVGeometry(2, 6, 3), KVGeometry(1, 4, 4, window=3))
"""Layers of different heads and dims; the second one has a window."""
STEP = StepRows(slots=[2, 0, 1], begin=[5, 0, 9], q_len=[3, 6, 1], kv_len=[7, 6, 10])
"""A verify with one rejected draft, a prompt chunk, a decode."""


class Bench:
    """A view whose pages are scattered, and a dense copy [slot][layer] of everything that lies in it."""

    def __init__(self, layers: Sequence[KVGeometry] = LAYERS, step: StepRows = STEP, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.layers = step, tuple(layers)
        self.pages = PagePool(SLOTS, 30, PAGE, LONGEST)
        self.pages._free = np.random.default_rng(seed).permutation(30).tolist()
        for slot, kv_len in zip(step.slots, step.kv_len, strict=True):
            assert self.pages.reserve(slot, kv_len + 12)
        self.pool = KVPool(layers, self.pages.rows_with_trash, torch.float32, torch.device("cpu"))
        for part in (*self.pool.k, *self.pool.v):
            part.copy_(self.random(*part.shape))
        self.view = PagedView(self.pool, self.pages, writable=True)
        self.view.begin(step)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def stored(self, slot: int, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the slot's rows, in the order of their token indices."""
        rows = self.pages.rows(slot, 0, self.pages.held[slot] * PAGE)
        return self.pool.k[layer][rows], self.pool.v[layer][rows]

    def dense(self, slot: int, layer: int, q: Tensor, sees: Sequence[int], scale: float | None = None) -> Tensor:
        """One query [q_heads, k_dim] over the token indices `sees`."""
        geometry = self.layers[layer]
        keys, values = self.stored(slot, layer)
        answers = []
        for head in range(len(q)):
            of = head // (len(q) // geometry.kv_heads)
            scores = keys[list(sees), of] @ q[head] * (geometry.k_dim**-0.5 if scale is None else scale)
            answers.append(torch.softmax(scores, 0) @ values[list(sees), of])
        return torch.stack(answers)


def _check(bench: Bench, layer: int, found: Tensor, q: Tensor, sees: Sequence[Sequence[Sequence[int]]]) -> None:
    """`sees`: of each row, of each query, the token indices it sees; empty where the answer means nothing."""
    at = 0
    for slot, row in zip(bench.step.slots, sees, strict=True):
        for indices in row:
            if indices:
                wanted = bench.dense(slot, layer, q[at], indices)
                torch.testing.assert_close(found[at], wanted, atol=1e-5, rtol=1e-5, msg=f"query {at}, slot {slot}")
            assert torch.isfinite(found[at]).all()
            at += 1
    assert at == len(found)


@pytest.mark.parametrize("offset", [0, 1, 3, -1, -2, -8])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("q_len", [1, 4])
def test_queries_at_an_offset(mask, offset, q_len):
    """All rows below the first query, and of the queries' own those up to itself, or all."""
    bench = Bench()
    q = bench.random(3 * q_len, 4, 6)
    pattern = bench.view.pattern("it", q_len, mask=mask, offset=offset)
    found = bench.view.attend(pattern, 0, q)
    assert found.shape == (3 * q_len, 4, 3)
    sees = []
    for kv_len in STEP.kv_len:
        first = kv_len + offset
        ends = [first + q_len if mask == "full" else first + at + 1 for at in range(q_len)]
        sees.append([range(max(end, 0)) if first + at >= 0 else [] for at, end in enumerate(ends)])
    _check(bench, 0, found, q, sees)


@pytest.mark.parametrize("offset", [0, -1, -3])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_steps_own_rows(layer, offset):
    """Ragged and causal, each where it began, or earlier; a layer's window holds without being asked for."""
    bench = Bench()
    geometry = LAYERS[layer]
    q = bench.random(10, 4, geometry.k_dim)
    found = bench.view.attend(bench.view.pattern("rows", None, offset=offset), layer, q)
    sees = []
    for begin, q_len in zip(STEP.begin, STEP.q_len, strict=True):
        at = [begin + offset + query for query in range(q_len)]
        sees.append([range(max(0, index - (geometry.window or LONGEST) + 1), index + 1) for index in at])
    _check(bench, layer, found, q, sees)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_counts_the_query_itself(mask, window):
    bench = Bench()
    q = bench.random(3 * 4, 2, 6)
    found = bench.view.attend(bench.view.pattern("it", 4, mask=mask, window=window, offset=1), 0, q)
    sees = []
    for kv_len in STEP.kv_len:
        first = kv_len + 1
        ends = [first + 4 if mask == "full" else first + at + 1 for at in range(4)]
        sees.append([range(max(0, first + at - window + 1), end) for at, end in enumerate(ends)])
    _check(bench, 0, found, q, sees)


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_queries_see_the_scratch_rows_they_are_told(window):
    """All below `kv_len`, the own row and its ancestors among the scratch; a window cuts only what is below."""
    bench = Bench()
    q = bench.random(3 * 3, 2, 6)
    paths = [[[0, 3], [0, 4], [2, 5]], [[3], [1, 4], [1, 2, 5]], [[0, 1, 2, 3], [4], [5]]]
    visible = torch.zeros(3, 3, 6, dtype=torch.bool)
    sees = []
    for row, kv_len in enumerate(STEP.kv_len):
        own = []
        for query, path in enumerate(paths[row]):
            visible[row, query, path] = True
            position = kv_len - 1 + len(path)
            below = range(max(0, position - (window or LONGEST) + 1), kv_len)
            own.append([*below, *(kv_len + node for node in path)])
        sees.append(own)
    pattern = bench.view.pattern("level", 3, mask="ancestors", window=window)
    _check(bench, 0, bench.view.attend(pattern, 0, q, visible), q, sees)
    # Told something else in the same step, it sees something else.
    visible[:, :, :3] = False
    again = bench.view.attend(pattern, 0, q, visible)
    assert not torch.allclose(again[0], bench.view.attend(pattern, 0, q, visible | True)[0])


def test_scale_is_taken():
    bench = Bench()
    q = bench.random(3, 2, 6)
    found = bench.view.attend(bench.view.pattern("it", 1), 0, q, scale=0.7)
    for at, (slot, kv_len) in enumerate(zip(STEP.slots, STEP.kv_len, strict=True)):
        torch.testing.assert_close(found[at], bench.dense(slot, 0, q[at], range(kv_len + 1), 0.7))


def test_patterns_are_planned_anew_each_step():
    bench = Bench()
    pattern = bench.view.pattern("it", 1)
    q = bench.random(1, 2, 6)
    for kv_len in (3, 8):
        bench.step = StepRows([1], [0], [kv_len], [kv_len])
        bench.view.begin(bench.step)
        _check(bench, 0, bench.view.attend(pattern, 0, q), q, [[range(kv_len + 1)]])


# --- writes ---------------------------------------------------------------------------------------------------------


def _snapshot(bench: Bench) -> list[Tensor]:
    return [part.clone() for part in (*bench.pool.k, *bench.pool.v)]


def _changed(bench: Bench, before: list[Tensor], layer: int) -> set[int]:
    """Pool rows of `layer` that differ, the trash page left out; no other layer may differ."""
    parts = (*bench.pool.k, *bench.pool.v)
    rows: list[set[int]] = []
    for old, new in zip(before, parts, strict=True):
        differs = (old != new).flatten(1).any(1)[: bench.pages.trash_row]
        rows.append(set(torch.nonzero(differs).flatten().tolist()))
    for other in range(len(LAYERS)):
        if other != layer:
            assert rows[other] == rows[len(LAYERS) + other] == set()
    assert rows[layer] == rows[len(LAYERS) + layer]
    return rows[layer]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_steps_own_tokens_are_written_at_their_indices(layer):
    bench, geometry = Bench(), LAYERS[layer]
    k, v = bench.random(10, geometry.kv_heads, geometry.k_dim), bench.random(10, geometry.kv_heads, geometry.v_dim)
    before = _snapshot(bench)
    bench.view.write(layer, k, v)
    at, wanted = 0, set()
    for slot, begin, q_len in zip(STEP.slots, STEP.begin, STEP.q_len, strict=True):
        keys, values = bench.stored(slot, layer)
        assert torch.equal(keys[begin : begin + q_len], k[at : at + q_len])
        assert torch.equal(values[begin : begin + q_len], v[at : at + q_len])
        wanted |= set(bench.pages.rows(slot, begin, begin + q_len).tolist())
        at += q_len
    assert _changed(bench, before, layer) == wanted


def test_rows_are_written_where_the_index_says():
    """[R, q_len] token indices; -1, other negatives and what no page holds go nowhere."""
    bench = Bench()
    index = torch.tensor([[7, -1], [0, 11], [-3, 400]])
    k, v = bench.random(6, 2, 6), bench.random(6, 2, 3)
    before = _snapshot(bench)
    bench.view.write(0, k, v, index)
    assert torch.equal(bench.stored(2, 0)[0][7], k[0])
    assert torch.equal(bench.stored(0, 0)[0][[0, 11]], k[2:4])
    assert torch.equal(bench.stored(0, 0)[1][[0, 11]], v[2:4])
    wanted = {*bench.pages.rows(2, 7, 8).tolist(), *bench.pages.rows(0, 0, 1).tolist()}
    assert _changed(bench, before, 0) == wanted | set(bench.pages.rows(0, 11, 12).tolist())


def test_the_steps_tokens_are_written_where_a_flat_index_says():
    """[T] token indices: a row of the step each, for a head that lags behind."""
    bench = Bench()
    index = torch.tensor([4, 5, 6, -1, 0, 1, 2, 3, 4, 8])
    k, v = bench.random(10, 2, 6), bench.random(10, 2, 3)
    before = _snapshot(bench)
    bench.view.write(0, k, v, index)
    assert torch.equal(bench.stored(2, 0)[0][4:7], k[:3])
    assert torch.equal(bench.stored(0, 0)[0][:5], k[4:9])
    assert torch.equal(bench.stored(1, 0)[0][8], k[9])
    assert len(_changed(bench, before, 0)) == 9


def test_a_slot_without_pages_is_written_nowhere_and_read_as_numbers():
    """What a row writes whose pages could not be had reaches nobody, and its neighbours read their own."""
    bench = Bench()
    bench.pages.release(2)
    before = _snapshot(bench)
    bench.view.write(0, bench.random(10, 2, 6), bench.random(10, 2, 3))
    changed = _changed(bench, before, 0)
    own = [bench.pages.rows(slot, 0, bench.pages.held[slot] * PAGE).tolist() for slot in (0, 1)]
    assert changed <= {row for rows in own for row in rows}
    q = bench.random(3, 2, 6)
    found = bench.view.attend(bench.view.pattern("it", 1), 0, q)
    torch.testing.assert_close(found[1], bench.dense(0, 0, q[1], range(7)))
    torch.testing.assert_close(found[2], bench.dense(1, 0, q[2], range(11)))
    assert torch.isfinite(found).all()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_wrong_uses_are_named():
    bench = Bench()
    view = bench.view
    causal = view.pattern("causal", 1)
    tree = view.pattern("tree", 1, mask="ancestors")
    seen = torch.ones(3, 1, 1, dtype=torch.bool)
    q = bench.random(3, 2, 6)
    for wrong, says in (
        (lambda: view.pattern("causal", 2), "declared twice"),
        (lambda: view.pattern("rows", None, offset=1), "at their own indices or earlier"),
        (lambda: view.pattern("rows", None, mask="full"), "causal"),
        (lambda: view.pattern("other", 2, mask="ancestors", offset=1), "offset 1 means nothing"),
        (lambda: view.attend(causal, 0, q, seen), "belongs to 'ancestors'"),
        (lambda: view.attend(tree, 0, q), "belongs to 'ancestors'"),
        (lambda: Bench().view.attend(causal, 0, q), "was not declared by this view"),
        (lambda: view.write(0, q, q, torch.tensor([[1, 2]] * 3)), "3 rows of K for 6 token indices"),
        (lambda: view.write(0, q, q, torch.tensor([[1]])), r"index \[1, 1\]: expected \[3, q_len\] or \[10\]"),
        (lambda: view.write(0, q, q, torch.tensor([1, 2, 3])), r"index \[3\]"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()
    with pytest.raises(RuntimeError, match="read-only"):
        PagedView(bench.pool, bench.pages, writable=False).write(0, q, q)


# --- parts ----------------------------------------------------------------------------------------------------------


def test_a_part_sees_its_own_layers_only():
    bench = Bench()
    part = PartView(bench.view, "1:other/", 1, 1)
    q = bench.random(3, 2, 4)
    pattern = part.pattern("it", 1)
    bench.view.pattern("it", 1)  # the same word, for another layer's owner
    found = part.attend(pattern, 0, q)
    _check(bench, 1, found, q, [[range(kv_len - 2, kv_len + 1)] for kv_len in STEP.kv_len])
    before = _snapshot(bench)
    part.write(0, bench.random(3, 1, 4), bench.random(3, 1, 4), torch.tensor([[7], [6], [10]]))
    assert len(_changed(bench, before, 1)) == 3
    for layer in (1, -1):
        with pytest.raises(IndexError, match="its plan declares 1"):
            part.attend(pattern, layer, q)


def _plan(**changes: object) -> DraftPlan:
    return DraftPlan(needs=Capabilities(), nodes=1, depth=1, **changes)


def test_an_arena_holds_a_part_to_its_own_plan():
    whole = DraftArena(_plan(bytes_fixed=100, bytes_per_slot=100), 2, torch.device("cpu"), "whole")
    part = whole.part("0:a/", _plan(bytes_fixed=8), "part", 0)
    taken = part.static("x", (2,), torch.float32)
    assert whole.buffers["0:a/x"] is taken
    with pytest.raises(RuntimeError, match=r"part: buffer 'y' brings bytes_fixed to 12, its plan declared 8"):
        part.static("y", (1,), torch.float32)
    with pytest.raises(RuntimeError, match="part: its plan declares no KV layers"):
        part.draft_kv()
    greedy = whole.part("1:b/", _plan(bytes_fixed=1000), "greedy", 0)
    with pytest.raises(RuntimeError, match=r"whole: buffer '1:b/x' brings bytes_fixed to \d+, its plan declared 100"):
        greedy.static("x", (200,), torch.float32)


def test_layers_are_numbered_through_all_groups():
    groups = (
        KVLayers(layers=2, kv_heads=1, k_dim=4, v_dim=2),
        KVLayers(layers=1, kv_heads=2, k_dim=6, v_dim=6, window=9),
    )
    assert geometries(groups) == [KVGeometry(1, 4, 2), KVGeometry(1, 4, 2), KVGeometry(2, 6, 6, 9)]


# --- the tokens that follow -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_following_gives_the_next_tokens_of_each_kept_one(lookahead):
    """Of the row where they lie inside it, else of `next_tokens`; -1 where not known, and for rejected tokens."""
    tokens = [[10, 11, 90], [20, 21, 22, 23], [30]]  # a verify with one rejected draft, a prompt chunk, a decode
    kept, after = [2, 4, 1], [[12, -1, -1], [24, 25, 26], [31, -1, -1]]
    wanted = []
    for row, count, later in zip(tokens, kept, after, strict=True):
        text = row[:count] + later[:lookahead]
        for at in range(len(row)):
            ahead = (text + [-1] * lookahead)[at + 1 : at + 1 + lookahead]
            wanted.append(ahead if at < count else [-1] * lookahead)
    none = torch.zeros(3)
    step = StepView(
        slots=torch.tensor([2, 0, 1]),
        tokens=torch.tensor([token for row in tokens for token in row]),
        positions=torch.zeros(8, dtype=torch.int64),
        row_start=torch.tensor([0, 3, 7, 8]),
        num_kept=torch.tensor(kept),
        kv_len=torch.tensor(kept),
        root=torch.tensor([12, 24, 31]),
        next_tokens=torch.tensor(after)[:, :lookahead],
        final=torch.tensor([True, False, True]),
        taps=(),
        sampling=SamplingView(none, none, none, none, none, none),
        depth=1,
        host=None,
    )
    assert step.following().tolist() == wanted
