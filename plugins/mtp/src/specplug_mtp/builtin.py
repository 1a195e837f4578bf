"""Drafting with MTP heads over KV of their own.

R rows and T tokens of the step, H hidden size, n heads in use, K = `kv_len`: token index of the root.

Row i of head k pairs a state with the token t_{i+1+k} and stands at position i; its output predicts t_{i+2+k}. The
state is the target's, h_i; for k > 0 the output of the head before at row i (DeepSeek-V3, arXiv 2412.19437, section
2.2), or h_i again, as `mtp_depth_input` says. A step that makes t_j final and t_{j+1} known makes row j - k of head k
final: `ingest` processes the step's tokens with every head, head k's rows k further back, and keeps for each head the
state that its next row will read. So no row that later steps read was made from a draft, however many were rejected.
"""

from __future__ import annotations

from functools import partial
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
    KVPart,
    KVStep,
    Proposal,
    Refusal,
    StepView,
    TargetView,
)
from specplug_mtp.builtin_head import heads_of
from specplug_mtp.builtin_layout import find
from specplug_mtp.builtin_plan import heads_used
from specplug_mtp.builtin_sizes import size
from specplug_mtp.config import BuiltinMtpConfig


class BuiltinMtpDrafter(Drafter):
    """Drafts a chain: with one head, step by step, or with a head for each step (`mtp_multi_layer`)."""

    def __init__(self, config: BuiltinMtpConfig, plan: DraftPlan, ctx: DraftContext) -> None:
        super().__init__(config, plan, ctx)
        layout = find(ctx.facts)
        assert not isinstance(layout, Refusal), "a plan was made from these facts"
        self.layout = layout
        self.count = heads_used(config, layout)
        self.chained = config.mtp_depth_input != "target"

    def load(self, target: TargetView) -> None:
        """Load the heads, and borrow embedding and output head."""
        ctx, layout = self.ctx, self.layout
        holder = ctx.facts.target if layout.which == "target" else ctx.facts.draft
        assert holder is not None
        stored = tuple(holder.tensors or ())
        self.embed = target.borrow("embed_tokens")
        self.lm_head = target.borrow("lm_head")
        self.hidden_size = size(layout.config, "hidden_size")
        self.last_position = size(layout.config, "max_position_embeddings") - 1
        self.heads = heads_of(
            layout,
            self.count,
            stored=stored,
            dtype=ctx.dtype,
            device=ctx.device,
            max_position=self.last_position + 1,
        )
        for head, prefix in zip(self.heads, layout.prefixes, strict=False):
            stacked = any(name.startswith(prefix) and name.endswith("experts.gate_up_proj") for name in stored)
            ctx.load(head.stored(stacked), layout.which, partial(layout.rename, prefix=prefix), prefix)

    def allocate(self, arena: Arena) -> None:
        """Declare how KV is read; take the state of each head's last final row [S+1, n, H]."""
        self.kv = arena.draft_kv()
        self.rows = [self.kv.pattern(f"rows of head {at}", None, offset=-at) for at in range(self.count)]
        steps = range(1, self.plan.depth)
        if self.config.mtp_multi_layer:
            # Step s: head s over the s rows that the drafts so far complete, all of them below the root's.
            self.steps = [self.kv.pattern(f"step {step}", step, offset=-step) for step in steps]
        else:
            self.steps = [self.kv.pattern(f"step {step}", 1, offset=step - 1) for step in steps]
        self.state = arena.per_slot("state", (self.count, self.hidden_size), self.ctx.dtype)
        """[S+1, n, H] 0: what the first draft is read from; k: what row K - k of head k reads."""

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both halves of a round; drafting once for each depth that may be wanted."""
        draft = self._head_by_head if self.config.mtp_multi_layer else self._step_by_step
        self._catch_up = graphs.record("catch up", self._read, over="rows_x_width")
        self._draft = graphs.record("draft", draft, variants=range(1, self.plan.depth + 1))

    def ingest(self, step: StepView) -> None:
        """Write the KV of every row that the step's kept tokens complete, from the target's own states."""
        self._catch_up(step, None, None)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Draft `step.depth` tokens for every row."""
        assert isinstance(out, Proposal)
        depth = min(step.depth, self.plan.depth)
        if depth > 0:
            self._draft(step, out, depth)

    def _read(self, step: StepView, out: Proposal | None, variant: Any) -> None:
        token = torch.arange(len(step.tokens), device=step.tokens.device)
        row = torch.searchsorted(step.row_start[1:], token, right=True).clamp_max(len(step.slots) - 1)
        index = (step.kv_len - step.num_kept - step.row_start[:-1])[row] + token
        first = (token == step.row_start[row])[:, None]
        last = step.last_kept()
        embedded = self.embed(step.shifted())
        before = self.state[step.slots]
        found, hidden = [], step.taps[0]
        for at, head in enumerate(self.heads):
            if at:
                # One row further back: each token reads what the token before it gave, the first the step before's.
                found.append(hidden[last])
                hidden = torch.where(first, before[row, at], hidden.roll(1, 0))
            part = KVPart(self.rows[at], index - at if at else None)
            output = head(embedded, hidden, self._positions(step.positions - at), KVStep(self.kv, [part]))
            if not at:
                found.append(output[last])
            if self.chained:
                hidden = output
        self.state[step.slots] = torch.stack(found, 1)

    def _step_by_step(self, step: StepView, out: Proposal | None, depth: Any) -> None:
        assert out is not None
        hidden = self.state[step.slots, 0]
        token = self._next(step, out, 0, hidden)
        for node in range(1, depth):
            index = step.kv_len + node - 1
            attention = KVStep(self.kv, [KVPart(self.steps[node - 1], index[:, None])])
            hidden = self.heads[0](self.embed(token), hidden, self._positions(index), attention)
            token = self._next(step, out, node, hidden)
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=depth)

    def _head_by_head(self, step: StepView, out: Proposal | None, depth: Any) -> None:
        assert out is not None
        state = self.state[step.slots]
        rows = len(step.slots)
        tokens = [self._next(step, out, 0, state[:, 0])]
        above = state[:, :0]  # [R, s - 1, H]: what the head before gave, or read, for its own rows of this round
        for at in range(1, depth):
            hidden = torch.cat((state[:, at, None], above), 1)
            index = step.kv_len[:, None] + torch.arange(-at, 0, device=step.kv_len.device)
            attention = KVStep(self.kv, [KVPart(self.steps[at - 1], index)])
            embedded = self.embed(torch.stack(tokens, 1).flatten())
            found = self.heads[at](embedded, hidden.flatten(0, 1), self._positions(index.flatten()), attention)
            output = found.view(rows, at, -1)
            above = output if self.chained else hidden
            tokens.append(self._next(step, out, at, output[:, -1]))
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=depth)

    def _positions(self, positions: Tensor) -> Tensor:
        """Return `positions` inside the table: outside lie rows before the text, and drafts that nobody asked for."""
        return positions.clamp(0, self.last_position)

    def _next(self, step: StepView, out: Proposal, node: int, hidden: Tensor) -> Tensor:
        """Write `node` from the states [R, H] it is read from; returns token ids [R]."""
        logits = self.lm_head(hidden)
        if self.config.draft_sampling:
            return out.draw(step, node + 1, logits)
        token: Tensor = logits.argmax(-1)
        out.tokens[step.slots, node] = token
        return token
