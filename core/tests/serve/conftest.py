"""A scripted engine in place of `EngineClient`, and real servers in processes of their own on loopback."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from specplug.runtime.ledger import Ledger
from specplug.sampling import SamplingParams
from specplug.serve.engine_process import EngineDiedError, QueueFullError
from specplug.serve.options import ServeOptions
from specplug.serve.protocol import AnswerEnd, Counters, Delta, EngineInfo, Snapshot, TokenInfo
from specplug.testing.registry import write_distribution

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "httpx")):
    collect_ignore_glob = ["test_serve_*"]  # the extra `serve` is not installed

LETTERS = tuple(range(ord("a"), ord("i")))
WAIT = 20.0

# --- a scripted engine -------------------------------------------------------------------------------------------

Step = Sequence[int] | str | asyncio.Event
"""Token ids that become final together; ``"stop"``, ``"length"`` or ``"error"`` ends; an event is waited for."""


class FakeSubmission:
    """What a script says, with one byte per token; `abort` ends it at once."""

    def __init__(
        self, client: FakeClient, script: Sequence[Step], params: SamplingParams, prompt: Sequence[int]
    ) -> None:
        self.id = next(client.numbers)
        self.seed = 7 if params.seed is None else params.seed
        self.prompt_tokens = len(prompt)
        self.committed = 0.0
        self.aborted = asyncio.Event()
        self._client, self._script, self._params = client, script, params
        self._done = False

    def abort(self) -> None:
        self.aborted.set()

    def _end(self, reason: Any, count: int) -> AnswerEnd:
        self._done = True
        self._client.running -= 1
        ledger = Ledger(output_tokens=count, prefill_forwards=1, rounds=max(0, count - 1)).report()
        error = self._client.error if reason == "error" else ""
        ledger["speculation"] = self._client.speculation
        return AnswerEnd(reason, count, ledger, error, self._client.blame)

    def _delta(self, ids: Sequence[int], end: AnswerEnd | None = None) -> Delta:
        self.committed = monotonic()
        logprobs = tuple(TokenInfo(token, float("-inf"), ((token, -0.5),)) for token in ids)
        return Delta(
            0,
            tuple(ids),
            bytes(ids).decode(),
            tuple(at % 2 for at in range(len(ids))),
            tuple(at == 2 for at in range(len(ids))),
            logprobs if self._params.logprobs else None,
            end,
        )

    async def __aiter__(self) -> AsyncIterator[Delta]:
        count = 0
        for step in self._script:
            if self._done:
                return
            if isinstance(step, asyncio.Event):
                waits = [asyncio.ensure_future(event.wait()) for event in (step, self.aborted, self._client.death)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
            if self._client.death.is_set():
                self._done = True
                raise EngineDiedError("the engine ended: killed")
            if self.aborted.is_set():
                yield self._delta((), self._end("abort", count))
                return
            if isinstance(step, str):
                yield self._delta((), self._end(step, count))
            elif not isinstance(step, asyncio.Event):
                count += len(step)
                yield self._delta(step)


class FakeClient:
    """Answers every request with `script`. Counts what it was asked."""

    def __init__(self, script: Sequence[Step] = (b"ab", b"c", "stop"), nodes: int = 3) -> None:
        self.script = script
        self.numbers = itertools.count()
        self.death = asyncio.Event()
        self.running = 0
        self.room = 1000
        self.speculation = "on" if nodes else "off"
        self.blame: Any = "engine"
        self.error = "acme 1.0: propose raised ValueError: in /srv/acme/secret/drafter.py"
        self.submissions: list[FakeSubmission] = []
        self.asked: list[tuple[list[int], SamplingParams, int | None]] = []
        self.tokenizer = None
        self.counters = Counters()
        self.report: Mapping[str, Any] = Ledger(requests=0).report()
        self.info = EngineInfo(
            model="/secret/folder/tiny",
            algorithm="scripted",
            distribution="acme 1.0",
            vocab=256,
            max_tokens=64,
            eos_ids=(0,),
            nodes=nodes,
            depth=nodes,
            pages=8,
            page_size=4,
            max_running_requests=2,
            max_queued_requests=4,
            device="cpu",
            dtype="float32",
        )

    @property
    def dead(self) -> str:
        return "the engine ended: killed" if self.death.is_set() else ""

    def encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(prompt.encode())
        return [int(part) if isinstance(part, int) else 1 for part in prompt]

    async def submit(self, prompt: Any, sampling: SamplingParams, *, max_drafted: int | None = None) -> FakeSubmission:
        if self.death.is_set():
            raise EngineDiedError(self.dead)
        if not self.room:
            raise QueueFullError("4 requests wait: try again later, or raise --max-queued-requests")
        self.room -= 1
        self.running += 1
        self.asked.append((prompt, sampling, max_drafted))
        self.submissions.append(FakeSubmission(self, self.script, sampling, prompt))
        return self.submissions[-1]

    async def snapshot(self) -> Snapshot:
        if self.death.is_set():
            raise EngineDiedError(self.dead)
        return Snapshot(
            running=self.running,
            queued=0,
            pages=8,
            free_pages=8 - self.running,
            depth=3,
            width=4,
            alarm=False,
            speculation=self.speculation,
            counters=self.counters,
            report=self.report,
        )

    async def wait_dead(self) -> str:
        await self.death.wait()
        return self.dead


@pytest.fixture
def fake() -> Callable[..., Any]:
    """Return a maker of (scripted client, service); call it inside the event loop."""

    from specplug.serve.service import Service

    def make(script: Sequence[Step] = (b"ab", b"c", "stop"), nodes: int = 3, **options: Any) -> Any:
        client: Any = FakeClient(script, nodes)
        return client, Service(client, ServeOptions(**options))

    return make


# --- real servers ------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer decoder on disk with the byte tokenizer and a chat template; it says a few letters."""
    from specplug.testing.targets import decoder_target
    from specplug.testing.tokenizer import SIZE, byte_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    decoder_target(1, SIZE, folder=folder, tokenizer=tokenizer, alphabet=LETTERS)
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose distribution offers the scripted drafters; goes onto PYTHONPATH."""
    folder = tmp_path_factory.mktemp("site")
    points = dict.fromkeys(("scripted", "scripted-device", "scripted-dense"), "specplug.testing.scripted")
    write_distribution(folder, "specplug-scripted", points, requires=("specplug>=0.1,<1",))
    return folder


class Server:
    """``specplug serve`` in a process of its own."""

    def __init__(self, model: Path, site: Path, *args: object, environ: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "specplug", "serve", str(model), "--port", "0", *map(str, args)]
        path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environ or {})}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"at (http://[\d.:]+)", line):
                self.url = found[1]
                return
        self.process.communicate()
        raise AssertionError(f"no server: {''.join(self.lines)}")

    def stop(self, sig: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; returns the exit code and what it wrote to standard error since it started."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            _, err = self.process.communicate(timeout=WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, err


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """Return a maker of servers; what a test leaves running is ended."""
    made: list[Server] = []

    def make(*args: Any, **more: Any) -> Server:
        made.append(Server(*args, **more))
        return made[-1]

    yield make
    for server in made:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def drafts(model_folder: Path) -> str:
    """Options of a scripted drafter that knows some greedy answers: two drafts right, the third wrong."""
    from specplug.runtime.engine import Engine

    prompts = [form.format(text) for text in ("abcdabc", "abcabc") for form in ("{}", "u:{};a:")]
    with Engine(str(model_folder), context_length=96) as engine:
        results = engine.generate(prompts, {"temperature": 0, "max_tokens": 60, "ignore_eos": True})
    texts = [[*prompt.encode(), *result.ids] for prompt, result in zip(prompts, results, strict=True)]
    options = {"scripted_behaviour": "right_then_wrong", "scripted_n": 2, "scripted_texts": texts}
    return json.dumps(options | {"num_draft_tokens": 4})


@pytest.fixture(scope="session")
def serving(model_folder: Path, site: Path, drafts: str) -> Iterator[Server]:
    """A server with drafts for some prompts, shared by the tests that only ask."""
    server = Server(
        *(model_folder, site, "--speculative-algorithm", "scripted", "--speculative-config", drafts),
        *("--context-length", "96", "--page-size", "4", "--max-queued-requests", "128", "--max-running-requests", "4"),
        environ={"SPECPLUG_API_KEY": "let-me-in"},
    )
    yield server
    code, err = server.stop()
    assert code == 0, err
    assert "Traceback" not in err
