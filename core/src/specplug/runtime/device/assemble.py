"""From a planned run to the device's executor and drafter, all buffers taken and all graphs recorded."""

from __future__ import annotations

import logging

import torch

from specplug.proposal import Proposal
from specplug.runtime import progress
from specplug.runtime.attention.backend import Backend, PagedBackend
from specplug.runtime.build import Parts
from specplug.runtime.device.buckets import Bucket, Buckets
from specplug.runtime.device.capture import BucketRecorder, Capturer
from specplug.runtime.device.decide import Decider
from specplug.runtime.device.executor import DeviceExecutor
from specplug.runtime.device.packing import prime
from specplug.runtime.device.statics import Sizes, Statics
from specplug.runtime.device.timing import measure
from specplug.runtime.device.views import DeviceView
from specplug.runtime.drafting import Drafting
from specplug.runtime.kv import KVPool, PagePool
from specplug.runtime.memory import MemoryReport, refusing_out_of_memory
from specplug.runtime.progress import Stage
from specplug.runtime.started import Started, start
from specplug.spec import DraftPlan

log = logging.getLogger("specplug")


def assemble(parts: Parts, report: MemoryReport) -> tuple[DeviceExecutor, Drafting | None, str]:
    """Take the buffers, start the drafter and record graphs.

    Returns the executor, the drafting stage if there is one, and why the target runs without graphs (empty
    where it has them). `report` is told in the error of a device that runs out of memory.
    """
    run, model, options, context = parts.run, parts.target.model, parts.options, parts.context
    plan = run.plan if run.plan is not None and run.plan.nodes > 0 else None
    trees = plan is not None and "tree" in plan.needs.shapes
    backend = _backend(parts)
    buckets = Buckets(
        context.slots,
        1 + (plan.nodes if plan else 0),
        max(1, options.max_cuda_graphs // len(backend.kinds(trees))),
    )
    eager = "--disable-cuda-graph" if options.disable_cuda_graph else ""
    if model.recurrent:
        eager = "its recurrent state is kept outside the graph"
    sizes = _sizes(parts, plan, buckets, graphs=not eager)
    statics = Statics(sizes, parts.pages, len(plan.needs.taps) if plan else 0, context.dtype, context.device)
    capturer = None if eager else Capturer(context.device)
    drafting, recorder = None, None
    if plan is not None:
        with progress.stage("start drafter"), refusing_out_of_memory("start drafter", lambda: report):
            started, recorder = _start(parts, statics, buckets, capturer)
        drafting = Drafting(run, started, parts.pages, model.vocab_size, parts.max_tokens)
    decider = Decider(
        options.acceptance,
        context.slots,
        model.vocab_size,
        drafting.proposal if drafting else None,
        rows=context.slots,
        nodes=sizes.nodes,
        depth=sizes.depth,
        device=context.device,
        mean=options.acceptance_mean,
    )
    executor = DeviceExecutor(model, parts.pool, drafting, decider, statics, buckets, backend, recorder)
    with torch.inference_mode():
        if not model.recurrent:  # which runs on the rows of real requests only
            with progress.stage("compile kernels"), refusing_out_of_memory("compile kernels", lambda: report):
                executor.warm_up()
        if capturer is not None:
            with (
                progress.stage("capture graphs") as running,
                refusing_out_of_memory("capture graphs", lambda: report),
            ):
                eager = _capture(executor, capturer, running)
        if drafting is not None and run.depths is not None:
            measure(executor, drafting, list(buckets.rows), context.device)
    return executor, drafting, eager


def _sizes(parts: Parts, plan: DraftPlan | None, buckets: Buckets, *, graphs: bool) -> Sizes:
    slots, model = parts.context.slots, parts.target.model
    nodes = plan.nodes if plan else 0
    return Sizes(
        slots=slots,
        tokens=max(parts.options.chunked_prefill_size + slots * (1 + nodes), buckets.tokens),
        nodes=nodes,
        depth=plan.depth if plan else 0,
        lookahead=plan.lookahead if plan else 1,
        vocab=model.vocab_size,
        hidden=model.hidden_size,
        graph_tokens=buckets.tokens if graphs else 0,
        trees=plan is not None and "tree" in plan.needs.shapes,
        host_drafts=plan is not None and plan.needs.runs_on == {"host"},
    )


def _start(
    parts: Parts, statics: Statics, buckets: Buckets, capturer: Capturer | None
) -> tuple[Started, BucketRecorder]:
    """Start the drafter on the device's views and recorder."""
    views: list[DeviceView] = []
    recorders: list[BucketRecorder] = []

    def view_of(pool: KVPool, pages: PagePool, *, writable: bool) -> DeviceView:
        views.append(DeviceView(pool, pages.trash_row, writable=writable))
        return views[-1]

    def prepare(bucket: Bucket) -> None:
        """Set statics and views to an empty step, for a drafter's callable to be recorded on."""
        prime(statics, bucket)
        for view in views:
            view.begin(statics.rows(*bucket), statics.view(*bucket).kv_len)

    def recorder_for(out: Proposal) -> BucketRecorder:
        assert parts.run.plan is not None
        safe = capturer if parts.run.plan.needs.graph_safe else None
        recorders.append(BucketRecorder(statics, buckets, safe, prepare, out))
        return recorders[-1]

    started = start(
        parts.run,
        parts.target.model,
        parts.context,
        parts.options.acceptance,
        parts.pages,
        parts.pool,
        view_of=view_of,
        recorder_for=recorder_for,
    )
    return started, recorders[-1]


def _backend(parts: Parts) -> Backend:
    if parts.run.facts.attention_backend != "flashinfer":
        return PagedBackend(parts.pool)
    from specplug.runtime.attention.flashinfer import FlashInferBackend

    pages = parts.pages
    return FlashInferBackend(
        parts.pool,
        parts.target.model.kv_layers,
        parts.context.dtype,
        pages.page_size,
        parts.context.slots,
        pages.table.shape[1],
        parts.context.device,
    )


def _capture(executor: DeviceExecutor, capturer: Capturer, running: Stage) -> str:
    """Record the target's graphs; returns why there are none."""
    try:
        executor.capture(capturer, running.at)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as cause:
        # Models that are not ours may look at numbers on their way; they run all the same, one launch at a time.
        log.warning("the target runs without CUDA graphs: its capture failed: %s: %s", type(cause).__name__, cause)
        return f"its capture failed: {type(cause).__name__}: {cause}"
    return ""
