"""Manifest of builtin-mtp: which heads are run, and with what. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specplug import (
    AlgorithmSpec,
    Capabilities,
    Checkpoint,
    Defaults,
    DraftPlan,
    Facts,
    Problem,
    Refusal,
    TapRequest,
    UserError,
    last_draft_position,
)
from specplug_mtp.builtin_layout import PROJECTION, Layout, find, same_folder, text_config, unexpected
from specplug_mtp.builtin_sizes import kv_of, size
from specplug_mtp.config import BuiltinMtpConfig

NAME = "builtin-mtp"
_WIDEST = 256
"""Widest head that CUDA attention reads."""
_LISTED = 4


def plan(config: BuiltinMtpConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a chain from the heads of the target's own checkpoint, or of an MTP draft's."""
    if config.eagle_topk > 1:
        return Refusal(
            reason=f"eagle_topk {config.eagle_topk} asks for a tree, and MTP heads draft one chain",
            try_instead="--speculative-eagle-topk 1, or eagle for trees",
        )
    layout = find(facts)
    if isinstance(layout, Refusal):
        return layout
    try:
        return _misfit(config, layout, facts) or _planned(config, layout, facts, depth)
    except UserError as error:
        return Refusal(reason=str(error), try_instead="a checkpoint with its own config.json")


def heads_used(config: BuiltinMtpConfig, layout: Layout) -> int:
    """Return how many of the stored heads draft."""
    return len(layout.prefixes) if config.mtp_multi_layer else 1


def _planned(config: BuiltinMtpConfig, layout: Layout, facts: Facts, depth: int | None) -> DraftPlan:
    nodes = config.nodes if depth is None else max(0, min(config.nodes, depth))
    heads = heads_used(config, layout)
    # A head for each step writes over rows below the root's alone; one head for all goes on above.
    scratch = 0 if config.mtp_multi_layer else max(nodes - 1, 0)
    item = 4 if facts.dtype == "float32" else 2
    needs = Capabilities(
        proposal_probs="dense" if config.draft_sampling else "one_hot",
        taps=(TapRequest(at="final_norm"),),
        draft_kv=frozenset({"own_layers"}),
        borrows=frozenset({"embed_tokens", "lm_head"}),
        variable_depth=True,
        graph_safe=layout.block == "decoder",
    )
    return DraftPlan(
        needs=needs,
        nodes=nodes,
        depth=nodes,
        kv=(kv_of(layout).model_copy(update={"layers": heads, "scratch_rows": scratch}),),
        max_position=last_draft_position(facts, size(layout.config, "max_position_embeddings")),
        bytes_per_slot=heads * size(layout.config, "hidden_size") * item,
    )


def _misfit(config: BuiltinMtpConfig, layout: Layout, facts: Facts) -> Refusal | None:
    """Return why heads of this layout do not go with these options or this target."""
    stored = len(layout.prefixes)
    if config.mtp_multi_layer and stored < 2:
        return Refusal(
            reason=f"mtp_multi_layer asks for a head for each step, and the checkpoint holds {stored}",
            try_instead="--no-speculative-mtp-multi-layer: the one head drafts every step",
        )
    if config.mtp_multi_layer and config.num_steps > stored:
        return Refusal(
            reason=f"num_steps {config.num_steps} is more than the {stored} heads of mtp_multi_layer",
            try_instead=f"--speculative-num-steps {stored}, or --no-speculative-mtp-multi-layer",
        )
    if config.mtp_depth_input != "auto" and not config.mtp_multi_layer:
        return Refusal(
            reason=f"mtp_depth_input {config.mtp_depth_input} says what later heads read, and only the first drafts",
            try_instead="leave it out, or --speculative-mtp-multi-layer",
        )
    return _foreign(layout, facts) or _unreadable(layout, facts)


def _foreign(layout: Layout, facts: Facts) -> Refusal | None:
    """Return what shows, before any weight is read, that the stored heads are not this target's, or are no whole."""
    holder, target = facts.target, text_config(facts.target.config)
    way_out = "--speculative-draft-model-path with a draft for this target"
    if layout.which == "draft":
        assert facts.draft is not None
        holder = facts.draft
        if facts.first_vocab_difference is not None:
            number, ours, theirs = facts.first_vocab_difference
            told = f"id {number} is {ours!r} in the target's and {theirs!r} in the draft's"
            return Refusal(reason=f"the MTP draft has another tokenizer: {told}", try_instead=way_out)
        for key in ("hidden_size", "vocab_size"):
            made, wanted = size(layout.config, key), size(target, key)
            if made != wanted:
                told = f"the MTP draft has {key} {made}, the target {wanted}; it was made for another target"
                return Refusal(reason=told, try_instead=way_out)
    quantized = holder.config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, Mapping) else "unknown"
        told = f"the MTP layers in {holder.path or 'the checkpoint'} are quantized with {method!r}, which is not run"
        return Refusal(reason=told, try_instead="an unquantized checkpoint")
    return _misstored(layout, holder)


def _misstored(layout: Layout, holder: Checkpoint) -> Refusal | None:
    """Return what the headers show to be missing or left over, before any weight is read."""
    if holder.tensors is None:
        return None
    hidden, faults = size(layout.config, "hidden_size"), []
    for prefix in layout.prefixes:
        for name, goal in layout.names.items():
            info = holder.tensors.get(prefix + name)
            wanted = (hidden, 2 * hidden) if goal == PROJECTION else (hidden,)
            if info is None:
                faults.append(f"{prefix}{name} is missing")
            elif info.shape != wanted:
                faults.append(f"{prefix}{name} is {list(info.shape)}, not {list(wanted)}")
    faults += [f"{name} belongs to no MTP layer" for name in unexpected(layout, holder)]
    if not faults:
        return None
    more = f" and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
    return Refusal(
        reason=f"the MTP layers in {holder.path or 'the checkpoint'} do not fit: {', '.join(faults[:_LISTED])}{more}",
        try_instead="an untouched copy of the checkpoint",
    )


def _unreadable(layout: Layout, facts: Facts) -> Refusal | None:
    """Return why the attention of this device cannot run the block."""
    kv = kv_of(layout)
    if facts.device == "cpu" or (kv.k_dim == kv.v_dim and kv.k_dim <= _WIDEST):
        return None
    return Refusal(
        reason=f"the MTP layer of {layout.family} attends with keys of {kv.k_dim} and values of {kv.v_dim} elements, "
        f"which is not run on {facts.device}: both have to be equal, and at most {_WIDEST}",
        try_instead="--device cpu, or --speculative-algorithm none",
    )


SPEC = AlgorithmSpec(
    name=NAME,
    api=(1, 0),
    summary="MTP layers in the target's own checkpoint, or in an MTP draft's, draft a chain",
    aliases=("nextn",),
    instead={
        "mtp": "nextn (decides by the checkpoints), builtin-mtp (layers in the target's own files) or frozen-kv-mtp "
        "(an assistant checkpoint that reads the target's KV)"
    },
    foreign_options={
        "enable-multi-layer-eagle": "write --speculative-mtp-multi-layer",
        "num-speculative-tokens": "write --speculative-num-steps",
    },
    capabilities=Capabilities(
        proposal_probs="dense",
        taps=(TapRequest(at="final_norm"),),
        draft_kv=frozenset({"own_layers"}),
        borrows=frozenset({"embed_tokens", "lm_head"}),
        variable_depth=True,
        graph_safe=True,
    ),
    config_model=BuiltinMtpConfig,
    plan=plan,
    drafter="specplug_mtp.builtin:BuiltinMtpDrafter",
)


def defaults(given: Mapping[str, Any], facts: Facts) -> Defaults | None:
    """Return how far to draft, and with how many heads, as far as that was not said."""
    layout = find(facts)
    heads = 1 if isinstance(layout, Refusal) else len(layout.prefixes)
    tokens, steps = given.get("num_draft_tokens"), given.get("num_steps")
    if steps is None and isinstance(tokens, int) and tokens > 1:
        steps = tokens - 1
    told = _proposed(facts) if steps is None else None
    values: dict[str, Any] = {}
    if heads > 1 and given.get("mtp_multi_layer", True) and (not isinstance(steps, int) or steps <= heads):
        values = {"mtp_multi_layer": True, "num_steps": heads if steps is None else steps}
        because, source = f"the checkpoint holds {heads} MTP layers", "checkpoint"
    elif "num_steps" not in given and isinstance(steps, int):
        values, because, source = {"num_steps": steps}, f"num_draft_tokens is {tokens}, the root counted", "algorithm"
    elif told is not None and "num_steps" not in given:
        values, because, source = {"num_steps": told}, "the draft's config.json proposes as many tokens", "checkpoint"
    values = {field: value for field, value in values.items() if field not in given}
    if not values:
        return None
    return Defaults.model_validate({"values": values, "because": because, "source": source})


def objections(config: BuiltinMtpConfig, facts: Facts) -> Iterator[Problem]:
    """Yield what works but is hardly meant."""
    layout = find(facts)
    if isinstance(layout, Refusal):
        return
    if config.num_draft_tokens not in (None, config.num_steps + 1):
        yield _warning(
            "num_draft_tokens",
            f"{config.num_draft_tokens} and num_steps {config.num_steps} differ by more than the root: "
            f"{config.nodes} tokens are drafted",
        )
    unused = len(layout.prefixes) - heads_used(config, layout)
    if unused:
        yield _warning(
            "mtp_multi_layer", f"off: the first MTP layer drafts every step, and {unused} more that are stored do not"
        )
    if facts.draft is not None and same_folder(facts.draft, facts.target):
        yield _warning("draft_model_path", "is the target's own: its MTP layers are used without it")


def _proposed(facts: Facts) -> int | None:
    """Return how many tokens a speculators draft says it is to propose."""
    draft = facts.draft
    about = draft.config.get("speculators_config") if draft is not None else None
    methods = about.get("proposal_methods") if isinstance(about, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _warning(field: str, message: str) -> Problem:
    return Problem(severity="warning", field=field, message=message)
