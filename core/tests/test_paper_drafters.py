"""The paper drafters: the whole kit on each, and every proposal an engine makes against a fresh run on its text."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

from specplug import Facts, SamplingParams
from specplug.facts import facts_of
from specplug.models.target import Target
from specplug.options import EngineOptions
from specplug.planning import plan_run
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.runtime.request import Request
from specplug.testing.bench import PROMPTS
from specplug.testing.conformance import DrafterConformance
from specplug.testing.harness import Harness, Move
from specplug.testing.oracle import expected
from specplug.testing.paper import paper_registry
from specplug.testing.targets import decoder_target, dense_forward, reference_logits

# --- the kit --------------------------------------------------------------------------------------------------------


class Paper(DrafterConformance):
    __test__ = False

    def search_path(self, folder: Path) -> Sequence[str]:
        paper_registry(folder)
        return [str(folder)]

    def make_target(self, kind: Literal["ids", "text"], folder: Path) -> Target:
        # A vocabulary of 8, so that random drafts are accepted often enough to matter.
        return decoder_target(2, 8, folder=folder) if kind == "ids" else super().make_target(kind, folder)


class TestShifted(Paper):
    __test__ = True
    algorithm = "paper-shifted"


class TestTree(Paper):
    __test__ = True
    algorithm = "paper-tree"


class TestChained(Paper):
    __test__ = True
    algorithm = "paper-chained"


class TestReader(Paper):
    __test__ = True
    algorithm = "paper-reader"


class TestBlock(Paper):
    __test__ = True
    algorithm = "paper-block"


class TestSelf(Paper):
    __test__ = True
    algorithm = "paper-self"
    config: ClassVar = {"paper_decoys": True, "num_draft_tokens": 7}

    def make_target(self, kind: Literal["ids", "text"], folder: Path) -> Target:
        return self._bench.default_target(kind, folder)

    # Its weights are the target's, so the target lies on disk.
    def has_draft(self) -> bool:
        return False


class TestCombined(Paper):
    __test__ = True
    algorithm = "paper-combined"
    config: ClassVar = {"paper_parts": ("paper-chained", "paper-tree", "paper-shifted")}


# --- proposals of an engine -----------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, seed=5)
CASES: Mapping[str, Mapping[str, Any]] = {
    "paper-shifted": {"num_draft_tokens": 4},
    "paper-tree": {"num_draft_tokens": 9, "num_steps": 3, "paper_topk": 3},
    "paper-chained": {"num_draft_tokens": 3},
    "paper-tree scratch": {"num_draft_tokens": 5, "num_steps": 4, "paper_topk": 4},  # 12 scratch rows for 4 nodes
    "paper-reader": {"num_draft_tokens": 4},
    "paper-block": {"num_draft_tokens": 5},
    "paper-self": {"num_draft_tokens": 4},
    "paper-combined": {"paper_parts": ("paper-tree", "paper-chained"), "num_draft_tokens": 6},
}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return paper_registry(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return decoder_target(2, 8, folder=tmp_path_factory.mktemp("target"))


Make = Callable[..., Engine]


@pytest.fixture
def make(registry: Registry, target: Target) -> Make:
    def engine(algorithm: str, config: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        config = CASES[algorithm] if config is None else config
        options = {"page_size": 4, "context_length": 96, **options}
        return Engine(target, algorithm=algorithm.split()[0], config=config, registry=registry, **options)

    return engine


@pytest.fixture
def drafted_fresh(registry: Registry, target: Target) -> Callable[[Engine, Request], tuple[list[int], list[int]]]:
    """What a drafter that sees a request's whole text as one prompt would draft for it."""
    harnesses: dict[str, Harness] = {}

    def answer(engine: Engine, request: Request) -> tuple[list[int], list[int]]:
        if engine.run.algorithm not in harnesses:
            harnesses[engine.run.algorithm] = Harness(engine.run, target, slots=1)
        harness = harnesses[engine.run.algorithm]
        committed = len(request.tokens) - 1
        sampling = request.sampling.model_copy(update={"seed": request.seed})
        harness.admit(0, request.tokens, committed, sampling)
        step = harness.ingest([Move(0, committed)])
        assert request.draft is not None
        tokens, parents = harness.propose(step, {0: len(request.draft.tokens)})[0]
        harness.release(0)
        return list(tokens), list(parents)

    return answer


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("algorithm", CASES)
def test_proposals_equal_those_of_a_fresh_run(algorithm, sampling, make, drafted_fresh):
    """Through chunks, verifies, tree compaction and preemption: the draft is the one for the text as a prompt."""
    with make(algorithm, max_total_tokens=72, context_length=64, chunked_prefill_size=7) as engine:
        requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
        compared, accepted = 0, 0
        while any(request.output.finish_reason is None for request in requests):
            engine.step()
            accepted += engine.last_step.accepted if engine.last_step else 0
            for request in requests:
                assert not request.error, request.error
                if request.draft is not None:
                    found = (request.draft.tokens, request.draft.parents)
                    assert found == drafted_fresh(engine, request), f"after {request.tokens}"
                    compared += 1
        assert engine.preemptions > 0
        assert compared > 20
        assert accepted > 3, "hardly a draft was accepted: the comparison would not see stale state"
        assert engine.free_pages == engine.pages


@pytest.mark.parametrize("algorithm", ["paper-shifted", "paper-chained", "paper-block", "paper-tree"])
def test_proposals_when_only_some_are_asked_for(algorithm, make, drafted_fresh):
    """Rows that decline in some steps draft afterwards as if they had never declined."""
    with make(algorithm) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
        compared = 0
        for step in range(16):
            for at, request in enumerate(requests):
                request.max_drafted = None if (step + at) % 3 == 0 else 0
            engine.step()
            for request in requests:
                if request.draft is not None:
                    assert (request.draft.tokens, request.draft.parents) == drafted_fresh(engine, request)
                    compared += 1
        assert compared > 10


# --- the tree against its definition -------------------------------------------------------------------------------


class _DenseKV:
    """One sequence's KV, each new row a query over all before it."""

    def __init__(self) -> None:
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, index: object = None) -> None:
        self.rows += zip(k, v, strict=True)

    def attend(self, pattern: object, layer: int, q: torch.Tensor, visible: object = None) -> torch.Tensor:
        keys, values = (torch.stack(part) for part in zip(*self.rows, strict=True))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
        hidden = torch.arange(len(keys)) > torch.arange(len(keys) - len(q), len(keys))[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@torch.inference_mode()
def _dense_tree(drafter: Any, target: Target, text: Sequence[int], steps: int, topk: int) -> list[tuple[int, ...]]:
    """All nodes of the tree for `text`, best first, each path recomputed from the beginning of the text."""
    (tap,) = dense_forward(target.model, text[:-1], drafter.plan.needs.taps)[1]

    def scores(path: Sequence[int]) -> torch.Tensor:
        kv = _DenseKV()

        def run(tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
            at = torch.arange(len(kv.rows), len(kv.rows) + len(tokens))
            x = drafter.layer.fuse(drafter.embed(torch.tensor(tokens)), hidden)
            return drafter.layer.run(kv, 0, None, x, drafter.rope(at))[-1:]

        hidden = run(text[1:], tap)
        for token in path:
            hidden = run([token], hidden)
        return drafter.lm_head(hidden)[0].log_softmax(-1)

    frontier, nodes = [((), 0.0)], []
    for _ in range(steps):
        level = []
        for path, total in frontier:
            values, words = scores(path).topk(topk)
            level += [
                ((*path, word), total + value) for value, word in zip(values.tolist(), words.tolist(), strict=True)
            ]
        nodes += level
        frontier = sorted(level, key=lambda node: -node[1])[:topk]
    return [path for path, _ in sorted(nodes, key=lambda node: -node[1])]


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(1, 3, 4), (3, 1, 4), (3, 3, 9), (4, 2, 14), (2, 8, 40)])
def test_the_tree_is_the_best_nodes_of_all_levels(steps, topk, tokens, registry, target):
    """Every node's score is that of its path alone: a sibling seen, or an ancestor missed, changes the order."""
    config = {"num_draft_tokens": tokens, "num_steps": steps, "paper_topk": topk}
    run = plan_run(registry, "paper-tree", config, facts_of(target.checkpoint, EngineOptions()))
    harness = Harness(run, target)
    for prompt in PROMPTS:
        text = [*prompt, 3, 1]
        found = _paths(*harness.fresh(0, text, len(text) - 1))
        assert len(found) == run.plan.nodes
        assert found == _dense_tree(harness.drafter, target, text, steps, topk)[: run.plan.nodes]


def test_a_tree_of_one_branch_is_the_chain(registry, target):
    facts = facts_of(target.checkpoint, EngineOptions())
    tree = {"num_draft_tokens": 5, "num_steps": 4, "paper_topk": 1}
    harnesses = [
        Harness(plan_run(registry, name, config, facts), target)
        for name, config in (("paper-tree", tree), ("paper-shifted", {"num_draft_tokens": 5}))
    ]
    for prompt in PROMPTS:
        one, other = (harness.fresh(0, [*prompt, 2], len(prompt)) for harness in harnesses)
        assert one == other


# --- draft == target ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_target_accepts_its_own_drafts(decoys, steps, make, target):
    """Every round accepts every right node and no decoy, through chunked prefill and preemption."""
    width = 2 if decoys else 1
    config = {"paper_decoys": decoys, "num_draft_tokens": 1 + steps * width}
    sampling = SamplingParams(temperature=0.0, max_tokens=1 + 4 * (steps + 1) + width * steps)
    logits = reference_logits(target)
    tight = {"max_total_tokens": 48, "context_length": 48, "chunked_prefill_size": 7}
    for options in ({}, tight):
        with make("paper-self", config, **options) as engine:
            requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
            rounds: list[list[int]] = [[] for _ in requests]
            while any(request.output.finish_reason is None for request in requests):
                before = [(request.draft, len(request.tokens)) for request in requests]
                engine.step()
                for request, (draft, length), found in zip(requests, before, rounds, strict=True):
                    if draft is not None and len(request.tokens) > length:  # else it was preempted
                        right = len(draft.tokens) // width
                        assert len(request.tokens) - length == right + 1, f"of {draft}, after {length} tokens"
                        found.append(right)
            assert engine.free_pages == engine.pages
            if options:
                assert engine.preemptions > 0
                assert any(steps in found for found in rounds)
            else:
                assert all(found[:4] == [steps] * 4 for found in rounds), "every round drafts every step"
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert request.output.ids == expected(logits, prompt, sampling, context=96).ids


def test_the_target_accepts_its_own_drafts_in_any_company(make):
    """Neighbours of other lengths, a late arrival and an abort: the others still accept everything."""
    with make("paper-self", {"num_draft_tokens": 4}) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
        for _ in range(2):
            engine.step()
        late = engine.submit(PROMPTS[4], GREEDY)
        engine.step()
        engine.abort(requests[1])
        while any(request.output.finish_reason is None for request in (requests[0], requests[2], late)):
            engine.step()
        for request in (requests[0], requests[2], late):
            ledger = request.settled_ledger()
            assert ledger.report()["accept_length"] == pytest.approx(1 + 3, abs=0.3), ledger.report()


def test_drafting_goes_on_to_the_last_position_of_the_target(make):
    """A full context: no table is read beyond its end, no page beyond the request's."""
    prompt = [token % 8 for token in range(500)]
    for algorithm in ("paper-shifted", "paper-tree", "paper-self", "paper-block", "paper-reader"):
        with make(algorithm, context_length=512, page_size=16, max_running_requests=2) as engine:
            (result,) = engine.generate([prompt], SamplingParams(temperature=0.0))
        assert not result.error, result.error
        assert len(result.ids) == 12


def test_empty_facts_are_refused_in_words(registry):
    """What `doctor NAME` does without a model."""
    for installed in registry.algorithms.values():
        if installed.distribution == "specplug-paper":
            answer = installed.spec.plan(installed.spec.config_model(), Facts.empty(), None)
            assert "can plan" in answer.reason or "config names no" in answer.reason


def test_weights_are_seeded(registry, target):
    """Two drafters of one seed are the same, of two seeds are not."""
    before = torch.get_rng_state()
    facts = facts_of(target.checkpoint, EngineOptions())
    text = [*PROMPTS[0], 1]
    found = [
        Harness(plan_run(registry, "paper-shifted", {"num_draft_tokens": 9, "paper_seed": seed}, facts), target).fresh(
            0, text, len(PROMPTS[0])
        )
        for seed in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]
    assert torch.equal(torch.get_rng_state(), before), "randomness came from the global generator"
