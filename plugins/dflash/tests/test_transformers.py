"""The drafts of transformers' own DFlash generator: the same, position for position, over a draft that it wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specplug.testing import Move

transformers = pytest.importorskip("transformers")
candidate_generator = pytest.importorskip("transformers.generation.candidate_generator")
if not hasattr(transformers, "MuseGlimmerAssistantModel"):
    pytest.skip("this transformers has no Muse-Glimmer assistant", allow_module_level=True)
Generator = candidate_generator.DFlashTokenCandidateGenerator

PROMPTS = [list(range(3, 14)), [7, 7, 7], [60, 2, 41, 9, 33]]
LENGTH = 40


def assistant(folder: Path, window: int) -> Any:
    torch.manual_seed(6)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rms_norm_eps=1e-6,
        block_size=5,
        mask_token_id=63,
        target_layer_ids=[-1, 0],  # of the last layer transformers gives the state after the final norm
        initializer_range=0.3,
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_norm.weight.mul_(3.0)  # so that rows attend to little, and differ
    model.save_pretrained(folder)
    return model


def candidates(target: Any, draft: Any, prompt: list[int]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the text of assisted decoding, and committed length -> drafts, the root counted as committed."""
    seen: dict[int, list[int]] = {}
    original = Generator.get_candidates

    def watched(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, ids, *args, **kwargs)
        if found[1] is not None:
            seen[ids.shape[1]] = found[0][0, ids.shape[1] :].tolist()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "get_candidates", watched)
        text = target.generate(
            torch.tensor([prompt]),
            assistant_model=draft,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=LENGTH,
            pad_token_id=0,
        )
    return text[0].tolist(), seen


@pytest.mark.parametrize("window", [4, 9, 100])
def test_drafts_are_the_same(lab: Any, window: int, tmp_path: Path) -> None:
    draft = assistant(tmp_path, window)
    target = transformers.AutoModelForCausalLM.from_pretrained(lab.target, dtype=torch.float32).eval()
    compared = differing = 0
    for prompt in PROMPTS:
        text, seen = candidates(target, draft, prompt)
        harness = lab.harness("dflash", tmp_path)
        harness.admit(0, text, len(prompt))
        done = 0
        for length, theirs in sorted(seen.items()):
            step = harness.ingest([Move(0, length - 1 - done)])
            done = length - 1
            ours = harness.propose(step)[0][0]
            assert list(ours) == theirs[: len(ours)], f"after {length} tokens of {prompt}"
            compared += 1
            differing += len(set(ours)) > 1
    assert compared > 60
    assert differing > 20
