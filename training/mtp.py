"""An MTP layer for a target that has none, saved in speculators' ``mtp`` layout.

One layer of the target's kind over a projection of next token and state (DeepSeek-V3, arXiv 2412.19437, section 2.2),
used again for every step (FastMTP, arXiv 2509.18362): row i reads the target's final state of token i beside token
i + 1, in step s its own output of step s - 1, after the norm, beside token i + 1 + s, at position i + s. What it sees
there is as in `eagle3`. Embedding and head are the target's and are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from chats import Batch, Chat
from draft import Draft, read_stored, sizes
from parts import Cache, Layer, Norm, start_layer
from target import Reading
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.models.decoder import Decoder

_DECAY = 0.6
"""Weight of each step's loss relative to that of the step before, FastMTP's: 0.51, 0.31, 0.18 in three steps."""
_PREFIX, _INNER = "mtp_layers.0.", "layer."


class Mtp(Draft):
    """``final_layernorm(layer(input_proj([token_layernorm(e), hidden_layernorm(h)])))``."""

    architecture = "MTPDraftModel"
    takes: ClassVar[Mapping[str, Any]] = {"steps": 3}

    def __init__(self, target: Decoder, depth: int = 3) -> None:
        """The layer begins as the target's last, over the state alone."""
        super().__init__(target, ("final_norm",), depth)
        hidden, eps = target.hidden_size, target.norm.eps
        like: Any = target.layers[-1]
        self.token_layernorm = Norm(hidden, eps)
        self.hidden_layernorm = Norm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = Layer(like, hidden, eps)
        self.final_layernorm = Norm(hidden, eps)
        with torch.no_grad():
            start_layer(self.layer, like)
            self.layer.input_layernorm.weight.copy_(like.input_layernorm.weight)
            self.input_proj.weight.normal_(std=0.02)
            self.input_proj.weight[:, hidden:] += torch.eye(hidden)
            self.final_layernorm.weight.copy_(target.norm.weight)

    @classmethod
    def begin(cls, target: Decoder, known: Sequence[Chat], args: Any) -> Self:
        """See `Draft.begin`."""
        return cls(target, args.steps)

    @classmethod
    def load(cls, folder: Path, target: Decoder) -> Self:
        """See `Draft.load`."""
        draft = cls(target)
        own = set(draft.state_dict())
        held = {name.removeprefix(_PREFIX): each for name, each in read_stored(folder)[1].items()}
        draft.load_state_dict({name if name in own else _INNER + name: each for name, each in held.items()})
        return draft

    def states(self, batch: Batch, reading: Reading, picked: Tensor, count: int) -> list[Tensor]:
        """See `Draft.states`."""
        length, rows = batch.tokens.shape[1], batch.rows[picked]
        state = reading.taps[0]
        cache, found = Cache(), []
        for step in range(count):
            # What runs over the end are rows that nobody asks.
            embedded = F.embedding(batch.tokens.roll(-1 - step, 1), self.target.embed_tokens.weight)
            pair = self.token_layernorm(embedded), self.hidden_layernorm(state)
            table = self.target.rope.table[step : step + length]
            state = self.final_layernorm(self.layer(self.input_proj(torch.cat(pair, -1)), table, cache))
            found.append(state.flatten(0, 1)[rows])
        return found

    def weights(self, count: int) -> list[float]:
        """See `Draft.weights`."""
        return [_DECAY**step for step in range(count)]

    def stored(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors in speculators' spelling."""
        layer = sizes(self.target) | {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "intermediate_size": self.layer.mlp.down_proj.in_features,
            "tie_word_embeddings": self.target.lm_head.weight is self.target.embed_tokens.weight,
        }
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.depth}
        config = {
            "architectures": [self.architecture],
            "speculators_model_type": "mtp",
            "speculators_version": "0.5.0",
            "num_nextn_predict_layers": 1,
            "dtype": "bfloat16",
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "mtp",
                "default_proposal_method": "greedy",
                "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "verifier": {"name_or_path": None, "architectures": self.target.config.get("architectures", [])},
            },
        }
        return config, {_PREFIX + name.removeprefix(_INNER): each for name, each in self.named_parameters()}

    @staticmethod
    def engine(steps: int) -> dict[str, Any]:
        """See `Draft.engine`."""
        return {"algorithm": "builtin-mtp", "config": {"num_steps": steps}}
