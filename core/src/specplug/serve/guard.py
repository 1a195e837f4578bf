"""In front of every endpoint: the API key and the largest body. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specplug.serve.errors import ApiError

OPEN = frozenset({"/", "/health"})
"""Paths that need no key: the status page, which holds no data, and whether the server lives."""


class Guard:
    """ASGI middleware: 401 without the key, 413 for a body that is too large, however it is sent."""

    def __init__(self, app: ASGIApp, api_key: str | None, most: int, refused: Callable[[int], None]) -> None:
        """`most`: bytes of a body; `refused` is told the status of each request that is answered here."""
        self._app = app
        self._refused = refused
        self._key = None if api_key is None else api_key.encode()
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"content-length")}
        error = None
        if self._key is not None and scope["path"] not in OPEN and not self._knows(headers.get(b"authorization", b"")):
            error = ApiError(
                401,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        elif (size := headers.get(b"content-length", b"")).isdigit() and (len(size) > 18 or int(size) > self._most):
            error = self._too_large()
        if error is not None:
            self._refused(error.status)
            await answer(send, error)
            return
        left = self._most

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _knows(self, header: bytes) -> bool:
        assert self._key is not None
        scheme, _, key = header.partition(b" ")
        # Compared in constant time: how long it takes must not say how much of a guess is right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than this server's --max-body-bytes {self._most}: send less",
            code="body_too_large",
        )


async def answer(send: Send, error: ApiError) -> None:
    """Send an error as the whole response."""
    raw = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(raw)), **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": raw})
