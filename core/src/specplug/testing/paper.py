"""Paper drafters: toys with random weights, each using one thing that a real family of drafters needs.

They keep the contract honest before anything is built on it, and show an author the shape of a drafter
in few lines. Torch-free manifest, found through a stub distribution that `paper_registry` writes; never
installed. Their targets are the decoders of `specplug.testing.targets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from specplug import (
    AlgorithmSpec,
    Capabilities,
    DraftPlan,
    Facts,
    KVLayers,
    Refusal,
    SpecConfig,
    TapRequest,
    combined_plan,
    hookimpl,
)

if TYPE_CHECKING:
    from specplug.registry import Registry

HEADS = 2
"""Query and KV heads of the toys' own attention; their K is as wide as the target's heads, so that its rotary fits."""
V_DIM = 4
FLOAT, INT = 4, 8
"""Bytes of a float32 and an int64."""


class PaperConfig(SpecConfig):
    """Options of all of them."""

    num_draft_tokens: int | None = Field(4, ge=1, le=64, description="nodes verified per step, the root counted")
    paper_seed: int = Field(0, ge=0, description="of the random weights")
    paper_max_position: int | None = Field(None, ge=1, description="last token index that is drafted (paper-shifted)")


class TreeConfig(PaperConfig):
    """Options of the tree."""

    num_draft_tokens: int | None = Field(8, ge=1, le=64, description="nodes verified per step, the root counted")
    num_steps: int = Field(3, ge=1, le=8, description="draft forwards, one level of the tree each")
    paper_topk: int = Field(3, ge=1, le=8, description="nodes expanded per level, and children of each")


class SelfConfig(PaperConfig):
    """Options of the drafter that is the target."""

    paper_decoys: bool = Field(False, description="a wrong sibling before each right node, which makes a tree")


class CombinedConfig(PaperConfig):
    """What is combined."""

    paper_parts: tuple[str, ...] = Field(
        ("paper-shifted", "paper-block"), min_length=1, description="algorithms, the first with a draft wins"
    )
    paper_options: tuple[Mapping[str, Any], ...] = Field((), description="options of each part, in the same order")

    def part_options(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (algorithm, options) of each part."""
        given = [*self.paper_options, *({} for _ in self.paper_parts)]
        width = {} if self.num_draft_tokens is None else {"num_draft_tokens": self.num_draft_tokens}
        return [(name, {**width, **options}) for name, options in zip(self.paper_parts, given, strict=False)]


Plan = Callable[[Any, Facts, int | None], DraftPlan | Refusal]


def _nodes(config: SpecConfig, depth: int | None, most: int = 64) -> int:
    nodes = min((config.num_draft_tokens or 4) - 1, most)
    return nodes if depth is None else max(0, min(nodes, depth))


def _size(facts: Facts, name: str) -> int:
    value = facts.target.config.get(name)
    return value if isinstance(value, int) else 0


def _decoders_only(plan: Plan) -> Plan:
    """Refuse targets whose config does not say the sizes that every toy is built from."""

    def checked(config: Any, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
        missing = [name for name in ("hidden_size", "head_dim", "vocab_size") if not _size(facts, name)]
        if missing:
            return Refusal(reason=f"the target's config names no {', '.join(missing)}", try_instead="a decoder")
        return plan(config, facts, depth)

    return checked


def _own_layers(facts: Facts, layers: int, scratch_rows: int) -> tuple[KVLayers, ...]:
    sizes = {"kv_heads": HEADS, "k_dim": _size(facts, "head_dim"), "v_dim": V_DIM}
    return (KVLayers(layers=layers, **sizes, scratch_rows=scratch_rows),)


_BORROWS: frozenset[Literal["embed_tokens", "lm_head", "rope"]] = frozenset({"embed_tokens", "lm_head", "rope"})
_OWN: frozenset[Literal["own_layers", "reads_target"]] = frozenset({"own_layers"})
_FINAL = (TapRequest(at="final_norm"),)
_SHIFTED = Capabilities(taps=_FINAL, draft_kv=_OWN, borrows=_BORROWS, variable_depth=True)
_TREE = _SHIFTED.model_copy(update={"shapes": frozenset({"tree"})})
_READER = Capabilities(taps=_FINAL, draft_kv=frozenset({"reads_target"}), borrows=_BORROWS, variable_depth=True)
_BLOCK = Capabilities(
    shapes=frozenset({"block"}),
    proposal_probs="dense",
    taps=(TapRequest(at=2), TapRequest(at=1)),
    draft_kv=_OWN,
    borrows=_BORROWS,
)
_SELF = Capabilities(shapes=frozenset({"chain", "tree"}), draft_kv=_OWN, variable_depth=True)
_COMBINED = Capabilities(
    shapes=frozenset({"chain", "tree", "block"}),
    proposal_probs="dense",
    runs_on=frozenset({"device", "host"}),
    taps=(TapRequest(at="any"),),
    draft_kv=frozenset({"own_layers", "reads_target"}),
    borrows=_BORROWS,
    variable_depth=True,
)


def plan_shifted(config: PaperConfig, facts: Facts, depth: int | None) -> DraftPlan:
    """Plan a chain: the first draft comes out of `ingest`, each further one writes a scratch row."""
    nodes = _nodes(config, depth)
    state = FLOAT * _size(facts, "hidden_size") + INT
    kv = _own_layers(facts, 1, max(nodes - 1, 0))
    return DraftPlan(
        needs=_SHIFTED, nodes=nodes, depth=nodes, kv=kv, bytes_per_slot=state, max_position=config.paper_max_position
    )


def plan_tree(config: TreeConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan the best nodes of `num_steps` levels; every level but the last is drafted from, in scratch rows."""
    topk = config.paper_topk
    if topk > _size(facts, "vocab_size"):
        return Refusal(reason=f"paper_topk {topk} is more than the target's vocabulary")
    wanted = (config.num_draft_tokens or 8) - 1
    steps = min(config.num_steps if depth is None else min(config.num_steps, depth), wanted)
    nodes = 0 if steps == 0 else min(wanted, topk + (steps - 1) * topk * topk)
    steps = min(steps, nodes)
    state = FLOAT * _size(facts, "hidden_size")
    kv = _own_layers(facts, 1, max(steps - 1, 0) * topk)
    return DraftPlan(needs=_TREE, nodes=nodes, depth=steps, kv=kv, bytes_per_slot=state)


def plan_chained(config: PaperConfig, facts: Facts, depth: int | None) -> DraftPlan:
    """Plan one draft per head, two heads at most; head 2 needs the token after the next."""
    nodes = _nodes(config, depth, most=2)
    state = FLOAT * _size(facts, "hidden_size")
    kv = _own_layers(facts, 2, 0)
    return DraftPlan(needs=_SHIFTED, nodes=nodes, depth=nodes, kv=kv, lookahead=max(nodes, 1), bytes_per_slot=state)


def plan_reader(config: PaperConfig, facts: Facts, depth: int | None) -> DraftPlan:
    """Plan a chain from queries into the target's KV."""
    nodes = _nodes(config, depth)
    return DraftPlan(needs=_READER, nodes=nodes, depth=nodes, bytes_per_slot=FLOAT * _size(facts, "hidden_size"))


def plan_block(config: PaperConfig, facts: Facts, depth: int | None) -> DraftPlan:
    """Plan a block of masks behind the root: all drafts in one forward."""
    nodes = _nodes(config, depth)
    return DraftPlan(needs=_BLOCK, nodes=nodes, depth=nodes, kv=_own_layers(facts, 1, 1 + nodes))


def plan_self(config: SelfConfig, facts: Facts, depth: int | None) -> DraftPlan:
    """Plan the target's own layers as the draft."""
    nodes = (config.num_draft_tokens or 4) - 1
    steps = nodes // 2 if config.paper_decoys else nodes
    steps = steps if depth is None else min(steps, depth)
    sizes = {"kv_heads": _size(facts, "num_key_value_heads") or 1, "k_dim": _size(facts, "head_dim")}
    layers = KVLayers(
        layers=_size(facts, "num_hidden_layers") or 1, **sizes, v_dim=sizes["k_dim"], scratch_rows=max(steps, 1)
    )
    shape: Literal["chain", "tree"] = "tree" if config.paper_decoys else "chain"
    needs = _SELF.model_copy(update={"shapes": frozenset({shape})})
    return DraftPlan(needs=needs, nodes=2 * steps if config.paper_decoys else steps, depth=steps, kv=(layers,))


def plan_combined(config: CombinedConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan the parts and unite what they need."""
    return combined_plan(*(facts.plan_of(name, options, depth) for name, options in config.part_options()))


def _spec(word: str, summary: str, most: Capabilities, model: type[SpecConfig], plan: Plan, drafter: str) -> Any:
    where = f"specplug.testing.{drafter}"
    return AlgorithmSpec(
        name=word, api=(1, 0), summary=summary, capabilities=most, config_model=model, plan=plan, drafter=where
    )


SPECS: tuple[AlgorithmSpec, ...] = (
    _spec(
        "paper-shifted",
        "a chain from hidden states, each beside the token that follows it",
        *(_SHIFTED, PaperConfig, _decoders_only(plan_shifted), "paper_drafters:Shifted"),
    ),
    _spec(
        "paper-tree",
        "the same, drafting a dynamic tree",
        *(_TREE, TreeConfig, _decoders_only(plan_tree), "paper_trees:Tree"),
    ),
    _spec(
        "paper-chained",
        "two heads in a row, one draft each",
        *(_SHIFTED, PaperConfig, _decoders_only(plan_chained), "paper_drafters:Chained"),
    ),
    _spec(
        "paper-reader",
        "queries into the target's KV, none of its own",
        *(_READER, PaperConfig, _decoders_only(plan_reader), "paper_drafters:Reader"),
    ),
    _spec(
        "paper-block",
        "masks filled in one forward over a context of hidden states",
        *(_BLOCK, PaperConfig, _decoders_only(plan_block), "paper_drafters:Block"),
    ),
    _spec(
        "paper-self",
        "the target drafts for itself",
        *(_SELF, SelfConfig, _decoders_only(plan_self), "paper_trees:Self"),
    ),
    _spec(
        "paper-combined",
        "the first of several drafters that has a draft",
        *(_COMBINED, CombinedConfig, plan_combined, "paper_drafters:Combined"),
    ),
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer all of them."""
    return SPECS


def paper_registry(folder: Path) -> Registry:
    """Return a registry of the paper drafters and the scripted ones; `folder` is an empty one."""
    from specplug.registry import Registry
    from specplug.testing.registry import bench_registry, write_distribution

    bench_registry(folder)
    if not any(folder.glob("specplug_paper-*.dist-info")):
        points = {spec.name: __name__ for spec in SPECS}
        write_distribution(folder, "specplug-paper", points, requires=("specplug>=0.1,<1",))
    return Registry.discover(path=[str(folder)], environ={})
