"""On CUDA: the same answers with and without graphs, and the drafts that a CPU makes."""

from pathlib import Path

import frozen_checkpoints as gemma
import pytest
import torch

from specplug import Engine, SamplingParams
from specplug.testing.bench import LETTERS
from specplug.testing.tokenizer import byte_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ["abcab", "hgfedcba" * 3, "b", "aaaa", "fgh"]
VOCAB = 260
"""The byte tokenizer's, padded to whole clusters."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = gemma.write_target(
        tmp_path_factory.mktemp("gemma") / "target",
        1,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        alphabet=LETTERS,
        sliding_window=6,
        **{**gemma.SHARED, "head_dim": 64, "global_head_dim": 128},
    )
    byte_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_cuda_drafts_what_a_cpu_drafts(target: Path, tmp_path: Path, ordered: bool, draws: bool) -> None:
    sizes = {"head_dim": 64, "global_head_dim": 128, "said": LETTERS}
    draft = gemma.write_assistant(tmp_path / "draft", target, 5, ordered=ordered, **sizes)
    sampling = SamplingParams(temperature=0.8 if draws else 0.0, seed=7, max_tokens=40)

    def run(device: str, *, graphs: bool = True, drafting: bool = True) -> tuple[list[list[int]], int, int]:
        options = {"algorithm": "frozen-kv-mtp", "config": {"draft_sampling": draws}} if drafting else {}
        if drafting:
            options["speculative_draft_model_path"] = str(draft)
        shape = {"dtype": "float32", "context_length": 128, "max_running_requests": 4}
        with Engine(str(target), device=device, disable_cuda_graph=not graphs, **shape, **options) as engine:
            ids = [result.ids for result in engine.generate(PROMPTS, sampling)]
            ledger = engine.ledger.report()
            return ids, ledger["drafted"], ledger["accepted"]

    plain, _, _ = run("cuda", drafting=False)
    graphs, eager = run("cuda"), run("cuda", graphs=False)
    assert graphs == eager
    assert graphs[0] == plain
    assert graphs[2] > 0
    if not draws:  # the noise of a CPU is another one
        assert run("cpu") == graphs
