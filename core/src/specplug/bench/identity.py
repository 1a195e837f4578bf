"""What a report keeps so that a later run can tell whether it was asked the same and answered the same. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specplug.bench.workload import Source
from specplug.spec import Checkpoint

if TYPE_CHECKING:
    from specplug.bench.measure import BatchRun

_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_BLOCKS, _BLOCK = 16, 4096
"""Blocks read of each weight file, evenly spaced, and bytes of each: training moves all, and gigabytes stay unread."""


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """Return 16 hex digits that tell weights apart, from names, sizes and samples of the files; data stays unread.

    The folder's own name does not matter. Without weight files (``dummy``) the config stands for them, less what a
    newer transformers writes differently. A file that cannot be read raises OSError.
    """
    found = hashlib.sha256()
    folder = Path(checkpoint.path)
    files = next((files for pattern in _WEIGHTS if (files := sorted(folder.glob(pattern)))), [])
    if checkpoint.tensors is None or not files:
        config = {name: value for name, value in checkpoint.config.items() if name != "transformers_version"}
        return _hex(json.dumps(config, sort_keys=True, default=str))
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for block in range(_BLOCKS):
                stream.seek(max(0, size - _BLOCK) * block // (_BLOCKS - 1))
                found.update(stream.read(_BLOCK))
    return found.hexdigest()[:16]


def prompts_fingerprint(sources: Sequence[Source]) -> str | None:
    """Return 16 hex digits of the prompts' text, in order; None for random input, which its options describe."""
    said = [source.conversation for source in sources if source.conversation is not None]
    if not said:
        return None
    return _hex(json.dumps([[each.text, each.messages, each.turns] for each in said], sort_keys=True))


def answer_rows(runs: Mapping[str, Sequence[BatchRun]]) -> list[dict[str, Any]]:
    """Return what every column answered in its first repetition, one row per prompt and turn, counted from 0.

    ``asked`` tells the prompt's tokens apart, ``ids`` is the first column's answer, ``other`` holds the answers of
    those columns that gave another one. Ids are one text each, so that a report keeps a line per answer.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for label, each in runs.items():
        seen = set()
        for answer in (answer for run in each for answer in run.answers):
            key = answer.item.source.number, answer.item.turn
            if key in seen:
                continue
            seen.add(key)
            ids = _joined(answer.ids)
            row = rows.setdefault(
                key,
                {"prompt": key[0], "turn": key[1], "asked": _hex(_joined(answer.item.ids)), "ids": ids, "other": {}},
            )
            if row["ids"] != ids:
                row["other"][label] = ids
    return [rows[key] for key in sorted(rows)]


def _joined(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
