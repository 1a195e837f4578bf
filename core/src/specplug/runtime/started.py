"""A drafter brought to life: constructed, loaded and with its memory taken. The engine and the kit start one alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from specplug.accept import Rule
from specplug.drafter import Drafter, GraphRecorder, KVView
from specplug.models.base import TargetModel
from specplug.planning import Run, load_drafter_class
from specplug.proposal import HostProposal, Proposal, proposal_to_write
from specplug.runtime.arena import DraftArena
from specplug.runtime.context import EngineContext, GrantedTarget
from specplug.runtime.draft_kv import PagedView, geometries
from specplug.runtime.graphs import EagerRecorder
from specplug.runtime.kv import KVPool, PagePool


class StepKV(KVView, Protocol):
    """A `KVView` that is told of each step."""

    def begin(self, *where: Any) -> None:
        """Take over the rows of a new step, before `ingest`."""


@dataclass(frozen=True, slots=True)
class Started:
    """A drafter and everything the core keeps for it. Set by `start`."""

    drafter: Drafter
    proposal: Proposal
    out: Proposal | HostProposal
    """What `propose` is given to write."""
    arena: DraftArena
    views: tuple[StepKV, ...]
    """The target's KV, then the drafter's own if it has any."""
    draft_bytes: int
    """Bytes of the drafter's own KV."""

    def begin(self, *where: Any) -> None:
        """Tell the KV views where the rows of a new step stand, in the words of their kind."""
        for view in self.views:
            view.begin(*where)


def owner_of(run: Run) -> str:
    """Return distribution, version and algorithm, as errors name them."""
    assert run.installed is not None
    return f"{run.installed.distribution} {run.installed.version} ({run.algorithm})"


def start(
    run: Run,
    model: TargetModel,
    context: EngineContext,
    rule: Rule,
    pages: PagePool,
    pool: KVPool,
    *,
    view_of: Callable[..., StepKV] = PagedView,
    recorder_for: Callable[[Proposal], GraphRecorder] = lambda _: EagerRecorder(),
) -> Started:
    """Start the drafter of `run`, whose plan drafts at least one node. `pages` and `pool` are the target's.

    ``view_of(pool, pages, writable=...)`` makes the views of its KV, and `recorder_for` what records its
    callables; on a CPU both are plain.
    """
    assert run.plan is not None
    plan, needs = run.plan, run.plan.needs
    # Where acceptance only measures cost, drafts are drawn as they usually are.
    drawn: Literal["coupled", "rejection"] = "coupled" if rule == "synthetic" else rule
    proposal = Proposal(
        context.slots,
        max(plan.nodes, 1),
        model.vocab_size,
        rule=drawn,
        dense=needs.proposal_probs == "dense",
        device=context.device,
    )
    views = [view_of(pool, pages, writable=False)]
    own = None
    layers = KVPool(geometries(plan.kv), pages.rows_with_trash, context.dtype, context.device)
    if plan.kv:
        own = view_of(layers, pages, writable=True)
        views.append(own)
    arena = DraftArena(plan, context.slots, context.device, owner_of(run), own)
    drafter: Drafter = load_drafter_class(run)(run.config, plan, dataclasses.replace(context, rule=drawn))
    drafter.load(GrantedTarget(model, needs, views[0]))
    drafter.allocate(arena)
    drafter.capture(recorder_for(proposal))
    size = pages.rows_with_trash * KVPool.bytes_per_token(layers.layers, context.dtype)
    return Started(drafter, proposal, proposal_to_write(proposal, needs), arena, tuple(views), size)
