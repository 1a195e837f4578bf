"""An EAGLE-3 head and its training-time test (arXiv 2503.01840), saved as the authors' code names it.

Row i stands beside token i + 1 and drafts token i + 2. In step 0 it reads the target's states of token i. In step s
it reads its own output of step s - 1, stands beside token i + 1 + s at position i + s, and sees what it would see after
drafting s tokens: step 0 of the rows up to i, then its own steps 1 to s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import chats
import torch
from chats import Batch, Chat
from draft import Draft, check_boundaries, read_stored, sizes
from parts import Attention, Cache, GatedMLP, Norm, start_layer
from target import Reading
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.models.decoder import Decoder

_DECAY = 0.8
"""Weight of each step's loss relative to that of the step before."""


class Layer(nn.Module):
    """The parts of the one layer, named as the authors name them."""

    def __init__(self, like: Any, hidden: int, eps: float) -> None:
        super().__init__()
        self.hidden_norm = Norm(hidden, eps)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = Attention(like.self_attn, 2 * hidden)
        self.mlp = GatedMLP(hidden, like.mlp.down_proj.weight.shape[1])


class Eagle3(Draft):
    """One layer over embedding and state side by side; Vd rows of output, for the target ids `ids`."""

    architecture = "LlamaForCausalLMEagle3"
    takes: ClassVar[Mapping[str, Any]] = {"rows": 4096, "at": None, "steps": 5}

    def __init__(self, target: Decoder, ids: Tensor, at: Sequence[int], depth: int = 5) -> None:
        """`ids` int64 [Vd] ascending; `at`: boundaries read. Weights begin as the target's, where it has such."""
        super().__init__(target, at, depth)
        hidden, eps = target.hidden_size, target.norm.eps
        layer: Any = target.layers[-1]
        self.fc = nn.Linear(len(at) * hidden, hidden, bias=False)
        self.midlayer = Layer(layer, hidden, eps)
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(ids), bias=False)
        self.ids = ids
        with torch.no_grad():
            start_layer(self.midlayer, layer, skip=hidden)
            self.midlayer.hidden_norm.weight.copy_(layer.input_layernorm.weight)
            self.midlayer.input_layernorm.weight.fill_(1.0)
            # The last of the states alone, which the layer copied above understands best.
            self.fc.weight.normal_(std=0.002)
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
            self.norm.weight.copy_(target.norm.weight)
            self.lm_head.weight.copy_(target.lm_head.weight[ids.to(target.lm_head.weight.device)])

    @classmethod
    def begin(cls, target: Decoder, known: Sequence[Chat], args: Any) -> Self:
        """See `Draft.begin`. The vocabulary is what the answers use most."""
        layers = len(target.kv_layers)
        at = check_boundaries(args.at or (2, layers // 2, layers - 3), target)
        ids = chats.frequent(known, args.rows, target.vocab_size)
        print(f"boundaries {at}; {len(ids)} draft ids cover {chats.coverage(known, ids):.4f} of the answers")
        return cls(target, ids, at, args.steps)

    @classmethod
    def load(cls, folder: Path, target: Decoder) -> Self:
        """See `Draft.load`."""
        config, tensors = read_stored(folder)
        ids = tensors.pop("d2t") + torch.arange(config["draft_vocab_size"])
        del tensors["t2d"]
        draft = cls(target, ids, config["eagle_aux_hidden_state_layer_ids"])
        draft.load_state_dict(tensors)
        return draft

    def states(self, batch: Batch, reading: Reading, picked: Tensor, count: int) -> list[Tensor]:
        """See `Draft.states`."""
        target, layer = self.target, self.midlayer
        length, rows = batch.tokens.shape[1], batch.rows[picked]
        state = self.fc(torch.cat(reading.taps, -1))
        cache, found = Cache(), []
        for step in range(count):
            # What runs over the end are rows that nobody asks.
            embedded = F.embedding(batch.tokens.roll(-1 - step, 1), target.embed_tokens.weight)
            x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(state)), -1)
            table = target.rope.table[step : step + length]
            state = state + layer.self_attn(x, table, cache)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            found.append(self.norm(state.flatten(0, 1)[rows]))
        return found

    def logits(self, states: Tensor) -> Tensor:
        """See `Draft.logits`."""
        found: Tensor = self.lm_head(states)
        return found

    def weights(self, count: int) -> list[float]:
        """See `Draft.weights`."""
        return [_DECAY**step for step in range(count)]

    def stored(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors in the authors' spelling."""
        assert self.ids is not None
        ids = self.ids.cpu()
        known = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        known[ids] = True
        maps = {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        config = sizes(self.target) | {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "intermediate_size": self.midlayer.mlp.down_proj.in_features,
            "draft_vocab_size": len(ids),
            # vLLM and speculators count boundaries; both keys keep readers from guessing.
            "eagle_aux_hidden_state_layer_ids": list(self.reads),
            "eagle_aux_layer_semantics": "vllm",
        }
        return config, {**dict(self.named_parameters()), **maps}

    @staticmethod
    def engine(steps: int) -> dict[str, Any]:
        """See `Draft.engine`."""
        config = {"num_steps": steps, "eagle_topk": 1, "num_draft_tokens": steps + 1}
        return {"algorithm": "eagle3", "config": config}
