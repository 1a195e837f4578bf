"""What one request's state does to another's: nothing, whoever drafts, however they come, go and come back."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from specplug import SamplingParams, reference
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.runtime.request import Request
from specplug.testing.bench import PROMPTS
from specplug.testing.registry import bench_registry
from specplug.testing.scripted_drafters import DeviceScripted, HostScripted
from specplug.testing.targets import decoder_target, reference_logits, table_target

WIDTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (1, 2, 3, 5)
DRAFTERS = {
    "none": ("none", ""),
    "right": ("scripted", "right"),
    "right on the device": ("scripted-device", "right"),
    "wrong": ("scripted-device", "wrong"),
    "right, then wrong": ("scripted", "right_then_wrong"),
    "ragged": ("scripted-device", "ragged"),
    "too long": ("scripted", "too_long"),
    "tree": ("scripted", "random_tree"),
    "tree on the device": ("scripted-device", "random_tree"),
    "hostile": ("scripted", "hostile"),
    "hostile on the device": ("scripted-device", "hostile"),
    "ngram": ("ngram", ""),
}
TARGET = table_target(16, 2, 1, alphabet=range(8))  # of order 2: it notices a wrong page or mask
LOGITS = reference_logits(TARGET)
LENGTH = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH)
MIXED = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=4, max_tokens=LENGTH),
    SamplingParams(temperature=1.2, seed=5, top_k=5, max_tokens=9),
    SamplingParams(temperature=0.7, seed=6, top_p=0.9, frequency_penalty=0.8, max_tokens=LENGTH),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logit_bias={3: 1.5}, max_tokens=11, logprobs=True),
)
"""One set of options for each of `PROMPTS`, none like the others."""

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
every_width = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"), installed=True)


@cache
def answer(prompt: tuple[int, ...], sampling_json: str) -> tuple[int, ...]:
    return tuple(reference.decode(LOGITS, prompt, SamplingParams.model_validate_json(sampling_json)))


def wanted(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    return list(answer(tuple(prompt), sampling.model_dump_json()))


def engine_for(registry: Registry, drafter: str, width: int, *, greedy: bool = False, **options: Any) -> Engine:
    """Return an engine whose drafter knows the answers under `MIXED`, and those under `GREEDY` (first, if `greedy`)."""
    algorithm, behaviour = DRAFTERS[drafter]
    if algorithm not in registry.algorithms and algorithm != "none":
        pytest.skip(f"{algorithm} is not installed")
    config: dict[str, Any] = {} if algorithm == "none" else {"num_draft_tokens": width + 1}
    if behaviour:
        texts = [(*p, *wanted(p, one)) for p, one in zip(PROMPTS, MIXED, strict=True)]
        plain = [(*p, *wanted(p, GREEDY)) for p in PROMPTS]
        texts = [*plain, *texts] if greedy else [*texts, *plain]
        config |= {"scripted_behaviour": behaviour, "scripted_texts": texts, "scripted_n": 2, "scripted_seed": width}
    options = {"page_size": 4, "context_length": 48, **options}
    return Engine(TARGET, algorithm=algorithm, config=config, registry=registry, **options)


def finish(engine: Engine, *requests: Request) -> None:
    """Step until all `requests` have ended."""
    for _ in range(400):
        if all(request.output.finish_reason for request in requests):
            return
        engine.step()
    raise AssertionError("a request does not end")


def at_rest(engine: Engine) -> None:
    """I5: every page is back; nobody failed."""
    assert engine.free_pages == engine.pages
    assert not engine.speculation.startswith("failed")


class Calls:
    """Admissions and releases of the scripted drafters, as they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.admitted: list[int] = []
        self.released: list[tuple[int, str]] = []
        for drafter in (HostScripted, DeviceScripted):
            self._spy(monkeypatch, drafter)

    def _spy(self, monkeypatch: pytest.MonkeyPatch, drafter: Any) -> None:
        admit, release = drafter.on_admit, drafter.on_release

        def on_admit(itself: Any, request: Any) -> None:
            self.admitted.append(request.slot)
            admit(itself, request)

        def on_release(itself: Any, slot: int, reason: str) -> None:
            self.released.append((slot, reason))
            release(itself, slot, reason)

        monkeypatch.setattr(drafter, "on_admit", on_admit)
        monkeypatch.setattr(drafter, "on_release", on_release)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# --- neighbours ------------------------------------------------------------------------------------------------------


@every_width
@every_drafter
def test_an_answer_is_the_reference_in_every_batch_streamed_or_not(
    registry: Registry, drafter: str, width: int
) -> None:
    """I1, I3, I5, I7, I11: greedy and sampled neighbours of different options, any number at a time."""
    # Breaks with: state indexed by batch position, a per-request tensor that a leaving row shifts.
    if drafter == "none" and width:
        return
    right = [wanted(prompt, one) for prompt, one in zip(PROMPTS, MIXED, strict=True)]
    for number, batch in enumerate(BATCHES, start=width):
        with engine_for(registry, drafter, width, max_running_requests=batch) as engine:
            if number % 2:
                results = engine.generate(PROMPTS, MIXED)
                assert [result.ids for result in results] == right, batch
                assert {result.finish_reason for result in results} == {"length"}
            else:
                streamed: dict[str, list[int]] = {}
                for delta in engine.stream(PROMPTS, MIXED):
                    streamed.setdefault(delta.request, []).extend(delta.ids)
                assert [streamed[name] for name in sorted(streamed, key=int)] == right, batch
            assert engine.ledger.output_tokens == sum(map(len, right))
            at_rest(engine)


@pytest.mark.parametrize("width", [0, 3, 8])
@every_drafter
def test_neighbours_are_unaffected_when_a_request_leaves_in_the_middle_of_a_verify(
    registry: Registry, drafter: str, width: int
) -> None:
    """One is aborted with a draft pending, after any step, from every place in the batch; a newcomer takes its slot."""
    # Breaks with: drafts, rows or pages of the one that left used for another.
    prompts, options = PROMPTS[:3], [MIXED[0], MIXED[1], MIXED[3]]
    for leaver in range(3):
        for steps in range(1, 5):
            with engine_for(registry, drafter, width, max_running_requests=3) as engine:
                requests = [engine.submit(p, one) for p, one in zip(prompts, options, strict=True)]
                for _ in range(steps):
                    engine.step()
                engine.abort(requests[leaver])
                newcomer = engine.submit(PROMPTS[4], MIXED[4])
                finish(engine, newcomer, *requests)
                for at, (request, prompt, one) in enumerate(zip(requests, prompts, options, strict=True)):
                    if at != leaver:
                        assert request.output.ids == wanted(prompt, one)
                assert newcomer.output.ids == wanted(PROMPTS[4], MIXED[4])
                at_rest(engine)


@pytest.mark.parametrize("width", [1, 5, 8])
@every_drafter
def test_neighbours_are_unaffected_when_a_request_ends_inside_an_accepted_block(
    registry: Registry, drafter: str, width: int
) -> None:
    for at in range(width + 2):
        plain = wanted(PROMPTS[0], GREEDY)
        ends = GREEDY.model_copy(update={"stop_token_ids": (plain[at],)})
        with engine_for(registry, drafter, width, max_running_requests=3) as engine:
            results = engine.generate([PROMPTS[1], PROMPTS[0], PROMPTS[3]], [MIXED[1], ends, MIXED[3]])
            assert results[1].ids == plain[: plain.index(plain[at]) + 1]
            assert results[0].ids == wanted(PROMPTS[1], MIXED[1])
            assert results[2].ids == wanted(PROMPTS[3], MIXED[3])
            at_rest(engine)


@pytest.mark.parametrize("seed", range(3))
@every_drafter
def test_batch_filter_and_merge_keep_every_per_request_value_aligned(
    registry: Registry, drafter: str, seed: int
) -> None:
    """Requests with different options come and go at random, prompts in chunks; each answers as if it were alone."""
    # Breaks with: temperature, seed, penalties or logprobs taken from the row's old place.
    rng = random.Random(seed)
    with engine_for(registry, drafter, 5, max_running_requests=rng.choice(BATCHES), chunked_prefill_size=3) as engine:
        living: list[tuple[Request, int, SamplingParams]] = []
        for _ in range(40):
            if rng.random() < 0.5 and len(living) < 12:
                at = rng.randrange(len(PROMPTS))
                one = rng.choice(MIXED)
                drafted = rng.choice([None, None, 0, 1, 3])
                living.append((engine.submit(PROMPTS[at], one, max_drafted=drafted), at, one))
            if living and rng.random() < 0.1:
                engine.abort(rng.choice(living)[0])
            engine.step()
        finish(engine, *(request for request, *_ in living))
        for request, at, one in living:
            right = wanted(PROMPTS[at], one)
            ids = request.output.ids
            assert ids == (right[: len(ids)] if request.output.finish_reason == "abort" else right)
            if one.logprobs:
                assert [entry.token for entry in request.output.logprobs] == ids
            else:
                assert request.output.logprobs == []
        at_rest(engine)


@pytest.mark.parametrize("drafter", ["right", "tree on the device", "hostile", "ngram"])
def test_a_two_layer_decoder_answers_the_same_in_any_company(registry: Registry, drafter: str) -> None:
    # The same claim where hidden states and several KV heads are real: I1 and I7 against a dense forward.
    target = decoder_target(2)
    logits = reference_logits(target)
    sampled = SamplingParams(temperature=0.8, seed=9, max_tokens=10)
    options = [GREEDY, sampled, GREEDY, sampled, GREEDY]
    right = [reference.decode(logits, prompt, one) for prompt, one in zip(PROMPTS, options, strict=True)]
    algorithm, behaviour = DRAFTERS[drafter]
    if algorithm not in registry.algorithms:
        pytest.skip(f"{algorithm} is not installed")
    config: dict[str, Any] = {"num_draft_tokens": 6}
    if behaviour:
        texts = [(*prompt, *ids) for prompt, ids in zip(PROMPTS, right, strict=True)]
        config |= {"scripted_behaviour": behaviour, "scripted_texts": texts}
    for batch in BATCHES:
        with Engine(
            target,
            algorithm=algorithm,
            config=config,
            registry=registry,
            page_size=4,
            context_length=48,
            max_running_requests=batch,
            chunked_prefill_size=5,
        ) as engine:
            assert [result.ids for result in engine.generate(PROMPTS, options)] == right
            at_rest(engine)


# --- slots -----------------------------------------------------------------------------------------------------------


@every_width
@every_drafter
def test_same_slot_long_request_a_then_unrelated_b_then_a_again(
    registry: Registry, drafter: str, width: int, calls: Calls
) -> None:
    """B drafts what it drafts in a fresh engine, so nothing of A; and A again what it drafted the first time."""
    # Breaks with: an index, a text or a KV length that survives the release of its slot.
    unrelated = (9, 10, 11, 9, 10)
    with engine_for(registry, drafter, width, max_running_requests=1) as engine:
        (b_alone,) = engine.generate([unrelated], GREEDY)
    with engine_for(registry, drafter, width, max_running_requests=1) as engine:
        a, b, again = (engine.generate([prompt], GREEDY)[0] for prompt in (PROMPTS[0], unrelated, PROMPTS[0]))
        at_rest(engine)
    assert set(calls.admitted) <= {0}
    assert (b.ids, b.ledger) == (b_alone.ids, b_alone.ledger)
    assert (again.ids, again.ledger) == (a.ids, a.ledger)
    assert a.ids == wanted(PROMPTS[0], GREEDY)


@pytest.mark.parametrize("chunk", [2, 5, 512])
@every_drafter
def test_kv_slots_and_draft_state_after_rejection_and_preemption(
    registry: Registry, drafter: str, chunk: int, calls: Calls
) -> None:
    """With pages for two, requests leave and come back; scripted drafters recount their text each step."""
    # Breaks with: pages lost on preemption, a slot not reset when a request returns, drafts kept over it, a drafter
    # that is a token or two ahead of or behind the committed length.
    with engine_for(
        *(registry, drafter, 5),
        max_total_tokens=28,
        context_length=28,
        max_running_requests=5,
        chunked_prefill_size=chunk,
    ) as engine:
        results = engine.generate(PROMPTS * 2, MIXED * 2)
        right = [wanted(p, one) for p, one in zip(PROMPTS, MIXED, strict=True)]
        assert [result.ids for result in results] == right * 2
        assert engine.preemptions > 0
        at_rest(engine)
        if DRAFTERS[drafter][0].startswith("scripted"):
            assert len(calls.admitted) == 2 * len(PROMPTS) + engine.preemptions == len(calls.released)
            assert sum(reason == "preempted" for _, reason in calls.released) == engine.preemptions
            assert sum(reason == "finished" for _, reason in calls.released) == 2 * len(PROMPTS)


# --- leaving early ---------------------------------------------------------------------------------------------------


@every_drafter
def test_abort_at_any_point_waiting_mid_prefill_and_mid_verify(
    registry: Registry, drafter: str, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """After any number of steps: the pages are back, the drafter heard of it once, the next request is answered."""
    # Breaks with: a waiting request left in the queue, pages kept, on_release missing or called for one never admitted.
    states = set()
    for steps in range(9):
        calls.admitted.clear()
        calls.released.clear()
        with engine_for(registry, drafter, 5, max_running_requests=1, chunked_prefill_size=4) as engine:
            first, waiting = engine.submit(PROMPTS[0], GREEDY), engine.submit(PROMPTS[1], GREEDY)
            for _ in range(steps):
                engine.step()
            if first.slot >= 0:
                states.add("mid-verify" if first.draft else "mid-prefill" if first.pending > 1 else "decoding")
            engine.abort(waiting)
            engine.abort(first)
            engine.abort(first)  # a second time changes nothing
            assert engine.step() == []
            at_rest(engine)
            if first.output.finish_reason == "abort":
                assert first.output.ids == wanted(PROMPTS[0], GREEDY)[: len(first.output.ids)]
            assert waiting.output.finish_reason == "abort"
            if DRAFTERS[drafter][0].startswith("scripted"):
                assert len(calls.admitted) == len(calls.released)
            (later,) = engine.generate([PROMPTS[2]], GREEDY)
            assert later.ids == wanted(PROMPTS[2], GREEDY)
            at_rest(engine)
    assert "mid-prefill" in states
    assert drafter in ("none", "ngram") or "mid-verify" in states
    assert "failed" not in caplog.text


@pytest.mark.parametrize("drafter", ["none", "right", "tree on the device", "ngram"])
def test_abort_of_one_that_was_preempted_and_waits(registry: Registry, drafter: str) -> None:
    # Breaks with: a preempted request taken for one that holds a slot.
    with engine_for(registry, drafter, 5, max_total_tokens=48, context_length=48, max_running_requests=4) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(200):
            engine.step()
            gone = [one for one in requests if one.slot < 0 and one.output.ids and not one.output.finish_reason]
            if gone:
                break
        (one, *_) = gone
        engine.abort(one)
        finish(engine, *requests)
        assert one.output.finish_reason == "abort"
        for request, prompt in zip(requests, PROMPTS, strict=True):
            assert request.output.ids == wanted(prompt, GREEDY)[: len(request.output.ids)]
            assert request is one or len(request.output.ids) == LENGTH
        at_rest(engine)


@every_drafter
def test_closing_a_stream_aborts_what_runs_and_what_waits(registry: Registry, drafter: str) -> None:
    for take in (1, 2, 4):
        with engine_for(registry, drafter, 3, max_running_requests=2) as engine:
            stream = engine.stream(PROMPTS, GREEDY)
            for _ in range(take):
                next(stream)
            stream.close()  # type: ignore[attr-defined]
            at_rest(engine)
            assert engine.step() == []
            assert engine.generate(PROMPTS[:1], GREEDY)[0].ids == wanted(PROMPTS[0], GREEDY)


# --- per-request speculation, ragged rows ----------------------------------------------------------------------------


@every_width
@every_drafter
def test_speculation_off_and_shorter_per_request_mixed_in_one_batch(
    registry: Registry, drafter: str, width: int
) -> None:
    # Breaks with: one limit for the whole batch.
    most = (None, 0, 1, 2, 0)
    with engine_for(registry, drafter, width, max_running_requests=5) as engine:
        requests = [
            engine.submit(prompt, one, max_drafted=limit)
            for prompt, one, limit in zip(PROMPTS, MIXED, most, strict=True)
        ]
        while any(request.output.finish_reason is None for request in requests):
            engine.step()
            for request, limit in zip(requests, most, strict=True):
                drafts = len(request.draft.tokens) if request.draft else 0
                assert drafts <= (width if limit is None else min(limit, width))
        for request, prompt, one, limit in zip(requests, PROMPTS, MIXED, most, strict=True):
            assert request.output.ids == wanted(prompt, one)
            ledger = request.settled_ledger()
            if limit == 0:
                assert (ledger.drafted, ledger.drafted_rounds) == (0, 0)
        at_rest(engine)


@pytest.mark.parametrize("drafter", ["right", "right on the device", "tree", "tree on the device"])
def test_one_drafting_row_does_not_widen_the_others(registry: Registry, drafter: str) -> None:
    """StepStats.tokens of a batch in which one of five drafts: five roots and its drafts, no padding."""
    with engine_for(registry, drafter, 8, greedy=True, max_running_requests=5) as engine:
        drafting = engine.submit(PROMPTS[0], GREEDY)
        others = [engine.submit(prompt, GREEDY, max_drafted=0) for prompt in PROMPTS[1:]]
        engine.step()
        assert engine.last_step is not None
        assert engine.last_step.tokens == sum(len(prompt) for prompt in PROMPTS)
        widths = []
        while drafting.output.finish_reason is None:
            drafts = len(drafting.draft.tokens) if drafting.draft else 0
            engine.step()
            stats = engine.last_step
            assert (stats.rows, stats.tokens, stats.drafted) == (5, 5 + drafts, drafts)
            assert stats.drafted_rows == bool(drafts)
            widths.append(drafts)
        assert max(widths) == 8
        finish(engine, *others)


def test_verify_rows_and_an_unfinished_prompt_chunk_share_a_step(registry: Registry) -> None:
    # Breaks with: steps of one phase, in which a long prompt holds up those that decode.
    with engine_for(registry, "right", 3, greedy=True, max_running_requests=2, chunked_prefill_size=4) as engine:
        first = engine.submit(PROMPTS[1], GREEDY)
        engine.step()
        assert first.draft is not None
        second = engine.submit(PROMPTS[0], GREEDY)
        engine.step()
        stats = engine.last_step
        assert stats is not None
        assert (stats.rows, stats.tokens, stats.drafted, stats.emitted) == (2, 4 + 4, 3, 4)
        assert (second.kv_len, len(second.output.ids)) == (4, 0)
        finish(engine, first, second)
        assert first.output.ids == wanted(PROMPTS[1], GREEDY)
        assert second.output.ids == wanted(PROMPTS[0], GREEDY)


def test_rows_of_different_widths_share_a_step(registry: Registry) -> None:
    # Breaks with: every row cut to the shortest draft, or padded to the longest.
    limits = (0, 1, 3, 5, 8)
    with engine_for(registry, "right on the device", 8, greedy=True, max_running_requests=5) as engine:
        requests = [engine.submit(p, GREEDY, max_drafted=n) for p, n in zip(PROMPTS, limits, strict=True)]
        engine.step()
        assert [len(one.draft.tokens) if one.draft else 0 for one in requests] == list(limits)
        engine.step()
        assert engine.last_step is not None
        assert engine.last_step.tokens == sum(1 + limit for limit in limits)
        assert engine.last_step.emitted == engine.last_step.tokens
        assert [len(one.output.ids) for one in requests] == [1 + 1 + limit for limit in limits]


def test_drafts_never_cost_a_neighbour_its_pages(registry: Registry) -> None:
    # Breaks with: drafts verified on pages that were not reserved before: the older one's would push out the younger.
    with engine_for(
        *(registry, "right", 8), greedy=True, max_total_tokens=16, context_length=16, max_running_requests=2
    ) as engine:
        older = engine.submit(PROMPTS[4], GREEDY.model_copy(update={"max_tokens": 9}))  # 7 tokens: two pages
        younger = engine.submit(PROMPTS[0][:5], GREEDY.model_copy(update={"max_tokens": 2}), max_drafted=0)
        engine.step()
        assert engine.free_pages == 0
        assert older.draft is None, "its drafts would need two pages more"
        finish(engine, younger)
        assert engine.preemptions == 0
        finish(engine, older)
        assert older.settled_ledger().drafted > 0
        at_rest(engine)


def test_a_request_that_has_ended_is_asked_for_no_drafts(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    # Breaks with: a limit computed from what max_tokens leaves, when EOS ended the answer before.
    asked: list[list[int]] = []
    propose = DeviceScripted.propose

    def spy(self: Any, step: Any, out: Any) -> None:
        asked.append(out.limit[:-1].tolist())
        propose(self, step, out)

    monkeypatch.setattr(DeviceScripted, "propose", spy)
    ends = GREEDY.model_copy(update={"stop_token_ids": (wanted(PROMPTS[0], GREEDY)[0],)})
    with engine_for(registry, "right on the device", 5, greedy=True, max_running_requests=2) as engine:
        first, second = engine.submit(PROMPTS[0], ends), engine.submit(PROMPTS[1], GREEDY)
        engine.step()
        assert first.output.finish_reason == "stop"
        assert asked == [[0, 5]]
        finish(engine, second)
