"""A drafter inside another one: it sees what its own plan describes, and cannot tell that it is not alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch

from specplug.combine import taps_of
from specplug.drafter import (
    Arena,
    DraftContext,
    Drafter,
    GraphRecorder,
    HostRow,
    HostView,
    RequestView,
    StepView,
    TargetView,
)
from specplug.planning import Run, load_drafter_class
from specplug.proposal import HostProposal, Proposal, proposal_to_write
from specplug.runtime.arena import DraftArena
from specplug.runtime.context import EngineContext, GrantedTarget
from specplug.runtime.graphs import EagerRecorder
from specplug.spec import Release


class Part(Drafter):
    """What ``ctx.build`` returns: another algorithm's drafter, its own proposal, and the views that narrow the step."""

    def __init__(self, run: Run, ctx: EngineContext, prefix: str, first_layer: int) -> None:
        """`prefix` keeps its names apart from its siblings'; `first_layer`: its first KV layer among the whole's."""
        assert run.plan is not None
        assert run.installed is not None
        super().__init__(run.config, run.plan, cast(DraftContext, ctx))
        self._name = f"{run.installed.distribution} {run.installed.version} ({run.algorithm})"
        self._prefix = prefix
        self._first_layer = first_layer
        self._drafter: Drafter = load_drafter_class(run)(run.config, run.plan, ctx)

    @property
    def kv_layers(self) -> int:
        """KV layers of its plan."""
        return sum(group.layers for group in self.plan.kv)

    def load(self, target: TargetView) -> None:
        whole, needs = cast(GrantedTarget, target), self.plan.needs
        # The other two fields promise something; a whole that cannot promise it may hold a part that can.
        over = [name for name in needs.exceeding(whole.needs) if name not in ("variable_depth", "graph_safe")]
        if over:
            raise RuntimeError(
                f"{self._name} needs more {', '.join(over)} than the plan it is a part of: make that with combined_plan"
            )
        self._taps = taps_of(needs, whole.needs)
        self._drafter.load(cast(TargetView, whole.part(needs, self._prefix)))

    def allocate(self, arena: Arena) -> None:
        ctx, needs = cast(EngineContext, self.ctx), self.plan.needs
        self._own = Proposal(
            ctx.slots,
            max(self.plan.nodes, 1),
            ctx.vocab,
            rule=ctx.rule,
            dense=needs.proposal_probs == "dense",
            device=ctx.device,
        )
        self._out = proposal_to_write(self._own, needs)
        self._drafter.allocate(cast(DraftArena, arena).part(self._prefix, self.plan, self._name, self._first_layer))

    def capture(self, graphs: GraphRecorder) -> None:
        self._drafter.capture(EagerRecorder())  # a graph would read the whole's step and proposal, not its own

    def on_admit(self, request: RequestView) -> None:
        self._own.reset(request.slot)
        self._drafter.on_admit(request)

    def ingest(self, step: StepView) -> None:
        self._drafter.ingest(self._narrowed(step))

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Fill the rows of `out` (of ``out.host`` for a drafter of the host) that have no draft yet."""
        own = self._out
        if isinstance(own, HostProposal):
            host = out if isinstance(out, HostProposal) else out.host
            assert host is not None
            own.num_valid[:] = 0
            own.limit[:] = host.limit.clip(max=self.plan.nodes)
            self._drafter.propose(self._narrowed(step), own)
            for slot in step.slots.tolist():
                count = min(int(own.num_valid[slot]), int(own.limit[slot]))
                if count > 0 and host.num_valid[slot] <= 0:
                    host.set(slot, own.tokens[slot, :count].tolist(), own.parents[slot, :count].tolist())
            return
        assert isinstance(out, Proposal)
        own.num_valid.zero_()
        own.limit.copy_(out.limit.clamp(max=self.plan.nodes))
        if self.plan.max_position is not None:
            room = (self.plan.max_position - step.kv_len).clamp_min(0)
            own.limit[step.slots] = own.limit[step.slots].minimum(room)
        if own.host is not None:
            own.host.num_valid[:] = 0
            own.host.limit[:] = own.limit.cpu().numpy()
        self._drafter.propose(self._narrowed(step), own)
        own.merge_host()
        own.num_valid.copy_(own.num_valid.minimum(own.limit))
        free = (out.num_valid[step.slots] <= 0) & (own.num_valid[step.slots] > 0)
        out.take(own, torch.where(free, step.slots, len(out.limit) - 1))

    def on_release(self, slot: int, reason: Release) -> None:
        self._drafter.on_release(slot, reason)

    def metrics(self) -> Mapping[str, float]:
        """Return the drafter's counters, named with the prefix."""
        return {self._prefix + name: value for name, value in self._drafter.metrics().items()}

    def close(self) -> None:
        self._drafter.close()

    def _narrowed(self, step: StepView) -> StepView:
        """Return the step as the drafter's own plan describes it."""
        host, plan = None, self.plan
        if "host" in plan.needs.runs_on:
            assert step.host is not None
            host = HostView([_within(row, plan.nodes) for row in step.host.rows])
        return dataclasses.replace(
            step,
            positions=step.positions if plan.max_position is None else step.positions.clamp_max(plan.max_position),
            next_tokens=step.next_tokens[:, : plan.lookahead],
            taps=tuple(step.taps[at] for at in self._taps),
            depth=min(step.depth, plan.depth),
            host=host,
        )


def _within(row: HostRow, nodes: int) -> HostRow:
    return row._replace(limit=min(row.limit, nodes))
