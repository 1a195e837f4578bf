"""The model that drafts: its KV follows the target's tokens, and each draft is one forward.

R rows and T tokens of the step, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specplug import (
    Arena,
    DraftContext,
    Drafter,
    DraftPlan,
    GraphRecorder,
    HostProposal,
    Proposal,
    StepView,
    TargetView,
)
from specplug_standalone import vocab
from specplug_standalone.config import StandaloneConfig
from specplug_standalone.plugin import mapped


class StandaloneDrafter(Drafter):
    """Drafts a chain with a language model of its own.

    `ingest` runs one forward over the step's tokens and the root together: the kept tokens' KV lands below `kv_len`
    for good, the root's in the first scratch row, and the root's state makes the first draft. A round of n drafts
    is so n forwards. Nothing is believed of an earlier round's scratch rows.
    """

    def __init__(self, config: StandaloneConfig, plan: DraftPlan, ctx: DraftContext) -> None:
        super().__init__(config, plan, ctx)
        self._pairs: list[tuple[int, int]] | None = None

    def load(self, target: TargetView) -> None:
        """Load the draft model, and compare vocabularies."""
        facts = self.ctx.facts
        assert facts.draft is not None
        self.model = self.ctx.model("draft")
        self._stand_in = vocab.stand_in(facts.draft.config, self.model.vocab_size)
        self._target_vocab = vocab.target_vocab(facts)
        self._ids = vocab.common(facts, self.model.vocab_size)
        if mapped(facts):
            self._pairs = vocab.shared(facts, self.model.vocab_size)

    def allocate(self, arena: Arena) -> None:
        """Declare how KV is read; take the roots' states [S+1, H] and the tables that translate ids."""
        kv = arena.draft_kv()
        self.rows = self.model.reading(kv, "rows", None)
        self.steps = [self.model.reading(kv, f"draft {node}", 1, offset=node) for node in range(self.plan.depth)]
        self.state = arena.per_slot("state", (self.model.hidden_size,), self.ctx.dtype)
        self.to_draft: Tensor | None = None
        """[V_target] draft id of each target id; None: the same."""
        self.columns: Tensor | None = None
        """[n] draft ids that may be proposed; None: the leading `_ids`."""
        self.ids: Tensor | None = None
        """[n] their target ids; None: the same, and all of them."""
        if self._pairs is not None:
            ours, theirs = torch.tensor(self._pairs).unbind(1)
            self.to_draft = arena.static("to draft", (self._target_vocab,), torch.int64, self._stand_in)
            self.columns = arena.static("draft ids", (len(theirs),), torch.int64)
            self.ids = arena.static("target ids", (len(ours),), torch.int64)
            self.columns.copy_(theirs)
            self.ids.copy_(ours)
            self.to_draft[self.ids] = self.columns
        elif self._ids < self._target_vocab:
            self.ids = arena.static("target ids", (self._ids,), torch.int64)
            self.ids.copy_(torch.arange(self._ids))

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both halves of a round; drafting once for each depth that may be wanted."""
        self._catch_up = graphs.record("catch up", self._read, over="rows_x_width")
        self._draft = graphs.record("draft", self._chain, variants=range(1, self.plan.depth + 1))

    def ingest(self, step: StepView) -> None:
        """Write the KV of the step's kept tokens and of the root, and keep the root's state."""
        self._catch_up(step, None, None)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Draft `step.depth` tokens for every row."""
        assert isinstance(out, Proposal)
        depth = min(step.depth, self.plan.depth)
        if depth > 0:
            self._draft(step, out, depth)

    def _read(self, step: StepView, out: Proposal | None, variant: Any) -> None:
        tokens = torch.cat((step.tokens, step.root.clamp_min(0)))  # a root that is not known yet is overwritten
        positions = torch.cat((step.positions, step.kv_len)).clamp_max(self.model.max_position - 1)
        # The root's row may be a rejected token's as well: it is written last.
        parts = (self.rows, None), (self.steps[0], step.kv_len[:, None])
        hidden = self.model.forward(self._translated(tokens), positions, *parts)
        self.state[step.slots] = hidden[len(step.tokens) :]

    def _chain(self, step: StepView, out: Proposal | None, depth: Any) -> None:
        assert out is not None
        hidden = self.state[step.slots]
        for node in range(depth):
            token = self._next(step, out, node, self.model.logits(hidden))
            if node + 1 < depth:
                index = step.kv_len + node + 1
                positions = index.clamp_max(self.model.max_position - 1)  # of drafts that nobody asked for
                part = self.steps[node + 1], index[:, None]
                hidden = self.model.forward(self._translated(token), positions, part)
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=depth)

    def _next(self, step: StepView, out: Proposal, node: int, logits: Tensor) -> Tensor:
        """Write `node` from its logits [R, V_draft]; returns target ids [R]."""
        logits = logits[:, : self._ids] if self.columns is None else logits.index_select(1, self.columns)
        if self.config.draft_sampling:
            return out.draw(step, node + 1, logits, self.ids)
        best = logits.argmax(-1)
        token = best if self.columns is None or self.ids is None else self.ids[best]
        out.tokens[step.slots, node] = token
        return token

    def _translated(self, tokens: Tensor) -> Tensor:
        """Return the draft's ids of target ids; what it does not have becomes one that it does."""
        if self.to_draft is not None:
            return self.to_draft[tokens]
        if self._target_vocab <= self.model.vocab_size:
            return tokens
        return torch.where(tokens < self.model.vocab_size, tokens, self._stand_in)
