"""A drafter brought to life: constructed, loaded and with its memory taken. The engine and the kit start one alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from specplug.accept import Rule
from specplug.drafter import Drafter
from specplug.models.base import TargetModel
from specplug.planning import Run, load_drafter_class
from specplug.proposal import HostProposal, Proposal, proposal_to_write
from specplug.runtime.arena import DraftArena
from specplug.runtime.context import EngineContext, GrantedTarget
from specplug.runtime.draft_kv import PagedView, StepRows, geometries
from specplug.runtime.graphs import EagerRecorder
from specplug.runtime.kv import KVPool, PagePool


@dataclass(frozen=True, slots=True)
class Started:
    """A drafter and everything the core keeps for it. Set by `start`."""

    drafter: Drafter
    proposal: Proposal
    out: Proposal | HostProposal
    """What `propose` is given to write."""
    arena: DraftArena
    views: tuple[PagedView, ...]
    """The target's KV, then the drafter's own if it has any."""

    def begin(self, where: StepRows) -> None:
        """Tell the KV views where the rows of a new step stand."""
        for view in self.views:
            view.begin(where)


def start(
    run: Run, model: TargetModel, context: EngineContext, rule: Rule, pages: PagePool, pool: KVPool, owner: str
) -> Started:
    """Start the drafter of `run`, whose plan drafts at least one node. `pages` and `pool` are the target's."""
    assert run.plan is not None
    plan, needs = run.plan, run.plan.needs
    proposal = Proposal(
        context.slots,
        max(plan.nodes, 1),
        model.vocab_size,
        rule=rule,
        dense=needs.proposal_probs == "dense",
        device=context.device,
    )
    views = [PagedView(pool, pages, writable=False)]
    own = None
    if plan.kv:
        layers = KVPool(geometries(plan.kv), pages.rows_with_trash, context.dtype, context.device)
        own = PagedView(layers, pages, writable=True)
        views.append(own)
    arena = DraftArena(plan, context.slots, context.device, owner, own)
    drafter: Drafter = load_drafter_class(run)(run.config, plan, dataclasses.replace(context, rule=rule))
    drafter.load(GrantedTarget(model, needs, views[0]))
    drafter.allocate(arena)
    drafter.capture(EagerRecorder())
    return Started(drafter, proposal, proposal_to_write(proposal, needs), arena, tuple(views))
