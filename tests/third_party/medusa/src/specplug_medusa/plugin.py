"""Manifest of Medusa. Torch-free."""

from collections.abc import Sequence
from typing import NamedTuple

from specplug import AlgorithmSpec, Capabilities, DraftPlan, Facts, Refusal, TapRequest, hookimpl
from specplug_medusa.config import MedusaConfig
from specplug_medusa.paths import best_paths

OPTION = "--speculative-draft-model-path"
NEEDS = Capabilities(
    shapes=frozenset({"tree"}), taps=(TapRequest(at="final_norm"),), variable_depth=True, graph_safe=True
)
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Where published heads are stored."""
INT = 8
"""Bytes of an index."""


class Sizes(NamedTuple):
    """What the heads' checkpoint says."""

    heads: int
    layers: int
    hidden: int
    vocab: int


def sizes_of(facts: Facts) -> Sizes | Refusal:
    """Read the heads' sizes, and hold them against the target's."""
    if facts.draft is None:
        return Refusal(reason="medusa needs its heads, and none are given", try_instead=f"{OPTION} FOLDER")
    config, target = facts.draft.config, facts.target.config
    heads, layers = config.get("medusa_num_heads"), config.get("medusa_num_layers")
    hidden, vocab = target.get("hidden_size"), target.get("vocab_size")
    if not (isinstance(heads, int) and isinstance(layers, int) and heads > 0 and layers >= 0):
        return Refusal(
            reason=f"{OPTION} {facts.draft.path!r}: its config names no medusa_num_heads and medusa_num_layers",
            try_instead=f"a folder of Medusa heads, with config.json and {' or '.join(FILES)}",
        )
    if not (isinstance(hidden, int) and isinstance(vocab, int)):
        return Refusal(reason="the target's config names no hidden_size and vocab_size", try_instead="a decoder")
    if facts.draft.tensors is None:
        return Sizes(heads, layers, hidden, vocab)
    last = facts.draft.tensors.get(f"{heads - 1}.{layers}.weight")
    if last is None:
        return Refusal(
            reason=f"{OPTION} {facts.draft.path!r}: it holds no {heads} heads of {layers} layers, as its config says",
            try_instead="a config.json with the numbers that fit its weights",
        )
    if last.shape[1] != hidden or last.shape[0] > vocab:
        return Refusal(
            reason=f"{OPTION} {facts.draft.path!r}: its heads map {last.shape[1]} numbers to {last.shape[0]} tokens, "
            f"and the target's state has {hidden}, its vocabulary {vocab}",
            try_instead="heads that were trained for this target",
        )
    return Sizes(heads, layers, hidden, last.shape[0])


def plan(config: MedusaConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan one tree of a fixed form for each depth that may be wanted."""
    sizes = sizes_of(facts)
    if isinstance(sizes, Refusal):
        return sizes
    longest = sizes.heads if depth is None else max(0, min(sizes.heads, depth))
    width = min(config.medusa_top_k, sizes.vocab)
    forms = [best_paths(config.num_draft_tokens - 1, steps, width) for steps in range(1, longest + 1)]
    nodes = max(map(len, forms), default=0)
    item = 4 if facts.dtype == "float32" else 2
    return DraftPlan(
        needs=NEEDS,
        nodes=nodes,
        depth=max((len(path) for form in forms for path in form), default=0),
        bytes_fixed=sum(2 * INT * len(form) for form in forms),
        bytes_per_slot=sizes.hidden * item,
    )


SPEC = AlgorithmSpec(
    name="medusa",
    api=(1, 0),
    summary="heads on the target's last state fill one static tree",
    instead={"medusa-2": "medusa (both versions store their heads alike; the second's target is tuned as well)"},
    foreign_options={"medusa-choices": "leave it out: the tree follows from --speculative-num-draft-tokens"},
    capabilities=NEEDS,
    config_model=MedusaConfig,
    plan=plan,
    drafter="specplug_medusa.drafter:MedusaDrafter",
    draft_files=FILES,
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer Medusa."""
    return (SPEC,)
