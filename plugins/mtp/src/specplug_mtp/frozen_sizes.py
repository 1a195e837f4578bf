"""What an assistant is built from and which KV of its target it reads, from both ``config.json`` alone. Torch-free.

Parsing refuses what the model would compute differently from its authors, so that a wrong draft cannot come from a
config key nobody looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specplug import UserError

ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
"""Architectures of the drafts that read their target's KV."""
SLIDING, FULL = "sliding_attention", "full_attention"

# What the architecture's own config class fills in for a key that a file leaves out.
_HEAD_DIM = {SLIDING: 256, FULL: 512}
_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
_FULL_EVERY = 6  # in a config without layer_types every sixth layer sees everything
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "attention_bias": (None, False),
    "enable_moe_block": (None, False),
    "use_double_wide_mlp": (None, False),
    "hidden_size_per_layer_input": (0,),
    "final_logit_softcapping": (None,),
}


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Rotary embedding of one kind of layer: the first `rotated` of `pairs` pairs of dimensions turn."""

    theta: float
    pairs: int
    rotated: int
    factor: float = 1.0
    """Frequencies are divided by it."""


@dataclass(frozen=True, slots=True)
class ReadingLayer:
    """One layer of an assistant: it has queries only."""

    kind: str
    """`SLIDING` or `FULL`."""
    heads: int
    head_dim: int
    window: int | None
    """Committed tokens it sees, the last ones; None: all."""
    reads: int
    """KV layer of the target that it reads."""


@dataclass(frozen=True, slots=True)
class AssistantSizes:
    """Everything an assistant is built from. Sizes in elements, positions and windows in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    backbone_size: int
    """Hidden size of the target."""
    layers: tuple[ReadingLayer, ...]
    rope: Mapping[str, Frequencies]
    """By kind of layer."""
    norm_eps: float
    max_position: int
    centroids: int | None
    """Clusters that the head chooses among; None: it looks at the whole vocabulary."""
    chosen: int
    """Clusters whose tokens get logits."""


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a draft's config names an architecture of `ASSISTANTS`."""
    return any(name in ASSISTANTS for name in config.get("architectures") or ())


def assistant_sizes(draft: Mapping[str, Any], target: Mapping[str, Any]) -> AssistantSizes:
    """Return the sizes of the assistant with config `draft`, bound to the target with config `target`.

    Raises UserError where it is none, computes something unknown, or was not made for this target.
    """
    if not is_assistant(draft):
        named = ", ".join(draft.get("architectures") or ["none named"])
        raise UserError(f"the draft has architecture {named}, and only {' and '.join(ASSISTANTS)} read a target's KV")
    text, theirs = _text(draft), _text(target)
    for key, allowed in _FIXED.items():
        if text.get(key, allowed[0]) not in allowed:
            raise _wrong("the assistant", key, text[key], f"{allowed[-1]!r} is what runs")
    if not draft.get("tie_word_embeddings", True):
        raise _wrong("the assistant", "tie_word_embeddings", False, "its head is its own embedding: True is what runs")
    layers = _count(text, "num_hidden_layers", "the assistant")
    if text.get("num_kv_shared_layers") not in (None, 0, layers):
        raise _wrong("the assistant", "num_kv_shared_layers", text["num_kv_shared_layers"], f"{layers} is what runs")
    vocab, backbone = (
        _count(text, "vocab_size", "the assistant"),
        _count(draft, "backbone_hidden_size", "the assistant"),
    )
    for ours, key in ((backbone, "hidden_size"), (vocab, "vocab_size")):
        if theirs.get(key) != ours:
            raise UserError(f"the assistant was made for a target with {key} {ours}, and MODEL has {theirs.get(key)}")
    kinds = _kinds(text, layers)
    centroids, chosen = _clusters(draft, vocab)
    return AssistantSizes(
        vocab_size=vocab,
        hidden_size=_count(text, "hidden_size", "the assistant"),
        intermediate_size=_count(text, "intermediate_size", "the assistant"),
        backbone_size=backbone,
        layers=tuple(_layer(text, theirs, number, kind) for number, kind in enumerate(kinds)),
        rope={kind: _frequencies(text, kind, _head_dim(text, kinds.index(kind), kind)) for kind in sorted({*kinds})},
        norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        max_position=_count(text, "max_position_embeddings", "the assistant", 131_072),
        centroids=centroids,
        chosen=chosen,
    )


def _layer(text: Mapping[str, Any], theirs: Mapping[str, Any], number: int, kind: str) -> ReadingLayer:
    heads, head_dim = _count(text, "num_attention_heads", "the assistant"), _head_dim(text, number, kind)
    reads = _source(theirs, kind)
    if _head_dim(theirs, reads, kind) != head_dim:
        raise UserError(
            f"the assistant's layer {number} has heads of {head_dim} and would read MODEL's layer {reads}, which has "
            f"heads of {_head_dim(theirs, reads, kind)}"
        )
    kv_heads = _kv_heads(theirs, reads, kind)
    if heads % kv_heads:
        raise UserError(
            f"the assistant's layer {number} has {heads} heads, no multiple of the {kv_heads} KV heads of MODEL's "
            f"layer {reads}, which it would read"
        )
    window = _count(text, "sliding_window", "the assistant", 512) if kind == SLIDING else None
    return ReadingLayer(kind, heads, head_dim, window, reads)


def _source(theirs: Mapping[str, Any], kind: str) -> int:
    """Return the last layer of `kind` of the target that keeps KV of its own: those behind share it."""
    layers = _count(theirs, "num_hidden_layers", "MODEL")
    own = layers - (theirs.get("num_kv_shared_layers") or 0)
    found = [number for number, other in enumerate(_kinds(theirs, layers)[:own]) if other == kind]
    if not found:
        raise UserError(f"the assistant reads the KV of a layer of kind {kind}, and MODEL keeps none")
    return found[-1]


def _frequencies(text: Mapping[str, Any], kind: str, head_dim: int) -> Frequencies:
    stated = (text.get("rope_parameters") or _ROPE).get(kind) or {}
    rope, pairs = {**_ROPE[kind], **stated}, head_dim // 2
    theta, factor = float(rope["rope_theta"]), float(rope.get("factor") or 1.0)
    if rope["rope_type"] == "default":
        return Frequencies(theta, pairs, pairs)
    if rope["rope_type"] == "proportional":
        return Frequencies(theta, pairs, int(float(rope.get("partial_rotary_factor", 1.0)) * head_dim // 2), factor)
    raise _wrong("the assistant", "rope_type", rope["rope_type"], "'default' and 'proportional' are what runs")


def _clusters(draft: Mapping[str, Any], vocab: int) -> tuple[int | None, int]:
    if not draft.get("use_ordered_embeddings", False):
        return None, 0
    centroids = _count(draft, "num_centroids", "the assistant", 2048)
    chosen = _count(draft, "centroid_intermediate_top_k", "the assistant", 32)
    if vocab % centroids or chosen > centroids:
        raise UserError(f"the assistant has {centroids} centroids, {chosen} of them chosen, for {vocab} tokens")
    return centroids, chosen


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that says how text is modelled."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _kinds(text: Mapping[str, Any], layers: int) -> Sequence[str]:
    stated = text.get("layer_types")
    if not stated:
        stated = [FULL if (number + 1) % _FULL_EVERY == 0 else SLIDING for number in range(layers)]
    kinds = [*stated[:-1], FULL]  # the architecture lets its last layer see everything, whatever is stated
    if len(kinds) != layers or not {*kinds} <= {SLIDING, FULL}:
        raise _wrong("config.json", "layer_types", stated, f"one of {SLIDING} and {FULL} for each of {layers} layers")
    return kinds


def _head_dim(text: Mapping[str, Any], layer: int, kind: str) -> int:
    """Return a layer's head dim: newer files list what differs from ``head_dim`` by layer, older ones by kind."""
    own, key = _override(text, layer), "head_dim"
    if own is not None:
        return int(own.get(key) or text.get(key) or _HEAD_DIM[SLIDING])
    return int(text.get("global_head_dim" if kind == FULL else key) or _HEAD_DIM[kind])


def _kv_heads(text: Mapping[str, Any], layer: int, kind: str) -> int:
    own, key = _override(text, layer), "num_key_value_heads"
    if own is None and kind == FULL and text.get("attention_k_eq_v"):
        own = {key: text.get("num_global_key_value_heads")}
    return int((own or {}).get(key) or _count(text, key, "MODEL"))


def _override(text: Mapping[str, Any], layer: int) -> Mapping[str, Any] | None:
    """Return what a config says of one layer alone; None where it says nothing of any."""
    stated = text.get("per_layer_config")
    if not isinstance(stated, Mapping):
        return None
    own = stated.get(str(layer)) or stated.get(layer) or {}
    return own if isinstance(own, Mapping) else {}


def _count(config: Mapping[str, Any], key: str, whose: str, unstated: int | None = None) -> int:
    value = config.get(key)
    value = unstated if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(whose, key, value, "a whole number above 0 is needed")
    return value


def _wrong(whose: str, key: str, value: Any, wanted: str) -> UserError:
    return UserError(f"{whose}: config.json has {key} = {value!r}; {wanted}")
