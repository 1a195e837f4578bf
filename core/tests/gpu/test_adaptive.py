"""On CUDA: depths that change from round to round, with graphs and without, and costs measured at start."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import Engine, SamplingParams
from specplug.adaptive.policy import Forced
from specplug.registry import Registry
from specplug.testing.bench import LETTERS
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ["abcab", "hgfedcba" * 3, "b", "aaaa", "fgh"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"), installed=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    decoder_target(3, SIZE, folder=place, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    return place


def engine(folder: Path, registry: Registry, algorithm: str, **options: Any) -> Engine:
    if algorithm == "standalone":
        options |= {"speculative_draft_model_path": str(folder), "config": {"num_steps": 3}}
    sizes = {"device": "cuda", "dtype": "float32", "context_length": 128, "max_running_requests": 4}
    return Engine(str(folder), algorithm=algorithm, registry=registry, **{**sizes, **options})


@pytest.mark.parametrize("graphs", [True, False])
def test_returning_from_0_loses_no_acceptance(folder: Path, registry: Registry, graphs: bool) -> None:
    pytest.importorskip("specplug_standalone")
    options = {"speculative_adaptive": True, "speculative_adaptive_policy": "cost", "disable_cuda_graph": not graphs}
    with engine(folder, registry, "none") as plain:
        wanted = [result.ids for result in plain.generate(PROMPTS, GREEDY)]
    with engine(folder, registry, "standalone", **options) as drafted:
        assert drafted._built.drafting is not None
        for depths in ([3, 3, 0, 0, 0, 3, 3], [0] * 9 + [1, 0, 2, 3]):
            drafted._built.drafting.policy = Forced(depths)
            results = drafted.generate(PROMPTS, GREEDY)
            assert [result.ids for result in results] == wanted
            assert all(result.ledger["accept_rate"] == 1.0 and result.ledger["accepted"] for result in results)


@pytest.mark.parametrize("policy", ["ema", "cost"])
@pytest.mark.parametrize("algorithm", ["standalone", "ngram"])
def test_policies_run_and_costs_are_known_from_the_start(
    folder: Path, registry: Registry, algorithm: str, policy: str
) -> None:
    pytest.importorskip(f"specplug_{algorithm}")
    with engine(folder, registry, "none") as plain:
        wanted = [result.ids for result in plain.generate(PROMPTS, GREEDY)]
    options = {"speculative_adaptive": True, "speculative_adaptive_policy": policy}
    with engine(folder, registry, algorithm, **options) as drafted:
        begun = drafted.report()["adaptive"]
        assert [result.ids for result in drafted.generate(PROMPTS, GREEDY)] == wanted
        assert drafted.speculation == "on"
    if policy == "cost":
        assert all(ms > 0 for _, _, ms in begun["measured"]["verify_ms"])
        assert bool(begun["measured"]["draft_ms"]) == (algorithm == "standalone")
