"""Manifest of DFLASH and DSPARK: what they offer, and which configurations work. Torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from specplug import (
    AlgorithmSpec,
    Capabilities,
    Defaults,
    DraftPlan,
    Facts,
    KVLayers,
    Problem,
    Refusal,
    TapRequest,
    hookimpl,
    last_draft_position,
)
from specplug_dflash.config import BlockConfig, DFlashConfig, DSparkConfig
from specplug_dflash.formats import BlockDraft, read_draft
from specplug_dflash.names import MASK_FILE

DFLASH, DSPARK = "dflash", "dspark"
INT = 8
"""Bytes of an id."""


def plan_dflash(config: DFlashConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan blocks whose tokens are drafted independently of each other."""
    draft = draft_of(DFLASH, config, facts)
    return draft if isinstance(draft, Refusal) else _plan(DFLASH, config, facts, depth, draft)


def plan_dspark(config: DSparkConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan blocks whose tokens follow one another through a sequential head."""
    draft = draft_of(DSPARK, config, facts)
    if isinstance(draft, Refusal):
        return draft
    threshold = config.dspark_confidence_threshold
    if threshold and draft.confidence == "none":
        return Refusal(
            reason=f"dspark_confidence_threshold {threshold} needs a confidence head, and the draft model has none",
            try_instead="--speculative-dspark-confidence-threshold 0, or another draft",
        )
    # The verify can only shrink once the host knows how much of the block is meant.
    plan = _plan(DSPARK, config, facts, depth, draft)
    return plan if isinstance(plan, Refusal) else plan.model_copy(update={"reads_back": threshold > 0})


def draft_of(algorithm: str, config: BlockConfig, facts: Facts) -> BlockDraft | Refusal:
    """Return the draft that `algorithm` drafts with, or why it cannot."""
    draft = read_draft(facts, config.block_size or _asked_block(algorithm, config))
    if isinstance(draft, Refusal):
        return draft
    if algorithm == DFLASH and draft.markov is not None:
        return Refusal(
            reason="the draft model has a Markov head: it is one for DSPARK",
            try_instead="--speculative-algorithm DSPARK",
        )
    if algorithm == DSPARK and not draft.dspark:
        return Refusal(
            reason="the draft model has no Markov head and is not called DSpark: it is one for DFLASH",
            try_instead="--speculative-algorithm DFLASH",
        )
    return draft


def _asked_block(algorithm: str, config: BlockConfig) -> int | None:
    """Return the block that `num_draft_tokens` implies where nothing else names one."""
    if config.num_draft_tokens is None:
        return None
    return max(1, config.num_draft_tokens - (algorithm == DSPARK))


def _plan(
    algorithm: str, config: BlockConfig, facts: Facts, depth: int | None, draft: BlockDraft
) -> DraftPlan | Refusal:
    most = _most(algorithm, config, draft)
    if isinstance(most, Refusal):
        return most
    nodes = most if depth is None else max(0, min(most, depth))
    sizes, item = draft.sizes, 4 if facts.dtype == "float32" else 2
    mapped = draft.head_rows < draft.vocab or bool(draft.stored & {"d2t", "t2d"})
    needs = Capabilities(
        shapes=frozenset({"block"}),
        proposal_probs="dense" if config.draft_sampling else "one_hot",
        taps=tuple(TapRequest(at=boundary) for boundary in draft.taps),
        draft_kv=frozenset({"own_layers"}),
        borrows=frozenset({"embed_tokens", "lm_head"}) - draft.stored,
        vocab="mapped" if mapped else "same",
        graph_safe=True,
    )
    context = 2 * len(sizes.windows) * sizes.kv_heads * sizes.head_dim * (sizes.hidden_size + sizes.qkv_bias) * item
    last = last_draft_position(facts, sizes.max_position)
    rotary = 4 * sizes.head_dim * (sizes.max_position if last is None else last + 1)
    return DraftPlan(
        needs=needs,
        nodes=nodes,
        depth=nodes,
        kv=tuple(
            KVLayers(
                layers=len(list(run)),
                kv_heads=sizes.kv_heads,
                k_dim=sizes.head_dim,
                v_dim=sizes.head_dim,
                window=window,
                scratch_rows=draft.block,
            )
            for window, run in groupby(sizes.windows)
        ),
        max_position=last,
        bytes_fixed=context + rotary + (INT * draft.head_rows if mapped else 0),
    )


def _most(algorithm: str, config: BlockConfig, draft: BlockDraft) -> int | Refusal:
    """Return how many tokens of the block are drafted; what is asked for must agree with it, and with itself."""
    for name, value in (("num_steps", config.num_steps), ("eagle_topk", config.eagle_topk)):
        if value > 1:
            return Refusal(
                reason=f"{name} {value} is more than 1, and a block is one path that one forward drafts",
                try_instead=f"--speculative-{name.replace('_', '-')} 1",
            )
    option, tokens, size = f"{algorithm}_block_size", config.num_draft_tokens, config.block_size
    flag = f"--speculative-{algorithm}-block-size {draft.block}"
    if size is not None and size > draft.block:
        return Refusal(
            reason=f"{option} {size} is more than the {draft.block} tokens of the draft model's block",
            try_instead=flag,
        )
    if tokens is not None and tokens > draft.drafts + 1:
        return Refusal(
            reason=f"num_draft_tokens {tokens} is more than the {draft.drafts} tokens that the draft model drafts, and "
            "the root",
            try_instead=f"--speculative-num-draft-tokens {draft.drafts + 1}",
        )
    by_size = None if size is None else size + draft.next_slot
    if tokens is not None and by_size is not None and tokens != by_size:
        return Refusal(
            reason=f"num_draft_tokens {tokens} and {option} {size} disagree: a block of {size} verifies {by_size} "
            "tokens, the root counted",
            try_instead=f"--speculative-num-draft-tokens {by_size}, or one of the two alone",
        )
    return max(0, (tokens or by_size or draft.drafts + 1) - 1)


_SHARED: dict[str, Any] = {
    "api": (1, 0),
    "draft_files": (MASK_FILE,),
    "capabilities": Capabilities(
        shapes=frozenset({"block"}),
        proposal_probs="dense",
        taps=(TapRequest(at="any"),),
        draft_kv=frozenset({"own_layers"}),
        borrows=frozenset({"embed_tokens", "lm_head"}),
        vocab="mapped",
        graph_safe=True,
    ),
}
_DRAFT_WINDOW = "leave it out: a draft's window is its checkpoint's"
_BACKEND = "leave it out: a draft attends by kernels of its own"

SPECS = (
    AlgorithmSpec(
        name=DFLASH,
        summary="one forward of a small draft over the target's hidden states fills a block",
        instead={"draft-dflash": "dflash", "dflash2": "dflash, with a DFlash draft of the first version"},
        foreign_options={
            "speculative-dflash-draft-window-size": _DRAFT_WINDOW,
            "speculative-draft-attention-backend": _BACKEND,
        },
        config_model=DFlashConfig,
        plan=plan_dflash,
        drafter="specplug_dflash.drafter:DFlashDrafter",
        **_SHARED,
    ),
    AlgorithmSpec(
        name=DSPARK,
        summary="a block draft whose tokens follow one another through a small Markov head",
        instead={"draft-dspark": "dspark"},
        foreign_options={"speculative-draft-attention-backend": _BACKEND},
        config_model=DSparkConfig,
        plan=plan_dspark,
        drafter="specplug_dflash.drafter:DSparkDrafter",
        **_SHARED,
    ),
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer DFLASH and DSPARK."""
    return SPECS


@hookimpl
def specplug_defaults(algorithm: str, given: Mapping[str, Any], facts: Facts) -> Defaults | None:
    """Take the block size from the checkpoint, where nothing else is asked for."""
    option = f"{algorithm}_block_size"
    if algorithm not in (DFLASH, DSPARK) or "num_draft_tokens" in given or option in given:
        return None
    draft = read_draft(facts)
    if isinstance(draft, Refusal) or not draft.block_known:
        return None
    return Defaults(
        values={option: draft.block},
        because=f"the draft model drafts blocks of {draft.block}: {draft.drafts} tokens and the root",
        source="checkpoint",
    )


@hookimpl
def specplug_check(algorithm: str, config: Any, plan: DraftPlan, facts: Facts) -> Sequence[Problem]:
    """Say what works but is hardly meant."""
    if algorithm not in (DFLASH, DSPARK):
        return ()
    draft = draft_of(algorithm, config, facts)
    return () if isinstance(draft, Refusal) else tuple(_objections(algorithm, config, draft))


def _objections(algorithm: str, config: BlockConfig, draft: BlockDraft) -> Iterator[Problem]:
    if not draft.block_known and config.block_size is None and config.num_draft_tokens is None:
        yield Problem(
            severity="warning",
            field=f"{algorithm}_block_size",
            message=f"the draft model's config.json names no block_size: {draft.block} is taken",
            try_instead="the size that it was trained with",
        )
