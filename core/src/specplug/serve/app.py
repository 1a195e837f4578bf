"""The HTTP endpoints, over one `Service`."""

from __future__ import annotations

import asyncio
import secrets
from importlib.metadata import version
from time import monotonic, time
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response

from specplug.serve.answer import Answer
from specplug.serve.asked import read, read_body
from specplug.serve.errors import ApiError, failed, unrouted
from specplug.serve.fields import Kind, body_schema
from specplug.serve.guard import Guard
from specplug.serve.page import HEADERS, PAGE
from specplug.serve.service import Service
from specplug.serve.shapes import Shape

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ERRORS = {
    status: {"description": about, "content": {"application/json": {"schema": _ERROR}}}
    for status, about in (
        ("4XX", "the request is at fault"),
        ("500", "the server is at fault"),
        ("503", "the queue is full, or the server ends"),
        ("504", "it took longer than --request-timeout"),
    )
}


def _completes(kind: Kind) -> dict[str, Any]:
    """Return what OpenAPI says of an endpoint that answers."""
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body_schema(kind)}}},
        "responses": {"200": {"description": "the answer", "content": answers}, **_ERRORS},
    }


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application of one server."""
    # Their pages load scripts from elsewhere, so /docs and /redoc are left out.
    app = FastAPI(
        title="specplug", version=version("specplug"), docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )
    options = service.options
    app.add_middleware(Guard, api_key=options.api_key, most=options.max_body_bytes, refused=service.metrics.refused)
    _handle_errors(app, service)
    _answers(app, service)
    _state(app, service)
    return app


def _answers(app: FastAPI, service: Service) -> None:
    async def answer(kind: Kind, request: Request) -> Response:
        arrived = monotonic()
        raw = await _body(request, service.options.request_timeout)
        asked = read(kind, read_body(raw), service.model, service.defaults)
        submissions = await service.submit(asked)
        shape = Shape(asked, secrets.token_hex(12), int(time()), service.model, service.tokens)
        return Answer(service, asked, submissions, shape, arrived)

    @app.post("/v1/chat/completions", openapi_extra=_completes("chat"))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await answer("chat", request)

    @app.post("/v1/completions", openapi_extra=_completes("completion"))
    async def completions(request: Request) -> Response:
        """Go on from a text, or from token ids."""
        return await answer("completion", request)


def _state(app: FastAPI, service: Service) -> None:
    def model() -> dict[str, Any]:
        limit = service.client.info.max_tokens
        about = {"id": service.model, "object": "model", "created": service.started, "owned_by": "specplug"}
        return about | {"max_model_len": limit}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "another model"}})
    async def one_model(name: str) -> dict[str, Any]:
        """Tell of the model."""
        if name != service.model:
            raise ApiError(404, f"model {name[:80]!r} is not served here", param="model", code="model_not_found")
        return model()

    @app.get("/health", responses={503: {"description": "the server ends"}})
    async def health() -> Response:
        """Say whether requests are answered, and whether they are drafted for."""
        dead = bool(service.client.dead)
        status = "dead" if dead else "ending" if service.draining else "ok"
        await service.snapshot()
        body = {"status": status, "speculation": service.speculation}
        return JSONResponse(body, 200 if status == "ok" else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Tell Prometheus."""
        await service.snapshot()
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/server_info")
    async def server_info() -> JSONResponse:
        """Tell how this server is set up, and what it is doing."""
        return JSONResponse(service.about(await service.snapshot()))

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        """Show the status page."""
        return HTMLResponse(PAGE, headers=HEADERS)


async def _body(request: Request, seconds: float) -> bytes:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":  # nor can a form on somebody's web page have this server work
        raise ApiError(415, f"content-type {kind[:80]}: send application/json", code="unsupported_media_type")
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="timeout") from None


def _handle_errors(app: FastAPI, service: Service) -> None:
    def respond(error: ApiError) -> Response:
        service.metrics.refused(error.status)
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(HTTPException)
    async def routed(request: Request, error: HTTPException) -> Response:
        """A path or method that there is not."""
        headers = dict(error.headers or {})
        return respond(unrouted(error.status_code, request.method, request.url.path, error.detail, headers))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        """The client left while it sent its body: nobody reads this."""
        return Response(status_code=400)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        """A fault of ours: the log has the traceback, the client does not."""
        return respond(failed("internal error: see the server's log"))
