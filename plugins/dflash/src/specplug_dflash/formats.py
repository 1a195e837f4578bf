"""What a draft checkpoint says of itself, in one form for all published layouts. Torch-free.

Layouts: z-lab DFlash (arXiv 2602.06036), its transformers port (Muse-Glimmer), DeepSeek's DSpark (arXiv 2607.05147)
flat or nested as SpecForge and ModelOpt write it, and the speculators envelope around either.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from specplug import DecoderConfig, Facts, Refusal, UserError, decoder_sizes
from specplug_dflash.foreign import bundled, relative
from specplug_dflash.keys import Keys
from specplug_dflash.names import MASK, MASK_FILE, own_names

Shapes = Mapping[str, tuple[int, ...]]
"""Our name of each stored tensor -> its shape."""
DRAFT = "the draft model"
OPTION = "--speculative-draft-model-path DRAFT"
_LIKE = "Qwen3ForCausalLM"
"""Whose layers every layout has, whatever `model_type` the config was copied with."""
_WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_MUSE = "muse_glimmer_assistant"


@dataclass(frozen=True, slots=True)
class Markov:
    """The sequential head: a bias on the logits that follows from the token before. `rank`: its width."""

    kind: Literal["vanilla", "gated", "rnn"]
    rank: int


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """A draft checkpoint, read. H is its hidden size, V the target's vocabulary."""

    sizes: DecoderConfig
    """Its layers; `windows` counts positions, a token's own included."""
    causal: tuple[bool, ...]
    """One per layer: a row of the block sees none of the later ones."""
    block: int
    """Rows of one forward: the anchor, which is the newest token, and the masks behind it."""
    block_known: bool
    """The checkpoint says so."""
    next_slot: bool
    """Row k predicts the token behind its own position, p + k + 1; else the one at it, p + k."""
    mask_token: int
    taps: tuple[int, ...]
    """Boundaries of the target, in the order of `fc`'s input."""
    feature: int
    """Width of one of them."""
    vocab: int
    """Target vocabulary."""
    head_rows: int
    """Draft vocabulary."""
    stored: frozenset[str]
    """Of ``embed_tokens``, ``lm_head``, ``d2t``, ``t2d``: what the checkpoint holds; the target lends the others."""
    mask_stored: bool
    """The mask's embedding lies in a file of its own."""
    markov: Markov | None
    confidence: Literal["none", "hidden", "hidden and markov"]
    """What the confidence head reads."""
    embed_scale: float
    logit_scale: float
    softcap: float | None
    dspark: bool
    """The checkpoint calls itself DSpark's."""

    @property
    def drafts(self) -> int:
        """Tokens that one forward drafts."""
        return self.block - 1 + self.next_slot


@dataclass(frozen=True, slots=True)
class _Target:
    layers: int | None
    hidden: int | None
    vocab: int | None


def read_draft(facts: Facts, block: int | None = None) -> BlockDraft | Refusal:
    """Read `facts.draft`; `block` is the size to take where the checkpoint names none.

    Never raises: what is missing, contradictory, of another target or of another method is a refusal.
    """
    if facts.draft is None:
        if bundled(facts.target.config):
            return Refusal(
                reason="the target holds a DeepSeek-V4 DSpark draft among its own layers, which this version does not "
                "run",
                try_instead=OPTION,
            )
        return Refusal(reason="blocks are drafted by a draft checkpoint, and none is given", try_instead=OPTION)
    if facts.first_vocab_difference is not None:
        number, ours, theirs = facts.first_vocab_difference
        return Refusal(
            reason=f"{DRAFT} has another tokenizer: id {number} is {ours!r} in the target's and {theirs!r} in the "
            "draft's",
            try_instead="a draft made for this target",
        )
    try:
        keys = Keys(facts.draft.config)
        foreign = relative(keys, facts.draft.tensors or ())
        return foreign or _read(facts, keys, block)
    except UserError as error:
        return Refusal(reason=str(error), try_instead="a draft made for this target, or its config.json put right")


def shapes_of(facts: Facts) -> Shapes | None:
    """Return the shape of each stored tensor of the draft, by our names; None under load format ``dummy``."""
    if facts.draft is None or facts.draft.tensors is None:
        return None
    names = own_names(facts.draft.tensors)
    return {ours: facts.draft.tensors[name].shape for name, ours in names.items() if ours is not None}


def _read(facts: Facts, keys: Keys, block: int | None) -> BlockDraft:
    tensors, target = shapes_of(facts), _target(facts.target.config)
    dspark = _is_dspark(keys)
    sizes, causal = _layers(keys, tensors, target)
    hidden = sizes.hidden_size
    taps = _taps(keys, target, len(sizes.windows))
    feature = _feature(keys, tensors, target, hidden, len(taps))
    stored = _stored(keys, tensors, hidden, target)
    vocab = target.vocab or sizes.vocab_size
    head_rows = _head_rows(keys, tensors, stored, vocab)
    mask_stored = _mask_stored(facts, hidden)
    rows = tensors["embed_tokens.weight"][0] if tensors and "embed_tokens" in stored else vocab
    if rows < vocab:
        raise UserError(f"{DRAFT}: embed_tokens.weight has {rows} rows for a target of {vocab} tokens")
    given = keys.whole("block_size", least=1)
    markov = _markov(keys, tensors)
    return BlockDraft(
        sizes=replace(sizes, vocab_size=rows),
        causal=causal,
        block=given or block or (7 if dspark else 16),
        block_known=given is not None,
        next_slot=bool(keys.get("sample_from_anchor", dspark)),
        mask_token=_mask_token(keys, rows, mask_stored),
        taps=taps,
        feature=feature,
        vocab=vocab,
        head_rows=head_rows,
        stored=stored,
        mask_stored=mask_stored,
        markov=markov,
        confidence=_confidence(keys, tensors, markov, hidden),
        embed_scale=keys.number("input_embedding_scale", 1.0) or 1.0,
        logit_scale=keys.number("output_multiplier", 1.0) or 1.0,
        softcap=keys.number("final_logit_softcapping", None) or None,
        dspark=dspark,
    )


def _target(config: Mapping[str, Any]) -> _Target:
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    found = (config.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return _Target(*(value if isinstance(value, int) and value > 0 else None for value in found))


def _is_dspark(keys: Keys) -> bool:
    if keys.speculators is not None:
        return keys.speculators == "dspark"
    return "DSpark" in keys.architecture or keys.get("projector_type") == "dspark" or bool(keys.found("markov_rank"))


def _layers(keys: Keys, tensors: Shapes | None, target: _Target) -> tuple[DecoderConfig, tuple[bool, ...]]:
    """Return the layers' sizes, and which are causal inside the block. What is stored beats what is said."""
    config = {key: value for key, value in keys.layers.items() if key not in _WINDOW_KEYS}
    config["quantization_config"] = keys.top.get("quantization_config") or config.get("quantization_config")
    config.setdefault("vocab_size", target.vocab or 1)
    if keys.layers.get("model_type") == _MUSE and not config.get("rope_parameters"):
        config.setdefault("rope_theta", 500000.0)
    if tensors is not None:
        for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"):
            if name not in tensors:
                raise UserError(f"{DRAFT} is no DFlash or DSpark draft: it holds no {name}")
        numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        config["num_hidden_layers"] = len(numbers)
        if "layers.0.self_attn.q_norm.weight" in tensors:
            config["head_dim"] = tensors["layers.0.self_attn.q_norm.weight"][0]
    sizes = decoder_sizes(config, _LIKE, DRAFT)
    if tensors is not None:
        sizes = replace(
            sizes,
            qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
            qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
            o_bias="layers.0.self_attn.o_proj.bias" in tensors,
        )
    windows, causal = _windows(keys, len(sizes.windows))
    return replace(sizes, windows=windows), causal


def _windows(keys: Keys, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return each layer's window, own position included, and whether it is causal inside the block.

    Three conventions of the window's far edge are published for a window of w, here turned into positions a row sees
    below and at its own: w (z-lab's code, and engines' kernels), w + 1 (transformers: a distance of w is inside), and
    the w tokens before the anchor for every row alike (speculators' training): w + 1, exact for the first row.
    """
    muse = keys.layers.get("model_type") == _MUSE
    kinds = keys.layers.get("layer_types") or ["sliding_attention" if muse else "full_attention"] * layers
    unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise UserError(f"{DRAFT}: config.json has {len(kinds)} layer_types {unknown or ''} for {layers} layers")
    window = keys.layers.get("sliding_window", 2048 if muse else None)
    if keys.layers.get("use_sliding_window") is False:
        window = None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(f"{DRAFT}: config.json has sliding_window = {window!r}, a whole number of at least 1 is needed")
    if window is not None and (muse or keys.speculators is not None):
        window += 1
    sliding = [kind == "sliding_attention" for kind in kinds]
    said = keys.get("is_causal", keys.get("causal"))
    everywhere = None if said is None else bool(said)
    inside = not muse and not keys.get("sliding_window_non_causal", False)
    return (
        tuple(window if slides else None for slides in sliding),
        tuple((slides and inside) if everywhere is None else everywhere for slides in sliding),
    )


def _taps(keys: Keys, target: _Target, layers: int) -> tuple[int, ...]:
    """Return the boundaries that the draft reads: native ids name a layer whose output is meant, boundary id + 1."""
    made_for = keys.whole("num_target_layers", least=1)
    depth = target.layers or made_for
    if made_for is not None and depth != made_for:
        raise UserError(f"{DRAFT} was made for a target of {made_for} layers, this one has {depth}")
    boundaries = keys.get("aux_hidden_state_layer_ids") if keys.speculators is not None else None
    ids = keys.get("target_layer_ids")
    if boundaries is None and ids is None:
        if depth is None or depth < 4:
            raise UserError(f"{DRAFT}: config.json has no target_layer_ids, and nothing to count them by")
        even = [round(1 + at * (depth - 4) / max(layers - 1, 1)) for at in range(layers)]
        ids = even if layers > 1 else [depth // 2]
    given = boundaries if boundaries is not None else ids
    if not isinstance(given, list) or not given or not all(type(each) is int for each in given):
        raise UserError(f"{DRAFT}: config.json has target_layer_ids = {given!r}, a list of layers is needed")
    found = tuple(given) if boundaries is not None else tuple(each + 1 for each in given)
    outside = [each for each in found if each < 0 or (depth is not None and each > depth)]
    if outside:
        raise UserError(f"{DRAFT} reads the target after layer {outside[0]}, which has {depth} layers: ids {given}")
    return found


def _feature(keys: Keys, tensors: Shapes | None, target: _Target, hidden: int, taps: int) -> int:
    width = target.hidden or keys.whole("target_hidden_size", least=1) or hidden
    if tensors is not None and (wide := tensors["fc.weight"][-1]) != taps * width:
        raise UserError(
            f"{DRAFT} was made for another target: fc.weight reads {wide} numbers, {taps} states of this one are "
            f"{taps * width}"
        )
    return width


def _stored(keys: Keys, tensors: Shapes | None, hidden: int, target: _Target) -> frozenset[str]:
    if tensors is None:  # random weights: borrow what fits, as most layouts do
        own = set() if target.hidden in (None, hidden) else {"embed_tokens", "lm_head"}
        rows = keys.whole("draft_vocab_size", least=1)
        return frozenset(own | ({"lm_head", "d2t"} if rows and target.vocab and rows < target.vocab else set()))
    parts = ("embed_tokens", "lm_head", "d2t", "t2d")
    found = frozenset(part for part in parts if part in tensors or f"{part}.weight" in tensors)
    for part in ("embed_tokens", "lm_head"):
        if part not in found and target.hidden not in (None, hidden):
            raise UserError(f"{DRAFT} has hidden size {hidden}, the target {target.hidden}, and holds no {part}.weight")
    return found


def _head_rows(keys: Keys, tensors: Shapes | None, stored: frozenset[str], vocab: int) -> int:
    rows = keys.whole("draft_vocab_size", vocab, least=1) or vocab
    if tensors is not None:
        rows = tensors["lm_head.weight"][0] if "lm_head" in stored else rows
        if rows < vocab and "lm_head" not in stored:
            raise UserError(f"{DRAFT} has a vocabulary of {rows} of the target's {vocab} tokens and no lm_head.weight")
        if rows < vocab and not stored & {"d2t", "t2d"}:
            raise UserError(f"{DRAFT}: lm_head.weight has {rows} rows for {vocab} tokens, and neither d2t nor t2d")
    if rows > vocab:
        raise UserError(f"{DRAFT} has a vocabulary of {rows} tokens, the target one of {vocab}")
    return rows


def _mask_stored(facts: Facts, hidden: int) -> bool:
    """Whether the draft brings an embedding of its mask, which is then of the right size."""
    if facts.draft is None or MASK_FILE not in facts.draft.files:
        return False
    found = (facts.draft.tensors or {}).get(MASK)
    if found is None or prod(found.shape) != hidden:
        raise UserError(
            f"{DRAFT} {facts.draft.path}: its {MASK_FILE} holds no {MASK!r} of {hidden} numbers: "
            "remove the file, or use another copy"
        )
    return True


def _mask_token(keys: Keys, rows: int, mask_stored: bool) -> int:
    mask = keys.whole("mask_token_id")
    if mask_stored:
        return mask or 0
    if mask is None:
        raise UserError(f"{DRAFT}: config.json has no mask_token_id")
    if mask >= rows:
        raise UserError(f"{DRAFT}: config.json has mask_token_id = {mask}, and there are {rows} embeddings")
    return mask


def _markov(keys: Keys, tensors: Shapes | None) -> Markov | None:
    rank = keys.whole("markov_rank", 256 if keys.speculators == "dspark" else 0)
    if tensors is not None:
        table = tensors.get("markov_head.markov_w1.weight")
        if bool(rank) != (table is not None):
            held = "holds" if table else "holds no"
            raise UserError(f"{DRAFT}: config.json has markov_rank = {rank}, and it {held} markov_w1.weight")
        rank = table[-1] if table else 0
    kind = keys.get("markov_head_type", "vanilla")
    if not rank:
        return None
    if kind not in ("vanilla", "gated", "rnn"):
        raise UserError(f"{DRAFT}: config.json has markov_head_type = {kind!r}; supported: vanilla, gated, rnn")
    return Markov(kind, rank)


def _confidence(
    keys: Keys, tensors: Shapes | None, markov: Markov | None, hidden: int
) -> Literal["none", "hidden", "hidden and markov"]:
    if tensors is not None:
        weight = tensors.get("confidence_head.proj.weight")
        if weight is None:
            return "none"
        return "hidden" if weight[-1] == hidden else "hidden and markov"
    asked = keys.get("enable_confidence_head", keys.get("use_confidence_head", keys.speculators == "dspark"))
    if not asked:
        return "none"
    return "hidden and markov" if markov and keys.get("confidence_head_with_markov", True) else "hidden"
