"""Plans and options of the kit's sound drafters, and faulty ones."""

from typing import Any

from pydantic import Field

from specplug import Capabilities, DraftPlan, SpecConfig, hookimpl


class Described(SpecConfig):
    """Only the shared option."""


class Undescribed(SpecConfig):
    """An option that nobody explains."""

    mutant_width: int = 3


class Foreign(SpecConfig):
    """An option that could be any package's."""

    width: int = Field(3, description="how wide")


class Lenient(SpecConfig):
    """Takes whatever it is given."""

    model_config = {"extra": "ignore", "frozen": True}  # noqa: RUF012


def sound_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    """Plan a chain on the host."""
    nodes = (config.num_draft_tokens or 4) - 1
    nodes = nodes if depth is None else min(nodes, depth)
    needs = Capabilities(runs_on=frozenset({"host"}), shapes=frozenset({"chain"}))
    return DraftPlan(needs=needs, nodes=nodes, depth=nodes)


def tree_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    """Plan a tree on the host."""
    plan = sound_plan(config, facts, depth)
    needs = plan.needs.model_copy(update={"shapes": frozenset({"tree"})})
    return plan.model_copy(update={"needs": needs})


def fixed_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    """Plan a chain on the host, and memory for one of three drafts."""
    return sound_plan(config, facts, depth).model_copy(update={"bytes_fixed": 12})


def dense_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    """Plan a chain on the device that is drawn from a table."""
    plan = sound_plan(config, facts, depth)
    vocab = facts.target.config.get("vocab_size", 1)
    needs = Capabilities(proposal_probs="dense", graph_safe=True)
    return plan.model_copy(update={"needs": needs, "bytes_fixed": 4 * vocab * vocab})


def raising_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    """Raise where the target's configuration is empty."""
    if not facts.target.config:
        raise KeyError("hidden_size")
    return sound_plan(config, facts, depth)


def wide_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    """Plan one node too many."""
    plan = sound_plan(config, facts, depth)
    return plan.model_copy(update={"nodes": plan.nodes + 1})


def needy_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    """Need what the manifest does not declare."""
    plan = sound_plan(config, facts, depth)
    return plan.model_copy(update={"needs": plan.needs.model_copy(update={"vocab": "mapped"})})


@hookimpl
def defaulted(name: str, facts: Any = None) -> None:
    """Answer nothing, with a default that pluggy ignores."""
    return None
