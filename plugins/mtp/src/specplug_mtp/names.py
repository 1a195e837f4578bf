"""What the words NEXTN and EAGLE mean for the models at hand. Torch-free."""

from __future__ import annotations

from specplug import Checkpoint, Claim, Facts, Refusal
from specplug_mtp.builtin_layout import architecture, holds_heads, same_folder

ASSISTANTS = frozenset({"Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"})
"""Architectures of drafts that read the target's KV."""
_DECIDED_HERE = ("nextn", "eagle")
_EAGLE3 = ("eagle3", "eagle-3")


def is_assistant(checkpoint: Checkpoint | None) -> bool:
    """Whether `checkpoint` is a Gemma 4 assistant."""
    return checkpoint is not None and architecture(checkpoint.config) in ASSISTANTS


def resolve(name: str, facts: Facts) -> Claim | Refusal | None:
    """Return what `name` means for these models; None: nothing is to be said about it here.

    An assistant draft decides first, then MTP layers in a draft checkpoint, then those of the target where there is no
    draft of another folder. NEXTN is else EAGLE; without any model it stays what its package declares.
    """
    draft, target = facts.draft, facts.target
    if name in _EAGLE3 and is_assistant(draft):
        return Refusal(
            reason="the draft is a Gemma 4 assistant, which reads the target's KV and is no EAGLE-3 head",
            try_instead="--speculative-algorithm frozen-kv-mtp",
        )
    if name not in _DECIDED_HERE:
        return None
    if draft is not None and is_assistant(draft):
        return Claim(to="frozen-kv-mtp", because=f"the draft is a {architecture(draft.config)}")
    if draft is not None and not same_folder(draft, target):
        if holds_heads(draft):
            return Claim(to="builtin-mtp", because="the draft checkpoint holds MTP layers")
    elif holds_heads(target):
        shown = "config.json speaks of" if target.tensors is None else "files hold"
        return Claim(to="builtin-mtp", because=f"no draft is given and the target's {shown} MTP layers")
    if name == "nextn" and (target.config or draft is not None):
        which = "the draft holds" if draft is not None and not same_folder(draft, target) else "the target's files hold"
        return Claim(to="eagle", because=f"{which} no MTP layers")
    return None
