"""What runs in the engine's process: commands in, steps, events out. Nothing here waits while there is work.

Three threads stand around the one that steps: one reads commands, one sends events, and one compiles the schemas of
structured output before their requests are queued.
"""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from specplug.errors import RefusedError, UserError
from specplug.serve.engine_info import info_of, pickled
from specplug.serve.protocol import (
    Abort,
    Accepted,
    AnswerEnd,
    Ask,
    Batch,
    Close,
    Command,
    Counters,
    Delta,
    EngineArgs,
    Event,
    Failed,
    Ready,
    Refused,
    RequestState,
    Snapshot,
    Submit,
    TokenInfo,
    Told,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specplug.runtime.engine import Engine
    from specplug.runtime.request import Request
    from specplug.spec import StepStats

log = logging.getLogger("specplug")


def main(connection: Any, args: EngineArgs) -> None:
    """Run an engine until it is told to end, or until the other side of `connection` is gone."""
    # The server decides when to end: a signal to the whole group must not cut off what it drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    outbox: SimpleQueue[Event | None] = SimpleQueue()
    sender = Thread(target=_send, args=(connection, outbox), name="specplug-send", daemon=True)
    sender.start()
    failed = True
    try:
        engine = _made(args)
        outbox.put(Ready(info_of(engine, args), pickled(engine.target.tokenizer)))
        gc.collect()
        gc.freeze()  # what the start left behind is here to stay, and need not be looked through while serving
        EngineLoop(engine, connection, outbox).run()
        failed = False
    except RefusedError as error:
        outbox.put(Failed(str(error), user=True, refused=True, trace=error.trace))
    except UserError as error:
        outbox.put(Failed(str(error), user=True))
    except Exception as error:
        log.exception("the engine failed")
        outbox.put(Failed(f"the engine failed: {_one_line(error)}"))
    outbox.put(None)
    sender.join()
    connection.close()
    raise SystemExit(failed)


def _made(args: EngineArgs) -> Engine:
    from contextlib import nullcontext

    from specplug.registry import Registry
    from specplug.runtime import progress
    from specplug.runtime.engine import Engine

    registry = Registry.discover(path=args.search_path)
    with progress.printed() if args.announce else nullcontext():
        return Engine(
            args.model, algorithm=args.algorithm, config=dict(args.config), registry=registry, **dict(args.options)
        )


@dataclass(slots=True, eq=False)
class _Open:
    """One choice that has not ended."""

    id: int
    request: Request
    since: float
    told: int = 0
    """Ids that were told of."""


@dataclass(slots=True)
class _Count:
    """Adds up what the engine's observers hear."""

    numbers: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def on_step(self, stats: StepStats) -> None:
        """Take in one step."""
        for name, amount in (
            ("steps", 1),
            ("rows", stats.rows),
            ("tokens", stats.tokens),
            ("emitted", stats.emitted),
            ("drafted", stats.drafted),
            ("accepted", stats.accepted),
            ("verify_rows", stats.drafted_rows),
            ("first_accepted", stats.first_accepted),
        ):
            self.numbers[name] = self.numbers.get(name, 0) + amount
        for stage, spent in stats.seconds.items():
            self.add(stage, spent)

    def add(self, stage: str, spent: float) -> None:
        """Add host time to a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    def on_finish(self, request_id: str, ledger: Mapping[str, Any]) -> None:
        """See `EngineLoop`, which knows why each ended."""

    def close(self) -> None:
        """Nothing is held."""


class EngineLoop:
    """Steps an engine and keeps what the other side must know of its requests."""

    def __init__(self, engine: Engine, connection: Any, outbox: SimpleQueue[Event | None]) -> None:
        """`connection`: where commands come from; `outbox`: what is sent from another thread."""
        self._engine = engine
        self._outbox = outbox
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._open: dict[tuple[str, int], _Open] = {}
        self._submissions: dict[int, list[_Open]] = {}
        self._count = _Count()
        self._submitted = 0
        self._finished: dict[str, int] = {}
        self._deadline: float | None = None
        """When what still runs is aborted; None: nobody asked to end."""
        engine.observers.add(self._count)
        Thread(target=self._read, args=(connection,), name="specplug-read", daemon=True).start()

    def run(self) -> None:
        """Work until told to end, or until nobody is left to work for."""
        while True:
            busy, between = bool(self._open), perf_counter()
            if not self._obey():
                break
            if self._deadline is not None and (not self._open or monotonic() >= self._deadline):
                break
            if self._open:
                if busy:
                    self._count.add("between", perf_counter() - between)
                deltas = self._engine.step()
                between = perf_counter()
                told = [(self._open[delta.request, delta.choice], delta) for delta in deltas]
                # A step on a device returns later than it commits: once the next one is on its way.
                self._tell(told, min((each.request.committed for each, _ in told), default=0.0))
                self._count.add("between", perf_counter() - between)
        for each in list(self._submissions):
            self._abort(each)
        self._engine.close()

    # --- commands ----------------------------------------------------------------------------------------------

    def _read(self, connection: Any) -> None:
        """Pass commands on; one with a schema waits elsewhere until that is compiled, and its abort behind it."""
        compiling: set[int] = set()
        with ThreadPoolExecutor(1, thread_name_prefix="specplug-compile") as compiler:
            try:
                while True:
                    command = connection.recv()
                    if isinstance(command, Submit) and command.sampling.response_format is not None:
                        compiling.add(command.id)
                        compiler.submit(self._compiled, command, compiling)
                    elif isinstance(command, Abort) and command.id in compiling:
                        compiler.submit(self._inbox.put, command)
                    else:
                        self._inbox.put(command)
            except (EOFError, OSError):
                self._inbox.put(None)

    def _compiled(self, command: Submit, compiling: set[int]) -> None:
        from specplug.grammar.compile import compiler_for

        target = self._engine.target
        try:
            compiler = compiler_for(target.tokenizer, target.model.vocab_size, target.eos_ids)
            assert command.sampling.response_format is not None
            compiler.grammar(command.sampling.response_format)
        except Exception:
            pass  # it is found again, and answered, when the request is queued
        self._inbox.put(command)
        compiling.discard(command.id)

    def _obey(self) -> bool:
        """Do what was asked meanwhile; wait for something only where there is nothing else to do. False: end now."""
        while True:
            try:
                idle = not self._open and self._deadline is None
                command = self._inbox.get() if idle else self._inbox.get_nowait()
            except Empty:
                return True
            match command:
                case Submit():
                    self._submit(command)
                case Abort():
                    self._abort(command.id)
                case Ask():
                    self._outbox.put(Told(command.ticket, self._snapshot()))
                case Close():
                    self._deadline = monotonic() + command.drain
                case None:
                    return False

    def _submit(self, command: Submit) -> None:
        if self._deadline is not None:
            self._outbox.put(Refused(command.id, "the engine is shutting down", full=True))
            return
        options = self._engine.options
        queued = sum(each.request.slot < 0 for each in self._open.values())
        if queued + command.sampling.n > options.max_queued_requests:
            text = f"{queued} requests wait and --max-queued-requests is {options.max_queued_requests}: try again later"
            self._outbox.put(Refused(command.id, text, full=True))
            return
        try:
            requests = self._engine.submit_choices(command.tokens, command.sampling, max_drafted=command.max_drafted)
        except UserError as error:
            self._outbox.put(Refused(command.id, str(error)))
            return
        now = monotonic()
        mine = [_Open(command.id, request, now) for request in requests]
        self._submissions[command.id] = mine
        self._open.update({(each.request.id, each.request.choice): each for each in mine})
        self._submitted += len(mine)
        self._outbox.put(Accepted(command.id, requests[0].seed, len(command.tokens)))

    def _abort(self, id: int) -> None:
        ended = []
        for each in self._submissions.get(id, ()):
            if (each.request.id, each.request.choice) in self._open:
                self._engine.abort(each.request)
                ended.append((each, each.request.take()))
        self._tell([(each, delta) for each, delta in ended if delta is not None], monotonic())

    # --- events ------------------------------------------------------------------------------------------------

    def _tell(self, deltas: Sequence[tuple[_Open, Any]], at: float) -> None:
        """Send what became final at second `at`."""
        if not deltas:
            return
        told = []
        for each, delta in deltas:
            end = self._ended(each) if delta.finish_reason else None
            told.append((each.id, _plain(each, delta, end)))
            each.told += len(delta.ids)
        self._outbox.put(Batch(told, at))

    def _ended(self, each: _Open) -> AnswerEnd:
        request, reason = each.request, each.request.output.finish_reason
        assert reason is not None
        self._finished[reason] = self._finished.get(reason, 0) + 1
        del self._open[request.id, request.choice]
        mine = self._submissions[each.id]
        mine.remove(each)
        if not mine:
            del self._submissions[each.id]
        ledger = request.settled_ledger().report() | {"speculation": self._engine.speculation}
        return AnswerEnd(reason, len(request.output.ids), ledger, request.error, request.blame)

    def _snapshot(self) -> Snapshot:
        engine, plan = self._engine, self._engine.run.plan
        states = tuple(_state(each) for each in self._open.values())
        running = sum(state.state == "running" for state in states)
        drafting = engine.speculation == "on" and plan is not None
        depth = 0
        if drafting and plan is not None:
            depth = engine.last_step.depth if engine.last_step else plan.depth
        width = 1 + (0 if plan is None or not depth else plan.nodes if depth == plan.depth else depth)
        report = engine.report()
        return Snapshot(
            running=running,
            queued=len(states) - running,
            pages=engine.pages,
            free_pages=engine.free_pages,
            depth=depth,
            width=width,
            alarm=bool(report["alarm"]),
            speculation=engine.speculation,
            counters=Counters(
                **self._count.numbers,
                submitted=self._submitted,
                finished=dict(self._finished),
                preemptions=engine.preemptions,
                seconds=dict(self._count.seconds),
            ),
            report=report,
            requests=states,
        )


def _plain(each: _Open, delta: Any, end: AnswerEnd | None) -> Delta:
    """Return an engine's delta as the other side reads it, without torch."""
    logprobs = None
    if delta.logprobs is not None:
        logprobs = tuple(TokenInfo(entry.token, entry.logprob, entry.top) for entry in delta.logprobs)
    new = slice(each.told, each.told + len(delta.ids))
    depths, corrected = tuple(each.request.depths[new]), tuple(each.request.corrected[new])
    return Delta(delta.choice, tuple(delta.ids), delta.text, depths, corrected, logprobs, end)


def _state(each: _Open) -> RequestState:
    request = each.request
    ledger = request.settled_ledger()
    return RequestState(
        id=each.id,
        choice=request.choice,
        state="queued" if request.slot < 0 else "running",
        prompt_tokens=request.prompt_len,
        output_tokens=len(request.output.ids),
        drafted=ledger.drafted,
        accepted=ledger.accepted,
        seconds=monotonic() - each.since,
    )


def _send(connection: Any, outbox: SimpleQueue[Event | None]) -> None:
    try:
        while (event := outbox.get()) is not None:
            connection.send(event)
    except OSError:  # nobody listens any more; the reading thread finds that out as well
        pass


def _one_line(error: BaseException) -> str:
    from specplug.errors import DrafterFailedError

    text = " ".join(str(error).split())
    return text if isinstance(error, DrafterFailedError) else type(error).__name__
