"""Relatives of DFlash that this version recognises and does not run: each is refused by its name. Torch-free."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specplug import Refusal
from specplug_dflash.keys import Keys

_OTHERS = frozenset({"eagle", "eagle3", "mtp"})
"""What speculators calls drafts that are no blocks, by the words of `--speculative-algorithm`."""
_V4 = ("dspark_noise_token_id", "dspark_target_layer_ids")


def relative(keys: Keys, names: Iterable[str]) -> Refusal | None:
    """Return why a draft is not run: another method's, or with layers of another kind; None for what may run."""
    if keys.speculators in _OTHERS:
        word = "MTP" if keys.speculators == "mtp" else keys.speculators.upper()
        return Refusal(
            reason=f"the draft model is one for {word} (speculators_model_type {keys.speculators!r}), not for blocks",
            try_instead="that algorithm, or a DFlash or DSpark draft",
        )
    what = next(_kinds(keys, tuple(names)), None)
    if what is None:
        return None
    return Refusal(
        reason=f"the draft model is {what}, which this version does not run", try_instead="a DFlash or DSpark draft"
    )


def bundled(target: Mapping[str, Any]) -> bool:
    """Whether the target's config says that a DSpark draft lies among its own tensors, as DeepSeek-V4's do."""
    return any(key in target for key in _V4)


def _kinds(keys: Keys, names: tuple[str, ...]) -> Iterator[str]:
    architecture, word = keys.architecture, keys.speculators or ""

    def stored(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    if "DFlash2" in architecture or word == "dflash2" or keys.found("selector_rank") or keys.found("conv_kernel_size"):
        yield "a DFlash 2 draft (convolutions and a candidate selector)"
    if stored("candidate_selector.", "attention_conv.", "mlp_conv."):
        yield "a DFlash 2 draft (convolutions and a candidate selector)"
    if "Domino" in architecture or keys.get("projector_type") == "domino" or stored("prefix_gru."):
        yield "a Domino draft (a recurrent correction of the logits)"
    if word == "jetspec" or keys.get("causal_head") or stored("hidden_dim_adapter."):
        yield "a JetSpec draft (a causal head that drafts trees)"
    if "LiLiCorr" in architecture or any("lilicorr" in key for key in keys.top) or stored("lilicorr"):
        yield "a LiLiCorr draft"
    if "DSV4" in architecture or "DeepseekV4" in architecture or bundled(keys.top) or stored("main_proj.", "hc_head"):
        yield "a DeepSeek-V4 DSpark draft (layers of the target's own kind)"
    if "Gemma" in architecture or str(keys.layers.get("model_type", "")).startswith("gemma"):
        yield "a draft of Gemma layers (norms on both sides, scaled embeddings)"
    if "Laguna" in architecture or stored(".g_proj.", "aux_hidden_norms."):
        yield "a Laguna draft (gated attention)"
    if keys.get("attention_sink_bias") or stored("sinks", "sink_bias"):
        yield "a draft with attention sinks"
    if keys.get("attention_value_scale") not in (None, 1, 1.0):
        yield f"a draft with attention_value_scale {keys.get('attention_value_scale')}"
    if False in (keys.get("is_neox_style"), keys.get("rope_is_neox_style")):
        yield "a draft with interleaved rotary pairs (is_neox_style false)"
    if keys.get("use_swa"):
        yield "a draft with use_swa in place of layer_types"
    if word not in ("", "dflash", "dspark"):
        yield f"a draft with speculators_model_type {word!r}"
