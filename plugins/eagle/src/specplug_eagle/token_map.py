"""Files of token ids to which a head of the full vocabulary is restricted (FR-Spec, arXiv 2502.14856).

Torch is imported for ``.pt`` files alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specplug import UserError

OPTION = "--speculative-eagle-token-map"
_KINDS = (".pt", ".json", ".txt")


def read_token_map(path: str, vocab: int) -> tuple[int, ...]:
    """Return the target ids in the file `path`, increasing; `vocab` is the target's vocabulary.

    ``.pt``: a list or tensor of ids, as SGLang has them; ``.json``: a list; ``.txt``: ids between blanks. A `UserError`
    names the file and what is wrong with it.
    """
    ids = _read(path)
    if not ids:
        raise UserError(f"{OPTION} {path}: it holds no token id; at least one is needed")
    wrong = [number for number in ids if type(number) is not int or not 0 <= number < vocab]
    if wrong:
        raise UserError(f"{OPTION} {path}: {wrong[0]!r} is no token of the target, which has the ids 0 to {vocab - 1}")
    if len(set(ids)) != len(ids):
        twice = next(number for number in ids if list(ids).count(number) > 1)
        raise UserError(f"{OPTION} {path}: it holds id {twice} twice; give each id once")
    return tuple(sorted(ids))


def _read(path: str) -> Sequence[Any]:
    file = Path(path)
    if file.suffix not in _KINDS:
        raise UserError(f"{OPTION} {path}: a file of token ids ending in {', '.join(_KINDS)} is needed")
    if not file.is_file():
        raise UserError(f"{OPTION} {path}: there is no such file; download it first, and give its path")
    try:
        if file.suffix == ".pt":
            return _stored(file)
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".txt":
            return [int(word) for word in text.split()]
        found = json.loads(text)
    except Exception as error:  # whatever a damaged file makes a reader or an unpickler raise
        said = " ".join(str(error).split())[:80]
        raise UserError(f"{OPTION} {path} cannot be read as a list of token ids: {said}") from error
    if not isinstance(found, list):
        raise UserError(f"{OPTION} {path} holds a JSON {type(found).__name__}; a list of token ids is needed")
    return found


def _stored(file: Path) -> Sequence[Any]:
    import torch

    found = torch.load(file, map_location="cpu", weights_only=True)
    flat = torch.as_tensor(found)
    if flat.is_floating_point() or flat.dim() != 1:
        raise ValueError(f"it holds {flat.dim()} dimensions of {flat.dtype}")
    ids: list[int] = flat.tolist()
    return ids
