"""Scripted drafters: a plugin whose drafts are known in advance, right or wrong as told. Torch-free manifest.

Found through a stub distribution that `specplug.testing.registry.bench_registry` writes; never installed.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from specplug import AlgorithmSpec, Capabilities, DraftPlan, Facts, Refusal, SpecConfig, hookimpl

Behaviour = Literal[
    "right",
    "wrong",
    "right_then_wrong",
    "empty",
    "ragged",
    "too_long",
    "negative_id",
    "huge_id",
    "bad_parents",
    "raise_ingest",
    "raise_propose",
    "random_tree",
    "duplicates",
    "hostile",
]
_TREES = frozenset({"random_tree", "duplicates", "bad_parents", "hostile"})


class ScriptedConfig(SpecConfig):
    """What to propose, and what follows what."""

    num_draft_tokens: int | None = Field(6, ge=1, le=64, description="nodes verified per step, the root counted")
    scripted_behaviour: Behaviour = Field("right", description="what becomes of the known continuation")
    scripted_texts: tuple[tuple[int, ...], ...] = Field(
        (), description="whole sequences, prompt and output; drafts continue the one that the request is a prefix of"
    )
    scripted_n: int = Field(
        1, ge=0, description="right_then_wrong: right drafts; raise_*: calls before the one that fails"
    )
    scripted_seed: int = Field(
        0, ge=0, description="of random_tree and hostile; with the request's text it decides all"
    )


class DenseConfig(SpecConfig):
    """What the drafts of the sampled variant are drawn from."""

    num_draft_tokens: int | None = Field(4, ge=1, le=64, description="nodes verified per step, the root counted")
    scripted_seed: int = Field(0, ge=0, description="of the table of draft logits, looked up by the token before")
    scripted_spread: float = Field(1.5, ge=0.0, description="standard deviation of the draft logits; 0 is uniform")


def _nodes(config: SpecConfig, depth: int | None) -> int:
    nodes = (config.num_draft_tokens or 6) - 1
    return nodes if depth is None else max(0, min(nodes, depth))


def plan_host(config: ScriptedConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan ``num_draft_tokens - 1`` nodes on the host, a tree where the behaviour needs one."""
    return _plan(config, facts, depth, "host")


def plan_device(config: ScriptedConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan the same on the device."""
    return _plan(config, facts, depth, "device")


def _plan(
    config: ScriptedConfig, facts: Facts, depth: int | None, where: Literal["host", "device"]
) -> DraftPlan | Refusal:
    tree = config.scripted_behaviour in _TREES
    if tree and "tree_verify" not in facts.features:
        return Refusal(reason=f"{config.scripted_behaviour} drafts trees, which this target cannot verify")
    nodes = _nodes(config, depth)
    needs = Capabilities(
        shapes=frozenset({"tree" if tree else "chain"}), runs_on=frozenset({where}), variable_depth=True
    )
    return DraftPlan(needs=needs, nodes=nodes, depth=nodes)


def plan_dense(config: DenseConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a chain of ``num_draft_tokens - 1`` sampled drafts."""
    vocab = facts.target.config.get("vocab_size")
    if not isinstance(vocab, int):
        return Refusal(reason="the target's config names no vocab_size, which sizes the table of draft logits")
    nodes = _nodes(config, depth)
    needs = Capabilities(proposal_probs="dense", variable_depth=True)
    # The table [V, V], float32.
    return DraftPlan(needs=needs, nodes=nodes, depth=nodes, bytes_fixed=4 * vocab * vocab)


_DRAFTERS = "specplug.testing.scripted_drafters"
_BOTH = frozenset({"chain", "tree"})

HOST = AlgorithmSpec(
    name="scripted",
    api=(1, 0),
    summary="drafts known in advance, as a host drafter",
    capabilities=Capabilities(shapes=_BOTH, runs_on=frozenset({"host"}), variable_depth=True),
    config_model=ScriptedConfig,
    plan=plan_host,
    drafter=f"{_DRAFTERS}:HostScripted",
)
DEVICE = AlgorithmSpec(
    name="scripted-device",
    api=(1, 0),
    summary="drafts known in advance, as a device drafter",
    capabilities=Capabilities(shapes=_BOTH, variable_depth=True),
    config_model=ScriptedConfig,
    plan=plan_device,
    drafter=f"{_DRAFTERS}:DeviceScripted",
)
DENSE = AlgorithmSpec(
    name="scripted-dense",
    api=(1, 0),
    summary="a chain drawn through the core from a table of logits",
    capabilities=Capabilities(proposal_probs="dense", variable_depth=True),
    config_model=DenseConfig,
    plan=plan_dense,
    drafter=f"{_DRAFTERS}:DenseScripted",
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer the three."""
    return (HOST, DEVICE, DENSE)
