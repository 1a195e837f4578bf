"""A draft model that is the target is right in everything it says: every draft is accepted, whatever happens."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from specplug import Engine, SamplingParams
from specplug.testing import Harness, Move
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=40, seed=4)


def all_accepted(engine: Engine, least: int = 1) -> None:
    ledger = engine.ledger.report()
    assert ledger["drafted"] >= least
    assert ledger["accepted"] == ledger["drafted"], f"{ledger['accepted']} of {ledger['drafted']} drafts accepted"


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_every_draft_is_accepted(models: Any, steps: int) -> None:
    with models.engine(models.target, {"num_steps": steps}) as engine, models.engine(None) as plain:
        results = engine.generate(PROMPTS, GREEDY)
        assert [result.ids for result in results] == [result.ids for result in plain.generate(PROMPTS, GREEDY)]
        all_accepted(engine)
        # The prompt gives the first token; rounds of steps + 1 the others, the last one cut by the limit.
        for result in results:
            assert result.ledger["rounds"] == -(-39 // (steps + 1))


@pytest.mark.parametrize("path", ["host", "device"])
def test_still_after_preemption_and_chunks(models: Any, path: str) -> None:
    options = {"max_total_tokens": 64, "context_length": 64, "chunked_prefill_size": 4, "max_running_requests": 4}

    def made() -> Engine:
        return models.engine(models.target, {"num_steps": 3}, **options)

    if path == "device":
        with device_path():
            engine = made()
    else:
        engine = made()
    with engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        left = 0
        while any(request.output.finish_reason is None for request in requests):
            had = [request.slot for request in requests]
            engine.step()
            left += sum(
                before >= 0 and request.slot < 0 and request.output.finish_reason is None
                for before, request in zip(had, requests, strict=True)
            )
        assert left, "nobody was preempted, so this test shows nothing"
        all_accepted(engine, 100)
        assert engine.free_pages == engine.pages


@pytest.mark.parametrize("path", ["host", "device"])
def test_still_while_lengths_change(models: Any, path: str) -> None:
    """Rounds of 3, 3, 0, 0, 0, 1, 2 drafts in turn, each request at another point of the series."""
    series = (None, None, 0, 0, 0, 1, 2)
    if path == "device":
        with device_path():
            engine = models.engine(models.target)
    else:
        engine = models.engine(models.target)
    with engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        for at in itertools.count():
            if all(request.output.finish_reason is not None for request in requests):
                break
            for own, request in enumerate(requests):
                request.max_drafted = series[(at + own) % len(series)]
            engine.step()
        all_accepted(engine, 20)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_sampled_drafts_of_the_target_are_accepted(models: Any, rule: str) -> None:
    """With equal p and q both rules accept whatever was drawn: under `coupled` because the noise is one."""
    with models.engine(models.target, {"draft_sampling": True}, speculative_acceptance=rule) as engine:
        engine.generate(PROMPTS, SAMPLED)
        all_accepted(engine, 100)


def test_drawing_accepts_more_than_guessing(models: Any) -> None:
    """At temperature 1 a draw with the target's noise is right more often than the draft's likeliest token."""
    found = []
    prompts = [(first, second) for first in range(8) for second in range(4)]
    for sampling in (False, True):
        with models.engine(models.noisy(), {"draft_sampling": sampling}) as engine:
            engine.generate(prompts, SamplingParams(temperature=1.0, seed=1, max_tokens=24))
            found.append(engine.ledger.report()["accept_rate"])
    assert found[1] > found[0] + 0.1, f"accept rates: guessed {found[0]:.2f}, drawn {found[1]:.2f}"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("draws", [False, True])
def test_device_path_is_the_host_path(models: Any, sampling: SamplingParams, draws: bool) -> None:
    """The same requests on either path: equal answers, and equally many drafts accepted."""
    options: dict[str, Any] = {"chunked_prefill_size": 8, "max_running_requests": 3}
    with models.engine(models.noisy(), {"draft_sampling": draws}, **options) as engine:
        wanted = engine.generate(PROMPTS, sampling)
    with device_path():
        engine = models.engine(models.noisy(), {"draft_sampling": draws}, **options)
    with engine:
        found = engine.generate(PROMPTS, sampling)
    for one, other in zip(wanted, found, strict=True):
        assert (one.ids, one.ledger["drafted"], one.ledger["accepted"]) == (
            *(other.ids, other.ledger["drafted"]),
            other.ledger["accepted"],
        )
    assert any(0 < result.ledger["accepted"] < result.ledger["drafted"] for result in found)


@pytest.mark.slow
def test_still_after_ten_thousand_tokens(models: Any) -> None:
    prompts = [(number % 60, number // 60) for number in range(22)]
    with models.engine(models.target, context_length=512, max_running_requests=8) as engine:
        results = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=480))
        assert sum(len(result.ids) for result in results) >= 10_000
        all_accepted(engine, 7_000)


def test_a_short_window_ends_drafting_and_changes_nothing(models: Any) -> None:
    draft = models.draft("short", config={"max_position_embeddings": 24})
    with models.engine(draft) as engine, models.engine(None) as plain:
        results = engine.generate(PROMPTS, GREEDY)
        assert [result.ids for result in results] == [result.ids for result in plain.generate(PROMPTS, GREEDY)]
        all_accepted(engine)
        for prompt, result in zip(PROMPTS, results, strict=True):
            # Drafts up to token index 23, a token of the target's after every three, and after that none.
            assert 0 < result.ledger["drafted"] <= 24 - len(prompt)
            assert result.ledger["rounds"] > 40 - (24 - len(prompt))


def test_generation_config_of_the_draft_is_not_read(models: Any, tmp_path: Path) -> None:
    draft = models.draft("greeting", config={"eos_token_id": list(range(64))})
    (draft / "generation_config.json").write_text('{"temperature": 3.0, "max_length": 5, "eos_token_id": [0, 1, 2, 3]}')
    with models.engine(draft) as engine, models.engine(None) as plain:
        for sampling in (GREEDY, SAMPLED):
            found, wanted = engine.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling)
            assert [(one.ids, one.finish_reason) for one in found] == [(one.ids, one.finish_reason) for one in wanted]
        assert engine.generate(PROMPTS[:1], GREEDY)[0].ledger["accepted"] > 20


def test_fewer_drafts_are_asked_for_by_depth(models: Any) -> None:
    """A lower depth proposes the beginning of what a higher one does, and the next round is none the worse."""
    with models.engine(models.noisy(), {"num_steps": 4}) as engine:
        harness = Harness(engine.run, models.loaded)
    text = tuple(range(1, 24))
    harness.admit(0, text, 10)
    step = harness.ingest([Move(0, 10)])
    whole, _ = harness.propose(step)[0]
    for depth in (1, 3):
        step.depth = depth
        assert harness.propose(step)[0][0] == whole[:depth]
    found = harness.propose(harness.ingest([Move(0, 3, (9,))]))[0]
    assert found == harness.fresh(1, text, 13)
    assert len(whole) == len(found[0]) == 4
