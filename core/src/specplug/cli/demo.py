"""``specplug demo``: plain decoding against draft algorithms, on a real model, text compared."""

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from specplug.cli.demo_prompts import PROMPTS, DemoPrompt
from specplug.errors import UserError
from specplug.options import EngineOptions
from specplug.planning import NONE

if TYPE_CHECKING:
    from rich.table import Table

    from specplug.bench.columns import ColumnSpec
    from specplug.registry import Registry
    from specplug.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer, and what its ledger says."""

    ids: list[int]
    speed: float
    """Tokens per second from the first token to the last."""
    accept_length: float
    """Tokens of a verify that had drafts, bonus counted."""
    coverage: float
    """Share of the rounds that had drafts."""


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @app.command("demo")
    def demo(
        model: Annotated[str, typer.Argument(metavar="[MODEL]", help="folder, .gguf file or hub id")] = "demo",
        algorithms: Annotated[
            str | None,
            typer.Option(
                metavar="COLUMNS",
                help="rows of each prompt, written as for bench [default: none and what needs no draft model]",
            ),
        ] = None,
        max_tokens: Annotated[int, typer.Option(min=2, help="tokens per answer")] = 128,
        repeat: Annotated[int, typer.Option(min=1, help="rounds; speeds are medians over them")] = 1,
    ) -> None:
        """Compare plain decoding with draft algorithms: those named, or every installed one that needs no draft model.

        Algorithms take turns on each prompt, in one process. Speed is decoding speed: first token to last.
        The first row is what speed-ups and texts refer to.
        """
        from rich.console import Console

        from specplug.bench.columns import parse_columns
        from specplug.bench.host import QUIET_LOAD, load_average

        columns = None if algorithms is None else parse_columns(algorithms)
        load = load_average()
        print(f"load average {load:.2f} on {os.cpu_count()} cores")
        if load > QUIET_LOAD:
            print(f"warning: the machine is busy (above {QUIET_LOAD}): speeds will vary", file=sys.stderr)
        with ExitStack() as stack:
            engines = _installed(model, registry, stack) if columns is None else _named(model, columns, registry, stack)
            shown, ratios = _table(engines, max_tokens, repeat)
        Console().print(shown)
        print("accept length: tokens per verify that had drafts; drafted: steps that had any")
        for name, found in ratios.items():
            copying, free = (statistics.median(found[copies]) for copies in (True, False))
            print(f"{name}: median {copying:.2f}x where much is copied from the prompt, {free:.2f}x in free chat")


def _installed(model: str, registry: "Registry", stack: ExitStack) -> "dict[str, Engine]":
    """Return plain decoding and every algorithm that runs without being told more; say which do not."""
    from specplug.runtime.engine import Engine

    plain = stack.enter_context(Engine(model, registry=registry, max_running_requests=1))
    engines = {NONE: plain}
    registry.load()
    for name in sorted(registry.algorithms):
        try:
            engine = Engine(plain.target, algorithm=name, registry=registry, max_running_requests=1)
        except UserError as refused:
            print(f"{name}: left out: {refused}")
        else:
            engines[name] = stack.enter_context(engine)
    return engines


def _named(model: str, columns: "Sequence[ColumnSpec]", registry: "Registry", stack: ExitStack) -> "dict[str, Engine]":
    """Return an engine for each column; all are planned before the model, which they share, is loaded."""
    from specplug.bench.settle import settle_columns
    from specplug.facts import read_checkpoint
    from specplug.models.store import local_model
    from specplug.runtime.engine import Engine

    shared = EngineOptions(max_running_requests=1)
    settle_columns(registry, columns, read_checkpoint(str(local_model(model))), shared)
    engines: dict[str, Engine] = {}
    for column in columns:
        options = column.engine_options(shared)
        engine = Engine(
            next(iter(engines.values())).target if engines else model,
            algorithm=column.algorithm,
            config=column.config,
            registry=registry,
            **{name: getattr(options, name) for name in options.model_fields_set},
        )
        engines[column.label] = stack.enter_context(engine)
    return engines


def _table(
    engines: "dict[str, Engine]", max_tokens: int, repeat: int
) -> "tuple[Table, dict[str, dict[bool, list[float]]]]":
    """Answer every prompt; return the table, and by engine its speed-ups apart for prompts that copy and others."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("prompt", "algorithm", "tokens/s", "speed-up", "accept\nlength", "drafted", "text"):
        table.add_column(heading, no_wrap=True)
    base = next(iter(engines))
    ratios: dict[str, dict[bool, list[float]]] = {}
    for prompt in PROMPTS:
        runs = _compare(engines, prompt, max_tokens, repeat)
        plain = statistics.median(run.speed for run in runs[base])
        for name, measured in runs.items():
            speed = statistics.median(run.speed for run in measured)
            same = all(run.ids == runs[base][0].ids for run in measured)
            first = measured[0]
            row = [f"{speed:.1f}", f"{speed / plain:.2f}x", f"{first.accept_length:.2f}", f"{first.coverage:.0%}"]
            table.add_row(prompt.name if name == base else "", name, *row, "identical" if same else "DIFFERENT")
            if name != base:
                ratios.setdefault(name, {True: [], False: []})[prompt.copies].append(speed / plain)
            if not same:
                print(f"{prompt.name}: {name} changed the text", file=sys.stderr)
    return table, ratios


def _compare(
    engines: "dict[str, Engine]", prompt: DemoPrompt, max_tokens: int, repeat: int
) -> dict[str, list[Measured]]:
    """Answer `prompt` with every engine in turn, `repeat` times, after one short warm-up each."""
    for engine in engines.values():
        _measure(engine, prompt, 4)
    runs: dict[str, list[Measured]] = {name: [] for name in engines}
    for _ in range(repeat):
        for name, engine in engines.items():
            runs[name].append(_measure(engine, prompt, max_tokens))
    return runs


def _measure(engine: "Engine", prompt: DemoPrompt, max_tokens: int) -> Measured:
    request = engine.submit(prompt.messages, {"temperature": 0, "max_tokens": max_tokens})
    ids: list[int] = []
    first = last = perf_counter()
    while request.output.finish_reason is None:
        begun = bool(ids)
        for delta in engine.step():
            ids += delta.ids
        last = perf_counter()
        if not begun:
            first, head = last, len(ids)
    report = request.settled_ledger().report()
    speed = (len(ids) - head) / (last - first) if last > first else 0.0
    return Measured(ids, speed, report["accept_length"], report["draft_coverage"])
