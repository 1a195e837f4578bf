"""On CUDA: the same answers with and without graphs, and a draft that is the target right about itself."""

from typing import Any

import pytest
import torch

from specplug import Engine, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ["abcab", "hgfedcba" * 3, "b", "aaaa", "fgh"]
CONFIG = {"standalone_heterogeneous_vocab": True}


def engine(swapped: Any, draft: Any, config: dict[str, Any] | None = None, **options: Any) -> Engine:
    drafting = {"algorithm": "standalone", "config": {**CONFIG, **(config or {})}} if draft else {}
    return Engine(
        str(swapped.target),
        **drafting,
        **{"device": "cuda", "dtype": "float32", "context_length": 128, "max_running_requests": 4, **options},
        **({"speculative_draft_model_path": str(draft)} if draft else {}),
    )


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_is_the_target_is_right(
    swapped: Any, temperature: float, graphs: bool, other: bool, draws: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=60)
    draft = swapped.draft if other else swapped.target
    config = {"draft_sampling": draws, "num_steps": 4}
    with engine(swapped, draft, config, disable_cuda_graph=not graphs) as drafted, engine(swapped, None) as plain:
        found, wanted = drafted.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling)
        assert [result.ids for result in found] == [result.ids for result in wanted]
        ledger = drafted.ledger.report()
        if draws or temperature == 0.0:
            assert ledger["accepted"] == ledger["drafted"] > 100
        assert drafted.free_pages == drafted.pages


def test_half_precision_and_long_prompts(swapped: Any) -> None:
    """Chunks that fit no bucket run as they are; in half precision ties may fall either way."""
    prompts = ["abcdefgh" * 10, "hg" * 30, "a"]
    options: dict[str, Any] = {"dtype": "bfloat16", "chunked_prefill_size": 48}
    with engine(swapped, swapped.target, {"num_steps": 4}, **options) as drafted:
        drafted.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40))
        assert drafted.ledger.report()["accept_rate"] > 0.9
