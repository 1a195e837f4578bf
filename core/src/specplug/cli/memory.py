"""What a run would take of memory, before anything is loaded: the sums of the start, from headers and config."""

from dataclasses import replace

from specplug.errors import UserError
from specplug.models.family import decoder_config
from specplug.options import EngineOptions
from specplug.planning import Run
from specplug.runtime.demand import demand_of, weight_bytes
from specplug.runtime.memory import DeviceMemory, MemoryReport, memory_report, size_pool

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def estimate_memory(run: Run, options: EngineOptions, memory: DeviceMemory | None) -> MemoryReport:
    """Return what starting `run` would set aside, with None for what is not known yet.

    `memory`: of the device as it is now, None on a CPU or where the device is not here. KV is known for models of the
    built-in decoder only: any other model's is learned by running it. Raises the UserError that the start would.
    """
    facts = run.facts
    itemsize, on_device = _ITEM_BYTES[facts.dtype], facts.device != "cpu"
    weights = weight_bytes(facts.target, itemsize)
    draft = weight_bytes(run.draft, itemsize) if run.draft is not None else 0
    try:
        sizes = decoder_config(facts.target.config)
    except UserError:
        sizes = None
    demand = demand_of(
        run.plan,
        options,
        weights=weights or 0,
        kv_token=2 * len(sizes.windows) * sizes.kv_heads * sizes.head_dim * itemsize if sizes else 0,
        vocab=sizes.vocab_size if sizes else 0,
        hidden=sizes.hidden_size if sizes else 0,
        intermediate=sizes.intermediate_size if sizes else 0,
        itemsize=itemsize,
        draft_weights=draft or 0,
        on_device=on_device,
    )
    if sizes is None or weights is None or (on_device and memory is None):
        return MemoryReport(
            total=memory.total if memory else None,
            fraction=options.mem_fraction_static if memory else None,
            weights=weights,
            kv=None,
            tokens=None,
            pages=None,
            page_size=options.page_size,
            draft_kv=None,
            proposal=demand.proposal if sizes else 0,
            draft_weights=demand.draft_weights,
            draft_fixed=demand.draft_fixed,
            draft_slots=demand.draft_slots,
            graphs=demand.graphs,
            activations=demand.activations if sizes else None,
        )
    # The start measures once the weights are loaded.
    loaded = replace(memory, free=memory.free - weights) if memory else None
    return memory_report(demand, size_pool(sizes.max_position, demand, options, loaded), options, loaded)


def graphs_of(run: Run, options: EngineOptions) -> dict[str, str]:
    """Return, for target and draft, whether forwards are replayed from CUDA graphs, in words."""
    trial = "decided by a trial capture at start"
    if run.facts.device == "cpu":
        target = "none on a CPU"
    elif options.disable_cuda_graph:
        target = "off, as --disable-cuda-graph says: every kernel is launched by itself"
    else:
        target = trial
    if run.plan is None or run.plan.nodes == 0:
        return {"target": target}
    needs, draft = run.plan.needs, target
    if target == trial and "device" not in needs.runs_on:
        draft = "none: it runs on the host"
    elif target == trial and not needs.graph_safe:
        draft = "none: it does not declare graph_safe"
    return {"target": target, "draft": draft}
