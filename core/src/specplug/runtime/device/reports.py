"""What a step came to, on its way to the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from specplug.runtime.device.stream import Mark, host_buffer


class Line:
    """One row's outcome on the host."""

    __slots__ = ("_numbers", "_parents", "_tokens", "path", "token", "valid")

    def __init__(self, numbers: list[int], tokens: int, parents: int) -> None:
        """`tokens`, `parents`: where these begin in `numbers`."""
        self._numbers = numbers
        self._tokens = tokens
        self._parents = parents
        accepted, self.token, self.valid = numbers[:3]
        self.path = tuple(numbers[3 : 3 + accepted])

    @property
    def tokens(self) -> list[int]:
        """The valid drafts that were verified."""
        return self._numbers[self._tokens : self._tokens + self.valid]

    @property
    def parents(self) -> list[int]:
        """Their parents."""
        return self._numbers[self._parents : self._parents + self.valid]


class Report:
    """A report that has been sent. Read it once, before two more are sent."""

    def __init__(self, numbers: np.ndarray, depth: int, nodes: int, sent: Mark, errors: Mapping[int, str]) -> None:
        self.errors = errors
        """Why no token could be chosen, by row, where the host found that out."""
        self._numbers = numbers
        self._tokens = 3 + depth
        self._parents = 3 + depth + nodes
        self._sent = sent

    def read(self) -> list[Line]:
        """Wait for the report and return one line per row."""
        self._sent.wait()
        return [Line(numbers, self._tokens, self._parents) for numbers in self._numbers.tolist()]


class Reports:
    """Buffers for reports. Two take turns on the host: a step may be launched before the one before it is read."""

    def __init__(self, slots: int, depth: int, nodes: int, device: torch.device) -> None:
        """`depth`: width of the accepted path; `nodes`: drafts of which tokens and parents are told."""
        width = 3 + depth + 2 * nodes
        self.device = torch.zeros(slots, width, dtype=torch.int64, device=device)
        """[S, 3 + D + 2 N]: accepted, token, valid drafts, path, tokens, parents. Written by the device commit."""
        self._hosts = [host_buffer((slots, width), device) for _ in range(2)]
        self._depth, self._nodes = depth, nodes
        self._turn = 0

    def send(self, rows: int, errors: Mapping[int, str]) -> Report:
        """Start the copy of the first `rows` lines to the host."""
        self._turn = 1 - self._turn
        host = self._hosts[self._turn][:rows]
        host.copy_(self.device[:rows], non_blocking=True)
        sent = Mark(self.device.device)
        sent.record()
        return Report(host.numpy(), self._depth, self._nodes, sent, dict(errors))
