"""The core step: one target forward, acceptance, commit, and the drafts for the next one.

schedule -> forward -> accept -> device commit -> host commit -> ingest -> propose. This first version
runs the host commit in line, before `ingest`; the order of a drafter's calls stays the same when it
moves behind it.
"""

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
from specplug.models.base import BatchRow, ForwardBatch, TargetModel
from specplug.runtime.attention.torch import AttentionRow, TorchAttention
from specplug.runtime.draft_kv import StepRows
from specplug.runtime.drafting import Drafting, DraftingRow
from specplug.runtime.kv import KVPool, PagePool
from specplug.runtime.logprobs import TokenLogprob, token_logprobs
from specplug.runtime.request import Request
from specplug.runtime.sampler import sampling_view
from specplug.runtime.scheduler import Row
from specplug.spec import StepStats


class StepRunner:
    """Runs steps over scheduled rows. Owns no queue; requests are changed here and nowhere else in a step."""

    def __init__(
        self,
        model: TargetModel,
        pages: PagePool,
        pool: KVPool,
        drafting: Drafting | None,
        rule: Rule,
        max_tokens: int,
    ) -> None:
        """`max_tokens`: most tokens of a request, prompt and output."""
        self._model = model
        self._pages = pages
        self._pool = pool
        self._drafting = drafting
        self._rule = rule
        self._max_tokens = max_tokens
        self._state: dict[int, Any] = {}  # what a model without paged KV keeps per slot

    def run(self, rows: Sequence[Row]) -> StepStats:
        """Run one step over `rows` (at least one) and commit it; whether the drafter failed, `Drafting` knows."""
        begin = perf_counter()
        tokens, positions, row_start = self._inputs(rows)
        attention = TorchAttention([_attention_row(row) for row in rows], self._pages, self._pool)
        planned = perf_counter()
        taps = self._drafting.plan.needs.taps if self._drafting else ()
        parts = tuple(BatchRow(row.request.slot, row.start, row.q_len) for row in rows)
        hidden, tapped = self._model(ForwardBatch(tokens, positions, attention, taps, parts, self._state))
        verify, logit_rows = _to_decide(rows, row_start)
        logits = self._model.logits(hidden if len(logit_rows) == len(hidden) else hidden[logit_rows])
        forwarded = perf_counter()
        decided = iter(accept(self._rule, logits, verify))
        verdicts = [next(decided) if row.final else None for row in rows]
        entries = iter([_logprobs(row, v, logits) for row, v in zip(verify, filter(None, verdicts), strict=True)])
        accepted = perf_counter()
        self._compact(rows, verdicts)
        emitted = [_commit(row, v, next(entries) if v else []) for row, v in zip(rows, verdicts, strict=True)]
        for row in rows:  # what was aborted or preempted is dropped when its slot begins anew
            if row.request.output.finish_reason is not None:
                self._state.pop(row.request.slot, None)
        committed = perf_counter()
        seconds = {
            "plan": planned - begin,
            "forward": forwarded - planned,
            "accept": accepted - forwarded,
            "commit": committed - accepted,
        }
        if self._drafting and not self._drafting.failed:
            step = self._view(rows, verdicts, tokens, positions, row_start, tapped)
            self._drafting.run(step, _where(rows), [self._drafting_row(row) for row in rows])
            seconds["draft"] = perf_counter() - committed
        outcomes = [(row, v, kept) for row, v, kept in zip(rows, verdicts, emitted, strict=True) if v]
        return StepStats(
            rows=len(rows),
            tokens=len(tokens),
            drafted=sum(len(row.draft.tokens) for row in rows if row.draft),
            accepted=sum(min(len(verdict.path), kept) for _, verdict, kept in outcomes),
            emitted=sum(emitted),
            depth=self._drafting.plan.depth if self._drafting else 0,
            drafted_rows=sum(row.draft is not None for row in rows),
            first_accepted=sum(bool(verdict.path) for _, verdict, _ in outcomes),
            seconds=seconds,
        )

    def _inputs(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, np.ndarray]:
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

    def _compact(self, rows: Sequence[Row], verdicts: Sequence[Verdict | None]) -> None:
        """Bring the KV of accepted paths that are not leading nodes into sequence order."""
        source, target = [], []
        for row, verdict in zip(rows, verdicts, strict=True):
            if verdict and not verdict.in_order:
                slots = self._pages.rows(row.request.slot, row.start + 1, row.start + row.q_len)
                source.append(slots[list(verdict.path)])
                target.append(slots[: len(verdict.path)])
        if source:
            self._pool.move(np.concatenate(source), np.concatenate(target))

    def _drafting_row(self, row: Row) -> DraftingRow:
        """Say how many drafts the row may have next, and reserve their pages."""
        assert self._drafting is not None
        request, plan = row.request, self._drafting.plan
        if not row.final or request.output.finish_reason is not None:
            return DraftingRow(request, row.final, 0)
        limit = plan.nodes if request.max_drafted is None else min(plan.nodes, request.max_drafted)
        # A verify emits its accepted drafts and one token more.
        limit = min(limit, request.output.most - len(request.output.ids) - 1)
        limit = min(limit, self._max_tokens - len(request.tokens) - 1)
        if plan.max_position is not None:
            limit = min(limit, plan.max_position - request.kv_len)
        if limit > 0 and not self._pages.reserve(request.slot, request.kv_len + self._drafting.rows_beyond(limit)):
            limit = 0
        return DraftingRow(request, row.final, max(limit, 0))

    def _view(
        self,
        rows: Sequence[Row],
        verdicts: Sequence[Verdict | None],
        tokens: Tensor,
        positions: Tensor,
        row_start: np.ndarray,
        taps: tuple[Tensor, ...],
    ) -> StepView:
        assert self._drafting is not None
        plan = self._drafting.plan
        num_kept = np.zeros(len(rows), dtype=np.int64)
        following = np.full((len(rows), plan.lookahead), -1, dtype=np.int64)
        kv_len = np.zeros(len(rows), dtype=np.int64)
        order: list[int] | None = None
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
            slots=torch.tensor([row.request.slot for row in rows]),
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
            depth=plan.depth,
            host=None,
        )


def _where(rows: Sequence[Row]) -> StepRows:
    return StepRows(
        slots=[row.request.slot for row in rows],
        begin=[row.start for row in rows],
        q_len=[row.q_len for row in rows],
        kv_len=[row.request.kv_len for row in rows],
    )


def _attention_row(row: Row) -> AttentionRow:
    parents = row.draft.parents if row.draft and not tree.is_chain(row.draft.parents) else None
    return AttentionRow(row.request.slot, row.start, row.q_len, parents)


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


def _commit(row: Row, verdict: Verdict | None, logprobs: Sequence[TokenLogprob]) -> int:
    """Apply one row's outcome to its request: lengths, output, stop rules, ledger.

    Returns how many of the row's own tokens are output; a stop string may take back earlier ones too.
    """
    request = row.request
    decoding = bool(request.output.ids) and len(row.tokens) == 1
    request.draft = None
    if verdict is None:
        request.kv_len = row.start + len(row.tokens)
        request.ledger.prefill_forwards += 1
        return 0
    request.kv_len = row.start + len(row.tokens) + len(verdict.path)
    tokens = [row.draft.tokens[node] for node in verdict.path] if row.draft else []
    if not verdict.error:
        tokens.append(verdict.token)
    before = len(request.output.ids)
    for at, token in enumerate(tokens):
        request.tokens.append(token)
        request.depths.append(at + 1 if at < len(verdict.path) else 0)
        if request.processors:
            request.processors.commit(token)
        if not request.output.commit(token, logprobs[at] if logprobs else None):
            break
    else:
        if verdict.error:  # unless a stop rule ended the answer before
            request.error = verdict.error
            request.output.end("error")
    kept = max(0, len(request.output.ids) - before)
    if decoding:
        _count(request, row, verdict, kept)
    else:
        request.ledger.prefill_forwards += 1
        request.ledger.returned += kept if before else 0
    return kept


def _count(request: Request, row: Row, verdict: Verdict, kept: int) -> None:
    if not row.draft:
        request.ledger.add_round(0, 0, 0)
        return
    levels = tree.depths(row.draft.parents)
    if kept <= len(verdict.path):  # cut: what lies beyond the answer's end was never compared
        levels = [depth for depth in levels if depth <= kept]
    # The walk compared one level below what it accepted, if drafts stood there and the answer went on.
    stood_below = any(parent == (verdict.path[-1] if verdict.path else -1) for parent in row.draft.parents)
    reached = len(verdict.path) + stood_below
    request.ledger.add_round(len(levels), max(levels, default=0), min(reached, kept))


def _sampling(requests: Sequence[Request]) -> SamplingView:
    return sampling_view(
        [request.sampling for request in requests],
        [request.seed for request in requests],
        [request.choice for request in requests],
    )
