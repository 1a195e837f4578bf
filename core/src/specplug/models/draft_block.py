"""Decoder layers of transformers' models, one by one, over KV that a drafter keeps.

For drafters whose layer is the target's own kind and no Llama-family block. n tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from specplug.models.anatomy import MISFITS, base_name, refusal
from specplug.models.attention_hook import PAGED, STEP, Probe, StepLostError
from specplug.models.base import AttentionStep
from specplug.models.store import reason

_EXPERTS = {"gate_up_proj", "down_proj"}
"""What transformers stacks the experts of a layer into, [E, 2 I, H] and [E, H, I]."""


class DraftBlock(nn.Module):
    """One decoder layer as transformers computes it, its weights uninitialised. Made by `draft_blocks`."""

    def __init__(self, number: int, layer: nn.Module, rotary: nn.Module) -> None:
        """`number`: the KV layer that it writes and reads."""
        super().__init__()
        self.layer = layer
        self._number = number
        self._rotary = (rotary,)  # in a tuple: shared by blocks, and without weights

    def forward(self, x: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Return [n, H], the residual stream after the layer, for the one before it `x` [n, H] at `positions` [n]."""
        at = positions[None]
        out = self.layer(
            x[None],
            attention_mask=None,
            position_ids=at,
            position_embeddings=self._rotary[0](x[None], at),
            use_cache=False,
            **{STEP: _BlockStep(attention, self._number)},
        )
        hidden: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return hidden

    def stored(self, stacked_experts: bool = False) -> nn.Module:
        """Return modules that share this block's storage, named as checkpoints name them; for `DraftContext.load`.

        Experts stand one by one (``experts.0.gate_proj.weight``), or `stacked_experts` as transformers keeps them.
        """
        return self.layer if stacked_experts else _apart(self.layer)


class _BlockStep:
    """The `LayerStep` of one layer: whatever module asks, the KV is layer `number`'s."""

    def __init__(self, attention: AttentionStep, number: int) -> None:
        self._attention = attention
        self._number = number

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """See `specplug.models.attention_hook.LayerStep`."""
        queries, keys, values = (part[0].transpose(0, 1) for part in (q, k, v))
        return self._attention.attend(self._number, queries, keys, values, options.get("scaling"))[None]


def draft_blocks(config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str) -> list[DraftBlock]:
    """Return every decoder layer of the model that ``config.json`` data `config` describes, uninitialised on `device`.

    Block i keeps its KV in layer i. A model that transformers does not have, or whose layers ask their attention for
    something that paged attention does not compute, is a `UserError`.
    """
    who = str(config.get("model_type", "none named"))
    try:
        made = _config(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made, dtype=dtype)
        model.set_attn_implementation(PAGED)
        base = model.get_submodule(base_name(model))
        with torch.device(device):
            rotary = type(base.rotary_emb)(config=base.rotary_emb.config)  # its tables are computed, not stored
        blocks = [DraftBlock(number, layer, rotary) for number, layer in enumerate(base.layers)]
        for block in blocks:
            _check(who, block, model.config.hidden_size, device)
    except MISFITS as error:
        raise refusal(who, f"its layers cannot be run one by one: {reason(error)}") from error
    return [block.to_empty(device=device).eval().requires_grad_(False) for block in blocks]


def _config(config: Mapping[str, Any]) -> PreTrainedConfig:
    named = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    return AutoConfig.for_model(config["model_type"], **named)


def _check(who: str, block: DraftBlock, width: int, device: torch.device | str) -> None:
    """Run two tokens without data; what the layer asks its attention for is refused by `Probe` if it has to be."""
    probe = Probe(who, masks=False)
    at = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    hidden = torch.empty((1, 2, width), dtype=next(block.parameters()).dtype, device="meta")
    angles = block._rotary[0](hidden.new_empty(hidden.shape, device=device), torch.zeros_like(at, device=device))
    meta = tuple(part.to("meta") for part in angles)
    try:
        block.layer(
            hidden, attention_mask=None, position_ids=at, position_embeddings=meta, use_cache=False, **{STEP: probe}
        )
    except StepLostError:
        raise refusal(who, "it does not hand keyword arguments down to its attention layers") from None
    except MISFITS:
        if not probe.calls:  # what comes after attention may look at numbers, which are not there
            raise
    if len(probe.calls) != 1:
        raise refusal(who, f"one of its layers attends {len(probe.calls)} times through transformers' interface")


def _apart(module: nn.Module) -> nn.Module:
    """Return a copy of the module tree over the same storage, its stacked experts taken apart."""
    own = dict(module.named_parameters(recurse=False))
    if own.keys() >= _EXPERTS and all(own[name].dim() == 3 for name in _EXPERTS):
        return _experts(own["gate_up_proj"], own["down_proj"])
    copy = nn.Module()
    for name, tensor in own.items():
        copy.register_parameter(name, nn.Parameter(tensor.data, requires_grad=False))
    skipped = module._non_persistent_buffers_set
    for name, buffer in module.named_buffers(recurse=False):
        copy.register_buffer(name, buffer, persistent=name not in skipped)
    for name, child in module.named_children():
        copy.add_module(name, _apart(child))
    return copy


def _experts(gate_up: Tensor, down: Tensor) -> nn.Module:
    width = down.shape[2]
    parts = {"gate_proj": gate_up[:, :width], "up_proj": gate_up[:, width:], "down_proj": down}
    experts = nn.Module()
    for number in range(len(down)):
        expert = nn.Module()
        for name, stacked in parts.items():
            linear = nn.Module()
            linear.weight = nn.Parameter(stacked.data[number], requires_grad=False)
            expert.add_module(name, linear)
        experts.add_module(str(number), expert)
    return experts
