"""Manifest part of FROZEN_KV_MTP: what it offers, and which configurations work. Torch-free."""

from collections.abc import Iterator, Mapping
from typing import Any

from specplug import (
    AlgorithmSpec,
    Capabilities,
    Defaults,
    DraftPlan,
    Facts,
    Problem,
    Refusal,
    TapRequest,
    UserError,
    last_draft_position,
)
from specplug_mtp.frozen_config import FrozenConfig
from specplug_mtp.frozen_sizes import assistant_sizes

NAME = "frozen-kv-mtp"
OPTION = "--speculative-draft-model-path"


def plan(config: FrozenConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a chain of `num_steps` tokens from an assistant that reads the target's KV and keeps none."""
    if config.eagle_topk > 1:
        return Refusal(
            reason=f"eagle_topk {config.eagle_topk} asks for a tree, and an assistant drafts one chain",
            try_instead="--speculative-eagle-topk 1",
        )
    if facts.draft is None:
        return Refusal(
            reason="frozen-kv-mtp drafts with an assistant that was trained for MODEL, and none is given",
            try_instead=f"{OPTION} ASSISTANT, such as google/gemma-4-E2B-it-assistant for google/gemma-4-E2B-it",
        )
    try:
        sizes = assistant_sizes(facts.draft.config, facts.target.config)
    except (UserError, TypeError, ValueError) as error:
        return Refusal(reason=f"{OPTION}: {error}", try_instead="the assistant that was trained for MODEL")
    if facts.first_vocab_difference is not None:
        number, ours, theirs = facts.first_vocab_difference
        return Refusal(
            reason=f"the assistant has another tokenizer: id {number} is {ours!r} in the target's and {theirs!r} in "
            "the assistant's",
            try_instead="the assistant that was trained for MODEL",
        )
    nodes = config.nodes if depth is None else max(0, min(config.nodes, depth))
    item = 4 if facts.dtype == "float32" else 2
    needs = Capabilities(
        proposal_probs="dense" if config.draft_sampling else "one_hot",
        taps=(TapRequest(at="final_norm"),),
        draft_kv=frozenset({"reads_target"}),
        borrows=frozenset({"embed_tokens"}),
        variable_depth=True,
        graph_safe=True,
    )
    return DraftPlan(
        needs=needs,
        nodes=nodes,
        depth=nodes,
        max_position=last_draft_position(facts, sizes.max_position),
        bytes_fixed=sizes.vocab_size if suppressed(facts, sizes.vocab_size) else 0,
        bytes_per_slot=sizes.backbone_size * item,
    )


def suppressed(facts: Facts, vocab: int) -> tuple[int, ...]:
    """Return the ids that ``generation_config.json`` of either model says are never generated, ascending."""
    sides = [facts.target, *([facts.draft] if facts.draft else [])]
    named = [side.generation.get("suppress_tokens") for side in sides]
    found = {each for tokens in named if isinstance(tokens, list | tuple) for each in tokens}
    return tuple(sorted(each for each in found if isinstance(each, int) and 0 <= each < vocab))


SPEC = AlgorithmSpec(
    name=NAME,
    api=(1, 0),
    summary="a Gemma 4 assistant drafts from the target's last state and its KV",
    instead={"gemma4-mtp": NAME},
    foreign_options={"num-assistant-tokens": "write --speculative-num-steps"},
    capabilities=Capabilities(
        proposal_probs="dense",
        taps=(TapRequest(at="final_norm"),),
        draft_kv=frozenset({"reads_target"}),
        borrows=frozenset({"embed_tokens"}),
        variable_depth=True,
        graph_safe=True,
    ),
    config_model=FrozenConfig,
    plan=plan,
    drafter="specplug_mtp.frozen_drafter:FrozenDrafter",
)


def defaults(given: Mapping[str, Any]) -> Defaults | None:
    """Draft what `num_draft_tokens` has room for, where it is given without `num_steps`."""
    tokens = given.get("num_draft_tokens")
    if "num_steps" in given or not isinstance(tokens, int) or tokens < 2:
        return None
    return Defaults(values={"num_steps": tokens - 1}, because=f"num_draft_tokens is {tokens}, the root counted")


def objections(config: FrozenConfig) -> Iterator[Problem]:
    """Say what works but is hardly meant."""
    if config.num_draft_tokens not in (None, config.num_steps + 1):
        yield Problem(
            severity="warning",
            field="num_draft_tokens",
            message=f"{config.num_draft_tokens} and num_steps {config.num_steps} differ by more than the root: "
            f"{config.nodes} tokens are drafted",
        )
