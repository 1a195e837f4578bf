"""Names of stored tensors: every published spelling becomes the one of `specplug_dflash.model`. Torch-free."""

from collections.abc import Iterable

MASK_FILE, MASK = "mask_embedding.pt", "embedding"
"""A file beside the weights of some drafts, and the tensor in it, [H]: the mask's embedding."""
_PREFIXES = ("speculator.", "base_model.", "draft_model.", "model.")
_APART = ("lm_head.", "d2t", "t2d")
"""What stays without the prefix that all others carry."""
_RENAMED = (
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("logit_head.", ""),
    ("confidence_proj.", "confidence_head.proj."),
)
_MARKOV = ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")


def own_names(stored: Iterable[str]) -> dict[str, str | None]:
    """Return stored name -> our name, or None for what is no part of the draft's modules."""
    names = list(stored)
    common = next((each for each in _PREFIXES if _carried(names, each)), "")
    return {name: _own(name.removeprefix(common)) for name in names}


def _carried(names: Iterable[str], prefix: str) -> bool:
    most = [name for name in names if name != MASK and not name.startswith(_APART)]
    return bool(most) and all(name.startswith(prefix) for name in most)


def _own(name: str) -> str | None:
    if name == MASK or name.endswith("rotary_emb.inv_freq"):
        return None
    for start, ours in _RENAMED:
        if name.startswith(start):
            name = ours + name.removeprefix(start)
    return f"markov_head.{name}" if name.startswith(_MARKOV) else name
