"""What is compared: the value of ``--algorithms``. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specplug.cli.flags import read_config
from specplug.errors import UserError
from specplug.settings import flag

RESERVED = "transformers"
"""Labels that begin with this word are those of ``--transformers``."""

_LABEL = re.compile(r"[A-Za-z0-9][\w.@+-]*")
_HOW = "write NAME, NAME@FILE.json or LABEL=NAME@FILE.json, with commas between"


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column: an algorithm's word as typed, its options, and what the report calls it."""

    label: str
    algorithm: str
    config: Mapping[str, object] = field(default_factory=dict)


def parse_columns(text: str) -> list[ColumnSpec]:
    """Read ``none,NAME,LABEL=NAME@FILE.json``; FILE holds what ``--speculative-config`` takes.

    Raises UserError for an empty entry, a label that is no word or stands there twice, and a file that cannot
    be read. Whether an algorithm exists is for the planner to say.
    """
    found = [_column(text, entry.strip()) for entry in text.split(",")]
    labels = [column.label for column in found]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"--algorithms {text}: two columns are called {label!r}: give one of them a LABEL=")
    return found


def _column(text: str, entry: str) -> ColumnSpec:
    label, given, rest = entry.rpartition("=")
    name, at, file = rest.partition("@")
    name = name.strip()
    if not name or (at and not file.strip()):
        raise UserError(f"--algorithms {text}: {entry!r} names no {'file' if name else 'algorithm'}: {_HOW}")
    label = label.strip() if given else name + (f"@{Path(file).stem}" if at else "")
    if not _LABEL.fullmatch(label) or label.startswith(RESERVED):
        why = f"begins with {RESERVED!r}, as those of --transformers do" if label.startswith(RESERVED) else "is no word"
        raise UserError(f"--algorithms {text}: the label {label!r} {why}: use letters, digits, '.', '_', '+' and '-'")
    try:
        config = read_config(f"@{file.strip()}") if at else {}
    except UserError as error:
        raise UserError(f"--algorithms {entry}: {str(error).removeprefix(flag('config') + ' ')}") from None
    return ColumnSpec(label, name, config)
