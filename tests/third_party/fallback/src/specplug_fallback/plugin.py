"""Manifest of the combinator. Torch-free."""

from collections.abc import Sequence

from specplug import AlgorithmSpec, Capabilities, DraftPlan, Facts, Refusal, TapRequest, combined_plan, hookimpl
from specplug_fallback.config import FallbackConfig


def plan(config: FallbackConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan both, and what they need together."""
    return combined_plan(*(facts.plan_of(part.name, part.options, depth, draft=part.draft) for part in config.parts()))


SPEC = AlgorithmSpec(
    name="fallback",
    api=(1, 0),
    summary="two algorithms as one: where the first has no draft, the second drafts",
    capabilities=Capabilities(  # whatever its parts may need
        shapes=frozenset({"chain", "tree", "block"}),
        proposal_probs="dense",
        runs_on=frozenset({"host", "device"}),
        taps=(TapRequest(at="any"),),
        draft_kv=frozenset({"own_layers", "reads_target"}),
        borrows=frozenset({"embed_tokens", "lm_head", "rope"}),
        vocab="mapped",
        variable_depth=True,
        graph_safe=True,
    ),
    config_model=FallbackConfig,
    plan=plan,
    drafter="specplug_fallback.drafter:FallbackDrafter",
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer the combinator."""
    return (SPEC,)
