"""One draft in every published spelling: read alike, and drafting alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash_tiny as tiny
import pytest
import torch
from torch import Tensor

from specplug import Checkpoint, Facts, Refusal, SamplingParams, UserError
from specplug.testing import Move
from specplug.testing.targets import decoder_config
from specplug_dflash.formats import BlockDraft, Markov, read_draft
from specplug_dflash.names import own_names

TEXT = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(4)).tolist()
Weights = dict[str, Tensor]
TARGET = Checkpoint(path="target", config=decoder_config(64))


def renamed(weights: Weights, *pairs: tuple[str, str]) -> Weights:
    for old, new in pairs:
        weights = {new + name.removeprefix(old) if name.startswith(old) else name: weights[name] for name in weights}
    return weights


def nested(config: dict[str, Any], *keys: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys} | {
        "dflash_config": {key: config[key] for key in keys} | more
    }


PLAIN = tiny.body()
FULL = tiny.body() | tiny.ends() | tiny.markov("rnn")
ZLAB, NATIVE = tiny.zlab_config(), tiny.dspark_config("rnn")
OWN = ZLAB["dflash_config"]
KEYS = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")

DFLASH: dict[str, tuple[dict[str, Any], Weights]] = {
    "block size nested": (
        nested(ZLAB | ZLAB["dflash_config"], "block_size", "mask_token_id", "target_layer_ids"),
        PLAIN,
    ),
    "all at the top": (
        tiny.layer_config(architectures=["DFlashDraftModel"], block_size=5, **ZLAB["dflash_config"]),
        PLAIN,
    ),
    "with a prefix": (ZLAB, {f"model.{name}": tensor for name, tensor in PLAIN.items()}),
    "encoder": (ZLAB, renamed(PLAIN, ("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."))),
    "speculators": (tiny.speculators_config("dflash"), PLAIN),
    "speculators, llama": (tiny.speculators_config("dflash", layers={"model_type": "llama"}), PLAIN),
    "inverse frequencies": (ZLAB, PLAIN | {"rotary_emb.inv_freq": torch.ones(4)}),
    "fewer layers said": (ZLAB | {"num_hidden_layers": 7}, PLAIN),
    "another head size said": (ZLAB | {"head_dim": None}, PLAIN),
}
DSPARK: dict[str, tuple[dict[str, Any], Weights]] = {
    "SpecForge": (
        nested(NATIVE | {"architectures": ["DSparkDraftModel"]}, *KEYS, projector_type="dspark", attention_mode="gqa"),
        FULL,
    ),
    "ModelOpt": (
        {("use_confidence_head" if key == "enable_confidence_head" else key): value for key, value in NATIVE.items()},
        renamed(FULL, ("markov_head.", ""), ("confidence_head.proj.", "confidence_proj.")),
    ),
    "old SpecForge": (NATIVE, renamed(FULL, ("markov_head.", "logit_head.markov_head."))),
    "dspark_ keys": (
        {("dspark_block_size" if key == "block_size" else key): value for key, value in NATIVE.items()},
        FULL,
    ),
    "speculators": (tiny.speculators_config("dspark", markov_rank=6, markov_head_type="rnn"), FULL),
    "with a prefix": (
        NATIVE,
        {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in FULL.items()},
    ),
}


@pytest.mark.parametrize(
    ("algorithm", "name"), [*(("dflash", name) for name in DFLASH), *(("dspark", name) for name in DSPARK)]
)
def test_every_spelling_is_one_draft(lab: Any, algorithm: str, name: str, tmp_path: Path) -> None:
    config, weights = (DFLASH if algorithm == "dflash" else DSPARK)[name]
    spelt = tiny.write(tmp_path / "spelt", config, weights)
    plain = tiny.write(tmp_path / "plain", *((ZLAB, PLAIN) if algorithm == "dflash" else (NATIVE, FULL)))
    read, proposed = [], []
    for folder in (spelt, plain):
        with lab.engine(algorithm, folder) as engine:
            read.append(read_draft(engine.run.facts))
        harness = lab.harness(algorithm, folder)
        step = harness.play(0, TEXT, 8, [8, 3])
        proposed.append([harness.propose(step)[0], harness.propose(harness.ingest([Move(0, 2)]))[0]])
    assert read[0] == read[1]
    assert proposed[0] == proposed[1]


def facts(config: dict[str, Any], weights: Weights | None = None, target: dict[str, Any] | None = None) -> Facts:
    tensors = None if weights is None else {name: ("float32", tuple(weights[name].shape)) for name in weights}
    return Facts(
        target=TARGET.model_copy(update={"config": {**TARGET.config, **(target or {})}}),
        draft=Checkpoint(path="draft", config=config, tensors=tensors),
    )


def read(config: dict[str, Any], weights: Weights | None = None, target: dict[str, Any] | None = None) -> BlockDraft:
    found = read_draft(facts(config, weights, target))
    assert isinstance(found, BlockDraft), found
    return found


def test_a_published_dflash_config() -> None:
    """z-lab/Qwen3-8B-DFlash-b16, as its page shows it, in load format dummy."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "num_target_layers": 36,
        "num_hidden_layers": 5,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "max_window_layers": 5,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    found = read(config, None, {"num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 151936})
    assert found.taps == (2, 10, 18, 26, 34)
    assert (found.block, found.drafts, found.next_slot, found.mask_token) == (16, 15, False, 151669)
    assert found.sizes.windows == (None,) * 5
    assert found.sizes.rope.theta == 1e6
    assert found.markov is None
    assert found.stored == frozenset()


def test_default_layers_are_spread_between_the_second_and_the_third_last() -> None:
    config = tiny.zlab_config(num_target_layers=36, num_hidden_layers=5)
    del config["dflash_config"]["target_layer_ids"]
    assert read(config, None, {"num_hidden_layers": 36}).taps == (2, 10, 18, 26, 34)
    one = config | {"num_hidden_layers": 1}
    assert read(one, None, {"num_hidden_layers": 36}).taps == (19,)


def test_windows_and_causality() -> None:
    kinds = ["sliding_attention", "full_attention"]

    def of(config: dict[str, Any]) -> tuple[Any, Any]:
        found = read(config)
        return found.sizes.windows, found.causal

    sliding = tiny.zlab_config(layer_types=kinds, sliding_window=9)
    assert of(sliding) == ((9, None), (True, False))
    assert of(sliding | {"use_sliding_window": False}) == ((None, None), (True, False))
    assert of(sliding | {"is_causal": True}) == ((9, None), (True, True))
    assert of(sliding | {"is_causal": False}) == ((9, None), (False, False))
    envelope = {"layer_types": kinds, "sliding_window": 9}
    assert of(tiny.speculators_config("dflash", layers=envelope)) == ((10, None), (True, False))
    both = tiny.speculators_config("dflash", layers=envelope, sliding_window_non_causal=True)
    assert of(both) == ((10, None), (False, False))
    muse = tiny.zlab_config(model_type="muse_glimmer_assistant", sliding_window=9, rope_theta=5e5)
    assert of(muse) == ((10, 10), (False, False))


@pytest.mark.parametrize(
    ("config", "slot"),
    [
        (tiny.zlab_config(), False),
        (tiny.dspark_config(), True),
        (tiny.dspark_config(rank=0), True),  # deepseek-ai/dflash_*_block7
        (tiny.speculators_config("dflash"), False),
        (tiny.speculators_config("dspark"), True),
        (tiny.speculators_config("dspark", sample_from_anchor=False), False),
        (tiny.speculators_config("dflash", sample_from_anchor=True), True),
        (tiny.zlab_config(dflash_config={"projector_type": "dspark"}), True),
    ],
)
def test_which_token_a_row_predicts_follows_from_the_format(config: dict[str, Any], slot: bool) -> None:
    found = read(config)
    assert found.next_slot is slot
    assert found.drafts == 5 if slot else 4


def test_heads_are_read_from_shapes_where_there_are_any() -> None:
    config = tiny.dspark_config("gated", confidence_head_with_markov=True)
    weights = tiny.body() | tiny.ends() | tiny.markov("gated")
    assert read(config, weights).markov == Markov("gated", 6)
    assert read(config, weights).confidence == "hidden and markov"
    weights["confidence_head.proj.weight"] = torch.zeros(1, tiny.HIDDEN)
    assert read(config, weights).confidence == "hidden"
    del weights["confidence_head.proj.weight"]
    assert read(config, weights).confidence == "none"
    assert read(config).confidence == "hidden and markov"
    assert replace(read(config), confidence="none") == read(tiny.dspark_config("gated", enable_confidence_head=False))


WRONG: dict[str, tuple[dict[str, Any], Weights | None, str]] = {
    "DFlash 2": (ZLAB | {"architectures": ["DFlash2DraftModel"]}, None, "DFlash 2"),
    "DFlash 2 by its keys": (tiny.zlab_config(dflash_config={"selector_rank": 256}), None, "DFlash 2"),
    "DFlash 2 by its tensors": (
        ZLAB,
        PLAIN | {"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 32)},
        "DFlash 2",
    ),
    "DFlash 2, speculators": (tiny.speculators_config("dflash2"), None, "DFlash 2"),
    "Domino": (tiny.zlab_config(dflash_config={"projector_type": "domino"}), None, "Domino"),
    "JetSpec": (tiny.zlab_config(dflash_config={"causal_head": True}), None, "JetSpec"),
    "DeepSeek-V4": (tiny.dspark_config(dspark_noise_token_id=7), None, "DeepSeek-V4"),
    "Gemma": (tiny.dspark_config() | {"architectures": ["Gemma4DSparkModel"]}, None, "Gemma"),
    "Laguna": (ZLAB, PLAIN | {"layers.0.self_attn.g_proj.weight": torch.zeros(32, 32)}, "Laguna"),
    "sinks": (tiny.zlab_config(dflash_config={"attention_sink_bias": True}), None, "attention sinks"),
    "value scale": (tiny.zlab_config(dflash_config={"attention_value_scale": 0.5}), None, "attention_value_scale 0.5"),
    "interleaved": (tiny.zlab_config(rope_is_neox_style=False), None, "is_neox_style"),
    "eagle3": (tiny.speculators_config("eagle3"), None, "one for EAGLE3"),
    "unheard of": (tiny.speculators_config("medusa"), None, "speculators_model_type 'medusa'"),
    "no draft at all": (tiny.layer_config(), {"model.embed_tokens.weight": torch.zeros(64, 32)}, "holds no fc.weight"),
    "two block sizes": (tiny.zlab_config(dflash_config={"block_size": 8}), None, "dflash_config.block_size = 8"),
    "block size": (tiny.zlab_config(block_size="16"), None, "block_size = '16'"),
    "no mask": (tiny.zlab_config(dflash_config={"mask_token_id": None}), None, "no mask_token_id"),
    "mask outside": (tiny.zlab_config(dflash_config={"mask_token_id": 64}), None, "mask_token_id = 64"),
    "layers outside": (tiny.zlab_config(dflash_config={"target_layer_ids": [0, 2]}), None, "after layer 3"),
    "layers that are none": (tiny.zlab_config(dflash_config={"target_layer_ids": "1"}), None, "target_layer_ids = '1'"),
    "another target": (tiny.zlab_config(num_target_layers=36), None, "36 layers, this one has 2"),
    "another target's width": (ZLAB, PLAIN | {"fc.weight": torch.zeros(32, 96)}, "fc.weight reads 96"),
    "no head": (tiny.zlab_config(draft_vocab_size=40), PLAIN, "40 of the target's 64 tokens and no lm_head"),
    "no map": (ZLAB, PLAIN | tiny.ends(rows=40), "neither d2t nor t2d"),
    "larger vocabulary": (ZLAB, PLAIN | tiny.ends(rows=70), "70 tokens"),
    "layer types": (tiny.zlab_config(layer_types=["full_attention"]), None, "1 layer_types"),
    "layer kinds": (tiny.zlab_config(layer_types=["linear", "linear"]), None, "layer_types ['linear']"),
    "window": (tiny.zlab_config(layer_types=["sliding_attention"] * 2, sliding_window=-1), None, "sliding_window = -1"),
    "head type": (tiny.dspark_config("lstm"), None, "markov_head_type = 'lstm'"),
    "Markov head missing": (NATIVE, tiny.body() | tiny.ends(), "markov_rank = 6, and it holds no"),
    "activation": (tiny.zlab_config(hidden_act="gelu"), None, "hidden_act 'gelu'"),
    "rope": (tiny.zlab_config(rope_scaling={"type": "yarn", "factor": 16}), None, "rotary scaling"),
    "quantized": (tiny.zlab_config(quantization_config={"quant_method": "fp8"}), None, "'fp8'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_run_is_refused_by_its_name(name: str) -> None:
    config, weights, said = WRONG[name]
    answer = read_draft(facts(config, weights))
    assert isinstance(answer, Refusal)
    assert said in answer.reason
    assert answer.try_instead
    assert "\n" not in answer.reason + answer.try_instead


def test_another_tokenizer_is_refused() -> None:
    other = facts(ZLAB).model_copy(update={"first_vocab_difference": (7, "seven", "sept")})
    answer = read_draft(other)
    assert isinstance(answer, Refusal)
    assert "id 7 is 'seven'" in answer.reason


def test_a_draft_inside_the_target_is_recognised() -> None:
    config = TARGET.config | {"dspark_noise_token_id": 128799}
    answer = read_draft(Facts(target=TARGET.model_copy(update={"config": config})))
    assert isinstance(answer, Refusal)
    assert "DeepSeek-V4" in answer.reason


def test_a_map_of_plain_ids_is_refused(lab: Any, tmp_path: Path) -> None:
    """`d2t` stores offsets; ids in their place lead outside, or twice to one token."""
    weights = PLAIN | tiny.ends(rows=40) | {"d2t": torch.arange(24, 64)}
    draft = tiny.write(tmp_path, tiny.zlab_config(draft_vocab_size=40), weights)
    with pytest.raises(UserError, match="stores offsets"):
        lab.engine("dflash", draft)


def test_a_map_of_flags_suffices(lab: Any, tmp_path: Path) -> None:
    flags = torch.arange(64) % 3 != 0
    rows = int(flags.sum())
    ids = flags.nonzero()[:, 0]
    ends = tiny.ends(rows=rows)
    config = tiny.zlab_config(draft_vocab_size=rows)
    found = []
    for name, maps in {"flags": {"t2d": flags}, "offsets": {"d2t": ids - torch.arange(rows)}}.items():
        harness = lab.harness("dflash", tiny.write(tmp_path / name, config, PLAIN | ends | maps))
        found.append(harness.propose(harness.play(0, TEXT, 12, [12]))[0][0])
    assert found[0] == found[1]
    assert all(flags[token] for token in found[0])


def test_a_mask_of_its_own(lab: Any, tmp_path: Path) -> None:
    """`mask_embedding.pt` takes the place of the mask token's row, whatever id it has."""
    row = lab.ends["embed_tokens.weight"][63].clone()
    plain = tiny.write(tmp_path / "plain", ZLAB, PLAIN)
    own = tiny.write(tmp_path / "own", tiny.zlab_config(dflash_config={"mask_token_id": 99999}), PLAIN)
    torch.save({"mask_token_id": 99999, "embedding": row}, own / "mask_embedding.pt")
    found = []
    for folder in (plain, own):
        harness = lab.harness("dflash", folder)
        found.append(harness.propose(harness.play(0, TEXT, 12, [12]))[0])
    assert found[0] == found[1]
    for stored in ({"embedding": row[:5]}, {"row": row}):
        torch.save(stored, own / "mask_embedding.pt")
        with pytest.raises(UserError, match=r"mask_embedding\.pt holds no 'embedding' of 32 numbers: remove the file"):
            lab.engine("dflash", own)


def test_a_tensor_that_nobody_asked_for_is_refused(lab: Any, tmp_path: Path) -> None:
    draft = tiny.write(tmp_path, ZLAB, PLAIN | {"layers.0.self_attn.extra": torch.zeros(3)})
    with pytest.raises(UserError, match=r"unexpected: layers\.0\.self_attn\.extra"):
        lab.engine("dflash", draft)


def test_names() -> None:
    assert own_names(["model.fc.weight", "model.norm.weight", "lm_head.weight"]) == {
        "model.fc.weight": "fc.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert own_names(["model.fc.weight", "norm.weight"])["model.fc.weight"] == "model.fc.weight"
    assert own_names(["layers.0.mlp.gate_proj.weight", "gate_proj.weight"]) == {
        "layers.0.mlp.gate_proj.weight": "layers.0.mlp.gate_proj.weight",
        "gate_proj.weight": "markov_head.gate_proj.weight",
    }


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_random_weights_need_no_file(lab: Any, algorithm: str, tmp_path: Path) -> None:
    """Load format dummy goes by config.json: what costs are measured with."""
    config = tiny.zlab_config() if algorithm == "dflash" else tiny.dspark_config("gated", draft_vocab_size=40)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with lab.engine(algorithm, tmp_path, speculative_draft_load_format="dummy") as engine:
        (result,) = engine.generate([TEXT[:5]], SamplingParams(temperature=0.0, max_tokens=12))
        assert len(result.ids) == 12
        assert engine.ledger.report()["drafted"] > 12
