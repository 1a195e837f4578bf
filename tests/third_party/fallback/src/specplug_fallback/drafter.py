"""Both drafters, one after the other: the core lets each fill only rows without a draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specplug import (
    Arena,
    DraftContext,
    Drafter,
    DraftPlan,
    GraphRecorder,
    HostProposal,
    Proposal,
    RequestView,
    StepView,
    TargetView,
)
from specplug_fallback.config import FallbackConfig


class FallbackDrafter(Drafter):
    """Hands everything on to its parts, in the order in which they were planned."""

    def __init__(self, config: FallbackConfig, plan: DraftPlan, ctx: DraftContext) -> None:
        super().__init__(config, plan, ctx)
        self.parts = [ctx.build(name, options) for name, options in config.parts()]

    def load(self, target: TargetView) -> None:
        """Load both."""
        for part in self.parts:
            part.load(target)

    def allocate(self, arena: Arena) -> None:
        """Take what both need."""
        for part in self.parts:
            part.allocate(arena)

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both."""
        for part in self.parts:
            part.capture(graphs)

    def on_admit(self, request: RequestView) -> None:
        """Reset the slot in both."""
        for part in self.parts:
            part.on_admit(request)

    def ingest(self, step: StepView) -> None:
        """Let both follow the text, whoever drafts."""
        for part in self.parts:
            part.ingest(step)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Ask the first, then the other for the rows that are left."""
        for part in self.parts:
            part.propose(step, out)

    def on_release(self, slot: int, reason: Any) -> None:
        """Free the slot in both."""
        for part in self.parts:
            part.on_release(slot, reason)

    def metrics(self) -> Mapping[str, float]:
        """Return the counters of both."""
        return {name: value for part in self.parts for name, value in part.metrics().items()}

    def close(self) -> None:
        """Close both."""
        for part in self.parts:
            part.close()
