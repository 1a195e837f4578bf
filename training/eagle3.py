"""An EAGLE-3 head and its training-time test (arXiv 2503.01840), saved as the authors' code names it.

Row i stands beside token i + 1 and drafts token i + 2. In step 0 it reads the target's states of token i. In step s
it reads its own output of step s - 1, stands beside token i + 1 + s at position i + s, and sees what it would see after
drafting s tokens: step 0 of the rows up to i, then its own steps 1 to s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from chats import Batch
from parts import Attention, Cache, GatedMLP, Norm, start_layer
from safetensors.torch import save_file
from target import Reading
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.models.decoder import Decoder

_KEPT = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act"),
    *("max_position_embeddings", "vocab_size", "rope_parameters", "rope_theta", "bos_token_id", "eos_token_id"),
)
"""Keys of the target's config that are the head's."""


class Layer(nn.Module):
    """The parts of the one layer, named as the authors name them."""

    def __init__(self, like: Any, hidden: int, eps: float) -> None:
        super().__init__()
        self.hidden_norm = Norm(hidden, eps)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = Attention(like.self_attn, 2 * hidden)
        self.mlp = GatedMLP(hidden, like.mlp.down_proj.weight.shape[1])


class Eagle3(nn.Module):
    """One layer over embedding and state side by side; Vd rows of output, for the target ids `ids`."""

    ids: Tensor

    def __init__(self, target: Decoder, ids: Tensor, at: Sequence[int]) -> None:
        """`ids` int64 [Vd] ascending; `at`: boundaries read. Weights begin as the target's, where it has such."""
        super().__init__()
        self.target_config: dict[str, Any] = dict(target.config)
        self.reads: tuple[int, ...] = tuple(at)
        self._target = (target,)  # in a tuple: no part of this module
        hidden, eps = target.hidden_size, target.norm.eps
        layer: Any = target.layers[-1]
        self.fc = nn.Linear(len(at) * hidden, hidden, bias=False)
        self.midlayer = Layer(layer, hidden, eps)
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(ids), bias=False)
        self.register_buffer("ids", ids, persistent=False)
        with torch.no_grad():
            start_layer(self.midlayer, layer, skip=hidden)
            self.midlayer.hidden_norm.weight.copy_(layer.input_layernorm.weight)
            self.midlayer.input_layernorm.weight.fill_(1.0)
            # The last of the states alone, which the layer copied above understands best.
            self.fc.weight.normal_(std=0.002)
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
            self.norm.weight.copy_(target.norm.weight)
            self.lm_head.weight.copy_(target.lm_head.weight[ids.to(target.lm_head.weight.device)])

    def steps(self, batch: Batch, reading: Reading, count: int) -> list[Tensor]:
        """Return the logits [R, Vd] of each of `count` steps."""
        target, layer = self._target[0], self.midlayer
        length = batch.tokens.shape[1]
        state = self.fc(torch.cat(reading.taps, -1))
        cache, found = Cache(), []
        for step in range(count):
            # What runs over the end are rows that nobody asks.
            embedded = F.embedding(batch.tokens.roll(-1 - step, 1), target.embed_tokens.weight)
            x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(state)), -1)
            table = target.rope.table[step : step + length]
            state = state + layer.self_attn(x, table, cache)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            found.append(self.lm_head(self.norm(state.flatten(0, 1)[batch.rows])))
        return found

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` (bfloat16) in the authors' spelling."""
        vocab = self.target_config["vocab_size"]
        tensors = {name: weight.detach().bfloat16().cpu() for name, weight in self.named_parameters()}
        ids = self.ids.cpu()
        known = torch.zeros(vocab, dtype=torch.bool)
        known[ids] = True
        tensors["d2t"], tensors["t2d"] = ids - torch.arange(len(ids)), known
        config = {key: self.target_config[key] for key in _KEPT if key in self.target_config}
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "intermediate_size": self.midlayer.mlp.down_proj.in_features,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(ids),
            "dtype": "bfloat16",
            # vLLM and speculators count boundaries; both keys keep readers from guessing.
            "eagle_aux_hidden_state_layer_ids": list(self.reads),
            "eagle_aux_layer_semantics": "vllm",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors")
