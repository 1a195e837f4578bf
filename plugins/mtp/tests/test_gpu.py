"""On CUDA: the same answers with and without graphs, and the same drafts as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import GLM, mimo, numbered

from specplug import Engine, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ["abcab", "hgfedcba" * 3, "b", "aaaa", "fgh"]


def run(
    folder: Path, algorithm: str, config: dict[str, Any], sampling: SamplingParams, **options: Any
) -> tuple[list[list[int]], int, int]:
    """Return the answers, and how many tokens were drafted and accepted."""
    sizes = {"device": "cuda", "dtype": "float32", "context_length": 128, "max_running_requests": 4}
    with Engine(str(folder), algorithm=algorithm, config=config, **{**sizes, **options}) as engine:
        results = engine.generate(PROMPTS, sampling)
        assert engine.free_pages == engine.pages
        ledger = engine.ledger.report()
    return [result.ids for result in results], ledger["drafted"], ledger["accepted"]


@pytest.mark.parametrize("config", [{"mtp_multi_layer": False, "num_steps": 4}, {}, {"mtp_depth_input": "target"}])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graphs_and_cpu_agree(tmp_path: Path, temperature: float, draws: bool, config: dict[str, Any]) -> None:
    folder = mimo(tmp_path / "target", heads=3, text=True)
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=40)
    config = {**config, "draft_sampling": draws}
    plain = run(folder, "none", {}, sampling)
    recorded = run(folder, "nextn", config, sampling)
    eager = run(folder, "nextn", config, sampling, disable_cuda_graph=True)
    assert recorded[0] == eager[0] == plain[0]
    assert recorded[1:] == eager[1:]
    if temperature == 0.0 and not draws:
        assert recorded == run(folder, "nextn", config, sampling, device="cpu")


def test_experts(tmp_path: Path) -> None:
    """A block of transformers' runs without graphs."""
    folder = numbered(tmp_path / "target", {**GLM, "head_dim": 64}, heads=2, text=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    assert run(folder, "nextn", {}, sampling)[0] == run(folder, "none", {}, sampling)[0]


def test_half_precision_and_long_prompts(tmp_path: Path) -> None:
    """Chunks that fit no bucket run as they are."""
    folder = mimo(tmp_path / "target", heads=2, text=True)
    options: dict[str, Any] = {"dtype": "bfloat16", "chunked_prefill_size": 48, "max_running_requests": 2}
    answers, drafted, _ = run(folder, "nextn", {}, SamplingParams(temperature=0.0, max_tokens=40), **options)
    assert [len(ids) for ids in answers] == [40] * len(PROMPTS)
    assert drafted > 100
