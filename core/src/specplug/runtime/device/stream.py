"""The few calls of a device's stream that the executor makes; on a CPU all work is over when it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Mark:
    """A point in the stream's work."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Mark the work launched so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Block the host until the marked work is over; nothing was marked: return at once."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float | None:
        """Return the device's time between `earlier` and this one, both `timed` and over; None on a CPU."""
        if self._event is None or earlier._event is None:
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def host_buffer(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return zeros on the host that `device` copies from and to without the host waiting."""
    return torch.zeros(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")
