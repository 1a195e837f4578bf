"""The engine in a process of its own, seen from asyncio: `EngineClient`. Torch-free.

    client = await EngineClient.start(EngineArgs(model="path", options={"max_running_requests": 16}))
    submission = await client.submit("Hello", SamplingParams(max_tokens=8))
    async for delta in submission:  # the last one of each choice has `delta.end`
        ...
    await client.close(drain=10)

Text is made on this side, where it costs the engine no time, unless stop strings need it there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import pickle
import threading
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from queue import SimpleQueue
from typing import Any

from specplug.errors import RefusedError, UserError
from specplug.runtime.prompts import Prompt, encode
from specplug.sampling import SamplingParams
from specplug.serve import engine_loop
from specplug.serve.detokenizer import Detokenizer
from specplug.serve.protocol import (
    Abort,
    Accepted,
    Ask,
    Batch,
    Close,
    Command,
    Delta,
    EngineArgs,
    EngineInfo,
    Event,
    Failed,
    Ready,
    Refused,
    Snapshot,
    Submit,
    Told,
)

__all__ = ["EngineArgs", "EngineClient", "EngineDiedError", "QueueFullError", "Submission"]

GRACE = 10.0
"""Seconds that a process which was told to end may take, beyond what it was given to drain."""


class EngineDiedError(RuntimeError):
    """The engine's process has ended, or is about to; one line."""


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again later."""


class Submission:
    """One request: an async iterator of what becomes final of its choices, until all of them have ended.

    It can be read once. Leaving the loop early does not end the request: `abort` does. EngineDiedError comes out of
    the loop where the engine's process ends before the request does.
    """

    def __init__(self, client: EngineClient, id: int, choices: int, detokenizers: list[Detokenizer]) -> None:
        """Made by `EngineClient.submit`. `detokenizers`: one per choice, or none where the engine makes the text."""
        self.id = id
        self.seed = 0
        """Of the request; drawn where none was given."""
        self.prompt_tokens = 0
        self._client = client
        self._open = choices
        self._detokenizers = detokenizers
        self.committed = 0.0
        """When the tokens of the newest delta were committed, on `time.monotonic`."""
        self._deltas: deque[tuple[Delta | None, float]] = deque()
        self._more: asyncio.Future[None] | None = None  # done when there are deltas; None: nobody waits for that

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not self._open:
            raise StopAsyncIteration
        if not self._deltas:
            self._more = asyncio.get_running_loop().create_future()
            try:
                await self._more
            finally:
                self._more = None
        delta, at = self._deltas.popleft()
        if delta is None:
            self._open = 0
            raise EngineDiedError(self._client.dead)
        self.committed = at
        if delta.end is not None:
            self._open -= 1
        return self._detokenizers[delta.choice].completed(delta) if self._detokenizers else delta

    def abort(self) -> None:
        """End it now: its pages are free within a step, and the iterator ends with the finish reason ``"abort"``."""
        self._client.abort(self.id)

    def put(self, delta: Delta | None, at: float = 0.0) -> None:
        """Take in a delta committed at second `at`; None: there will be no more, the engine is gone.

        Called by the client.
        """
        self._deltas.append((delta, at))
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


class EngineClient:
    """Talks to one engine process. All methods belong to the event loop that it was started in, `encode` excepted."""

    def __init__(self, connection: Any, process: Any) -> None:
        """Made by `start`."""
        self.tokenizer: Any | None = None
        """transformers' fast tokenizer, or None where the model has none."""
        self.dead = ""
        """Why the engine is no more; empty while it lives."""
        self._info: EngineInfo | None = None
        self._connection = connection
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._failure = ""
        self._closing = False
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[Accepted]] = {}
        self._submissions: dict[int, Submission] = {}
        self._left: dict[int, int] = {}  # submission -> choices that have not ended
        self._asked: dict[int, asyncio.Future[Snapshot]] = {}
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        for name, work in (("read", self._read), ("write", self._write)):
            threading.Thread(target=work, name=f"specplug-engine-{name}", daemon=True).start()
        # Before multiprocessing's own handler, which would wait for a process that ignores signals.
        atexit.register(self._kill)

    @classmethod
    async def start(cls, args: EngineArgs) -> EngineClient:
        """Start the process and wait until its engine is ready.

        Raises what `Engine` would: RefusedError and UserError; EngineDiedError for anything else.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(target=engine_loop.main, args=(theirs, args), name="specplug-engine", daemon=True)
        await asyncio.get_running_loop().run_in_executor(None, process.start)
        theirs.close()  # so that its end is seen here
        client = cls(ours, process)
        try:
            ready = await client._ready
        except BaseException:
            client._kill()
            raise
        client._info = ready.info
        if ready.tokenizer is not None:
            client.tokenizer = pickle.loads(ready.tokenizer)
        return client

    @property
    def info(self) -> EngineInfo:
        """What is true of the engine for its whole life."""
        assert self._info is not None
        return self._info

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: text, ids, or chat messages. Raises UserError. Any thread may call it."""
        return encode(prompt, self.tokenizer)

    async def submit(self, prompt: Prompt, sampling: SamplingParams, *, max_drafted: int | None = None) -> Submission:
        """Queue a request with all its `n` choices; returns once the engine has taken it.

        `max_drafted`: most drafts per step for it, 0 is off, None what the plan gives. Raises UserError for what the
        request asks in vain, QueueFullError, and EngineDiedError.
        """
        self._check_alive()
        id = next(self._ids)
        here = sampling.detokenize and not sampling.stop and self.tokenizer is not None
        detokenizers: list[Detokenizer] = []
        if here:
            ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.info.eos_ids)}
            detokenizers = [Detokenizer(self.tokenizer, ends) for _ in range(sampling.n)]
        submission = Submission(self, id, sampling.n, detokenizers)
        tokens = tuple(self.encode(prompt))
        asked = sampling.model_copy(update={"detokenize": False}) if here else sampling
        self._waiting[id] = self._loop.create_future()
        self._submissions[id], self._left[id] = submission, sampling.n
        self._outbox.put(Submit(id, tokens, asked, max_drafted))
        try:
            accepted = await self._waiting[id]
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):  # the caller has gone; the request may be queued already
                self.abort(id)
            else:
                self._forget(id)
            raise
        finally:
            self._waiting.pop(id, None)
        submission.seed, submission.prompt_tokens = accepted.seed, accepted.prompt_tokens
        return submission

    def abort(self, id: int) -> None:
        """End a submission; one that is not known, or has ended, is left alone."""
        if id in self._submissions and not self.dead:
            self._outbox.put(Abort(id))

    async def snapshot(self) -> Snapshot:
        """Return the engine's state after the step that runs now. Raises EngineDiedError."""
        if self.dead:
            raise EngineDiedError(self.dead)
        ticket = next(self._ids)
        self._asked[ticket] = self._loop.create_future()
        self._outbox.put(Ask(ticket))
        try:
            return await self._asked[ticket]
        finally:
            self._asked.pop(ticket, None)

    async def wait_dead(self) -> str:
        """Return why, once the engine's process has ended."""
        await self._gone.wait()
        return self.dead

    async def close(self, drain: float = 0.0) -> None:
        """Take no more requests, give those it has `drain` seconds, abort the rest, and end the process.

        May be called twice, and again with less patience.
        """
        self._closing = True
        if not self.dead:
            self._outbox.put(Close(drain))
            try:
                await asyncio.wait_for(self._gone.wait(), drain + GRACE)
            except TimeoutError:
                self._kill()
                await self._gone.wait()
        atexit.unregister(self._kill)

    # --- inside ------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDiedError(self.dead)
        if self._closing:
            raise EngineDiedError("the engine is shutting down and takes no more requests")

    def _forget(self, id: int) -> None:
        self._submissions.pop(id, None)
        self._left.pop(id, None)

    def _take(self, event: Event) -> None:
        """Take in what the engine says."""
        match event:
            case Batch():
                for id, delta in event.deltas:
                    submission = self._submissions.get(id)
                    if submission is None:
                        continue
                    if delta.end is not None:
                        self._left[id] -= 1
                        if not self._left[id]:
                            self._forget(id)
                    submission.put(delta, event.at)
            case Accepted():
                _resolve(self._waiting.get(event.id), event)
            case Refused():
                error = QueueFullError(event.message) if event.full else UserError(event.message)
                _resolve(self._waiting.get(event.id), error)
                self._forget(event.id)
            case Told():
                _resolve(self._asked.get(event.ticket), event.snapshot)
            case Ready():
                _resolve(self._ready, event)
            case Failed():
                self._failure = event.message
                if event.user:
                    refused = RefusedError(event.message, event.trace) if event.refused else UserError(event.message)
                    _resolve(self._ready, refused)

    def _end(self) -> None:
        """The process has ended: tell everybody who waits."""
        if self.dead:
            return
        code = self._process.exitcode
        how = f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"
        ended = "closed" if self._closing and code == 0 else f"the engine's process ended ({how})"
        self.dead = self._failure or ended
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values(), *self._asked.values()]
        for future in waiting:
            _resolve(future, EngineDiedError(self.dead))
        for submission in self._submissions.values():
            submission.put(None)
        self._submissions.clear()
        self._left.clear()
        self._outbox.put(None)
        self._gone.set()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                event = self._connection.recv()
                self._loop.call_soon_threadsafe(self._take, event)
        self._process.join()
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            self._loop.call_soon_threadsafe(self._end)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (command := self._outbox.get()) is not None:
                self._connection.send(command)

    def _kill(self) -> None:
        with contextlib.suppress(ValueError):  # it was closed
            self._process.kill()


def _resolve(future: asyncio.Future[Any] | None, outcome: Any) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
        future.exception()  # whoever waited may have gone
    else:
        future.set_result(outcome)
