"""What the host tells the device about a step, in one copy."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from specplug.runtime.device.stream import Mark, host_buffer
from specplug.runtime.kv import PagePool


class StepInputs:
    """Named int64 arrays that are one buffer on the host and one on the device.

    Two host buffers take turns, so that a step can be written while the copy of the one before is still
    to come.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        size = sum(prod(shape) for shape in shapes.values())
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._buffers = [host_buffer((size,), device) for _ in range(2)]
        self._copied = [Mark(device) for _ in range(2)]
        self._turn = 0
        self._hosts: list[dict[str, np.ndarray]] = [{}, {}]
        self.device: dict[str, Tensor] = {}
        """The device's side of each array."""
        start = 0
        for name, shape in shapes.items():
            end = start + prod(shape)
            self.device[name] = self._device[start:end].view(shape)
            for host, buffer in zip(self._hosts, self._buffers, strict=True):
                host[name] = buffer[start:end].view(shape).numpy()
            start = end

    def begin(self) -> dict[str, np.ndarray]:
        """Return arrays to write the next step to; what an earlier one left in them is still there."""
        self._turn = 1 - self._turn
        self._copied[self._turn].wait()
        return self._hosts[self._turn]

    def upload(self) -> None:
        """Copy what was written, in the order of the stream."""
        self._device.copy_(self._buffers[self._turn], non_blocking=True)
        self._copied[self._turn].record()


class Pages:
    """The device's page tables, kept equal to the host's by the entries that changed.

    Entries that were given back are among them: a drafter that writes too far must hit the trash page.
    """

    def __init__(self, pages: PagePool, device: torch.device) -> None:
        """`pages`: the host's, watched from now on."""
        slots, columns = pages.table.shape
        self.trash_page = pages.pages
        self.tables = torch.full((slots + 1, columns), self.trash_page, dtype=torch.int32, device=device)
        """[S+1, P] int32 page ids; the scratch slot's last."""
        self.unchanged = np.array([[self.tables.numel() - 1], [self.trash_page]])
        """int64 [2, 1]: an entry as from `changed` that writes what the scratch slot holds anyhow."""
        self._changes: dict[int, int] = {}
        pages.changes = self._changes

    def changed(self) -> np.ndarray:
        """Return what changed since the last call, int64 [2, n]: flat indices, each of them once, and page ids."""
        if not self._changes:
            return _NOTHING
        found = np.array((list(self._changes), list(self._changes.values())))
        self._changes.clear()
        return found

    def write(self, changed: np.ndarray) -> None:
        """Write entries that `changed` returned now, outside a step's upload. Waits until they are copied."""
        if changed.size:
            both = torch.from_numpy(np.ascontiguousarray(changed)).to(self.tables.device)
            self.tables.view(-1).index_copy_(0, both[0], both[1].int())


_NOTHING = np.zeros((2, 0), dtype=np.int64)
