"""The real demo model: our greedy text is transformers' greedy text, token for token, in float32 on a CPU."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specplug import Engine, UserError
from specplug.cli.demo_prompts import PROMPTS
from specplug.models.store import local_model

QUESTIONS = Path(__file__).parents[2] / "shared" / "data" / "spec-bench" / "question.jsonl"
"""Prompt sets lie beside the project (or where SPECPLUG_PROMPTS says), and are not part of it."""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return local_model("demo")
    except UserError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder)) as engine:
        yield engine


def expected(folder: Path, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
    """transformers' greedy ids of each prompt, and the gap between the two best logits at each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [step[0].topk(2).values for step in out.logits]
        found.append((out.sequences[0, len(prompt) :].tolist(), [float(two[0] - two[1]) for two in best]))
    return found


def check(engine: Engine, prompts: list[list[int]], tokens: int, wanted: list[tuple[list[int], list[float]]]) -> None:
    results = engine.generate(prompts, {"temperature": 0, "max_tokens": tokens})
    for number, (result, (ids, gaps)) in enumerate(zip(results, wanted, strict=True)):
        if result.ids != ids:
            at = next(i for i, (ours, theirs) in enumerate(zip(result.ids, ids, strict=False)) if ours != theirs)
            pytest.fail(f"prompt {number}: token {at} is {result.ids[at]}, not {ids[at]}; top-two gap {gaps[at]:.2e}")
    assert engine.free_pages == engine.pages


def test_plain_and_drafted_greedy_text_is_that_of_transformers(folder: Path, plain: Engine) -> None:
    # Breaks with: a wrong rotary base or norm, KV written to a wrong row, a tree mask or compaction that is off by one.
    prompts = [plain.encode(prompt.messages) for prompt in PROMPTS]
    wanted = expected(folder, prompts, 64)
    check(plain, prompts, 64, wanted)
    with Engine(plain.target, algorithm="ngram") as drafted:
        check(drafted, prompts, 64, wanted)
        assert drafted.ledger.accepted > 50


@pytest.mark.parametrize("tight", [False, True], ids=["chunked", "preempted"])
def test_chunked_prompts_and_preemption_change_nothing(plain: Engine, tight: bool) -> None:
    prompts = [prompt.messages for prompt in PROMPTS]
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 5, "max_tokens": 24}
    wanted = [result.ids for result in plain.generate(prompts, sampling)]
    tokens = sum(len(plain.encode(prompt)) for prompt in prompts)
    options = (
        {"max_total_tokens": tokens + 30, "chunked_prefill_size": tokens} if tight else {"chunked_prefill_size": 48}
    )
    with Engine(plain.target, algorithm="ngram", page_size=4, **options) as engine:
        assert [result.ids for result in engine.generate(prompts, sampling)] == wanted
        assert bool(engine.preemptions) == tight
        assert engine.free_pages == engine.pages


@pytest.mark.slow
def test_twenty_prompts_of_128_tokens(folder: Path, plain: Engine) -> None:
    path = Path(os.environ.get("SPECPLUG_PROMPTS", QUESTIONS))
    if not path.is_file():
        pytest.skip(f"no prompt file at {path.name}: set SPECPLUG_PROMPTS")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    chats = [[{"role": "user", "content": line["turns"][0]}] for line in lines[:: len(lines) // 20][:20]]
    prompts = [plain.encode(chat) for chat in chats]
    wanted = expected(folder, prompts, 128)
    check(plain, prompts, 128, wanted)
    with Engine(plain.target, algorithm="ngram") as drafted:
        check(drafted, prompts, 128, wanted)
