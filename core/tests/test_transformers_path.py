"""Models through transformers: what our engine says over paged KV is what `generate` says, or the model is refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specplug import Engine
from specplug.errors import RefusedError, UserError
from specplug.facts import read_checkpoint, target_features
from specplug.models.anatomy import most_positions
from specplug.models.base import ForwardBatch
from specplug.models.decoder import Decoder
from specplug.models.family import is_covered
from specplug.models.target import Target, load_target
from specplug.models.transformers import TransformersTarget, check_config
from specplug.registry import Registry
from specplug.spec import Checkpoint, TapRequest
from specplug.testing.registry import bench_registry
from specplug.testing.targets import DenseAttention, dense_forward
from specplug.testing.tokenizer import SIZE, byte_tokenizer

VOCAB = 97
TOKENS = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = ["sliding_attention", "full_attention"] * 2
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Two rotary bases, scaled embedding, two windows, capped logits.
    "gemma3": ("Gemma3Text", {"sliding_window": 6, "layer_types": MIXED, "final_logit_softcapping": 5.0}),
    # The last two layers read the KV of the first two; heads differ between kinds of layers.
    "gemma4": (
        "Gemma4Text",
        {
            "sliding_window": 6,
            "layer_types": MIXED,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            **PER_LAYER,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 5}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "granite": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.4}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, **EXPERTS}),
    # K and V of different widths.
    "deepseek": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **EXPERTS,
            **LATENT,
        },
    ),
    # An architecture of the decoder with rotary scaling that it does not compute.
    "qwen2-yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}


# Where their names differ from `layers` and `norm`.
LAYERS = {"gpt2": "h"}
NORMS = {"gpt2": "ln_f", "gpt-neox": "final_layer_norm"}


@dataclass
class Case:
    """A tiny checkpoint, loaded by us and by transformers, with what `generate` answers to the prompts."""

    target: Target
    reference: PreTrainedModel
    prompts: list[list[int]]
    answers: list[list[int]]


def tiny(family: str, **extra: Any) -> PreTrainedModel:
    """A random float32 model whose norms and biases are not what a fresh model has, and could be left out."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES | extra)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    return load_target(folder, read_checkpoint(str(folder)), dtype=dtype, device="cpu", needs_tokenizer=False)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            family, extra = CASES[name]
            folder = tmp_path_factory.mktemp(name)
            tiny(family, **extra).save_pretrained(folder)
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            generator = torch.Generator().manual_seed(1)
            prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (19, 3, 11)]
            answers = [
                reference.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :]
                for prompt in prompts
            ]
            made[name] = Case(load(folder), reference, prompts, [answer.tolist() for answer in answers])
        return made[name]

    return case


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("path"), installed=True)


def answers(case: Case, **options: Any) -> tuple[list[list[int]], Engine]:
    with Engine(case.target, page_size=4, **options) as engine:
        results = engine.generate(case.prompts, {"temperature": 0, "max_tokens": TOKENS})
        assert engine.free_pages == engine.pages
    return [result.ids for result in results], engine


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_generate(name: str, case_of: Callable[[str], Case], registry: Registry) -> None:
    # Breaks with: KV written to or read from the wrong layer, a scale or mask lost, positions by row.
    case = case_of(name)
    assert isinstance(case.target.model, TransformersTarget)
    assert sum(len(set(answer)) for answer in case.answers) >= 10, "answers too dull to tell anything"
    assert answers(case)[0] == case.answers
    assert answers(case, chunked_prefill_size=7)[0] == case.answers
    texts = [[*prompt, *answer] for prompt, answer in zip(case.prompts, case.answers, strict=True)]
    for config in ({"scripted_behaviour": "right"}, {"scripted_behaviour": "random_tree", "num_draft_tokens": 9}):
        drafted, engine = answers(
            case, algorithm="scripted", registry=registry, config={"scripted_texts": texts, **config}
        )
        assert drafted == case.answers
        assert engine.ledger.accepted > 20
    if "ngram" in registry.algorithms:  # a package of its own, which the core is tested without, too
        assert answers(case, algorithm="ngram", registry=registry)[0] == case.answers


@pytest.mark.parametrize("name", CASES)
def test_logits_and_taps_are_those_of_transformers(name: str, case_of: Callable[[str], Case]) -> None:
    # 40 tokens: far beyond every window, so that one token more or less in it shows.
    case = case_of(name)
    model = case.target.model
    last = len(case.reference.base_model.get_submodule(LAYERS.get(name, "layers")))
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    before_norm: list[Tensor] = []
    norm = case.reference.base_model.get_submodule(NORMS.get(name, "norm"))
    hook = norm.register_forward_pre_hook(lambda module, given: before_norm.append(given[0]))
    with torch.inference_mode():
        theirs = case.reference(tokens[None], output_hidden_states=True)
        taps = tuple(TapRequest(at=at) for at in (2, "final_norm", 0, last, 1))
        hidden, states = dense_forward(model, tokens.tolist(), taps)
        ours = model.logits(hidden)
    hook.remove()
    assert ours.dtype == torch.float32
    assert (model.vocab_size, model.hidden_size) == (VOCAB, 32)
    torch.testing.assert_close(ours, theirs.logits[0], atol=2e-4, rtol=1e-4)
    named = theirs.hidden_states
    for tap, expected in zip(states, (named[2], named[last], named[0], before_norm[0], named[1]), strict=True):
        torch.testing.assert_close(tap, expected[0], atol=2e-4, rtol=1e-4)


def test_geometry_is_per_layer(case_of: Callable[[str], Case]) -> None:
    def layers(name: str) -> list[tuple[int, int, int, int | None]]:
        found = case_of(name).target.model.kv_layers
        return [(layer.kv_heads, layer.k_dim, layer.v_dim, layer.window) for layer in found]

    assert layers("gemma3") == [(2, 8, 8, 6), (2, 8, 8, None)] * 2
    assert layers("gemma4") == [(2, 8, 8, 6), (2, 16, 16, None)], "two layers of four have KV of their own"
    assert layers("phi3") == [(2, 8, 8, 5)] * 4
    assert layers("deepseek") == [(4, 16, 12, None)] * 4


def test_shared_kv_is_written_once(case_of: Callable[[str], Case]) -> None:
    class Recorder(DenseAttention):
        def attend(
            self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None
        ) -> Tensor:
            seen.append((layer, k is not None))
            return super().attend(layer, q, k, v, scale)

    seen: list[tuple[int, bool]] = []
    model = case_of("gemma4").target.model
    model(ForwardBatch(torch.tensor([1]), torch.tensor([0]), Recorder(model.kv_layers)))
    assert seen == [(0, True), (1, True), (0, False), (1, False)]


def test_hooks_live_as_long_as_a_tapped_forward(case_of: Callable[[str], Case]) -> None:
    model = case_of("gemma3").target.model

    def hooks() -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())

    before = hooks()
    dense_forward(model, [1, 2], (TapRequest(at=0), TapRequest(at=4)))
    assert hooks() == before
    batch = ForwardBatch(torch.tensor([1]), torch.tensor([0]), DenseAttention(model.kv_layers), (TapRequest(at=5),))
    with pytest.raises(ValueError, match="boundaries 0 to 4"):
        model(batch)
    assert hooks() == before


def test_two_targets_take_turns(case_of: Callable[[str], Case]) -> None:
    # Breaks with: a step kept where both models find it.
    cases = [case_of("gemma3"), case_of("gpt-neox")]
    engines = [Engine(case.target, page_size=4) for case in cases]
    streams = [
        engine.stream(case.prompts, {"temperature": 0, "max_tokens": TOKENS})
        for engine, case in zip(engines, cases, strict=True)
    ]
    said: list[dict[str, list[int]]] = [{}, {}]
    while streams:
        for number, stream in reversed(list(enumerate(streams))):
            delta = next(stream, None)
            if delta is None:
                streams.pop(number)
            else:
                said[cases.index(cases[number])].setdefault(delta.request, []).extend(delta.ids)
    for engine in engines:
        engine.close()
    assert [list(each.values()) for each in said] == [case.answers for case in cases]


def test_parts_are_shared_and_rope_is_not_lent(case_of: Callable[[str], Case]) -> None:
    model = case_of("gemma3").target.model
    assert isinstance(model, TransformersTarget)
    assert model.part("lm_head").weight is model.model.lm_head.weight
    embedded = model.part("embed_tokens")(torch.tensor([5]))
    torch.testing.assert_close(embedded, model.part("embed_tokens").weight[[5]] * 32**0.5)
    with pytest.raises(KeyError, match="embed_tokens, lm_head"):
        model.part("rope")
    features = target_features({"architectures": ["Gemma3ForCausalLM"], "layer_types": MIXED})
    assert {"borrow:embed_tokens", "borrow:lm_head", "rollback", "taps"} <= features
    assert "borrow:rope" not in features


def test_no_tap_is_offered_where_several_states_travel_side_by_side() -> None:
    stacked = {"architectures": ["Gemma3nForCausalLM"], "altup_num_inputs": 4}
    assert "taps" not in target_features(stacked)
    assert "taps" not in target_features({"architectures": ["Gemma3nForCausalLM"], "text_config": stacked})
    assert {"taps", "rollback", "tree_verify"} <= target_features(stacked | {"altup_num_inputs": 1})


@pytest.mark.parametrize("name", ["gemma4", "qwen3-moe", "deepseek", "gpt2"])
def test_half_precision_is_not_mistaken_for_a_misfit(name: str, case_of: Callable[[str], Case]) -> None:
    folder = Path(case_of(name).target.checkpoint.path)
    target = load(folder, torch.bfloat16)
    assert target.model.kv_layers == case_of(name).target.model.kv_layers
    with Engine(target, dtype="bfloat16") as engine:
        assert len(engine.generate([[5, 6, 7]], {"temperature": 0, "max_tokens": 4})[0].ids) == 4


def test_by_path_with_tokenizer(tmp_path: Path) -> None:
    tiny("GPTNeoX", vocab_size=SIZE).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--context-length 129: MODEL allows 2 to 128"):
        Engine(str(tmp_path), context_length=129)
    with Engine(str(tmp_path)) as engine:
        assert engine.max_tokens == 128
        assert engine.generate(["hello"], {"temperature": 0, "max_tokens": 5})[0].ids


def test_long_rotary_scaling_ends_the_context_where_it_would_change() -> None:
    rope = LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = transformers.Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=rope)
    assert most_positions(config) == 64
    assert most_positions(transformers.Phi3Config(**SIZES)) == 128
    assert TransformersTarget(AutoModelForCausalLM.from_config(config), {}, max_position=32).max_position == 32


@pytest.mark.parametrize(
    ("family", "extra", "told"),
    [
        ("Gemma2", {}, "Gemma2ForCausalLM.*softcap"),
        ("GptOss", {"num_local_experts": 4}, "GptOssForCausalLM.*s_aux"),
        ("StableLm", {}, "StableLmForCausalLM.*another attention function"),
        ("Bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM.*another attention function"),
    ],
)
def test_what_paged_attention_does_not_compute_is_refused_before_weights(
    family: str, extra: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZES | extra)
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=told) as caught:
        check_config(tmp_path)
    assert "\n" not in str(caught.value)
    assert "choose another model" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "extra", "told"),
    [
        ("Llama4Text", {"num_local_experts": 2, "attention_chunk_size": 8}, "neither causal nor a sliding window"),
        ("Doge", {}, "makes its attention masks itself"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "neither causal nor a sliding window"),
        ("DiffLlama", {}, "attends twice in one layer"),
        (
            "FalconH1",
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8},
            "carry state from token to token beside attention",
        ),
        ("StableLm", {}, "does not hand keyword arguments down"),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "output head cannot be run on hidden states"),
    ],
)
def test_what_only_shows_in_numbers_is_refused_at_load(family: str, extra: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        TransformersTarget(tiny(family, **extra), {})
    assert "\n" not in str(caught.value)


def test_positions_by_row_are_refused() -> None:
    model = tiny("GPTNeoX")
    inner = model.gpt_neox.forward
    model.gpt_neox.forward = lambda **given: inner(**given | {"position_ids": None})
    with pytest.raises(UserError, match="positions from position_ids"):
        TransformersTarget(model, {})


def test_a_draft_is_refused_where_the_target_cannot_roll_back(registry: Registry) -> None:
    features = target_features({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    assert "rollback" not in features
    facts = Checkpoint(config={"model_type": "mamba", "vocab_size": VOCAB}, tensors={})
    target = Target(TransformersTarget(tiny("GPTNeoX"), {}), None, facts, ())
    with pytest.raises(RefusedError, match="rollback"):
        Engine(target, algorithm="scripted", registry=registry)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM.*knows BertLMHeadModel"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForConditionalGeneration"),
        ({"architectures": ["NewestForCausalLM"], "model_type": "newest"}, "NewestForCausalLM.*supported: Llama"),
    ],
)
def test_what_transformers_does_not_know_is_one_line(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=told) as caught:
        check_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny("GPTNeoX").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save = partial(save_file, filename=file, metadata={"format": "pt"})
    extra = {"gpt_neox.layers.4.attention.dense.bias": torch.ones(32), "other.head.weight": torch.ones(2)}
    save(tensors | extra)
    load(tmp_path)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "1 tensors under gpt_neox.layers.4* left unread, no module of the model owns them",
        "1 tensors under other.head.weight* left unread, no module of the model owns them",
    ]
    save(tensors | {"gpt_neox.final_layer_norm.weight": torch.ones(31)})
    with pytest.raises(UserError, match=r"final_layer_norm.weight|size mismatch|mismatch"):
        load(tmp_path)
    del tensors["gpt_neox.final_layer_norm.weight"]
    save(tensors)
    with pytest.raises(UserError, match=r"1 missing: gpt_neox.final_layer_norm.weight") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_quantized_weights_are_refused_on_either_path() -> None:
    for architecture in ("LlamaForCausalLM", "GPTNeoXForCausalLM"):
        with pytest.raises(UserError, match="quantized with 'awq'"):
            is_covered({"architectures": [architecture], "quantization_config": {"quant_method": "awq"}})


def test_what_the_decoder_covers_stays_with_it(tmp_path: Path) -> None:
    tiny("Qwen3").save_pretrained(tmp_path)
    assert isinstance(load(tmp_path).model, Decoder)
