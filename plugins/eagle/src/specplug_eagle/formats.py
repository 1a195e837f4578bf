"""How published heads are spelt, and what else a draft folder may hold. Torch-free.

Names of tensors differ by producer: the authors and SpecForge write ``midlayer.``, ModelOpt, speculators and vLLM
``layers.0.``; some put one prefix before everything. Here they become one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from specplug import Refusal

Shapes = Mapping[str, tuple[int, ...]]
"""Canonical name -> shape."""

_PREFIXES = ("speculator.", "base_model.", "draft_model.", "model.")
_FUSION = ("fusion_fc.", "eagle_linear.")
"""Other names of ``fc.``: early speculators conversions, Mistral's own heads."""
_LATER_NORM = re.compile(r"^(layers\.[1-9]\d*)\.hidden_norm\.")
"""In layers after the first this norm stands where others have ``input_layernorm`` (SGLang's additional layers)."""

OPTION = "--speculative-draft-model-path"
QUERY = "layers.0.self_attn.q_proj.weight"
"""Its width tells the formats apart."""
HEAD = "the draft head"
"""What the checkpoint is called in reasons."""


def canonical(stored: Iterable[str]) -> dict[str, str]:
    """Return stored name -> canonical name (``layers.0.``, ``fc.``, no prefix) of all tensors of a file."""
    names = tuple(stored)
    prefix = next((p for p in _PREFIXES if names and all(name.startswith(p) for name in names)), "")
    return {name: _renamed(name.removeprefix(prefix)) for name in names}


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    for other in _FUSION:
        if name.startswith(other):
            name = "fc." + name.removeprefix(other)
    return _LATER_NORM.sub(r"\1.input_layernorm.", name)


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of a head with what some producers nest brought to the top.

    speculators nests the layers' config, an early vLLM conversion everything; flags of ``eagle_config`` count where the
    top level does not have them.
    """
    inner = config.get("transformer_layer_config")
    if "speculators_model_type" in config and isinstance(inner, Mapping):
        rest = {key: value for key, value in config.items() if key != "transformer_layer_config"}
        flat = {**inner, **rest}
    elif config.get("model_type") == "eagle" and isinstance(config.get("model"), Mapping):
        flat = dict(config["model"])
    else:
        flat = dict(config)
    nested = flat.get("eagle_config")
    if isinstance(nested, Mapping):
        for flag in FLAGS:
            if flat.get(flag) is None and nested.get(flag) is not None:
                flat[flag] = nested[flag]
    return flat


FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
"""Switches of EAGLE-3.1 (arXiv 2605.09992) and of the speculators library."""


# --- what is no head of these formats --------------------------------------------------------------------------------

_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "Gemma4AssistantForCausalLM": ("a Gemma 4 assistant", "--speculative-algorithm frozen-kv-mtp"),
    "Gemma4UnifiedAssistantForCausalLM": ("a Gemma 4 assistant", "--speculative-algorithm frozen-kv-mtp"),
    **dict.fromkeys(
        ("DFlashDraftModel", "DFlash2DraftModel", "DominoDraftModel", "DFlashSpeculator"),
        ("a DFlash drafter", "--speculative-algorithm dflash"),
    ),
    **dict.fromkeys(
        ("Qwen3DSparkModel", "Gemma4DSparkModel", "DSparkDraftModel", "DSV4DSparkDraftModel", "DSparkSpeculator"),
        ("a DSpark drafter", "--speculative-algorithm dspark"),
    ),
    "MTPDraftModel": ("an MTP head", "--speculative-algorithm builtin-mtp"),
    "Eagle3DeepseekV2ForCausalLM": ("an EAGLE-3 head with MLA layers", "a head with Llama or Qwen3 layers"),
}
_SPECULATORS: Mapping[str, tuple[str, str]] = {
    "peagle": ("a P-EAGLE head, which drafts in parallel from mask tokens", "an EAGLE-3 head"),
    "dflash": _ARCHITECTURES["DFlashDraftModel"],
    "dspark": _ARCHITECTURES["DSparkDraftModel"],
    "mtp": _ARCHITECTURES["MTPDraftModel"],
}
_SPECULATORS_OURS = ("eagle", "eagle3")
_KEYS: Mapping[str, tuple[str, str]] = {
    "dflash_config": _ARCHITECTURES["DFlashDraftModel"],
    "markov_rank": _ARCHITECTURES["DSparkDraftModel"],
    "dspark_target_layer_ids": _ARCHITECTURES["DSparkDraftModel"],
    "dspark_block_size": _ARCHITECTURES["DSparkDraftModel"],
    "medusa_num_heads": ("a Medusa checkpoint, which this version does not run", "an EAGLE or EAGLE-3 head"),
    "pard_token": ("a PARD model, which drafts in parallel from mask tokens", "an EAGLE-3 head"),
    "ptd_token_id": _SPECULATORS["peagle"],
}
_MODEL_TYPES: Mapping[str, tuple[str, str]] = {
    "medusa": _KEYS["medusa_num_heads"],
    "mlp_speculator": ("an MLP speculator, which this version does not run", "an EAGLE or EAGLE-3 head"),
}
_TENSORS: tuple[tuple[re.Pattern[str], tuple[str, str]], ...] = tuple(
    (re.compile(pattern), told)
    for pattern, told in (
        (r"^mask_hidden$", _SPECULATORS["peagle"]),
        (r"^parallel_draft_heads\.", ("a head with parallel heads of ModelOpt", "an EAGLE-3 head without them")),
        (
            r"\bself_attn\.(q_a_proj|kv_a_proj_with_mqa)\.",
            ("a head with MLA layers", "a head with Llama or Qwen3 layers"),
        ),
        (r"\.(mlp\.gate|mlp\.experts|block_sparse_moe)\.", ("a head with mixture-of-experts layers", "a dense head")),
        (r"(^|\.)(enorm|hnorm|eh_proj|mtp_layers|mtp)\.", _ARCHITECTURES["MTPDraftModel"]),
        (r"^(token_layernorm|hidden_layernorm|input_proj)\.", _ARCHITECTURES["MTPDraftModel"]),
        (r"markov", _ARCHITECTURES["DSparkDraftModel"]),
        (r"^(pre|post)_projection\.", _ARCHITECTURES["Gemma4AssistantForCausalLM"]),
        (r"(^medusa|^\d+\.\d+\.linear\.|^blocks\.\d+\.layers\.)", _KEYS["medusa_num_heads"]),
        (
            r"^(embedding_layernorm|pre_lm_head_layernorm)\.",
            ("an EAGLE-1 head with further norms", "a head without them"),
        ),
    )
)


def foreign_config(config: Mapping[str, Any]) -> Refusal | None:
    """Return why a draft with this `config` (flattened) is no head of these formats, or None."""
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in _SPECULATORS_OURS:
        what = _SPECULATORS.get(str(kind), ("a draft of a kind that this version does not run", "an EAGLE-3 head"))
        return _refusal(what, f"speculators_model_type {kind!r}")
    for named in config.get("architectures") or ():
        if named in _ARCHITECTURES:
            return _refusal(_ARCHITECTURES[named], f"architecture {named}")
    if config.get("model_type") in _MODEL_TYPES:
        return _refusal(_MODEL_TYPES[config["model_type"]], f"model_type {config['model_type']!r}")
    for key, what in _KEYS.items():
        if config.get(key) is not None:
            return _refusal(what, f"{key} {config[key]!r}" if not isinstance(config[key], Mapping) else key)
    return None


def foreign_tensors(shapes: Shapes, hidden: int) -> Refusal | None:
    """Return why the tensors of a draft are no head of these formats, or None. `hidden`: its hidden size."""
    for pattern, what in _TENSORS:
        for name in shapes:
            if pattern.search(name):
                return _refusal(what, f"tensor {name}")
    query = shapes.get(QUERY)
    if query is None or len(query) != 2:
        several = ", ".join(sorted(shapes)[:4]) or "none"
        return Refusal(
            reason=f"the draft is no EAGLE head: it has no {QUERY}; its first tensors are {several}",
            try_instead=f"{OPTION} with an EAGLE or EAGLE-3 head",
        )
    if query[1] == 2 * hidden:
        return None
    if query[1] != hidden:
        return Refusal(
            reason=f"{HEAD}: config.json has hidden_size {hidden}, and its first layer reads {query[1]} columns, "
            f"neither {hidden} nor {2 * hidden}",
            try_instead=f"{OPTION} with an EAGLE or EAGLE-3 head",
        )
    if "hidden_norm.weight" in shapes:
        return _refusal(_ARCHITECTURES["DFlashDraftModel"], "tensor hidden_norm.weight beside layers of plain width")
    if "fc.weight" not in shapes:
        what = ("a whole language model", "--speculative-algorithm standalone")
        return _refusal(what, "it has no fc.weight, and its layers read one hidden state")
    return None


def _refusal(what: tuple[str, str], sign: str) -> Refusal:
    return Refusal(reason=f"the draft is {what[0]} ({sign})", try_instead=what[1])
