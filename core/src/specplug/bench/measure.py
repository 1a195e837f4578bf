"""One batch of requests through one engine, timed step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from specplug.bench.workload import Item
from specplug.errors import DrafterFailedError
from specplug.runtime.engine import Engine
from specplug.runtime.ledger import Ledger
from specplug.spec import StepStats

Sampling = Mapping[str, Any]
"""Fields of `SamplingParams`, without the seed: each item has its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's output and its times, in seconds since the batch was submitted."""

    item: Item
    ids: list[int]
    head: int
    """Tokens that came in the step of the first one."""
    first: float
    last: float
    ledger: Ledger | None
    """None where the column keeps none."""

    @property
    def seconds_per_token(self) -> float | None:
        """Time per output token after the first step's; None for an answer that ended there."""
        count = len(self.ids) - self.head
        return (self.last - self.first) / count if count > 0 else None


@dataclass(slots=True)
class BatchRun:
    """What one batch took. *Decode* is every step before which all requests had their first token."""

    answers: list[Answer] = field(default_factory=list)
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    steps: int = 0
    """Decode steps; what follows is over them."""
    rows: int = 0
    width: int = 0
    """Tokens that went through the target, drafts included."""
    stages: dict[str, float] = field(default_factory=dict)
    """Host seconds by stage of `StepStats.seconds`, and ``other``: what is left of a step's wall time."""
    exposed: list[float] = field(default_factory=list)
    """Seconds the device idled before a decode step for want of host work; of the steps for which it is known."""
    graphed: list[bool] = field(default_factory=list)
    """Whether a decode step's forward was replayed from a graph; empty where there are none."""
    peak_pages: int | None = None
    """Most KV pages held at once."""

    @property
    def speed(self) -> float | None:
        """Decoded tokens per second, all rows together; None if nothing was decoded."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds else None

    @property
    def seconds(self) -> float:
        """Prefill and decode."""
        return self.prefill_seconds + self.decode_seconds


class Column(Protocol):
    """What answers batches. Labels are unique in a comparison."""

    label: str

    def cannot(self, size: int) -> str:
        """Say why batches of `size` cannot be run; empty if they can."""

    def run(self, items: Sequence[Item], sampling: Sampling) -> BatchRun:
        """Answer the items together, to the last token."""


class EngineColumn:
    """An engine under a label. The caller closes the engine."""

    def __init__(self, label: str, engine: Engine) -> None:
        self.label = label
        self.engine = engine
        self._pages = _Pages(engine)
        engine.observers.add(self._pages)

    def cannot(self, size: int) -> str:
        """See `Column`."""
        slots = self.engine.options.max_running_requests
        return "" if size <= slots else f"--max-running-requests is {slots}"

    def run(self, items: Sequence[Item], sampling: Sampling) -> BatchRun:
        """See `Column`. A drafter that fails ends the comparison with `DrafterFailedError`."""
        engine, run = self.engine, BatchRun(prompt_tokens=sum(len(item.ids) for item in items))
        self._pages.peak = 0
        begin = perf_counter()
        requests = [engine.submit(item.ids, {**sampling, "seed": item.seed}) for item in items]
        first, last = [0.0] * len(items), [0.0] * len(items)
        head = [0] * len(items)
        open_ = list(range(len(items)))
        while open_:
            decoding = all(head[at] for at in open_)
            before = perf_counter()
            engine.step()
            now = perf_counter()
            stats = engine.last_step
            assert stats is not None
            if decoding:
                _add(run, stats, now - before)
            else:
                run.prefill_seconds += now - before
            for at in open_:
                output = requests[at].output
                if not head[at] and output.ids:
                    head[at], first[at] = len(output.ids), now - begin
                if output.finish_reason is not None:
                    last[at] = now - begin
            open_ = [at for at in open_ if requests[at].output.finish_reason is None]
        if engine.speculation.startswith("failed"):
            raise DrafterFailedError(f"{self.label}: {engine.speculation}")
        run.peak_pages = self._pages.peak
        run.answers = [
            Answer(item, list(request.output.ids), head[at], first[at], last[at], request.settled_ledger())
            for at, (item, request) in enumerate(zip(items, requests, strict=True))
        ]
        return run


class _Pages:
    """Watches how many KV pages are held: looked at when a request ends, before it gives its own back, too."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.peak = 0

    def on_step(self, stats: StepStats) -> None:
        self._look()

    def on_finish(self, request_id: str, ledger: Mapping[str, Any]) -> None:
        self._look()

    def close(self) -> None:
        pass

    def _look(self) -> None:
        self.peak = max(self.peak, self._engine.pages - self._engine.free_pages)


def _add(run: BatchRun, stats: StepStats, wall: float) -> None:
    run.decode_tokens += stats.emitted
    run.decode_seconds += wall
    run.steps += 1
    run.rows += stats.rows
    run.width += stats.tokens
    for stage, spent in stats.seconds.items():
        run.stages[stage] = run.stages.get(stage, 0.0) + spent
    if stats.exposed is not None:
        run.exposed.append(stats.exposed)
    if stats.graph is not None:
        run.graphed.append(stats.graph)
    run.stages["other"] = run.stages.get("other", 0.0) + wall - sum(stats.seconds.values())
