"""A drafter that drafts the same nodes every time: what verifying them costs, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specplug import (
    AlgorithmSpec,
    Capabilities,
    Drafter,
    DraftPlan,
    Facts,
    Proposal,
    SpecConfig,
    StepView,
    hookimpl,
)


class FixedConfig(SpecConfig):
    """Options of the fixed drafter."""

    fixed_breadth: int = 1


def _plan(config: FixedConfig, facts: Facts, depth: int | None) -> DraftPlan:
    nodes = (config.num_draft_tokens or 8) - 1
    shape = "tree" if config.fixed_breadth > 1 else "chain"
    needs = Capabilities(shapes=frozenset({shape}))
    return DraftPlan(needs=needs, nodes=nodes, depth=-(-nodes // config.fixed_breadth))


SPEC = AlgorithmSpec(
    name="fixed",
    api=(1, 0),
    summary="drafts the same nodes every time, to measure what verifying them costs",
    capabilities=Capabilities(shapes=frozenset({"chain", "tree"})),
    config_model=FixedConfig,
    plan=_plan,
    drafter=f"{__name__}:FixedDrafter",
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer it."""
    return (SPEC,)


class FixedDrafter(Drafter):
    """`fixed_breadth` chains side by side below the root, of ascending token ids."""

    def propose(self, step: StepView, out: Proposal) -> None:
        nodes, breadth = self.plan.nodes, self.config.fixed_breadth
        node = torch.arange(nodes, device=step.slots.device)
        out.tokens[step.slots] = node
        out.parents[step.slots] = torch.where(node < breadth, -1, node - breadth)
        out.num_valid[step.slots] = out.limit[step.slots]
