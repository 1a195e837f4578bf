"""Observers of finished steps: told after the host commit, and dropped when they raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specplug.registry import Registry
from specplug.spec import Observer, RunInfo, StepStats

log = logging.getLogger("specplug")


class Observers:
    """The observers of one run. An empty set costs one truth test per step."""

    def __init__(self, found: Iterable[tuple[str, Observer]]) -> None:
        """`found`: (who offers it, the observer)."""
        self._observers = list(found)

    @classmethod
    def of(cls, registry: Registry, info: RunInfo) -> Observers:
        """Ask every installed package for an observer of this run."""
        answers = registry.each("specplug_observer", selected=info.algorithm, run=info)
        return cls((answer.label, answer.value) for answer in answers if answer.value is not None)

    def add(self, observer: Observer) -> None:
        """Add one more, from the program that embeds the engine."""
        self._observers.append((type(observer).__name__, observer))

    def __bool__(self) -> bool:
        return bool(self._observers)

    def on_step(self, stats: StepStats) -> None:
        """Tell of one step."""
        self._tell("on_step", lambda observer: observer.on_step(stats))

    def on_finish(self, request_id: str, ledger: Mapping[str, Any]) -> None:
        """Tell of one answer that ended."""
        self._tell("on_finish", lambda observer: observer.on_finish(request_id, ledger))

    def close(self) -> None:
        """Close all of them, once."""
        self._tell("close", lambda observer: observer.close())
        self._observers.clear()

    def _tell(self, method: str, call: Callable[[Observer], None]) -> None:
        for who, observer in list(self._observers):
            try:
                call(observer)
            except Exception:
                log.exception("the observer of %s raised in %s and is dropped", who, method)
                self._observers.remove((who, observer))
