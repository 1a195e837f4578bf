"""``bench --gate BASELINE.json``: is this run as good as the one that wrote the baseline? Torch-free.

A run is compared with a baseline of the same model, prompts, columns and batch sizes, or refused. What may then be
worse is the text (token for token in float32, up to ties in half precision), tokens per target step, and the speed-up,
which is a ratio inside the run and needs no baseline, only a floor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specplug.bench.report import Answer, Batch, Figures, Host, Model, Prompts, Report, read_report
from specplug.errors import UserError

SLACK = 0.02
"""Share by which tokens per target step may fall, unless said otherwise."""
FLOOR = 0.9
"""Smallest speed-up over the first column, unless said otherwise."""

_OPTIONS = {
    "random_input": "--random-input",
    "count": "the number of prompts",
    "seed": "--seed",
    "repeat": "--repeat",
    "temperature": "--temperature",
    "max_tokens": "--max-tokens",
    "ignore_eos": "--ignore-eos",
}


@dataclass(frozen=True, slots=True)
class Gate:
    """A baseline and what may be worse than in it."""

    path: str
    baseline: Report
    slack: float = SLACK
    floor: float = FLOOR

    def batch(self, size: int) -> Batch:
        """Return the baseline's figures and answers at one batch size, which it has (`check_asked`)."""
        return next(batch for batch in self.baseline.batches if batch.size == size)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer leaves the baseline's. Prompt, turn and position are counted from 0."""

    size: int
    label: str
    prompt: int
    turn: int
    at: int
    """Position in the answer."""
    was: int | None
    """The baseline's token; None if its answer ends there."""
    now: int | None
    """This run's."""
    gap: float = math.inf
    """How far the lower of the two tokens lies below the largest value, as `specplug.bench.check` computes it."""

    def line(self) -> str:
        """Say it, counted from 1."""
        was, now = ("the end" if token is None else str(token) for token in (self.was, self.now))
        gap = f" (gap {self.gap:.1e})" if math.isfinite(self.gap) else ""
        return f"{_place(self.size, self.label, self.prompt, self.turn)}, token {self.at + 1}: {now}, was {was}{gap}"


@dataclass(slots=True)
class TextChanges:
    """The answers of one batch size against the baseline's."""

    answers: int = 0
    """Compared, those of all columns."""
    partings: list[Parting] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """What else is not the same."""
    following: int = 0
    """Answers of later turns that are not compared: the turns before went otherwise, so they were asked otherwise."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it."""

    worse: tuple[str, ...]
    """One line per thing that got worse."""
    answers: int
    ties: int
    """Answers that part from the baseline's at a tie; 0 in float32, where a tie is worse too."""
    largest_tie: float
    following: int

    def report(self, gate: Gate) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            "baseline": gate.path,
            "slack": gate.slack,
            "floor": gate.floor,
            "worse": list(self.worse),
            "answers": self.answers,
            "ties": self.ties,
            "not_compared": self.following,
        }

    def summary(self, gate: Gate) -> str:
        """Say in a line what was compared and what came of it."""
        found = f"{len(self.worse)} worse than" if self.worse else "as good as"
        ties = f", {self.ties} part at a tie (largest gap {self.largest_tie:.1e})" if self.ties else ""
        left = f", {self.following} of later turns not compared, as an earlier turn parted" if self.following else ""
        return f"gate: {found} {gate.path}: {self.answers} answers compared{ties}{left}"


# --- before anything is loaded -------------------------------------------------------------------------------------


def open_gate(path: str, slack: str | None, floor: str | None, json_path: str | None) -> Gate:
    """Read the baseline and its bounds, as typed. Raises UserError for what cannot be a gate.

    `json_path`: where this run's report will go, which must not be the baseline: a run that got worse would pass the
    next time.
    """
    share = _number("--gate-slack", slack, SLACK, 1.0, "give a share from 0 to below 1, such as 0.02")
    least = _number("--gate-floor", floor, FLOOR, 1e3, "give a speed-up from 0 (any) to below 1000, such as 0.9")
    baseline = read_report(path, "--gate")
    if json_path is not None and os.path.realpath(json_path) == os.path.realpath(path):
        raise UserError(
            f"--json {json_path} is the baseline of --gate: give another file, and copy it when it is meant"
        )
    if baseline.lossy:
        raise UserError(
            f"--gate {path}: it was made under synthetic acceptance, where text means nothing: "
            "make a baseline without --speculative-acceptance"
        )
    for batch in baseline.batches:
        for label in baseline.columns:
            text, where = batch.columns[label].text, f"--gate {path}: batch {batch.size}, {label}"
            if text.skipped:
                raise UserError(
                    f"{where}: its text was not compared ({text.skipped}): make a baseline that compares it"
                )
            if text.faults:
                raise UserError(
                    f"{where}: its text differs from that of {baseline.first!r}, so it is no baseline: "
                    "find the cause, then make a new one"
                )
    return Gate(path, baseline, share, least)


def check_asked(gate: Gate, labels: Sequence[str], sizes: Sequence[int], prompts: Mapping[str, Any]) -> None:
    """Raise UserError if the baseline is of other columns, batch sizes or prompts. Needs no model.

    `prompts`: what the report says of them.
    """
    was, now = gate.baseline, Prompts.model_validate(prompts)
    if set(labels) != set(was.columns) or labels[0] != was.first:
        raise _other(gate, "--algorithms", ",".join(was.columns), ",".join(labels))
    before = [batch.size for batch in was.batches]
    if sorted(sizes) != sorted(before):
        raise _other(gate, "--batch-sizes", ",".join(map(str, before)), ",".join(map(str, sizes)))
    for name, option in _OPTIONS.items():
        old, new = getattr(was.prompts, name), getattr(now, name)
        if old != new:
            option = "--output-len" if name == "max_tokens" and now.random_input else option
            raise _other(gate, option, str(old), str(new))
    if was.prompts.fingerprint != now.fingerprint:
        raise _other(gate, "--prompts", str(was.prompts.file), f"{now.file} with other prompts")


def check_planned(gate: Gate, model: Mapping[str, Any], algorithms: Mapping[str, str]) -> None:
    """Raise UserError if the baseline is of another model, dtype, kind of device, or other algorithms.

    `model`: what the report says of it; `algorithms`: column -> algorithm, aliases resolved.
    """
    was, now = gate.baseline.model, Model.model_validate(model)
    if was.fingerprint != now.fingerprint:
        raise _other(gate, "MODEL", was.name, f"{now.name} with other weights")
    if was.dtype != now.dtype:
        raise _other(gate, "--dtype", was.dtype, now.dtype)
    kinds = [each.device.partition(":")[0] for each in (was, now)]
    if kinds[0] != kinds[1]:
        raise _other(gate, "--device", *kinds)
    for label, algorithm in algorithms.items():
        before = gate.baseline.columns[label].algorithm
        if before != algorithm:
            raise _other(gate, f"the algorithm of column {label}", before, algorithm)


def host_warning(gate: Gate, host: Mapping[str, Any]) -> str:
    """Say what of the machine is not the baseline's and may move a text or a speed-up; empty if nothing is."""
    was, now = gate.baseline.host, Host.model_validate(host)
    pairs = {
        "processor": (was.processor, now.processor),
        "GPU": (", ".join(was.gpus[:1]) or "none", ", ".join(now.gpus[:1]) or "none"),
        "threads": (was.threads, now.threads),
        "torch": (was.versions.get("torch"), now.versions.get("torch")),
    }
    other = [f"{name} {old} (here {new})" for name, (old, new) in pairs.items() if old != new]
    if not other:
        return ""
    return (
        f"--gate {gate.path} was made with {', '.join(other)}: logits may be rounded otherwise, "
        "and a text may part where two tokens are nearly tied"
    )


# --- afterwards ----------------------------------------------------------------------------------------------------


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the first index at which the two differ; the shorter one's length if it begins the other."""
    return next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )


def text_changes(size: int, labels: Sequence[str], was: Sequence[Answer], now: Sequence[Answer]) -> TextChanges:
    """Compare the answers of `labels`, the first column first, with the baseline's. Gaps are left to the caller."""
    found = TextChanges()
    old, new = ({(row.prompt, row.turn): row for row in rows} for rows in (was, now))
    astray: set[int] = set()  # prompts whose first column went otherwise: what it is asked next is its own
    for key in sorted(old.keys() | new.keys()):
        prompt, turn = key
        before, after = old.get(key), new.get(key)
        if prompt in astray:
            found.following += len(labels)
            continue
        if before is None or after is None or before.asked != after.asked:
            astray.add(prompt)
            what = (
                "is not in the baseline"
                if before is None
                else "is in the baseline only"
                if after is None
                else "other tokens were asked: the tokenizer or the chat template is another"
            )
            found.lines.append(f"{_place(size, '', prompt, turn)}: {what}")
            continue
        for label in labels:
            found.answers += 1
            ours, theirs = before.of(label), after.of(label)
            if ours == theirs:
                continue
            at = first_difference(ours, theirs)
            token_was, token_now = (ids[at] if at < len(ids) else None for ids in (ours, theirs))
            found.partings.append(Parting(size, label, prompt, turn, at, token_was, token_now))
            if label == labels[0]:
                astray.add(prompt)
    return found


def judge(gate: Gate, report: Mapping[str, Any], changes: Sequence[TextChanges], tie: float | None) -> Verdict:
    """Return what of a finished report is worse than the baseline.

    `changes`: of all batch sizes, with gaps. `tie`: largest gap at which a text may part; None: at none.
    """
    run = Report.model_validate(report)
    worse: list[str] = []
    ties = []
    for each in changes:
        worse += each.lines
        for parting in each.partings:
            if tie is None or parting.gap > tie:
                worse.append(parting.line())
            else:
                ties.append(parting.gap)
    for batch in run.batches:
        before = gate.batch(batch.size)
        for label in run.columns:
            where = _place(batch.size, label)
            worse += [f"{where}: {line}" for line in _slower(before.columns[label], batch.columns[label], gate)]
            speed = batch.columns[label].speed_up.decode
            if label != run.first and gate.floor and (speed is None or speed.median < gate.floor):
                said = "unknown, as nothing was decoded" if speed is None else f"{speed.median:.3f}"
                worse.append(f"{where}: speed-up {said}, at least {gate.floor:g} is wanted")
    return Verdict(
        tuple(worse),
        answers=sum(each.answers for each in changes),
        ties=len(ties),
        largest_tie=max(ties, default=0.0),
        following=sum(each.following for each in changes),
    )


def _slower(was: Figures, now: Figures, gate: Gate) -> list[str]:
    """Return the line about tokens per target step, if they fell.

    It alone is judged: it is what accept length and coverage come to, and a drafter may trade one for the other.
    """
    old, new = was.ledger, now.ledger
    if old is None or new is None or new.tokens_per_target_step >= old.tokens_per_target_step * (1 - gate.slack):
        return []
    return [
        f"{new.tokens_per_target_step:.3f} tokens per target step, was {old.tokens_per_target_step:.3f} "
        f"(accept length {new.accept_length:.3f}, was {old.accept_length:.3f}; "
        f"coverage {new.draft_coverage:.3f}, was {old.draft_coverage:.3f})"
    ]


def _place(size: int, label: str, prompt: int | None = None, turn: int = 0) -> str:
    parts = [
        f"batch {size}",
        label,
        "" if prompt is None else f"prompt {prompt + 1}",
        f"turn {turn + 1}" if turn else "",
    ]
    return ", ".join(filter(None, parts))


def _other(gate: Gate, what: str, was: str, now: str) -> UserError:
    return UserError(
        f"--gate {gate.path}: {what} differs: {was} there, {now} here: "
        "give the same, or make a new baseline with --json"
    )


def _number(option: str, text: str | None, default: float, below: float, how: str) -> float:
    """Return the number typed, at least 0 and below `below`."""
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < below:  # false for NaN, too
        raise UserError(f"{option} {text}: {how}")
    return number
