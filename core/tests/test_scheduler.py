"""Who runs, in which order, on which pages: the scheduler alone, without a model."""

import random

import pytest

from specplug.runtime.kv import PagePool
from specplug.runtime.request import Draft, Request
from specplug.runtime.scheduler import Scheduler
from specplug.runtime.stop import Output
from specplug.sampling import SamplingParams


def request(name, prompt_len):
    return Request(
        id=str(name),
        tokens=list(range(prompt_len)),
        prompt_len=prompt_len,
        sampling=SamplingParams(),
        seed=0,
        max_drafted=None,
        output=Output(None, (), (), 1000),
    )


class World:
    """A scheduler, and a model that always says token 7."""

    def __init__(self, slots=4, pages=16, page_size=4, chunk=8, most_waiting=100, longest=64):
        self.pages = PagePool(slots, pages, page_size, longest)
        self.preempted, self.admitted = [], []
        self.scheduler = Scheduler(slots, self.pages, chunk, most_waiting, self._preempt)

    def _preempt(self, request):
        assert request.slot >= 0, "told before the slot is lost"
        self.preempted.append(request.id)

    def _admit(self, request):
        assert request.slot >= 0
        assert self.pages.held[request.slot] * self.pages.page_size >= len(request.tokens)
        self.admitted.append(request.id)

    def add(self, *lengths):
        made = [request(name, length) for name, length in enumerate(lengths)]
        for one in made:
            self.scheduler.submit(one)
        return made

    def step(self, *, drafts=0):
        """Schedule and commit; a row with drafts has all of them accepted. Returns {id: tokens of its row}."""
        rows = self.scheduler.schedule(self._admit)
        names = [row.request.id for row in rows]
        assert len(names) == len(set(names))
        order = {id(one): at for at, one in enumerate(self.scheduler.running)}
        assert [order[id(row.request)] for row in rows] == sorted(order[id(row.request)] for row in rows)
        for row in rows:
            one = row.request
            assert row.start == one.kv_len
            assert row.tokens == one.tokens[row.start : row.start + len(row.tokens)]
            assert row.final == (row.start + len(row.tokens) == len(one.tokens))
            assert self.pages.held[one.slot] * self.pages.page_size >= row.start + row.q_len
            accepted = row.draft.tokens if row.draft else []
            one.kv_len = row.start + len(row.tokens) + len(accepted)
            one.drafted, one.draft = 0, None
            if row.final:
                for token in [*accepted, 7]:
                    one.tokens.append(token)
                    one.output.commit(token)
                if drafts and self.pages.reserve(one.slot, one.kv_len + 1 + drafts):
                    one.draft = Draft([7] * drafts, list(range(-1, drafts - 1)), None)
                    one.drafted = len(one.draft.tokens)
        return {row.request.id: row.tokens for row in rows}

    def finish(self, *requests):
        for one in requests:
            self.scheduler.release(one)


# --- order and chunks ------------------------------------------------------------------------------------------------


def test_first_come_first_served():
    # Breaks with: a queue popped at the wrong end.
    world = World(slots=2, chunk=100)
    a, _b, _c, _d = world.add(3, 3, 3, 3)
    assert list(world.step()) == ["0", "1"]
    world.finish(a)
    assert list(world.step()) == ["1", "2"]
    assert world.admitted == ["0", "1", "2"]


def test_a_newcomer_that_fits_does_not_overtake_one_that_does_not():
    # Breaks with: the queue searched for something that fits: a long prompt would starve.
    world = World(slots=3, pages=6, chunk=100)
    first, _long, _short = world.add(12, 16, 2)
    assert list(world.step()) == ["0"]
    assert list(world.step()) == ["0"]
    world.finish(first)
    assert list(world.step()) == ["1", "2"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 100])
def test_prompts_come_in_chunks_and_decoding_rows_do_not_count(chunk):
    # Breaks with: a budget per request instead of per step, or decode rows that use it up.
    world = World(chunk=chunk, pages=40)
    made = world.add(7, 9, 4)
    seen = {one.id: [] for one in made}
    while any(one.kv_len < one.prompt_len for one in made):
        decoding = {one.id for one in made if len(one.tokens) > one.prompt_len}
        rows = world.step()
        # A last single token of a prompt rides free, like a decode row.
        prompt = {name: tokens for name, tokens in rows.items() if name not in decoding}
        assert sum(len(tokens) for tokens in prompt.values() if len(tokens) > 1) <= chunk
        assert decoding <= set(rows), "a decoding row waits for no prompt"
        for name, tokens in prompt.items():
            seen[name] += tokens
    assert seen == {one.id: list(range(one.prompt_len)) for one in made}


def test_an_older_prompt_is_finished_before_a_younger_one_begins():
    world = World(chunk=4)
    world.add(9, 9)
    assert world.step() == {"0": [0, 1, 2, 3]}
    assert world.step() == {"0": [4, 5, 6, 7]}
    assert world.step() == {"0": [8], "1": [0, 1, 2]}  # a chunk of 4 in all


def test_an_unfinished_chunk_is_not_final():
    world = World(chunk=4)
    (one,) = world.add(6)
    (row,) = world.scheduler.schedule(world._admit)
    assert (row.final, row.q_len) == (False, 4)
    one.kv_len = 4
    (row,) = world.scheduler.schedule(world._admit)
    assert (row.final, row.start, row.tokens) == (True, 4, [4, 5])


def test_a_row_is_as_wide_as_its_own_draft():
    # Breaks with: rows padded to the widest of the step.
    world = World()
    made = world.add(2, 2, 2)
    world.step()
    made[1].draft = Draft([7, 7, 7], [-1, 0, -1], None)
    made[1].drafted = len(made[1].draft.tokens)
    assert [row.q_len for row in world.scheduler.schedule(world._admit)] == [1, 4, 1]


def test_room_counts_what_waits():
    world = World(slots=1, most_waiting=2)
    assert world.scheduler.room == 2
    world.add(1, 1)
    assert world.scheduler.room == 0
    world.step()
    assert world.scheduler.room == 1


# --- pages -----------------------------------------------------------------------------------------------------------


def test_only_the_youngest_is_preempted_and_it_comes_back_first():
    # Breaks with: the oldest preempted, or the one that needs the page; the loser queued behind newcomers.
    world = World(slots=3, pages=6, page_size=4, chunk=100)
    world.add(7, 7, 7)
    late = request("late", 4)
    world.scheduler.submit(late)
    assert list(world.step()) == ["0", "1", "2"]  # 8 tokens each: all pages are held
    assert list(world.step()) == ["0", "1", "2"]  # the ninth token is sampled, not yet stored
    assert list(world.step()) == ["0", "1"]  # the two oldest take a page each, both from the youngest
    assert world.preempted == ["2"]
    assert [one.id for one in world.scheduler.waiting] == ["2", "late"]
    assert world.scheduler.waiting[0].kv_len == 0
    assert world.scheduler.preemptions == 1


def test_two_that_are_preempted_come_back_in_order():
    # Breaks with: append instead of appendleft.
    world = World(slots=3, pages=6, page_size=4, chunk=100)
    made = world.add(7, 7, 7)
    world.step()
    world.step()
    made[0].draft = Draft([7] * 11, list(range(-1, 10)), None)
    made[0].drafted = len(made[0].draft.tokens)  # 9 + 11: three pages more than it holds
    assert list(world.step()) == ["0"]
    assert world.preempted == ["2", "1"]
    assert [one.id for one in world.scheduler.waiting] == ["1", "2"]


def test_a_request_that_is_the_youngest_preempts_itself():
    # Breaks with: a loop that waits for pages which nobody younger holds.
    world = World(slots=2, pages=4, page_size=4, chunk=100)
    world.add(5, 7)
    world.step()
    assert list(world.step()) == ["0", "1"]
    assert list(world.step()) == ["0"]
    assert world.preempted == ["1"]
    assert world.pages.free == 2


def test_resume_runs_the_whole_text_again_and_its_draft_is_gone():
    # Breaks with: kv_len kept over a preemption (the KV is gone), or a draft verified against another state.
    world = World(slots=2, pages=4, page_size=4, chunk=100)
    first, second = world.add(5, 7)
    world.step()
    world.step()
    second.draft = Draft([7] * 3, [-1, 0, 1], None)
    second.drafted = len(second.draft.tokens)
    world.step()
    assert second.draft is None
    assert second.slot == -1
    said = list(second.tokens)
    world.finish(first)
    assert world.step() == {"1": said}
    assert second.tokens == [*said, 7]
    assert world.admitted == ["0", "1", "1"]


def test_a_newcomer_is_admitted_only_if_its_whole_text_fits():
    # Breaks with: admission by the first chunk: the newcomer would push out others or be pushed out at once.
    world = World(slots=2, pages=4, page_size=4, chunk=4)
    world.add(8, 9)
    for _ in range(3):
        world.step()
    assert world.admitted == ["0"]
    assert world.pages.free == 1


def test_release_gives_back_slot_and_pages_once():
    world = World(slots=1, pages=4)
    one, other = world.add(8, 3)
    world.step()
    world.finish(one)
    assert (one.slot, world.pages.free) == (-1, 4)
    world.finish(one)  # it is nowhere any more
    world.finish(other)  # it waits
    assert world.scheduler.idle
    assert world.step() == {}


@pytest.mark.parametrize("seed", range(6))
def test_everyone_gets_through_with_tight_pages(seed):
    """No starvation: the oldest always moves, so each request ends; no page is lost, no slot has two owners."""
    # Breaks with: preemption of the oldest (two requests can then throw each other out for ever).
    rng = random.Random(seed)
    world = World(slots=rng.choice([2, 3, 5]), pages=8, page_size=rng.choice([1, 2, 4]), chunk=rng.choice([1, 3, 50]))
    longest = world.pages.pages * world.pages.page_size
    made = world.add(*(rng.randrange(1, longest - 1) for _ in range(8)))
    ends = {one.id: rng.randrange(one.prompt_len + 1, longest + 1) for one in made}
    finished = []
    for _ in range(2000):
        if world.scheduler.idle:
            break
        oldest = world.scheduler.running[0] if world.scheduler.running else None
        before = (oldest.kv_len, len(oldest.tokens)) if oldest else None
        rows = world.step(drafts=rng.choice([0, 0, 2]))
        if oldest:
            assert oldest.id in rows, "the oldest moves in every step"
            assert (oldest.kv_len, len(oldest.tokens)) > before
        for one in [one for one in made if one.slot >= 0 and len(one.tokens) >= ends[one.id]]:
            finished.append(one.id)
            world.finish(one)
        held = sum(world.pages.held[one.slot] for one in world.scheduler.running)
        assert held + world.pages.free == world.pages.pages
        slots = [one.slot for one in world.scheduler.running]
        assert len(slots) == len(set(slots))
    assert sorted(finished) == sorted(ends)
    assert world.pages.free == world.pages.pages
    assert list(dict.fromkeys(world.admitted)) == [one.id for one in made], "first admissions keep the order of arrival"
