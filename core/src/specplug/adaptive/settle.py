"""Candidates, as an algorithm really offers them: its package is asked for a plan of each depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from specplug.adaptive.depths import SWITCH, Depths, Request, checked_start
from specplug.adaptive.tiers import all_candidates, ladder, one_tier
from specplug.errors import RefusedError
from specplug.settings import Settled, describe
from specplug.spec import DraftPlan, Problem, Refusal, SpecConfig

STEPS, WIDTH = "num_steps", "num_draft_tokens"


class Adapted(NamedTuple):
    """A run made adaptive. Returned by `adapt`."""

    settled: Settled
    plan: DraftPlan
    """Of the deepest candidate: what everything is sized by."""
    depths: Depths | None
    """None: its depth stays fixed, and `warning` says why."""
    trace: tuple[str, ...]
    warning: Problem | None = None


Settle = Callable[[Mapping[str, object]], Settled]
Ask = Callable[[SpecConfig, int | None], DraftPlan | Refusal]


def adapt(
    request: Request,
    given: Mapping[str, object],
    settled: Settled,
    plan: DraftPlan,
    *,
    settle: Settle,
    ask: Ask,
    bug: Callable[[str], RefusedError],
) -> Adapted:
    """Return what a run with `plan` may choose from.

    ``settle(given)`` and ``ask(config, depth)`` are the planner's; ``bug(said)`` makes the error that
    blames the package. Raises RefusedError or UserError where nothing is left to choose.
    """
    if plan.nodes == 0:
        return Adapted(
            settled, plan, None, (), _warning("nothing is drafted with these options, so no depth is chosen")
        )
    typed = next((each.value for each in settled.settings if each.field == STEPS and each.source == "user"), None)
    checked_start(request, typed)
    if not plan.needs.variable_depth:
        return _fixed(request, settled, plan)
    trace: tuple[str, ...] = ()
    if request.tiers is not None:
        settled, trace = _deepened(request, given, settled, settle)
    deepest = ask(settled.config, None)
    wanted = all_candidates(request.tiers) if request.tiers is not None else ladder(plan.depth)
    plans: dict[int, DraftPlan] = {}
    refused: list[str] = []
    for depth in wanted:
        if depth == 0 or (isinstance(deepest, DraftPlan) and depth > deepest.depth and deepest.depth in plans):
            continue  # what is beyond the deepest there is comes to the same
        found = ask(settled.config, depth)
        if isinstance(found, Refusal):
            refused.append(f"adaptive: depth {depth} is left out: {found.reason}")
        elif found.depth > 0:
            plans.setdefault(found.depth, found)
    if not plans:
        why = refused[0].partition(": ")[2] if refused else f"no depth of {', '.join(map(str, wanted))} drafts anything"
        raise RefusedError(f"{SWITCH} finds no depth to choose: {why}: leave it out, or give other candidates")
    whole = plans[max(plans)]
    for depth, each in plans.items():
        over = ", ".join(_beyond(each, whole))
        if over:
            raise bug(f"its plan for depth {depth} has other or more {over} than that for depth {whole.depth}")
    nodes = {0: 0, **{depth: each.nodes for depth, each in sorted(plans.items())}}
    tiers = tuple(tier.with_candidates(nodes) for tier in request.tiers or one_tier([*nodes]))
    union = all_candidates(tiers)
    start = typed if isinstance(typed, int) else plan.depth if request.policy == "cost" else union[len(union) // 2]
    start = max((depth for depth in nodes if depth <= start), default=0)
    depths = Depths(request.policy, nodes, tiers, start, request.measured)
    return Adapted(settled, whole, depths, (*trace, *refused))


def _fixed(request: Request, settled: Settled, plan: DraftPlan) -> Adapted:
    """Return the choice between an algorithm's only depth and none."""
    nodes = {0: 0, plan.depth: plan.nodes}
    tiers = tuple(tier.with_candidates(nodes) for tier in request.tiers or one_tier([*nodes]))
    warning = _warning(f"every round of this algorithm costs the same, so the choice is {plan.depth} or 0")
    return Adapted(settled, plan, Depths(request.policy, nodes, tiers, plan.depth, request.measured), (), warning)


def _deepened(
    request: Request, given: Mapping[str, object], settled: Settled, settle: Settle
) -> tuple[Settled, tuple[str, ...]]:
    """Settle anew with `num_steps` of the deepest candidate, which sizes the run; what was typed is the start."""
    assert request.tiers is not None
    now = {each.field: each for each in settled.settings}
    top = max(all_candidates(request.tiers))
    if now[WIDTH].source == "user":
        top = min(top, settled.config.num_draft_tokens - 1) if settled.config.num_draft_tokens else top
    if STEPS not in now or now[STEPS].value == top or top < 1:
        return settled, ()
    found = settle({**given, STEPS: top})
    because = f"{SWITCH}, its deepest candidate"
    settings = tuple(
        each.model_copy(update={"source": "policy", "because": because}) if each.field == STEPS else each
        for each in found.settings
    )
    line = next(describe(each) for each in settings if each.field == STEPS)
    return Settled(found.config, settings, found.trace, found.warnings), (line,)


def _beyond(plan: DraftPlan, whole: DraftPlan) -> Iterator[str]:
    """Yield the names of what buffers made for `whole` do not hold of `plan`."""
    yield from plan.needs.exceeding(whole.needs)
    for name in ("nodes", "bytes_fixed", "bytes_per_slot"):
        if getattr(plan, name) > getattr(whole, name):
            yield name
    for name in ("lookahead", "catch_up", "reads_back", "max_position"):
        if getattr(plan, name) != getattr(whole, name):
            yield name
    bare = [[group.model_copy(update={"scratch_rows": 0}) for group in each.kv] for each in (plan, whole)]
    if bare[0] != bare[1]:
        yield "kv"


def _warning(said: str) -> Problem:
    return Problem(severity="warning", field="adaptive", message=f"{SWITCH}: {said}")
