"""Heads whose block is transformers': GLM-4.5, DeepSeek-V3 against its own generator, Qwen against the equations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import DEEPSEEK, GLM, QWEN, QWEN35, numbered, qwen_head, save
from mtp_oracle import TEXT, agree, one_head
from mtp_oracle import qwen_head as equations
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specplug import Engine, RefusedError, SamplingParams, UserError
from specplug.testing import Harness
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.setup import Registry, plan_run, stored_facts, stored_target
from specplug.testing.targets import decoder_target

CONFIGS = {"glm": GLM, "deepseek": DEEPSEEK}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' report on layers that a target leaves unread off the screen."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


class Generator:
    """transformers' MTP model on the checkpoint in `folder`. Its classes moved between 5.17 and 5.24."""

    def __init__(self, folder: Path, layers: int, heads: int) -> None:
        modeling = pytest.importorskip("transformers.modeling_layers")
        caches = pytest.importorskip("transformers.cache_utils")
        if not hasattr(modeling, "MtpModel") or not hasattr(caches, "MtpCache"):
            pytest.skip("this transformers has no MTP generator")
        with quiet():
            self.main = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
            # It knows the layer numbers of published models only.
            self.main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + at}\." for at in range(heads)]
            self.mtp = modeling.MtpModel.from_pretrained(self.main).eval()
        self._cache = caches.MtpCache

    @torch.inference_mode()
    def drafts(self, text: Sequence[int], committed: int) -> tuple[int, ...]:
        """Return one draft of each head after `committed` tokens of `text`, whose next one is the root."""
        out = self.main(input_ids=torch.tensor([text[:committed]]), output_hidden_states=True)
        found, _, _ = self.mtp(
            input_ids=torch.tensor([text[1 : committed + 1]]),
            last_hidden_states=out.hidden_states[-1],
            attention_mask=None,
            position_ids=torch.arange(1, committed + 1)[None],
            mtp_cache=self._cache(config=self.main.config.get_mtp_config()),
        )
        return tuple(found[0].tolist())

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return the greedy answer of transformers' own loop."""
        ids = torch.tensor([prompt])
        with quiet():
            found = self.main.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
            )
        answer: list[int] = found[0, len(prompt) :].tolist()
        return answer


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_proposals_are_the_generators(tmp_path: Path, kind: str, heads: int) -> None:
    """K = number of MTP layers: every proposal is transformers', step by step, and the text is plain decoding's."""
    folder = numbered(tmp_path / "target", CONFIGS[kind], heads=heads)
    generator, target = Generator(folder, CONFIGS[kind]["num_hidden_layers"], heads), stored_target(folder)
    with Engine(
        target, algorithm="nextn", config={"num_draft_tokens": heads + 1}, page_size=4, context_length=128
    ) as engine:
        assert engine.run.plan is not None
        assert engine.run.plan.nodes == engine.run.plan.kv[0].layers == heads
        agree(Harness(engine.run, target), lambda committed: generator.drafts(TEXT, committed))
        results = engine.generate(PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=16))
    assert [result.ids for result in results] == [generator.answer(prompt, 16) for prompt in PROMPTS[:3]]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_without_experts(tmp_path: Path, kind: str) -> None:
    """What is stored decides: a dense MTP layer is one, whatever `first_k_dense_replace` says."""
    folder = numbered(tmp_path / "target", CONFIGS[kind], dense=True)
    target = stored_target(folder)
    with Engine(target, algorithm="builtin-mtp", page_size=4, context_length=128) as engine:
        harness = Harness(engine.run, target)
    assert len(harness.fresh(0, TEXT, 9)[0]) == 3


def test_an_export_of_the_layer_drafts_the_same(tmp_path: Path) -> None:
    """A folder with the MTP layer alone, as layer 0 of a model of one layer, beside a target without any."""
    folder = numbered(tmp_path / "target", DEEPSEEK)
    weights = load_file(str(folder / "model.safetensors"))
    at = "model.layers.2."
    own = {name.replace(at, "model.layers.0."): tensor for name, tensor in weights.items() if name.startswith(at)}
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith(at)}
    save(tmp_path / "bare", {**DEEPSEEK, "num_nextn_predict_layers": 0}, rest)
    save(tmp_path / "export", {**DEEPSEEK, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}, own)
    found = []
    for path, draft in (("target", {}), ("bare", {"speculative_draft_model_path": str(tmp_path / "export")})):
        target = stored_target(tmp_path / path)
        with Engine(target, algorithm="nextn", page_size=4, context_length=128, **draft) as engine:
            assert engine.run.algorithm == "builtin-mtp"
            harness = Harness(engine.run, target)
        found.append([harness.fresh(0, TEXT, committed) for committed in (2, 9, 20)])
    assert found[0] == found[1]


def test_device_path_is_the_host_path(tmp_path: Path) -> None:
    target = stored_target(numbered(tmp_path / "target", GLM, heads=2))
    found = []
    for way in (contextlib.nullcontext(), device_path()):
        with way:
            engine = Engine(target, algorithm="builtin-mtp", page_size=4, context_length=64)
        with engine:
            results = engine.generate(PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=12))
            found.append([(result.ids, result.ledger["drafted"], result.ledger["accepted"]) for result in results])
    assert found[0] == found[1]


def test_a_tensor_more_or_less_is_an_error(tmp_path: Path) -> None:
    """Under an MTP layer's prefix nothing may be left over, and nothing be missing."""
    folder = numbered(tmp_path / "target", GLM)
    weights = load_file(str(folder / "model.safetensors"))
    at = "model.layers.2."
    changes: dict[str, Mapping[str, torch.Tensor | None]] = {
        "more": {at + "self_attn.indexer.weight": torch.zeros(2)},
        "fewer": {at + "mlp.experts.3.up_proj.weight": None},
    }
    for named, change in changes.items():
        changed = {name: tensor for name, tensor in ({**weights, **change}).items() if tensor is not None}
        save_file(changed, str(folder / "model.safetensors"))
        with pytest.raises(UserError, match="indexer" if named == "more" else "experts.3.up_proj") as told:
            Engine(stored_target(folder), algorithm="builtin-mtp")
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(("config", "root"), [(QWEN, "mtp."), (QWEN35, "mtp."), (QWEN35, "model.language_model.mtp.")])
def test_qwen_heads_follow_their_equations(tmp_path: Path, config: dict[str, Any], root: str) -> None:
    """The head alone, over the states of another target: one with linear attention cannot be verified yet."""
    folder = qwen_head(tmp_path / "head", config, root=root)
    target = decoder_target(1, 64)
    facts = stored_facts(folder)
    with pytest.raises(RefusedError, match=r"rollback.*recurrent state") as told:
        plan_run(Registry.discover(), "builtin-mtp", {}, facts)
    assert "\n" not in str(told.value)
    able = facts.model_copy(update={"features": facts.features | {"rollback", "taps"}})
    harness = Harness(plan_run(Registry.discover(), "builtin-mtp", {}, able), target)
    tensors = {name.removeprefix(root): tensor for name, tensor in load_file(str(folder / "model.safetensors")).items()}
    head = equations(tensors, config.get("text_config", config))
    agree(harness, lambda committed: one_head(target, head, TEXT, committed, 3))


def test_a_qwen_head_with_experts_loads(tmp_path: Path) -> None:
    facts = stored_facts(qwen_head(tmp_path / "head", QWEN, experts=4))
    able = facts.model_copy(update={"features": facts.features | {"rollback", "taps"}})
    harness = Harness(plan_run(Registry.discover(), "builtin-mtp", {}, able), decoder_target(1, 64))
    assert len(harness.fresh(0, TEXT, 9)[0]) == 3
    fewer = stored_facts(qwen_head(tmp_path / "fewer", QWEN, experts=3))
    short = fewer.model_copy(update={"features": able.features})
    with pytest.raises(UserError, match=r"mlp.experts.3.down_proj"):
        Harness(plan_run(Registry.discover(), "builtin-mtp", {}, short), decoder_target(1, 64))
