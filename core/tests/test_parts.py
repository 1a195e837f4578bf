"""Drafters inside a drafter: whose drafts are proposed, what each part sees, and how certain and drawn drafts mix."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from specplug import (
    Capabilities,
    CombinedDrafter,
    Drafter,
    Proposal,
    SamplingParams,
    StepView,
    UserError,
    combined_plan,
)
from specplug.facts import facts_of
from specplug.models.target import Target
from specplug.options import EngineOptions
from specplug.planning import plan_run
from specplug.proposal import proposal_to_write
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.testing.bench import PROMPTS
from specplug.testing.harness import Harness
from specplug.testing.oracle import chi_square_p, expected, sequence_probabilities
from specplug.testing.paper import paper_registry
from specplug.testing.paper_drafters import Shifted
from specplug.testing.targets import decoder_target, reference_logits

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
CALLS = (
    *("load", "allocate", "capture", "on_admit", "ingest", "propose"),
    *("on_release", "metrics", "close"),
)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return paper_registry(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def target() -> Target:
    return decoder_target(2, 8)


@pytest.fixture
def make(registry: Registry, target: Target) -> Callable[..., Engine]:
    def engine(algorithm: str, config: Mapping[str, Any], **options: Any) -> Engine:
        options = {"page_size": 4, "context_length": 96, **options}
        return Engine(target, algorithm=algorithm, config=config, registry=registry, **options)

    return engine


def _combined(*parts: str, **options: Any) -> dict[str, Any]:
    return {"paper_parts": parts, "num_draft_tokens": 5, **options}


def test_host_part_wins_and_the_device_fills_the_rest(make, target):
    """Scripted drafts from the host for one prompt; the other rows get the device's, sampled and recorded."""
    logits = reference_logits(target)
    known = [*PROMPTS[0], *expected(logits, PROMPTS[0], GREEDY, context=96).ids]
    scripted = {"scripted_texts": [tuple(known)]}
    for parts in (("scripted", "paper-block"), ("paper-block", "scripted")):
        options = ({}, scripted) if parts[0] == "paper-block" else (scripted, {})
        with make("paper-combined", _combined(*parts, paper_options=options)) as engine:
            assert engine.run.plan.needs.runs_on == {"device", "host"}
            requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
            seen = 0
            while any(request.output.finish_reason is None for request in requests):
                engine.step()
                for request in requests:
                    assert not request.error, request.error
                host, *others = requests
                if host.draft is not None and all(other.draft is not None for other in others):
                    at = len(host.tokens)
                    assert host.draft.tokens == known[at : at + len(host.draft.tokens)]
                    seen += 1
            assert seen > 2
            for request, prompt in zip(requests, PROMPTS, strict=False):
                assert request.output.ids == expected(logits, prompt, GREEDY, context=96).ids
            assert requests[0].settled_ledger().report()["accept_rate"] == 1.0


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("first", ["scripted", "scripted-device"])
def test_rows_of_sampled_and_of_certain_drafts_follow_the_target(first, rule, make, target):
    """Under either rule: one part's drafts are certain, the other's drawn, and a row has now these, now those."""
    prompt, sampling = PROMPTS[0], SamplingParams(temperature=0.9, top_k=3, max_tokens=4)
    logits = reference_logits(target)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    texts = [(*prompt, *expected(logits, prompt, greedy, context=96).ids)]
    options = ({"scripted_texts": texts}, {})
    draws = 1200
    each = [sampling.model_copy(update={"seed": seed}) for seed in range(draws)]
    config = _combined(first, "paper-block", paper_options=options)
    with make("paper-combined", config, speculative_acceptance=rule, max_running_requests=128) as engine:
        results = engine.generate([prompt] * draws, each)
        assert engine.ledger.accepted > draws / 4
    counts = Counter(tuple(result.ids[:3]) for result in results)
    assert chi_square_p(counts, sequence_probabilities(logits, prompt, sampling, 3)) > 0.001


def test_first_part_with_a_draft_wins(make):
    """Two device parts with different trees and taps: the first one's drafts, and its parents, are proposed."""
    with make("paper-combined", _combined("paper-shifted", "paper-tree")) as both, make("paper-shifted", {}) as one:
        first = [both.submit(PROMPTS[0], GREEDY), one.submit(PROMPTS[0], GREEDY)]
        both.step()
        one.step()
        assert first[0].draft.tokens[:3] == first[1].draft.tokens
        assert first[0].draft.parents == [-1, 0, 1, 2]


def test_every_part_drafts_what_it_drafts_alone(registry, target):
    """Each sees its own taps, lookahead, KV layers and target patterns, whatever stands beside it."""
    names = ("paper-chained", "paper-block", "paper-reader", "paper-tree", "paper-shifted", "paper-block")
    facts = facts_of(target.checkpoint, EngineOptions())
    options = tuple({"paper_seed": seed} for seed in range(len(names)))
    whole = Harness(plan_run(registry, "paper-combined", _combined(*names, paper_options=options), facts), target)
    text = [*PROMPTS[0], 4, 2, 1, 1, 0]
    whole.propose(whole.play(1, text, 6, [4, 2, 3, 1, 2]))
    for at, (name, own) in enumerate(zip(names, options, strict=True)):
        alone = Harness(plan_run(registry, name, {"num_draft_tokens": 5, **own}, facts), target)
        tokens, parents = alone.fresh(1, text, 12)
        part = whole.drafter.parts[at]._own
        assert part.tokens[1, : len(tokens)].tolist() == list(tokens), f"part {at}, {name}"
        assert part.parents[1, : len(tokens)].tolist() == list(parents), f"part {at}, {name}"


def test_max_position_bounds_drafts_and_what_is_seen(make, monkeypatch):
    """No draft lies beyond it, and no position that `ingest` sees does; a part is held to its own."""
    seen: list[int] = []
    ingest = Shifted.ingest

    def recorded(self: Shifted, step: StepView) -> None:
        seen.append(int(step.positions.max()))
        ingest(self, step)

    monkeypatch.setattr(Shifted, "ingest", recorded)
    config = {"num_draft_tokens": 4, "paper_max_position": 15}
    parts = _combined("paper-shifted", "paper-chained", paper_options=(config, {"num_draft_tokens": 2}))
    for algorithm, options, later in (("paper-shifted", config, 0), ("paper-combined", parts, 1)):
        seen.clear()
        with make(algorithm, options) as engine:
            request = engine.submit(PROMPTS[0], GREEDY)
            while request.output.finish_reason is None:
                engine.step()
                if request.draft is not None:
                    last = request.kv_len + len(request.draft.tokens)
                    assert last <= 15 or len(request.draft.tokens) == later
                elif request.output.finish_reason is None and len(request.output.ids) < 23:
                    assert not later
                    assert request.kv_len >= 15
        assert max(seen) == 15


def test_parts_are_refused_with_their_reason(make):
    """A part that does not exist, one inside itself, and one whose options are wrong."""
    for parts, says in (
        (("paper-nothing",), "no algorithm 'paper-nothing' is installed"),
        (("paper-combined",), "an algorithm cannot be part of itself"),
    ):
        with pytest.raises(UserError, match=says):
            make("paper-combined", _combined(*parts))
    with pytest.raises(UserError, match=r"paper.seed"):
        make("paper-combined", _combined("paper-shifted", paper_options=({"paper_seed": -1},)))


def test_a_combined_plan_unites_needs_and_sums_memory(registry, target):
    facts = facts_of(target.checkpoint, EngineOptions())
    plans = [
        plan_run(registry, name, {"num_draft_tokens": width}, facts).plan
        for name, width in (("paper-chained", 3), ("paper-block", 6), ("paper-reader", 2))
    ]
    whole = combined_plan(*plans)
    assert whole.nodes == 5
    assert whole.lookahead == 2
    assert [tap.at for tap in whole.needs.taps] == ["final_norm", 2, 1]
    assert whole.needs.proposal_probs == "dense"
    assert whole.needs.draft_kv == {"own_layers", "reads_target"}
    assert whole.bytes_per_slot == sum(plan.bytes_per_slot for plan in plans)
    assert [group.layers for group in whole.kv] == [2, 1]
    assert not whole.needs.variable_depth
    bounded = [plan.model_copy(update={"max_position": bound}) for plan, bound in zip(plans, (7, 9, 9), strict=True)]
    assert combined_plan(*bounded).max_position == 9
    assert combined_plan(*bounded, plans[0]).max_position is None


def test_parts_take_memory_from_their_own_plans(registry, target, make):
    """A part's buffers are counted, named apart, and held to what the part declared."""
    run = plan_run(
        registry,
        "paper-combined",
        _combined("paper-shifted", "paper-shifted"),
        facts_of(target.checkpoint, EngineOptions()),
    )
    harness = Harness(run, target)
    assert sorted(harness.arena.buffers) == [
        f"{at}:paper-shifted/{name}" for at in (0, 1) for name in ("first", "state")
    ]


def test_a_part_sees_the_step_of_its_own_plan(make, monkeypatch):
    """No token further ahead than it asked for, no host rows for one of the device, no depth beyond its own."""
    seen: list[tuple[int, object, int]] = []
    ingest = Shifted.ingest

    def recorded(self: Shifted, step: StepView) -> None:
        seen.append((step.next_tokens.shape[1], step.host, step.depth))
        ingest(self, step)

    monkeypatch.setattr(Shifted, "ingest", recorded)
    parts, narrow = ("paper-chained", "paper-shifted", "scripted"), ({}, {"num_draft_tokens": 3}, {})
    with make("paper-combined", _combined(*parts, paper_options=narrow)) as engine:
        assert engine.run.plan.lookahead == 2
        engine.generate([PROMPTS[0]], GREEDY)
    assert set(seen) == {(1, None, 2)}


def test_every_part_hears_of_every_call():
    """In order; one that raises in `on_release` or `close` keeps no other from giving back what it holds."""
    told: list[tuple[str, str]] = []

    class Recorder(CombinedDrafter):
        def __init__(self, name: str, raises: str = "") -> None:
            self.name, self.raises = name, raises

        def __getattribute__(self, call: str) -> Any:
            if call not in CALLS:
                return super().__getattribute__(call)

            def record(*given: Any) -> Mapping[str, float]:
                told.append((self.name, call))
                if call == self.raises:
                    raise ValueError(call)
                return {self.name: len(given)}

            return record

    given = {"on_release": (1, "finished"), "propose": (None, None), "metrics": (), "close": ()}
    whole = CombinedDrafter({}, None, None)
    whole.parts = [Recorder("a"), Recorder("b")]
    assert set(CALLS) == {name for name in vars(Drafter) if not name.startswith("_")}
    for call in CALLS:
        told.clear()
        answer = getattr(whole, call)(*given.get(call, (None,)))
        assert told == [("a", call), ("b", call)]
        assert answer == ({"a": 0, "b": 0} if call == "metrics" else None)
    for call in ("on_release", "close"):
        told.clear()
        whole.parts = [Recorder("a", call), Recorder("b")]
        with pytest.raises(ValueError, match=call):
            getattr(whole, call)(*given[call])
        assert told == [("a", call), ("b", call)]


# --- proposals ------------------------------------------------------------------------------------------------------


def _proposal(nodes: int, fill: int, dense: bool) -> Proposal:
    proposal = Proposal(3, nodes, 5, rule="rejection", dense=True, device=torch.device("cpu"))
    proposal.tokens.fill_(fill)
    proposal.parents.fill_(fill - 2)
    proposal.num_valid.fill_(fill)
    proposal.dense.fill_(dense)
    assert proposal.q is not None
    proposal.q.fill_(fill)
    return proposal


@pytest.mark.parametrize("dense", [False, True])
def test_take_copies_a_row_and_nothing_else(dense):
    """Tokens, parents, count, and q with the mark that says whether it counts; nodes that the other lacks stay."""
    whole, part = _proposal(3, 1, not dense), _proposal(2, 2, dense)
    whole.take(part, torch.tensor([1]))
    assert whole.tokens.tolist() == [[1, 1, 1], [2, 2, 1], [1, 1, 1], [1, 1, 1]]
    assert whole.parents.tolist() == [[-1, -1, -1], [0, 0, -1], [-1, -1, -1], [-1, -1, -1]]
    assert whole.num_valid.tolist() == [1, 2, 1, 1]
    assert whole.dense.tolist() == [not dense, dense, not dense, not dense]
    assert whole.q[:, :, 0].tolist() == [[1, 1, 1], [2, 2, 1], [1, 1, 1], [1, 1, 1]]


def test_rows_set_on_the_host_win():
    """They replace the device's, are certain, and the next round begins without them."""
    proposal = _proposal(3, 1, dense=True)
    out = proposal_to_write(proposal, Capabilities(runs_on=frozenset({"device", "host"})))
    assert out is proposal
    proposal.begin({0: 3, 2: 2})
    assert proposal.host.limit.tolist() == [3, 0, 2, 0]
    proposal.num_valid[:] = 1
    proposal.host.set(2, [4, 3], [-1, -1])
    assert proposal.tokens[2].tolist() == [1, 1, 1], "both sides must be writable in one round"
    proposal.merge_host()
    assert proposal.tokens[2, :2].tolist() == [4, 3]
    assert proposal.parents[2, :2].tolist() == [-1, -1]
    assert proposal.num_valid.tolist() == [1, 1, 2, 1]
    assert proposal.dense.tolist() == [True, True, False, True]
    proposal.begin({2: 1})
    proposal.merge_host()
    assert proposal.num_valid.tolist() == [0, 0, 0, 0]
