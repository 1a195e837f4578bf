"""Which rows go into the next forward: first come, first served, prompts in chunks, pages as they last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specplug.runtime.kv import PagePool
from specplug.runtime.request import NOTHING, Asked, Draft, Request

UNKNOWN = -1
"""Id of a token that was sampled and is not on the host yet."""


class Row(NamedTuple):
    """One request's share of a forward: its tokens from `start` on, and drafts below the last of them."""

    request: Request
    slot: int
    """The request's slot when the row was made: a row on its way may outlive its request's hold on it."""
    start: int
    tokens: list[int]
    """`UNKNOWN` stands for a token that the device has sampled and the host has not seen."""
    drafted: int
    """Drafts below the last token."""
    draft: Draft | None
    """Those drafts, where the host knows them."""
    final: bool
    """These are the last tokens the request has: what follows will be sampled."""
    asked: Asked = NOTHING
    """What was wanted of the drafter for this forward."""

    @property
    def q_len(self) -> int:
        """Tokens of this row, drafts included."""
        return len(self.tokens) + self.drafted


class Scheduler:
    """Queues, slots and pages. Holds no tensor and never looks at a model."""

    def __init__(
        self, slots: int, pages: PagePool, chunk: int, most_waiting: int, on_preempt: Callable[[Request], None]
    ) -> None:
        """`chunk`: most prompt tokens per step; `on_preempt` is told before a request loses its slot."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.preemptions = 0
        self._pages = pages
        self._free_slots = list(range(slots - 1, -1, -1))
        self._chunk = chunk
        self._most_waiting = most_waiting
        self._on_preempt = on_preempt

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not (self.waiting or self.running)

    @property
    def room(self) -> int:
        """How many more requests may wait."""
        return self._most_waiting - len(self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self, on_admit: Callable[[Request], None]) -> list[Row]:
        """Choose the rows of the next forward, oldest first; admit and preempt as slots and pages allow."""
        rows: list[Row] = []
        budget = self._chunk
        for request in list(self.running):
            if request.slot < 0:  # preempted for an older one a moment ago
                continue
            row = self._row(request, budget)
            if row is None:
                continue
            while not self._pages.reserve(request.slot, row.start + row.q_len):
                self._preempt(self.running[-1])  # the youngest; never one whose row is chosen already
                if request.slot < 0:
                    break
            else:
                rows.append(row)
                budget -= 0 if request.pending == 1 and request.output.ids else len(row.tokens)
        while budget > 0 and self._fits_next():
            request = self.waiting.popleft()
            request.slot = self._free_slots.pop()
            self.running.append(request)
            self._pages.reserve(request.slot, len(request.tokens))
            on_admit(request)
            row = self._row(request, budget)
            assert row is not None
            rows.append(row)
            budget -= len(row.tokens)
        return rows

    def ahead(self, rows: Sequence[Row]) -> list[Row]:
        """Choose the rows of the forward after `rows` while those are still on their way, or none.

        Only where it is known what `rows` will come to: every running request has a row that ends in one
        sampled token, and nobody could join. What that token makes an answer's last is left out; a stop
        that nobody foresaw makes its row here a wasted one.
        """
        if len(rows) != len(self.running) or self._fits_next():
            return []
        if any(not row.final or row.drafted or row.request.output.finish_reason for row in rows):
            return []
        goes_on = [row for row in rows if row.request.output.most - len(row.request.output.ids) > 1]
        starts = [row.start + row.q_len for row in goes_on]
        if not all(self._pages.reserve(row.slot, start + 1) for row, start in zip(goes_on, starts, strict=True)):
            return []
        return [
            Row(row.request, row.slot, start, [UNKNOWN], 0, None, final=True, asked=row.request.asked)
            for row, start in zip(goes_on, starts, strict=True)
        ]

    def release(self, request: Request) -> None:
        """Take a request out, wherever it is, and give back its slot and pages."""
        if request.slot < 0:
            if request in self.waiting:
                self.waiting.remove(request)
            return
        self.running.remove(request)
        self._pages.release(request.slot)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _fits_next(self) -> bool:
        """Say whether the next one waiting has a slot and pages for its whole text, so that it pushes nobody out."""
        if not self.waiting or not self._free_slots:
            return False
        return -(-len(self.waiting[0].tokens) // self._pages.page_size) <= self._pages.free

    def _row(self, request: Request, budget: int) -> Row | None:
        slot, start = request.slot, request.kv_len
        if request.pending == 1:
            root = request.tokens[-1:]
            return Row(request, slot, start, root, request.drafted, request.draft, final=True, asked=request.asked)
        size = min(request.pending, budget)
        if size <= 0:
            return None
        return Row(request, slot, start, request.tokens[start : start + size], 0, None, final=size == request.pending)

    def _preempt(self, request: Request) -> None:
        self._on_preempt(request)
        self.preemptions += 1
        self.release(request)
        request.kv_len = 0
        request.drafted, request.draft, request.asked = 0, None, NOTHING
        self.waiting.appendleft(request)
