"""The drafters of EAGLE and EAGLE-3: the head's KV follows the target's hidden states, and chains or trees grow on it.

R rows and T tokens of the step, H the head's hidden size.
"""

from __future__ import annotations

from typing import Any

from specplug import (
    Arena,
    Drafter,
    GraphRecorder,
    HostProposal,
    KVPart,
    KVStep,
    Proposal,
    Refusal,
    StepView,
    TargetView,
)
from specplug_eagle import heads, layout
from specplug_eagle.chain import Chain
from specplug_eagle.growth import Growth


class EagleDrafter(Drafter):
    """Pairs the target's hidden state at i with token i + 1, and predicts token i + 2.

    Row i of the head's KV lies at token index i and position i. `ingest` writes a row for every kept token from the
    target's own state, below ``kv_len``. The last one, at ``kv_len - 1``, holds the root, and its output makes the
    first draft. Drafts are fed to rows from ``kv_len`` on, beside the head's own recycled states: scratch, of which the
    next `ingest` writes anew what was accepted. Rejected tokens' rows lie there too.
    """

    def load(self, target: TargetView) -> None:
        """Load the head, and borrow what it does not have."""
        found = layout.read(self.ctx.facts, self.config)
        assert not isinstance(found, Refusal), found.reason
        self.head = heads.load(found, self.ctx, target)
        self._last_position = self.head.max_position - 1
        self._one_state = found.version == 1 or found.norm_output

    def allocate(self, arena: Arena) -> None:
        """Declare how KV is read; take what a slot keeps between `ingest` and `propose`."""
        self._kv = arena.draft_kv()
        self._rows = self._kv.pattern("rows", None)
        hidden = (self.head.hidden_size,)
        self.state = arena.per_slot("state", hidden, self.ctx.dtype)
        """[S+1, H] of which logits are made."""
        self.recycled = self.state if self._one_state else arena.per_slot("recycled", hidden, self.ctx.dtype)
        """[S+1, H] what stands beside the first draft."""
        depth, last = self.plan.depth, self._last_position
        self._grow: Chain | Growth
        if "tree" in self.plan.needs.shapes:
            topk, nodes = self.config.topk, self.plan.nodes
            self._grow = Growth(self.head, self._kv, depth, topk, nodes, last_position=last)
        else:
            sampled = self.config.draft_sampling
            self._grow = Chain(self.head, self._kv, depth, last_position=last, sampled=sampled)

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both halves of a round; drafting once for each depth that may be wanted."""
        self._catch_up = graphs.record("catch up", self._read, over="rows_x_width")
        self._draft = graphs.record("draft", self._propose, variants=range(1, self.plan.depth + 1))

    def ingest(self, step: StepView) -> None:
        """Write the row of every kept token, and keep the last one's output."""
        self._catch_up(step, None, None)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Draft `step.depth` levels for every row."""
        assert isinstance(out, Proposal)
        depth = min(step.depth, self.plan.depth)
        if depth > 0:
            self._draft(step, out, depth)

    def _read(self, step: StepView, out: Proposal | None, variant: Any) -> None:
        last = step.last_kept()
        attention = KVStep(self._kv, [KVPart(self._rows)])
        state, recycled = self.head(step.shifted(), self.head.project(step.taps), step.positions, attention)
        self.state[step.slots] = state[last]
        if not self._one_state:
            self.recycled[step.slots] = recycled[last]

    def _propose(self, step: StepView, out: Proposal | None, depth: Any) -> None:
        assert out is not None
        state = self.state[step.slots]
        self._grow(step, out, depth, state, state if self._one_state else self.recycled[step.slots])
