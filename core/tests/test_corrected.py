"""Which output tokens took the place of drafts, on the host's path and on the device's; and whose fault an error is."""

from contextlib import nullcontext
from time import monotonic
from typing import Any

import pytest

from specplug.accept import Verdict
from specplug.runtime.commit import Outcome
from specplug.runtime.engine import Engine
from specplug.runtime.request import Draft, Request
from specplug.testing.bench import LETTERS
from specplug.testing.paths import device_path
from specplug.testing.registry import bench_registry
from specplug.testing.targets import table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

TARGET = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
PROMPT = [LETTERS[at] for at in (0, 1, 2, 0, 1)]
GREEDY = {"temperature": 0.0, "max_tokens": 13, "ignore_eos": True}
PATHS = [pytest.param(nullcontext, id="host path"), pytest.param(device_path, id="device path")]
TREE = (-1, -1, 0, 0, 1)  # two children of the root; the first has two, the second one


@pytest.mark.parametrize(
    ("parents", "path", "corrected"),
    [
        (None, (), False),  # a plain round
        ((-1, 0, 1), (), True),
        ((-1, 0, 1), (0, 1), True),
        ((-1, 0, 1), (0, 1, 2), False),  # accepted to its end
        (TREE, (), True),
        (TREE, (0,), True),
        (TREE, (1,), True),
        (TREE, (0, 3), False),
        (TREE, (1, 4), False),
    ],
)
def test_a_token_corrects_where_drafts_stood(parents: Any, path: tuple[int, ...], corrected: bool) -> None:
    draft = None if parents is None else Draft([7] * len(parents), list(parents), None)
    assert Outcome(Verdict(path, 9), draft).corrected is corrected


@pytest.fixture(scope="module")
def known() -> list[int]:
    with Engine(TARGET) as engine:
        return [*PROMPT, *engine.generate([PROMPT], {**GREEDY, "max_tokens": 40})[0].ids]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bench_registry(tmp_path_factory.mktemp("plugins"))


def answered(registry: Any, algorithm: str, config: Any, sampling: Any = GREEDY, **more: Any) -> Request:
    """One answered request."""
    with Engine(TARGET, algorithm=algorithm, config=config, registry=registry) as engine:
        request = engine.submit(PROMPT, sampling, **more)
        while request.output.finish_reason is None:
            engine.step()
        return request


def marks(request: Request) -> str:
    """``.`` the target's own, ``x`` in place of drafts, digits: the depth of a draft. One per token of the output."""
    count = len(request.output.ids)
    assert count <= len(request.depths) == len(request.corrected)
    pairs = zip(request.depths[:count], request.corrected[:count], strict=True)
    assert not any(depth and corrected for depth, corrected in zip(request.depths, request.corrected, strict=True))
    return "".join(str(depth) if depth else "x" if corrected else "." for depth, corrected in pairs)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("algorithm", ["scripted", "scripted-device"])
@pytest.mark.parametrize(
    ("behaviour", "options", "wanted"),
    [
        # No drafts are asked for where one token is left.
        ("right_then_wrong", {}, ".12x12x12x12."),
        ("wrong", {}, ".xxxxxxxxxxx."),
        ("right", {}, ".123.123.123."),
        ("empty", {}, "............."),
        ("right_then_wrong", {"max_tokens": 6}, ".12x1."),
    ],
)
def test_chains(
    path: Any, registry: Any, known: Any, algorithm: str, behaviour: str, options: Any, wanted: str
) -> None:
    config = {"scripted_behaviour": behaviour, "scripted_n": 2, "scripted_texts": [known], "num_draft_tokens": 4}
    with path():
        request = answered(registry, algorithm, config, {**GREEDY, **options})
    assert marks(request) == wanted


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_corrected_without_drafts(path: Any, registry: Any, known: Any) -> None:
    config = {"scripted_behaviour": "wrong", "scripted_texts": [known]}
    with path():
        assert marks(answered(registry, "none", {})) == "." * 13
        assert marks(answered(registry, "scripted", config, max_drafted=0)) == "." * 13


@pytest.mark.parametrize("algorithm", ["scripted", "scripted-device"])
def test_trees_are_marked_alike_on_both_paths(registry: Any, known: Any, algorithm: str) -> None:
    config = {"scripted_behaviour": "random_tree", "scripted_texts": [known], "scripted_seed": 3}
    sampling = {**GREEDY, "max_tokens": 30}
    host = answered(registry, algorithm, config, sampling)
    with device_path():
        device = answered(registry, algorithm, config, sampling)
    assert marks(device) == marks(host)
    assert {"x", "1"} <= set(marks(host))
    ledger = host.settled_ledger()
    assert sum(host.corrected) == sum(ledger.reached) - ledger.accepted


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_string_takes_marks_back(path: Any, registry: Any, known: Any) -> None:
    config = {"scripted_behaviour": "right_then_wrong", "scripted_n": 2, "scripted_texts": [known]}
    stop = bytes(known[len(PROMPT) + 2 : len(PROMPT) + 5]).decode()
    with path():
        request = answered(registry, "scripted", config, {**GREEDY, "stop": (stop,)})
    assert request.output.finish_reason == "stop"
    assert marks(request) == ".12x12x12x12."[: len(request.output.ids)]


@pytest.mark.parametrize("path", PATHS)
def test_whose_fault_an_error_is(path: Any, registry: Any, known: Any) -> None:
    def fails(tokens: Any, logits: Any) -> Any:
        raise ValueError("no")

    config = {"scripted_behaviour": "raise_propose", "scripted_n": 0, "scripted_texts": [known]}
    with path():
        own = answered(registry, "none", {}, logits_processor=fails)
        drafter = answered(registry, "scripted", config)
    assert (own.output.finish_reason, own.blame) == ("error", "request")
    assert (drafter.output.finish_reason, drafter.blame) == ("error", "engine")
    assert "propose" in drafter.error


def test_when_the_newest_token_was_committed(registry: Any) -> None:
    begin = monotonic()
    with Engine(TARGET) as engine:
        request = engine.submit(PROMPT, GREEDY)
        engine.step()
        first = request.committed
        engine.step()
        assert begin < first < request.committed < monotonic()
