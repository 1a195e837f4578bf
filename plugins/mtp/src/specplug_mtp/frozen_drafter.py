"""An assistant at work: it reads the KV that the target left behind, and keeps a state a slot.

R rows and T tokens of the step, S slots, H hidden size of the target.
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
from specplug_mtp.frozen_config import FrozenConfig
from specplug_mtp.frozen_model import Assistant
from specplug_mtp.frozen_plan import suppressed
from specplug_mtp.frozen_sizes import assistant_sizes


class FrozenDrafter(Drafter):
    """Drafts a chain from the root and the target's state before it.

    Every query of a round stands at one place, the last committed token's, and sees the committed KV: a round writes
    nothing. What a draft knows of those before it is the state that the assistant hands on.
    """

    def __init__(self, config: FrozenConfig, plan: DraftPlan, ctx: DraftContext) -> None:
        super().__init__(config, plan, ctx)
        assert ctx.facts.draft is not None
        self.sizes = assistant_sizes(ctx.facts.draft.config, ctx.facts.target.config)

    def load(self, target: TargetView) -> None:
        """Load the assistant; borrow the target's embedding and its KV."""
        self.embed = target.borrow("embed_tokens")
        self.kv = target.kv()
        self.assistant = Assistant(self.sizes, dtype=self.ctx.dtype, device=self.ctx.device)
        self.ctx.load(self.assistant, "draft", _own_name)

    def allocate(self, arena: Arena) -> None:
        """Declare how KV is read; take the states [S+1, H] and what is never said [V]."""
        # At the last committed token a causal query sees the committed KV, and a window ends where the KV does.
        self.patterns = {
            window: self.kv.pattern("all" if window is None else f"last {window}", 1, window=window, offset=-1)
            for window in {layer.window for layer in self.sizes.layers}
        }
        self.state = arena.per_slot("state", (self.sizes.backbone_size,), self.ctx.dtype)
        self.banned: Tensor | None = None
        ids = suppressed(self.ctx.facts, self.sizes.vocab_size)
        if ids:
            self.banned = arena.static("banned", (self.sizes.vocab_size,), torch.bool)
            self.banned[torch.tensor(ids, device=self.banned.device)] = True

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both halves of a round; drafting once for each depth that may be wanted."""
        self._keep = graphs.record("keep", self._last_state, over="rows_x_width")
        self._draft = graphs.record("draft", self._chain, variants=range(1, self.plan.depth + 1))

    def ingest(self, step: StepView) -> None:
        """Keep the target's state of each row's last kept token."""
        self._keep(step, None, None)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Draft `step.depth` tokens for every row."""
        assert isinstance(out, Proposal)
        depth = min(step.depth, self.plan.depth)
        if depth > 0:
            self._draft(step, out, depth)

    def _last_state(self, step: StepView, out: Proposal | None, variant: Any) -> None:
        last = (step.row_start[:-1] + step.num_kept - 1).clamp(0, len(step.tokens) - 1)
        self.state[step.slots] = step.taps[0][last]

    def _chain(self, step: StepView, out: Proposal | None, depth: Any) -> None:
        assert out is not None
        back = 0 if self.config.frozen_position == "root" else 1
        angles = self.assistant.angles((step.kv_len - back).clamp_min(0))
        token, state = step.root.clamp_min(0), self.state[step.slots]  # a root that is not known yet drafts nothing
        for node in range(depth):
            hidden = self.assistant(self.embed(token), state, angles, self._attend)
            token = self._next(step, out, node, hidden)
            if node + 1 < depth:
                state = self.assistant.post_projection(hidden)
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=depth)

    def _next(self, step: StepView, out: Proposal, node: int, hidden: Tensor) -> Tensor:
        """Write `node` from [R, H of the assistant]; returns its ids [R]."""
        if self.config.draft_sampling:
            return out.draw(step, node + 1, self.assistant.logits(hidden, self.banned))
        token = self.assistant.best(hidden, self.banned)
        out.tokens[step.slots, node] = token
        return token

    def _attend(self, number: int, q: Tensor) -> Tensor:
        layer = self.sizes.layers[number]
        return self.kv.attend(self.patterns[layer.window], layer.reads, q, scale=1.0)


def _own_name(name: str) -> str | None:
    return None if name == "lm_head.weight" else name  # tied: some files store the embedding twice
