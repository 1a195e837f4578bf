"""One answer on its way to its client, whole or as server-sent events; it ends in time, and when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from time import monotonic
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specplug.sampling import SamplingParams
from specplug.serve.asked import Asked
from specplug.serve.engine_process import EngineDiedError, Submission
from specplug.serve.errors import ApiError, bad, failed, public, timed_out, unavailable
from specplug.serve.protocol import AnswerEnd, Delta
from specplug.serve.service import Service
from specplug.serve.shapes import Shape, dumps, usage_of

log = logging.getLogger("specplug.serve")


class Answer(Response):
    """The response to a request whose submissions are queued already.

    Whatever happens to it (an error, a timeout, a client that leaves, the server's end), the submissions end.
    """

    def __init__(
        self, service: Service, asked: Asked, submissions: Sequence[Submission], shape: Shape, arrived: float
    ) -> None:
        """`arrived`: when the request came, on `time.monotonic`."""
        super().__init__(status_code=200)
        self._service = service
        self._asked = asked
        self._submissions = submissions
        self._shape = shape
        self._arrived = arrived
        self._begun = False
        self._committed = monotonic()
        self._last: dict[int, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the client's leaving ends it."""
        work = asyncio.ensure_future(self._within_time(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
            for submission in self._submissions:
                self._service.end(submission)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):  # OSError: the client has left
            raise results[0]

    async def _within_time(self, send: Send) -> None:
        limit = self._service.options.request_timeout
        try:
            try:
                async with asyncio.timeout(self._arrived + limit - monotonic()):
                    await self._run(send)
            except TimeoutError:
                raise timed_out(limit) from None
            except EngineDiedError as error:
                raise failed(str(error)) from None
        except ApiError as error:
            self._service.metrics.refused(error.status)
            await self._fail(send, error)

    async def _run(self, send: Send) -> None:
        asked, shape = self._asked, self._shape
        if asked.stream:
            await self._begin(send, "text/event-stream; charset=utf-8", {"Cache-Control": "no-cache"})
        if len(self._submissions) == 1:
            (submission,) = self._submissions
            async for delta in submission:
                self._service.seen(submission, delta)
                await self._pass_on(send, delta.choice, delta, submission.committed)
            self._service.finished(submission)
        else:
            async for index, delta, committed in self._merged():
                await self._pass_on(send, index, delta, committed)
        self._service.metrics.whole.observe(monotonic() - self._arrived)
        prompt_tokens = sum(submission.prompt_tokens for submission in self._submissions)
        usage = usage_of(shape.choices, prompt_tokens, [submission.seed for submission in self._submissions])
        if not asked.stream:
            await self._send_json(send, 200, shape.whole(usage))
            self._service.metrics.commit_to_bytes.observe(monotonic() - self._committed)
            return
        if asked.include_usage:
            await send({"type": "http.response.body", "body": shape.usage_chunk(usage), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _pass_on(self, send: Send, index: int, delta: Delta, committed: float) -> None:
        """Take in a delta of choice `index` that was committed at second `committed`, and send its chunk."""
        if delta.ids:
            self._time(index, len(delta.ids))
        if delta.end is not None:
            if delta.end.finish_reason == "error":
                raise _failure(delta.end)
            if delta.end.finish_reason == "abort":  # nobody else aborts what has a client
                raise unavailable("this server is ending: the answer was cut")
        self._committed = committed
        if chunk := self._shape.add(index, delta):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._service.metrics.commit_to_bytes.observe(monotonic() - committed)

    async def _merged(self) -> AsyncIterator[tuple[int, Delta, float]]:
        """Yield (index of the choice among all of the request, delta, when it was committed) as they come."""
        count = self._asked.params.n
        queue: asyncio.Queue[tuple[int, Delta, float] | Exception | None] = asyncio.Queue()

        async def pump(number: int, submission: Submission) -> None:
            try:
                async for delta in submission:
                    self._service.seen(submission, delta)
                    queue.put_nowait((number * count + delta.choice, delta, submission.committed))
                self._service.finished(submission)
            except Exception as error:
                queue.put_nowait(error)
            queue.put_nowait(None)

        tasks = [asyncio.ensure_future(pump(at, one)) for at, one in enumerate(self._submissions)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _time(self, index: int, count: int) -> None:
        """Observe when `count` tokens of a choice came."""
        now, last = monotonic(), self._last.get(index)
        if last is None:
            self._service.metrics.first_token.observe(now - self._arrived)
        else:
            self._service.metrics.between_tokens.observe((now - last) / count, count)
        self._last[index] = now

    async def _begin(self, send: Send, kind: str, more: Mapping[str, str], status: int = 200) -> None:
        headers = {"content-type": kind, "x-specplug-speculation": public(self._service.speculation), **more}
        raw = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        self._begun = True
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_json(
        self, send: Send, status: int, body: Mapping[str, Any], more: Mapping[str, str] | None = None
    ) -> None:
        raw = dumps(body).encode()
        await self._begin(send, "application/json", {"content-length": str(len(raw)), **(more or {})}, status)
        await send({"type": "http.response.body", "body": raw})

    async def _fail(self, send: Send, error: ApiError) -> None:
        """Say what went wrong: as the status where nothing was sent yet, else as the stream's last event."""
        if not self._begun:
            await self._send_json(send, error.status, error.body(), error.headers)
        else:
            await send({"type": "http.response.body", "body": f"data: {dumps(error.body())}\n\n".encode()})


def _failure(end: AnswerEnd) -> ApiError:
    """Return what an answer that ended with an error says: a drafter that raised, or what the request itself asked."""
    if end.blame == "engine":
        return failed(end.error or "the request failed")
    field = end.error.partition(":")[0]
    return bad(field if field in SamplingParams.model_fields else None, end.error, "invalid_value")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
