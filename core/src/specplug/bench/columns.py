"""What is compared: the value of ``--algorithms``. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specplug.cli.flags import read_config
from specplug.errors import UserError
from specplug.options import EngineOptions
from specplug.settings import flag, option_of, plain, validated

RESERVED = "transformers"
"""Labels that begin with this word are those of ``--transformers``."""

DRAFT_PATH, DRAFT_REVISION = "speculative_draft_model_path", "speculative_draft_model_revision"
PER_COLUMN = tuple(
    name for name in EngineOptions.model_fields if name.startswith(("speculative_draft_", "speculative_adaptive"))
)
"""Engine options that a column may have of its own: which draft model, and how far it is asked to draft."""

_LABEL = re.compile(r"[A-Za-z0-9][\w.@+-]*")
_HOW = "write NAME, NAME@FILE.json or LABEL=NAME@FILE.json, with commas between"


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column: an algorithm's word as typed, its options, and what the report calls it."""

    label: str
    algorithm: str
    config: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    """Engine options that hold for this column alone, by field; all of them among `PER_COLUMN`."""

    def engine_options(self, shared: EngineOptions) -> EngineOptions:
        """Return `shared`, the options of all columns, with this column's own in their place.

        A draft model of its own is taken without the revision of another. Raises UserError for a bad value.
        """
        if not self.options:
            return shared
        given = {name: getattr(shared, name) for name in shared.model_fields_set}
        if DRAFT_PATH in self.options:
            given.pop(DRAFT_REVISION, None)
        try:
            return validated(EngineOptions, given | dict(self.options), option_of)
        except UserError as error:
            raise UserError(f"--algorithms {self.label}: {error}") from None


def parse_columns(text: str) -> list[ColumnSpec]:
    """Read ``none,NAME,LABEL=NAME@FILE.json``; FILE is described at `column`.

    Raises UserError for an empty entry, a label that is no word or stands there twice, and a file that cannot
    be read. Whether an algorithm exists is for the planner to say.
    """
    found = [_column(text, entry.strip()) for entry in text.split(",")]
    labels = [column.label for column in found]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"--algorithms {text}: two columns are called {label!r}: give one of them a LABEL=")
    return found


def column(label: str, algorithm: str, given: Mapping[str, object]) -> ColumnSpec:
    """Return the column of `given`, what its file holds.

    These are the algorithm's options, as ``--speculative-config`` takes them, and the engine options of
    `PER_COLUMN` under their full names. Raises UserError for any other option of the core.
    """
    for name in given:
        full = f"speculative_{plain(name)}"
        if name in PER_COLUMN or full not in EngineOptions.model_fields:
            continue
        if full in PER_COLUMN:
            raise UserError(f"--algorithms {label}: {name} is written {full} in a column's file")
        raise UserError(
            f"--algorithms {label}: {name} holds for all columns: leave it out of the file, and give {option_of(full)}"
        )
    own = {name: value for name, value in given.items() if name in PER_COLUMN}
    return ColumnSpec(label, algorithm, {name: given[name] for name in given if name not in own}, own)


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
    return column(label, name, config)
