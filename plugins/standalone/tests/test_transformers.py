"""Against transformers' assisted generation, with the same pair of models; and drafts that transformers runs."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specplug import Engine, SamplingParams
from specplug.testing import Harness, Move
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.tokenizer import SIZE, byte_tokenizer

STEPS = 3
"""Drafts of a round."""


def assisted(target: Path, draft: Path, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], dict[int, list[int]]]:
    """Return transformers' greedy answer, and what the assistant proposed after so many tokens of text."""
    model, assistant = (
        AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32) for folder in (target, draft)
    )
    model.generation_config.eos_token_id = assistant.generation_config.eos_token_id = None
    assistant.generation_config.num_assistant_tokens = STEPS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    proposed: dict[int, list[int]] = {}
    ask = AssistedCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **rest: Any) -> Any:
        found = ask(self, input_ids, *args, **rest)
        proposed[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssistedCandidateGenerator, "get_candidates", noted)
        out = model.generate(torch.tensor([prompt]), assistant_model=assistant, max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt) :].tolist(), proposed


@pytest.mark.filterwarnings("ignore")
def test_text_and_proposals_are_those_of_assisted_generation(models: Any) -> None:
    with models.engine(models.noisy(), {"num_steps": STEPS}) as engine:
        for prompt in PROMPTS:
            text, proposed = assisted(models.target, models.noisy(), prompt, 32)
            (result,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=32))
            assert result.ids == text
            harness = Harness(engine.run, models.loaded)
            harness.admit(0, (*prompt, *text), 1)  # it drafts from the prompt on, where our first token is the target's
            done, compared = 0, 0
            for length, theirs in sorted(proposed.items()):
                if length < 2 or not theirs:
                    continue
                drafts, _ = harness.propose(harness.ingest([Move(0, length - 1 - done)]))[0]
                assert list(drafts[: len(theirs)]) == theirs, f"after {length} tokens of {prompt}"
                done, compared = length - 1, compared + len(theirs)
            assert compared >= 24


def gemma(folder: Path) -> Path:
    """A random model with windows in every other layer, which the built-in decoder does not run."""
    torch.manual_seed(2)
    config = Gemma3TextConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.3,
        eos_token_id=None,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("path", ["host", "device"])
def test_a_draft_that_transformers_runs_is_right_about_itself(path: str, tmp_path: Path) -> None:
    folder = str(gemma(tmp_path / "gemma"))
    options: dict[str, Any] = {"page_size": 4, "context_length": 96, "chunked_prefill_size": 8, "dtype": "float32"}
    with device_path() if path == "device" else contextlib.nullcontext():
        engine = Engine(folder, algorithm="standalone", speculative_draft_model_path=folder, **options)
    with engine, Engine(folder, **options) as plain:
        sampling = SamplingParams(temperature=0.0, max_tokens=30)
        found, wanted = engine.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling)
        assert [result.ids for result in found] == [result.ids for result in wanted]
        ledger = engine.ledger.report()
        assert ledger["accepted"] == ledger["drafted"] > 80
