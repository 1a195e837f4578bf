"""From a model's name to everything an engine runs on. Refusals come before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specplug.adaptive.depths import adaptive_request
from specplug.facts import build_facts, facts_of
from specplug.models.target import Target, load_target
from specplug.options import EngineOptions
from specplug.planning import Run, plan_run
from specplug.registry import Registry
from specplug.runtime import progress
from specplug.runtime.context import EngineContext
from specplug.runtime.demand import demand_of, model_bytes, weight_bytes
from specplug.runtime.draft_kv import scratch_rows
from specplug.runtime.drafting import Drafting
from specplug.runtime.executor import Executor
from specplug.runtime.host import HostExecutor
from specplug.runtime.kv import KVPool, PagePool
from specplug.runtime.memory import MemoryReport, device_memory, memory_report, refusing_out_of_memory, size_pool
from specplug.runtime.observers import Observers
from specplug.runtime.started import start


@dataclass(frozen=True, slots=True)
class Parts:
    """What an executor is assembled from, wherever it runs. Set by `build`."""

    run: Run
    target: Target
    options: EngineOptions
    context: EngineContext
    pages: PagePool
    pool: KVPool
    max_tokens: int
    """Most tokens of a request, prompt and output."""


@dataclass(frozen=True, slots=True)
class Built:
    """The parts of an engine. Set by `build`."""

    parts: Parts
    executor: Executor
    drafting: Drafting | None
    observers: Observers
    memory: MemoryReport
    eager: str
    """Why the target runs without CUDA graphs; empty where it has them, and on a CPU."""


def build(
    model: str | Target, algorithm: str, config: Mapping[str, Any], options: EngineOptions, registry: Registry
) -> Built:
    """Plan the run, then load the target, size the KV pool, start the drafter and record graphs."""
    begin = perf_counter()
    run, target = _loaded(model, algorithm, config, options, registry)
    facts = run.facts
    dtype, device = getattr(torch, facts.dtype), torch.device(facts.device)
    demand = demand_of(
        run.plan,
        options,
        weights=model_bytes(target.model),
        kv_token=KVPool.bytes_per_token(target.model.kv_layers, dtype),
        vocab=target.model.vocab_size,
        hidden=target.model.hidden_size,
        intermediate=int(target.model.config.get("intermediate_size") or 4 * target.model.hidden_size),
        itemsize=dtype.itemsize,
        draft_weights=(weight_bytes(run.draft, dtype.itemsize) or 0) if run.draft else 0,
        on_device=device.type != "cpu",
    )
    available = device_memory(device)
    size = size_pool(target.model.max_position, demand, options, available)
    report = memory_report(demand, size, options, available)
    # A request may hold scratch rows above its last token, so its row of the page table is longer than its text.
    beyond = max(1 + run.plan.nodes, scratch_rows(run.plan.kv)) if run.plan else 1
    pages = PagePool(options.max_running_requests, size.pages, options.page_size, size.max_tokens + beyond)
    with _stage("allocate KV pages", device), refusing_out_of_memory("allocate KV pages", lambda: report):
        pool = KVPool(target.model.kv_layers, pages.rows_with_trash, dtype, device)
    context = EngineContext(run.facts, options.max_running_requests, device, dtype, target.model.vocab_size)
    parts = Parts(run, target, options, context, pages, pool, size.max_tokens)
    assemble = _on_host if device.type == "cpu" else _on_device
    executor, drafting, eager = assemble(parts, report)
    if device.type != "cpu":
        progress.ready(perf_counter() - begin, report.lines())
    return Built(parts, executor, drafting, Observers.of(registry, run.info), report, eager)


def _stage(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Announce a stage of a start that takes a while; on a CPU a start says nothing."""
    return nullcontext() if device.type == "cpu" else progress.stage(name)


def _loaded(
    model: str | Target, algorithm: str, config: Mapping[str, Any], options: EngineOptions, registry: Registry
) -> tuple[Run, Target]:
    adaptive = adaptive_request(options)
    if isinstance(model, Target):
        weight = next(chain(model.model.parameters(), model.model.buffers()), None)
        at_hand = None if weight is None else (weight.device.type, str(weight.dtype).removeprefix("torch."))
        facts = facts_of(
            model.checkpoint,
            options,
            draft_files=registry.draft_files,
            recurrent=model.model.recurrent or None,
            at_hand=at_hand,
        )
        return plan_run(registry, algorithm, config, facts, adaptive), model
    facts = build_facts(model, options, draft_files=registry.draft_files)
    run = plan_run(registry, algorithm, config, facts, adaptive)
    with _stage("load weights", torch.device(facts.device)), refusing_out_of_memory("load weights"):
        target = load_target(
            Path(facts.target.path),
            facts.target,
            dtype=facts.dtype,
            device=facts.device,
            trust_remote_code=options.trust_remote_code,
            load_format=options.load_format,
        )
    return run, target


Assembled = tuple[Executor, Drafting | None, str]


def _on_host(parts: Parts, report: MemoryReport) -> Assembled:
    model, options = parts.target.model, parts.options
    drafting = None
    if parts.run.plan is not None and parts.run.plan.nodes > 0:
        started = start(parts.run, model, parts.context, options.acceptance, parts.pages, parts.pool)
        drafting = Drafting(parts.run, started, parts.pages, model.vocab_size, parts.max_tokens)
    executor = HostExecutor(model, parts.pages, parts.pool, drafting, options.acceptance, options.acceptance_mean)
    return executor, drafting, ""


def _on_device(parts: Parts, report: MemoryReport) -> Assembled:
    from specplug.runtime.device.assemble import assemble

    return assemble(parts, report)
