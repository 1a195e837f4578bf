"""The drafting stage: one drafter, its proposal, and what happens when it fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specplug import tree
from specplug.accept import Rule
from specplug.drafter import HostRow, HostView, RequestView, StepView
from specplug.models.base import TargetModel
from specplug.planning import Run
from specplug.runtime.context import EngineContext
from specplug.runtime.draft_kv import StepRows, scratch_rows
from specplug.runtime.kv import KVPool, PagePool
from specplug.runtime.request import Draft, Request
from specplug.runtime.started import start
from specplug.spec import DraftPlan, Release

log = logging.getLogger("specplug")


@dataclass(frozen=True, slots=True)
class DraftingRow:
    """A row of the step that was just committed, as the drafting stage needs it. Set by the engine."""

    request: Request
    final: bool
    limit: int
    """Most drafts wanted for it; 0 when it is unfinished, has ended, or wants none."""


class Drafting:
    """Owns the drafter, its proposal and its failures. One per engine with an algorithm."""

    def __init__(
        self, run: Run, model: TargetModel, context: EngineContext, rule: Rule, pages: PagePool, pool: KVPool
    ) -> None:
        """Load and start the drafter of `run`. `pages` and `pool` are the target's."""
        assert run.installed is not None
        assert run.plan is not None
        self.plan: DraftPlan = run.plan
        self.owner = f"{run.installed.distribution} {run.installed.version} ({run.algorithm})"
        self.failed = ""
        """Empty, or why speculation ended for good."""
        self._vocab = model.vocab_size
        self._on_host = "host" in run.plan.needs.runs_on
        self._started = start(run, model, context, rule, pages, pool, self.owner)
        self._drafter = self._started.drafter
        self._proposal = self._started.proposal
        self._clipped = False
        self._closed = False

    def admit(self, request: Request) -> None:
        """A request got a slot, for the first time or again. An exception in the drafter sets `failed`."""
        request.handed = 0
        if self.failed:
            return
        self._proposal.reset(request.slot)
        view = RequestView(request.slot, request.id, tuple(request.tokens), request.sampling, request.max_drafted)
        try:
            self._drafter.on_admit(view)
        except Exception as cause:
            self._fail("on_admit", cause)

    def release(self, request: Request, reason: Release) -> None:
        """A request is about to lose its slot. Exceptions are logged: nothing depends on the answer."""
        if self._closed:
            return
        try:
            self._drafter.on_release(request.slot, reason)
        except Exception:
            log.exception("%s: on_release failed", self.owner)

    def rows_beyond(self, limit: int) -> int:
        """Rows above `kv_len` that must be reserved before a proposal of up to `limit` nodes."""
        if self.plan.kv:
            return max(1 + self.plan.nodes, scratch_rows(self.plan.kv))
        return 1 + limit

    def run(self, step: StepView, where: StepRows, rows: Sequence[DraftingRow]) -> None:
        """Hand the step to the drafter and collect its drafts into each request's `draft`.

        An exception in the drafter sets `failed`; the drafter is not called again but to release and close.
        """
        if self._on_host:
            step.host = HostView(self._host_rows(rows))
        self._started.begin(where)
        if self.plan.max_position is not None:  # so that no table is read beyond its end
            step.positions = step.positions.clamp_max(self.plan.max_position)
        method = "ingest"
        try:
            self._drafter.ingest(step)
            self._proposal.begin({row.request.slot: row.limit for row in rows})
            if any(row.limit for row in rows):
                method = "propose"
                self._drafter.propose(step, self._started.out)
                self._proposal.merge_host()
        except Exception as cause:
            self._fail(method, cause)
            return
        for row in rows:
            row.request.draft = self._collect(row)

    def metrics(self) -> Mapping[str, float]:
        """The drafter's own counters; an exception in them is logged and leaves none."""
        if self.failed:
            return {}
        try:
            return dict(self._drafter.metrics())
        except Exception:
            log.exception("%s: metrics failed", self.owner)
            return {}

    def close(self) -> None:
        """Close the drafter; from then on it hears nothing more."""
        self._closed = True
        try:
            self._drafter.close()
        except Exception:
            log.exception("%s: close failed", self.owner)

    def _fail(self, method: str, cause: Exception) -> None:
        self.failed = f"{self.owner}: {method} raised {type(cause).__name__}: {cause}"
        log.exception("%s", self.failed)

    def _host_rows(self, rows: Sequence[DraftingRow]) -> list[HostRow]:
        found = []
        for row in rows:
            request = row.request
            if request.output.finish_reason is not None:
                continue
            seen = request.kv_len + row.final
            found.append(HostRow(request.slot, request.tokens[request.handed : seen], seen, row.limit))
            request.handed = seen
        return found

    def _collect(self, row: DraftingRow) -> Draft | None:
        slot = row.request.slot
        count = min(int(self._proposal.num_valid[slot]), row.limit)
        if count <= 0:
            return None
        tokens = self._proposal.tokens[slot, :count].tolist()
        parents = self._proposal.parents[slot, :count].tolist()
        sound = tree.valid_prefix(tokens, parents, self._vocab)
        if sound < count and not self._clipped:
            self._clipped = True
            log.warning(
                "%s: draft %d of slot %d is malformed (token %d, parent %d); such drafts are cut off, said once",
                *(self.owner, sound, slot, tokens[sound], parents[sound]),
            )
        if not sound:
            return None
        q = None
        if self._proposal.q is not None and bool(self._proposal.dense[slot]):
            q = self._proposal.q[slot, :sound].clone()
        return Draft(tokens[:sound], parents[:sound], q)
