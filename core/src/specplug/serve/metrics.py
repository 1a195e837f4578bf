"""Prometheus metrics. Counts come from the engine's snapshots, times from what passes through the HTTP process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import isfinite
from time import monotonic
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specplug.serve.histogram import Histogram
from specplug.serve.protocol import EngineInfo, Snapshot

INTERVAL = 10.0
"""Seconds that the gauges of acceptance look back."""

LABELS = ("model", "algorithm")
STAGES: Mapping[str, tuple[str, ...]] = {"draft": ("draft",), "verify": ("plan", "forward", "accept", "wait")}
"""Shares of a step's host time, as ``specplug bench`` makes them; every other stage is ``host``."""

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_BYTES = (0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Recent(NamedTuple):
    """Acceptance over the last interval in which anything was decoded."""

    accept_length: float = 1.0
    """Tokens per target forward, decode rows; 1 over nothing."""
    accept_rate: float = 0.0
    """Accepted / verified nodes; 0 over nothing."""
    tokens_per_second: float = 0.0
    """Output tokens; 0 as soon as nothing is decoded."""


class Window:
    """Figures over the last `INTERVAL` seconds, from counts that were read now and then."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int, int, int, int]] = deque()
        self.recent = Recent()

    def add(self, snapshot: Snapshot, now: float) -> None:
        """Take in one reading, made at second `now` of a clock that never goes back."""
        report = snapshot.report
        first = min(report["requests"] + report["returned"], report["output_tokens"])
        decoded = report["output_tokens"] - first
        point = (now, report["rounds"], decoded, report["drafted"], report["accepted"], snapshot.counters.emitted)
        self._points.append(point)
        while len(self._points) > 2 and self._points[1][0] <= now - INTERVAL:
            self._points.popleft()
        # A stop string takes tokens back that were counted while its request ran, so a difference may be below 0.
        seconds, rounds, decoded, drafted, accepted, emitted = (
            max(0, new - old) for new, old in zip(point, self._points[0], strict=True)
        )
        length, rate = self.recent.accept_length, self.recent.accept_rate
        if rounds:
            length, rate = decoded / rounds, min(1.0, accepted / drafted) if drafted else 0.0
        self.recent = Recent(length, rate, emitted / seconds if seconds else 0.0)


class Metrics:
    """Everything that ``/metrics`` tells of one server."""

    def __init__(self, info: EngineInfo, model: str) -> None:
        """`model`: the served name, a label of every metric."""
        self.window = Window()
        self.snapshot: Snapshot | None = None
        """The newest one."""
        self.up = True
        self._labels = (model, info.algorithm)
        self._highest: dict[tuple[str, str], float] = {}
        self._registry = CollectorRegistry()

        self._histograms: list[Histogram] = []

        def histogram(name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
            labels = tuple(zip(LABELS, self._labels, strict=True))
            self._histograms.append(Histogram(f"specplug:{name}", about, labels, bounds))
            return self._histograms[-1]

        def counter(name: str, about: str, *more: str) -> Counter:
            return Counter(f"specplug:{name}", about, (*LABELS, *more), registry=self._registry)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token, queue included.", _LATENCY
        )
        self.between_tokens = histogram(
            "inter_token_latency_seconds",
            "Seconds per token between two deliveries to a request: the gap over the tokens that came.",
            _TOKEN,
        )
        self.commit_to_bytes = histogram(
            "commit_to_bytes_seconds",
            "From a step's commit in the engine's process until the bytes it made were handed to the socket; of an "
            "answer that is not streamed, its last step's.",
            _BYTES,
        )
        self.whole = histogram("request_seconds", "From a request's arrival to its last token.", _LATENCY)
        self._prompt = counter("prompt_tokens", "Tokens of the prompts of accepted requests.").labels(*self._labels)
        self._generated = 0
        self._ended = counter("requests", "Answers that ended, by finish reason.", "finish_reason")
        self._refused = counter("requests_refused", "Requests refused, by HTTP status.", "status")
        self._refused.labels(*self._labels, "503")  # there from the start: a rate does not see a series begin
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(*self._labels, reason)
        self._registry.register(self)

    # --- what passes by ------------------------------------------------------------------------------------------

    def accepted(self, prompt_tokens: int) -> None:
        """Count a prompt that was taken into the queue."""
        self._prompt.inc(prompt_tokens)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(*self._labels, str(status)).inc()

    def generated(self, count: int, reason: str | None) -> None:
        """Count what one delta brought."""
        self._generated += count
        if reason is not None:
            self._ended.labels(*self._labels, reason).inc()

    def read(self, snapshot: Snapshot) -> None:
        """Take in the engine's state."""
        self.snapshot = snapshot
        self.window.add(snapshot, monotonic())

    # --- what is scraped -----------------------------------------------------------------------------------------

    def text(self) -> bytes:
        """Return the exposition, valid before anything has happened."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what the newest snapshot says, as prometheus_client asks for it."""
        yield self._gauge("up", float(self.up), "1 while the engine's process lives.")
        yield from (each.family() for each in self._histograms)
        about = "Output tokens that became final; the sum of all usages when nothing runs."
        yield self._counter("generation_tokens", self._generated, about)
        snapshot = self.snapshot
        if snapshot is None:
            return
        recent, report, counters = self.window.recent, snapshot.report, snapshot.counters
        failed = snapshot.speculation.startswith("failed")
        look_back = f"over the last {INTERVAL:g} s with any"
        yield self._gauge(
            "spec_accept_length",
            recent.accept_length,
            f"Tokens per target forward, decode rows, steps without a draft included, {look_back}. SGLang's counts "
            "verify steps only.",
        )
        yield self._gauge(
            "spec_accept_rate",
            recent.accept_rate,
            f"Accepted / verified nodes, {look_back}. SGLang's divides by drafts of the longest path.",
        )
        yield self._gauge(
            "spec_num_steps", snapshot.depth, "Current draft depth: most drafts that one step can accept. As SGLang's."
        )
        yield self._gauge(
            "spec_num_draft_tokens", snapshot.width, "Current tokens per verify row, the root counted. As SGLang's."
        )
        yield self._gauge("spec_alarm", float(snapshot.alarm), "1 while first drafts are accepted under the floor.")
        yield self._gauge("drafter_failed", float(failed), "1 once the drafter has raised; decoding is plain since.")
        yield self._gauge("num_running_requests", snapshot.running, "Answers being decoded.")
        yield self._gauge("num_queued_requests", snapshot.queued, "Answers that wait.")
        yield self._gauge("kv_usage", snapshot.kv_use, "Share of the KV pages in use, 0 to 1.")
        yield self._gauge("kv_pages", snapshot.pages, "KV pages of the pool.")
        yield self._gauge("kv_free_pages", snapshot.free_pages, "KV pages nobody holds.")
        yield self._gauge("tokens_per_second", recent.tokens_per_second, f"Output tokens, last {INTERVAL:g} s.")
        yield self._counter(
            "spec_verify_calls",
            counters.verify_rows,
            "Rows verified with at least one draft. SGLang's counts verify forwards of whole batches.",
        )
        for name, value, about in (
            ("spec_rounds", report["rounds"], "Decode forwards of rows, with drafts or without."),
            ("spec_drafted_rounds", report["drafted_rounds"], "Decode forwards of rows with at least one draft."),
            ("spec_drafted_tokens", report["drafted"], "Drafts verified, what stop rules cut left out."),
            ("spec_accepted_tokens", report["accepted"], "Drafts that became output."),
            ("spec_path_tokens", report["path"], "Sum of the longest paths offered."),
            ("steps", counters.steps, "Forwards of the target."),
            ("forward_tokens", counters.tokens, "Tokens that went through the target, drafts included."),
            ("preemptions", counters.preemptions, "Requests that lost their KV pages and had to start again."),
        ):
            yield self._counter(name, value, about)
        own = GaugeMetricFamily(
            "specplug:drafter", "What the drafter counts itself, by name.", labels=(*LABELS, "name")
        )
        for name, value in report.get("drafter", {}).items():
            if isfinite(value):
                own.add_metric((*self._labels, name), value)
        yield own
        yield self._by_depth(
            "spec_reached", report["reached"], "Drafted rounds in which a draft at depth was compared."
        )
        yield self._by_depth("spec_accepted_at", report["accepted_at"], "Drafts accepted at depth.")
        yield self._times(counters.seconds)

    def _gauge(self, name: str, value: float, about: str) -> Metric:
        found = GaugeMetricFamily(f"specplug:{name}", about, labels=LABELS)
        found.add_metric(self._labels, value)
        return found

    def _counter(self, name: str, value: float, about: str) -> Metric:
        found = CounterMetricFamily(f"specplug:{name}", about, labels=LABELS)
        found.add_metric(self._labels, self._risen(name, "", value))
        return found

    def _by_depth(self, name: str, counts: Any, about: str) -> Metric:
        found = CounterMetricFamily(f"specplug:{name}", about, labels=(*LABELS, "depth"))
        for depth, count in enumerate(counts, 1):
            found.add_metric((*self._labels, str(depth)), self._risen(name, str(depth), count))
        return found

    def _times(self, seconds: Mapping[str, float]) -> Metric:
        about = "Host seconds of steps: draft, verify (plan, forward, accept, wait), host (the rest)."
        found = CounterMetricFamily("specplug:step_seconds", about, labels=(*LABELS, "part"))
        shares = {part: sum(seconds.get(stage, 0.0) for stage in stages) for part, stages in STAGES.items()}
        shares["host"] = max(0.0, sum(seconds.values()) - sum(shares.values()))
        for part, value in shares.items():
            found.add_metric((*self._labels, part), self._risen("step_seconds", part, value))
        return found

    def _risen(self, name: str, label: str, value: float) -> float:
        """Return the highest value so far: the ledger of a running request falls where a stop string takes back."""
        self._highest[name, label] = max(value, self._highest.get((name, label), 0.0))
        return self._highest[name, label]
