"""Drafts that only the device knows, for rows that have a grammar: the host must see them to say what may follow.

The copy is launched in front of the forward that verifies them, so that the host waits for the draft only and fills
its masks while the forward runs: a second wait in a step, which steps without such rows do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specplug import tree
from specplug.proposal import Proposal
from specplug.runtime.device.stream import Mark, host_buffer
from specplug.runtime.device.upload import upload
from specplug.runtime.request import Draft
from specplug.runtime.scheduler import Row


class DraftReader:
    """Reads the drafts of some rows back."""

    def __init__(self, proposal: Proposal | None, vocab: int, device: torch.device) -> None:
        self._proposal = proposal
        self._vocab = vocab
        self._device = device
        self._rows: list[tuple[int, Row]] = []
        self._known: dict[int, Draft] = {}
        if proposal is not None:
            slots, nodes = proposal.tokens.shape
            self._host = host_buffer((slots, 1 + 2 * nodes), device)
            self._nodes = nodes
            self._sent = Mark(device)

    def send(self, rows: Sequence[Row]) -> None:
        """Start the copy of the drafts of those rows that have a grammar, and drafts that the host does not know."""
        having = [(at, row) for at, row in enumerate(rows) if row.request.grammar is not None and row.drafted]
        self._known = {at: row.draft for at, row in having if row.draft is not None}
        self._rows = [(at, row) for at, row in having if row.draft is None]
        if not self._rows:
            return
        assert self._proposal is not None
        (slots,) = upload([np.array([row.slot for _, row in self._rows], dtype=np.int64)], self._device)
        proposal = self._proposal
        parts = (proposal.num_valid[slots, None], proposal.tokens[slots], proposal.parents[slots])
        self._host[: len(self._rows)].copy_(torch.cat(parts, 1), non_blocking=True)
        self._sent.record()

    def read(self) -> Mapping[int, Draft]:
        """Wait for them; returns row -> the drafts that exist of it, without those that are not well formed."""
        found, self._known = self._known, {}
        if self._rows:
            self._sent.wait()
            for (at, row), numbers in zip(self._rows, self._host.tolist(), strict=False):
                count = max(0, min(row.drafted, numbers[0]))
                tokens, parents = numbers[1 : 1 + count], numbers[1 + self._nodes : 1 + self._nodes + count]
                sound = tree.valid_prefix(tokens, parents, self._vocab)
                found[at] = Draft(tokens[:sound], parents[:sound], None)
            self._rows = []
        return found
