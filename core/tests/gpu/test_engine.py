"""The engine on a GPU against the CPU's reference loop, and against itself: graphs, waits, memory, many requests.

Float32 products are exact there as long as nobody turns TF32 on, which torch leaves off.
"""

import importlib.util
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specplug import SamplingParams, reference
from specplug.errors import UserError
from specplug.facts import read_checkpoint
from specplug.models.target import Target, load_target
from specplug.registry import Registry
from specplug.runtime.device.executor import DeviceExecutor
from specplug.runtime.device.noise import gumbel_rows
from specplug.runtime.engine import Engine
from specplug.runtime.request import Request
from specplug.runtime.scheduler import UNKNOWN, Row
from specplug.testing.bench import PROMPTS
from specplug.testing.registry import bench_registry
from specplug.testing.scripted_drafters import DeviceScripted
from specplug.testing.targets import decoder_target, reference_logits, table_target

DEVICE = os.environ.get("SPECPLUG_TEST_DEVICE", "cuda")  # "cpu", to try these tests out where the device path is forced
CUDA = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_cuda = pytest.mark.skipif(not CUDA, reason="says something about CUDA alone")
loud = pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # says once that it is a prototype
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")

WIDTHS = (0, 1, 3, 8)
LENGTH = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH)
EIGHT = (*PROMPTS, (1, 2, 3), (6, 6, 1, 0, 6, 6, 1), (4,) * 21)
MIXED = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=4, max_tokens=LENGTH),
    SamplingParams(temperature=1.2, seed=5, top_k=5, max_tokens=9),
    SamplingParams(temperature=0.7, seed=6, frequency_penalty=0.8, min_p=0.05, max_tokens=LENGTH),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logit_bias={3: 1.5}, max_tokens=11),
    SamplingParams(temperature=1.0, seed=7, presence_penalty=-0.5, min_tokens=6, stop_token_ids=(1, 2), max_tokens=12),
    SamplingParams(temperature=0.9, seed=8, top_p=0.8, max_tokens=LENGTH),
    SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(0, 4), max_tokens=12),
)
DRAFTERS = {
    "none": ("none", ""),
    "right": ("scripted", "right_then_wrong"),
    "right on the device": ("scripted-device", "right_then_wrong"),
    "tree": ("scripted", "random_tree"),
    "tree on the device": ("scripted-device", "random_tree"),
    "hostile on the device": ("scripted-device", "hostile"),
    "dense": ("scripted-dense", ""),
}


def _table() -> Target:
    return table_target(16, 2, 1, alphabet=range(8))


def _decoder() -> Target:
    return decoder_target(2, 16)


TARGETS: Mapping[str, Callable[[], Target]] = {"table": _table, "decoder": _decoder}


class Pair:
    """A target on the CPU, with its reference answers, and the same one on the device."""

    def __init__(self, make: Callable[[], Target]) -> None:
        self.logits = reference_logits(make())
        self.target = make()
        self.target.model.to(DEVICE)
        self.greedy = [list(reference.decode(self.logits, prompt, GREEDY)) for prompt in EIGHT]
        self.texts = [(*prompt, *ids) for prompt, ids in zip(EIGHT, self.greedy, strict=True)]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pairs() -> Mapping[str, Pair]:
    return {name: Pair(make) for name, make in TARGETS.items()}


Make = Callable[..., Engine]


@pytest.fixture
def make(registry: Registry, pairs: Mapping[str, Pair]) -> Make:
    def engine(
        name: str,
        drafter: str = "none",
        width: int = 4,
        *,
        texts: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Engine:
        algorithm, behaviour = DRAFTERS[drafter]
        config: dict[str, Any] = {} if algorithm == "none" else {"num_draft_tokens": width + 1}
        if behaviour:
            known = pairs[name].texts if texts is None else texts
            config |= {"scripted_behaviour": behaviour, "scripted_texts": known, "scripted_n": max(1, width - 1)}
        return engine_on(pairs[name].target, algorithm, config, registry, **options)

    return engine


def engine_on(target: Target, algorithm: str, config: Mapping[str, Any], registry: Registry, **options: Any) -> Engine:
    settled = {
        "device": DEVICE,
        "dtype": "float32",
        "attention_backend": "paged" if CUDA else "auto",
        "page_size": 4,
        "context_length": 64,
        "max_cuda_graphs": 8,
        **options,
    }
    made = Engine(target, algorithm=algorithm, config=config, registry=registry, **settled)
    assert isinstance(made._executor, DeviceExecutor)
    return made


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    for _ in range(2000):
        if all(one.output.finish_reason for one in requests):
            return
        engine.step()
    raise AssertionError("a request does not end")


def at_rest(engine: Engine) -> None:
    """I5, and nobody failed."""
    assert engine.free_pages == engine.pages
    assert not engine.speculation.startswith("failed"), engine.speculation


# --- I1: greedy answers are the reference's --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "eager"),
    [*(pytest.param(width, False, id=f"{width}-graphs") for width in WIDTHS), pytest.param(3, True, id="3-eager")],
)
@pytest.mark.parametrize("drafter", ["right", "right on the device", "tree", "tree on the device"])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_ids_equal_the_reference(
    make: Make, pairs: Mapping[str, Pair], name: str, width: int, drafter: str, eager: bool
) -> None:
    """I1 in float32, exactly, for batches of 1, 3 and 8 on one engine; every engine takes half a second to start."""
    with make(name, drafter, width, disable_cuda_graph=eager) as engine:
        assert bool(engine.eager) == eager
        for batch in (1, 3, 8):
            results = engine.generate(EIGHT[:batch], GREEDY)
            assert [result.ids for result in results] == pairs[name].greedy[:batch]
            at_rest(engine)
        if width > 1:
            assert engine.ledger.accepted > 0


@pytest.mark.parametrize("name", TARGETS)
def test_long_prompts_in_chunks_equal_the_reference(make: Make, pairs: Mapping[str, Pair], name: str) -> None:
    prompts = [tuple((at * at + 3 * length) % 8 for at in range(length)) for length in (45, 17, 31, 8)]
    short = GREEDY.model_copy(update={"max_tokens": 8})
    wanted = [list(reference.decode(pairs[name].logits, prompt, short)) for prompt in prompts]
    texts = [(*prompt, *ids) for prompt, ids in zip(prompts, wanted, strict=True)]
    for drafter in ("none", "right on the device", "tree on the device", "tree"):
        with make(name, drafter, texts=texts, chunked_prefill_size=7, max_total_tokens=96) as engine:
            assert [result.ids for result in engine.generate(prompts, short)] == wanted
            at_rest(engine)


# --- I7, I11: what does not matter -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("drafter", ["none", "right on the device", "tree on the device"])
def test_neighbours_order_and_slots_do_not_matter(make: Make, name: str, drafter: str) -> None:
    """I7: each request alone, then all of them in several orders, with some aborted in between."""
    with make(name, drafter) as engine:
        alone = [engine.generate([prompt], one)[0].ids for prompt, one in zip(EIGHT, MIXED, strict=True)]
        for seed in range(3):
            rng = random.Random(seed)
            order = rng.sample(range(8), 8)
            extra = [engine.submit(EIGHT[at], MIXED[at]) for at in order[:3]]
            requests = [engine.submit(EIGHT[at], MIXED[at]) for at in order]
            for one in extra:
                engine.step()
                engine.abort(one)
            finish(engine, requests)
            for at, one in zip(order, requests, strict=True):
                assert one.output.ids == alone[at], f"order {order}, request {at}"
            at_rest(engine)


@pytest.mark.parametrize("name", TARGETS)
def test_the_same_seed_says_the_same_with_every_drafter_and_none(make: Make, name: str) -> None:
    """I11 under `coupled`: the device's noise decides, whoever drafts, graphs or none."""
    wanted: list[list[int]] | None = None
    for drafter in DRAFTERS:
        for eager in (False, True) if drafter in ("none", "tree on the device") else (False,):
            texts = [(*prompt, *ids) for prompt, ids in zip(EIGHT, wanted, strict=True)] if wanted else None
            with make(name, drafter, texts=texts, disable_cuda_graph=eager) as engine:
                found = [result.ids for result in engine.generate(EIGHT, MIXED)]
                accepted = engine.ledger.accepted
                at_rest(engine)
            wanted = wanted or found
            assert found == wanted, f"{drafter}, eager {eager}"
            assert accepted > 5 or drafter in ("none", "dense", "hostile on the device")


# --- half precision: ties only ---------------------------------------------------------------------------------------

_SPREAD = 0.03
"""Share of a position's range of scores within which half precision may choose another token."""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Callable[[Sequence[int]], Tensor]]:
    """A decoder of head dim 64 in bfloat16 on the device, and the float32 reference of the same weights."""
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("half")
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return _loaded(folder, torch.bfloat16, DEVICE), reference_logits(_loaded(folder, torch.float32, "cpu"))


def _loaded(folder: Path, dtype: torch.dtype, device: str) -> Target:
    checkpoint = read_checkpoint(str(folder))
    return load_target(folder, checkpoint, dtype=dtype, device=torch.device(device), needs_tokenizer=False)


@pytest.fixture(scope="module")
def plain_answers() -> dict[tuple[str, float], list[list[int]]]:
    """Those of `half` by backend and temperature, each found by the first test that needs it."""
    return {}


BACKENDS = ["paged", pytest.param("flashinfer", marks=[needs_flashinfer, needs_cuda])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafter", ["none", "right on the device", "tree on the device"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_half_precision_differs_at_ties_only(
    half: tuple[Target, Callable[[Sequence[int]], Tensor]],
    plain_answers: dict[tuple[str, float], list[list[int]]],
    registry: Registry,
    backend: str,
    drafter: str,
    temperature: float,
) -> None:
    """Each token's score (logit, or log p + noise) in float32 is within `_SPREAD` of its position's best one."""
    target, logits = half
    every = [SamplingParams(temperature=temperature, seed=at, max_tokens=LENGTH) for at in range(8)]
    algorithm, behaviour = DRAFTERS[drafter]
    options = {"dtype": "bfloat16", "attention_backend": backend if CUDA else "auto", "page_size": 16}
    if (backend, temperature) not in plain_answers:
        with engine_on(target, "none", {}, registry, **options) as engine:
            plain_answers[backend, temperature] = [result.ids for result in engine.generate(EIGHT, every)]
    plain = plain_answers[backend, temperature]
    config: dict[str, Any] = {}
    if behaviour:
        texts = [(*prompt, *ids) for prompt, ids in zip(EIGHT, plain, strict=True)]
        config = {"num_draft_tokens": 6, "scripted_behaviour": behaviour, "scripted_texts": texts, "scripted_n": 3}
    with engine_on(target, algorithm, config, registry, **options) as engine:
        found = [result.ids for result in engine.generate(EIGHT, every)]
        at_rest(engine)
    other, total = 0, 0
    for prompt, ids, sampling in zip(EIGHT, found, every, strict=True):
        scores = logits([*prompt, *ids])[len(prompt) - 1 : -1].clone()
        if temperature:
            at = torch.arange(len(prompt), len(prompt) + len(ids), device=DEVICE)
            seeds = torch.full_like(at, sampling.seed or 0)
            noise = gumbel_rows(seeds, torch.zeros_like(at), at, "target", scores.shape[1])
            scores = scores / temperature + noise.cpu()
        best = scores.max(1).values
        chosen = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
        gaps = (best - chosen) / (best - scores.median(1).values)
        assert float(gaps.max()) <= _SPREAD, f"prompt {prompt}: gaps {[round(gap, 3) for gap in gaps.tolist()]}"
        other += int((gaps > 0).sum())
        total += len(ids)
    differ = sum(one != two for one, two in zip(found, plain, strict=True))
    print(f"{backend}, {drafter}, T={temperature}: {other} of {total} tokens are not the float32 choice, ", end="")
    print(f"{differ} of {len(found)} answers differ from plain decoding's")


# --- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "right", "tree on the device"])
def test_a_replay_is_the_eager_forward_bit_for_bit(make: Make, drafter: str) -> None:
    """Every step of a run in a bucket: the recorded function run by Python, then the graph, on the same tensors."""
    with make("decoder", drafter, max_running_requests=4) as engine:
        executor: Any = engine._executor
        statics, compared = executor._statics, []

        def checked(bucket: Any, attention: Any, replay: Callable[[], None]) -> Callable[[], None]:
            def both() -> None:
                rows = statics.rows(*bucket)
                executor._bucket_forward(rows, attention)
                live = rows.token_row < statics.sizes.slots
                eager = statics.logits[: rows.total][live], statics.choice[: rows.total][live]
                replay()
                assert torch.equal(statics.logits[: rows.total][live], eager[0]), bucket
                assert torch.equal(statics.choice[: rows.total][live], eager[1]), bucket
                compared.append(bucket)

            return both

        for key, (attention, replay) in list(executor._graphs.items()):
            executor._graphs[key] = attention, checked(key[0], attention, replay)
        engine.generate(EIGHT, MIXED)
        assert len(compared) > 5
        assert executor.graphs == len(executor._graphs) > 1
        at_rest(engine)


def test_steps_say_whether_they_were_replayed(make: Make) -> None:
    for eager in (False, True):
        with make("table", disable_cuda_graph=eager) as engine:
            engine.submit(EIGHT[0], GREEDY)
            engine.step()
            engine.step()
            assert engine.last_step is not None
            assert engine.last_step.graph is not eager


# --- nothing waits between a launch and its results ------------------------------------------------------------------

_PARENTS = (-1, -1, 0, 0, 1, 2)


def _quiet_ingest(self: Any, step: Any) -> None:
    """The double reads tensors in Python, which waits: not here."""


def _quiet_propose(self: Any, step: Any, out: Any) -> None:
    nodes = out.tokens.shape[1]
    tokens = torch.arange(nodes, device=out.tokens.device) % 8
    out.tokens.copy_(tokens.expand_as(out.tokens))
    if self.config.scripted_behaviour == "random_tree":
        for node, parent in enumerate(_PARENTS[:nodes]):
            out.parents[:, node].fill_(parent)
    out.num_valid.copy_(out.limit)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceScripted, "ingest", _quiet_ingest)
    monkeypatch.setattr(DeviceScripted, "propose", _quiet_propose)


KINDS = {
    "greedy": MIXED[0],
    "sampled": MIXED[1],
    "filtered": SamplingParams(temperature=0.9, seed=1, top_k=6, top_p=0.9, min_p=0.01, max_tokens=LENGTH),
    "penalties": MIXED[3],
    "edited": MIXED[5],
}


@needs_cuda
@loud
@pytest.mark.parametrize(
    ("drafter", "rule", "eager"),
    [
        *(
            pytest.param(drafter, rule, False, id=f"{drafter}-{rule}-graphs")
            for drafter in ("none", "right", "right on the device", "tree on the device", "dense")
            for rule in ("coupled", "rejection")
        ),
        *(pytest.param(drafter, "coupled", True, id=f"{drafter}-eager") for drafter in ("none", "tree on the device")),
    ],
)
def test_a_launch_does_not_wait(make: Make, quiet: None, drafter: str, rule: str, eager: bool) -> None:
    """Greedy, sampled, filtered, penalised, chain and tree steps, once warmed up."""
    with make("decoder", drafter, 6, speculative_acceptance=rule, disable_cuda_graph=eager) as engine:
        engine.generate(EIGHT, list(MIXED))
        for kind in KINDS.values():
            engine.generate(EIGHT[:3], kind)
        waits_are_errors(engine)
        for kind in KINDS.values():
            engine.generate(EIGHT[:3], kind)
        engine.generate(EIGHT, list(MIXED))
        at_rest(engine)


@needs_cuda
@needs_flashinfer
@loud
@pytest.mark.parametrize("drafter", ["none", "right on the device", "tree on the device"])
def test_a_launch_does_not_wait_for_flashinfer(
    half: tuple[Target, Any], registry: Registry, quiet: None, drafter: str
) -> None:
    algorithm, behaviour = DRAFTERS[drafter]
    config = {"num_draft_tokens": 6, "scripted_behaviour": behaviour} if behaviour else {}
    options = {"dtype": "bfloat16", "attention_backend": "flashinfer", "page_size": 16}
    with engine_on(half[0], algorithm, config, registry, **options) as engine:
        engine.generate(EIGHT, list(MIXED))
        waits_are_errors(engine)
        engine.generate(EIGHT, list(MIXED))
        at_rest(engine)


def waits_are_errors(engine: Engine) -> None:
    """From now on whatever waits for the device between a launch's begin and end raises."""
    executor: Any = engine._executor
    launch = executor.launch

    def guarded(rows: Sequence[Row]) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.launch = guarded


def test_plain_steps_run_ahead(make: Make) -> None:
    """A step is launched while its tokens are still unknown, and another step's results are what is waited for."""
    with make("decoder") as engine:
        executor: Any = engine._executor
        launch = executor.launch
        blind: list[bool] = []

        def spy(rows: Sequence[Row]) -> Any:
            blind.extend(row.tokens == [UNKNOWN] for row in rows)
            return launch(rows)

        executor.launch = spy
        engine.generate(EIGHT[:2], MIXED[:2])
        assert sum(blind) == 2 * (LENGTH - 1)
        at_rest(engine)


# --- memory ----------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize(
    ("drafter", "eager"),
    [
        *(pytest.param(drafter, False, id=f"{drafter}-graphs") for drafter in ("none", "right", "dense")),
        *(
            pytest.param("tree on the device", eager, id=f"tree on the device-{'eager' if eager else 'graphs'}")
            for eager in (False, True)
        ),
    ],
)
def test_memory_does_not_grow(make: Make, quiet: None, drafter: str, eager: bool) -> None:
    """Bytes held by tensors, over 50 steps of decoding after as many to warm up."""
    long = SamplingParams(temperature=0.8, seed=1, frequency_penalty=0.1, max_tokens=400)
    with make("decoder", drafter, context_length=480, disable_cuda_graph=eager, max_running_requests=2) as engine:
        requests = [engine.submit(EIGHT[0], long), engine.submit(EIGHT[1], long.model_copy(update={"temperature": 0}))]
        held: list[int] = []
        for _ in range(75):
            engine.step()
            held.append(torch.cuda.memory_allocated())
        assert not any(one.output.finish_reason for one in requests)
        early, late = held[25:50], held[50:]
        assert max(late) <= max(early), f"{max(late) - max(early)} bytes more"
        for one in requests:
            engine.abort(one)
        at_rest(engine)


@needs_cuda
def test_too_large_a_pool_is_refused_in_one_line(make: Make) -> None:
    with pytest.raises(UserError) as refused:
        make("decoder", max_total_tokens=10**12)
    message = str(refused.value)
    assert "--max-total-tokens 1000000000000" in message
    assert "\n" not in message


# --- models through transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", ["GPTNeoX", "Phi3"])
def test_a_model_through_transformers_equals_its_cpu_result(
    family: str, eager: bool, registry: Registry, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(tmp_path)
    logits = reference_logits(_loaded(tmp_path, torch.float32, "cpu"))
    wanted = [list(reference.decode(logits, prompt, GREEDY)) for prompt in EIGHT[:4]]
    target = _loaded(tmp_path, torch.float32, DEVICE)
    texts = [(*prompt, *ids) for prompt, ids in zip(EIGHT, wanted, strict=False)]
    drafters = [("scripted-device", "random_tree")] + ([] if eager else [("none", ""), ("scripted", "right")])
    for algorithm, behaviour in drafters:
        scripted = {"num_draft_tokens": 5, "scripted_behaviour": behaviour, "scripted_texts": texts}
        with engine_on(target, algorithm, scripted if behaviour else {}, registry, disable_cuda_graph=eager) as engine:
            print(f"{family}, {algorithm}: {engine.eager or 'graphs'}")
            if eager:
                assert engine.eager == "--disable-cuda-graph"
            elif engine.eager:  # it may look at numbers on its way; then that is what it says
                assert engine.eager.startswith("its capture failed: ")
            assert [result.ids for result in engine.generate(EIGHT[:4], GREEDY)] == wanted
            at_rest(engine)


# --- synthetic acceptance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [1.0, 2.5, 3.75])
@pytest.mark.parametrize("drafter", ["dense", "tree on the device"])
def test_synthetic_acceptance_emits_its_mean(make: Make, quiet: None, drafter: str, mean: float) -> None:
    """Within 2 %. The device's tree has a path of 3 drafts, which is enough."""
    if drafter == "tree on the device" and mean > 3:
        pytest.skip("its paths are too short")
    long = [SamplingParams(temperature=0.0, seed=seed, max_tokens=180) for seed in range(40 if CUDA else 12)]
    prompts = [EIGHT[at % 8] for at in range(len(long))]
    options = {"speculative_acceptance": f"synthetic:{mean:g}", "context_length": 256, "max_running_requests": 16}
    with make("table", drafter, 6, **options) as engine:
        engine.generate(prompts, long)
        counts = engine.ledger.report()
        at_rest(engine)
    assert counts["tokens_per_target_step"] == pytest.approx(mean, rel=0.02)


# --- I5: many short requests -----------------------------------------------------------------------------------------

MANY = [(prompt, one) for prompt in EIGHT[:5] for one in MIXED]


@pytest.fixture(scope="module")
def table_answers(pairs: Mapping[str, Pair], registry: Registry) -> list[tuple[list[int], str | None]]:
    """Ids and finish reason of each of `MANY`, decoded plain."""
    with engine_on(pairs["table"].target, "none", {}, registry) as engine:
        results = engine.generate([prompt for prompt, _ in MANY], [one for _, one in MANY])
        return [(result.ids, result.finish_reason) for result in results]


@pytest.mark.parametrize("drafter", ["none", "right", "tree on the device", "dense"])
def test_thousands_of_mixed_requests_with_aborts_leave_no_page_behind(
    make: Make, table_answers: Sequence[tuple[list[int], str | None]], drafter: str
) -> None:
    """Arrivals, steps and aborts by a seeded coin on a tight pool; what was answered is the plain answer."""
    rng, kinds, right = random.Random(3), MANY, table_answers
    total = 600 if CUDA else 150
    options = {"max_running_requests": 32, "max_total_tokens": 400, "context_length": 48, "chunked_prefill_size": 40}
    texts = [(*prompt, *ids) for (prompt, _), (ids, _) in zip(kinds, right, strict=True)]
    with make("table", drafter, texts=texts, **options) as engine:
        open_ones: list[tuple[int, Request]] = []
        submitted, ended = 0, {"abort": 0, "stop": 0, "length": 0}
        while submitted < total or open_ones:
            if submitted < total and len(open_ones) < 48:
                for _ in range(rng.randrange(12)):
                    at = rng.randrange(len(kinds))
                    open_ones.append((at, engine.submit(*kinds[at], max_drafted=rng.choice([None, None, 0, 2]))))
                    submitted += 1
            for _, one in rng.sample(open_ones, min(len(open_ones), rng.randrange(3))):
                engine.abort(one)
            engine.step()
            for at, one in open_ones:
                reason = one.output.finish_reason
                if reason is None:
                    continue
                assert not one.error, one.error
                ended[reason] += 1
                ids, its_reason = right[at]
                assert one.output.ids == (ids[: len(one.output.ids)] if reason == "abort" else ids)
                assert reason in ("abort", its_reason)
            open_ones = [pair for pair in open_ones if pair[1].output.finish_reason is None]
        assert min(ended.values()) > 5, ended
        at_rest(engine)
        assert len(engine._scheduler._free_slots) == 32
