"""What a kind of draft is to the trainer: where it begins, what it drafts in each step, and how it is stored.

Row i of a chat knows token i + 1 and the target's states up to token i, and drafts token i + 2 in step 0, token
i + 2 + s in step s; in a later step it has been right so far. Each kind does with that what its plugin does, and
`evaluate.py` holds the two against each other. A picked rows of a batch of B chats with L tokens, H hidden size, D
rows of the draft's vocabulary.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from chats import Batch, Chat
from safetensors.torch import load_file, save_file
from target import Reading
from torch import Tensor, nn
from torch.nn import functional as F

from specplug import UserError
from specplug.models.decoder import Decoder

_KEPT = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act"),
    *("max_position_embeddings", "vocab_size", "rope_parameters", "rope_theta", "bos_token_id", "eos_token_id"),
)
"""Keys of the target's config that are the draft's."""


class Draft(nn.Module, ABC):
    """A draft that is trained. Its parameters are what is trained; it keeps the target beside it for what is lent."""

    architecture: ClassVar[str]
    """What its ``config.json`` names, by which a stored draft is recognised."""
    takes: ClassVar[Mapping[str, Any]]
    """Options of ``train.py`` that are this kind's -> their defaults."""
    longest: int | None = None
    """Most tokens that it can draft; None: any number."""
    ids: Tensor | None
    """int64 [D] ascending: target ids of the rows of its head; None: all, in their order."""

    def __init__(self, target: Decoder, reads: Sequence[int | str], depth: int) -> None:
        """`reads`: boundaries of the target, or ``"final_norm"``; `depth`: steps that are counted."""
        super().__init__()
        self.register_buffer("ids", None, persistent=False)
        self._target = (target,)  # in a tuple: no part of this module
        self.reads: tuple[int | str, ...] = tuple(reads)
        self.depth = depth
        self.trained = depth
        """Steps, of the first ones, whose loss is reduced."""

    @property
    def target(self) -> Decoder:
        """The target that it is made for."""
        return self._target[0]

    @classmethod
    @abstractmethod
    def begin(cls, target: Decoder, known: Sequence[Chat], args: Any) -> Self:
        """Return the untrained draft; `known`: the chats that it is trained on, `args`: the options."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, target: Decoder) -> Self:
        """Return the draft that `save` wrote to `folder`."""

    @abstractmethod
    def states(self, batch: Batch, reading: Reading, picked: Tensor, count: int) -> list[Tensor]:
        """Return what the head reads in each of `count` steps, [A, H] each, of the rows ``batch.rows[picked]``.

        `picked` int64 [A], ascending.
        """

    @abstractmethod
    def weights(self, count: int) -> list[float]:
        """Return the weight of each step's loss; their sum does not matter."""

    @abstractmethod
    def stored(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return its ``config.json``, and its tensors by their stored names."""

    @staticmethod
    @abstractmethod
    def engine(steps: int) -> dict[str, Any]:
        """Return the options of `specplug.Engine`, ``algorithm`` and ``config``, that draft chains of `steps`."""

    def pick(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Return the rows that are learned from, and counted: indices into ``batch.rows``, on the CPU, ascending."""
        return torch.arange(len(batch.rows))

    def logits(self, states: Tensor) -> Tensor:
        """Return [A, D] for states [A, H]."""
        weight = self.target.lm_head.weight
        return F.linear(states, weight.to(states.dtype))

    def drafted(self, logits: Tensor) -> Tensor:
        """Return the target ids int64 [A] of the likeliest drafts."""
        best = logits.argmax(-1)
        return best if self.ids is None else self.ids[best]

    def save(self, folder: Path, source: Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` (bfloat16). `source`: the target's folder."""
        config, tensors = self.stored()
        whole = (torch.int64, torch.bool)
        held = {
            name: each.detach().to(each.dtype if each.dtype in whole else torch.bfloat16).cpu().contiguous()
            for name, each in tensors.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(held, folder / "model.safetensors")


def sizes(target: Decoder) -> dict[str, Any]:
    """Return what a draft's ``config.json`` repeats of the target's, and its weights' dtype."""
    kept = {key: target.config[key] for key in _KEPT if key in target.config}
    return {**kept, "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16"}


def read_stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the ``config.json`` and the tensors in `folder`, floating ones in float32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    return config, {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}


def check_boundaries(at: Sequence[int], target: Decoder) -> tuple[int, ...]:
    """Return `at`, or a `UserError` that names the option where the target has no such boundary."""
    layers = len(target.kv_layers)
    wrong = [each for each in at if not 0 <= each <= layers]
    if wrong:
        raise UserError(f"--at {wrong[0]}: the target has the boundaries 0 to {layers}; give some of these")
    return tuple(at)
