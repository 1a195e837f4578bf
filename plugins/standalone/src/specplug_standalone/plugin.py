"""Manifest of STANDALONE: what it offers, and which configurations work. Torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specplug import (
    AlgorithmSpec,
    Capabilities,
    Defaults,
    DraftPlan,
    Facts,
    ModelShape,
    Problem,
    Refusal,
    UserError,
    hookimpl,
    last_draft_position,
    model_shape,
)
from specplug_standalone import vocab
from specplug_standalone.config import StandaloneConfig

NAME = "standalone"
OPTION = "--speculative-draft-model-path"
INT = 8
"""Bytes of an id."""


def plan(config: StandaloneConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a chain of `num_steps` tokens from a model that keeps its own KV."""
    if config.eagle_topk > 1:
        return Refusal(
            reason=f"eagle_topk {config.eagle_topk} asks for a tree, and a draft model drafts one chain",
            try_instead="--speculative-eagle-topk 1, or eagle for trees",
        )
    if facts.draft is None:
        return Refusal(
            reason="standalone drafts with a smaller language model, and none is given", try_instead=f"{OPTION} MODEL"
        )
    shape = model_shape(facts.draft)
    if isinstance(shape, Refusal):
        return shape
    difference = facts.first_vocab_difference
    if difference is not None and not vocab.extends(facts) and not config.standalone_heterogeneous_vocab:
        number, ours, theirs = difference
        return Refusal(
            reason=f"the draft model has another tokenizer: id {number} is {ours!r} in the target's and {theirs!r} in "
            "the draft's",
            try_instead="a draft model of the target's family, or --speculative-standalone-heterogeneous-vocab",
        )
    nodes = config.nodes if depth is None else max(0, min(config.nodes, depth))
    item = 4 if facts.dtype == "float32" else 2
    needs = Capabilities(
        proposal_probs="dense" if config.draft_sampling else "one_hot",
        draft_kv=frozenset({"own_layers"}),
        vocab="mapped" if mapped(facts) else "same",
        variable_depth=True,
        graph_safe=True,
    )
    return DraftPlan(
        needs=needs,
        nodes=nodes,
        depth=nodes,
        kv=tuple(group.model_copy(update={"scratch_rows": nodes}) for group in shape.kv),
        catch_up="tokens",
        max_position=last_draft_position(facts, shape.max_position),
        bytes_fixed=_map_bytes(facts, shape),
        bytes_per_slot=shape.hidden_size * item,
    )


def mapped(facts: Facts) -> bool:
    """Whether ids have to be translated: the tokenizers differ (which `plan` lets through only when asked to)."""
    return facts.first_vocab_difference is not None and not vocab.extends(facts)


def _map_bytes(facts: Facts, shape: ModelShape) -> int:
    """Return the bytes of the tables that translate ids."""
    target = vocab.target_vocab(facts)
    if mapped(facts):
        return INT * (target + 2 * min(target, shape.vocab_size))
    ids = vocab.common(facts, shape.vocab_size)
    return INT * ids if ids < target else 0


SPEC = AlgorithmSpec(
    name=NAME,
    api=(1, 0),
    summary="a smaller language model with the target's vocabulary drafts token by token",
    instead={"draft-simple": "standalone", "draft-target": "standalone"},
    foreign_options={
        "use-heterogeneous-vocab": "write --speculative-standalone-heterogeneous-vocab",
        "num-assistant-tokens": "write --speculative-num-steps",
        "speculative-draft-attention-backend": "leave it out: a draft model attends by kernels of its own",
    },
    capabilities=Capabilities(
        proposal_probs="dense",
        draft_kv=frozenset({"own_layers"}),
        vocab="mapped",
        variable_depth=True,
        graph_safe=True,
    ),
    config_model=StandaloneConfig,
    plan=plan,
    drafter="specplug_standalone.drafter:StandaloneDrafter",
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer STANDALONE."""
    return (SPEC,)


@hookimpl
def specplug_defaults(algorithm: str, given: Mapping[str, Any], facts: Facts) -> Defaults | None:
    """Draft what `num_draft_tokens` has room for, where it is given without `num_steps`."""
    tokens = given.get("num_draft_tokens")
    if algorithm != NAME or "num_steps" in given or not isinstance(tokens, int) or tokens < 2:
        return None
    return Defaults(values={"num_steps": tokens - 1}, because=f"num_draft_tokens is {tokens}, the root counted")


@hookimpl
def specplug_check(algorithm: str, config: Any, plan: DraftPlan, facts: Facts) -> Sequence[Problem]:
    """Object to vocabularies without common tokens, and say what works but is hardly meant."""
    if algorithm != NAME or facts.draft is None:
        return ()
    return tuple(_objections(config, facts))


def _objections(config: StandaloneConfig, facts: Facts) -> Iterator[Problem]:
    draft = facts.draft
    assert draft is not None
    if draft.path and draft.path == facts.target.path:
        yield _warning("draft_model_path", "the draft model is the target itself, so that drafting cannot be faster")
    if config.num_draft_tokens not in (None, config.num_steps + 1):
        yield _warning(
            "num_draft_tokens",
            f"{config.num_draft_tokens} and num_steps {config.num_steps} differ by more than the root: "
            f"{config.nodes} tokens are drafted",
        )
    if mapped(facts):
        yield from _common_ground(facts)
    elif (draft.tokenizer_size is None) != (facts.target.tokenizer_size is None):
        side = "the draft model" if draft.tokenizer_size is None else "the target"
        yield _warning("draft_model_path", f"{side} has no tokenizer, so that nothing tells whether ids mean the same")


def _common_ground(facts: Facts) -> Iterator[Problem]:
    assert facts.draft is not None
    shape = model_shape(facts.draft)
    if isinstance(shape, Refusal):
        return
    field = "standalone_heterogeneous_vocab"
    try:
        count = len(vocab.shared(facts, shape.vocab_size))
    except UserError as error:
        yield Problem(severity="error", field=field, message=str(error))
        return
    if not count:
        yield Problem(
            severity="error", field=field, message="the vocabularies share no token", try_instead="another draft model"
        )
    elif count < vocab.FEW:
        yield _warning(field, f"the vocabularies share only {count} tokens: few drafts will be accepted")


def _warning(field: str, message: str) -> Problem:
    return Problem(severity="warning", field=field, message=message)
