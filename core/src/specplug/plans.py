"""What a package answers when it is asked for a plan, held to its manifest and to the contract. Torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specplug.errors import RefusedError
from specplug.manifests import RESERVED
from specplug.settings import shown
from specplug.spec import DraftPlan, Facts, Refusal, SpecConfig, TapRequest

if TYPE_CHECKING:
    from specplug.registry import Installed

_FEATURES = {
    "rollback": "taking back the KV of rejected drafts, which a target with recurrent state cannot",
    "tree_verify": "verifying several branches at once",
    "taps": "reading hidden states of the target",
    "own_kv": "keeping KV of the drafter's own on the target's pages",
    "read_kv": "reading the target's KV",
}


def bug(installed: "Installed", said: str) -> RefusedError:
    """Return the refusal of a run for a fault that is not the user's, naming whose it is."""
    who = f"{installed.distribution} {installed.version}"
    return RefusedError(f"{installed.spec.name!r} cannot be used, a fault of {who}: {said}; report it to its authors")


def ask(installed: "Installed", config: SpecConfig, facts: Facts, depth: int | None = None) -> DraftPlan | Refusal:
    """Call a package's `plan`, and hold the answer to what its manifest and the contract allow."""
    spec = installed.spec
    try:
        plan = spec.plan(config, facts, depth)
    except Exception as error:
        raise bug(installed, f"plan raised {type(error).__name__}: {shown(str(error))}") from error
    if isinstance(plan, Refusal):
        return plan
    if not isinstance(plan, DraftPlan):
        raise bug(installed, f"plan returned {shown(plan)}, neither a DraftPlan nor a Refusal")
    faults = list(_faults(plan, config))
    over = plan.needs.exceeding(spec.capabilities)
    if over:
        faults.insert(0, f"its plan needs more {', '.join(over)} than its manifest declares")
    if faults:
        raise bug(installed, "; ".join(faults))
    return plan


def _faults(plan: DraftPlan, config: SpecConfig) -> Iterator[str]:
    if plan.depth > plan.nodes or (plan.nodes > 0 and plan.depth == 0):
        yield f"its plan drafts {plan.nodes} tokens with a longest path of {plan.depth}"
    if config.num_draft_tokens is not None and plan.nodes >= config.num_draft_tokens:
        yield f"its plan drafts {plan.nodes} tokens where num_draft_tokens {config.num_draft_tokens} leaves one fewer"
    if TapRequest(at="any") in plan.needs.taps:
        yield "its plan asks for a tap without saying which"
    if plan.catch_up == "tokens" and plan.needs.taps:
        yield "its plan catches up from tokens and still needs taps"


def features_needed(plan: DraftPlan) -> tuple[str, ...]:
    """Return the entries of `Facts.features` without which this plan cannot run."""
    needs = plan.needs
    wanted = {
        "rollback": plan.nodes > 0,
        "tree_verify": "tree" in needs.shapes,
        "taps": bool(needs.taps),
        "own_kv": bool(plan.kv) or "own_layers" in needs.draft_kv,
        "read_kv": "reads_target" in needs.draft_kv,
    }
    return (*(name for name, needed in wanted.items() if needed), *(f"borrow:{part}" for part in sorted(needs.borrows)))


def check_features(installed: "Installed", plan: DraftPlan, facts: Facts) -> None:
    """Raise `RefusedError` where the target and the host lack what the plan needs."""
    missing = [name for name in features_needed(plan) if name not in facts.features]
    if not missing:
        return
    why = "; ".join(f"{name} ({_FEATURES.get(name, 'sharing a module of the target')})" for name in missing)
    has = ", ".join(sorted(facts.features)) or "nothing of the kind"
    raise RefusedError(
        f"{installed.spec.name!r} needs what this target and host do not offer: {why}; they offer {has}: "
        f"choose options or an algorithm that need no more, or --speculative-algorithm {RESERVED}"
    )


def sentence(reason: str, try_instead: str) -> str:
    """Return a reason with its way out, where there is one."""
    return f"{reason}: try {try_instead}" if try_instead else reason
