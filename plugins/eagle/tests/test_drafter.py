"""Whole answers: which token a head is asked about, what its faults cost, and where it stops."""

import itertools
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head, eagle1, eagle3, write_eagle1, write_eagle3

from specplug import Engine, SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.setup import Target
from specplug.testing.targets import decoder_target

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=30, seed=4)
CHAIN: Mapping[str, Any] = {"eagle_topk": 1}
TREE: Mapping[str, Any] = {"eagle_topk": 3, "num_steps": 3, "num_draft_tokens": 12}
WRITERS = {"eagle": write_eagle1, "eagle3": write_eagle3}


def random_head(models: Any, algorithm: str, **options: Any) -> Path:
    folder: Path = models.folder / f"random {algorithm} {sorted(options)}"
    return folder if folder.exists() else WRITERS[algorithm](models.target, folder, 5, **options)


def ids(results: Any) -> list[list[int]]:
    return [result.ids for result in results]


# --- alignment --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counting(models: Any) -> Target:
    """A target that says token + 1, whatever came before."""
    target = decoder_target(7, 64, folder=models.folder / "counting")
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        weight = target.model.get_submodule("embed_tokens").get_parameter("weight")
        target.model.get_submodule("lm_head").get_parameter("weight").copy_(weight.roll(1, 0))
    return target


def copies(target: Target, what: str) -> Path:
    """Write a head whose output is the embedding of its token, or the hidden state beside it."""
    folder = Path(target.checkpoint.path).with_name(f"copies {what}")
    if folder.exists():
        return folder
    config = target.checkpoint.config
    head, hidden = eagle1(config), config["hidden_size"]
    halves = [torch.zeros(hidden, hidden), torch.zeros(hidden, hidden)]
    halves[what == "hidden"] = torch.eye(hidden)
    silent = {name: torch.zeros_like(head.tensors[name]) for name in head.tensors if "o_proj" in name or "down" in name}
    return Head(head.config, {**head.tensors, **silent, "fc.weight": torch.cat(halves, 1)}).save(folder)


def on(target: Target, draft: Path, config: Mapping[str, Any]) -> Engine:
    options: dict[str, Any] = {"page_size": 4, "context_length": 256, "speculative_draft_model_path": str(draft)}
    return Engine(target, algorithm="eagle", config=config, **options)


@pytest.mark.parametrize("config", [CHAIN, TREE])
def test_a_head_that_copies_its_token_is_right_at_every_slot(counting: Target, config: Mapping[str, Any]) -> None:
    """Its token is the one before the one it is asked for: a slot earlier or later, and every draft would be wrong."""
    with on(counting, copies(counting, "token"), config) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.ids == [(prompt[-1] + 1 + at) % 64 for at in range(40)]
        ledger = engine.ledger.report()
        assert ledger["path_accept_rate"] == 1.0
        assert ledger["accept_length"] > 3.8


def test_a_head_that_copies_its_state_is_one_behind(counting: Target) -> None:
    """The state at i says token i + 1 already: it repeats the root, which here is never right."""
    with on(counting, copies(counting, "hidden"), CHAIN) as engine:
        engine.generate(PROMPTS, GREEDY)
        ledger = engine.ledger.report()
        assert ledger["drafted"] > 100
        assert ledger["accepted"] == 0


# --- what a poor head costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", WRITERS)
@pytest.mark.parametrize("config", [CHAIN, TREE])
def test_a_random_head_changes_nothing(models: Any, algorithm: str, config: Mapping[str, Any]) -> None:
    with models.engine(random_head(models, algorithm), algorithm, config) as engine, models.engine(None) as plain:
        for sampling in (GREEDY, SAMPLED):
            assert ids(engine.generate(PROMPTS, sampling)) == ids(plain.generate(PROMPTS, sampling))
        report = engine.ledger.report()
        assert report["drafted"] > 300
        assert report["tokens_per_target_step"] < 1.5


def test_dead_drafts_raise_the_alarm(counting: Target, caplog: pytest.LogCaptureFixture) -> None:
    draft = copies(counting, "hidden")
    with on(counting, draft, CHAIN) as engine, caplog.at_level(logging.WARNING, "specplug"):
        results = engine.generate(PROMPTS, GREEDY.model_copy(update={"max_tokens": 60}))
        assert [result.ids[:3] for result in results] == [[(p[-1] + 1 + at) % 64 for at in range(3)] for p in PROMPTS]
        assert engine.ledger.report()["tokens_per_target_step"] == 1.0
    assert "of the first drafts were accepted" in caplog.text
    assert "specplug-eagle" in caplog.text


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", WRITERS)
@pytest.mark.parametrize("config", [CHAIN, TREE])
@pytest.mark.parametrize("path", ["host", "device"])
def test_a_short_window_ends_drafting_and_changes_nothing(
    models: Any, algorithm: str, config: Mapping[str, Any], path: str
) -> None:
    folder = models.folder / f"short {algorithm}"
    if not folder.exists():
        shutil.copytree(random_head(models, algorithm), folder)
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(stated | {"max_position_embeddings": 20}), encoding="utf-8")
    if path == "device":
        with device_path():
            engine = models.engine(folder, algorithm, config)
    else:
        engine = models.engine(folder, algorithm, config)
    with engine, models.engine(None) as plain:
        results = engine.generate(PROMPTS, GREEDY)
        assert ids(results) == ids(plain.generate(PROMPTS, GREEDY))
        for prompt, result in zip(PROMPTS, results, strict=True):
            # Every round before emits at least a token, every one after exactly one.
            assert 0 < result.ledger["drafted_rounds"] <= 20 - len(prompt)
            assert result.ledger["rounds"] - result.ledger["drafted_rounds"] >= len(prompt) + 40 - 20 - 2


# --- the device's path ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", [CHAIN, {**CHAIN, "draft_sampling": True}, TREE], ids=["chain", "drawn", "tree"])
def test_device_path_is_the_host_path(models: Any, sampling: SamplingParams, config: Mapping[str, Any]) -> None:
    """The same requests on either path: equal answers, and equally many drafts accepted."""
    options: dict[str, Any] = {"chunked_prefill_size": 8, "max_running_requests": 3}
    sampling = sampling.model_copy(update={"max_tokens": 48})
    draft = random_head(models, "eagle3")
    with models.engine(draft, "eagle3", config, **options) as engine:
        expected = engine.generate(PROMPTS, sampling)
    with device_path():
        engine = models.engine(draft, "eagle3", config, **options)
    with engine:
        found = engine.generate(PROMPTS, sampling)
    for one, other in zip(expected, found, strict=True):
        assert (one.ids, one.ledger["drafted"], one.ledger["accepted"]) == (
            *(other.ids, other.ledger["drafted"]),
            other.ledger["accepted"],
        )
    assert sum(result.ledger["accepted"] for result in found) > 0


@pytest.mark.parametrize("path", ["host", "device"])
def test_lengths_that_change_leave_no_trace(counting: Target, path: str) -> None:
    """Rounds of 3, 3, 0, 0, 0, 1, 2 drafts in turn: a head that is right stays right."""
    series = (None, None, 0, 0, 0, 1, 2)
    draft = copies(counting, "token")
    if path == "device":
        with device_path():
            engine = on(counting, draft, CHAIN)
    else:
        engine = on(counting, draft, CHAIN)
    with engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        for at in itertools.count():
            if all(request.output.finish_reason is not None for request in requests):
                break
            for own, request in enumerate(requests):
                request.max_drafted = series[(at + own) % len(series)]
            engine.step()
        ledger = engine.ledger.report()
        assert ledger["accepted"] == ledger["drafted"] > 40


def test_drawing_accepts_more_than_guessing(models: Any) -> None:
    """At temperature 1 a draw with the target's noise is right more often than the head's likeliest token."""
    head = eagle3(models.loaded.model.config, 5, rows=64)
    # Its output head is soft, so that a draw is not the likeliest token.
    draft = head.but(lm_head__weight=head.tensors["lm_head.weight"] * 0.25).save(models.folder / "soft")
    prompts = [(first, second) for first in range(8) for second in range(6)]
    rates = []
    for sampled in (False, True):
        with models.engine(draft, "eagle3", {**CHAIN, "draft_sampling": sampled}) as engine:
            engine.generate(prompts, SamplingParams(temperature=1.0, seed=1, max_tokens=24))
            rates.append(engine.ledger.report()["accept_rate"])
    assert rates[1] > 1.5 * rates[0], f"accept rates: guessed {rates[0]:.3f}, drawn {rates[1]:.3f}"
