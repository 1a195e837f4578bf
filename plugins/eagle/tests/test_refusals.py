"""What is refused, before any weight is read: one line, what is wrong with what, and the way out."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head, eagle1, eagle3, modelopt, official, speculators

from specplug import Checkpoint, Facts, Refusal, RefusedError
from specplug.testing.targets import decoder_config
from specplug_eagle.config import Eagle3Config, EagleConfig
from specplug_eagle.plugin import plan

CONFIG: dict[str, Any] = {**decoder_config(64), "num_hidden_layers": 8}
TARGET = Checkpoint(path="target", config=CONFIG)
FEATURES = frozenset({"own_kv", "rollback", "tree_verify", "taps", "borrow:embed_tokens", "borrow:lm_head"})


def facts_of(head: Head, *, stored: bool = True, target: Checkpoint = TARGET, **rest: Any) -> Facts:
    tensors = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in head.tensors.items()}
    given = {"path": "draft", "config": head.config, "tensors": tensors if stored else None}
    return Facts(target=target, draft=Checkpoint.model_validate(given), features=FEATURES, **rest)


def refused(facts: Facts, word: str = "eagle3", **config: Any) -> Refusal:
    answer = plan((Eagle3Config if word == "eagle3" else EagleConfig)(**config), facts, None)
    assert isinstance(answer, Refusal), answer
    assert "\n" not in answer.reason + answer.try_instead
    return answer


def head3(**options: Any) -> Head:
    return eagle3(CONFIG, **{"boundaries": (2, 4, 5), **options})


def head1(**options: Any) -> Head:
    return eagle1(CONFIG, **options)


# --- the wrong word --------------------------------------------------------------------------------------------------


def test_no_head_at_all() -> None:
    answer = refused(Facts(target=TARGET))
    assert "eagle3 drafts with a head" in answer.reason
    assert answer.try_instead == "--speculative-draft-model-path HEAD"


@pytest.mark.parametrize("spelling", [official, modelopt, lambda head: head])
def test_an_eagle3_head_under_eagle(spelling: Any) -> None:
    answer = refused(facts_of(spelling(head3())), "eagle")
    assert "an EAGLE-3 head by its tensors" in answer.reason
    assert answer.try_instead == "--speculative-algorithm eagle3"


def test_an_eagle1_head_under_eagle3() -> None:
    answer = refused(facts_of(head1()))
    assert "an EAGLE-1/2 head by its tensors, and eagle3 runs an EAGLE-3 head" in answer.reason
    assert answer.try_instead == "--speculative-algorithm eagle"


@pytest.mark.parametrize(
    "head", [official(head3()), modelopt(head3().but({"draft_vocab_size": None})), speculators(head3(ships_embed=True))]
)
def test_under_dummy_the_config_tells(head: Head) -> None:
    answer = refused(facts_of(head, stored=False), "eagle")
    assert "an EAGLE-3 head by its config.json" in answer.reason
    assert answer.try_instead == "--speculative-algorithm eagle3"


# --- other formats ---------------------------------------------------------------------------------------------------


def plain(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None = None) -> Head:
    return Head({**CONFIG, **(config or {})}, {name: torch.empty(shape) for name, shape in shapes.items()})


WHOLE = plain(
    {
        "model.embed_tokens.weight": (64, 32),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (64, 32),
    }
)
DFLASH = plain(
    {
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "norm.weight": (32,),
    }
)
OTHERS: dict[str, tuple[Head, str, str]] = {
    "whole model": (WHOLE, "a whole language model", "--speculative-algorithm standalone"),
    "assistant": (
        plain({"pre_projection.weight": (32, 64)}, {"architectures": ["Gemma4AssistantForCausalLM"]}),
        "a Gemma 4 assistant (architecture Gemma4AssistantForCausalLM)",
        "--speculative-algorithm frozen-kv-mtp",
    ),
    "unified assistant": (
        plain({}, {"architectures": ["Gemma4UnifiedAssistantForCausalLM"]}),
        "a Gemma 4 assistant",
        "--speculative-algorithm frozen-kv-mtp",
    ),
    "assistant by tensors": (
        plain({"pre_projection.weight": (32, 64)}),
        "a Gemma 4 assistant (tensor pre_projection.weight)",
        "--speculative-algorithm frozen-kv-mtp",
    ),
    "nextn": (
        plain({"model.layers.8.eh_proj.weight": (32, 64), "model.layers.8.enorm.weight": (32,)}),
        "an MTP head",
        "--speculative-algorithm builtin-mtp",
    ),
    "mtp": (plain({"mtp.fc.weight": (32, 64)}), "an MTP head", "--speculative-algorithm builtin-mtp"),
    "mtp of speculators": (
        plain({}, {"speculators_model_type": "mtp"}),
        "an MTP head (speculators_model_type 'mtp')",
        "--speculative-algorithm builtin-mtp",
    ),
    "dflash by tensors": (DFLASH, "a DFlash drafter (tensor hidden_norm.weight", "--speculative-algorithm dflash"),
    "dflash": (
        plain({}, {"architectures": ["DFlashDraftModel"]}),
        "a DFlash drafter",
        "--speculative-algorithm dflash",
    ),
    "dflash by key": (plain({}, {"dflash_config": {}}), "a DFlash drafter", "--speculative-algorithm dflash"),
    "dspark": (
        plain({}, {"architectures": ["Qwen3DSparkModel"]}),
        "a DSpark drafter",
        "--speculative-algorithm dspark",
    ),
    "dspark by key": (plain({}, {"markov_rank": 256}), "a DSpark drafter", "--speculative-algorithm dspark"),
    "dspark by tensors": (
        plain({"markov_head.markov_w1.weight": (64, 8)}),
        "a DSpark drafter",
        "--speculative-algorithm dspark",
    ),
    "p-eagle": (head3().but(mask_hidden=torch.zeros(1, 1, 96)), "a P-EAGLE head", "an EAGLE-3 head"),
    "p-eagle of speculators": (plain({}, {"speculators_model_type": "peagle"}), "a P-EAGLE head", "an EAGLE-3 head"),
    "parallel heads": (
        head3().but(parallel_draft_heads__0__medusa_layers__0__linear__weight=torch.zeros(2, 2)),
        "parallel heads",
        "an EAGLE-3 head",
    ),
    "medusa": (
        plain({"0.0.linear.weight": (32, 32), "0.1.weight": (64, 32)}),
        "a Medusa checkpoint",
        "an EAGLE or EAGLE-3 head",
    ),
    "medusa by config": (plain({}, {"medusa_num_heads": 5}), "a Medusa checkpoint", "an EAGLE or EAGLE-3 head"),
    "pard": (plain({}, {"pard_token": 63}), "a PARD model", "an EAGLE-3 head"),
    "mlp speculator": (plain({}, {"model_type": "mlp_speculator"}), "an MLP speculator", "an EAGLE or EAGLE-3 head"),
    "mla": (
        head3().but(layers__0__self_attn__q_a_proj__weight=torch.zeros(2, 64)),
        "a head with MLA layers (tensor layers.0.self_attn.q_a_proj.weight)",
        "Llama or Qwen3 layers",
    ),
    "mla by config": (
        plain({}, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}),
        "an EAGLE-3 head with MLA layers",
        "Llama or Qwen3 layers",
    ),
    "experts": (
        head3().but(layers__0__mlp__experts__0__up_proj__weight=torch.zeros(2, 2)),
        "mixture-of-experts",
        "a dense head",
    ),
    "hass norms": (
        head1().but(embedding_layernorm__weight=torch.zeros(32)),
        "an EAGLE-1 head with further norms",
        "without them",
    ),
    "something": (
        plain({"a.weight": (2, 2)}),
        "is no EAGLE head: it has no layers.0.self_attn.q_proj.weight",
        "EAGLE-3",
    ),
}


@pytest.mark.parametrize("word", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_named(name: str, word: str) -> None:
    head, reason, way_out = OTHERS[name]
    answer = refused(facts_of(head), word)
    assert reason in answer.reason
    assert way_out in answer.try_instead


@pytest.mark.parametrize("name", ["assistant", "dflash", "dspark by key", "medusa by config", "mla by config"])
def test_under_dummy_the_config_names_them_too(name: str) -> None:
    head, reason, _ = OTHERS[name]
    assert reason in refused(facts_of(head, stored=False)).reason


def test_the_target_is_no_head_for_itself() -> None:
    same = Facts(target=TARGET, draft=TARGET)
    assert "the draft is the target itself" in refused(same).reason


# --- a head that does not fit ----------------------------------------------------------------------------------------


def other_target(**config: Any) -> Checkpoint:
    return Checkpoint(path="target", config={**CONFIG, **config})


@pytest.mark.parametrize(
    ("facts", "word", "reason"),
    [
        (
            facts_of(head3(), target=other_target(hidden_size=40)),
            "eagle3",
            "reads 96 columns, no multiple of the target's hidden size 40",
        ),
        (
            facts_of(head1(), target=other_target(hidden_size=64)),
            "eagle",
            "made for states of size 32, the target's have 64",
        ),
        (facts_of(head3(use_aux=False), target=other_target(hidden_size=64)), "eagle3", "made for states of size 32"),
        (
            facts_of(head3(ships_embed=True), target=other_target(vocab_size=80)),
            "eagle3",
            "embeddings of 64 tokens, the target has 80",
        ),
        (
            facts_of(head3(rows=64), target=other_target(vocab_size=80)),
            "eagle3",
            "64 rows for a target of 80, and neither d2t nor t2d",
        ),
        (
            facts_of(head3(hidden=48).but(embed_tokens__weight=None)),
            "eagle3",
            "cannot share the target's embeddings of 32, and ships none",
        ),
        (
            facts_of(head3(hidden=48, rows=64, ships_head=False)),
            "eagle3",
            "cannot share the target's output head of 32, and ships none",
        ),
        (facts_of(head3(ships_head=False)), "eagle3", "a vocabulary of its own and the file holds no lm_head.weight"),
        (facts_of(head3().but(d2t=torch.zeros(7, dtype=torch.int64))), "eagle3", "d2t has 7 entries for 48 rows"),
        (
            facts_of(head3(rows=64, ships_head=False).but({"tie_word_embeddings": True})),
            "eagle3",
            "ties lm_head to the embeddings, and the file holds neither",
        ),
        (facts_of(head3(fc_norm=True, norm_before_fc=True)), "eagle3", "only one can be"),
        (facts_of(head3().but({"fc_norm": True})), "eagle3", "fc_norm on, and the file holds no tensor of that norm"),
        (
            facts_of(head3().but({"eagle_config": {"norm_before_fc": True}})),
            "eagle3",
            "norm_before_fc on, and the file holds no tensor",
        ),
        (
            facts_of(head3(fc_bias=True).but({"bias": None})),
            "eagle3",
            "no 'bias', which means no bias of fc, and the file holds fc.bias",
        ),
        (
            facts_of(head3().but({"bias": True})),
            "eagle3",
            "bias = True, which means a bias of fc, and the file holds no fc.bias",
        ),
        (
            facts_of(head1().but({"bias": None})),
            "eagle",
            "no 'bias', which means a bias of fc, and the file holds no fc.bias",
        ),
        (facts_of(head1(fc_bias=True).but({"bias": False})), "eagle", "bias = False, which means no bias of fc"),
        (
            facts_of(head1().but(fc__weight=torch.zeros(32, 96))),
            "eagle",
            "fc.weight reads 96 columns, an EAGLE-1/2 head's reads 64",
        ),
        (
            facts_of(head3().but({"hidden_size": 16})),
            "eagle3",
            "has hidden_size 16, and its first layer reads 64 columns",
        ),
        (facts_of(head3().but({"hidden_size": None})), "eagle3", "hidden_size = None"),
        (facts_of(head3().but({"num_attention_heads": "4"})), "eagle3", "num_attention_heads = '4'"),
        (facts_of(head3().but({"rope_scaling": 3})), "eagle3", "cannot be understood by its config.json"),
        (
            facts_of(head3().but({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})),
            "eagle3",
            "rotary scaling {'rope_type': 'yarn'",
        ),
        (
            facts_of(head3().but({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}})),
            "eagle3",
            "rotary scaling",
        ),
        (facts_of(head3().but({"hidden_act": "gelu"})), "eagle3", "hidden_act 'gelu'"),
        (facts_of(head3().but({"quantization_config": {"quant_method": "fp8"}})), "eagle3", "quantized with 'fp8'"),
        (facts_of(head3().but({"layer_types": ["sliding_attention"]})), "eagle3", "layer_types ['sliding_attention']"),
        (facts_of(head3(boundaries=(2, 4, 9))), "eagle3", "boundary 9"),
        (
            facts_of(head3().but({"eagle_aux_hidden_state_layer_ids": [2, 4]})),
            "eagle3",
            "are 2 states, and the head's fc joins 3",
        ),
        (
            facts_of(head3(), target=other_target(num_hidden_layers=None)),
            "eagle3",
            "the target: config.json has num_hidden_layers = None",
        ),
        (
            facts_of(head3(), first_vocab_difference=(7, "seven", "sept")),
            "eagle3",
            "id 7 is 'seven' in the target's and 'sept'",
        ),
    ],
)
def test_heads_that_do_not_fit(facts: Facts, word: str, reason: str) -> None:
    assert reason in refused(facts, word).reason


def test_padding_is_no_other_vocabulary() -> None:
    """Rows beyond the tokenizer's ids mean nothing, on either side."""
    padded = other_target(vocab_size=70).model_copy(update={"tokenizer_size": 60})
    assert not isinstance(plan(Eagle3Config(), facts_of(head3(rows=64), target=padded), None), Refusal)
    fewer = other_target(vocab_size=62).model_copy(update={"tokenizer_size": 60})
    assert not isinstance(plan(Eagle3Config(), facts_of(head3(rows=64), target=fewer), None), Refusal)
    whole = other_target(vocab_size=70).model_copy(update={"tokenizer_size": 66})
    assert "64 rows for a target of 70" in refused(facts_of(head3(rows=64), target=whole)).reason


def test_further_ids_are_no_other_tokenizer() -> None:
    facts = facts_of(head3(), first_vocab_difference=(60, "<added>", ""))
    assert not isinstance(plan(Eagle3Config(), facts, None), Refusal)


def test_speculators_has_to_say_which_residual() -> None:
    head = speculators(head3(ships_embed=True)).but({"norm_before_residual": None})
    answer = refused(facts_of(head))
    assert "no norm_before_residual" in answer.reason
    assert "--no-speculative-eagle-norm-before-residual" in answer.try_instead
    for said in (True, False):
        assert not isinstance(plan(Eagle3Config(eagle_norm_before_residual=said), facts_of(head), None), Refusal)


def test_multimodal_rope_is_the_plain_one_for_text() -> None:
    for scaling in (
        {"type": "mrope", "mrope_section": [1, 1, 2]},
        {"rope_type": "default", "mrope_section": [1, 1, 2]},
    ):
        facts = facts_of(head3().but({"rope_scaling": scaling}))
        assert not isinstance(plan(Eagle3Config(), facts, None), Refusal)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason", "way_out"),
    [
        ({"eagle_topk": 2, "draft_sampling": True}, "eagle_topk 2 asks for a tree and draft_sampling", "topk 1"),
        (
            {"eagle_topk": 2, "num_steps": 2, "num_draft_tokens": 8},
            "num_draft_tokens 8 asks for 7 drafts, and num_steps 2 with eagle_topk 2 offer 6",
            "num-draft-tokens",
        ),
        (
            {"eagle_topk": 49, "num_steps": 2},
            "eagle_topk 49 asks for more branches than the head has tokens, 48",
            "topk 48",
        ),
        ({"eagle_token_map": "hot.pt"}, "cannot narrow a head that has a vocabulary of its own, of 48 tokens", "out"),
        ({"eagle_aux_layers": (1, 2)}, "1,2: these are 2 states, and the head's fc joins 3", ""),
        ({"eagle_aux_layers": (1, 2, 9)}, "boundary 9, and the target of 8 layers has 0 to 8", ""),
    ],
)
def test_options_that_contradict(config: dict[str, Any], reason: str, way_out: str) -> None:
    answer = refused(facts_of(head3()), **config)
    assert reason in answer.reason
    assert way_out in answer.try_instead


def test_layers_mean_nothing_to_a_head_of_the_final_state() -> None:
    facts = facts_of(head3(use_aux=False))
    assert "has no effect: the head reads the target's final state" in refused(facts, eagle_aux_layers=(1, 2, 3)).reason


@pytest.mark.parametrize(
    ("word", "option", "said"),
    [
        ("eagle", "token_map", "write --speculative-eagle-token-map"),
        ("eagle3", "token_map", "write --speculative-eagle-token-map"),
        ("eagle3", "accept_threshold_single", "leave it out"),
        ("eagle3", "accept_threshold_acc", "leave it out"),
        ("eagle", "use_rejection_sampling", "write --speculative-acceptance rejection"),
        ("eagle3", "draft_window_size", "leave it out"),
        ("eagle3", "draft_model_quantization", "leave it out"),
        ("eagle3", "eagle_aux_layer_semantics", "--speculative-eagle-aux-semantics"),
        ("eagle", "eagle_aux_layers", "eagle3 has it"),
        ("eagle3", "num_speculative_tokens", "write --speculative-num-steps"),
        ("eagle3", "eagle_tokenmap", "the nearest is --speculative-eagle-token-map"),
    ],
)
def test_options_of_others_say_what_to_write(word: str, option: str, said: str, settle: Any) -> None:
    facts = facts_of(head3() if word == "eagle3" else head1())
    with pytest.raises(RefusedError) as told:
        settle(word, {option: "1"}, facts)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("word", ["eagle2", "EAGLE-2", "eagle-1"])
def test_words_that_are_no_value(word: str, settle: Any) -> None:
    with pytest.raises(RefusedError, match=r"write eagle \(EAGLE-1 and 2 share their weights\)"):
        settle(word, {}, facts_of(head1()))


def test_the_engine_refuses_before_weights_load(models: Any) -> None:
    """From the command's words to one line: a head of the other kind, and the target given as its own head."""
    from specplug import Engine

    folder = official(eagle3(decoder_config(64), 1)).save(models.folder / "refused")
    with pytest.raises(RefusedError, match="--speculative-algorithm eagle3") as told:
        Engine(models.loaded, algorithm="EAGLE", speculative_draft_model_path=str(folder))
    assert "\n" not in str(told.value)
    with pytest.raises(RefusedError, match="the target itself"):
        Engine(models.loaded, algorithm="EAGLE3", speculative_draft_model_path=str(models.target))


def test_a_plan_never_raises() -> None:
    """Configs of every wrong type, key by key: an answer each time."""
    head = official(head3(norm_before_fc=True))
    for key in (*head.config, "rope_scaling", "eagle_config", "layer_types", "architectures", "quantization_config"):
        for value in (None, 0, -1, "x", [], [1, "a"], {}, {"a": 1}, 1.5, True):
            for stored in (True, False):
                facts = facts_of(Head({**head.config, key: value}, head.tensors), stored=stored)
                for config in (Eagle3Config(), EagleConfig()):
                    plan(config, facts, None)
    for name in head.tensors:
        for shape in ((), (3,), (0, 0), (2, 2, 2)):
            tensors = {**head.tensors, name: torch.empty(shape)}
            plan(Eagle3Config(), facts_of(Head(head.config, tensors)), None)
