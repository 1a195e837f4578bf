"""What both ways of running a transformers model need to know of it: its base, its head, its positions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specplug.errors import UserError

MISFITS = (AttributeError, ImportError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model raises that is called in a way it was not written for."""


def refusal(who: str, reason: str) -> UserError:
    """Return the error that says why the model `who` is not run, and the way out."""
    return UserError(f"MODEL has architecture {who}, which is not run: {reason}; choose another model")


def base_name(model: PreTrainedModel) -> str:
    """Return the name of the child that ends in the final norm. Some classes name another as their prefix."""
    for name in (model.base_model_prefix, "model"):
        if name in model._modules:
            return str(name)
    raise refusal(type(model).__name__, "its output head is not apart from its layers")


def head_of(model: PreTrainedModel) -> nn.Module:
    """Return `model` without its base: called with ``inputs_embeds``, it does to them what its class does on top."""
    head: nn.Module = copy.copy(model)
    head._modules = {**model._modules, base_name(model): _Given(model.get_submodule(base_name(model)))}
    return head


def head_logits(head: nn.Module, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    """Return float32 [*, V] of final hidden states [*, H], by a head of `head_of`; in `out` where given."""
    answer = head(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False)
    logits: Tensor = answer.logits.view(*hidden.shape[:-1], answer.logits.shape[-1])
    return logits.float() if out is None else out.copy_(logits)


def check_head(who: str, head: nn.Module, hidden: Tensor, whole: Callable[[], Tensor]) -> int:
    """Return the vocabulary's size V, or refuse `who` unless `head` makes of `hidden` [T, H] what `whole()` [T, V] is.

    `whole` runs the model as its authors wrote it, on the same tokens.
    """
    try:
        logits = whole()
        if close(head_logits(head, hidden), logits.float()):
            return logits.shape[-1]
    except MISFITS:
        pass
    raise refusal(who, "its output head cannot be run on hidden states alone")


LENT = ("embed_tokens", "lm_head")
"""Parts that a model through transformers lends to drafters."""


def lent_part(model: PreTrainedModel, name: str) -> nn.Module:
    """Return ``embed_tokens`` (scaled, where the model scales) or ``lm_head`` (the linear map alone), shared."""
    found = None
    if name in LENT:
        found = model.get_input_embeddings() if name == "embed_tokens" else model.get_output_embeddings()
    if found is None:
        raise KeyError(f"{name!r}: this target lends {', '.join(LENT)}")
    return found  # type: ignore[no-any-return]


def most_positions(config: Any, unstated: int | None = None) -> int:
    """Return how many positions a model of transformers' `config` can be run at.

    `unstated` is the answer for a config that says nothing of it, None: that is a `UserError`. With rope_type
    ``longrope`` the answer is the original length: beyond it the whole sequence is rotated by other frequencies,
    which KV that is written already does not follow.
    """
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    most = unstated if most is None else most
    if not isinstance(most, int) or most < 2:
        raise UserError(f"MODEL: config.json has max_position_embeddings = {most!r}; a whole number above 1 is needed")
    rope = getattr(text, "rope_parameters", None) or {}
    for each in [rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))]:
        if each.get("rope_type") == "longrope":
            most = min(most, int(each["original_max_position_embeddings"]))
    return most


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two results of the same computation agree up to the order of their sums."""
    tolerance = 1e-4 if one.dtype == torch.float32 else 3e-2
    return float((one.float() - other.float()).abs().max()) <= tolerance * float(other.float().abs().max())


class _Given(nn.Module):
    """Stands where the base model stood: its output is what it is given. Some heads read a number of the base's."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._stands_for = (base,)  # in a tuple: not a part of this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self._stands_for[0], name)
            if not isinstance(found, int | float):  # a head that runs parts of the base is not apart from it
                raise
            return found

    def forward(self, *ignored: Any, inputs_embeds: Tensor, **rest: Any) -> Any:
        """Return an output whose `last_hidden_state` is `inputs_embeds`, and whose every other field is None."""
        return _Output(inputs_embeds)


class _Output(tuple[Tensor]):
    def __new__(cls, hidden: Tensor) -> _Output:
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None
