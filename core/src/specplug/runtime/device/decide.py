"""Acceptance on the device: which drafts of a step become output, and the token that follows them.

`specplug.accept` for tensors. Greedy rows need nothing but the walk, because the argmax of every logits row
is given. For rows that are sampled, or whose options change logits, the choices are made anew first; under
`rejection` sampled rows are decided by `specplug.runtime.device.rejection` instead. Nothing here waits for
the device, except for rows with a custom logits processor, which is Python: they are decided on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from specplug import tree
from specplug.accept import Rule, VerifyRow, accept
from specplug.drafter import SamplingView
from specplug.grammar.masks import Looked, fill, forbid, unpacked
from specplug.proposal import Proposal
from specplug.runtime.device.noise import gumbel_argmax, gumbel_rows, uniform_rows
from specplug.runtime.device.penalties import Penalties, apply_edits
from specplug.runtime.device.rejection import RejectionRows, reject
from specplug.runtime.device.rows import StepRows
from specplug.runtime.device.sampling import Filters, SlotOptions, filtered
from specplug.runtime.device.upload import upload
from specplug.runtime.device.walk import Drafts, Walked, lineage, walk
from specplug.runtime.device.work import LiveRow, Work, WorkRow, is_plain, needs_host, plan_work
from specplug.runtime.request import Draft, Request

NO_DRAFTS: Mapping[int, Draft] = MappingProxyType({})
"""Of a step in which nobody with a grammar has any."""


class Decider:
    """Decides steps, and keeps what that needs to know of every slot."""

    def __init__(
        self,
        rule: Rule,
        slots: int,
        vocab: int,
        proposal: Proposal | None,
        *,
        rows: int,
        nodes: int,
        depth: int,
        device: torch.device,
        mean: float = 0.0,
    ) -> None:
        """`rows`: most rows of a step; `nodes`, `depth`: the plan's, 0 without drafts; `mean`: see `accept`."""
        self.accepted = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows] int64: drafts accepted; 0 for rows that are not decided. Set by `decide`, as the next two."""
        self.path = torch.full((rows, max(depth, 1)), -1, dtype=torch.int64, device=device)
        """[rows, D] int64: the accepted nodes from the root downwards, -1 padded."""
        self.token = torch.full((rows,), -1, dtype=torch.int64, device=device)
        """[rows] int64: the token that follows; -1: none could be chosen, or the row is not decided."""
        self.errors: dict[int, str] = {}
        """Row of the last step -> why no token could be chosen, of rows that were decided on the host."""
        self._rule: Rule = rule
        self._mean = mean
        self._device = device
        self._proposal = proposal if nodes else None
        if self._proposal is None:
            tokens = torch.zeros(slots + 1, 1, dtype=torch.int64, device=device)
            parents, valid = tokens - 1, torch.zeros(slots + 1, dtype=torch.int64, device=device)
        else:
            tokens, parents, valid = self._proposal.tokens, self._proposal.parents, self._proposal.num_valid
        self._drafts = Drafts(tokens, parents, valid, vocab, max(depth, 1))
        self._options = SlotOptions(slots, device)
        self._penalties = Penalties(slots, vocab, device)

    def admit(self, request: Request) -> None:
        """A request got a slot, for the first time or again: `request.tokens` is its whole text. Does not wait."""
        sampling = request.sampling
        self._options.set(
            request.slot,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=request.seed,
            choice=request.choice,
        )
        # Whoever is edited is penalised together with the others, if only by nothing.
        if (request.processors is not None or request.grammar is not None) and not needs_host(request):
            self._penalties.admit(request)

    def warm_up(self, rows: StepRows, logits: Tensor) -> None:
        """Run every kernel that some request may need, so that none is compiled while serving.

        `rows`: at least one, any; `logits` float32 [M, V], M > 0. Nothing that is read later is changed.
        """
        slots = rows.slots[:1]
        zero = torch.zeros_like(slots)
        options = self._options.view(slots)
        heat = torch.ones_like(options.temperature)
        key = (options.seed, options.choice, zero)
        lead = self._lead(rows)[:1] if self._rule == "synthetic" else None
        gumbel_argmax(logits[:1], *key, "target")
        gumbel_argmax(logits[:1], *key, "target", temperature=heat)
        gumbel_argmax(logits[:1], *key, "target", temperature=heat, rows=zero)
        gumbel_rows(*key, "target", self._drafts.vocab, wanted=heat > 0)
        for source in (None, zero):
            filtered(logits[:1], heat, options.top_k, options.top_p, options.min_p, Filters(True, True, True), source)
        uniform_rows(options.seed, options.choice, zero, "coin", 1, zero)
        forbid(logits[:1].clone(), zero, torch.full((1, -(-self._drafts.vocab // 64)), -1, device=self._device))
        self._penalties.warm_up(logits[:1], lineage(zero, slots, self._drafts)[1])
        walk(zero, zero, zero, slots, self._drafts, lead)

    @property
    def options(self) -> SamplingView:
        """The sampling options of all slots, [S+1] each, on the device; a greedy slot's temperature is 0."""
        return self._options.every

    def view(self, slots: Tensor) -> SamplingView:
        """Return the sampling options of `slots` int64 [R]."""
        return self._options.view(slots)

    def decide(
        self,
        rows: StepRows,
        live: Sequence[LiveRow],
        starts: Sequence[int],
        start: Tensor,
        logits: Tensor,
        choice: Tensor,
        drafts: Mapping[int, Draft] = NO_DRAFTS,
    ) -> None:
        """Decide a step: write `accepted`, `path` and `token` for its rows, and count what became output.

        `live` are the step's first rows as the host knows them and `starts` their logits rows, -1 = not
        decided; `start` int64 [R] is the same on the device, pads included. `logits` float32 [M, V], `choice`
        int64 [M]: the argmax of each, the lowest id of equal ones. Both stay as they are.

        `drafts`: row -> the drafts that exist of it, for rows that have a grammar and some drafts; such rows must
        have seen every token that was committed.

        Rows with a custom logits processor make the host wait, and their processors must have seen every
        token that was committed. Where those fail `errors` says why.
        """
        self.errors = {}
        found = enumerate(zip(live, starts, strict=True))
        decided = [WorkRow(at, row, own) for at, (row, own) in found if own >= 0 and not is_plain(row.request)]
        masks = _masks([row for row in decided if row.live.request.grammar is not None], drafts)
        work = plan_work(decided, self._drafts.vocab, self._device, masks)
        rejected: Walked | None = None
        if work is not None:
            choice, rejected = self._choose(work, logits, choice)
        lead = self._lead(rows) if self._rule == "synthetic" else None
        count = rows.rows
        outcome = Walked(self.accepted[:count], self.path[:count], self.token[:count])
        walk(choice, start, rows.drafted, rows.slots, self._drafts, lead, outcome)
        if work is not None and rejected is not None:
            for static, part in zip((self.accepted, self.path, self.token), rejected, strict=True):
                static.index_copy_(0, work.row_at, part)
        custom = [row for row in decided if row.custom]
        if custom:
            self._on_host(custom, logits, masks)
        if work is not None and work.counting:
            self._count(work)

    def _choose(self, work: Work, logits: Tensor, choice: Tensor) -> tuple[Tensor, Walked | None]:
        """Choose anew at the positions of `work`.

        Returns the choices at all logits rows, and under `rejection` what its sampled rows came to.
        """
        total, edited, greedy = len(work.node), work.edited, work.greedy
        depth, above = lineage(work.node, work.slot, self._drafts)
        blocked = torch.zeros(total, dtype=torch.bool, device=self._device)
        if edited:
            values = logits[work.source]
            front = values[:edited]
            forbid(front, work.mask_at, work.masks)
            if work.counting:
                self._penalties.penalise(front, work.slot[:edited], above[:edited])
            apply_edits(front, depth[:edited], work.edits)
            blocked[:edited] = ~torch.isfinite(front.amax(1))
            drawn, source = values[greedy:], None
            chosen = [values[:greedy].argmax(1)]
        else:
            drawn, source = logits, work.source
            chosen = []
        rejected = None
        if greedy < total:
            options = self._options.view(work.slot[greedy:])
            keys = (options.seed, options.choice, (work.root_index + depth + 1)[greedy:])
            heat: Tensor | None = options.temperature
            if work.use.any or self._rule == "rejection":
                filters = (options.top_k, options.top_p, options.min_p, work.use)
                drawn, source, heat = filtered(drawn, options.temperature, *filters, source), None, None
            if self._rule == "rejection":
                rejected = self._reject(work, torch.softmax(drawn, 1), blocked[greedy:])
                chosen.append(choice[work.source[greedy:]])  # not read
            else:
                chosen.append(gumbel_argmax(drawn, *keys, "target", rows=source, temperature=heat))
        anew = torch.where(blocked, -1, torch.cat(chosen))
        return choice.index_copy(0, work.source, anew), rejected

    def _reject(self, work: Work, probs: Tensor, blocked: Tensor) -> Walked:
        sampling = self._options.view(work.row_slot)
        rows = RejectionRows(
            work.row_slot, work.row_drafted, work.row_first, work.row_index, sampling.seed, sampling.choice
        )
        proposal = self._proposal
        q, dense = (None, None) if proposal is None else (proposal.q, proposal.dense)
        return reject(rows, probs, blocked, self._drafts, q, dense, work.drafted)

    def _lead(self, rows: StepRows) -> Tensor:
        """Return how many drafts of each row `synthetic` accepts; a row that has drafts begins with its root."""
        whole = int(self._mean)
        sampling = self._options.view(rows.slots)
        coin = uniform_rows(sampling.seed, sampling.choice, rows.begin, "coin", 1)[:, 0]
        return whole - 1 + (coin < self._mean - whole).long()

    def _count(self, work: Work) -> None:
        path = self.path[work.count_at]
        drafts = self._drafts.tokens[work.count_slot[:, None], path.clamp_min(0)]
        tokens = torch.cat((torch.where(path >= 0, drafts, -1), self.token[work.count_at, None]), 1)
        self._penalties.commit(work.count_slot, tokens)

    def _on_host(self, custom: Sequence[WorkRow], logits: Tensor, masks: Mapping[int, np.ndarray]) -> None:
        """Decide rows with custom processors by `specplug.accept`."""
        outcomes = np.full((len(custom), 2 + self.path.shape[1]), -1, dtype=np.int64)
        for row, outcome in zip(custom, outcomes, strict=True):
            drafts, parents, q = self._drafts_of(row)
            request = row.live.request
            (verdict,) = accept(
                self._rule,
                logits[row.start : row.start + 1 + len(drafts)].cpu(),
                [
                    VerifyRow(
                        start=0,
                        root_index=row.root_index,
                        sampling=request.sampling,
                        seed=request.seed,
                        choice=request.choice,
                        tokens=drafts,
                        parents=parents,
                        q=q,
                        processors=request.processors,
                    )
                ],
                unpacked(masks[row.at][: 1 + len(drafts)], self._drafts.vocab) if row.at in masks else None,
                mean=self._mean,
            )
            if verdict.error:
                self.errors[row.at] = verdict.error
            outcome[0] = len(verdict.path)
            outcome[1] = -1 if verdict.error else verdict.token
            outcome[2 : 2 + len(verdict.path)] = verdict.path
        at, made = upload([np.array([row.at for row in custom], dtype=np.int64), outcomes], self._device)
        self.accepted.index_copy_(0, at, made[:, 0])
        self.token.index_copy_(0, at, made[:, 1])
        self.path.index_copy_(0, at, made[:, 2:])

    def _drafts_of(self, row: WorkRow) -> tuple[list[int], list[int], Tensor | None]:
        """Return the drafts of a row that exist, on the host, with what they were drawn from where it matters."""
        proposal, slot = self._proposal, row.live.slot
        if proposal is None or not row.live.drafted:
            return [], [], None
        count = min(row.live.drafted, int(proposal.num_valid[slot]))
        tokens: list[int] = proposal.tokens[slot, :count].tolist()
        parents: list[int] = proposal.parents[slot, :count].tolist()
        count = tree.valid_prefix(tokens, parents, self._drafts.vocab)
        deep = (node for node, depth in enumerate(tree.depths(parents[:count])) if depth > self._drafts.depth)
        count = next(deep, count)  # the static outputs hold no longer path
        q = proposal.q[slot, :count].cpu() if proposal.q is not None and bool(proposal.dense[slot]) else None
        return tokens[:count], parents[:count], q


def _masks(rows: Sequence[WorkRow], drafts: Mapping[int, Draft]) -> dict[int, np.ndarray]:
    """Return what the grammars of `rows`, which all have one, allow: row -> int32 [1 + drafted, words]."""
    looked: list[Looked] = []
    for row in rows:
        grammar, draft = row.live.request.grammar, drafts.get(row.at)
        assert grammar is not None
        looked.append(Looked(grammar, draft.tokens if draft else (), draft.parents if draft else ()))
    sizes = [1 + row.live.drafted for row in rows]
    parts = np.split(fill(looked, sizes), np.cumsum(sizes)[:-1]) if rows else []
    return {row.at: part for row, part in zip(rows, parts, strict=True)}
