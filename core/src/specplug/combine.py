"""One plan for several drafters that work as one. Torch-free."""

from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

from specplug.spec import Capabilities, DraftPlan, Refusal, TapRequest

Item = TypeVar("Item")


@overload
def combined_plan(*plans: DraftPlan) -> DraftPlan: ...
@overload
def combined_plan(*plans: DraftPlan | Refusal) -> DraftPlan | Refusal: ...
def combined_plan(*plans: DraftPlan | Refusal) -> DraftPlan | Refusal:
    """Return what `plans` need together: what a drafter that builds them with ``ctx.build`` plans.

    Each is an answer of `Facts.plan_of`; the first refusal among them, which names its part, is the answer to all.
    Needs are united, sizes are the largest, memory is summed. KV layers are numbered in the order of
    `plans`, which must be the order of the calls of ``ctx.build``. Without any plan it is a `ValueError`.
    """
    if not plans:
        raise ValueError("a combined plan needs at least one plan")
    made = [plan for plan in plans if isinstance(plan, DraftPlan)]
    if len(made) < len(plans):
        return next(plan for plan in plans if isinstance(plan, Refusal))
    return _united_plan(made)


def _united_plan(plans: Sequence[DraftPlan]) -> DraftPlan:
    every = [plan.needs for plan in plans]
    taps = tuple(dict.fromkeys(tap for needs in every for tap in needs.taps))
    needs = Capabilities(
        shapes=_united(needs.shapes for needs in every),
        proposal_probs="dense" if any(needs.proposal_probs == "dense" for needs in every) else "one_hot",
        runs_on=_united(needs.runs_on for needs in every),
        taps=taps,
        draft_kv=_united(needs.draft_kv for needs in every),
        borrows=_united(needs.borrows for needs in every),
        vocab="mapped" if any(needs.vocab == "mapped" for needs in every) else "same",
        variable_depth=all(needs.variable_depth for needs in every),
        graph_safe=all(needs.graph_safe for needs in every),
    )
    bounds = [plan.max_position for plan in plans]
    return DraftPlan(
        needs=needs,
        nodes=max(plan.nodes for plan in plans),
        depth=max(plan.depth for plan in plans),
        kv=tuple(layers for plan in plans for layers in plan.kv),
        lookahead=max(plan.lookahead for plan in plans),
        # Each part is kept to its own bound; the whole has one only where every part has.
        max_position=None if None in bounds else max(bound for bound in bounds if bound is not None),
        catch_up="tokens" if all(plan.catch_up == "tokens" for plan in plans) else "taps",
        reads_back=any(plan.reads_back for plan in plans),
        bytes_fixed=sum(plan.bytes_fixed for plan in plans),
        bytes_per_slot=sum(plan.bytes_per_slot for plan in plans),
    )


def _united(sets: Iterable[frozenset[Item]]) -> frozenset[Item]:
    return frozenset(item for one in sets for item in one)


def taps_of(part: Capabilities, whole: Capabilities) -> tuple[int, ...]:
    """Return where the taps of `part` stand among those of `whole`."""
    order: dict[TapRequest, int] = {tap: at for at, tap in enumerate(whole.taps)}
    return tuple(order[tap] for tap in part.taps)
