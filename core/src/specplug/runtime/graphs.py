"""Recording of a drafter's callables. On a CPU there is nothing to record: the callable runs as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specplug.drafter import StepView
from specplug.proposal import Proposal

Recorded = Callable[[StepView, Proposal | None, Any], None]


class EagerRecorder:
    """The `GraphRecorder` of devices without graphs."""

    def record(self, name: str, fn: Recorded, over: str = "rows", variants: Sequence[Any] | None = None) -> Recorded:
        """See `specplug.GraphRecorder`."""
        if over not in ("rows", "rows_x_width"):
            raise ValueError(f"graph {name!r}: over={over!r}, expected 'rows' or 'rows_x_width'")
        return fn
