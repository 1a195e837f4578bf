"""Manifest of EAGLE and EAGLE-3: what they offer, and which configurations work. Torch-free."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    UserError,
    hookimpl,
    last_draft_position,
)
from specplug_eagle import buffers, layout
from specplug_eagle.config import MOST_STEPS, Eagle3Config, EagleConfig, candidates
from specplug_eagle.token_map import read_token_map

NAMES = ("eagle", "eagle3")
_TREE_TARGETS = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
"""Targets for which a small tree is the default, as in SGLang; for all others a chain is."""
_CHAIN_STEPS, _TREE_STEPS, _TREE_TOPK = 3, 5, 4


def plan(config: EagleConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a chain of `num_steps` drafts, or a tree of the best `num_draft_tokens` - 1 nodes."""
    found = layout.read(facts, config)
    if isinstance(found, Refusal):
        return found
    refusal = _contradiction(config, found)
    if refusal is not None:
        return refusal
    steps = config.steps if depth is None else max(0, min(config.steps, depth))
    nodes = min(config.nodes, candidates(steps, config.topk))
    longest = min(steps, nodes)
    sizes = found.sizes
    kv = KVLayers(
        layers=found.layers,
        kv_heads=sizes.kv_heads,
        k_dim=sizes.head_dim,
        v_dim=sizes.head_dim,
        scratch_rows=buffers.scratch_rows(longest, config.topk),
    )
    needs = Capabilities(
        shapes=frozenset({"tree"}) if config.tree else frozenset({"chain"}),
        proposal_probs="dense" if config.draft_sampling else "one_hot",
        taps=found.taps,
        draft_kv=frozenset({"own_layers"}),
        borrows=found.borrows(facts),
        vocab="mapped" if found.mapped else "same",
        variable_depth=True,
        graph_safe=True,
    )
    return DraftPlan(
        needs=needs,
        nodes=nodes,
        depth=longest,
        kv=(kv,),
        max_position=last_draft_position(facts, found.max_position),
        bytes_per_slot=buffers.bytes_per_slot(found.hidden, facts.dtype),
    )


def _contradiction(config: EagleConfig, found: layout.Layout) -> Refusal | None:
    """Return why these options cannot hold together, or None."""
    steps, topk, tokens = config.num_steps, config.eagle_topk, config.num_draft_tokens
    if config.tree and config.draft_sampling:
        return Refusal(
            reason=f"eagle_topk {topk} asks for a tree and draft_sampling for one drawn chain",
            try_instead="--speculative-eagle-topk 1, or leave --speculative-draft-sampling out",
        )
    if config.tree and tokens is not None and tokens - 1 > candidates(steps, topk):
        return Refusal(
            reason=f"num_draft_tokens {tokens} asks for {tokens - 1} drafts, and num_steps {steps} with eagle_topk "
            f"{topk} offer {candidates(steps, topk)}",
            try_instead="fewer --speculative-num-draft-tokens, or more steps or branches",
        )
    if config.eagle_token_map is not None and (found.reduced or found.rows < found.vocab):
        return Refusal(
            reason=f"eagle_token_map {config.eagle_token_map} cannot narrow a head that has a vocabulary of its own, "
            f"of {found.rows} tokens",
            try_instead="leaving --speculative-eagle-token-map out",
        )
    if topk > found.rows:
        return Refusal(
            reason=f"eagle_topk {topk} asks for more branches than the head has tokens, {found.rows}",
            try_instead=f"--speculative-eagle-topk {found.rows}",
        )
    return None


_FOREIGN_OPTIONS: Mapping[str, str] = {
    "speculative-token-map": "write --speculative-eagle-token-map, with the path of a file",
    "speculative-accept-threshold-single": "leave it out: acceptance here never changes what is generated",
    "speculative-accept-threshold-acc": "leave it out: acceptance here never changes what is generated",
    "speculative-use-rejection-sampling": "write --speculative-acceptance rejection",
    "speculative-use-block-verification": "leave it out: drafts are verified token by token",
    "speculative-attention-mode": "leave it out: a draft head attends by kernels of its own",
    "speculative-draft-attention-backend": "leave it out: a draft head attends by kernels of its own",
    "speculative-draft-kv-cache-dtype": "leave it out: the head's KV has the dtype of the target's",
    "speculative-draft-window-size": "leave it out: the head sees the whole text",
    "speculative-draft-sink-size": "leave it out: the head sees the whole text",
    "speculative-draft-model-quantization": "leave it out: heads are run unquantized",
    "enable-multi-layer-eagle": "write --speculative-algorithm builtin-mtp --speculative-mtp-multi-layer",
    "num-speculative-tokens": "write --speculative-num-steps",
    "max-draft-len": "write --speculative-num-steps",
    "total-token": "write --speculative-num-draft-tokens",
    "depth": "write --speculative-num-steps",
    "top-k": "write --speculative-eagle-topk",
}
_AUX_OPTIONS: Mapping[str, str] = {
    "eagle-aux-hidden-state-layer-ids": "write --speculative-eagle-aux-layers",
    "eagle3-layers-to-capture": "write --speculative-eagle-aux-layers",
    "eagle-aux-layer-semantics": "write --speculative-eagle-aux-semantics boundary for vllm, output for sglang",
    "parallel-drafting": "leave it out: heads that draft in parallel are not run",
}


def _capabilities(taps: tuple[TapRequest, ...]) -> Capabilities:
    return Capabilities(
        shapes=frozenset({"chain", "tree"}),
        proposal_probs="dense",
        taps=taps,
        draft_kv=frozenset({"own_layers"}),
        borrows=frozenset({"embed_tokens", "lm_head"}),
        vocab="mapped",
        variable_depth=True,
        graph_safe=True,
    )


_DRAFTER = "specplug_eagle.drafter:EagleDrafter"
SPECS = (
    AlgorithmSpec(
        name="eagle",
        api=(1, 0),
        summary="a one-layer head on the target's final state drafts chains and trees (EAGLE-1 and 2)",
        instead={
            word: "eagle (EAGLE-1 and 2 share their weights)" for word in ("eagle1", "eagle-1", "eagle2", "eagle-2")
        },
        foreign_options=_FOREIGN_OPTIONS,
        capabilities=_capabilities((TapRequest(at="final_norm"),)),
        config_model=EagleConfig,
        plan=plan,
        drafter=_DRAFTER,
    ),
    AlgorithmSpec(
        name="eagle3",
        api=(1, 0),
        summary="a one-layer head on several of the target's layers drafts chains and trees (EAGLE-3 and 3.1)",
        aliases=("eagle-3",),
        foreign_options={**_FOREIGN_OPTIONS, **_AUX_OPTIONS},
        capabilities=_capabilities((TapRequest(at="any"),)),
        config_model=Eagle3Config,
        plan=plan,
        drafter=_DRAFTER,
    ),
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer EAGLE and EAGLE-3."""
    return SPECS


# --- defaults --------------------------------------------------------------------------------------------------------


@hookimpl
def specplug_defaults(algorithm: str, given: Mapping[str, Any], facts: Facts) -> Sequence[Defaults]:
    """Fill what is left out of steps, branches and tokens, so that it fits what is given."""
    if algorithm not in NAMES:
        return ()
    steps, topk, tokens = (_whole(given.get(key)) for key in ("num_steps", "eagle_topk", "num_draft_tokens"))
    trained = _trained_steps(facts)
    room = tokens is None or tokens > 2
    wants_tree = room and _wants_tree(facts) and not given.get("draft_sampling") and trained is None
    because = "the default of this target" if wants_tree else "the default"
    found: list[Defaults] = []
    if topk is None:
        topk = _TREE_TOPK if wants_tree else 1
        if wants_tree and tokens is not None:
            topk = _filling(tokens, lambda k: candidates(steps or _TREE_STEPS, k), _TREE_TOPK)
        found.append(Defaults(values={"eagle_topk": topk}, because=because))
    if steps is None and topk == 1:
        if tokens is not None and tokens > 1:
            found.append(
                Defaults(
                    values={"num_steps": min(tokens - 1, MOST_STEPS)},
                    because=f"num_draft_tokens is {tokens}, the root counted",
                )
            )
        elif tokens is None and trained is not None:
            found.append(
                Defaults(
                    values={"num_steps": trained},
                    because="speculative_tokens of the head's config",
                    source="checkpoint",
                )
            )
        else:
            found.append(Defaults(values={"num_steps": _CHAIN_STEPS}, because="the default of chains"))
    elif steps is None:
        k = topk
        steps = _TREE_STEPS
        if tokens is not None:
            steps = _filling(tokens, lambda s: candidates(s, k), max(1, min(_TREE_STEPS, tokens - 1)))
        found.append(Defaults(values={"num_steps": steps}, because="the default of trees"))
    return found


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _wants_tree(facts: Facts) -> bool:
    named = facts.target.config.get("architectures") or ()
    return bool(set(named) & set(_TREE_TARGETS)) and "tree_verify" in facts.features


def _filling(tokens: int, offered: Callable[[int], int], least: int) -> int:
    """Return the smallest number from `least` on with which a tree of `tokens` can be filled, or the largest."""
    return next((n for n in range(least, MOST_STEPS + 1) if offered(n) >= tokens - 1), MOST_STEPS)


def _trained_steps(facts: Facts) -> int | None:
    """Return the draft length that a head of the speculators library names, if any."""
    if facts.draft is None or not isinstance(facts.draft.config.get("speculators_config"), Mapping):
        return None
    methods = facts.draft.config["speculators_config"].get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    steps = _whole(first.get("speculative_tokens"))
    return steps if steps is not None and 1 <= steps <= MOST_STEPS else None


# --- objections ------------------------------------------------------------------------------------------------------


@hookimpl
def specplug_check(algorithm: str, config: Any, plan: DraftPlan, facts: Facts) -> Sequence[Problem]:
    """Object to token maps that cannot be used, and say what works but is hardly meant."""
    if algorithm not in NAMES or not isinstance(config, EagleConfig):
        return ()
    found = layout.read(facts, config)
    return () if isinstance(found, Refusal) else tuple(_objections(config, found, plan, facts))


def _objections(config: EagleConfig, found: layout.Layout, plan: DraftPlan, facts: Facts) -> Iterator[Problem]:
    if config.eagle_token_map is not None:
        try:
            few = len(read_token_map(config.eagle_token_map, found.vocab)) < config.eagle_topk
            said = f"it holds fewer tokens than eagle_topk {config.eagle_topk} asks for" if few else ""
        except UserError as error:
            said = str(error)
        if said:
            yield Problem(severity="error", field="eagle_token_map", message=said)
    room = None if config.num_draft_tokens is None else config.num_draft_tokens - 1
    if room is not None and (room < config.num_steps or (room > config.num_steps and not config.tree)):
        yield _warning(
            "num_draft_tokens",
            f"{room + 1} and num_steps {config.num_steps} differ by more than the root: {plan.nodes} tokens are "
            "drafted",
        )
    if plan.max_position is not None:
        yield _warning(
            "draft_model_path",
            f"the head was made for {found.max_position} positions: a request is decoded plainly from there on",
        )
    if found.taps_guessed:
        yield _warning(
            "eagle_aux_semantics",
            f"{found.taps_because}: nothing else tells what the ids mean, so compare the accept length with the other "
            "reading",
        )


def _warning(field: str, message: str) -> Problem:
    return Problem(severity="warning", field=field, message=message)
