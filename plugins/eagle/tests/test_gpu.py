"""On CUDA: the same answers with and without graphs, the same drafts as on a CPU, and the same trees."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import write_eagle1, write_eagle3

from specplug import Engine, SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer
from specplug_eagle.config import candidates
from specplug_eagle.tree import cheapest, expand, frontier, prune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHAIN: Mapping[str, Any] = {"eagle_topk": 1, "num_steps": 4}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "chain": CHAIN,
    "drawn": {**CHAIN, "draft_sampling": True},
    "tree": {"eagle_topk": 4, "num_steps": 4, "num_draft_tokens": 20},
}


@pytest.fixture(scope="module")
def heads(models: Any) -> Mapping[str, Path]:
    return {
        "eagle": write_eagle1(models.target, models.folder / "gpu eagle", 5),
        "eagle3": write_eagle3(models.target, models.folder / "gpu eagle3", 5),
    }


def engine(models: Any, draft: Path, algorithm: str, config: Mapping[str, Any], device: str, **options: Any) -> Engine:
    target = dataclasses.replace(models.loaded, model=copy.deepcopy(models.loaded.model).to(device))
    return Engine(
        target,
        algorithm=algorithm,
        config=config,
        speculative_draft_model_path=str(draft),
        **{"page_size": 4, "context_length": 128, "max_running_requests": 3, "chunked_prefill_size": 8, **options},
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_drafts_are_those_of_a_cpu(
    models: Any, heads: Mapping[str, Path], algorithm: str, kind: str, graphs: bool, temperature: float
) -> None:
    """Greedy answers, and how much of them was accepted. Sampled ones differ by device, as their noise does."""
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=40)
    options = {"disable_cuda_graph": not graphs}
    with engine(models, heads[algorithm], algorithm, CONFIGS[kind], "cuda", **options) as there:
        found = there.generate(PROMPTS, sampling)
        assert not any(result.error for result in found)
        assert there.free_pages == there.pages
        assert there.ledger.report()["drafted"] > 100
    if temperature:
        return
    with engine(models, heads[algorithm], algorithm, CONFIGS[kind], "cpu") as here:
        for one, other in zip(found, here.generate(PROMPTS, sampling), strict=True):
            assert one.ids == other.ids
            assert one.ledger["accepted"] == other.ledger["accepted"]


@pytest.mark.parametrize("kind", CONFIGS)
def test_half_precision_and_long_prompts(tmp_path: Path, kind: str) -> None:
    """Chunks that fit no bucket run as they are."""
    decoder_target(3, SIZE, folder=tmp_path / "target", tokenizer=byte_tokenizer(), alphabet=range(97, 105))
    draft = write_eagle3(tmp_path / "target", tmp_path / "head", 5)
    with Engine(
        str(tmp_path / "target"),
        algorithm="eagle3",
        config=CONFIGS[kind],
        speculative_draft_model_path=str(draft),
        device="cuda",
        dtype="bfloat16",
        context_length=192,
        chunked_prefill_size=48,
    ) as there:
        prompts = ["abcdefgh" * 10, "hg" * 30, "a"]
        results = there.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        assert [len(result.ids) for result in results] == [40] * 3
        assert there.ledger.report()["drafted"] > 100
        assert there.free_pages == there.pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab", "count"), [(1, 32000, 8), (64, 32000, 8), (3, 128256, 10), (200, 500, 4)])
def test_likeliest_tokens_with_ties(dtype: torch.dtype, rows: int, vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    # Few distinct values: in half precision equal logits are the rule.
    logits = torch.randint(0, 40, (rows, vocab), generator=generator).to(dtype) / 4
    ids = torch.arange(vocab)
    _, there = cheapest(logits.cuda(), ids.cuda(), count)
    assert torch.equal(there.cpu(), logits.float().sort(dim=1, descending=True, stable=True).indices[:, :count])


@pytest.mark.parametrize("k", [2, 4, 8, 10, 32])
def test_trees_with_ties(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    cost = torch.randint(0, 3, (5, k), generator=generator).float()
    below = torch.randint(0, 3, (5, k, k), generator=generator).float()
    level, there = expand(cost, below), expand(cost.cuda(), below.cuda())
    assert torch.equal(level, there.cpu())
    assert torch.equal(frontier(level, k), frontier(there, k).cpu())
    offered = candidates(2, k)
    total = torch.cat((cost, level), 1)
    parents = torch.cat((torch.full((k,), -1), torch.arange(k).repeat_interleave(k))).expand(5, -1).contiguous()
    for count in {1, k, offered // 2, offered}:
        found = prune(total.cuda(), parents.cuda(), count)
        for here, there in zip(prune(total, parents, count), found, strict=True):
            assert torch.equal(here, there.cpu())
