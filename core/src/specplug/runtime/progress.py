"""One line per stage of a start, with its seconds. Silent unless somebody listens.

Stages are log records of the logger `specplug.start` at level INFO, so the Python API says nothing by itself, and an
application sees them by configuring `logging`. The command line shows them with `printed`. Torch-free.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

STAGES = ("load weights", "allocate KV pages", "start drafter", "compile kernels", "capture graphs", "first step")
"""Words for the stages of a start, in order; `out_of_memory` knows what to lower at each."""

LOGGER = logging.getLogger("specplug.start")


class Stage(Protocol):
    """A stage that is running: what `stage` yields."""

    detail: str
    """Said in brackets at its end; may be set while it runs."""

    def at(self, done: int, total: int) -> None:
        """Note that `done` of `total` equal parts are done."""


class _Running:
    """A `Stage` that is shown as it goes on."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        self._count = ""

    def at(self, done: int, total: int) -> None:
        """See `Stage`."""
        self._count = f" {done}/{total}"
        _say(f"{self.name}{self._count}", logging.DEBUG)

    def ended(self, seconds: float) -> str:
        """Return the line that stays."""
        return f"{self.name}{self._count}: {seconds:.1f} s" + (f" ({self.detail})" if self.detail else "")


@contextmanager
def stage(name: str, detail: str = "") -> Iterator[Stage]:
    """Time the block as a stage of the start, and say so when it has ended; nothing is said if it raises."""
    running = _Running(name, detail)
    _say(name, logging.DEBUG)
    begin = perf_counter()
    yield running
    _say(running.ended(perf_counter() - begin), logging.INFO)


def ready(seconds: float, lines: Iterable[str] = ()) -> None:
    """Say that the start has ended after `seconds` in all; `lines` (a memory report's) come before."""
    for line in (*lines, f"ready: {seconds:.1f} s"):
        _say(line, logging.INFO)


@contextmanager
def printed() -> Iterator[None]:
    """Print stages to standard error inside the block; on a terminal the running one too, on a line that it leaves."""
    level, passed_on, handler = LOGGER.level, LOGGER.propagate, _Printer()
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False  # an application's own handlers would say it a second time
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        handler.wipe()
        LOGGER.removeHandler(handler)
        LOGGER.propagate = passed_on
        LOGGER.setLevel(level)


def _say(line: str, level: int) -> None:
    LOGGER.log(level, "%s", line)


class _Printer(logging.Handler):
    """Lines that stay for INFO; for DEBUG one that is written over, on a terminal only."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._open = 0  # characters of a line that has not ended

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.levelno >= logging.INFO:
            self.wipe()
            print(line, file=sys.stderr, flush=True)
        elif sys.stderr.isatty():
            self.wipe()
            print(f"{line} ...", end="", file=sys.stderr, flush=True)
            self._open = len(line) + 4

    def wipe(self) -> None:
        """Take back the line that has not ended."""
        if self._open:
            print("\r" + " " * self._open + "\r", end="", file=sys.stderr, flush=True)
            self._open = 0
