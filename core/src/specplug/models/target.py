"""A target ready to run: model, tokenizer and what ends its answers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specplug.errors import UserError
from specplug.facts import LoadFormat
from specplug.generation import Suppressed, suppressed
from specplug.models.base import TargetModel
from specplug.models.decoder import Decoder, stored_name
from specplug.models.family import is_covered
from specplug.models.store import TOKENIZER_FILES, reason
from specplug.models.weights import fill_dummy, fill_module, iterate_weights
from specplug.spec import Checkpoint

DUMMY_SEED = 0
"""Of every target's dummy weights."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True)
class Target:
    """A loaded target model."""

    model: TargetModel
    tokenizer: Any | None
    """transformers' fast tokenizer, or None where the folder has none."""
    checkpoint: Checkpoint
    eos_ids: tuple[int, ...]
    """Token ids that end an answer; may be empty."""
    never: Suppressed = field(init=False)
    """Token ids that no answer holds, or begins with, of the checkpoint's generation config."""

    def __post_init__(self) -> None:
        self.never = suppressed(self.checkpoint.generation, self.model.vocab_size)


def load_target(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    max_position: int | None = None,
    needs_tokenizer: bool = True,
    trust_remote_code: bool = False,
    load_format: LoadFormat = "auto",
) -> Target:
    """Load the model in `folder`, whose facts are `checkpoint`.

    `dtype` may be its word, as in `Facts`. `max_position` bounds the positions it can be run at. Under
    `load_format` ``dummy`` the weights are random, made on the device: ``config.json`` alone is needed, weights in
    the folder are not read, and a tokenizer is used where there is one.
    Everything that does not fit is a `UserError`, found before weights are read where possible.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    assert isinstance(dtype, torch.dtype)
    dummy = load_format == "dummy"
    tokenizer = _tokenizer(folder, needs_tokenizer and not dummy, trust_remote_code)
    model = load_model(
        folder,
        checkpoint,
        dtype=dtype,
        device=device,
        max_position=max_position,
        trust_remote_code=trust_remote_code,
        dummy_seed=DUMMY_SEED if dummy else None,
    )
    return Target(model, tokenizer, checkpoint, eos_ids(checkpoint, tokenizer))


def load_model(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_position: int | None = None,
    trust_remote_code: bool = False,
    dummy_seed: int | None = None,
) -> TargetModel:
    """Load the model alone, as `load_target` does. With `dummy_seed` its weights are random and none is read."""
    config = dict(checkpoint.config)
    if dummy_seed is None and config.get("tie_word_embeddings") and _holds_two_heads(folder, checkpoint):
        config["tie_word_embeddings"] = False
    model: TargetModel
    if is_covered(config):
        model = Decoder(config, dtype=dtype, device=device, max_position=max_position)
        if dummy_seed is not None:
            fill_dummy(model, dummy_seed)
        else:
            fill_module(model, folder, stored_name)
    else:
        from specplug.models.transformers import load_transformers

        model = load_transformers(
            folder,
            checkpoint.config,
            dtype=dtype,
            device=device,
            max_position=max_position,
            trust_remote_code=trust_remote_code,
            dummy_seed=dummy_seed,
        )
    return model.eval()


def eos_ids(checkpoint: Checkpoint, tokenizer: Any | None) -> tuple[int, ...]:
    """Return the ids that end an answer: the generation config's, else the config's, else the tokenizer's."""
    for source in (checkpoint.generation, checkpoint.config):
        named = source.get("eos_token_id")
        if named is not None:
            return tuple(named) if isinstance(named, list | tuple) else (int(named),)
    own = getattr(tokenizer, "eos_token_id", None)
    return () if own is None else (int(own),)


def _tokenizer(folder: Path, needed: bool, trust_remote_code: bool) -> Any | None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        if needed:
            raise UserError(f"MODEL {str(folder)!r} lacks a tokenizer (tokenizer.json); copy its files into the folder")
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (ImportError, KeyError, OSError, ValueError) as error:
        raise UserError(f"MODEL {str(folder)!r}: its tokenizer cannot be read: {reason(error)}") from error


def _holds_two_heads(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether embedding and output head are both stored and differ, whatever the config says of tying.

    transformers trusts the weights in that case, and so do we. ``.bin`` files always store both names.
    """
    if not {_EMBEDDING, _HEAD} <= (checkpoint.tensors or {}).keys():
        return False
    both = [tensor.clone() for _, tensor in iterate_weights(folder, wanted=(_EMBEDDING, _HEAD).__contains__)]
    return not torch.equal(*both)
