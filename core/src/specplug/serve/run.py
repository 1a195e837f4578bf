"""One server from start to end: the port first, then the engine, then HTTP; on SIGTERM all of it drained."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from specplug.errors import UserError
from specplug.generation import FILE, spelt
from specplug.serve.app import make_app
from specplug.serve.engine_process import EngineArgs, EngineClient
from specplug.serve.options import ServeOptions
from specplug.serve.service import Service

BACKLOG = 2048
"""Connections that may wait to be accepted; uvicorn's own number."""
GRACE = 5.0
"""Seconds beyond --drain-timeout in which the last answers may leave."""


def serve(args: EngineArgs, options: ServeOptions) -> int:
    """Serve until a signal or the engine's end; returns the exit code: 0, or 1 where the engine ended by itself.

    Raises UserError for a port that cannot be had, and what the engine's start raises.
    """
    # A port that is taken is found before minutes of loading, and the socket is held meanwhile.
    with _listen(options) as listening, asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(_serve(args, options, listening))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes uvloop's event loop, None for asyncio's own where it is not installed, as on Windows."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    return made


def _listen(options: ServeOptions) -> socket.socket:
    found = None
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((options.host, options.port))
    except (OSError, UnicodeError) as error:
        if found is not None:
            found.close()
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"--host {options.host} --port {options.port}: cannot listen there ({why}): "
            "give another port, or 0 for any that is free"
        ) from None
    return found


async def _serve(args: EngineArgs, options: ServeOptions, listening: socket.socket) -> int:
    client = await EngineClient.start(args)
    try:
        for warning in client.info.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        service = Service(client, options)
        if service.defaults:
            print(
                f"requests that leave them out get {spelt(service.defaults)}, as {FILE} says "
                "(--sampling-defaults openai: OpenAI's values)",
                file=sys.stderr,
            )
        server = HttpServer(service)
        service.spawn(service.sample())
        service.spawn(_watch(server, service))
        listening.listen(BACKLOG)  # before it is said, so that whoever reads that can connect
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {service.model} at http://{shown}:{port} (Ctrl-C ends it)", file=sys.stderr, flush=True)
        await server.serve(sockets=[listening])
        died = client.dead
        service.close()
    finally:
        await client.close()
    if died:
        print(f"error: {died}", file=sys.stderr)
    return 1 if died else 0


async def _watch(server: HttpServer, service: Service) -> None:
    """End the server when its engine has ended: nothing can be answered, and a supervisor can start it again."""
    await service.client.wait_dead()
    service.metrics.up = False
    server.should_exit = True


class HttpServer(uvicorn.Server):
    """uvicorn, with answers that run given their time before the end."""

    def __init__(self, service: Service) -> None:
        options = service.options
        super().__init__(
            uvicorn.Config(
                make_app(service),
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(options.drain_timeout + GRACE) + 1,
            )
        )
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets what runs end, for as long as it may; a second one does not wait."""
        again = self._service.draining
        self._service.draining = True
        self.should_exit = True
        if again:
            self.force_exit = True
            return
        live, limit = self._service.live, self._service.options.drain_timeout
        if live:
            print(f"ending: {live} requests run, for {limit:g} s at most", file=sys.stderr, flush=True)
        self._service.spawn(_cut(self._service, limit))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the answers that are on their way; a second signal ends them."""
        await super().shutdown(sockets)
        if self.force_exit:
            self._service.abort_all()


async def _cut(service: Service, seconds: float) -> None:
    await asyncio.sleep(seconds)
    service.abort_all()
