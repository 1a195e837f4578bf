"""The manifest: what this package offers, and which configurations work. It is read often, so it imports no torch."""

from collections.abc import Sequence

from specplug import AlgorithmSpec, Capabilities, DraftPlan, Facts, Refusal, hookimpl
from specplug_lookback.config import LookbackConfig

NEEDS = Capabilities(runs_on=frozenset({"host"}))
"""It reads tokens as Python numbers; it wants neither hidden states nor KV of its own."""


def plan(config: LookbackConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a chain; `depth` asks for one of at most so many drafts. Return a `Refusal` for what cannot work."""
    nodes = config.num_draft_tokens - 1
    nodes = nodes if depth is None else max(0, min(nodes, depth))
    return DraftPlan(needs=NEEDS, nodes=nodes, depth=nodes)


SPEC = AlgorithmSpec(
    name="lookback",
    api=(1, 0),
    summary="drafts what followed the last words the time before",
    capabilities=NEEDS,
    config_model=LookbackConfig,
    plan=plan,
    drafter="specplug_lookback.drafter:LookbackDrafter",
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer the algorithm."""
    return (SPEC,)
