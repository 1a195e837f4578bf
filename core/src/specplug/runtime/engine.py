"""`Engine`: the Python API. Plans the run, loads the target and the drafter, and answers requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import torch

from specplug.errors import DrafterFailedError, UserError
from specplug.models.target import Target
from specplug.options import EngineOptions
from specplug.planning import Run
from specplug.registry import Registry
from specplug.runtime.alarm import AcceptanceAlarm
from specplug.runtime.build import Built, build
from specplug.runtime.executor import Launched
from specplug.runtime.intake import as_params, make_requests, paired
from specplug.runtime.ledger import Book, Ledger, pooled
from specplug.runtime.memory import MemoryReport
from specplug.runtime.processors import LogitsProcessor
from specplug.runtime.prompts import Prompt, encode
from specplug.runtime.request import Delta, Request, Result
from specplug.runtime.scheduler import Row, Scheduler
from specplug.runtime.step import finish
from specplug.sampling import SamplingParams
from specplug.settings import option_of, validated
from specplug.spec import Release, StepStats


class _Flight(NamedTuple):
    """A launched step, and the seconds its scheduling took."""

    step: Launched
    scheduling: float


class Engine:
    """A model that answers requests, with or without a draft algorithm.

    ```python
    with Engine("path/or/hub-id", algorithm="none") as engine:
        result, = engine.generate(["Hello"], {"max_tokens": 8, "temperature": 0})
    ```
    """

    def __init__(
        self,
        model: Any,
        *,
        algorithm: str = "none",
        config: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
        **options: Any,
    ) -> None:
        """Plan, then load.

        `model`: a local Hugging Face folder, a `.gguf` file, a hub id, or a loaded `specplug.models.target.Target`;
        `algorithm`: an installed algorithm's name, or ``"none"``; `config`: its options without the
        ``speculative_`` prefix; `options`: fields of `specplug.options.EngineOptions`.

        Raises UserError (RefusedError for a refused configuration) before any weight is loaded.
        """
        settled = validated(EngineOptions, options, option_of)
        self._built: Built = build(model, algorithm, dict(config or {}), settled, registry or Registry.discover())
        built = self._built
        self.run: Run = built.parts.run
        self.options = settled
        self.max_tokens = built.parts.max_tokens
        """Most tokens of a request, prompt and output."""
        self._scheduler = Scheduler(
            settled.max_running_requests,
            built.parts.pages,
            settled.chunked_prefill_size,
            settled.max_queued_requests,
            self._preempted,
        )
        self._executor = built.executor
        self._next: _Flight | None = None  # the step to finish next, where it is on its way already
        self._book = Book()
        self._alarm = AcceptanceAlarm(
            settled.speculative_alarm_below, built.drafting.owner if built.drafting else self.run.algorithm
        )
        self.observers = built.observers
        """Told of every step and every answer; `add` takes one of your own."""
        self._count = 0
        self._failure_told = False
        self._closed = False
        self.last_step: StepStats | None = None
        """Host numbers of the newest step."""

    # --- whole answers -----------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any] | Sequence[Any] = ()
    ) -> list[Result]:
        """Answer all `prompts` and return their results in order, the `n` choices of a prompt one after the other.

        A prompt is text, a list of token ids, or a list of chat messages. `sampling` is one set of options
        for all, or a sequence with one per prompt.
        """
        requests = self._prepare_all(prompts, sampling)
        parts: dict[tuple[str, int], list[Delta]] = {(request.id, request.choice): [] for request in requests}
        for delta in self._drain(requests):
            parts[delta.request, delta.choice].append(delta)
        return [self._result(request, parts[request.id, request.choice]) for request in requests]

    def stream(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any] | Sequence[Any] = ()
    ) -> Iterator[Delta]:
        """Answer `prompts` and yield what becomes final, request ids numbering the prompts in order, choices apart.

        Closing the iterator aborts what has not ended.
        """
        return self._drain(self._prepare_all(prompts, sampling))

    # --- one step at a time ------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        max_drafted: int | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> Request:
        """Queue one request of one answer; what cannot be honoured, or finds no room in the queue, is a `UserError`.

        `max_drafted`: most drafts per step for it, 0 is off, None what the plan gives. `logits_processor`:
        see `specplug.runtime.processors`; an exception in it ends this request with ``"error"``.
        """
        params = as_params(sampling)
        if params.n != 1:
            raise UserError(f"n {params.n}: submit queues one answer; leave n out, or call submit_choices or generate")
        return self.submit_choices(prompt, params, max_drafted=max_drafted, logits_processor=logits_processor)[0]

    def submit_choices(
        self,
        prompt: Prompt,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        max_drafted: int | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> list[Request]:
        """Queue the `n` choices of one request: same id and seed, told apart by `Request.choice`.

        Choice 0 answers as `n` = 1 would. All are queued, or none and a `UserError`. The rest is as for `submit`.
        """
        requests = self._prepare(prompt, as_params(sampling), max_drafted, logits_processor)
        if len(requests) > self._scheduler.room:
            raise UserError(
                f"--max-queued-requests {self.options.max_queued_requests}: {len(self._scheduler.waiting)} requests "
                f"wait, so {len(requests)} more cannot; try again later, or raise it"
            )
        for request in requests:
            self._scheduler.submit(request)
        return requests

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids that `submit` would make of `prompt`."""
        return encode(prompt, self.target.tokenizer)

    def step(self) -> list[Delta]:
        """Finish one step and return what became final in it; an empty list when nothing is queued.

        On a device the step after it is on its way before this returns, so that what the caller does with
        the deltas costs no time there; what is submitted meanwhile joins the one after that.
        """
        with torch.inference_mode():
            flight, self._next = self._next, None
            if flight is not None and not any(row.request.slot == row.slot for row in flight.step.rows):
                flight = None  # nobody is left to whom its results matter
                if self._new_failure():
                    self._stop_drafting()
            if flight is None:
                flight = self._launch(partial(self._scheduler.schedule, self._admitted))
            if flight is None:
                return []
            rows = flight.step.rows
            if self._executor.may_run_ahead(rows):
                self._next = self._launch(partial(self._scheduler.ahead, rows))
            finished = finish(flight.step, self._built.drafting, flight.scheduling)
            alive = [row.request for row in rows if row.request.slot == row.slot]
            failed = self._new_failure()
            if failed:
                self._fail(alive)
            for request in alive:
                if request.output.finish_reason:
                    self._release(request, "failed" if request.output.finish_reason == "error" else "finished")
            if failed:
                self._stop_drafting()
            if self._next is None and self._executor.overlaps:
                self._next = self._launch(partial(self._scheduler.schedule, self._admitted))
            if self._built.drafting is not None:
                self._built.drafting.learn()
        self._record(finished.stats())
        return [delta for request in alive if (delta := request.take()) is not None]

    def _launch(self, schedule: Callable[[], Sequence[Row]]) -> _Flight | None:
        """Launch what `schedule` chooses, if anything."""
        begin = perf_counter()
        rows = schedule()
        scheduling = perf_counter() - begin
        return _Flight(self._executor.launch(rows), scheduling) if rows else None

    def abort(self, request: Request) -> None:
        """End a request now; its pages are free at once. One that has ended already is left alone."""
        if request.output.finish_reason is None:
            request.output.end("abort")
            self._release(request, "aborted")

    @property
    def ledger(self) -> Ledger:
        """Counts of all requests so far, the running ones included."""
        return pooled([self._book.finished, *self._unfinished()])

    def report(self) -> dict[str, Any]:
        """Return the ledger of all requests so far with its means, time shares, alarm and the drafter's counters."""
        drafting = self._built.drafting
        return self._book.report(self._unfinished()) | {
            "speculation": self.speculation,
            "acceptance": self.options.speculative_acceptance,
            "lossy": bool(self.options.lossy),
            "adaptive": drafting.policy.report() if drafting and self.run.depths else None,
            "alarm": self._alarm.ringing,
            "preemptions": self.preemptions,
            "drafter": drafting.metrics() if drafting else {},
        }

    @property
    def target(self) -> Target:
        """The loaded target, which another engine may be built on."""
        return self._built.parts.target

    @property
    def speculation(self) -> str:
        """``"off"``, ``"on"``, or ``"failed: ..."``."""
        drafting = self._built.drafting
        if drafting is None:
            return "off"
        return f"failed: {drafting.failed}" if drafting.failed else "on"

    @property
    def memory(self) -> MemoryReport:
        """What memory was set aside for at start."""
        return self._built.memory

    @property
    def eager(self) -> str:
        """Why the target runs without CUDA graphs; empty where it has them, and on a CPU."""
        return self._built.eager

    @property
    def preemptions(self) -> int:
        """How often a request lost its pages to an older one and had to start again."""
        return self._scheduler.preemptions

    @property
    def free_pages(self) -> int:
        """KV pages nobody holds; at idle equal to `pages`."""
        return self._built.parts.pages.free

    @property
    def pages(self) -> int:
        """KV pages of the pool."""
        return self._built.parts.pages.pages

    def close(self) -> None:
        """Abort what runs and close the drafter; nothing can be submitted afterwards. May be called twice."""
        self._closed = True
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            self.abort(request)
        if self._built.drafting:
            self._built.drafting.close()
        self.observers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        max_drafted: int | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> list[Request]:
        if self._closed:
            raise UserError("this engine is closed: make a new one")
        if params.response_format is not None and self.options.acceptance == "synthetic":
            raise UserError(
                f"response_format cannot be kept under --speculative-acceptance {self.options.speculative_acceptance}, "
                "which accepts drafts at random: leave one out"
            )
        self._count += 1
        return make_requests(
            f"{self._count - 1}",
            self.encode(prompt),
            params,
            self.target,
            self.max_tokens,
            max_drafted=max_drafted,
            logits_processor=logits_processor,
        )

    def _prepare_all(self, prompts: Sequence[Prompt], sampling: Any) -> list[Request]:
        """Make all requests before any is queued, so that a fault in one leaves nothing half-done."""
        pairs = paired(prompts, sampling)
        return [request for prompt, params in pairs for request in self._prepare(prompt, params)]

    def _drain(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Queue `requests` as there is room and run steps until all have ended."""
        mine = {(request.id, request.choice) for request in requests}
        unqueued = deque(requests)
        try:
            while any(request.output.finish_reason is None for request in requests):
                while unqueued and self._scheduler.room > 0:
                    self._scheduler.submit(unqueued.popleft())
                yield from (delta for delta in self.step() if (delta.request, delta.choice) in mine)
        finally:
            for request in requests:
                self.abort(request)

    def _admitted(self, request: Request) -> None:
        self._executor.admit(request)
        if self._built.drafting:
            self._built.drafting.admit(request)

    def _preempted(self, request: Request) -> None:
        if self._built.drafting:
            self._built.drafting.release(request, "preempted")

    def _new_failure(self) -> bool:
        """Say whether the drafter has failed, once: it may have done so when a step was launched that ends later."""
        if self._failure_told or not (self._built.drafting and self._built.drafting.failed):
            return False
        self._failure_told = True
        return True

    def _fail(self, requests: Sequence[Request]) -> None:
        """A drafter raised: what was in its step ends with the error; what comes later is decoded plain."""
        assert self._built.drafting is not None
        for request in requests:
            if request.output.finish_reason is None:
                request.error = self._built.drafting.failed
                request.output.end("error")

    def _stop_drafting(self) -> None:
        """Close a drafter that failed; with ``--speculative-on-failure stop`` end everything else as well."""
        drafting = self._built.drafting
        assert drafting is not None
        drafting.close()
        if self.options.speculative_on_failure == "stop":
            self.close()
            raise DrafterFailedError(f"{drafting.failed}; stopped, as --speculative-on-failure stop says")

    def _unfinished(self) -> list[Ledger]:
        open_ones = (*self._scheduler.running, *self._scheduler.waiting)  # what was preempted waits, and still counts
        return [request.settled_ledger() for request in open_ones if request.started]

    def _record(self, stats: StepStats) -> None:
        self.last_step = stats
        self._book.add_seconds(stats.seconds)
        if stats.drafted_rows:
            self._alarm.add(stats.drafted_rows, stats.first_accepted)
        if self.observers:
            self.observers.on_step(stats)

    def _release(self, request: Request, reason: Release) -> None:
        if request.slot >= 0 and self._built.drafting:
            self._built.drafting.release(request, reason)
        if request.started:
            self._book.finish(request.settled_ledger())
        if self.observers:
            self.observers.on_finish(request.id, request.settled_ledger().report())
        self._scheduler.release(request)

    def _result(self, request: Request, deltas: Sequence[Delta]) -> Result:
        reason = request.output.finish_reason
        assert reason is not None
        return Result(
            ids=[token for delta in deltas for token in delta.ids],
            text="".join(delta.text for delta in deltas),
            finish_reason=reason,
            logprobs=[entry for delta in deltas for entry in delta.logprobs or ()]
            if request.sampling.logprobs
            else None,
            ledger=request.settled_ledger().report() | {"speculation": self.speculation},
            seed=request.seed,
            error=request.error,
            choice=request.choice,
        )
