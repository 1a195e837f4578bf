"""A drafter driven by hand, without an engine: known texts go in, proposals come out.

Every text is known to its end beforehand, so any history that leads to the same committed tokens can be
played (chunks, accepted drafts, rejected ones, preemption) and must lead to the same proposal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specplug.accept import Rule
from specplug.drafter import Drafter, HostRow, HostView, RequestView, SamplingView, StepView
from specplug.models.base import ForwardBatch
from specplug.models.target import Target
from specplug.planning import Run
from specplug.proposal import Proposal
from specplug.runtime.arena import DraftArena
from specplug.runtime.attention.torch import AttentionRow, TorchAttention
from specplug.runtime.context import EngineContext
from specplug.runtime.draft_kv import StepRows, scratch_rows
from specplug.runtime.kv import KVPool, PagePool
from specplug.runtime.sampler import sampling_view
from specplug.runtime.started import start
from specplug.sampling import SamplingParams
from specplug.spec import DraftPlan, Release

Drafts = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens and parents of one slot's proposal, cut to its limit; both empty when it declined."""

GREEDY = SamplingParams(temperature=0.0)

_PAGE = 4
_LONGEST = 128  # tokens of a text, scratch rows included


@dataclass(frozen=True, slots=True)
class Move:
    """What one forward did for a slot: `count` tokens of its text became final, `rejected` drafts did not."""

    slot: int
    count: int
    rejected: tuple[int, ...] = ()


@dataclass(slots=True)
class _Request:
    text: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    kv_len: int = 0
    handed: int = 0


class Harness:
    """One drafter, its proposal and its arena; slots are filled and moved by the caller."""

    def __init__(self, run: Run, target: Target, *, slots: int = 4, rule: Rule = "coupled") -> None:
        """Construct, load, allocate and capture the drafter of `run`, whose plan drafts at least one node."""
        assert run.plan is not None
        self.plan: DraftPlan = run.plan
        self.slots = slots
        self._target = target
        model = target.model
        self._on_host = "host" in run.plan.needs.runs_on
        context = EngineContext(run.facts, slots, torch.device("cpu"), torch.float32, model.vocab_size)
        self._pages = PagePool(slots, slots * _LONGEST // _PAGE, _PAGE, _LONGEST)
        self._pool = KVPool(model.kv_layers, self._pages.rows_with_trash, torch.float32, torch.device("cpu"))
        self._requests: dict[int, _Request] = {}
        self._admitted = 0
        self._started = start(run, model, context, rule, self._pages, self._pool)
        self.drafter: Drafter = self._started.drafter
        self.proposal: Proposal = self._started.proposal
        self.arena: DraftArena = self._started.arena

    def admit(
        self,
        slot: int,
        text: Sequence[int],
        prompt_len: int,
        sampling: SamplingParams = GREEDY,
        request_id: str | None = None,
    ) -> None:
        """Give `slot` to a request that will turn out to be `text`; its first `prompt_len` tokens are the prompt.

        `request_id`: a name to come back under after a preemption; None makes a new one.
        """
        self._admitted += 1
        self.proposal.reset(slot)
        self._requests[slot] = _Request(tuple(text), prompt_len, sampling)
        prompt, name = tuple(text[:prompt_len]), request_id or f"request-{self._admitted}"
        with torch.inference_mode():
            self.drafter.on_admit(RequestView(slot, name, prompt, sampling, None))

    def release(self, slot: int, reason: Release = "finished") -> None:
        """Take the request out of `slot`."""
        del self._requests[slot]
        with torch.inference_mode():
            self.drafter.on_release(slot, reason)
        self._pages.release(slot)

    def ingest(self, moves: Iterable[Move]) -> StepView:
        """Commit one forward over the slots of `moves`, in this row order, and hand it to the drafter."""
        moves = list(moves)
        with torch.inference_mode():
            step = self._step(moves)
            self.drafter.ingest(step)
        return step

    def propose(self, step: StepView, limits: Mapping[int, int] | None = None) -> dict[int, Drafts]:
        """Ask for drafts for the rows of `step`; `limits` by slot, default the plan's nodes."""
        slots = step.slots.tolist()
        limit_of = {slot: self.plan.nodes if limits is None else limits.get(slot, self.plan.nodes) for slot in slots}
        self.proposal.begin(
            {slot: limit_of[slot] if final else 0 for slot, final in zip(slots, step.final.tolist(), strict=True)}
        )
        if step.host is not None:
            rows = [
                HostRow(row.slot, row.new_tokens, row.seq_len, int(self.proposal.limit[row.slot]))
                for row in step.host.rows
            ]
            step.host = HostView(rows)
        with torch.inference_mode():
            self.drafter.propose(step, self._started.out)
            self.proposal.merge_host()
        return {slot: self.drafts(slot) for slot in slots}

    def drafts(self, slot: int) -> Drafts:
        """Return what the proposal holds for `slot`."""
        count = max(0, min(int(self.proposal.num_valid[slot]), int(self.proposal.limit[slot])))
        return tuple(self.proposal.tokens[slot, :count].tolist()), tuple(self.proposal.parents[slot, :count].tolist())

    def play(
        self,
        slot: int,
        text: Sequence[int],
        prompt_len: int,
        counts: Iterable[int],
        request_id: str | None = None,
    ) -> StepView:
        """Admit `text` into `slot` and commit it in forwards of `counts` tokens; returns the last step."""
        self.admit(slot, text, prompt_len, request_id=request_id)
        steps = [self.ingest([Move(slot, count)]) for count in counts]
        return steps[-1]

    def fresh(self, slot: int, text: Sequence[int], committed: int) -> Drafts:
        """Return the proposal after `committed` tokens in one forward: what every other history must equal."""
        step = self.play(slot, text, committed, [committed])
        drafts = self.propose(step)[slot]
        self.release(slot)
        return drafts

    # --- the step as the core would describe it -----------------------------------------------------------------

    def _step(self, moves: Sequence[Move]) -> StepView:
        requests = [self._requests[move.slot] for move in moves]
        starts = [request.kv_len for request in requests]
        tokens = [self._row(request, move) for request, move in zip(requests, moves, strict=True)]
        flat = torch.tensor([token for row in tokens for token in row])
        positions = torch.cat([torch.arange(at, at + len(row)) for at, row in zip(starts, tokens, strict=True)])
        taps = self._forward(moves, starts, tokens, flat, positions)
        following = torch.full((len(moves), self.plan.lookahead), -1)
        final, host_rows = [], []
        for at, (request, move) in enumerate(zip(requests, moves, strict=True)):
            request.kv_len += move.count
            final.append(request.kv_len >= request.prompt_len)
            known = request.text[request.kv_len :][: 1 if final[-1] else self.plan.lookahead]
            following[at, : len(known)] = torch.tensor(known)
            seen = request.kv_len + final[-1]
            host_rows.append(HostRow(move.slot, list(request.text[request.handed : seen]), seen, 0))
            request.handed = seen
        kv_len = [request.kv_len for request in requests]
        where = StepRows([move.slot for move in moves], starts, [len(row) for row in tokens], kv_len)
        self._started.begin(where)
        return StepView(
            slots=torch.tensor(where.slots),
            tokens=flat,
            positions=positions,
            row_start=torch.tensor([0, *where.q_len]).cumsum(0),
            num_kept=torch.tensor([move.count for move in moves]),
            kv_len=torch.tensor(kv_len),
            root=following[:, 0],
            next_tokens=following,
            final=torch.tensor(final),
            taps=taps,
            sampling=_sampling(requests),
            depth=self.plan.depth,
            host=HostView(host_rows) if self._on_host else None,
        )

    def _row(self, request: _Request, move: Move) -> list[int]:
        """Return the row's tokens, kept ones first; reserve pages for them and for the next proposal."""
        end = request.kv_len + move.count
        if move.count < 1 or end >= len(request.text):
            raise ValueError(f"{move} leaves no root: {request.kv_len} of {len(request.text)} tokens are committed")
        row = [*request.text[request.kv_len : end], *move.rejected]
        beyond = max(len(move.rejected), 1 + self.plan.nodes, scratch_rows(self.plan.kv))
        if not self._pages.reserve(move.slot, end + beyond):
            raise ValueError(f"a text of {end} tokens with {beyond} scratch rows does not fit into {_LONGEST}")
        return row

    def _forward(
        self,
        moves: Sequence[Move],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        flat: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the target where the plan looks into it; returns the taps and leaves its KV behind."""
        needs = self.plan.needs
        if not needs.taps and "reads_target" not in needs.draft_kv:
            return ()
        rows = [AttentionRow(move.slot, at, len(row)) for move, at, row in zip(moves, starts, tokens, strict=True)]
        attention = TorchAttention(rows, self._pages, self._pool)
        taps: tuple[Tensor, ...] = self._target.model(ForwardBatch(flat, positions, attention, needs.taps))[1]
        return taps


def _sampling(requests: Sequence[_Request]) -> SamplingView:
    options = [request.sampling for request in requests]
    return sampling_view(options, [option.seed or 0 for option in options], [0] * len(options))
