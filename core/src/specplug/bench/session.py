"""One `specplug bench`: plan every column, load the target once, compare at every batch size, report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from specplug.bench import table
from specplug.bench.baseline import transformers_columns
from specplug.bench.check import TIES, TextCheck, check_gate, check_texts
from specplug.bench.columns import DRAFT_PATH, PER_COLUMN, ColumnSpec
from specplug.bench.compare import compare
from specplug.bench.figures import figures
from specplug.bench.floor import Floor, floor_of
from specplug.bench.gate import Gate, TextChanges, check_asked, check_planned, host_warning, judge
from specplug.bench.host import QUIET_LOAD, describe, load_average
from specplug.bench.identity import answer_rows, model_fingerprint, prompts_fingerprint
from specplug.bench.measure import Column, EngineColumn
from specplug.bench.plot import check_plot, draw
from specplug.bench.settle import settle_columns
from specplug.bench.workload import Source, random_sources, split
from specplug.errors import UserError
from specplug.facts import read_checkpoint
from specplug.models.store import local_model
from specplug.models.target import Target, load_target
from specplug.options import EngineOptions
from specplug.planning import NONE, Run
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.runtime.memory import device_memory, fair_fraction
from specplug.sampling import SamplingParams
from specplug.settings import option_of, validated
from specplug.spec import Checkpoint


@dataclass(frozen=True, slots=True)
class Job:
    """What the command line asked for. Set by `specplug.cli.bench`."""

    model: str
    columns: Sequence[ColumnSpec]
    options: EngineOptions
    sources: Sequence[Source]
    """Prompts of a file; empty for random input."""
    random_input: int | None
    """Tokens per random prompt."""
    count: int
    """How many random prompts."""
    sizes: Sequence[int]
    sampling: Mapping[str, Any]
    seed: int
    repeat: int
    transformers: bool = False
    json_path: str | None = None
    """File for everything as JSON; ``-`` is standard output, and the tables go to standard error."""
    plot_path: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the report says of the prompts."""
    gate: Gate | None = None


def run(job: Job, registry: Registry) -> int:
    """Run it and return the exit code: 0, or 1 if a column's text differs by more than a tie or the gate is shut."""
    for option, path in (("--json", job.json_path), ("--plot", job.plot_path)):
        if path is not None and path != "-":
            _check_writable(option, path)
    if job.plot_path is not None:
        check_plot(job.plot_path)
    sampling = validated(SamplingParams, job.sampling, option_of)
    prompts = _prompts(job)
    if job.gate is not None:
        check_asked(job.gate, [column.label for column in job.columns], job.sizes, prompts)
    checkpoint, runs = _plan(job, registry)
    dtype, device = next(iter(runs.values())).facts.dtype, next(iter(runs.values())).facts.device
    model = {"name": job.model, "fingerprint": model_fingerprint(checkpoint), "dtype": dtype, "device": device}
    if job.gate is not None:
        check_planned(job.gate, model, {label: run.algorithm for label, run in runs.items()})
    out = table.console(stderr=job.json_path == "-")
    load = load_average()
    out.print(f"load average {load:.2f} on {os.cpu_count()} cores", highlight=False)
    if load > QUIET_LOAD:
        _say(f"warning: load average {load:.2f} is above {QUIET_LOAD}: timings are not to be trusted")
    used = {run.installed.distribution: run.installed.version for run in runs.values() if run.installed}
    lossy = bool(job.options.lossy)
    report: dict[str, Any] = {"host": describe(used), "lossy": lossy, "notes": []}
    if job.gate is not None and (warning := host_warning(job.gate, report["host"])):
        _say(f"warning: {warning}")
    target = load_target(
        Path(checkpoint.path),
        checkpoint,
        dtype=dtype,
        device=device,
        needs_tokenizer=job.random_input is None,
        trust_remote_code=job.options.trust_remote_code,
        load_format=job.options.load_format,
    )
    sources = job.sources or _random(job, target)
    floor = floor_of(target)
    if isinstance(floor, str):
        out.print(f"floor {floor}", highlight=False)
    baselines, notes = transformers_columns(target, job.options, dtype, device) if job.transformers else ([], [])
    report["model"] = model
    report["prompts"] = prompts
    report["floor"] = floor.report() if isinstance(floor, Floor) else {"unknown": floor}
    report["columns"] = {
        column.label: _described(runs[column.label], column.engine_options(job.options)) for column in job.columns
    }
    report["batches"] = []
    faults = 0
    changes: list[TextChanges] = []
    for size in job.sizes:
        at_size = _Size(job, registry, target, sources, size, dtype, sampling.greedy)
        measured = at_size.measure(baselines, notes, floor if isinstance(floor, Floor) else None)
        found, texts = measured.figures, measured.texts
        table.show(out, size, found, texts, "LOSSY, synthetic acceptance: " if lossy else "")
        for label, text in texts.items():
            found[label]["text"] = text.report()
            faults += text.faults
        report["batches"].append({"size": size, "columns": found, "answers": measured.answers})
        if measured.changes is not None:
            changes.append(measured.changes)
    for line in dict.fromkeys(notes):
        out.print(line, highlight=False, markup=False)
    report["notes"] = list(dict.fromkeys(notes))
    report["host"]["load_average_after"] = load_average()
    worse: tuple[str, ...] = ()
    if job.gate is not None:
        verdict = judge(job.gate, report, changes, None if dtype == "float32" else TIES[dtype])
        report["gate"], worse = verdict.report(job.gate), verdict.worse
        out.print(verdict.summary(job.gate), highlight=False, markup=False, soft_wrap=True)
    if job.json_path is not None:
        _write_json(job.json_path, report)
    if job.plot_path is not None:
        title = f"{job.model}, {dtype}" + (f", {job.options.speculative_acceptance} (lossy)" if lossy else "")
        draw(job.plot_path, title, {each["size"]: each["columns"] for each in report["batches"]})
    if faults:
        _say(f"error: {faults} answers differ from those of {job.columns[0].label!r} by more than a tie (table: text)")
    for line in worse:
        _say(f"gate: {line}")
    return 1 if faults or worse else 0


# --- before anything is loaded -------------------------------------------------------------------------------------


def _check_writable(option: str, path: str) -> None:
    place = Path(path)
    if place.is_dir() or not place.parent.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK):
        raise UserError(f"{option} {path}: cannot be written there: give a file name in a folder that exists")


def _prompts(job: Job) -> dict[str, Any]:
    """Return what the report says of the prompts."""
    count = len(job.sources) or job.count
    fingerprint = prompts_fingerprint(job.sources)
    about = {"fingerprint": fingerprint, "count": count, "seed": job.seed, "repeat": job.repeat}
    return {**job.about, **about, **job.sampling}


def _plan(job: Job, registry: Registry) -> tuple[Checkpoint, dict[str, Run]]:
    """Settle every column, or refuse: nothing is loaded for a comparison that cannot be completed."""
    options = job.options
    dummy = options.load_format == "dummy"
    if dummy and job.transformers:
        raise UserError("--transformers with --load-format dummy: those weights are ours alone: leave one of them out")
    folder = local_model(job.model, options.revision, needs_tokenizer=job.random_input is None, needs_weights=not dummy)
    checkpoint = read_checkpoint(
        str(folder),
        options.revision,
        trust_remote_code=options.trust_remote_code,
        load_format=options.load_format,
    )
    runs = settle_columns(registry, job.columns, checkpoint, _sized(options, max(job.sizes)))
    for label, run in runs.items():
        for warning in run.warnings if run.algorithm != NONE else ():
            _say(f"warning: {label}: {warning.message}")
    draft = options.speculative_draft_model_path
    takers = [column for column in job.columns if DRAFT_PATH not in column.options]
    if draft and not job.transformers and all(runs[column.label].algorithm == NONE for column in takers):
        _say(f"warning: the draft model {draft} is not used by any column")
    return checkpoint, runs


def _sized(options: EngineOptions, size: int) -> EngineOptions:
    """Return the options with as many slots as the batch has rows, unless the user chose."""
    if "max_running_requests" not in options.model_fields_set:
        return options.model_copy(update={"max_running_requests": size})
    if options.max_running_requests < size:
        raise UserError(
            f"--max-running-requests {options.max_running_requests} is below --batch-sizes {size}: "
            "raise it, or leave it out (it then is the batch size)"
        )
    return options


def _random(job: Job, target: Target) -> list[Source]:
    assert job.random_input is not None
    return random_sources(job.count, job.random_input, target.model.vocab_size, job.seed, target.eos_ids)


# --- one batch size ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measured:
    """What came of one batch size."""

    figures: dict[str, dict[str, Any]]
    texts: dict[str, TextCheck]
    answers: list[dict[str, Any]]
    """`specplug.bench.identity.answer_rows`."""
    changes: TextChanges | None
    """Against the gate's baseline; None without a gate."""


@dataclass(frozen=True, slots=True)
class _Size:
    """The comparison at one batch size."""

    job: Job
    registry: Registry
    target: Target
    sources: Sequence[Source]
    size: int
    dtype: str
    greedy: bool

    def measure(self, baselines: Sequence[Column], notes: list[str], floor: Floor | None) -> _Measured:
        """Return every column's figures, text check and answers."""
        job, size = self.job, self.size
        batches, left = split(self.sources, size)
        if left:
            notes.append(f"batch {size}: the last {left} prompts are left out, they fill no batch")
        with ExitStack() as stack:
            engines = {}
            for at, column in enumerate(job.columns):
                chosen = _sized(column.engine_options(job.options), size)
                options = {name: getattr(chosen, name) for name in chosen.model_fields_set}
                options["max_running_requests"] = chosen.max_running_requests
                engine = Engine(
                    self.target,
                    algorithm=column.algorithm,
                    config=column.config,
                    registry=self.registry,
                    **options | self._share(len(job.columns) - at),
                )
                engines[column.label] = stack.enter_context(engine)
            columns: list[Column] = [EngineColumn(label, engine) for label, engine in engines.items()]
            for baseline in baselines:
                why = baseline.cannot(size)
                if why:
                    notes.append(f"batch {size}: {baseline.label} is left out: {why}")
                else:
                    columns.append(baseline)
            turns = sum(max(source.rounds for source in batch) for batch in batches)
            with _progress(f"batch {size}", turns * job.repeat * len(columns)) as advance:
                runs = compare(
                    columns,
                    batches,
                    repeat=job.repeat,
                    sampling=job.sampling,
                    seed=job.seed,
                    note=notes.append,
                    advance=advance,
                )
            lead = engines[job.columns[0].label]
            texts = check_texts(runs, lead, job.sampling, self.dtype, self._not_comparable())
            answers = answer_rows(runs)
            changes = None if job.gate is None else check_gate(job.gate, size, runs, answers, lead, job.sampling)
            found = figures(runs, floor)
            for label, engine in engines.items():
                report = engine.report()
                found[label] |= {name: report[name] for name in ("alarm", "preemptions", "drafter")}
                found[label]["pages"] = engine.pages
        return _Measured(found, texts, answers, changes)

    def _share(self, engines: int) -> dict[str, float]:
        """Return the option by which the next of `engines` leaves as much of a device's memory to each that follows."""
        device = next(self.target.model.parameters(), torch.empty(0)).device
        memory = device_memory(device) if device.type != "cpu" and engines > 1 else None
        if memory is None:
            return {}
        return {"mem_fraction_static": fair_fraction(memory, self.job.options.mem_fraction_static, engines)}

    def _not_comparable(self) -> str:
        if self.job.options.lossy:
            return "under synthetic acceptance the text means nothing"
        if self.greedy or self.job.options.acceptance == "coupled":
            return ""
        return f"under {self.job.options.acceptance} sampled text depends on the drafts"


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    console = Console(stderr=True)
    if not console.is_terminal:  # a bar that is switched off leaves an empty line, up to rich 13
        yield lambda: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


# --- the report ----------------------------------------------------------------------------------------------------


def _described(run: Run, options: EngineOptions) -> dict[str, Any]:
    plan = run.plan
    return {
        "lossy": bool(options.lossy and plan and plan.nodes),
        "acceptance": options.speculative_acceptance,
        "algorithm": run.algorithm,
        "distribution": run.installed.distribution if run.installed else None,
        "version": run.installed.version if run.installed else None,
        "options": {name: getattr(options, name) for name in PER_COLUMN if name in options.model_fields_set},
        "settings": {
            setting.field: {"value": setting.value, "source": setting.source, "because": setting.because}
            for setting in run.settings
        },
        "plan": plan.model_dump(mode="json", include={"nodes", "depth", "bytes_fixed", "bytes_per_slot"})
        if plan
        else None,
    }


def _write_json(path: str, report: Mapping[str, Any]) -> None:
    text = json.dumps(report, indent=1, default=str, allow_nan=False)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
