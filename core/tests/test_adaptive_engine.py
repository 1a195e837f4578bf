"""Depths chosen while an engine runs: tokens that a drafter may miss and gets later, results that keep their depth."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from specplug import SamplingParams, StepView, reference
from specplug.adaptive.policy import Decision, Forced, Policy, Round
from specplug.registry import Registry
from specplug.runtime.device.executor import DeviceExecutor
from specplug.runtime.device.stream import Mark
from specplug.runtime.engine import Engine
from specplug.runtime.request import Request
from specplug.runtime.scheduler import Row
from specplug.spec import DraftPlan
from specplug.testing import scripted
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.registry import bench_registry
from specplug.testing.scripted_drafters import DeviceScripted
from specplug.testing.targets import decoder_target, reference_logits, table_target

TARGET = table_target(16, 2, 1, alphabet=range(8))
LOGITS = reference_logits(TARGET)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = tuple(
    (*prompt, *reference.decode(LOGITS, prompt, GREEDY.model_copy(update={"max_tokens": 60}))) for prompt in PROMPTS
)
PATHS = pytest.mark.parametrize("path", [nullcontext, device_path], ids=["host", "device"])
BOTH = pytest.mark.parametrize("algorithm", ["scripted", "scripted-device"])


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"), installed=True)


@pytest.fixture
def from_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted drafters whose plans say that they can catch up from tokens; they count the tokens that they see."""
    plan = scripted._plan

    def changed(*given: Any) -> Any:
        found = plan(*given)
        return found.model_copy(update={"catch_up": "tokens"}) if isinstance(found, DraftPlan) else found

    monkeypatch.setattr(scripted, "_plan", changed)


def engine_for(
    registry: Registry, algorithm: str = "scripted-device", policy: Policy | None = None, **options: Any
) -> Engine:
    config = {"num_draft_tokens": 4, "scripted_behaviour": "right", "scripted_texts": LONG}
    options = {"page_size": 4, "context_length": 96, "disable_cuda_graph": True, **options}
    if policy is not None:  # so that there are depths to force
        options |= {"speculative_adaptive": True, "speculative_adaptive_policy": "cost"}
    engine = Engine(TARGET, algorithm=algorithm, config=config, registry=registry, **options)
    if policy is not None:
        assert engine._built.drafting is not None
        engine._built.drafting.policy = policy
    return engine


def answers(prompts: Sequence[Sequence[int]] = PROMPTS, most: int = 20) -> list[list[int]]:
    return [list(LONG[PROMPTS.index(tuple(prompt))][len(prompt) :][:most]) for prompt in prompts]


# --- what a drafter misses -------------------------------------------------------------------------------------------


@PATHS
@BOTH
@pytest.mark.parametrize("chunk", [2, 512])
@pytest.mark.parametrize("depths", [(3, 3, 0, 0, 0, 3, 3), (0, 0, 0, 0, 0, 0, 2, 0, 3), (3, 0)])
def test_missed_tokens_come_later_and_none_is_lost(
    registry: Registry, from_tokens: None, depths: Sequence[int], chunk: int, algorithm: str, path: Callable[[], Any]
) -> None:
    """The scripted drafters count what they are handed and raise where a token is missing or comes twice."""
    # Breaks with: no catch-up, a range that begins one late, prompt chunks at depth 0 left out.
    with path(), engine_for(registry, algorithm, Forced(depths), chunked_prefill_size=chunk) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        assert engine.speculation == "on"
        assert [result.ids for result in results] == answers()
        assert engine.free_pages == engine.pages
        if depths[-1]:
            assert all(result.ledger["accept_rate"] == 1.0 for result in results)
            assert all(result.ledger["accepted"] > 0 for result in results)


@pytest.mark.usefixtures("from_tokens")
@PATHS
def test_nothing_is_handed_over_at_depth_0(registry: Registry, path: Callable[[], Any]) -> None:
    """Unless the plan says that the drafter needs each step."""
    # Breaks with: ingest called at depth 0.
    with path(), engine_for(registry, policy=Forced([0])) as engine:
        assert engine._built.drafting is not None
        drafter = engine._built.drafting._drafter
        assert isinstance(drafter, DeviceScripted)
        engine.generate(PROMPTS[:2], GREEDY)
        assert drafter._calls == {"ingest": 0, "propose": 0}


@PATHS
def test_a_drafter_that_needs_each_step_gets_it(registry: Registry, path: Callable[[], Any]) -> None:
    with path(), engine_for(registry, policy=Forced([0])) as engine:
        assert engine._built.drafting is not None
        engine.generate(PROMPTS[:2], GREEDY)
        calls = engine._built.drafting._drafter._calls  # type: ignore[attr-defined]
        assert calls["ingest"] > 10
        assert calls["propose"] == 0


@pytest.mark.usefixtures("from_tokens")
def test_late_tokens_are_handed_over_in_pieces_that_look_like_prompts(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of late tokens is larger than a prompt chunk, whatever was missed by however many."""
    # Breaks with: one step for a range of any length; a limit for each row alone; rows whose root seems sampled.
    sizes: list[int] = []
    roots: list[tuple[Request, int, int]] = []
    make = DeviceExecutor._late

    def watched(self: DeviceExecutor, rows: Sequence[Row]) -> StepView:
        view = make(self, rows)
        sizes.append(sum(len(row.tokens) for row in rows))
        count = len(rows)
        assert view.num_kept[:count].tolist() == [len(row.tokens) for row in rows]
        assert view.final.tolist() == [False] * len(view.final)
        ends = [row.start + len(row.tokens) for row in rows]
        roots.extend(zip([row.request for row in rows], ends, view.root[:count].tolist(), strict=True))
        return view

    monkeypatch.setattr(DeviceExecutor, "_late", watched)
    with device_path(), engine_for(registry, policy=Forced([3] * 4 + [0] * 8 + [3]), chunked_prefill_size=6) as engine:
        results = engine.generate(PROMPTS, GREEDY)
    assert [result.ids for result in results] == answers()
    assert all(request.tokens[at] == root for request, at, root in roots), "launched ahead, the host learns it later"
    assert max(sizes) == 6
    assert len(sizes) > 2


@pytest.mark.usefixtures("from_tokens")
@PATHS
def test_a_slot_that_missed_something_is_clean_for_the_next_request(
    registry: Registry, path: Callable[[], Any]
) -> None:
    # Breaks with: what was missed outliving its request.
    with path(), engine_for(registry, policy=Forced([3, 3, *[0] * 30, 3]), max_running_requests=1) as engine:
        first = engine.generate(PROMPTS[:1], GREEDY)
        rest = engine.generate(PROMPTS[1:], GREEDY)
        assert engine.speculation == "on"
    assert [result.ids for result in (*first, *rest)] == answers()


@pytest.mark.usefixtures("from_tokens")
@PATHS
def test_preemption_and_abort_while_tokens_are_missed(registry: Registry, path: Callable[[], Any]) -> None:
    options: dict[str, Any] = {"max_total_tokens": 96, "max_running_requests": 4}
    with path(), engine_for(registry, policy=Forced([3, 0, 0, 3, 0] * 40), **options) as engine:
        requests = [engine.submit(prompt, {"temperature": 0, "max_tokens": 30}) for prompt in PROMPTS]
        for step in range(400):
            if step == 9:
                engine.abort(requests[1])
            engine.step()
            if all(request.output.finish_reason for request in requests):
                break
        assert engine.speculation == "on"
        assert engine.preemptions > 0
        assert engine.free_pages == engine.pages
    for prompt, request in zip(PROMPTS, requests, strict=True):
        ids = list(request.output.ids)
        assert ids == answers([prompt], 30)[0][: len(ids)]
        assert len(ids) == 30 or request is requests[1]


@PATHS
def test_returning_from_0_loses_no_acceptance(tmp_path: Path, path: Callable[[], Any]) -> None:
    """With KV of the drafter's own and a draft model that is the target, every draft is right before and after."""
    # Breaks with: KV of missed tokens that is never written.
    pytest.importorskip("specplug_standalone")
    target = decoder_target(3, 64, folder=tmp_path / "target")
    options = {"speculative_draft_model_path": str(tmp_path / "target"), "page_size": 4, "context_length": 96}
    with Engine(target, page_size=4, context_length=96) as plain:
        wanted = [result.ids for result in plain.generate(PROMPTS, GREEDY)]
    with path(), Engine(target, algorithm="standalone", disable_cuda_graph=True, **options) as engine:
        assert engine._built.drafting is not None
        for depths in ([3, 3, 0, 0, 0, 3, 3], [0, 0, 0, 0, 0, 3]):
            engine._built.drafting.policy = Forced(depths)
            results = engine.generate(PROMPTS, GREEDY)
            assert [result.ids for result in results] == wanted
            assert all(result.ledger["accept_rate"] == 1.0 and result.ledger["accepted"] for result in results)


# --- what is told ----------------------------------------------------------------------------------------------------


class Alternating(Forced):
    """3, 1, 0 in turn; keeps what it is told."""

    def __init__(self) -> None:
        super().__init__([3, 1, 0] * 100)
        self.rounds: list[Round] = []
        self.forgotten: list[int] = []

    def observe(self, round: Round) -> None:
        self.rounds.append(round)

    def forget(self, slot: int) -> None:
        self.forgotten.append(slot)


@PATHS
@BOTH
def test_results_keep_the_depth_that_produced_them(registry: Registry, algorithm: str, path: Callable[[], Any]) -> None:
    """A perfect drafter accepts exactly what was asked for, whatever was decided in between."""
    # Breaks with: results credited to the newest decision.
    policy = Alternating()
    with path(), engine_for(registry, algorithm, policy) as engine:
        engine.generate(PROMPTS[:3], GREEDY.model_copy(update={"max_tokens": 40}))
    results = [result for round in policy.rounds for result in round.results]
    assert {result.decision.depth for result in results} == {0, 1, 3}
    for result in results:
        assert result.limit <= result.decision.depth
        assert result.accepted == result.drafted == result.limit
    assert sorted(set(policy.forgotten)) == [0, 1, 2]
    for round in policy.rounds:
        assert round.rows == len(round.results)
        assert round.tokens == round.rows + sum(result.drafted for result in round.results)


def test_times_are_told_of_ordinary_rounds_only(registry: Registry) -> None:
    """Not where a prompt shared the forward, nor of the drafting after one."""
    policy = Alternating()
    with engine_for(registry, policy=policy, chunked_prefill_size=4) as engine:
        engine.submit(PROMPTS[0], GREEDY)
        for _ in range(8):
            engine.step()
        assert policy.rounds[-1].verify is not None
        assert policy.rounds[-1].between is not None
        count = len(policy.rounds)
        engine.submit(PROMPTS[1], GREEDY)
        engine.step()
        engine.step()
        shared = policy.rounds[count]
        assert (shared.verify, shared.between) == (None, None)
        while len(policy.rounds[-1].results) < 2:
            engine.step()
        first = policy.rounds[-1]
        assert first.verify is not None
        assert first.between is None, "the drafting before it followed a prompt"


@PATHS
def test_the_depth_is_in_the_numbers_of_a_step_and_in_the_ledger(registry: Registry, path: Callable[[], Any]) -> None:
    with path(), engine_for(registry, policy=Forced([3, 0, 1, 0])) as engine:
        engine.submit(PROMPTS[0], GREEDY)
        depths = []
        for _ in range(4):
            engine.step()
            assert engine.last_step is not None
            depths.append(engine.last_step.depth)
        assert depths == [3, 0, 1, 0]
        report = engine.report()
        assert report["rounds_at"] == [1, 1, 0, 1], "three rounds: of 3, of 0, of 1"


class Limited(Forced):
    """Gives slot 0 one draft, and the others none or all."""

    def decide(self, rows: int, slots: Sequence[int]) -> Decision:
        return Decision(3, limits={0: 1, 1: 0})


@PATHS
def test_rows_have_limits_of_their_own(registry: Registry, path: Callable[[], Any]) -> None:
    with path(), engine_for(registry, policy=Limited([3])) as engine:
        results = engine.generate(PROMPTS[:3], GREEDY)
    assert [result.ids for result in results] == answers(PROMPTS[:3])
    assert [len(result.ledger["accepted_at"]) for result in results] == [1, 0, 3]


def test_a_request_without_speculation_has_none_whatever_is_decided(registry: Registry) -> None:
    with engine_for(registry, policy=Forced([3])) as engine:
        one = engine.submit(PROMPTS[0], GREEDY, max_drafted=0)
        while one.output.finish_reason is None:
            engine.step()
        assert one.settled_ledger().drafted == 0
        assert one.settled_ledger().rounds_at == [19]


@BOTH
@pytest.mark.usefixtures("from_tokens")
def test_plain_rounds_are_launched_ahead_as_without_a_drafter(
    registry: Registry, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At depth 0 no drafts are on their way, so the next step's widths are known before this one is over."""
    # Breaks with: a drafter that keeps every step waiting; running ahead of drafts, whose text would be wrong.
    ahead: list[int] = []
    find = Engine._launch

    def watched(self: Engine, schedule: Any) -> Any:
        found = find(self, schedule)
        if found is not None and getattr(schedule, "args", None) and isinstance(schedule.args[0], (list, tuple)):
            assert self._built.drafting is not None
            ahead.append(self._built.drafting.decision.depth)
        return found

    monkeypatch.setattr(Engine, "_launch", watched)
    depths = [0] * 8 + [3, 3] + [0] * 6 + [2]
    with device_path(), engine_for(registry, algorithm, policy=Forced(depths)) as engine:
        results = engine.generate(PROMPTS[:3], GREEDY.model_copy(update={"max_tokens": 30}))
        accepted = engine.ledger.accepted
    assert [result.ids for result in results] == answers(PROMPTS[:3], 30)
    assert len(ahead) > 5
    assert accepted > 10


def test_a_host_drafter_hears_of_plain_rounds_that_were_launched_ahead(registry: Registry) -> None:
    """It sees each token once and in order, and what it proposes afterwards is right."""
    # Breaks with: depths that are decided twice for one step; tokens handed over of the step launched ahead.
    depths = [3, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 3]
    results = []
    for path in (nullcontext, device_path):
        with path(), engine_for(registry, "scripted", policy=Forced(depths)) as engine:
            texts = [result.ids for result in engine.generate(PROMPTS[:2], GREEDY)]
            results.append((texts, engine.ledger.rounds_at, engine.ledger.accepted))
    assert results[0] == results[1]
    assert results[0][0] == answers(PROMPTS[:2])


# --- the policies in an engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["ema", "cost"])
@BOTH
@PATHS
def test_the_text_is_the_targets_whatever_is_chosen(
    registry: Registry, path: Callable[[], Any], algorithm: str, policy: str
) -> None:
    options: Mapping[str, Any] = {"speculative_adaptive": True, "speculative_adaptive_policy": policy}
    with path(), engine_for(registry, algorithm, **options) as engine:
        results = engine.generate(PROMPTS, GREEDY.model_copy(update={"max_tokens": 50}))
        report = engine.report()
    assert [result.ids for result in results] == answers(most=50)
    assert report["adaptive"]["policy"] == policy
    assert sum(report["rounds_at"]) == report["rounds"]


@pytest.mark.parametrize("algorithm", ["scripted", "scripted-device"])
def test_costs_are_measured_at_start_and_decide(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """The device's timers are a clock that counts calls here: a drafted round takes hardly longer than a plain one."""
    # Breaks with: marks of the wrong step, costs filed under the wrong depth or width.
    clock = iter(range(10**9))

    def record(mark: Any) -> None:
        mark.at = next(clock)

    monkeypatch.setattr(Mark, "record", record)
    monkeypatch.setattr(Mark, "seconds_since", lambda mark, earlier: (mark.at - earlier.at) / 1e3)
    options: dict[str, Any] = {"speculative_adaptive": True, "speculative_adaptive_policy": "cost"}
    with (
        device_path(),
        engine_for(registry, algorithm, max_running_requests=2, disable_cuda_graph=False, **options) as engine,
    ):
        begun = engine.report()["adaptive"]["measured"]
        drafts = {(rows, depth) for rows, depth, _ in begun["draft_ms"]}
        assert {(rows, tokens) for rows, tokens, _ in begun["verify_ms"]} >= {(1, 1), (1, 4), (2, 2), (2, 8)}
        assert drafts == (
            {(1, at) for at in range(4)} | {(2, at) for at in range(4)} if "device" in algorithm else set()
        )
        results = engine.generate(PROMPTS[:4], GREEDY.model_copy(update={"max_tokens": 50}))
        report = engine.report()
        assert engine.speculation == "on"
    assert [result.ids for result in results] == answers(PROMPTS[:4], 50)
    assert report["accept_rate"] == 1.0
    assert report["rounds_at"][3] > report["rounds"] / 2
    assert all(ms > 0 for _, _, ms in report["adaptive"]["measured"]["verify_ms"])


def test_ema_follows_acceptance(registry: Registry) -> None:
    """Perfect drafts take one request to the deepest candidate, from the middle one."""
    with engine_for(registry, speculative_adaptive=True) as engine:
        engine.generate(PROMPTS[:1] * 4, GREEDY.model_copy(update={"max_tokens": 50}))
        tiers = engine.report()["adaptive"]["tiers"]
    assert tiers[0]["candidates"] == (1, 3)
    assert tiers[0]["depth"] == 3


def test_without_the_switch_the_depth_is_the_plans(registry: Registry) -> None:
    with engine_for(registry) as engine:
        engine.generate(PROMPTS[:1], GREEDY)
        assert engine.report()["adaptive"] is None
        assert engine.last_step is not None
        assert engine.last_step.depth == 3
