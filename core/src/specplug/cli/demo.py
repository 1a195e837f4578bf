"""``specplug demo``: plain decoding against every installed algorithm, on a real model, text compared."""

import os
import statistics
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from specplug.cli.demo_prompts import PROMPTS, DemoPrompt
from specplug.errors import UserError

if TYPE_CHECKING:
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
        max_tokens: Annotated[int, typer.Option(min=2, help="tokens per answer")] = 128,
        repeat: Annotated[int, typer.Option(min=1, help="rounds; speeds are medians over them")] = 1,
    ) -> None:
        """Compare plain decoding with every installed algorithm that needs no draft model.

        Algorithms take turns on each prompt, in one process. Speed is decoding speed: first token to last.
        """
        from rich.console import Console
        from rich.table import Table

        from specplug.bench.host import QUIET_LOAD, load_average
        from specplug.runtime.engine import Engine

        load = load_average()
        print(f"load average {load:.2f} on {os.cpu_count()} cores")
        if load > QUIET_LOAD:
            print(f"warning: the machine is busy (above {QUIET_LOAD}): speeds will vary", file=sys.stderr)
        plain = Engine(model, registry=registry, max_running_requests=1)
        engines = {"none": plain}
        registry.load()
        for name in sorted(registry.algorithms):
            try:
                engines[name] = Engine(plain.target, algorithm=name, registry=registry, max_running_requests=1)
            except UserError as refused:
                print(f"{name}: left out: {refused}")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("prompt", "algorithm", "tokens/s", "speed-up", "accept\nlength", "drafted", "text"):
            table.add_column(heading, no_wrap=True)
        ratios: dict[str, list[float]] = {}
        for prompt in PROMPTS:
            runs = _compare(engines, prompt, max_tokens, repeat)
            base = statistics.median(run.speed for run in runs["none"])
            for name, measured in runs.items():
                speed = statistics.median(run.speed for run in measured)
                same = all(run.ids == runs["none"][0].ids for run in measured)
                first = measured[0]
                row = [f"{speed:.1f}", f"{speed / base:.2f}x", f"{first.accept_length:.2f}", f"{first.coverage:.0%}"]
                table.add_row(prompt.name, name, *row, "identical" if same else "DIFFERENT")
                if prompt.copies and name != "none":
                    ratios.setdefault(name, []).append(speed / base)
                if not same:
                    print(f"{prompt.name}: {name} changed the text", file=sys.stderr)
        Console().print(table)
        for name, found in ratios.items():
            print(f"{name}: median {statistics.median(found):.2f}x over the {len(found)} prompts with much to copy")
        for engine in engines.values():
            engine.close()


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
