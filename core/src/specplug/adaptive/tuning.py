"""Measures every depth at every batch size on the user's prompts, and recommends. Runs the engine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specplug.adaptive.config import MEASURED
from specplug.adaptive.tiers import Tier, as_json
from specplug.adaptive.watching import Watching
from specplug.bench.compare import WARM_UP
from specplug.bench.measure import BatchRun, EngineColumn
from specplug.bench.workload import Item, Source, split
from specplug.errors import UserError
from specplug.runtime.device.buckets import row_ladder
from specplug.runtime.engine import Engine

WORTH = 1.03
"""A gain below this is within what a measurement varies by: plain decoding is recommended."""
NEAR = 0.8
"""Depths with this share of the best one's speed are candidates."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One depth at one batch size."""

    batch: int
    depth: int
    accept_length: float
    """Tokens per drafted round, the bonus counted."""
    iteration_ms: float
    """Median over the runs of decode time per step."""
    tokens_per_second: float
    """Median over the runs, all requests together."""
    speed_up: float
    """Over depth 0, of medians."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured. Returned by `tune`."""

    cells: Sequence[Cell]
    measured: Mapping[str, Any]
    """As the configuration file holds it."""

    def best(self, batch: int) -> Cell:
        """Return the recommended depth's cell."""
        cells = [cell for cell in self.cells if cell.batch == batch]
        found = max(cells, key=lambda cell: cell.tokens_per_second)
        return found if found.speed_up >= WORTH else next(cell for cell in cells if cell.depth == 0)

    @property
    def worth_percent(self) -> int:
        """Least gain that is recommended."""
        return round(100 * (WORTH - 1))

    @property
    def batches(self) -> list[int]:
        """Batch sizes, ascending."""
        return sorted({cell.batch for cell in self.cells})

    def tiers(self) -> tuple[Tier, ...]:
        """Return a tier per batch size: depths that are near the best, and the best itself."""
        found = []
        for batch in self.batches:
            cells = [cell for cell in self.cells if cell.batch == batch]
            top = max(cell.tokens_per_second for cell in cells)
            depths = {cell.depth for cell in cells if cell.tokens_per_second >= NEAR * top} | {self.best(batch).depth}
            found.append(Tier(batch, tuple(sorted(depths))))
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return the configuration file: tiers, and what was measured."""
        table = [{name: round(getattr(cell, name), 4) for name in Cell.__slots__} for cell in self.cells]
        return {**as_json(self.tiers()), MEASURED: {**self.measured, "table": table}}


def tune(
    engine: Engine,
    sources: Sequence[Source],
    *,
    batches: Sequence[int],
    depths: Sequence[int],
    sampling: Mapping[str, Any],
    repeat: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> Tuned:
    """Run `sources` in batches of each size at each of `depths`, 0 among them, taking turns. `engine` is adaptive.

    Raises UserError where a prompt does not fit the context, or a batch size has no full batch.
    """
    drafting = engine._built.drafting
    assert drafting is not None
    watching = Watching(row_ladder(engine.options.max_running_requests))
    drafting.policy = watching
    column = EngineColumn("tune", engine)
    items = [_item(engine, source, seed) for source in sources]
    groups = {size: split(sources, size)[0] for size in batches}
    runs: dict[tuple[int, int], list[BatchRun]] = {(size, depth): [] for size in batches for depth in depths}
    for size in batches:
        for depth in depths:
            watching.depth = depth
            warm = {**sampling, "max_tokens": min(WARM_UP, sampling["max_tokens"])}
            column.run([items[source.number] for source in groups[size][0]], warm)
    watching.clear()
    turn = 0
    for size in batches:
        for group in groups[size]:
            batch = [items[source.number] for source in group]
            for _ in range(repeat):
                at = turn % len(depths)
                turn += 1
                for depth in (*depths[at:], *depths[:at]):
                    watching.depth = depth
                    runs[size, depth].append(column.run(batch, sampling))
                    advance()
    return Tuned(_cells(runs, watching), watching.measured().as_json())


def _item(engine: Engine, source: Source, seed: int) -> Item:
    assert source.conversation is not None
    ids = tuple(engine.encode(source.conversation.prompt([])))
    if not 0 < len(ids) < engine.max_tokens:
        raise UserError(
            f"prompt {source.number + 1} has {len(ids)} tokens, and the context holds 1 to {engine.max_tokens - 1} "
            "before the answer: take it out, or raise --context-length as far as the model allows"
        )
    return Item(source, 0, ids, seed + source.number)


def _cells(runs: Mapping[tuple[int, int], Sequence[BatchRun]], watching: Watching) -> list[Cell]:
    speeds = {at: _median([run.speed for run in each]) for at, each in runs.items()}
    found = []
    for (size, depth), each in runs.items():
        steps = _median([1e3 * run.decode_seconds / run.steps for run in each if run.steps])
        plain, speed = speeds[size, 0], speeds[size, depth]
        length = watching.accept_length(size, depth) if depth else 1.0
        found.append(Cell(size, depth, length, steps, speed, speed / plain if plain else 0.0))
    return found


def _median(values: Sequence[float | None]) -> float:
    found = [value for value in values if value is not None]
    return median(found) if found else 0.0


def write(path: str, tuned: Tuned) -> None:
    """Write the configuration file, one name a line, so that it can be read and changed."""
    lines = []
    for name, value in tuned.as_json().items():
        if name != MEASURED:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
            continue
        parts = [f"  {json.dumps(key)}: {json.dumps(part)}" for key, part in value.items()]
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def draw(path: str, title: str, tuned: Tuned) -> None:
    """Write a PNG: tokens per second over depth, one line per batch size."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    figure.suptitle(title)
    for batch in tuned.batches:
        cells = sorted((cell for cell in tuned.cells if cell.batch == batch), key=lambda cell: cell.depth)
        depths = [cell.depth for cell in cells]
        axes[0].plot(depths, [cell.speed_up for cell in cells], marker="o", label=f"batch {batch}")
        axes[1].plot(depths, [cell.accept_length for cell in cells], marker="o", label=f"batch {batch}")
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    for each, label in zip(axes, ("speed-up over depth 0", "tokens per drafted round"), strict=True):
        each.set_xlabel("depth")
        each.set_ylabel(label)
        each.legend()
    figure.savefig(path, dpi=150)
