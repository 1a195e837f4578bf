"""A report of `specplug bench --json`, as far as a later run is compared with it. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, ValidationError

from specplug.errors import UserError

Ids = Annotated[
    tuple[NonNegativeInt, ...], BeforeValidator(lambda value: value.split() if isinstance(value, str) else value)
]
"""Token ids; a report writes them as one text with blanks between."""


class _Part(BaseModel):
    """A part of a report. What is not read here is left alone; a number that is none is an error."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Model(_Part):
    """What decoded."""

    name: str
    """As typed."""
    fingerprint: str
    """`specplug.bench.identity.model_fingerprint`."""
    dtype: str
    device: str


class Prompts(_Part):
    """What was asked, and how answers were drawn."""

    file: str | None
    fingerprint: str | None
    """`specplug.bench.identity.prompts_fingerprint`; None for random input."""
    random_input: int | None
    """Tokens per random prompt."""
    count: int
    seed: int
    repeat: int
    temperature: float
    max_tokens: int
    ignore_eos: bool


class Column(_Part):
    """What a column ran."""

    algorithm: str
    """Its name, aliases resolved."""


class Ledger(_Part):
    """Acceptance, pooled over all answers (docs/explanation/ledger.md)."""

    tokens_per_target_step: float
    accept_length: float
    draft_coverage: float


class Spread(_Part):
    """Of a figure over runs."""

    median: float


class SpeedUp(_Part):
    """Over the first column; None if nothing was decoded."""

    decode: Spread | None


class Text(_Part):
    """A column's answers against the first column's of the same run."""

    faults: int
    skipped: str


class Figures(_Part):
    """A column at one batch size."""

    ledger: Ledger | None
    speed_up: SpeedUp
    text: Text


class Answer(_Part):
    """The answers to one prompt in one turn, both counted from 0."""

    prompt: int
    turn: int
    asked: str
    """Tells the prompt's tokens apart."""
    ids: Ids
    """The first column's."""
    other: dict[str, Ids] = {}
    """Those of columns that gave another answer."""

    def of(self, label: str) -> tuple[int, ...]:
        """Return the answer of one column."""
        return self.other.get(label, self.ids)


class Batch(_Part):
    """One batch size."""

    size: int
    columns: dict[str, Figures]
    answers: tuple[Answer, ...] = Field(min_length=1)


class Host(_Part):
    """Where it ran."""

    processor: str
    threads: int
    gpus: tuple[str, ...]
    versions: dict[str, str | None]


class Report(_Part):
    """One run of `specplug bench`."""

    host: Host
    lossy: bool
    model: Model
    prompts: Prompts
    columns: dict[str, Column] = Field(min_length=1)
    """Label -> what ran; the first one is what speed-ups and texts refer to."""
    batches: tuple[Batch, ...] = Field(min_length=1)

    @property
    def first(self) -> str:
        """The first column's label."""
        return next(iter(self.columns))


def read_report(path: str, option: str) -> Report:
    """Read the file that ``bench --json`` wrote; whatever is wrong with it is a UserError that names `option`."""
    how = "give a JSON file that specplug bench --json wrote"
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{option} {path}: cannot read it ({error.strerror}): {how}") from None
    except UnicodeDecodeError:
        raise UserError(f"{option} {path}: cannot read it (not UTF-8 text): {how}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        why = f"{error.msg} at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise UserError(f"{option} {path}: not valid JSON ({why}): {how}") from None
    if not isinstance(content, dict):
        raise UserError(f"{option} {path}: it is no report: {how}")
    try:
        report = Report.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = "is missing" if first["type"] == "missing" else f"is not as bench writes it ({first['msg']})"
        raise UserError(f"{option} {path}: {where} {what}: make it again with this version's bench --json") from None
    for batch in report.batches:
        for label in report.columns:
            if label not in batch.columns or batch.columns[label].ledger is None:
                raise UserError(
                    f"{option} {path}: batch {batch.size} lacks column {label!r} or its ledger: "
                    "make it again with bench --json"
                )
    return report
