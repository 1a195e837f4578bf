"""What runs a step's tensors, wherever they live: the seam between the host's half of a step and the device's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specplug.runtime.commit import Outcome
from specplug.runtime.request import Request
from specplug.runtime.scheduler import Row


class Launched(Protocol):
    """One step on its way. Made by `Executor.launch`."""

    @property
    def rows(self) -> Sequence[Row]:
        """The rows it was launched with."""

    @property
    def seconds(self) -> dict[str, float]:
        """Host time by stage, up to the end of the launch."""

    @property
    def graph(self) -> bool | None:
        """Whether the forward was replayed from a graph; None where there are none."""

    @property
    def depth(self) -> int:
        """Longest path that is wanted of the drafter for the next step; known once `draft` was called."""

    def outcomes(self) -> list[Outcome | None]:
        """Wait for the step's results; one per row, None for a prompt chunk that is not the last."""

    def draft(self) -> None:
        """After the host commit: have drafts made where that had to wait, and take over what was proposed."""

    def exposed(self) -> float | None:
        """Return the seconds the device idled before this step for want of host work; None if not known."""

    def took(self) -> tuple[float | None, float | None]:
        """Return seconds, once `outcomes` is known: of the forward with what decides on it, and of what came
        between the decision before and this forward's begin, drafting included; None where it is not known."""


class Executor(Protocol):
    """Runs the target, decides what its logits say, and calls the drafter."""

    overlaps: bool
    """Whether a launched step goes on while the host does something else, so that launching early pays."""

    def admit(self, request: Request) -> None:
        """A request got a slot, for the first time or again."""

    def may_run_ahead(self, rows: Sequence[Row]) -> bool:
        """Say whether a step after `rows` can be launched before the host knows what they came to."""

    def launch(self, rows: Sequence[Row]) -> Launched:
        """Start one step over `rows`, at least one, without waiting for what it comes to."""
