"""The CPU's executor: everything a step needs is at hand, so it is decided as it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specplug import tree
from specplug.accept import Rule, Verdict, VerifyRow, accept
from specplug.drafter import SamplingView, StepView
from specplug.grammar.masks import allowed
from specplug.models.base import BatchRow, ForwardBatch, TargetModel
from specplug.proposal import HostProposal
from specplug.runtime.attention.torch import AttentionRow, TorchAttention
from specplug.runtime.commit import Outcome
from specplug.runtime.draft_kv import StepRows
from specplug.runtime.drafting import Drafting
from specplug.runtime.kv import KVPool, PagePool
from specplug.runtime.logprobs import TokenLogprob, token_logprobs
from specplug.runtime.request import Request
from specplug.runtime.sampler import sampling_view
from specplug.runtime.scheduler import Row

LATE = 512
"""Most tokens that a drafter which missed some is handed at once."""


class HostExecutor:
    """Runs steps in plain torch on the CPU, one after the other."""

    overlaps = False

    def __init__(
        self, model: TargetModel, pages: PagePool, pool: KVPool, drafting: Drafting | None, rule: Rule, mean: float
    ) -> None:
        """`mean`: tokens a verify is made to emit on average, for the rule that only measures cost."""
        self._model = model
        self._pages = pages
        self._pool = pool
        self._drafting = drafting
        # On a CPU both sides of a proposal are one memory, whoever writes it.
        self._proposed = HostProposal(drafting.proposal) if drafting else None
        self._rule: Rule = rule
        self._mean = mean
        self._state: dict[int, Any] = {}  # what a model without paged KV keeps per slot
        self._drafted: float | None = None  # seconds that drafting took after the newest step

    def admit(self, request: Request) -> None:
        """Nothing is kept per request; what a slot held before is dropped when a row begins it anew."""

    def may_run_ahead(self, rows: Sequence[Row]) -> bool:
        """A step is over before the next one could begin."""
        return False

    def launch(self, rows: Sequence[Row]) -> HostStep:
        """Run the forward, decide every row and bring accepted KV into order."""
        begin = perf_counter()
        step = HostStep(self, rows, self._drafted)
        tokens, positions, row_start = step.tokens, step.positions, step.row_start
        attention = TorchAttention([_attention_row(row) for row in rows], self._pages, self._pool)
        planned = perf_counter()
        taps = self._drafting.plan.needs.taps if self._drafting else ()
        parts = tuple(BatchRow(row.slot, row.start, row.q_len) for row in rows)
        hidden, step.taps = self._model(ForwardBatch(tokens, positions, attention, taps, parts, self._state))
        verify, logit_rows = _to_decide(rows, row_start)
        logits = self._model.logits(hidden if len(logit_rows) == len(hidden) else hidden[logit_rows])
        forwarded = perf_counter()
        grammars = [row.request.grammar for row in rows if row.final]
        mask = allowed([(g, v.tokens, v.parents) for g, v in zip(grammars, verify, strict=True)], logits.shape[1])
        decided = iter(accept(self._rule, logits, verify, mask, mean=self._mean))
        step.verdicts = [next(decided) if row.final else None for row in rows]
        entries = iter([_logprobs(row, v, logits) for row, v in zip(verify, filter(None, step.verdicts), strict=True)])
        step.logprobs = [next(entries) if verdict else [] for verdict in step.verdicts]
        self._compact(rows, step.verdicts)
        step.seconds = {
            "plan": planned - begin,
            "forward": forwarded - planned,
            "accept": perf_counter() - forwarded,
        }
        return step

    def _compact(self, rows: Sequence[Row], verdicts: Sequence[Verdict | None]) -> None:
        """Bring the KV of accepted paths that are not leading nodes into sequence order."""
        source, target = [], []
        for row, verdict in zip(rows, verdicts, strict=True):
            if verdict and not verdict.in_order:
                slots = self._pages.rows(row.slot, row.start + 1, row.start + row.q_len)
                source.append(slots[list(verdict.path)])
                target.append(slots[: len(verdict.path)])
        if source:
            self._pool.move(np.concatenate(source), np.concatenate(target))

    def draft(self, step: HostStep) -> None:
        """Hand a committed step to the drafter and keep what it proposes."""
        for row in step.rows:  # what was aborted or preempted is dropped when its slot begins anew
            if row.request.output.finish_reason is not None:
                self._state.pop(row.slot, None)
        drafting = self._drafting
        if drafting is None or drafting.failed:
            return

        def ready() -> StepView:
            drafting.started.begin(_where(step.rows))
            return self._view(step)

        def late(rows: Sequence[Row]) -> StepView:
            ends = [row.start + len(row.tokens) for row in rows]
            drafting.started.begin(_where(rows, ends))
            return self._view(HostStep(self, rows))

        begin = perf_counter()
        drafting.learn()
        drafting.decide(step.rows)
        step.depth = drafting.decision.depth
        drafting.catch_up(step.rows, late, LATE)
        if not drafting.failed:
            drafting.round(step.rows, ready, self._proposed)
        self._drafted = perf_counter() - begin

    def _view(self, step: HostStep) -> StepView:
        assert self._drafting is not None
        plan, rows = self._drafting.plan, step.rows
        tokens, positions, taps, row_start = step.tokens, step.positions, step.taps, step.row_start
        num_kept = np.zeros(len(rows), dtype=np.int64)
        following = np.full((len(rows), plan.lookahead), -1, dtype=np.int64)
        kv_len = np.zeros(len(rows), dtype=np.int64)
        order: list[int] | None = None
        verdicts = step.verdicts or [None] * len(rows)
        for at, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
            path = verdict.path if verdict else ()
            num_kept[at] = len(row.tokens) + len(path)
            kv_len[at] = row.start + num_kept[at]
            if verdict:
                following[at, 0] = verdict.token
            else:
                known = row.request.tokens[int(kv_len[at]) :][: plan.lookahead]
                following[at, : len(known)] = known
            if verdict and not verdict.in_order:
                order = list(range(len(tokens))) if order is None else order
                first = int(row_start[at]) + len(row.tokens)
                rest = sorted(set(range(row.q_len - len(row.tokens))) - set(path))
                order[first : int(row_start[at + 1])] = [first + node for node in (*path, *rest)]
        if order is not None:
            tokens, positions = tokens[order], positions[order]
            taps = tuple(tap[order] for tap in taps)
        next_tokens = torch.from_numpy(following)
        return StepView(
            slots=torch.tensor([row.slot for row in rows]),
            tokens=tokens,
            positions=positions,
            row_start=torch.from_numpy(row_start),
            num_kept=torch.from_numpy(num_kept),
            kv_len=torch.from_numpy(kv_len),
            root=next_tokens[:, 0],
            next_tokens=next_tokens,
            final=torch.tensor([row.final for row in rows]),
            taps=taps,
            sampling=_sampling([row.request for row in rows]),
            depth=self._drafting.decision.depth,
            host=None,
        )


class HostStep:
    """A step that has run. What is not said by `Launched` is the executor's own."""

    graph = None

    def __init__(self, executor: HostExecutor, rows: Sequence[Row], drafted: float | None = None) -> None:
        """`drafted`: seconds that drafting took after the step before."""
        self.rows = rows
        self.depth = 0
        self._drafted = drafted
        self.tokens, self.positions, self.row_start = _inputs(rows)
        self.taps: tuple[Tensor, ...] = ()
        self.verdicts: Sequence[Verdict | None] = ()
        self.logprobs: Sequence[Sequence[TokenLogprob]] = ()
        self.seconds: dict[str, float] = {}
        self._executor = executor

    def outcomes(self) -> list[Outcome | None]:
        """See `Launched`."""
        return [
            None if verdict is None else Outcome(verdict, row.draft, logprobs)
            for row, verdict, logprobs in zip(self.rows, self.verdicts, self.logprobs, strict=True)
        ]

    def draft(self) -> None:
        """See `Launched`."""
        self._executor.draft(self)

    def exposed(self) -> None:
        """See `Launched`."""

    def took(self) -> tuple[float | None, float | None]:
        """See `Launched`."""
        return sum(self.seconds.values()), self._drafted


def _inputs(rows: Sequence[Row]) -> tuple[Tensor, Tensor, np.ndarray]:
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    for row in rows:
        tokens += row.tokens
        positions += range(row.start, row.start + len(row.tokens))
        if row.draft:
            tokens += row.draft.tokens
            positions += [row.start + depth for depth in tree.depths(row.draft.parents)]
        starts.append(len(tokens))
    return torch.tensor(tokens), torch.tensor(positions), np.array(starts)


def _where(rows: Sequence[Row], ends: Sequence[int] | None = None) -> StepRows:
    return StepRows(
        slots=[row.slot for row in rows],
        begin=[row.start for row in rows],
        q_len=[row.q_len for row in rows],
        kv_len=list(ends) if ends is not None else [row.request.kv_len for row in rows],
    )


def _attention_row(row: Row) -> AttentionRow:
    parents = row.draft.parents if row.draft and not tree.is_chain(row.draft.parents) else None
    return AttentionRow(row.slot, row.start, row.q_len, parents)


def _to_decide(rows: Sequence[Row], row_start: np.ndarray) -> tuple[list[VerifyRow], list[int]]:
    """Return the rows that end in a sampled token, and the hidden states whose logits they need."""
    verify: list[VerifyRow] = []
    wanted: list[int] = []
    for row, start in zip(rows, row_start.tolist(), strict=False):
        if not row.final:
            continue
        request, last = row.request, len(row.tokens) - 1
        verify.append(
            VerifyRow(
                start=len(wanted),
                root_index=row.start + last,
                sampling=request.sampling,
                seed=request.seed,
                choice=request.choice,
                tokens=row.draft.tokens if row.draft else (),
                parents=row.draft.parents if row.draft else (),
                q=row.draft.q if row.draft else None,
                processors=request.processors if request.processors and request.processors.active else None,
            )
        )
        wanted += range(start + last, start + row.q_len)
    return verify, wanted


def _logprobs(row: VerifyRow, verdict: Verdict, logits: Tensor) -> list[TokenLogprob]:
    """Return an entry for each token of the verdict, of the raw logits; none where they are not asked for."""
    if not row.sampling.logprobs:
        return []
    tokens = [row.tokens[node] for node in verdict.path]
    nodes = [-1, *verdict.path]
    if verdict.error:
        nodes.pop()
    else:
        tokens.append(verdict.token)
    return token_logprobs(logits[[row.start + 1 + node for node in nodes]], tokens, row.sampling.top_logprobs)


def _sampling(requests: Sequence[Request]) -> SamplingView:
    return sampling_view(
        [request.sampling for request in requests],
        [request.seed for request in requests],
        [request.choice for request in requests],
    )
