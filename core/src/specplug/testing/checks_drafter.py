"""Checks of a drafter driven by hand: whatever led to a text, the same proposal follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest

from specplug import tree
from specplug.drafter import StepView
from specplug.errors import RefusedError
from specplug.sampling import SamplingParams
from specplug.spec import DraftPlan, Release
from specplug.testing.bench import Bench
from specplug.testing.harness import Drafts, Harness, Move
from specplug.testing.oracle import chi_square_p

_AHEAD = 12
"""Tokens of a text's answer that a check commits at most; the texts' answers are twice as long."""
_WRONG = (6, 7)
"""Drafts that a check has the target reject."""


class DrafterChecks:
    """Each check builds drafters through `Bench.harness`, on the CPU, without an engine."""

    def test_drafts_something(self, bench: Bench) -> None:
        """Some text of the bench gets a draft: without one, no other check means anything."""
        harness = bench.harness()
        found = [harness.fresh(0, text, len(text) - ahead) for text in bench.texts for ahead in range(2, _AHEAD)]
        assert any(tokens for tokens, _ in found), "no text of the bench is given a single draft"

    def test_proposals_are_well_formed(self, bench: Bench) -> None:
        """Ids inside the vocabulary, parents first, siblings distinct, no deeper and no wider than planned."""
        harness = bench.harness()
        plan, vocab = harness.plan, bench.target().model.vocab_size
        for text in bench.texts:
            for ahead in range(2, _AHEAD):
                step = harness.play(1, text, len(text) - ahead, [len(text) - ahead])
                harness.propose(step)
                claimed = int(harness.proposal.num_valid[1])
                assert 0 <= claimed <= plan.nodes, f"num_valid {claimed}, the plan has {plan.nodes} nodes"
                tokens = harness.proposal.tokens[1, :claimed].tolist()
                parents = harness.proposal.parents[1, :claimed].tolist()
                what = f"drafts {tokens} with parents {parents}"
                assert tree.valid_prefix(tokens, parents, vocab) == claimed, (
                    f"{what}: a bad id, or a parent that is later"
                )
                assert max(tree.depths(parents), default=0) <= plan.depth, f"{what}: deeper than {plan.depth}"
                pairs = Counter(zip(tokens, parents, strict=True))
                assert not pairs or max(pairs.values()) == 1, f"{what}: two equal siblings"
                if "tree" not in plan.needs.shapes:
                    assert tree.is_chain(parents), f"{what}: a tree, planned as {sorted(plan.needs.shapes)}"
                harness.release(1)

    def test_foreign_slots_stay_untouched(self, bench: Bench) -> None:
        """A proposal for one row writes nothing for slots that have no row in the step."""
        harness = bench.harness()
        first, second = bench.texts[:2]
        harness.play(2, second, len(second) - 4, [len(second) - 4])
        step = harness.play(0, first, len(first) - 4, [len(first) - 4])
        for slot in (1, 2, 3):
            harness.proposal.tokens[slot] = 77
            harness.proposal.parents[slot] = -7
        before = [part[1:4].clone() for part in (harness.proposal.tokens, harness.proposal.parents)]
        harness.propose(step)
        for part, kept in zip((harness.proposal.tokens, harness.proposal.parents), before, strict=True):
            assert part[1:4].equal(kept), "propose for slot 0 wrote into another slot"
        assert harness.proposal.num_valid[1:4].tolist() == [0, 0, 0], "propose for slot 0 claimed drafts elsewhere"

    def test_row_order_does_not_matter(self, bench: Bench) -> None:
        """Rows in any order, among any neighbours and in any slot: the same proposal for the same text."""
        texts = bench.texts[:3]
        alone = [bench.harness().fresh(0, text, len(text) - 5) for text in texts]
        for slots, order in (
            ((0, 1, 2), (0, 1, 2)),
            ((0, 1, 2), (2, 0, 1)),
            ((3, 0, 2), (1, 2, 0)),
            ((2, 3, 1), (0, 2, 1)),
        ):
            harness = bench.harness()
            # Joined one after the other, so that the last step finds them at different ages.
            for slot, text in zip(slots, texts, strict=True):
                harness.admit(slot, text, 1)
                harness.ingest([Move(slot, len(text) - 7)])
            harness.ingest([Move(slots[at], 1) for at in reversed(order)])
            found = harness.propose(harness.ingest([Move(slots[at], 1) for at in order]))
            assert [found[slot] for slot in slots] == alone, f"slots {slots}, rows in order {order}"

    def test_slot_keeps_nothing(self, bench: Bench) -> None:
        """A long request, an unrelated one and the first again in one slot: nothing is left of the one before."""
        first, second = bench.texts[:2]
        # The short ones have seen little of their own, so whatever is left of the long one shows.
        plays = [(first, len(first) - 4), (second, 1), (second, 2), (second, 4), (first, len(first) - 4), (second, 1)]
        wanted = [bench.harness().fresh(0, text, committed) for text, committed in plays]
        harness = bench.harness()
        found = [harness.fresh(0, text, committed) for text, committed in plays]
        assert found == wanted, "a slot's next request sees the one before"

    def test_declined_rows_change_nothing(self, bench: Bench) -> None:
        """Rows with limit 0, one or all, disturb neither their neighbours nor their own next proposal."""
        texts = bench.texts[:3]
        wanted = [_history(bench.harness(), text, [len(text) - 6, 1]) for text in texts]
        for declined in ({1}, {0, 2}, {0, 1, 2}):
            harness = bench.harness()
            for slot, text in enumerate(texts):
                harness.admit(slot, text, 1)
            step = harness.ingest([Move(slot, len(text) - 6) for slot, text in enumerate(texts)])
            found = harness.propose(step, dict.fromkeys(declined, 0))
            assert all(found[slot] == ((), ()) for slot in declined)
            again = harness.propose(harness.ingest([Move(slot, 1) for slot in range(3)]))
            assert [again[slot] for slot in range(3)] == wanted, f"after declining slots {declined}"

    def test_neighbours_come_and_go(self, bench: Bench) -> None:
        """A row that leaves between its proposal and the verify, and one that takes its slot: no other row notices."""
        stays, leaves, joins = bench.texts[0], bench.texts[1], bench.texts[2]
        wanted = [bench.harness().fresh(0, text, len(text) - 4) for text in (stays, joins)]
        for reason in get_args(Release):
            harness = bench.harness()
            for slot, text in enumerate((stays, leaves)):
                harness.admit(slot, text, 1)
            harness.propose(harness.ingest([Move(slot, len(text) - 6) for slot, text in enumerate((stays, leaves))]))
            harness.release(1, reason)
            harness.propose(harness.ingest([Move(0, 1)]))
            harness.admit(1, joins, len(joins) - 4)
            found = harness.propose(harness.ingest([Move(1, len(joins) - 4), Move(0, 1)]))
            assert found[0] == wanted[0], f"a neighbour that left ({reason}) changed a proposal"
            assert found[1] == wanted[1], f"a request sees what left its slot ({reason})"

    def test_depth_may_change(self, bench: Bench) -> None:
        """Rounds that want less, down to nothing, and then the full depth: the proposal of a fresh run."""
        deepest = bench.harness().plan.depth
        for text in bench.texts:
            start = len(text) - _AHEAD
            wanted = bench.harness().fresh(0, text, start + 7)
            harness = bench.harness()
            step = harness.play(0, text, start, [start])
            for count, depth in ((1, deepest), (1, 1), (2, 0), (1, deepest // 2), (2, deepest)):
                _propose_at(bench, harness, step, depth)
                step = harness.ingest([Move(0, count)])
            assert harness.propose(step)[0] == wanted, "the proposal depends on how far was drafted before"

    def test_ingest_without_propose(self, bench: Bench) -> None:
        """Several forwards without being asked, then asked: as if asked each time."""
        for text in bench.texts:
            start = len(text) - _AHEAD
            asked, unasked = bench.harness(), bench.harness()
            for harness in (asked, unasked):
                harness.admit(0, text, start)
            for count in (start, 1, 2, 1, 3, 1):
                steps = [harness.ingest([Move(0, count)]) for harness in (asked, unasked)]
                last = asked.propose(steps[0])[0]
            assert unasked.propose(steps[1])[0] == last, "drafting state is stale after forwards without propose"

    def test_chunked_prefill(self, bench: Bench) -> None:
        """A prompt in chunks, or whole: the same proposal."""
        for text in bench.texts:
            prompt = len(text) - 3
            wanted = bench.harness().fresh(0, text, prompt)
            for counts in ([1, prompt - 1], [prompt - 1, 1], [5, 7, prompt - 12], [1] * prompt):
                assert _history(bench.harness(), text, counts, prompt) == wanted, f"prompt in chunks of {counts}"

    def test_full_acceptance(self, bench: Bench) -> None:
        """Forwards in which every draft was accepted: the same proposal as after one prompt of that text."""
        plan = bench.harness().plan
        most = min(plan.depth + 1, 4)
        for text in bench.texts:
            start = len(text) - 1 - 3 * most - 1
            counts = [start, most, most, most]
            wanted = bench.harness().fresh(0, text, sum(counts))
            assert _history(bench.harness(), text, counts, start, ask=True) == wanted, f"forwards of {counts} tokens"

    def test_rejected_drafts_leave_no_trace(self, bench: Bench) -> None:
        """Forwards in which drafts were rejected, after none, one or two accepted ones: as if never drafted."""
        for text in bench.texts:
            start = len(text) - _AHEAD
            wanted = bench.harness().fresh(0, text, start + 6)
            harness = bench.harness()
            harness.admit(0, text, start)
            step = harness.ingest([Move(0, start)])
            for count in (1, 2, 3):
                harness.propose(step)
                step = harness.ingest([Move(0, count, _WRONG[: harness.plan.nodes])])
            assert harness.propose(step)[0] == wanted, "rejected drafts changed the proposal"

    def test_preempt_and_resume(self, bench: Bench) -> None:
        """A request that loses its slot and comes back in another: as if it had never left."""
        for text in bench.texts:
            start = len(text) - _AHEAD
            wanted = bench.harness().fresh(0, text, start + 6)
            harness = bench.harness()
            harness.propose(harness.play(0, text, start, [start, 2], "comes back"))
            harness.release(0, "preempted")
            harness.propose(harness.play(0, bench.texts[3], 6, [6]))
            step = harness.play(1, text, start + 4, [start + 3, 1], "comes back")
            harness.propose(step)
            assert harness.propose(harness.ingest([Move(1, 2)]))[1] == wanted, "resuming changed the proposal"

    def test_memory_is_declared(self, bench: Bench) -> None:
        """What is taken from the arena, for any width, at start, is no more than the plan says; and it never moves."""
        for tokens in (2, 3, 6, 17):
            try:
                bench.harness(num_draft_tokens=tokens)
            except RefusedError:
                continue  # a width that the package does not offer
            except RuntimeError as error:
                raise AssertionError(f"num_draft_tokens {tokens}: {error}") from error
        try:
            harness = bench.harness()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error
        before = {name: buffer.data_ptr() for name, buffer in harness.arena.buffers.items()}
        text = bench.texts[0]
        for _ in range(5):
            step = harness.play(0, text, len(text) - _AHEAD, [len(text) - _AHEAD])
            for _ in range(_AHEAD - 2):
                harness.propose(step)
                step = harness.ingest([Move(0, 1)])
            harness.release(0)
        after = {name: buffer.data_ptr() for name, buffer in harness.arena.buffers.items()}
        assert after == before, "buffers were taken or moved after start"

    def test_q_is_honest(self, bench: Bench) -> None:
        """Drafts that exist follow the distribution recorded for them (dense drafters)."""
        if bench.spec.capabilities.proposal_probs != "dense":
            pytest.skip("one-hot proposals have no q")
        slots, rounds, text = 64, 40, bench.texts[0]
        committed = len(text) - 4
        harness = bench.harness(slots=slots, rule="rejection")
        if harness.proposal.q is None:
            pytest.skip("this configuration plans no dense proposals")
        counts: Counter[int] = Counter()
        for round_ in range(rounds):
            for slot in range(slots):
                sampling = SamplingParams(temperature=0.8, seed=slots * round_ + slot)
                harness.admit(slot, text, committed, sampling)
            found = harness.propose(harness.ingest([Move(slot, committed) for slot in range(slots)]))
            counts.update(tokens[0] for slot, (tokens, _) in found.items() if tokens and harness.proposal.dense[slot])
            for slot in range(slots):
                harness.release(slot)
        assert counts, "nothing was drafted"
        q = harness.proposal.q[0, 0]
        p_value = chi_square_p(counts, dict(enumerate(q.tolist())))
        assert p_value > 0.001, f"{sum(counts.values())} drafts do not follow their q: chi-square p = {p_value:.2g}"


def _propose_at(bench: Bench, harness: Harness, step: StepView, depth: int) -> None:
    """Ask for drafts as an adaptive run does that wants paths of `depth` nodes now; for 0 it does not ask."""
    run = bench.run()
    assert run.config is not None
    plan = bench.spec.plan(run.config, run.facts, depth)
    if depth and isinstance(plan, DraftPlan) and plan.depth == depth:  # else not a depth that can be chosen
        step.depth = depth
        harness.propose(step, {0: plan.nodes})


def _history(
    harness: Harness, text: Sequence[int], counts: Sequence[int], prompt_len: int = 1, *, ask: bool = False
) -> Drafts:
    """Return the proposal after forwards of `counts` tokens; `ask`: it is asked for after each of them."""
    harness.admit(0, text, prompt_len)
    for count in counts:
        step = harness.ingest([Move(0, count)])
        if ask:
            harness.propose(step)
    return harness.propose(step)[0]
