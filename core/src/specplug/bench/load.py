"""Load on a server of the OpenAI API: requests, and when their tokens came. Torch-free, standard library only."""

from __future__ import annotations

import http.client
import json
import random
import ssl
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

from specplug.cli.prompts import Conversation
from specplug.errors import UserError

MOST_OPEN = 1024
"""Requests that an open loop has on their way at once; what is due then starts late, and that counts."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    url: str
    """Of the server; a trailing ``/v1`` may stand there or not."""
    key: str | None = None
    timeout: float = 600.0

    def open(self) -> http.client.HTTPConnection:
        """Return a connection that is not used yet."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=self.timeout, context=context)
        return http.client.HTTPConnection(host, port, timeout=self.timeout)

    def request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        """Send one request; `path` is below the server's root."""
        root = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        connection.request(method, root + path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def get(self, path: str) -> Any:
        """Return the JSON at `path`; None where there is none. An OSError where nobody answers."""
        connection = self.open()
        try:
            response = self.request(connection, "GET", path)
            raw = response.read()
            return json.loads(raw) if response.status == 200 else None
        except (ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def endpoint(url: str, key: str | None) -> Endpoint:
    """Return the endpoint that `url` means; a UserError for what is no URL of a server."""
    parts = urlsplit(url)
    try:
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound:
        raise UserError(f"--url {url}: write the server's address, such as http://127.0.0.1:8000")
    return Endpoint(url, key)


@dataclass(slots=True)
class Timing:
    """One request as its client saw it, in seconds of `perf_counter`."""

    due: float
    """When it was to start; later than that it waits for the load generator, which counts as the server's time."""
    first: float | None = None
    """When the first text came; None: none did."""
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Between two events that brought text."""
    tokens: int = 0
    """As the server's usage says; where it says nothing, the events that brought text."""
    text: str = ""
    error: str = ""


def send(target: Endpoint, connection: http.client.HTTPConnection, path: str, body: Any, due: float) -> Timing:
    """Ask once, streamed, and note when what came."""
    found = Timing(due)
    try:
        response = target.request(connection, "POST", path, body)
        if response.status != 200:
            found.error = f"HTTP {response.status}: {_message(response.read())}"
            return found
        _listen(response, found)
    except (OSError, http.client.HTTPException, ValueError) as error:
        found.error = f"{type(error).__name__}: {error}"
        connection.close()
    found.last = found.last or perf_counter()
    return found


def _listen(response: http.client.HTTPResponse, found: Timing) -> None:
    events = 0
    counted: int | None = None
    for event in _events(response):
        if "error" in event:
            found.error = str(event["error"].get("message", event["error"]))
        text = "".join(map(_text, event.get("choices") or ()))
        if text:
            now = perf_counter()
            if found.first is None:
                found.first = now
            else:
                found.gaps.append(now - found.last)
            found.last, events = now, events + 1
            found.text += text
        if event.get("usage"):
            counted = int(event["usage"]["completion_tokens"])
    found.tokens = events if counted is None else counted


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:80].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and how fast."""

    target: Endpoint
    conversations: Sequence[Conversation]
    body: Mapping[str, Any]
    """Fields that every request has: the model, sampling options."""
    seed: int = 0
    """Of arrivals; conversation number i is sampled with this plus i."""

    def closed(self, clients: int) -> list[Timing]:
        """Answer all conversations with `clients` at once, each of whom asks again as soon as it was answered."""
        left: SimpleQueue[tuple[int, Conversation]] = SimpleQueue()
        for item in enumerate(self.conversations):
            left.put(item)

        def client(_: int) -> list[Timing]:
            found: list[Timing] = []
            connection = self.target.open()
            try:
                while True:
                    number, conversation = left.get_nowait()
                    found += self._talk(connection, number, conversation, None)
            except Empty:
                return found
            finally:
                connection.close()

        with ThreadPoolExecutor(clients) as pool:
            return [timing for each in pool.map(client, range(clients)) for timing in each]

    def open(self, rate: float) -> list[Timing]:
        """Start `rate` conversations a second at random (a Poisson process), whether or not others were answered."""
        generator = random.Random(self.seed)

        def client(number: int, conversation: Conversation, due: float) -> list[Timing]:
            connection = self.target.open()
            try:
                return self._talk(connection, number, conversation, due)
            finally:
                connection.close()

        with ThreadPoolExecutor(min(len(self.conversations), MOST_OPEN)) as pool:
            due, waiting = perf_counter(), []
            for number, conversation in enumerate(self.conversations):
                sleep(max(0.0, due - perf_counter()))
                waiting.append(pool.submit(client, number, conversation, due))
                due += generator.expovariate(rate)
            return [timing for each in waiting for timing in each.result()]

    def _talk(
        self, connection: http.client.HTTPConnection, number: int, conversation: Conversation, due: float | None
    ) -> list[Timing]:
        """Ask a conversation's turns one after the other; a turn that fails ends it."""
        found: list[Timing] = []
        for _ in range(conversation.rounds):
            prompt = conversation.prompt([timing.text for timing in found])
            asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
            path = "/v1/completions" if isinstance(prompt, str) else "/v1/chat/completions"
            options = {"seed": self.seed + number, "stream": True, "stream_options": {"include_usage": True}}
            start = perf_counter() if due is None or found else due
            found.append(send(self.target, connection, path, {**self.body, **options, **asked}, start))
            if found[-1].error:
                break
        return found
