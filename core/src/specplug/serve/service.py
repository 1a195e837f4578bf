"""What all endpoints of one server share: the engine's client, what is running, and when to refuse. Torch-free."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any

from specplug.errors import UserError
from specplug.runtime.prompts import Prompt
from specplug.sampling import SamplingParams
from specplug.serve.asked import Asked
from specplug.serve.engine_process import EngineClient, EngineDiedError, QueueFullError, Submission
from specplug.serve.errors import ApiError, bad, failed, unavailable
from specplug.serve.fields import IGNORED
from specplug.serve.metrics import Metrics
from specplug.serve.options import ServeOptions
from specplug.serve.protocol import Delta, Snapshot
from specplug.serve.tokens import TokenBytes

log = logging.getLogger("specplug.serve")

LONG = 2000
"""Characters of a prompt above which it is encoded beside the event loop, so that other answers flow on."""
SAMPLE = 1.0
"""Seconds between two readings of the engine's counters."""


class Service:
    """One server's state. All of it belongs to one event loop."""

    def __init__(self, client: EngineClient, options: ServeOptions) -> None:
        self.client = client
        self.options = options
        self.model = served_name(client.info.model, options)
        self.metrics = Metrics(client.info, self.model)
        self.tokens = TokenBytes(client.tokenizer)
        self.defaults = client.info.sampling_defaults if options.sampling_defaults == "model" else {}
        """What requests get where they leave it out: field of `SamplingParams` -> value."""
        self.started = int(time())
        self.draining = False
        self._live: set[Submission] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._encoder = ThreadPoolExecutor(1, "specplug-encode")

    # --- requests ------------------------------------------------------------------------------------------------

    async def submit(self, asked: Asked) -> list[Submission]:
        """Queue all prompts of a request, or none of them. An ApiError says why not."""
        if self.draining or self.client.dead:
            raise unavailable("this server is ending: send the request to another one")
        info = self.client.info
        if asked.wants_drafts and info.nodes == 0:
            raise bad(
                "speculative.enabled",
                "speculative.enabled true: this server runs without a draft algorithm; leave it out",
            )
        answers = len(asked.prompts) * asked.params.n
        if answers > info.max_queued_requests:
            raise bad(
                "n", f"{answers} answers in one request: at most {info.max_queued_requests} may wait; ask for fewer"
            )
        source = "messages" if asked.kind == "chat" else "prompt"
        found: list[Submission] = []
        try:
            for prompt in asked.prompts:
                ids = await self._encode(prompt, source)
                found.append(await self._submit(ids, asked.params, asked.max_drafted, source))
        except BaseException:
            for submission in found:
                self.end(submission)
            raise
        return found

    def end(self, submission: Submission) -> None:
        """Abort a submission nobody waits for any more, and count what it still yields."""
        submission.abort()
        if submission in self._live:
            self.spawn(self._count_rest(submission))

    def seen(self, submission: Submission, delta: Delta) -> None:
        """Count a delta that was read from a submission."""
        self.metrics.generated(len(delta.ids), delta.finish_reason)

    def finished(self, submission: Submission) -> None:
        """A submission was read to its end."""
        self._live.discard(submission)

    def abort_all(self) -> None:
        """End everything that runs; each request is answered with what that makes of it."""
        for submission in list(self._live):
            submission.abort()

    @property
    def live(self) -> int:
        """Submissions that have not ended."""
        return len(self._live)

    async def _encode(self, prompt: Prompt, source: str) -> list[int]:
        size = len(prompt) if isinstance(prompt, str) else sum(len(str(part)) for part in prompt)
        try:
            if size <= LONG:
                return self.client.encode(prompt)
            return await asyncio.get_running_loop().run_in_executor(self._encoder, self.client.encode, prompt)
        except UserError as error:
            raise bad(source, str(error)) from None

    async def _submit(self, ids: list[int], params: SamplingParams, max_drafted: int | None, source: str) -> Submission:
        try:
            submission = await self.client.submit(ids, params, max_drafted=max_drafted)
        except UserError as error:
            raise _fault(str(error), source) from None
        except QueueFullError as error:
            raise unavailable(str(error)) from None
        except EngineDiedError as error:
            raise failed(str(error)) from None
        self._live.add(submission)
        self.metrics.accepted(submission.prompt_tokens)
        return submission

    async def _count_rest(self, submission: Submission) -> None:
        try:
            async for delta in submission:
                self.seen(submission, delta)
        except EngineDiedError:
            pass
        finally:
            self.finished(submission)

    # --- state ---------------------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot | None:
        """Return the engine's state, the last known one where it does not answer; None before the first."""
        try:
            async with asyncio.timeout(5.0):
                self.metrics.read(await self.client.snapshot())
        except (EngineDiedError, TimeoutError):
            self.metrics.up = not self.client.dead
        return self.metrics.snapshot

    async def sample(self) -> None:
        """Read the engine's state again and again, until it is gone: figures over the last seconds need it."""
        while not self.client.dead:
            await self.snapshot()
            await asyncio.sleep(SAMPLE)

    @property
    def speculation(self) -> str:
        """``"on"``, ``"off"`` or ``"failed: ..."``, as of the last reading."""
        snapshot = self.metrics.snapshot
        return snapshot.speculation if snapshot else "on" if self.client.info.nodes else "off"

    def about(self, snapshot: Snapshot | None) -> dict[str, Any]:
        """Return what ``/server_info`` says."""
        info = self.client.info
        found: dict[str, Any] = {
            "version": version("specplug"),
            "model": self.model,
            "algorithm": info.algorithm,
            "distribution": info.distribution,
            "acceptance": info.acceptance,
            "lossy": info.lossy,
            "device": info.device,
            "dtype": info.dtype,
            "context_length": info.max_tokens,
            "draft_nodes": info.nodes,
            "draft_depth": info.depth,
            "kv": {"pages": info.pages, "page_size": info.page_size},
            "max_running_requests": info.max_running_requests,
            "max_queued_requests": info.max_queued_requests,
            "request_timeout": self.options.request_timeout,
            "max_body_bytes": self.options.max_body_bytes,
            "sampling_defaults": dict(self.defaults),
            "fields_without_effect": sorted(IGNORED),
            "status": "ending" if self.draining else "ok",
            "speculation": self.speculation,
        }
        if snapshot is not None:
            recent = self.metrics.window.recent
            found["now"] = {
                "running": snapshot.running,
                "queued": snapshot.queued,
                "free_pages": snapshot.free_pages,
                "kv_usage": snapshot.kv_use,
                "depth": snapshot.depth,
                "width": snapshot.width,
                "alarm": snapshot.alarm,
                "tokens_per_second": recent.tokens_per_second,
                "accept_length": recent.accept_length,
                "accept_rate": recent.accept_rate,
                "requests": [
                    {
                        "id": one.id,
                        "choice": one.choice,
                        "state": one.state,
                        "prompt_tokens": one.prompt_tokens,
                        "output_tokens": one.output_tokens,
                        "drafted": one.drafted,
                        "accepted": one.accepted,
                        "seconds": one.seconds,
                    }
                    for one in snapshot.requests
                ],
            }
            found["ledger"] = dict(snapshot.report)
        return found

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` beside everything else; it is kept until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop what runs beside; the client is closed by who started it."""
        for task in self._tasks:
            task.cancel()
        self._encoder.shutdown(wait=False, cancel_futures=True)


def served_name(model: str, options: ServeOptions) -> str:
    """Return the model's name in the API: a folder's last part (its path is nobody's business), or the hub id."""
    if options.served_model_name is not None:
        return options.served_model_name
    path = Path(model)
    return path.resolve().name if path.exists() or path.is_absolute() else model


def _fault(message: str, source: str) -> ApiError:
    """Turn what the engine says against a request into a 400 that names its field: its lines begin with it."""
    if message.startswith("the prompt"):
        return bad(source, message, "context_length_exceeded" if "the context holds" in message else "invalid_value")
    field = message.split(maxsplit=1)[0].strip(":,")
    if field == "stop" or field in SamplingParams.model_fields:
        return bad(field, message, "invalid_value")
    return bad(None, message, "invalid_value")
