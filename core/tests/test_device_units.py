"""The parts of a device step, each against a few lines of plain Python: shapes, inputs, prologue, commit, reports."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.drafter import SamplingView
from specplug.proposal import HostProposal, Proposal
from specplug.runtime.device.buckets import Bucket, Buckets, row_ladder, token_ladder
from specplug.runtime.device.inputs import Pages
from specplug.runtime.device.outcome import Committed, Verdicts, commit
from specplug.runtime.device.packing import pack, prime
from specplug.runtime.device.prologue import prologue
from specplug.runtime.device.reorder import kept_first
from specplug.runtime.device.reports import Reports
from specplug.runtime.device.rows import StepRows
from specplug.runtime.device.statics import MOST_PAGES, Sizes, Statics
from specplug.runtime.drafting import Wish
from specplug.runtime.kv import PagePool
from specplug.runtime.request import Draft
from specplug.runtime.scheduler import UNKNOWN, Row

CPU = torch.device("cpu")
SLOTS, VOCAB, PAGE, LONGEST = 6, 50, 4, 96
quick = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)


# --- buckets ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(slots=st.integers(1, 70), width=st.integers(1, 20), most=st.integers(1, 90))
def test_buckets(slots: int, width: int, most: int) -> None:
    # Breaks with: a plain step that has no bucket, one too small, more graphs than allowed, a ladder out of order.
    buckets = Buckets(slots, width, most)
    assert len(set(buckets.all)) == len(buckets.all) <= most
    assert buckets.all == sorted(buckets.all, reverse=True)
    assert buckets.rows == sorted(set(buckets.rows))
    assert buckets.rows[-1] == slots
    assert buckets.tokens == max(tokens for _, tokens in buckets.all)
    for rows, tokens in buckets.all:
        assert rows <= tokens <= rows * width
    for rows in range(1, slots + 1):
        rung = buckets.rows_for(rows)
        assert rung == min(each for each in buckets.rows if each >= rows)
        assert buckets.fit(rows, rows) is not None, "a plain step always has one"
        for total in {rows, rows + width - 1, rows * width, rung * width + 1}:
            holds = [bucket for bucket in buckets.all if bucket.rows >= rows and bucket.tokens >= total]
            assert buckets.fit(rows, total) == min(holds, default=None), "of those that hold it the one of fewest rows"
    if most >= sum(len(token_ladder(rows, width)) for rows in buckets.rows):
        assert Bucket(slots, slots * width) == buckets.all[0]
        assert all(buckets.fit(rows, rows * width) for rows in range(1, slots + 1))


def test_ladders() -> None:
    assert row_ladder(1) == [1]
    assert row_ladder(8) == [1, 2, 4, 8]
    assert row_ladder(20) == [1, 2, 4, 8, 12, 16, 20]
    assert token_ladder(4, 1) == [4]
    assert token_ladder(1, 6) == [1, 2, 4, 6]
    assert token_ladder(8, 6) == [8, 16, 32, 48]


# --- pages -----------------------------------------------------------------------------------------------------------


@quick
@given(seed=seeds)
def test_the_devices_page_tables_follow_the_hosts(seed: int) -> None:
    """Whatever was reserved and released since the last look, one look makes the tables equal."""
    # Breaks with: entries given back that are left as they were, a release and a reservation that look like nothing.
    rng = random.Random(seed)
    pool = PagePool(SLOTS, 40, PAGE, LONGEST)
    pages = Pages(pool, CPU)
    for look in range(30):
        for _ in range(rng.randrange(4)):
            slot = rng.randrange(SLOTS)
            if rng.random() < 0.4:
                pool.release(slot)
            else:
                pool.reserve(slot, rng.randrange(1, LONGEST))
        at, ids = changed = pages.changed()
        assert len(set(at.tolist())) == len(at), "each entry once: a copy with two values for one place is a race"
        if look % 2:
            pages.write(changed)
        else:
            pages.tables.view(-1)[torch.from_numpy(at.copy())] = torch.from_numpy(ids.copy()).int()
        assert pages.tables[:SLOTS].tolist() == pool.table.tolist()
        assert pages.changed().size == 0, "nothing changed since"
    assert (pages.tables[SLOTS] == pool.pages).all(), "the scratch slot holds nothing"


# --- packing and prologue --------------------------------------------------------------------------------------------


class Step:
    """A random step: rows, what the host knows of them, proposals, and everything packed and uploaded."""

    def __init__(self, seed: int, *, nodes: int, trees: bool, host_drafts: bool, padded: bool) -> None:
        rng = self.rng = random.Random(seed)
        depth = rng.randint(1, nodes)
        self.nodes, self.depth = nodes, depth
        self.pool = PagePool(SLOTS, 2000, PAGE, LONGEST + nodes)
        self.buckets = Buckets(SLOTS, 1 + nodes, rng.choice([1, 4, 60]))
        sizes = Sizes(
            slots=SLOTS,
            tokens=max(64 + SLOTS * (1 + nodes), self.buckets.tokens),
            nodes=nodes,
            depth=depth,
            lookahead=rng.choice([1, 3]),
            vocab=VOCAB,
            hidden=4,
            graph_tokens=self.buckets.tokens if padded else 0,
            trees=trees,
            host_drafts=host_drafts,
        )
        self.statics = Statics(sizes, self.pool, 0, torch.float32, CPU)
        self.proposal = Proposal(SLOTS, nodes, VOCAB, rule="coupled", dense=False, device=CPU)
        self.host = HostProposal(self.proposal, shared=False) if host_drafts else None
        # What an earlier step left behind must not matter.
        self.statics.inputs.upload()
        prime(self.statics, self.buckets.all[0])
        self.statics.roots.copy_(torch.tensor([rng.randrange(VOCAB) for _ in range(SLOTS + 1)]))
        self.rows = [self._row(slot) for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS))]
        self.rows.sort(key=lambda row: trees and row.drafted > 0)
        self.wishes = [
            Wish(row.request, row.slot, row.final, rng.randrange(nodes + 1), rng.randrange(LONGEST))
            for row in self.rows
            if not host_drafts
        ]
        self.packed = pack(self.statics, self.buckets, self.rows, self.wishes, self.host, padded=padded)
        self.statics.inputs.upload()
        given = self.statics.inputs.device
        _write_pages(self.statics)
        self.step = self.statics.rows(self.packed.rows, self.packed.tokens)
        if host_drafts:  # as the executor does before the prologue
            count = self.packed.rows
            self.proposal.tokens.index_copy_(0, self.step.slots, given["draft_tokens"][:count])
            self.proposal.parents.index_copy_(0, self.step.slots, given["draft_parents"][:count])
            self.proposal.num_valid.index_copy_(0, self.step.slots, self.step.drafted)

    def _row(self, slot: int) -> Row:
        rng = self.rng
        start = rng.randrange(LONGEST - 12)
        text = [rng.randrange(VOCAB) for _ in range(LONGEST)]
        request: Any = SimpleNamespace(tokens=text)
        if rng.random() < 0.3:
            size = rng.randint(1, 10)
            row = Row(request, slot, start, text[start : start + size], 0, None, final=rng.random() < 0.5)
        elif rng.random() < 0.3:
            row = Row(request, slot, start, [UNKNOWN], 0, None, final=True)
        else:
            drafted = rng.randrange(self.nodes + 1)
            parents = [rng.choice([node - 1, rng.randrange(-1, node) if node else -1]) for node in range(self.nodes)]
            tokens = [rng.randrange(VOCAB) for _ in range(self.nodes)]
            draft = None
            if self.host is not None:
                self.host.tokens[slot], self.host.parents[slot] = tokens, parents
                draft = Draft(tokens[:drafted], parents[:drafted], None) if drafted else None
            else:
                if rng.random() < 0.4:  # a drafter may write anything
                    parents = [rng.randrange(-4, self.nodes + 3) for _ in parents]
                    tokens = [rng.choice([token, -7, VOCAB + 5, 2**40]) for token in tokens]
                self.proposal.tokens[slot] = torch.tensor(tokens)
                self.proposal.parents[slot] = torch.tensor(parents)
                self.proposal.num_valid[slot] = rng.choice([drafted, self.nodes, 0, -3, 2**31])
            row = Row(request, slot, start, text[start : start + 1], drafted, draft, final=True)
        assert self.pool.reserve(slot, start + row.q_len)
        return row


def _write_pages(statics: Statics) -> None:
    """As the executor does before the prologue."""
    at, ids = statics.inputs.device["pages"]
    statics.pages.tables.view(-1).index_copy_(0, at, ids.int())


def many_steps() -> Iterator[Step]:
    """Yield steps of every kind: 240 seeded ones."""
    yes_or_no = (False, True)
    kinds = list(itertools.product([1, 2, 5, 63, 64, 70], yes_or_no, yes_or_no, yes_or_no))
    for seed, (nodes, trees, host_drafts, padded) in enumerate(kinds * 5):
        yield Step(seed, nodes=nodes, trees=trees, host_drafts=host_drafts, padded=padded)


def test_packing() -> None:
    # Breaks with: a pad that belongs to a live row, logits rows of another row, a stale entry behind the last row.
    for step in many_steps():
        check_packing(step)


def check_packing(step: Step) -> None:
    packed, given, rows = step.packed, step.statics.given, step.rows
    total = sum(row.q_len for row in rows)
    assert packed.rows == (packed.bucket.rows if packed.bucket else step.buckets.rows_for(len(rows)))
    if packed.rows > len(rows):
        assert packed.tokens > total, "a pad row begins at a token that there is, for drafters that look at it"
    fits = [step.buckets.fit(len(rows), total + more) for more in (0, 1)]
    assert packed.bucket in (fits if step.statics.logits.shape[0] else [None])
    assert packed.tokens == packed.bucket.tokens if packed.bucket else packed.tokens <= total + 1
    begin, wanted, picked = 0, 0, step.statics.inputs.device["wanted"].tolist()
    for at, row in enumerate(rows):
        assert given["slots"][at] == row.slot
        assert given["row_start"][at] == begin
        assert given["begin"][at] == row.start
        assert given["literals"][at] == len(row.tokens)
        assert given["drafted"][at] == row.drafted
        assert given["start"][at] == packed.starts[at]
        root = begin + len(row.tokens) - 1
        if not row.final:
            assert packed.starts[at] == -1
            known = row.request.tokens[row.start + row.q_len :][: step.statics.sizes.lookahead]
            assert step.statics.inputs.device["following"][at].tolist() == known
        elif packed.bucket:
            assert packed.starts[at] == root
        else:
            assert packed.starts[at] == wanted
            assert picked[wanted : wanted + 1 + row.drafted] == list(range(root, root + 1 + row.drafted))
            wanted += 1 + row.drafted
        wanted_next = (step.wishes[at].cap, step.wishes[at].room) if step.wishes else (0, 0)
        assert (int(given["cap"][at]), int(given["room"][at])) == wanted_next
        begin += row.q_len
    assert packed.wanted == (packed.tokens if packed.bucket else max(wanted, 1))
    for at in [*range(len(rows), packed.rows), SLOTS]:
        pad = {name: int(given[name][at]) for name in ("slots", "begin", "literals", "drafted", "start")}
        assert pad == {"slots": SLOTS, "begin": 0, "literals": 0, "drafted": 0, "start": -1}
    assert given["row_start"][len(rows) : packed.rows + 1].tolist() == [total] * (packed.rows + 1 - len(rows))
    owners = [at for at, row in enumerate(rows) for _ in range(row.q_len)]
    assert step.step.token_row.tolist() == owners + [SLOTS] * (packed.tokens - total)
    assert packed.host.begin.tolist() == [row.start for row in rows] + [0] * (packed.rows - len(rows))
    assert packed.host.q_len.tolist() == [row.q_len for row in rows] + [0] * (packed.rows - len(rows))
    if not step.statics.sizes.trees:
        assert not packed.host.tree.any()


def expected_token(step: Step, row: Row, at: int) -> tuple[int, int, int, set[int]]:
    """Return token, position, pool row and what is seen of the row's own drafts and root, for its token `at`."""
    index = row.start + at
    pool_row = int(step.pool.rows(row.slot, index, index + 1)[0])
    if at < len(row.tokens):
        token = row.tokens[at]
        return int(step.statics.roots[row.slot]) if token == UNKNOWN else token, index, pool_row, {0}
    node, root = at - len(row.tokens), row.start + len(row.tokens) - 1
    if node >= int(step.proposal.num_valid[row.slot]):
        return 0, root, pool_row, {0}
    token = min(max(int(step.proposal.tokens[row.slot, node]), 0), VOCAB - 1)
    seen, here, length = {0}, node, 0
    while here >= 0 and length < step.depth:
        seen.add(here + 1)
        here, length = max(-1, min(int(step.proposal.parents[row.slot, here]), here - 1)), length + 1
    return token, root + length, pool_row, seen


def test_the_prologue() -> None:
    # Breaks with: a parent behind its node that is followed, bit 63 or 64 lost, an invalid draft's token used, pads
    # that write to a page.
    for step in many_steps():
        check_prologue(step)


def check_prologue(step: Step) -> None:
    prologue(step.step, step.statics.prologue_inputs(step.packed.tokens), step.proposal)
    rows = step.step
    every = [expected_token(step, row, at) for row in step.rows for at in range(row.q_len)]
    every += [(0, 0, step.pool.trash_row, {0})] * (step.packed.tokens - len(every))
    assert rows.tokens.tolist() == [token for token, *_ in every]
    assert rows.positions.tolist() == [position for _, position, *_ in every]
    assert rows.kv_rows.tolist() == [pool_row for _, _, pool_row, _ in every]
    if rows.ancestors is None:
        assert not step.statics.sizes.trees
        return
    for words, (*_, seen), owner in zip(rows.ancestors.tolist(), every, rows.token_row.tolist(), strict=True):
        bits = sum((word % 2**64) << (64 * at) for at, word in enumerate(words))
        if owner != SLOTS:
            assert {bit for bit in range(64 * len(words)) if bits >> bit & 1} == seen


def test_a_prologue_without_drafts() -> None:
    step = Step(3, nodes=2, trees=False, host_drafts=False, padded=True)
    step.rows = [row for row in step.rows if not row.drafted]
    packed = pack(step.statics, step.buckets, step.rows, [], None, padded=True)
    step.statics.inputs.upload()
    rows = step.statics.rows(packed.rows, packed.tokens)
    prologue(rows, step.statics.prologue_inputs(packed.tokens), None)
    every = [expected_token(step, row, at) for row in step.rows for at in range(row.q_len)]
    assert every
    assert rows.tokens.tolist()[: len(every)] == [token for token, *_ in every]
    assert rows.positions.tolist()[: len(every)] == [position for _, position, *_ in every]


def test_more_changed_pages_than_one_upload_holds() -> None:
    # Breaks with: the entries beyond the upload's room forgotten.
    pool = PagePool(2, 3000, 1, 1000)
    sizes = Sizes(2, 8, 0, 0, 1, VOCAB, 4, 8, trees=False, host_drafts=False)
    statics = Statics(sizes, pool, 0, torch.float32, CPU)
    request: Any = SimpleNamespace(tokens=[1] * 950)
    pool.reserve(0, 900)
    pool.reserve(1, 950)
    rows = [Row(request, slot, 3, [1], 0, None, final=True) for slot in (0, 1)]
    pack(statics, Buckets(2, 1, 4), rows, [], None, padded=True)
    statics.inputs.upload()
    assert statics.inputs.device["pages"].shape[1] == MOST_PAGES < 1850
    _write_pages(statics)
    assert statics.pages.tables[:2].tolist() == pool.table.tolist()
    assert (statics.pages.tables[2] == pool.pages).all()


def test_priming_leaves_an_empty_step_on_the_scratch_slot() -> None:
    step = Step(1, nodes=5, trees=True, host_drafts=False, padded=True)
    for bucket in step.buckets.all:
        host = prime(step.statics, bucket)
        rows = step.statics.rows(*bucket)
        prologue(rows, step.statics.prologue_inputs(bucket.tokens), step.proposal)
        assert host.q_len.sum() == bucket.tokens
        assert rows.slots.tolist() == [SLOTS] * bucket.rows
        assert rows.row_start.tolist() == [0, *np.cumsum(host.q_len).tolist()]
        # The scratch slot's page is the trash page.
        assert (rows.kv_rows >= step.pool.trash_row).all()
        assert (rows.kv_rows < step.pool.rows_with_trash).all()


# --- commit ----------------------------------------------------------------------------------------------------------


@quick
@given(seed=seeds, nodes=st.sampled_from([0, 1, 3, 9]), lookahead=st.sampled_from([1, 2, 5]))
def test_commit(seed: int, nodes: int, lookahead: int) -> None:
    # Breaks with: an unfinished chunk that takes a token, a row without a choice that leaves -1 as root, a limit
    # below 0 or above the cap, a slot's proposal that is still valid afterwards.
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, depth = rng.randint(1, SLOTS), max(nodes, 1)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    slots = torch.tensor([*rng.sample(range(SLOTS), rng.randint(1, count))])
    pads = count - len(slots)
    slots = torch.cat((slots, torch.full((pads,), SLOTS)))
    start = torch.where(slots == SLOTS, -1, ints(-1, 6, count))
    options = _options(generator)
    to = Committed(
        slots=slots,
        begin=ints(0, 80, count),
        literals=torch.where(slots == SLOTS, 0, ints(1, 9, count)),
        drafted=ints(0, nodes + 1, count),
        start=start,
        cap=ints(0, nodes + 1, count),
        room=ints(60, 95, count),
        following=ints(-1, VOCAB, count, lookahead),
        roots=ints(0, VOCAB, SLOTS + 1),
        num_kept=ints(0, 9, count),
        kv_len=ints(0, 9, count),
        next_tokens=ints(0, 9, count, lookahead),
        final=torch.zeros(count, dtype=torch.bool),
        sampling=_options(generator, count),
        report=ints(0, 9, count, 3 + depth + 2 * nodes),
    )
    verdicts = Verdicts(ints(0, nodes + 1, count), ints(-1, depth, count, depth), ints(-1, VOCAB, count))
    proposal = None
    if nodes:
        proposal = Proposal(SLOTS, nodes, VOCAB, rule="coupled", dense=False, device=CPU)
        proposal.tokens.copy_(ints(0, VOCAB, SLOTS + 1, nodes))
        proposal.parents.copy_(ints(-1, nodes, SLOTS + 1, nodes))
        proposal.num_valid.copy_(ints(-1, nodes + 1, SLOTS + 1))
        proposal.limit.copy_(ints(0, nodes + 1, SLOTS + 1))
    roots = to.roots.tolist()
    valid = proposal.num_valid.tolist() if proposal else []
    limits = proposal.limit.tolist() if proposal else []
    commit(to, verdicts, options, proposal)

    for row, slot in enumerate(slots.tolist()):
        final = int(start[row]) >= 0
        accepted = int(verdicts.accepted[row]) if final else 0
        token = int(verdicts.token[row]) if final else -1
        kept = int(to.literals[row]) + accepted
        assert bool(to.final[row]) == final
        assert int(to.num_kept[row]) == kept
        assert int(to.kv_len[row]) == int(to.begin[row]) + kept
        following = to.following[row].tolist()
        assert to.next_tokens[row].tolist() == ([token, *following[1:]] if final else following)
        if slot != SLOTS:
            assert int(to.roots[slot]) == (max(token, 0) if final else roots[slot])
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice"):
            assert getattr(to.sampling, name)[row] == getattr(options, name)[slot], name
        line = to.report[row].tolist()
        assert line[:2] == [accepted, token]
        assert line[3 : 3 + depth] == verdicts.path[row].tolist()
        if proposal is None:
            assert line[2] == 0
        else:
            assert line[2] == (max(0, min(int(to.drafted[row]), valid[slot])) if final else 0)
            assert line[3 + depth :] == [*proposal.tokens[slot].tolist(), *proposal.parents[slot].tolist()]
            assert int(proposal.num_valid[slot]) == 0
            if slot != SLOTS:
                room = int(to.room[row]) - int(to.kv_len[row])
                assert int(proposal.limit[slot]) == max(0, min(int(to.cap[row]), room))
    if proposal is not None:
        for slot in set(range(SLOTS)) - set(slots.tolist()):
            assert (int(proposal.num_valid[slot]), int(proposal.limit[slot])) == (valid[slot], limits[slot])


def _options(generator: torch.Generator, count: int = SLOTS + 1) -> SamplingView:
    def some(*, whole: bool) -> torch.Tensor:
        if whole:
            return torch.randint(0, 2**62, (count,), generator=generator)
        return torch.rand(count, generator=generator)

    return SamplingView(
        temperature=some(whole=False),
        top_k=some(whole=True),
        top_p=some(whole=False),
        min_p=some(whole=False),
        seed=some(whole=True),
        choice=some(whole=True),
    )


# --- order and report ------------------------------------------------------------------------------------------------


@quick
@given(seed=seeds)
def test_kept_tokens_come_first(seed: int) -> None:
    # Breaks with: an order among the rejected that changes, a prompt that moves, taps that move otherwise than tokens.
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, depth, pads = rng.randint(1, 5), rng.randint(1, 6), rng.randrange(4)
    literals, drafted, paths = [], [], []
    for _ in range(count):
        drafts = rng.randrange(9)
        literals.append(1 if drafts else rng.randint(1, 5))
        drafted.append(drafts)
        paths.append(sorted(rng.sample(range(drafts), rng.randint(0, min(drafts, depth)))))
    ends = np.cumsum([a + b for a, b in zip(literals, drafted, strict=True)]).tolist()
    rung, total = count + rng.randrange(3), ends[-1] + pads
    row_start = torch.tensor([0, *ends, *([ends[-1]] * (rung - count))])
    owners = [row for row, (a, b) in enumerate(zip(literals, drafted, strict=True)) for _ in range(a + b)]
    tokens, positions = (torch.randint(0, 99, (total,), generator=generator) for _ in range(2))
    taps = tuple(torch.randn(total, 3, generator=generator) for _ in range(2))
    rows = StepRows(
        slots=torch.arange(rung),
        row_start=row_start,
        begin=torch.zeros(rung, dtype=torch.int64),
        drafted=torch.tensor(drafted + [0] * (rung - count)),
        token_row=torch.tensor(owners + [7] * pads),
        tokens=tokens.clone(),
        positions=positions.clone(),
        kv_rows=torch.zeros(total, dtype=torch.int64),
        ancestors=None,
        tables=torch.zeros(rung + 1, 1, dtype=torch.int32),
        page_size=4,
    )
    path = torch.full((rung, depth), -1)
    for row, nodes in enumerate(paths):
        path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
    accepted = torch.tensor([len(nodes) for nodes in paths] + [0] * (rung - count))
    moved = tuple(tap.clone() for tap in taps)
    spare = (torch.full((total,), 5), torch.full((total,), 6), torch.full((total, 3), 7.0))
    kept_first(rows, torch.tensor(literals + [0] * (rung - count)), accepted, path, moved, spare)

    order: list[int] = []
    for row, nodes in enumerate(paths):
        first = int(row_start[row]) + literals[row]
        rest = [node for node in range(drafted[row]) if node not in nodes]
        order += [*range(int(row_start[row]), first), *(first + node for node in (*nodes, *rest))]
    order += range(ends[-1], total)
    assert rows.tokens.tolist() == tokens[order].tolist()
    assert rows.positions.tolist() == positions[order].tolist()
    for tap, found in zip(taps, moved, strict=True):
        assert torch.equal(found, tap[order])


def test_reports_survive_one_more() -> None:
    """Two steps may be on their way: the first one's report is still there when the second one's is sent."""
    # Breaks with: one host buffer, errors of the step after.
    depth, nodes = 2, 3
    reports = Reports(4, depth, nodes, CPU)
    assert reports.device.shape == (4, 3 + depth + 2 * nodes)
    sent = []
    for step in range(2):
        reports.device[0] = torch.tensor([2, 40 + step, 3, 0, 2, 7, 8, 9, -1, 0, 0])
        reports.device[1] = torch.tensor([0, -1, 0, -1, -1, 7, 8, 9, -1, 0, 0])
        errors = {1: f"why {step}"}
        sent.append(reports.send(2, errors))
        errors.clear()
    for step, report in enumerate(sent):
        first, second = report.read()
        assert (first.path, first.token, first.tokens, first.parents) == ((0, 2), 40 + step, [7, 8, 9], [-1, 0, 0])
        assert (second.path, second.token, second.tokens, second.parents) == ((), -1, [], [])
        assert report.errors == {1: f"why {step}"}
