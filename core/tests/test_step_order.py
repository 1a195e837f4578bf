"""What the next step does not need waits until that step is launched, and is there for whoever asks before."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from specplug.runtime.attention.flashinfer_kernel import Lengths
from specplug.runtime.device.executor import DeviceExecutor
from specplug.runtime.device.step import DeviceStep
from specplug.runtime.engine import Engine
from specplug.runtime.request import Request
from specplug.testing.bench import LETTERS
from specplug.testing.paths import device_path
from specplug.testing.registry import bench_registry
from specplug.testing.targets import table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

TARGET = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
PROMPTS = [[LETTERS[at] for at in prompt] for prompt in ((0, 1, 2, 0, 1), (3, 1), (2, 2, 4))]
GREEDY = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}
PATHS = [pytest.param(nullcontext, id="host path"), pytest.param(device_path, id="device path")]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bench_registry(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    with Engine(TARGET) as engine:
        texts = [[*prompt, *found.ids] for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True)]
    return {"scripted_behaviour": "right_then_wrong", "scripted_n": 2, "scripted_texts": texts, "num_draft_tokens": 4}


def run(engine: Engine, sampling: dict[str, Any] = GREEDY) -> Iterator[list[Request]]:
    """Yield all requests after each step."""
    requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
    while any(request.output.finish_reason is None for request in requests):
        engine.step()
        yield requests


def test_numbers_are_made_after_the_next_launch(
    registry: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Breaks with: `stats` or `count` before the launch.
    events: list[str] = []

    def noted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(*given: Any) -> Any:
            events.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, call)

    noted(DeviceStep, "outcomes")
    noted(DeviceExecutor, "launch")
    noted(Request, "count")
    noted(DeviceStep, "exposed")
    with device_path(), Engine(TARGET, algorithm="scripted-device", config=config, registry=registry) as engine:
        request = engine.submit(PROMPTS[0], GREEDY)
        for _ in range(2):
            events.clear()
            engine.step()
        assert request.output.finish_reason is None
        assert events == ["outcomes", "launch", "count", "exposed"]


@pytest.mark.parametrize("path", PATHS)
def test_every_step_ends_counted(path: Any, registry: Any, config: dict[str, Any]) -> None:
    # Breaks with: a step that leaves its notes to a later one, marks or tokens behind a stop inside a block.
    within = config["scripted_texts"][0][len(PROMPTS[0]) + 2]  # the second draft of the first block
    sampling = {**GREEDY, "stop_token_ids": (within,)}
    with path(), Engine(TARGET, algorithm="scripted-device", config=config, registry=registry) as engine:
        for requests in run(engine, sampling):
            for prompt, request in zip(PROMPTS, requests, strict=True):
                assert not request.uncounted
                assert len(request.depths) == len(request.corrected) == len(request.output.ids)
                assert request.tokens == [*prompt, *request.output.ids]
        assert requests[0].output.finish_reason == "stop"
        assert requests[0].depths[-1] > 0


def test_a_ledger_read_before_the_launch_has_it_all(
    registry: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Breaks with: a `settled_ledger` that does not count first, or notes that are counted twice.
    def ledgers() -> list[Any]:
        with device_path(), Engine(TARGET, algorithm="scripted-device", config=config, registry=registry) as engine:
            launch, requests = engine._executor.launch, list[Request]()

            def read_first(rows: Any) -> Any:
                for request in requests if looks else ():
                    ledger = request.settled_ledger()
                    assert ledger.output_tokens == len(request.output.ids)
                    assert sum(ledger.accepted_at) == ledger.accepted <= ledger.drafted
                return launch(rows)

            monkeypatch.setattr(engine._executor, "launch", read_first)
            for requests in run(engine):  # noqa: B007  # read by `read_first`
                pass
            return [request.settled_ledger().report() for request in requests]

    looks = False
    plain = ledgers()
    looks = True
    assert ledgers() == plain
    assert all(ledger["accepted"] > 0 for ledger in plain)


@pytest.mark.parametrize("masked", [True, False])
def test_what_attention_is_planned_with(masked: bool) -> None:
    # Breaks with: a page too many for rows without keys, a last page of 0 where it is full, masks nobody asked for.
    page, empty = 4, 2
    lengths = Lengths(6, page, torch.device("cpu"), empty, masked=masked)
    for q_len, kv_len in [([1, 3, 2, 0], [1, 8, 0, 0]), ([5, 1, 1, 1, 1, 0], [5, 4, 9, 13, 0, 0])]:
        lengths.set(np.array(q_len), np.array(kv_len))
        pages = [-(-keys // page) for keys in kv_len]
        bits = [-(-many * keys // 8) if masked else 0 for many, keys in zip(q_len, kv_len, strict=True)]
        wanted = {"q_indptr": q_len, "kv_indptr": pages, "mask_indptr": bits}
        for name, sizes in wanted.items():
            assert lengths.host(name).tolist() == np.cumsum([0, *sizes, *[0] * empty]).tolist(), name
        last = [keys - (many - 1) * page if many else 0 for keys, many in zip(kv_len, pages, strict=True)]
        assert lengths.host("last_page").tolist() == [*last, *[0] * empty]
        assert lengths.host("kv_len").tolist() == [*kv_len, *[0] * empty]
        assert (lengths.rows, lengths.total, lengths.pages) == (len(q_len) + empty, sum(q_len), sum(pages))
        assert lengths.widest == max(q_len)
