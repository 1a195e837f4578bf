"""Which rows go into the next forward: first come, first served, prompts in chunks, pages as they last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specplug.runtime.kv import PagePool
from specplug.runtime.request import Draft, Request


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a forward: its tokens from `start` on, and drafts below the last of them."""

    request: Request
    start: int
    tokens: list[int]
    draft: Draft | None
    final: bool
    """These are the last tokens the request has: what follows will be sampled."""

    @property
    def q_len(self) -> int:
        """Tokens of this row, drafts included."""
        return len(self.tokens) + (len(self.draft.tokens) if self.draft else 0)


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
        while budget > 0 and self.waiting and self._free_slots:
            request = self.waiting[0]
            row = self._row(request, budget)
            # The whole text must fit, or the newcomer would at once push out someone else.
            if row is None or -(-len(request.tokens) // self._pages.page_size) > self._pages.free:
                break
            self.waiting.popleft()
            request.slot = self._free_slots.pop()
            self.running.append(request)
            self._pages.reserve(request.slot, len(request.tokens))
            on_admit(request)
            rows.append(row)
            budget -= len(row.tokens)
        return rows

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

    def _row(self, request: Request, budget: int) -> Row | None:
        if request.pending == 1:
            return Row(request, request.kv_len, request.tokens[-1:], request.draft, final=True)
        size = min(request.pending, budget)
        if size <= 0:
            return None
        tokens = request.tokens[request.kv_len : request.kv_len + size]
        return Row(request, request.kv_len, tokens, None, final=size == request.pending)

    def _preempt(self, request: Request) -> None:
        self._on_preempt(request)
        self.preemptions += 1
        self.release(request)
        request.kv_len = 0
        request.draft = None
        self.waiting.appendleft(request)
