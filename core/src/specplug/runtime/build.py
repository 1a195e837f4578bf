"""From a model's name to everything an engine runs on. Refusals come before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specplug.errors import UserError
from specplug.facts import build_facts, facts_of
from specplug.models.target import Target, load_target
from specplug.options import EngineOptions
from specplug.planning import Run, plan_run
from specplug.registry import Registry
from specplug.runtime.context import EngineContext
from specplug.runtime.draft_kv import scratch_rows
from specplug.runtime.drafting import Drafting
from specplug.runtime.kv import KVPool, PagePool, tokens_that_fit
from specplug.runtime.observers import Observers

KV_BUDGET = 2**30
"""Bytes the KV pool takes at most unless ``--max-total-tokens`` says otherwise."""


@dataclass(frozen=True, slots=True)
class Built:
    """The parts of an engine. Set by `build`."""

    run: Run
    target: Target
    pages: PagePool
    pool: KVPool
    drafting: Drafting | None
    observers: Observers
    max_tokens: int


def build(
    model: str | Target, algorithm: str, config: Mapping[str, Any], options: EngineOptions, registry: Registry
) -> Built:
    """Plan the run, then load the target, size the KV pool and start the drafter."""
    if isinstance(model, Target):
        facts = facts_of(model.checkpoint, options, recurrent=model.model.recurrent or None)
        run = plan_run(registry, algorithm, config, facts)
        target = model
    else:
        facts = build_facts(model, options)
        run = plan_run(registry, algorithm, config, facts)
        target = load_target(
            Path(facts.target.path),
            facts.target,
            dtype=facts.dtype,
            device=facts.device,
            trust_remote_code=options.trust_remote_code,
        )
    dtype, device = getattr(torch, facts.dtype), torch.device(facts.device)
    max_tokens, pages = _sizes(target, options, dtype)
    # A request may hold scratch rows above its last token, so its row of the page table is longer than its text.
    beyond = max(1 + run.plan.nodes, scratch_rows(run.plan.kv)) if run.plan else 1
    table = PagePool(options.max_running_requests, pages, options.page_size, max_tokens + beyond)
    pool = KVPool(target.model.kv_layers, table.rows_with_trash, dtype, device)
    drafting = None
    if run.plan is not None and run.plan.nodes > 0:
        context = EngineContext(run.facts, options.max_running_requests, device, dtype, target.model.vocab_size)
        drafting = Drafting(run, target.model, context, options.acceptance, table, pool)
    observers = Observers.of(registry, run.info)
    return Built(run, target, table, pool, drafting, observers, max_tokens)


def _sizes(target: Target, options: EngineOptions, dtype: torch.dtype) -> tuple[int, int]:
    """Return the most tokens of a request and the pages of the pool."""
    most = target.model.max_position
    asked = options.context_length
    if asked is not None and asked > most:
        raise UserError(f"--context-length {asked} is more than the model's {most} positions: use at most {most}")
    context = asked or most
    total = options.max_total_tokens or min(
        options.max_running_requests * context, tokens_that_fit(target.model.kv_layers, dtype, KV_BUDGET)
    )
    if asked is not None and asked > total:
        raise UserError(
            f"--context-length {asked} does not fit the KV pool of {total} tokens: "
            f"lower it, or raise --max-total-tokens to at least {asked}"
        )
    context = min(context, total)
    return context, -(-total // options.page_size)
