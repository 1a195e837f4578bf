"""How much KV fits, what is said of it, and which number an error names."""

import re

import pytest
import torch

from specplug.errors import UserError
from specplug.models.decoder import Decoder
from specplug.models.family import decoder_config
from specplug.options import EngineOptions
from specplug.proposal import Proposal
from specplug.runtime.demand import (
    Demand,
    activation_bytes,
    decoder_parameters,
    demand_of,
    graph_bytes,
    model_bytes,
    proposal_bytes,
    weight_bytes,
)
from specplug.runtime.memory import (
    GIB,
    KV_BUDGET,
    DeviceMemory,
    PoolSize,
    device_memory,
    fair_fraction,
    memory_report,
    out_of_memory,
    refusing_out_of_memory,
    size,
    size_pool,
)
from specplug.runtime.progress import STAGES
from specplug.spec import Capabilities, Checkpoint, DraftPlan, KVLayers, TensorInfo

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
H200 = DeviceMemory(total=140 * GIB, free=124 * GIB)
"""After 15 GiB of weights and 1 GiB that CUDA takes."""
PLAN = DraftPlan(
    needs=Capabilities(proposal_probs="dense", draft_kv={"own_layers"}),
    nodes=4,
    depth=4,
    kv=(KVLayers(layers=1, kv_heads=8, k_dim=128, v_dim=128), KVLayers(layers=2, kv_heads=1, k_dim=4, v_dim=2)),
    bytes_fixed=1000,
    bytes_per_slot=10,
)


def demand(**parts: int) -> Demand:
    return Demand(**{"weights": 15 * GIB, "kv_token": 2**17} | parts)


def options(**given: object) -> EngineOptions:
    return EngineOptions.model_validate(given)


# --- what a run takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 8}),
    ],
)
def test_weights_are_known_from_the_config(architecture, more):
    # Breaks with: any bias, norm or tied head left out of the sum.
    config = {**TINY, "architectures": [architecture], **more}
    model = Decoder(config, device="meta")
    held = {id(part): part.numel() for part in model.parameters()}
    assert decoder_parameters(decoder_config(config)) == sum(held.values())
    assert weight_bytes(Checkpoint(config=config), 2) == 2 * sum(held.values())


def test_weights_are_known_from_headers_first():
    tensors = {"a": TensorInfo("float32", (3, 5)), "b": TensorInfo("bfloat16", ()), "c": TensorInfo("int8", (2,))}
    assert weight_bytes(Checkpoint(config=LLAMA, tensors=tensors), 2) == 2 * (15 + 1 + 2)
    assert weight_bytes(Checkpoint(config={"model_type": "other"}), 2) is None


def test_loaded_weights_count_what_is_shared_once():
    module = torch.nn.Linear(3, 5)
    module.twin = torch.nn.Linear(3, 5, bias=False)
    module.twin.weight = module.weight
    module.register_buffer("table", torch.zeros(7, dtype=torch.int64))
    assert model_bytes(module) == 4 * (15 + 5) + 8 * 7


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_proposal_is_as_large_as_it_is_counted(rule):
    made = Proposal(3, 5, 11, rule=rule, dense=True, device=torch.device("cpu"))
    tensors = [made.tokens, made.parents, made.num_valid, made.limit, made.dense, made.q]
    held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert proposal_bytes(3, 5, 11, q=rule == "rejection") == held


def test_a_drafting_run_takes_what_its_plan_declares():
    sizes = {"weights": 5, "kv_token": 7, "vocab": 100, "hidden": 8, "intermediate": 16, "itemsize": 2}
    found = demand_of(PLAN, options(max_running_requests=3), **sizes, draft_weights=9)
    assert found.draft_kv_token == 2 * (8 * 256 + 2 * 1 * 6)
    assert (found.draft_fixed, found.draft_slots, found.draft_weights) == (1000, 40, 9)
    assert found.proposal == proposal_bytes(3, 4, 100, q=False)
    assert found.activations == activation_bytes(512, 3 * 5, 100, 8, 16, 2)
    q = demand_of(PLAN, options(max_running_requests=3, speculative_acceptance="rejection"), **sizes)
    assert q.proposal == proposal_bytes(3, 4, 100, q=True)
    one_hot = PLAN.model_copy(update={"needs": Capabilities()})
    same = demand_of(one_hot, options(max_running_requests=3, speculative_acceptance="rejection"), **sizes)
    assert same.proposal == found.proposal


@pytest.mark.parametrize("plan", [None, PLAN.model_copy(update={"nodes": 0})])
def test_a_plain_run_takes_nothing_for_drafts(plan):
    found = demand_of(
        plan, options(), weights=5, kv_token=7, vocab=9, hidden=8, intermediate=8, itemsize=2, draft_weights=3
    )
    assert found.to_come == found.graphs > 0
    assert found.token == 7


def test_graphs_and_activations_are_a_devices():
    sizes = {"weights": 5, "kv_token": 7, "vocab": 9, "hidden": 8, "intermediate": 8, "itemsize": 4}
    found = demand_of(None, options(), **sizes, on_device=False)
    assert (found.graphs, found.activations) == (0, 0)
    assert graph_bytes(options(disable_cuda_graph=True)) == 0
    assert graph_bytes(options(max_cuda_graphs=2)) < graph_bytes(options(max_cuda_graphs=3)) < 2 * GIB


def test_wide_verifies_outgrow_a_prompt_chunk():
    # Breaks with: activations sized by the chunk alone.
    sizes = {"weights": 5, "kv_token": 7, "vocab": 9, "hidden": 8, "intermediate": 8, "itemsize": 4}
    assert demand_of(PLAN, options(max_running_requests=200), **sizes).activations == activation_bytes(
        1000, 1000, 9, 8, 8, 4
    )


# --- the pool --------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_budget_bounds_the_pool():
    small = size_pool(64, demand(), options(max_running_requests=2))
    assert small == PoolSize(max_tokens=64, pages=8)
    capped = size_pool(131072, demand(), options())
    assert capped == PoolSize(max_tokens=KV_BUDGET // 2**17, pages=512)
    assert size_pool(131072, demand(), options(max_total_tokens=100)) == PoolSize(max_tokens=100, pages=7)
    assert size_pool(64, demand(kv_token=0), options()) == PoolSize(max_tokens=64, pages=32)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"context_length": 65}, "--context-length 65 is more than the model's 64 positions: use at most 64"),
        ({"context_length": 20, "max_total_tokens": 10}, "raise --max-total-tokens to at least 20"),
    ],
)
@pytest.mark.parametrize("memory", [None, H200])
def test_sizes_that_contradict_each_other(given, says, memory):
    with pytest.raises(UserError, match=re.escape(says)):
        size_pool(64, demand(), options(**given), memory)


def test_on_a_device_pages_take_what_the_rest_leaves():
    run = demand(
        proposal=2 * GIB, draft_weights=GIB, draft_fixed=GIB, draft_slots=GIB, graphs=GIB, draft_kv_token=2**15
    )
    pool = size_pool(131072, run, options(max_running_requests=64), H200)
    left = int(0.9 * 140 * GIB) - 16 * GIB - 6 * GIB
    page = 16 * (2**17 + 2**15)
    # All pages and the trash page fit; one more does not.
    assert (pool.pages + 1) * page <= left < (pool.pages + 2) * page
    report = memory_report(run, pool, options(max_running_requests=64), H200)
    assert report.free is not None
    assert int(0.1 * 140 * GIB) - 1 <= report.free < int(0.1 * 140 * GIB) + 1 + page


def test_a_pool_that_fits_is_no_larger_than_wanted():
    assert size_pool(1000, demand(), options(max_running_requests=2), H200) == PoolSize(max_tokens=1000, pages=125)
    assert size_pool(1000, demand(), options(max_total_tokens=1600), H200) == PoolSize(max_tokens=1000, pages=100)
    assert size_pool(1000, demand(kv_token=0), options(), H200) == PoolSize(max_tokens=1000, pages=500)


def test_activations_count_where_the_fraction_leaves_too_little_for_them():
    asked = options(mem_fraction_static=0.9)
    room = int(0.1 * 140 * GIB)
    within, beyond = demand(activations=room - GIB), demand(activations=room + GIB)
    assert size_pool(131072, within, asked, H200) == size_pool(131072, demand(), asked, H200)
    fewer = size_pool(131072, demand(), asked, H200).pages - size_pool(131072, beyond, asked, H200).pages
    assert fewer == pytest.approx(GIB / (16 * 2**17), abs=1)


def test_a_context_that_was_not_asked_for_shrinks_to_the_pool():
    tight = DeviceMemory(20 * GIB, 4 * GIB)
    pool = size_pool(131072, demand(), options(), tight)
    assert pool.max_tokens == pool.pages * 16 < 131072


# --- which number to lower -------------------------------------------------------------------------------------------


def refusal(*args: object) -> str:
    with pytest.raises(UserError) as caught:
        size_pool(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, text
    return found[1]


@pytest.mark.parametrize("field", ["context_length", "max_total_tokens"])
def test_what_does_not_fit_names_the_option_and_what_does(field):
    tight = DeviceMemory(20 * GIB, 4 * GIB)
    flag = "--" + field.replace("_", "-")
    text = refusal(131072, demand(), options(**{field: 100_000}), tight)
    assert text.startswith(f"{flag} 100000 needs 12.2 GiB of KV and 2.0 GiB is left (weights 15.0 GiB, ")
    most = int(number(r"lower it to at most (\d+)", text))
    assert size_pool(131072, demand(), options(**{field: most}), tight).pages * 16 == most
    refusal(131072, demand(), options(**{field: most + 1}), tight)


def test_a_larger_fraction_is_named_only_where_it_helps():
    tight = DeviceMemory(20 * GIB, 4 * GIB)
    text = refusal(131072, demand(), options(context_length=20_000), tight)
    share = float(number(r"raise --mem-fraction-static 0\.9 to ([\d.]+)", text))
    assert size_pool(131072, demand(), options(context_length=20_000, mem_fraction_static=share), tight)
    refusal(131072, demand(), options(context_length=20_000, mem_fraction_static=share - 0.02), tight)
    assert "--mem-fraction-static" not in refusal(131072, demand(), options(context_length=100_000), tight)


@pytest.mark.parametrize(
    ("parts", "given", "memory", "says"),
    [
        ({"proposal": 3 * GIB, "draft_slots": 2 * GIB}, {}, (20, 4), "lower --max-running-requests 8"),
        ({"graphs": 3 * GIB}, {}, (20, 4), "lower --max-cuda-graphs 64"),
        ({}, {"mem_fraction_static": 0.5}, (20, 4), "raise --mem-fraction-static 0.5 to 0.81"),
        ({"weights": 19 * GIB}, {}, (20, 0), "take a smaller model or a larger device"),
        ({"weights": GIB}, {}, (20, 1), "free what other processes hold"),
        ({"proposal": 5 * GIB}, {"max_running_requests": 1}, (20, 4), "take a smaller model or a larger device"),
    ],
)
def test_no_room_at_all_names_what_to_change(parts, given, memory, says):
    text = refusal(131072, demand(**parts), options(**given), DeviceMemory(memory[0] * GIB, memory[1] * GIB))
    assert text.startswith(f"--mem-fraction-static {given.get('mem_fraction_static', 0.9)} of 20.0 GiB leaves no room")
    assert "even 256 tokens need 34.0 MiB" in text
    assert text.endswith(says) or f"{says}, or" in text


def test_a_pool_asked_to_be_tiny_is_no_lack_of_room():
    # Breaks with: the least that has to fit not bounded by what was asked for.
    assert size_pool(131072, demand(), options(max_total_tokens=32), H200).pages == 2


# --- reports ---------------------------------------------------------------------------------------------------------


def test_the_report_adds_up_and_says_so():
    run = demand(proposal=GIB, draft_weights=2 * GIB, draft_fixed=GIB, draft_slots=GIB, graphs=GIB, activations=GIB)
    run = Demand(**{name: getattr(run, name) for name in Demand.__slots__} | {"draft_kv_token": 2**15})
    asked = options(max_running_requests=4, context_length=4096)
    pool = size_pool(131072, run, asked, H200)
    report = memory_report(run, pool, asked, H200)
    assert (report.pages, report.tokens, report.other) == (1024, 16384, GIB)
    assert report.kv == 1025 * 16 * 2**17
    assert report.draft_kv == 1025 * 16 * 2**15
    parts = report.to_dict()
    names = ("weights", "kv", "draft_kv", "proposal", "draft_weights", "draft_fixed", "draft_slots", "graphs")
    assert sum(parts[name] for name in (*names, "activations", "other", "free")) == 140 * GIB
    text = "\n".join(report.lines())
    assert text.startswith("memory 140.0 GiB, 126.0 GiB of them by --mem-fraction-static 0.9\n")
    assert re.search(r"^  KV pages +2\.0 GiB  16384 tokens in 1024 pages of 16$", text, re.M)
    assert re.search(r"^  draft weights +2\.0 GiB$", text, re.M)


def test_a_plain_run_on_a_cpu_shows_weights_and_pages_only():
    asked = options()
    report = memory_report(demand(), size_pool(64, demand(), asked), asked)
    assert [line.split("  ")[0] for line in report.lines()[0:1]] == ["memory"]
    assert [line.split("  ")[1] for line in report.lines()[1:]] == ["weights", "KV pages"]
    assert (report.total, report.free, report.fraction) == (None, None, None)


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0.0 KiB"), (512, "0.5 KiB"), (2**20, "1.0 MiB"), (2**30 - 2**20, "1023.0 MiB"), (3 * 2**29, "1.5 GiB")],
)
def test_sizes_are_shown_in_their_unit(amount, shown):
    assert size(amount) == shown


# --- the device ------------------------------------------------------------------------------------------------------


def test_a_cpu_has_no_device_memory():
    assert device_memory("cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here_has_none():
    assert device_memory("cuda") is None


def test_engines_share_what_is_left_in_equal_parts():
    # Breaks with: the fraction divided by the engines, which gives the first one less than is used already.
    memory, taken = DeviceMemory(100, 80), []
    for left in (3, 2, 1):
        share = fair_fraction(memory, 0.8, left)
        taken.append(share * 100 - (100 - memory.free))
        memory = DeviceMemory(100, round(100 - share * 100))
    assert taken == pytest.approx([20, 20, 20])
    assert fair_fraction(DeviceMemory(100, 10), 0.8, 2) == 0.8


@pytest.mark.parametrize("stage", [*STAGES, "anything"])
def test_running_out_names_the_stage_and_a_number(stage):
    text = str(out_of_memory(stage))
    assert text.startswith(f"the device ran out of memory at {stage!r}: ")
    assert "--" in text
    assert "\n" not in text


def test_running_out_inside_a_stage_is_one_line():
    asked = options()
    report = memory_report(demand(), size_pool(64, demand(), asked, H200), asked, H200)
    with (
        pytest.raises(UserError, match=r"'capture graphs'; weights 15\.0 GiB; KV pages .* lower --max-cuda-graphs"),
        refusing_out_of_memory("capture graphs", lambda: report),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
    with pytest.raises(RuntimeError, match="something else"), refusing_out_of_memory("capture graphs"):
        raise RuntimeError("something else")
    with pytest.raises(ValueError, match="mine"), refusing_out_of_memory("first step"):
        raise ValueError("mine")
