"""Manifest of the package: its algorithms, and what the word NEXTN means. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import Any

from specplug import AlgorithmSpec, Claim, Defaults, DraftPlan, Facts, Problem, Refusal, hookimpl
from specplug_mtp import builtin_plan, frozen_plan, names


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer both ways of drafting."""
    return (builtin_plan.SPEC, frozen_plan.SPEC)


@hookimpl
def specplug_resolve_name(name: str, facts: Facts) -> Claim | Refusal | None:
    """Say what NEXTN and EAGLE mean for these models."""
    return names.resolve(name, facts)


@hookimpl
def specplug_defaults(algorithm: str, given: Mapping[str, Any], facts: Facts) -> Defaults | None:
    """Draft as far as the checkpoint or `num_draft_tokens` says."""
    if algorithm == builtin_plan.NAME:
        return builtin_plan.defaults(given, facts)
    return frozen_plan.defaults(given) if algorithm == frozen_plan.NAME else None


@hookimpl
def specplug_check(algorithm: str, config: Any, plan: DraftPlan, facts: Facts) -> Sequence[Problem]:
    """Say what works but is hardly meant."""
    if algorithm == builtin_plan.NAME:
        return tuple(builtin_plan.objections(config, facts))
    return tuple(frozen_plan.objections(config)) if algorithm == frozen_plan.NAME else ()
