"""On CUDA: the same answers with and without graphs, and drafts that know the target right throughout."""

from pathlib import Path
from typing import Any

import dflash_tiny as tiny
import pytest
import torch

from specplug import Engine, SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.setup import stored_target
from specplug.testing.targets import decoder_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine(
    folder: Path,
    algorithm: str | None,
    draft: Path | None,
    config: Any = None,
    *,
    device: str = "cuda",
    dtype: str = "float32",
    **options: Any,
) -> Engine:
    if algorithm is not None:
        options |= {"algorithm": algorithm, "config": config or {}, "speculative_draft_model_path": str(draft)}
    target = stored_target(folder, device, dtype)
    return Engine(target, **{"context_length": 128, "max_running_requests": 4, **options})


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("threshold", [0.0, 0.01])
def test_a_chain_that_knows_the_target_is_right_throughout(
    threshold: float, temperature: float, graphs: bool, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    model = tiny.softened(decoder_target(5, 64, folder=target), 0.0).model
    weights = tiny.body() | tiny.bigram_ends(model, 64)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 0
    weights["confidence_head.proj.bias"] += 9.0
    draft = tiny.write(tmp_path / "draft", tiny.dspark_config("vanilla", 64), weights)
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=60)
    config = {"dspark_confidence_threshold": threshold}
    with (
        engine(target, "dspark", draft, config, disable_cuda_graph=not graphs) as drafted,
        engine(target, None, None) as plain,
    ):
        found, wanted = drafted.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling)
        assert [result.ids for result in found] == [result.ids for result in wanted]
        ledger = drafted.ledger.report()
        assert ledger["accepted"] == ledger["drafted"] > 100
        assert drafted.free_pages == drafted.pages


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_the_device_drafts_what_the_host_drafts(graphs: bool, draws: bool, tmp_path: Path) -> None:
    """A sliding and a full layer: as many drafts accepted as on the CPU, where the definition is checked."""
    target = tmp_path / "target"
    model = tiny.softened(decoder_target(3, 64, folder=target)).model
    weights = tiny.body() | tiny.bigram_ends(model, 64)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    draft = tiny.write(tmp_path / "draft", tiny.dspark_config("vanilla", 64, **windows), weights)
    seen = []
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"device": device, "disable_cuda_graph": not graphs, "chunked_prefill_size": 8}
        with engine(target, "dspark", draft, {"draft_sampling": draws}, **options) as drafted:
            found = drafted.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
            seen.append([(result.ids, result.ledger["accepted"]) for result in found])
    assert seen[0] == seen[1]


def test_half_precision_and_long_prompts(tmp_path: Path) -> None:
    """Chunks that fit no bucket run as they are; in half precision ties may fall either way."""
    target = tmp_path / "target"
    model = tiny.softened(decoder_target(5, 64, folder=target), 0.0).model
    weights = tiny.body() | tiny.bigram_ends(model, 64)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 0
    draft = tiny.write(tmp_path / "draft", tiny.dspark_config("vanilla", 64), weights)
    prompts = [tuple(range(60)), (7, 3) * 20, (1,)]
    with engine(target, "dspark", draft, dtype="bfloat16", chunked_prefill_size=48) as drafted:
        drafted.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40))
        assert drafted.ledger.report()["accept_rate"] > 0.9
