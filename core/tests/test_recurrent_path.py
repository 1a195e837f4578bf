"""Targets with recurrent state: they say what `generate` says, row by row, and drafters are refused by reason."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from specplug import Engine, cli
from specplug.errors import RefusedError, UserError
from specplug.facts import read_checkpoint, target_features
from specplug.models import recurrent
from specplug.models.base import BatchRow, ForwardBatch
from specplug.models.recurrent import NO_LIMIT, RecurrentTarget
from specplug.models.target import Target, load_target
from specplug.models.transformers import check_config
from specplug.registry import Registry
from specplug.spec import TapRequest
from specplug.testing.registry import bench_registry
from specplug.testing.stubs import on_path
from specplug.testing.targets import DenseAttention
from specplug.testing.tokenizer import SIZE, byte_tokenizer

VOCAB = 97
TOKENS = 20
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONTEXT = {"max_position_embeddings": 128}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # No attention at all; several tokens cannot follow its cache.
    "mamba": ("Mamba", {"state_size": 4, "time_step_rank": 4}),
    # No attention; several tokens can, also across its own chunks of 8.
    "mamba2": ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    # Attention beside recurrence in different layers.
    "qwen3-next": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            **CONTEXT,
        },
    ),
    # Both in one layer; scaled logits.
    "falcon-h1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8, "lm_head_multiplier": 2.0}
        | CONTEXT,
    ),
    # A hybrid with experts; several tokens cannot follow its cache.
    "jamba": (
        "Jamba",
        {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, **PERIODS, **EXPERTS, **CONTEXT},
    ),
    # Its first layer has no attention, which is where it would count its positions.
    "bamba": (
        "Bamba",
        {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]}
        | CONTEXT,
    ),
    # Short convolutions are state too.
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], **CONTEXT}),
    # Its state is a list of tensors, no cache object.
    "rwkv": ("Rwkv", {"attention_hidden_size": 32, "context_length": 128}),
}
SINGLE = {"mamba", "jamba"}
"""Those that need one forward per token of a continued prompt."""


@dataclass
class Case:
    """A tiny checkpoint, loaded by us, with what `generate` answers to the prompts."""

    target: Target
    reference: PreTrainedModel
    prompts: list[list[int]]
    answers: list[list[int]]

    @property
    def model(self) -> RecurrentTarget:
        assert isinstance(self.target.model, RecurrentTarget)
        return self.target.model


def tiny(family: str, **extra: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES | extra)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif family == "Rwkv":  # whose own initialization is mostly zeros
                tensor.add_(torch.randn_like(tensor))
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
            prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (19, 2, 11)]
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


def answers(case: Case, sampling: dict[str, Any] | None = None, **options: Any) -> tuple[list[list[int]], Engine]:
    with Engine(case.target, page_size=4, **options) as engine:
        results = engine.generate(case.prompts, {"temperature": 0, "max_tokens": TOKENS} | (sampling or {}))
        assert engine.free_pages == engine.pages
    return [result.ids for result in results], engine


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_generate(name: str, case_of: Callable[[str], Case]) -> None:
    # Breaks with: slots mixed up, a state kept over a preemption, chunks run on a cache that cannot take them.
    case = case_of(name)
    assert sum(len(set(answer)) for answer in case.answers) >= 15, "answers too dull to tell anything"
    assert answers(case)[0] == case.answers
    chunked, _ = answers(case, chunked_prefill_size=7)
    assert chunked == case.answers
    squeezed, engine = answers(case, max_total_tokens=44, chunked_prefill_size=7)
    assert squeezed == case.answers
    assert engine.preemptions > 0
    # Two slots for three requests: the third begins in a slot that another has used.
    assert answers(case, max_running_requests=2)[0] == case.answers


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(name)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    positions, state = torch.arange(40), dict[int, Any]()
    with torch.inference_mode():
        theirs = case.reference(tokens[None]).logits[0]
        parts = []
        for start, stop in ((0, 17), (17, 18), (18, 40)):  # the slot is any number
            rows = (BatchRow(5, start, stop - start),)
            attention = DenseAttention(())
            batch = ForwardBatch(tokens[start:stop], positions[start:stop], attention, rows=rows, state=state)
            parts.append(case.model.logits(case.model(batch)[0]))
    assert parts[0].dtype == torch.float32
    assert (case.model.vocab_size, case.model.hidden_size, case.model.kv_layers) == (VOCAB, 32, ())
    torch.testing.assert_close(torch.cat(parts), theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_whether_several_tokens_can_follow_is_learned(
    name: str, dtype: torch.dtype, case_of: Callable[[str], Case]
) -> None:
    case = case_of(name)
    model = case.model if dtype == torch.float32 else load(Path(case.target.checkpoint.path), dtype).model
    assert isinstance(model, RecurrentTarget)
    assert model._continues is (name not in SINGLE)


@pytest.mark.parametrize("name", ["mamba", "qwen3-next"])
def test_sampled_text_is_the_same_alone_and_in_a_batch(name: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(name)
    sampling = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
    together, _ = answers(case, sampling)
    alone = [answers(Case(case.target, case.reference, [prompt], []), sampling)[0][0] for prompt in case.prompts]
    assert together == alone
    assert together != case.answers
    assert answers(case, sampling, max_total_tokens=44)[0] == together


def test_two_engines_on_one_target_do_not_meet(case_of: Callable[[str], Case]) -> None:
    # Breaks with: states kept in the model by slot.
    case = case_of("qwen3-next")
    engines = [Engine(case.target, page_size=4) for _ in range(2)]
    prompts = [case.prompts[0], case.prompts[2]]
    requests = [
        engine.submit(prompt, {"temperature": 0, "max_tokens": TOKENS})
        for engine, prompt in zip(engines, prompts, strict=True)
    ]
    while any(request.output.finish_reason is None for request in requests):
        for engine in engines:
            engine.step()
    assert [request.output.ids for request in requests] == [case.answers[0], case.answers[2]]
    for engine in engines:
        engine.close()


def test_a_finished_request_leaves_nothing_behind(case_of: Callable[[str], Case]) -> None:
    case = case_of("mamba2")
    with Engine(case.target) as engine:
        state = engine._executor._state
        long = engine.submit(case.prompts[0], {"temperature": 0, "max_tokens": 9})
        engine.submit(case.prompts[1], {"temperature": 0, "max_tokens": 3})
        engine.step()
        assert len(state) == 2
        for _ in range(3):
            engine.step()
        assert list(state) == [long.slot]
        while engine.step():
            pass
        assert not state


def test_state_is_never_taken_back(case_of: Callable[[str], Case]) -> None:
    # What a draft would ask for, were one to get here.
    model, state = case_of("mamba2").model, dict[int, Any]()

    def run(start: int, length: int, taps: tuple[TapRequest, ...] = ()) -> None:
        at = torch.arange(start, start + length)
        rows = (BatchRow(0, start, length),)
        model(ForwardBatch(at, at, DenseAttention(()), taps, rows=rows, state=state))

    with torch.inference_mode():
        run(0, 4)
        with pytest.raises(RuntimeError, match="after 4 tokens; its row begins at 3"):
            run(3, 1)
        with pytest.raises(RuntimeError, match="after 0 tokens; its row begins at 4"):
            run(4, 1)
        run(0, 4)
        run(4, 1)
        with pytest.raises(ValueError, match="no taps"):
            run(5, 1, (TapRequest(at=0),))


def test_a_drafter_is_refused_by_reason(case_of: Callable[[str], Case], registry: Registry) -> None:
    target = case_of("qwen3-next").target
    with pytest.raises(RefusedError, match=r"rollback \(taking back the KV .* recurrent state cannot\)"):
        Engine(target, algorithm="scripted", registry=registry)
    features = target_features(target.checkpoint.config)
    assert features == {"own_kv", "borrow:embed_tokens", "borrow:lm_head"}
    plain = {"architectures": ["NewForCausalLM"], "model_type": "new"}
    assert "rollback" in target_features(plain)
    assert "rollback" not in target_features(plain, recurrent=True), "what the model's class says stands"


def test_by_path_and_doctor(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    family, extra = CASES["falcon-h1"]
    tiny(family, **extra | {"vocab_size": SIZE}).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert check_config(tmp_path) == (128, True)
    with pytest.raises(UserError, match="--context-length 129: MODEL allows 2 to 128"):
        Engine(str(tmp_path), context_length=129)
    with pytest.raises(RefusedError, match="rollback"):
        Engine(str(tmp_path), algorithm="scripted", registry=registry)
    with Engine(str(tmp_path)) as engine:
        assert isinstance(engine.target.model, RecurrentTarget)
        assert engine.generate(["hello"], {"temperature": 0, "max_tokens": 5})[0].ids
    assert cli.main(["doctor", "none", str(tmp_path)]) == 0
    capsys.readouterr()
    site = tmp_path_factory.mktemp("site")
    bench_registry(site)  # writes the scripted drafters' distribution there
    with on_path(site):
        assert cli.main(["doctor", "scripted", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "rollback (taking back" in " ".join((captured.out + captured.err).split())


def test_the_class_is_asked_where_the_config_does_not_tell(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, extra = CASES["falcon-h1"]
    tiny(family, **extra | {"vocab_size": SIZE}).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(recurrent, "has_recurrent_state", lambda config: False)
    monkeypatch.setattr("specplug.facts.has_recurrent_state", lambda config: False)
    with pytest.raises(RefusedError, match="rollback"):
        Engine(str(tmp_path), algorithm="scripted", registry=registry)
    assert isinstance(load(tmp_path).model, RecurrentTarget)


def test_a_model_without_a_length_gets_a_large_one(case_of: Callable[[str], Case]) -> None:
    assert case_of("mamba").model.max_position == NO_LIMIT
    assert case_of("rwkv").model.max_position == 128
    assert RecurrentTarget(case_of("mamba").model.model, {}, max_position=32).max_position == 32


def test_parts_are_shared(case_of: Callable[[str], Case]) -> None:
    model = case_of("jamba").model
    assert model.part("lm_head").weight is model.model.lm_head.weight
    assert model.part("embed_tokens").weight is model.model.get_input_embeddings().weight
    assert len(list(model.parameters())) == len(list(model.model.parameters())), "no weight is registered twice"
    with pytest.raises(KeyError, match="embed_tokens, lm_head"):
        model.part("rope")


def test_state_in_modules_is_refused(tmp_path: Path) -> None:
    blocks = {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8}
    model = tiny("RecurrentGemma", **blocks)
    told = "RecurrentGemmaForCausalLM.*keeps its state in its modules"
    with pytest.raises(UserError, match=told) as caught:
        RecurrentTarget(model, {})
    assert "\n" not in str(caught.value)
    model.config.architectures = ["RecurrentGemmaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=told):
        check_config(tmp_path)


def test_state_that_mixes_is_refused_though_a_cache_is_handed_back(case_of: Callable[[str], Case]) -> None:
    model = tiny(CASES["mamba2"][0], **CASES["mamba2"][1])
    inner = model.backbone.forward
    kept: list[Any] = []

    def forgetful(cache: Any = None, cache_params: Any = None, **given: Any) -> Any:
        name = "cache" if "cache" in recurrent.inspect.signature(inner).parameters else "cache_params"
        before = cache if cache is not None else cache_params
        out = inner(**given, **{name: kept[-1] if before is not None else None})
        kept.append(getattr(out, name))
        return out

    model.backbone.forward = forgetful
    with pytest.raises(UserError, match=r"Mamba2ForCausalLM.*requests would mix"):
        RecurrentTarget(model, {})


def test_what_transformers_does_not_know_is_one_line(tmp_path: Path) -> None:
    config = {"architectures": ["NewestForCausalLM"], "model_type": "newest", "mamba_d_state": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"NewestForCausalLM.*supported: Llama") as caught:
        check_config(tmp_path)
    assert "\n" not in str(caught.value)
