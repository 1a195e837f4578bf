"""Running the device's code on a CPU: how plugins and the core test it where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specplug.runtime import build


@contextmanager
def device_path() -> Iterator[None]:
    """Engines that are built inside run the device's path (static buffers, padded steps, graphs as plain calls)."""
    host = build._on_host
    build._on_host = build._on_device
    try:
        yield
    finally:
        build._on_host = host
