"""The device's executor: inputs in one copy, one graph per bucket, all of it launched before anything is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specplug.drafter import StepView
from specplug.models.base import BatchRow, ForwardBatch, TargetModel
from specplug.proposal import HostProposal
from specplug.runtime.attention.backend import Backend, PlannedAttention
from specplug.runtime.device import compact
from specplug.runtime.device.buckets import Bucket, Buckets
from specplug.runtime.device.capture import BucketRecorder, Capturer
from specplug.runtime.device.decide import Decider
from specplug.runtime.device.outcome import Committed, Verdicts, begin_late, commit
from specplug.runtime.device.packing import Packed, may_branch, pack, prime
from specplug.runtime.device.prologue import prologue
from specplug.runtime.device.readback import DraftReader
from specplug.runtime.device.reorder import kept_first
from specplug.runtime.device.reports import Report, Reports
from specplug.runtime.device.rows import StepRows
from specplug.runtime.device.statics import Statics
from specplug.runtime.device.step import DeviceStep, StepMarks
from specplug.runtime.device.stream import Mark
from specplug.runtime.device.work import needs_host
from specplug.runtime.drafting import Drafting, Wish
from specplug.runtime.kv import KVPool
from specplug.runtime.request import Request
from specplug.runtime.scheduler import Row


class DeviceExecutor:
    """Runs steps on static buffers of one device, on one stream."""

    overlaps = True

    def __init__(
        self,
        model: TargetModel,
        pool: KVPool,
        drafting: Drafting | None,
        decider: Decider,
        statics: Statics,
        buckets: Buckets,
        backend: Backend,
        recorder: BucketRecorder | None,
    ) -> None:
        """`recorder`: what `drafting`'s callables were recorded with, None without a drafter."""
        self.drafting = drafting
        self._model = model
        self._pool = pool
        self._decider = decider
        self._statics = statics
        self._buckets = buckets
        self._backend = backend
        self._recorder = recorder
        self._kinds = backend.kinds(statics.sizes.trees)
        self._taps = drafting.plan.needs.taps if drafting else ()
        self._proposal = drafting.proposal if drafting else None
        out = drafting.started.out if drafting else None
        self._proposed = out if isinstance(out, HostProposal) else None  # where the host's drafts come from
        self._graphs: dict[tuple[Bucket, str], tuple[PlannedAttention, Callable[[], None]]] = {}
        self._state: dict[int, Any] = {}  # what a model without paged KV keeps per slot
        self._reports = Reports(
            statics.sizes.slots, decider.path.shape[1], statics.sizes.nodes if drafting else 0, statics.device
        )
        self._reader = DraftReader(self._proposal, statics.sizes.vocab, statics.device)
        # Two steps may be on their way, and one more is looked back at.
        self._marks = [StepMarks(*(Mark(statics.device, timed=True) for _ in range(3))) for _ in range(3)]
        self._turn = 0
        self._before: StepMarks | None = None
        self._asked = False  # drafts were asked for after the newest step

    # --- start ---------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run one empty step of each mask kind and every kernel of acceptance, so that all of them are compiled."""
        bucket = self._buckets.all[-1]
        host = prime(self._statics, bucket)
        rows = self._statics.rows(*bucket)
        for kind in self._kinds:
            attention = self._backend.prepare(rows, kind, static=False)
            attention.plan(host)
            logits = self._model.logits(self._forward(rows, attention))
        self._decider.warm_up(rows, logits)
        host.tree[:] = self._statics.sizes.trees
        self._decide((), Packed(None, *bucket, (), bucket.tokens, host), logits, logits.argmax(-1))

    def capture(self, capturer: Capturer, progress: Callable[[int, int], None]) -> None:
        """Record the forward of every bucket, largest first; `progress` is told how many of how many are done.

        What the model raises under capture goes to the caller, and nothing is recorded then.
        """
        wanted = [(bucket, kind) for bucket in self._buckets.all for kind in self._kinds]
        found: dict[tuple[Bucket, str], tuple[PlannedAttention, Callable[[], None]]] = {}
        for bucket, kind in wanted:
            host = prime(self._statics, bucket)
            rows = self._statics.rows(*bucket)
            attention = self._backend.prepare(rows, kind, static=True)
            attention.plan(host)
            found[bucket, kind] = attention, capturer.record(partial(self._bucket_forward, rows, attention))
            progress(len(found), len(wanted))
        self._graphs = found

    def recorded(self) -> Iterator[tuple[Bucket, Callable[[], None]]]:
        """Yield the recorded forwards of chains, each set to an empty step when it is yielded."""
        for (bucket, kind), (attention, replay) in self._graphs.items():
            host = prime(self._statics, bucket)
            if kind == self._backend.kind(host):
                attention.plan(host)
                yield bucket, replay

    def empty_draft(self, bucket: Bucket) -> None:
        """Have the drafter work on an empty step of the scratch slot, as deep as `Drafting.decision` says."""
        drafting = self._early()
        if drafting is None:
            return
        host = prime(self._statics, bucket)
        packed = Packed(bucket, *bucket, (), bucket.tokens, host)
        if not (drafting.decision.depth == 0 and drafting.plan.catch_up == "tokens"):
            drafting.hand(self._ready(drafting, packed), drafting.decision.depth > 0)

    @property
    def graphs(self) -> int:
        """Graphs of the target; 0: it runs eagerly."""
        return len(self._graphs)

    # --- one step ------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """See `Executor`."""
        self._decider.admit(request)

    def may_run_ahead(self, rows: Sequence[Row]) -> bool:
        """See `Executor`: not where drafts are to come or the host has a say, or log-probabilities are read."""
        if any(
            row.request.sampling.logprobs or row.request.grammar is not None or needs_host(row.request) for row in rows
        ):
            return False
        drafting = self.drafting
        if drafting is None or drafting.failed:
            return True
        return drafting.rests(rows) if drafting.on_host else not self._asked

    def launch(self, rows: Sequence[Row]) -> DeviceStep:
        """See `Executor`."""
        begin = perf_counter()
        drafting = self._early()
        rows = self._in_order(rows)
        wishes: list[Wish] = []
        if drafting is not None:
            drafting.decide(rows)
            drafting.catch_up(rows, self._late, self._most_late)
            drafting = self._early()
        if drafting is not None:
            wishes = [drafting.wish(row, row.start + len(row.tokens), row.start + row.q_len) for row in rows]
        packed = pack(self._statics, self._buckets, rows, wishes, self._proposed, padded=bool(self._graphs))
        marks = self._marks[self._turn]
        self._turn = (self._turn + 1) % len(self._marks)
        marks.begun.record()
        self._reader.send(rows)
        self._statics.inputs.upload()
        kind = self._kinds[0] if len(self._kinds) == 1 else self._backend.kind(packed.host)
        if packed.bucket is not None:
            attention, replay = self._graphs[packed.bucket, kind]
        else:
            attention = self._backend.prepare(self._statics.rows(packed.rows, packed.tokens), kind, static=False)
        attention.plan(packed.host)
        planned = perf_counter()
        if packed.bucket is not None:
            replay()
            logits, choice = self._statics.logits[: packed.tokens], self._statics.choice[: packed.tokens]
        else:
            logits, choice = self._eager_forward(rows, packed, attention)
        forwarded = perf_counter()
        report = self._decide(rows, packed, logits, choice, marks.decided)
        decided = perf_counter()
        self._asked = any(wish.cap for wish in wishes)
        if drafting is not None and not drafting.skips:
            self._draft(drafting, packed)
        marks.over.record()
        step = DeviceStep(self, rows, packed, wishes, report, marks, self._before)
        step.depth = drafting.decision.depth if drafting is not None else 0
        step.graph = packed.bucket is not None
        step.keep_logits(logits, packed.starts)
        step.seconds = {
            "plan": planned - begin,
            "forward": forwarded - planned,
            "accept": decided - forwarded,
            "draft": perf_counter() - decided,
        }
        self._before = marks
        return step

    def host_draft(self, rows: Sequence[Row], packed: Packed) -> int:
        """Have a drafter that waits for the host propose, after the host commit of `rows`; returns the depth wanted."""
        drafting = self.drafting
        if drafting is None or drafting.failed:
            return 0

        def ready() -> StepView:
            if self._looks_at_tensors():  # and may write KV to pages that were reserved a moment ago
                self._statics.pages.write(self._statics.pages.changed())
            return self._ready(drafting, packed)

        drafting.decide(rows)
        drafting.round(rows, ready, self._proposed)
        if self._looks_at_tensors() and self._before is not None:
            self._before.over.record()  # what was launched here is the device's work as well
        return drafting.decision.depth

    def forget(self, slot: int) -> None:
        """Drop what a model without paged KV keeps for `slot`."""
        self._state.pop(slot, None)

    # --- inside --------------------------------------------------------------------------------------------------

    def _early(self) -> Drafting | None:
        """Return the drafter that runs before the host commit, if there is one."""
        drafting = self.drafting
        return None if drafting is None or drafting.failed or drafting.on_host else drafting

    def _looks_at_tensors(self) -> bool:
        """Say whether there is a drafter that sees the device's side of a step."""
        drafting = self.drafting
        return drafting is not None and not drafting.failed and drafting.plan.needs.runs_on != {"host"}

    def _in_order(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Put chains before trees, which are attended apart; a plan that reads back learns its widths here."""
        drafting = self._early()
        if drafting is not None and drafting.plan.reads_back and any(row.drafted for row in rows):
            valid = drafting.proposal.num_valid.tolist()  # the wait that the plan declares
            rows = [row._replace(drafted=min(row.drafted, valid[row.slot])) for row in rows]
        if not self._statics.sizes.trees:
            return rows
        return sorted(rows, key=lambda row: may_branch(row, trees=True))

    def _prologue(self, rows: StepRows) -> None:
        given, statics = self._statics.inputs.device, self._statics
        at, page = given["pages"]
        statics.pages.tables.view(-1).index_copy_(0, at, page.int())
        proposal = self._proposal
        if proposal is not None and statics.sizes.host_drafts:
            proposal.tokens.index_copy_(0, rows.slots, given["draft_tokens"][: rows.rows])
            proposal.parents.index_copy_(0, rows.slots, given["draft_parents"][: rows.rows])
            proposal.num_valid.index_copy_(0, rows.slots, rows.drafted)
        prologue(rows, statics.prologue_inputs(rows.total), proposal)

    def _forward(self, rows: StepRows, attention: PlannedAttention, live: tuple[BatchRow, ...] = ()) -> Tensor:
        self._prologue(rows)
        attention.begin()
        hidden, taps = self._model(ForwardBatch(rows.tokens, rows.positions, attention, self._taps, live, self._state))
        for kept, tap in zip(self._statics.taps(rows.total), taps, strict=True):
            kept.copy_(tap)
        return hidden  # type: ignore[no-any-return]

    def _bucket_forward(self, rows: StepRows, attention: PlannedAttention) -> None:
        logits = self._model.logits(self._forward(rows, attention), out=self._statics.logits[: rows.total])
        torch.argmax(logits, -1, out=self._statics.choice[: rows.total])

    def _eager_forward(self, rows: Sequence[Row], packed: Packed, attention: PlannedAttention) -> tuple[Tensor, Tensor]:
        live = tuple(BatchRow(row.slot, row.start, row.q_len) for row in rows)
        hidden = self._forward(self._statics.rows(packed.rows, packed.tokens), attention, live)
        logits = self._model.logits(hidden[self._statics.inputs.device["wanted"][: packed.wanted]])
        return logits, logits.argmax(-1)

    def _decide(
        self, rows: Sequence[Row], packed: Packed, logits: Tensor, choice: Tensor, decided: Mark | None = None
    ) -> Report:
        """Accept, bring accepted KV into order, commit on the device, and send the report on its way."""
        statics, decider, count = self._statics, self._decider, packed.rows
        given = statics.given
        step = statics.rows(count, packed.tokens)
        decider.decide(step, rows, packed.starts, given["start"][:count], logits, choice, self._reader.read())
        verdicts = Verdicts(decider.accepted[:count], decider.path[:count], decider.token[:count])
        branched = statics.sizes.trees and bool(packed.host.tree.any())
        if branched:
            compact.move(self._pool, step, verdicts.accepted, verdicts.path)
        view = statics.view(count, packed.tokens)
        to = Committed(
            slots=step.slots,
            begin=step.begin,
            literals=given["literals"][:count],
            drafted=step.drafted,
            start=given["start"][:count],
            cap=given["cap"][:count],
            room=given["room"][:count],
            following=statics.inputs.device["following"][:count],
            roots=statics.roots,
            num_kept=view.num_kept,
            kv_len=view.kv_len,
            next_tokens=view.next_tokens,
            final=view.final,
            sampling=view.sampling,
            report=self._reports.device[:count],
        )
        commit(to, verdicts, decider.options, self._proposal)
        if branched and self._looks_at_tensors():
            kept_first(step, to.literals, verdicts.accepted, verdicts.path, view.taps, statics.spare)
        if decided is not None:
            decided.record()
        return self._reports.send(len(rows), decider.errors)

    def _draft(self, drafting: Drafting, packed: Packed) -> None:
        """Launch `ingest` and `propose`; rows that turn out to have ended are dropped after."""
        drafting.hand(self._ready(drafting, packed), self._asked)
        proposal = drafting.proposal
        torch.minimum(proposal.num_valid, proposal.limit, out=proposal.num_valid).clamp_(min=0)

    def _ready(self, drafting: Drafting, packed: Packed) -> StepView:
        """Return the committed step as the drafter sees it, its KV views and graphs set to it."""
        view = self._statics.view(packed.rows, packed.tokens)
        if self._looks_at_tensors():
            drafting.started.begin(self._statics.rows(packed.rows, packed.tokens), view.kv_len)
        view.depth = drafting.decision.depth
        assert self._recorder is not None
        self._recorder.bucket, self._recorder.rows = packed.bucket, packed.rows
        return view

    @property
    def _most_late(self) -> int:
        sizes = self._statics.sizes
        return sizes.tokens - sizes.slots * (1 + sizes.nodes)

    def _late(self, rows: Sequence[Row]) -> StepView:
        """Return the step of tokens that the drafter missed, as if they had just been committed."""
        statics, drafting = self._statics, self.drafting
        assert drafting is not None
        packed = pack(statics, self._buckets, rows, (), None, padded=bool(self._graphs))
        statics.inputs.upload()
        step = statics.rows(packed.rows, packed.tokens)
        self._prologue(step)
        count, given = packed.rows, statics.given
        view = self._ready(drafting, packed)
        begin_late(
            view,
            given["literals"][:count],
            given["begin"][:count],
            statics.inputs.device["following"][:count],
            statics.roots,
            self._decider.options,
        )
        if self._before is not None:
            self._before.over.record()
        return view
