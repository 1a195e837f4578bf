"""Which MTP heads a checkpoint holds, under which names and in which arrangement. Torch-free.

Every layout computes ``N_out(block(P([N_e(e(t_{i+1})), N_h(h_i)])))``; what differs is told by `Layout`. Sources: the
tensor names and the authors' published modelling files of each family, as noted at the layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specplug import Checkpoint, Facts, Refusal

PROJECTION, BLOCK = "proj.weight", "block."

_FASTMTP = {
    "token_layernorm.weight": "embed_norm.weight",
    "hidden_layernorm.weight": "hidden_norm.weight",
    "input_proj.weight": PROJECTION,
    "final_layernorm.weight": "out_norm.weight",
}
_DEEPSEEK = {
    "enorm.weight": "embed_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "eh_proj.weight": PROJECTION,
    "shared_head.norm.weight": "out_norm.weight",
}
_QWEN = {
    "pre_fc_norm_embedding.weight": "embed_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight",
    "fc.weight": PROJECTION,
    "norm.weight": "out_norm.weight",
}

Block = Literal["decoder", "glm4_moe", "deepseek_v3", "qwen"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a checkpoint's MTP heads lie, and how they are put together."""

    family: str
    which: Literal["draft", "target"]
    """The checkpoint that holds them."""
    prefixes: tuple[str, ...]
    """What the tensors of each head begin with, the head for the next token but one first."""
    names: Mapping[str, str]
    """Stored name, after the prefix -> name in `specplug_mtp.builtin_head.Head`; all others are the block's."""
    config: Mapping[str, Any]
    """The ``config.json`` that the block follows."""
    block: Block = "decoder"
    like: str | None = None
    """With block ``decoder``: the architecture whose rules it follows; None: the config's own."""
    embedding_first: bool = True
    """Order of the projection's input: [embedding, hidden state], or the other way round."""
    zero_centred: bool = False
    """Whether norms multiply by ``1 + weight``."""
    inner: str = ""
    """What the block's tensors begin with, after the prefix."""
    shared: frozenset[str] = field(default=frozenset({"embed_tokens.weight", "shared_head.head.weight"}))
    """Stored names, after the prefix, that repeat the target's own tensors."""

    def rename(self, name: str, prefix: str) -> str | None:
        """Return the name in `Head` of a stored tensor under `prefix`; None: a copy of what the target lends."""
        rest = name.removeprefix(prefix)
        if rest in self.shared:
            return None
        return self.names.get(rest, BLOCK + rest.removeprefix(self.inner))


KNOWN: Mapping[str, str] = {
    "MiMoV2": "MiMo-V2",
    "Step3": "Step-3.5",
    "DeepseekV4": "DeepSeek-V4",
    "DeepseekV32": "DeepSeek-V3.2",
    "GlmMoeDsa": "GLM-5",
    "Glm5": "GLM-5.3",
    "Glm4MoeLite": "GLM-4.7-Flash",
    "Ernie4_5": "Ernie 4.5",
    "LongcatFlash": "LongCat-Flash",
    "Pangu": "Pangu",
    "HunYuan": "Hunyuan",
    "HYV": "Hunyuan",
    "Bailing": "Bailing",
    "Nemotron": "Nemotron-H",
    "Exaone": "EXAONE",
    "Inkling": "Inkling",
    "Kimi": "Kimi",
    "MistralLarge3": "Mistral Large 3",
}
"""Start of an architecture's name -> a family whose MTP layers are known, and not run here."""

_DECODER_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QWEN_ROOT = re.compile(r"((?:model\.)?(?:language_model\.)?mtp\.)(?:fc|layers|norm|pre_fc_norm_\w+)\.")
_FASTMTP_ROOT = re.compile(r"((?:model\.)?mtp_layers\.)(\d+)\.")
_NUMBERED = re.compile(r"((?:model\.)?(?:language_model\.)?layers\.)(\d+)\.(?:enorm|hnorm|eh_proj)\.")
_FOREIGN = re.compile(r"(?:model\.)?mtp\.(?:layers\.\d+\.(?:enorm|hnorm|eh_proj|final_layernorm)|\d+\.)")
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def holds_heads(checkpoint: Checkpoint) -> bool:
    """Whether `checkpoint` stores MTP layers of any known kind; where no file is read its config decides."""
    if checkpoint.config.get("speculators_model_type") == "mtp":
        return True
    if checkpoint.tensors is None:
        return stated(checkpoint.config) > 0
    layers = text_config(checkpoint.config).get("num_hidden_layers")
    return any(_is_head(name, layers) for name in checkpoint.tensors)


def stated(config: Mapping[str, Any]) -> int:
    """Return how many MTP layers a ``config.json`` speaks of."""
    text = text_config(config)
    counts = [text.get(key) for key in _COUNTS] + [config.get(key) for key in _COUNTS]
    return next((count for count in counts if isinstance(count, int) and count > 0), 0)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a ``config.json`` that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def architecture(config: Mapping[str, Any]) -> str:
    """Return the first architecture that `config` names, or ``""``."""
    named = config.get("architectures") or [""]
    return str(named[0])


def known_family(name: str) -> str | None:
    """Return the family of `KNOWN` that an architecture's name belongs to."""
    return next((family for start, family in KNOWN.items() if name.startswith(start)), None)


def find(facts: Facts) -> Layout | Refusal:
    """Return the heads that a run with `facts` drafts with: a draft checkpoint's, else the target's own."""
    draft = facts.draft
    if draft is not None and not same_folder(draft, facts.target):
        if draft.config.get("speculators_model_type") == "mtp":
            return _speculators(draft)
        found = _native(draft, "draft", architecture(draft.config))
        option = f"--speculative-draft-model-path {draft.path or '(no folder)'}"
        return found or Refusal(
            reason=f"{option} holds no MTP layers that are known here",
            try_instead="leave it out where the target has its own, or --speculative-algorithm eagle for an EAGLE head",
        )
    name = architecture(facts.target.config)
    found = _native(facts.target, "target", name)
    if found is not None:
        return found
    count, family = stated(facts.target.config), known_family(name)
    if count and family:
        return _not_run(family, name)
    told = f"its config.json speaks of {count}, but its files hold none by a known name (a repack may have lost them)"
    return Refusal(
        reason=f"the target ({name or 'of no named architecture'}) has no MTP layers: "
        + (told if count else "neither its tensors nor its config.json show any"),
        try_instead="--speculative-draft-model-path with an MTP draft for this target, or another algorithm",
    )


def same_folder(draft: Checkpoint, target: Checkpoint) -> bool:
    """Whether the draft given is the target itself."""
    return bool(draft.path) and draft.path == target.path


def unexpected(layout: Layout, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the tensors of a draft's own file that no head owns; a target's file holds much else."""
    if layout.which == "target" or checkpoint.tensors is None:
        return ()
    whole = any(_is_trunk(name, layout) for name in checkpoint.tensors)
    lent = ("embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight")
    return tuple(
        name
        for name in checkpoint.tensors
        if not whole and not name.startswith(layout.prefixes) and name not in lent and not name.endswith(".inv_freq")
    )


def _is_trunk(name: str, layout: Layout) -> bool:
    """Whether `name` belongs to a whole model that came along with its heads."""
    return name.endswith("layers.0.input_layernorm.weight") and not name.startswith(layout.prefixes)


def _native(checkpoint: Checkpoint, which: Literal["draft", "target"], name: str) -> Layout | Refusal | None:
    """Return the heads that lie in a model's own file; None where it has none."""
    config = text_config(checkpoint.config)
    if not holds_heads(checkpoint):
        return None
    family = known_family(name)
    if family is None and any(_FOREIGN.match(stored) for stored in checkpoint.tensors or ()):
        family = name or "unnamed"
    if family is not None:
        return _not_run(family, name)
    if name.startswith("MiMoFor"):
        roots = _roots(_FASTMTP_ROOT, checkpoint.tensors, "model.mtp_layers.", range(stated(config)))
        return None if roots is None else Layout("MiMo", which, roots, _FASTMTP, config, embedding_first=False)
    if name.startswith(("DeepseekV3", "Glm4Moe")):
        first = config.get("num_hidden_layers")
        first = first if isinstance(first, int) and checkpoint.tensors is None else 0
        roots = _roots(_NUMBERED, checkpoint.tensors, "model.layers.", range(first, first + stated(config)))
        block: Block = "deepseek_v3" if name.startswith("DeepseekV3") else "glm4_moe"
        family = "DeepSeek-V3" if block == "deepseek_v3" else "GLM-4.5"
        return None if roots is None else Layout(family, which, roots, _DEEPSEEK, config, block)
    if name.startswith(("Qwen3Next", "Qwen3_5")):
        return _qwen(checkpoint, which, config)
    return _not_run(name or "an unnamed architecture", name)


def _qwen(checkpoint: Checkpoint, which: Literal["draft", "target"], config: Mapping[str, Any]) -> Layout | Refusal:
    names = checkpoint.tensors
    root = "mtp."
    if names is not None:
        root = next(found[1] for name in names if (found := _QWEN_ROOT.match(name)))
        if any(name.startswith(f"{root}layers.1.") for name in names):
            return Refusal(
                reason=f"the target holds several {root}layers, and Qwen heads of more than one layer are not run",
                try_instead="a checkpoint with one MTP layer",
            )
    return Layout(
        "Qwen3-Next and Qwen3.5",
        which,
        (root,),
        _QWEN,
        config,
        "qwen",
        zero_centred=True,
        inner="layers.0.",
    )


def _speculators(draft: Checkpoint) -> Layout | Refusal:
    config = draft.config.get("transformer_layer_config")
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if kind not in _DECODER_TYPES or not isinstance(config, Mapping):
        return Refusal(
            reason=f"the draft's transformer_layer_config has model_type {kind!r}; its MTP layer is run for "
            f"{', '.join(_DECODER_TYPES)}",
            try_instead="an MTP draft of such a target",
        )
    count = draft.config.get("num_nextn_predict_layers", 1)
    if count != 1:
        return Refusal(
            reason=f"the draft's config.json has num_nextn_predict_layers {count!r}; this format knows 1",
            try_instead="a draft with one MTP layer",
        )
    return Layout(
        "speculators", "draft", ("mtp_layers.0.",), _FASTMTP, config, like=_DECODER_TYPES[kind], shared=frozenset()
    )


def _not_run(family: str, name: str) -> Refusal:
    return Refusal(
        reason=f"the MTP layers of {family} ({name or 'no architecture named'}) are recognised, but not run by this "
        "version; it runs those of MiMo-7B, DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, and speculators' MTP drafts",
        try_instead="--speculative-algorithm none, or another algorithm with a draft of its own",
    )


def _is_head(name: str, layers: Any) -> bool:
    if numbered := _NUMBERED.match(name):
        # In a draft's own file layers count from 0; in a target's the heads follow its layers.
        return isinstance(layers, int) and (int(numbered[2]) >= layers or layers == 1)
    return bool(_FASTMTP_ROOT.match(name) or _QWEN_ROOT.match(name) or _FOREIGN.match(name))


def _roots(
    pattern: re.Pattern[str], tensors: Iterable[str] | None, usual: str, numbers: Iterable[int]
) -> tuple[str, ...] | None:
    """Return the prefix of each head, by number; without files those of `numbers` under the `usual` root."""
    if tensors is None:
        return tuple(f"{usual}{number}." for number in numbers) or None
    found = {(match[1], int(match[2])) for name in tensors if (match := pattern.match(name))}
    return tuple(f"{root}{number}." for root, number in sorted(found, key=lambda each: each[1])) or None
