"""A language model for drafting: what is known of it before it is loaded, and that it runs over a drafter's KV."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specplug import Checkpoint, DraftModel, DraftPlan, Facts, ModelShape, Refusal, UserError, model_shape
from specplug.facts import read_checkpoint
from specplug.models.shape import grouped
from specplug.models.target import load_model
from specplug.runtime.context import EngineContext
from specplug.runtime.draft_kv import PagedView, StepRows
from specplug.runtime.kv import KVPool, PagePool
from specplug.spec import Capabilities
from specplug.testing.targets import decoder_config, decoder_target, dense_forward

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3Text": {"sliding_window": 6, "layer_types": MIXED},
    # The last two layers keep no KV; heads differ between kinds of layers.
    "Gemma4Text": {
        "sliding_window": 6,
        "layer_types": MIXED,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 60,
        "hidden_size_per_layer_input": 8,
    },
    # Looks at numbers on its way, which the meta device does not have; the next one, too.
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    # K and V of different widths.
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
}


def saved(folder: Path, family: str, **changes: Any) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES | {"initializer_range": 0.3} | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_without_weights_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    """Breaks with: layers that share KV told apart by addresses, which the meta device does not have."""
    checkpoint = read_checkpoint(str(saved(tmp_path, family, **FAMILIES[family])))
    model = load_model(tmp_path, checkpoint, dtype=torch.float32, device=CPU)
    assert model_shape(checkpoint) == ModelShape(
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_position=model.max_position,
        kv=grouped(dataclasses.replace(layer, window=None) for layer in model.kv_layers),
    )


def test_shape_of_the_built_in_decoder(tmp_path: Path) -> None:
    target = decoder_target(1, folder=tmp_path)
    shape = model_shape(target.checkpoint)
    assert isinstance(shape, ModelShape)
    assert shape.kv == grouped(target.model.kv_layers)
    assert (shape.hidden_size, shape.vocab_size, shape.max_position) == (32, 64, 512)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Mamba", {"num_hidden_layers": 2, "state_size": 4}, "its recurrent state cannot be taken back"),
        ("Bloom", {}, "the draft model has architecture"),
    ],
)
def test_models_that_cannot_draft_are_refused_in_one_line(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found = model_shape(read_checkpoint(str(saved(tmp_path, family, **changes))))
    assert isinstance(found, Refusal)
    assert said in found.reason
    assert "MODEL" not in found.reason
    assert "\n" not in found.reason


def test_a_head_is_no_language_model(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("float32", (4, 4)), "fc.weight": ("float32", (4, 8))}
    found = model_shape(Checkpoint(path="head", config=decoder_config(), tensors=tensors), "the assistant")
    assert isinstance(found, Refusal)
    assert found.reason == (
        "the assistant in head is no whole language model: it holds no layers.0.input_layernorm.weight, norm.weight"
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("family", ["Gemma3Text", "Llama", "Mistral"])
def test_forward_over_draft_kv_is_a_dense_forward(family: str, own: bool, tmp_path: Path) -> None:
    """Chunks, then single tokens, two rows at once: the states of one causal pass, windows included."""
    changes = {"Gemma3Text": FAMILIES["Gemma3Text"], "Mistral": {"sliding_window": 5}}.get(family, {})
    checkpoint = read_checkpoint(str(saved(tmp_path, family, **changes)))
    context = EngineContext(Facts(target=Checkpoint(), draft=checkpoint), 2, CPU, torch.float32, 60)
    model = context.model("draft")
    loaded = load_model(tmp_path, checkpoint, dtype=torch.float32, device=CPU)
    pages = PagePool(2, 16, 4, 32)
    view = PagedView(KVPool(loaded.kv_layers, pages.rows_with_trash, torch.float32, CPU), pages, writable=True)
    rows, root, after = (model.reading(view, name, q, at) for name, q, at in (("a", None, 0), ("b", 1, 0), ("c", 1, 1)))
    texts = [[5, 9, 2, 7, 7, 3, 1, 8, 4, 6, 11], [1, 2, 3, 4, 5, 6, 7, 9, 8, 12]]
    with torch.inference_mode():
        wanted = [dense_forward(loaded, text)[0] for text in texts]
        lengths = [len(text) - 2 for text in texts]
        assert pages.reserve(0, 32)
        assert pages.reserve(1, 32)
        view.begin(StepRows([0, 1], [0, 0], lengths, lengths))
        tokens = torch.tensor([*texts[0][:-2], *texts[1][:-2], texts[0][-2], texts[1][-2]])
        index = torch.cat([torch.arange(length) for length in lengths])
        given = None if own else index
        kv_len = torch.tensor(lengths)
        found = model.forward(tokens, torch.cat((index, kv_len)), (rows, given), (root, kv_len[:, None]))
        last = model.forward(torch.tensor([text[-1] for text in texts]), kv_len + 1, (after, (kv_len + 1)[:, None]))
        whole = [
            torch.cat((part, found[sum(lengths) + row, None], last[row, None]))
            for row, part in enumerate(found[: sum(lengths)].split(lengths))
        ]
        for mine, theirs in zip(whole, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(model.logits(mine), loaded.logits(theirs), atol=1e-4, rtol=1e-4)


def test_dummy_weights_are_others_than_the_targets(tmp_path: Path) -> None:
    """Or a draft of the target's shape would be right every time."""
    target = decoder_target(1, folder=tmp_path)
    nothing_stored = target.checkpoint.model_copy(update={"tensors": None})

    def head(draft: Checkpoint) -> torch.Tensor:
        facts = Facts(target=target.checkpoint, draft=draft)
        made: DraftModel = EngineContext(facts, 1, CPU, torch.float32, 64).model("draft")
        return made.logits(torch.eye(32))

    assert head(nothing_stored).equal(head(nothing_stored))
    assert not head(nothing_stored).equal(head(target.checkpoint))
    made_up = load_model(tmp_path, target.checkpoint, dtype=torch.float32, device=CPU, dummy_seed=0)
    assert not head(nothing_stored).equal(made_up.logits(torch.eye(32)))
    assert head(target.checkpoint).equal(target.model.logits(torch.eye(32)))


def test_a_draft_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint(path=str(tmp_path), config=decoder_config(), tensors={})
    context = EngineContext(Facts(target=checkpoint, draft=checkpoint), 1, CPU, torch.float32, 64)
    with pytest.raises(UserError, match=f"--speculative-draft-model-path {tmp_path}: ") as told:
        context.model("draft")
    assert "\n" not in str(told.value)
    with pytest.raises(RuntimeError, match="no draft checkpoint"):
        EngineContext(Facts(target=checkpoint), 1, CPU, torch.float32, 64).model("draft")


def test_a_plan_takes_the_shape_as_it_is() -> None:
    shape = model_shape(Checkpoint(config=decoder_config()))
    assert isinstance(shape, ModelShape)
    plan = DraftPlan(needs=Capabilities(draft_kv=frozenset({"own_layers"})), nodes=1, depth=1, kv=shape.kv)
    assert [group.layers for group in plan.kv] == [2]
