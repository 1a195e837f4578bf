"""Errors as the OpenAI API shapes them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from typing import Any

_PATH = re.compile(r"(?<![\w/:.<])/(?:[\w.@+~-]+/)+[\w.@+~-]*")
"""An absolute path of a machine. A URL's is not one, nor ``and/or``."""


class ApiError(Exception):
    """A request that is not answered, with the HTTP status and the body that say why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        """`message`: one line; `param`: the field at fault; `code`: a word for programs; `kind`: ``error.type``."""
        super().__init__(message)
        self.status = status
        self.message = public(message)
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def public(message: str) -> str:
    """Return `message` on one line, without paths of this machine: what a client may read."""
    return _PATH.sub("(path)", " ".join(message.split()))


def bad(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Return the 400 for a fault in field `param`."""
    return ApiError(400, message, param=param, code=code)


def unrouted(status: int, method: str, path: str, why: str, headers: dict[str, str]) -> ApiError:
    """Return the error for a path or a method that there is not. The path is the client's own: it may be named."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    error = ApiError(status, why, code=code, headers=headers)
    error.message = " ".join(f"{method} {path[:80]}: {error.message}".split())
    return error


def unavailable(message: str) -> ApiError:
    """Return the 503 of a server that would answer later, or elsewhere."""
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"Retry-After": "1"})


def failed(message: str) -> ApiError:
    """Return the 500 for a fault that is the server's."""
    return ApiError(500, message, kind="server_error", code="server_error")


def timed_out(seconds: float) -> ApiError:
    """Return the 504 of a request that took longer than the server lets one take."""
    return ApiError(
        504,
        f"the answer took longer than this server's --request-timeout of {seconds:g} s: ask for fewer max_tokens",
        kind="server_error",
        code="timeout",
    )
