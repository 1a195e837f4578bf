"""What the engine says about itself: the ledger, the alarm, observers, a drafter's failure, the bounded queue."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from specplug import DrafterFailedError, SamplingParams, StepStats, reference
from specplug.errors import UserError
from specplug.registry import Registry
from specplug.runtime.alarm import WINDOW, AcceptanceAlarm
from specplug.runtime.engine import Engine
from specplug.runtime.ledger import Ledger
from specplug.runtime.request import Request
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.registry import bench_registry
from specplug.testing.scripted_drafters import HostScripted
from specplug.testing.targets import reference_logits, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

WIDTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (1, 2, 3, 5)
TARGET = table_target(16, 2, 1, alphabet=range(8))
LOGITS = reference_logits(TARGET)
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
LONG = [
    (*prompt, *reference.decode(LOGITS, prompt, GREEDY.model_copy(update={"max_tokens": 40}))) for prompt in PROMPTS
]
"""Each prompt with 40 tokens of its greedy answer."""
OWNER = "specplug-scripted 0.1.0 (scripted)"
HOST_OR_DEVICE = pytest.mark.parametrize("algorithm", ["scripted", "scripted-device"])


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"), installed=True)


def engine_for(
    registry: Registry,
    behaviour: str,
    width: int = 5,
    *,
    algorithm: str = "scripted",
    target: Any = TARGET,
    texts: Sequence[Sequence[int]] = LONG,
    n: int = 1,
    **options: Any,
) -> Engine:
    config = {"num_draft_tokens": width + 1, "scripted_behaviour": behaviour, "scripted_texts": texts, "scripted_n": n}
    options = {"page_size": 4, "context_length": 64, **options}
    return Engine(target, algorithm=algorithm, config=config, registry=registry, **options)


def plain(prompt: Sequence[int], most: int = 14) -> list[int]:
    return list(LONG[PROMPTS.index(tuple(prompt))][len(prompt) :][:most])


def run(engine: Engine, *requests: Request) -> list[StepStats]:
    """Step until all have ended; returns the steps' numbers."""
    stats = []
    while any(request.output.finish_reason is None for request in requests):
        engine.step()
        assert engine.last_step is not None
        stats.append(engine.last_step)
        assert len(stats) < 500
    return stats


def check_figures(report: Mapping[str, Any]) -> None:
    """Every number is finite, every rate in [0, 1], and JSON takes it."""
    json.dumps(report, allow_nan=False)
    assert 0 <= report["accepted"] <= report["path"] <= report["drafted"]
    assert report["drafted_rounds"] <= report["rounds"]
    for name in ("draft_coverage", "accept_rate", "path_accept_rate"):
        assert 0.0 <= report[name] <= 1.0
    assert report["accept_length"] >= 1.0
    assert math.isfinite(report["tokens_per_target_step"])
    for depth in report["acceptance_by_depth"]:
        assert 0.0 <= depth["unconditional"] <= 1.0
        assert 0.0 <= depth["conditional"] <= 1.0


# --- the ledger ------------------------------------------------------------------------------------------------------


@HOST_OR_DEVICE
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_perfect_drafter_has_a_rate_of_exactly_1(registry: Registry, width: int, batch: int, algorithm: str) -> None:
    """However long the answer: none of its drafts is cut, so none is drafted in vain, and the rate is not above."""
    # Breaks with: the bonus token counted as accepted, drafts counted that the cap made useless.
    with engine_for(registry, "right", width, algorithm=algorithm, max_running_requests=batch) as engine:
        for most in range(1, 15):
            for result in engine.generate(PROMPTS, GREEDY.model_copy(update={"max_tokens": most})):
                check_figures(result.ledger)
                assert result.ledger["accepted"] == result.ledger["drafted"]
                assert result.ledger["accept_rate"] == (1.0 if width and most > 2 else 0.0)
                assert all(depth["conditional"] == 1.0 for depth in result.ledger["acceptance_by_depth"])
        check_figures(engine.report())


@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_cut_by_eos_are_not_counted(registry: Registry, width: int) -> None:
    """Neither as output nor as drafted nor as accepted, so a perfect drafter's rate stays exactly 1.0."""
    # Breaks with: drafted counted before the stop rules run.
    for at in range(12):
        ends = GREEDY.model_copy(update={"stop_token_ids": (plain(PROMPTS[0])[at],)})
        with engine_for(registry, "right", width) as engine:
            (result,) = engine.generate([PROMPTS[0]], ends)
        end = plain(PROMPTS[0]).index(plain(PROMPTS[0])[at]) + 1
        counts = result.ledger
        assert len(result.ids) == counts["output_tokens"] == end
        assert counts["accepted"] == counts["drafted"] == counts["path"]
        assert counts["rounds"] == -(-(end - 1) // (width + 1))
        assert 1 + counts["rounds"] + counts["accepted"] in (end, end + 1), "one over where the bonus was cut"


@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_cut_by_a_stop_string_are_not_counted(registry: Registry, width: int) -> None:
    """What the last block holds of the string counts nowhere; what earlier blocks hold of it is no longer accepted."""
    # Breaks with: a step's or the ledger's count taken before the string was cut off.
    target = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    prompt = [LETTERS[token] for token in PROMPTS[0]]
    ids = reference.decode(reference_logits(target), prompt, GREEDY.model_copy(update={"max_tokens": 30}))
    text = bytes(ids).decode()
    whole = 0
    with engine_for(registry, "right", width, target=target, texts=[(*prompt, *ids)]) as engine:
        for word in (text[at : at + 3] for at in range(1, 12)):
            counted, end = engine.ledger.output_tokens, text.index(word)
            request = engine.submit(prompt, GREEDY.model_copy(update={"stop": (word,)}))
            stats = run(engine, request)
            counts = request.settled_ledger().report()
            check_figures(counts)
            assert counts["output_tokens"] == len(request.output.ids) == end
            assert engine.ledger.output_tokens - counted == end
            # The block in which the string was completed begins after the first token and whole blocks.
            block = 1 + (end + 3 - 2) // (width + 1) * (width + 1)
            back = range(end, block)
            assert sum(step.emitted for step in stats) == end + len(back)
            drafts_back = sum((at - 1) % (width + 1) < width for at in back)
            assert counts["drafted"] - counts["accepted"] == drafts_back
            whole += not drafts_back
    assert whole, "in some of them the string lies inside one block, and the rate is exactly 1"


def test_token_id_0_drafted_for_real_counts_as_drafted(registry: Registry) -> None:
    # Breaks with: drafts counted by a non-zero token.
    target = table_target(16, 1, 1, alphabet=[0])
    texts = [(*prompt, *[0] * 30) for prompt in PROMPTS]
    for algorithm in ("scripted", "scripted-device"):
        with engine_for(registry, "right", 3, algorithm=algorithm, target=target, texts=texts) as engine:
            (result,) = engine.generate([PROMPTS[0]], GREEDY.model_copy(update={"max_tokens": 9}))
        assert result.ids == [0] * 9
        assert (result.ledger["drafted"], result.ledger["accepted"], result.ledger["rounds"]) == (6, 6, 2)


@HOST_OR_DEVICE
def test_skipped_drafting_does_not_count_as_drafted(registry: Registry, algorithm: str) -> None:
    """A drafter that declines, and requests that ask for none: rounds, but no drafted round."""
    # Breaks with: rounds taken for drafted rounds, the last proposal counted again.
    with engine_for(registry, "empty", algorithm=algorithm) as engine:
        (result,) = engine.generate([PROMPTS[0]], GREEDY)
        assert (result.ledger["drafted"], result.ledger["drafted_rounds"], result.ledger["rounds"]) == (0, 0, 13)
        assert result.ledger["draft_coverage"] == 0.0
        assert result.ledger["accept_length"] == 1.0
    with engine_for(registry, "right", algorithm=algorithm) as engine:
        off, on = engine.submit(PROMPTS[0], GREEDY, max_drafted=0), engine.submit(PROMPTS[1], GREEDY)
        run(engine, off, on)
        assert off.settled_ledger().drafted == 0
        assert engine.ledger.drafted == on.settled_ledger().drafted > 0
        assert engine.ledger.report()["draft_coverage"] < 1.0


def test_acceptance_by_depth_of_a_drafter_that_is_right_twice(registry: Registry) -> None:
    # Breaks with: the depth of a refused draft left out of, or deeper ones counted in, what was compared.
    with engine_for(registry, "right_then_wrong", 4, n=2) as engine:
        (result,) = engine.generate([PROMPTS[0]], GREEDY.model_copy(update={"max_tokens": 1 + 3 * 4}))
    counts = result.ledger
    assert (counts["rounds"], counts["drafted"], counts["accepted"]) == (4, 4 + 4 + 4 + 2, 8)
    assert counts["reached"] == [4, 4, 3]  # the last round was allowed two
    assert counts["accepted_at"] == [4, 4, 0]
    assert [depth["conditional"] for depth in counts["acceptance_by_depth"]] == [1.0, 1.0, 0.0]
    assert counts["accept_length"] == 3.0
    assert counts["tokens_per_target_step"] == 3.0
    assert counts["path_accept_rate"] == counts["accept_rate"] == 8 / 14


def test_a_tree_counts_nodes_and_path_apart(registry: Registry) -> None:
    with engine_for(registry, "duplicates", 4, target=TARGET) as engine:
        (result,) = engine.generate([PROMPTS[0]], GREEDY)
    # Two equal children of the root and a chain below the second: the walk takes the first, which is a leaf.
    counts = result.ledger
    assert counts["accepted"] == counts["drafted_rounds"] > 0
    assert counts["path"] < counts["drafted"]
    assert counts["path_accept_rate"] > counts["accept_rate"]


@pytest.mark.parametrize("behaviour", ["right", "wrong", "ragged", "random_tree", "hostile", "right_then_wrong"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tight", [False, True])
def test_counters_add_up_and_never_fall_whatever_happens(
    registry: Registry, behaviour: str, batch: int, tight: bool
) -> None:
    """I6 after every step, with aborts and preemptions: the engine's counts are the sum of its requests'."""
    # Breaks with: a preempted request left out of the sum while it waits, one aborted there lost for good, the
    # forward of a request that returns taken for a round.
    limits = {"max_total_tokens": 32, "context_length": 32} if tight else {}
    names = ("requests", "output_tokens", "prefill_forwards", "rounds", "drafted_rounds", "drafted", "path", "accepted")
    with engine_for(registry, behaviour, max_running_requests=batch, **limits) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS * 2]
        last = engine.ledger.report()
        steps = never_back = 0
        while any(request.output.finish_reason is None for request in requests):
            engine.step()
            steps += 1
            stats = engine.last_step
            assert stats is not None
            assert 0 <= stats.accepted <= stats.drafted
            assert stats.first_accepted <= stats.drafted_rows <= stats.rows
            assert stats.accepted <= stats.emitted <= stats.accepted + stats.rows
            if steps == 9 and tight:
                waits = [one for one in requests if one.slot < 0 and one.output.ids and not one.output.finish_reason]
                for one in waits[:1]:
                    engine.abort(one)
                    never_back += 1
            if steps == 4:
                engine.abort(requests[0])
            now = engine.ledger.report()
            check_figures(now)
            for name in names:
                assert now[name] >= last[name], f"{name} fell from {last[name]} to {now[name]}"
            assert now["output_tokens"] == sum(len(request.output.ids) for request in requests)
            last = now
        assert last["requests"] == sum(bool(one.output.ids) or one.kv_len > 0 for one in requests)
        assert last["prefill_forwards"] == last["requests"] + engine.preemptions - never_back, "a return is no round"
        for name in ("rounds", "drafted", "accepted"):
            assert last[name] == sum(one.settled_ledger().report()[name] for one in requests)
        for one in requests:
            counts = one.settled_ledger()
            assert counts.output_tokens == counts.prefill_forwards + counts.rounds + counts.accepted
        assert not tight or batch == 1 or engine.preemptions


@pytest.mark.parametrize("behaviour", ["right", "random_tree", "hostile", "ragged"])
def test_steps_emit_what_requests_receive(registry: Registry, behaviour: str) -> None:
    """Emitted is accepted and one token for each row that decides; the steps' sum is the usage."""
    with engine_for(registry, behaviour, 5, max_running_requests=3) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        stats = run(engine, *requests)
    assert sum(step.emitted for step in stats) == sum(len(one.output.ids) for one in requests)
    assert sum(step.accepted for step in stats) == sum(one.settled_ledger().accepted for one in requests)
    assert sum(step.drafted_rows for step in stats) == engine.ledger.drafted_rounds
    assert sum(step.first_accepted for step in stats) == (engine.ledger.accepted_at or [0])[0]


def test_a_report_right_after_boot_has_no_nan(registry: Registry) -> None:
    for behaviour in ("right", "empty"):
        with engine_for(registry, behaviour) as engine:
            report = engine.report()
            check_figures(report)
            assert (report["requests"], report["output_tokens"], report["alarm"]) == (0, 0, False)
            assert report["speculation"] == "on"
            assert set(report["mean_of_requests"].values()) == {0.0}
    with Engine(TARGET) as engine:
        assert engine.report()["speculation"] == "off"
        assert engine.step() == []
        check_figures(engine.report())


def test_pooled_and_mean_of_requests_differ(registry: Registry) -> None:
    # A long answer of a good drafter and a short one without: pooled weighs by rounds, the mean by requests.
    with engine_for(registry, "right", 3) as engine:
        long = engine.submit(PROMPTS[0], GREEDY.model_copy(update={"max_tokens": 13}))
        short = engine.submit(PROMPTS[1], GREEDY.model_copy(update={"max_tokens": 7}), max_drafted=0)
        run(engine, long, short)
        report = engine.report()
    assert report["draft_coverage"] == 3 / (3 + 6)
    assert report["mean_of_requests"]["draft_coverage"] == 0.5
    assert report["tokens_per_target_step"] == (12 + 6) / 9
    assert report["mean_of_requests"]["tokens_per_target_step"] == (4.0 + 1.0) / 2
    assert sum(report["time_share"].values()) == pytest.approx(1.0)
    assert {"schedule", "forward", "accept", "commit", "draft"} <= set(report["time_share"])


def test_ledgers_add() -> None:
    one, two = Ledger(), Ledger()
    one.add_round(3, 3, 2)
    one.settle([0, 1, 0])
    two.add_round(0, 0, 0)
    two.add_round(5, 2, 3)
    two.settle([0, 0, 1, 2, 0])
    both = one + two
    assert (both.requests, both.rounds, both.drafted_rounds, both.drafted, both.path) == (2, 3, 2, 8, 5)
    assert (both.output_tokens, both.accepted, both.reached, both.accepted_at) == (8, 3, [2, 2, 1], [2, 1, 0])
    assert (one.reached, one.accepted_at) == ([1, 1], [1, 0]), "adding changes neither"


# --- the alarm -------------------------------------------------------------------------------------------------------


def test_the_alarm_judges_whole_windows_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    # Breaks with: a share of all time (it would never recover), a line per window.
    alarm = AcceptanceAlarm(0.1, "someone 1.0")
    with caplog.at_level(logging.WARNING):
        alarm.add(WINDOW - 1, 0)
        assert not alarm.ringing
        alarm.add(1, 0)
        assert alarm.ringing
        alarm.add(WINDOW, 0)
        assert len(caplog.records) == 1
        assert "someone 1.0: 0.0 % of the first drafts" in caplog.text
        alarm.add(WINDOW, WINDOW // 10)
        assert not alarm.ringing, "exactly the floor is not below it"
        alarm.add(WINDOW, WINDOW // 10 - 1)
        assert alarm.ringing
        assert len(caplog.records) == 2
    off = AcceptanceAlarm(0.0, "someone 1.0")
    off.add(WINDOW, 0)
    assert not off.ringing


@HOST_OR_DEVICE
def test_the_alarm_rings_for_dead_drafts_and_not_for_good_ones(
    registry: Registry, algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = GREEDY.model_copy(update={"max_tokens": 40})
    for behaviour, rings in (("wrong", True), ("right", False), ("empty", False), ("right_then_wrong", False)):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            engine_for(registry, behaviour, 1, algorithm=algorithm) as engine,
        ):
            for _ in range(3):
                engine.generate(PROMPTS, options)
            assert engine.ledger.drafted_rounds == 0 or engine.ledger.drafted_rounds > WINDOW
            assert engine.report()["alarm"] is rings, behaviour
        assert ("of the first drafts were accepted" in caplog.text) is rings
        assert not rings or f"specplug-scripted 0.1.0 ({algorithm})" in caplog.text


def test_rows_that_do_not_draft_do_not_dilute_what_the_alarm_sees(registry: Registry) -> None:
    # Breaks with: the share taken of all rows of a step.
    options = GREEDY.model_copy(update={"max_tokens": 40})
    with engine_for(registry, "right", 1, speculative_alarm_below=0.9, max_running_requests=5) as engine:
        for _ in range(3):
            drafting = engine.submit(PROMPTS[0], options)
            others = [engine.submit(prompt, options, max_drafted=0) for prompt in PROMPTS[1:]]
            run(engine, drafting, *others)
        assert 5 * engine.ledger.drafted_rounds > WINDOW
        assert not engine.report()["alarm"]


def test_the_alarm_can_be_set_and_switched_off(registry: Registry) -> None:
    options = GREEDY.model_copy(update={"max_tokens": 40})
    for behaviour, floor, rings in (("wrong", 0.0, False), ("right", 1.0, False), ("wrong", 1.0, True)):
        with engine_for(registry, behaviour, 1, speculative_alarm_below=floor) as engine:
            for _ in range(3):
                engine.generate(PROMPTS, options)
            assert engine.report()["alarm"] is rings
    with pytest.raises(UserError, match=r"speculative-alarm-below 1\.5"):
        engine_for(registry, "right", speculative_alarm_below=1.5)


# --- observers -------------------------------------------------------------------------------------------------------


class Recorder:
    """An observer that keeps what it is told and raises where it is asked to."""

    def __init__(self, raises: str = "") -> None:
        self.raises = raises
        self.calls: list[str] = []
        self.steps: list[StepStats] = []
        self.ended: dict[str, Mapping[str, Any]] = {}

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self.raises:
            raise RuntimeError("an observer's own fault")

    def on_step(self, stats: StepStats) -> None:
        self._called("on_step")
        self.steps.append(stats)

    def on_finish(self, request_id: str, ledger: Mapping[str, Any]) -> None:
        self._called("on_finish")
        self.ended[request_id] = ledger

    def close(self) -> None:
        self._called("close")


def test_observers_are_told_of_every_step_and_every_answer(registry: Registry) -> None:
    seen = Recorder()
    with engine_for(registry, "right", max_running_requests=2) as engine:
        engine.observers.add(seen)
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        engine.step()
        engine.abort(requests[4])  # it waits
        stats = run(engine, *requests)
        assert seen.steps[1:] == stats
        assert "close" not in seen.calls
    assert seen.calls[-1] == "close"
    assert set(seen.ended) == {one.id for one in requests}
    for one in requests:
        assert seen.ended[one.id]["output_tokens"] == len(one.output.ids)


@pytest.mark.parametrize("method", ["on_step", "on_finish", "close"])
def test_an_observer_that_raises_is_dropped_and_nobody_else_notices(
    registry: Registry, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Breaks with: an exception that reaches the requests, the drop of a neighbour, a second call.
    bad, good = Recorder(method), Recorder()
    with engine_for(registry, "right") as engine:
        engine.observers.add(bad)
        engine.observers.add(good)
        results = engine.generate(PROMPTS, GREEDY)
        assert [result.ids for result in results] == [plain(prompt) for prompt in PROMPTS]
        assert len(good.ended) == len(PROMPTS)
    assert bad.calls.count(method) == 1
    assert bad.calls[-1] == method
    assert good.calls[-1] == "close"
    assert f"Recorder raised in {method} and is dropped" in caplog.text


# --- a drafter that fails (DESIGN 8) ---------------------------------------------------------------------------------


@HOST_OR_DEVICE
@pytest.mark.parametrize("method", ["ingest", "propose"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_drafter_that_raises_at_step_n_ends_that_step_and_later_requests_are_plain(
    registry: Registry, method: str, calls: int, batch: int, algorithm: str
) -> None:
    # Breaks with: pages kept, a neighbour that waits ended too, a second call of the drafter, a silent fall-back.
    name = f"specplug-scripted 0.1.0 ({algorithm}): {method} raised RuntimeError: scripted to fail in {method}"
    with engine_for(registry, f"raise_{method}", 1, algorithm=algorithm, n=calls, max_running_requests=batch) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        assert engine.speculation == "on"
        steps = 0
        while engine.speculation == "on":
            in_step = [one for one in requests if one.output.finish_reason is None][:batch]
            deltas = engine.step()
            steps += 1
        assert steps == calls + 1
        assert engine.speculation == f"failed: {name}"
        for one in in_step:
            assert (one.output.finish_reason, one.error, one.slot) == ("error", name, -1)
            assert one.output.ids == plain(PROMPTS[requests.index(one)])[: len(one.output.ids)]
        assert {delta.request for delta in deltas if delta.finish_reason == "error"} == {one.id for one in in_step}
        assert engine.free_pages == engine.pages
        run(engine, *requests)
        for one, prompt in zip(requests, PROMPTS, strict=True):
            if one not in in_step:
                assert (one.output.ids, one.error) == (plain(prompt), "")
        for result in engine.generate(PROMPTS, GREEDY):
            assert result.ids == plain(PROMPTS[result_index(result.ids)])
            assert result.ledger["speculation"] == engine.speculation
            assert result.ledger["drafted"] == 0
        assert engine.report()["speculation"] == engine.speculation
        assert engine.free_pages == engine.pages


def result_index(ids: Sequence[int]) -> int:
    return next(at for at, prompt in enumerate(PROMPTS) if plain(prompt) == list(ids))


def test_a_failed_drafter_hears_of_its_requests_once_is_closed_and_not_called_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(HostScripted, "on_release", lambda self, slot, reason: heard.append(reason))
    monkeypatch.setattr(HostScripted, "close", lambda self: heard.append("close"))
    with engine_for(registry, "raise_propose", 1, n=2) as engine:
        engine.generate(PROMPTS[:3], GREEDY)
        assert heard == ["failed"] * 3 + ["close"]
        monkeypatch.setattr(HostScripted, "ingest", lambda self, step: heard.append("ingest"))
        monkeypatch.setattr(HostScripted, "on_admit", lambda self, request: heard.append("admit"))
        engine.generate(PROMPTS[:3], GREEDY)
        assert heard == ["failed"] * 3 + ["close"]


@pytest.mark.parametrize("method", ["ingest", "propose"])
def test_on_failure_stop_ends_everything(registry: Registry, method: str) -> None:
    # Breaks with: requests that wait left in the queue, or the engine going on plain.
    seen = Recorder()
    with engine_for(
        registry, f"raise_{method}", 1, n=2, speculative_on_failure="stop", max_running_requests=2
    ) as engine:
        engine.observers.add(seen)
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        engine.step()
        engine.step()
        with pytest.raises(DrafterFailedError) as failure:
            engine.step()
        assert str(failure.value) == (
            f"{OWNER}: {method} raised RuntimeError: scripted to fail in {method}; "
            "stopped, as --speculative-on-failure stop says"
        )
        assert [one.output.finish_reason for one in requests] == ["error"] * 2 + ["abort"] * 3
        assert engine.free_pages == engine.pages
        assert engine.step() == []
        assert set(seen.ended) == {one.id for one in requests}
        assert seen.calls[-1] == "close"
    assert seen.calls.count("close") == 1


def test_on_failure_stop_reaches_the_caller_of_generate_and_stream(registry: Registry) -> None:
    for call in ("generate", "stream"):
        with (
            engine_for(registry, "raise_propose", n=1, speculative_on_failure="stop") as engine,
            pytest.raises(DrafterFailedError, match="propose raised"),
        ):
            list(getattr(engine, call)(PROMPTS, GREEDY))


def test_an_exception_in_on_release_is_logged_and_changes_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, slot: int, reason: str) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(HostScripted, "on_release", fail)
    with engine_for(registry, "right") as engine:
        results = engine.generate(PROMPTS, GREEDY)
        aborted = engine.submit(PROMPTS[0], GREEDY)
        engine.step()
        engine.abort(aborted)
        assert engine.free_pages == engine.pages
        assert engine.speculation == "on"
    assert [result.ids for result in results] == [plain(prompt) for prompt in PROMPTS]
    assert f"{OWNER}: on_release failed" in caplog.text


def test_an_exception_in_close_is_logged(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(HostScripted, "close", fail)
    with engine_for(registry, "right") as engine:
        assert engine.generate(PROMPTS[:1], GREEDY)[0].ids == plain(PROMPTS[0])
    engine.close()
    assert f"{OWNER}: close failed" in caplog.text
    with engine_for(registry, "raise_ingest") as engine:
        assert {result.finish_reason for result in engine.generate(PROMPTS, GREEDY)} == {"error"}
        assert {result.finish_reason for result in engine.generate(PROMPTS, GREEDY)} == {"length"}


def test_an_exception_in_on_admit_is_a_failure_like_the_others(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Breaks with: an exception that leaves a request without a row on its pages, and the caller with a traceback.
    def fail(self: Any, request: Any) -> None:
        raise RuntimeError("no room in here")

    monkeypatch.setattr(HostScripted, "on_admit", fail)
    with engine_for(registry, "right") as engine:
        for result in engine.generate(PROMPTS[:2], GREEDY):
            assert result.finish_reason == "error"
            assert result.error == f"{OWNER}: on_admit raised RuntimeError: no room in here"
        assert engine.free_pages == engine.pages
        assert engine.generate(PROMPTS[:1], GREEDY)[0].ids == plain(PROMPTS[0])


# --- the queue -------------------------------------------------------------------------------------------------------


def test_the_queue_bound_refuses_by_name_and_what_waits_is_answered(registry: Registry) -> None:
    # Breaks with: a bound that drops silently, or counts what runs.
    with engine_for(registry, "right", max_running_requests=2, max_queued_requests=3) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
        with pytest.raises(UserError, match=r"--max-queued-requests 3: 3 requests wait, so 1 more cannot"):
            engine.submit(PROMPTS[3], GREEDY)
        engine.step()
        requests += [engine.submit(prompt, GREEDY) for prompt in PROMPTS[3:]]
        with pytest.raises(UserError, match="--max-queued-requests 3"):
            engine.submit(PROMPTS[0], GREEDY)
        run(engine, *requests)
        assert [one.output.ids for one in requests] == [plain(prompt) for prompt in PROMPTS]
        # generate queues as there is room, so it takes any number.
        results = engine.generate(PROMPTS * 3, GREEDY)
        assert [result.ids for result in results] == [plain(prompt) for prompt in PROMPTS] * 3
        assert engine.free_pages == engine.pages
