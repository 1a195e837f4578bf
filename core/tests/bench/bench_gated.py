"""A baseline made by hand, and ways to change one."""

import json
from pathlib import Path
from typing import Any

from specplug.bench.gate import Gate
from specplug.bench.report import Report

ARGUMENTS = ("--max-tokens", 16, "--repeat", 1, "--gate-floor", 0)
"""Of a short run, judged by its text and its drafts."""
X = "batches/0/columns/x"
"""Where the second column of `made` stands, as `changed` takes it."""


def made() -> dict[str, Any]:
    """A report of two columns at one batch size, as far as it is read."""
    ledger = {"tokens_per_target_step": 2.0, "accept_length": 3.0, "draft_coverage": 0.5}
    plain = {"tokens_per_target_step": 1.0, "accept_length": 1.0, "draft_coverage": 0.0}
    text = {"faults": 0, "skipped": ""}
    column = {"ledger": ledger, "speed_up": {"decode": {"median": 1.5}}, "text": text}
    first = {"ledger": plain, "speed_up": {"decode": {"median": 1.0}}, "text": text}
    answers = [{"prompt": n, "turn": 0, "asked": f"a{n}", "ids": "1 2 3", "other": {}} for n in range(2)]
    report = {
        "host": {"processor": "p", "threads": 2, "gpus": [], "versions": {"torch": "2.13.0", "python": "3.11"}},
        "lossy": False,
        "model": {"name": "m", "fingerprint": "f", "dtype": "float32", "device": "cpu"},
        "prompts": {
            "file": "p.jsonl", "fingerprint": "q", "random_input": None, "count": 2, "seed": 0, "repeat": 3,
            "temperature": 0.0, "max_tokens": 64, "ignore_eos": False,
        },
        "columns": {"none": {"algorithm": "none"}, "x": {"algorithm": "lookup"}},
        "batches": [{"size": 1, "columns": {"none": first, "x": column}, "answers": answers}],
    }  # fmt: skip
    return json.loads(json.dumps(report))  # nothing is shared


def changed(where: str, value: Any) -> dict[str, Any]:
    """`made` with one value in another's place; a value of `...` leaves it out."""
    report: Any = made()
    at = report
    *parts, last = [int(part) if part.isdigit() else part for part in where.split("/")]
    for part in parts:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return report


def gate(**options: Any) -> Gate:
    """The gate of `made`."""
    return Gate("b.json", Report.model_validate(made()), **options)


def edit(file: Path, where: str, value: Any) -> Any:
    """Change one value of a file, and return the old one."""
    report = at = json.loads(file.read_text())
    *parts, last = [int(part) if part.isdigit() else part for part in where.split("/")]
    for part in parts:
        at = at[part]
    old, at[last] = at[last], value
    file.write_text(json.dumps(report))
    return old
