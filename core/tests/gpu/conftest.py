"""A run on a GPU says what it is doing: a compile or a wait on the device that never ends is killed from outside."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Generator

import pytest

INTERVAL = 15.0
"""Seconds after which a test that still runs is named, and again after as many."""
SLOW = 5.0
"""A test that took as many seconds, or its fixtures did, is named when it is over."""


class Watch:
    """Names slow tests on the terminal while they run, and where all threads stand when the run is killed."""

    def __init__(self, to: int) -> None:
        """`to`: a file descriptor of the terminal or log, which no test captures.

        SIGTERM and SIGINT go on doing what they did.
        """
        self._to = to
        self._begun = time.monotonic()
        self._current: tuple[str, float] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            faulthandler.register(number, file=to, all_threads=True, chain=True)

    def stop(self) -> None:
        """End, and leave the signals as they were."""
        self._over.set()
        self._thread.join()
        for number in (signal.SIGTERM, signal.SIGINT):
            faulthandler.unregister(number)
        os.close(self._to)

    def begin(self, name: str) -> None:
        """Watch a test from now on."""
        self._current = name, time.monotonic()

    def end(self) -> None:
        """The test is over."""
        if self._current is not None:
            name, begun = self._current
            self._current = None
            if time.monotonic() - begun >= SLOW:
                self._write(f"{name}: took {time.monotonic() - begun:.1f} s")

    def _tell(self) -> None:
        while not self._over.wait(INTERVAL):
            current = self._current
            if current is not None and time.monotonic() - current[1] >= INTERVAL:
                self._write(f"{current[0]}: running for {time.monotonic() - current[1]:.0f} s")

    def _write(self, line: str) -> None:
        os.write(self._to, f"\n[{time.monotonic() - self._begun:.0f} s] {line}\n".encode())


_watch = pytest.StashKey[Watch]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Watch every test of this folder, the fixtures that it is the first to need included."""
    stash = item.config.stash
    if _watch not in stash:
        capture = item.config.pluginmanager.getplugin("capturemanager")
        with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
            stash[_watch] = Watch(os.dup(2))
    stash[_watch].begin(item.nodeid)
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """The test is over when its fixtures are."""
    try:
        yield
    finally:
        item.config.stash[_watch].end()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The run is over."""
    if _watch in config.stash:
        config.stash[_watch].stop()
