"""A small language model for the target's vocabulary, distilled from it, saved as an ordinary Llama folder.

It begins as the target with all layers but the first few and the last taken out; embedding and head stay the target's,
and only layers and final norm are trained. Its loss is the cross-entropy to the target's distribution at temperature 1
(Hinton et al., arXiv 1503.02531), at every token of the answers. Row i drafts token i + 2 from tokens up to i + 1, and
token i + 2 + s from those and its own s drafts, which are the text where they were right: step s of a row is step 0 of
the row s behind it.
"""

from __future__ import annotations

import shutil
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

from specplug import UserError
from specplug.models.decoder import Decoder

_BESIDE = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
"""Files that make a tokenizer."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Standalone(Draft):
    """A few layers between the target's embedding and head, both rounded to the dtype that is stored."""

    architecture = "LlamaForCausalLM"
    takes: ClassVar[Mapping[str, Any]] = {"layers": 3, "steps": 5}
    embedding: Tensor
    head: Tensor

    def __init__(self, target: Decoder, layers: int, depth: int = 5) -> None:
        super().__init__(target, (), depth)
        self.trained = 1  # the others are the same rows once more
        hidden, eps, of = target.hidden_size, target.norm.eps, len(target.layers)
        picked: list[Any] = [target.layers[at] for at in (*range(layers - 1), of - 1)]
        layers_made = [Layer(like, hidden, eps) for like in picked]
        self.layers = nn.ModuleList(layers_made)
        self.norm = Norm(hidden, eps)
        self.tied = target.lm_head.weight is target.embed_tokens.weight
        for name, weight in (("embedding", target.embed_tokens.weight), ("head", target.lm_head.weight)):
            self.register_buffer(name, weight.detach().bfloat16().to(weight.dtype), persistent=False)
        if self.tied:
            self.head = self.embedding
        with torch.no_grad():
            for layer, like in zip(layers_made, picked, strict=True):
                start_layer(layer, like)
                layer.input_layernorm.weight.copy_(like.input_layernorm.weight)
            self.norm.weight.copy_(target.norm.weight)

    @classmethod
    def begin(cls, target: Decoder, known: Sequence[Chat], args: Any) -> Self:
        """See `Draft.begin`."""
        if args.layers > len(target.layers):
            raise UserError(f"--layers {args.layers}: the target has {len(target.layers)}; give 1 to as many")
        return cls(target, args.layers, args.steps)

    @classmethod
    def load(cls, folder: Path, target: Decoder) -> Self:
        """See `Draft.load`."""
        config, tensors = read_stored(folder)
        draft = cls(target, config["num_hidden_layers"])
        draft.embedding = tensors.pop(_EMBEDDING).to(draft.embedding.dtype)
        draft.head = draft.embedding if draft.tied else tensors.pop(_HEAD).to(draft.head.dtype)
        draft.load_state_dict({name.removeprefix("model."): each for name, each in tensors.items()})
        return draft

    def states(self, batch: Batch, reading: Reading, picked: Tensor, count: int) -> list[Tensor]:
        """See `Draft.states`."""
        table = self.target.rope.table[: batch.tokens.shape[1]]
        x = F.embedding(batch.tokens, self.embedding)
        for layer in self.layers:
            x = layer(x, table, Cache())
        states = self.norm(x).flatten(0, 1)
        # What runs over the end are rows that nobody asks.
        rows = batch.rows[picked] + 1
        return [states[(rows + step).clamp_max(len(states) - 1)] for step in range(count)]

    def logits(self, states: Tensor) -> Tensor:
        """See `Draft.logits`."""
        return F.linear(states, self.head.to(states.dtype))

    def weights(self, count: int) -> list[float]:
        """See `Draft.weights`."""
        return [1.0] * count

    def stored(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors of a Llama model."""
        first: Any = self.layers[0]
        config = sizes(self.target) | {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": len(self.layers),
            "intermediate_size": first.mlp.down_proj.in_features,
            "mlp_bias": False,
            "tie_word_embeddings": self.tied,
        }
        ends = {_EMBEDDING: self.embedding} | ({} if self.tied else {_HEAD: self.head})
        return config, {**ends, **{f"model.{name}": each for name, each in self.named_parameters()}}

    def save(self, folder: Path, source: Path) -> None:
        """See `Draft.save`. The tokenizer's files are copied from the target's folder."""
        super().save(folder, source)
        for pattern in _BESIDE:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)

    @staticmethod
    def engine(steps: int) -> dict[str, Any]:
        """See `Draft.engine`."""
        return {"algorithm": "standalone", "config": {"num_steps": steps}}
