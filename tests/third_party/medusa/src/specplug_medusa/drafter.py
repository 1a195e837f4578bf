"""The heads at work. R rows of the step, H the target's hidden size, V tokens that the heads know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specplug import Arena, Drafter, GraphRecorder, HostProposal, Proposal, Refusal, StepView, TargetView
from specplug.layers import Linear
from specplug_medusa.paths import best_paths, parents_of
from specplug_medusa.plugin import sizes_of


class Residual(nn.Module):
    """``x + SiLU(W x + b)``, named as checkpoints name it."""

    def __init__(self, hidden: int, **where: Any) -> None:
        super().__init__()
        self.linear = Linear(hidden, hidden, bias=True, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Return [R, H] for `x` [R, H]."""
        return x + nn.functional.silu(self.linear(x))


class MedusaDrafter(Drafter):
    """Head m guesses the token m + 2 behind the last processed one: the root is the one behind, depth 1 is head 0."""

    def load(self, target: TargetView) -> None:
        """Load the heads, whose names here are the checkpoint's: ``0.0.linear.weight``, and last ``0.1.weight``."""
        sizes = sizes_of(self.ctx.facts)
        assert not isinstance(sizes, Refusal)
        self.sizes = sizes
        where: dict[str, Any] = {"dtype": self.ctx.dtype, "device": self.ctx.device}
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(Residual(sizes.hidden, **where) for _ in range(sizes.layers)),
                Linear(sizes.hidden, sizes.vocab, **where),
            )
            for _ in range(sizes.heads)
        )
        # A tuned target may lie in the same folder; its names do not begin with a head's number.
        self.ctx.load(self.heads, "draft", lambda name: name if name.partition(".")[0].isdigit() else None)

    def allocate(self, arena: Arena) -> None:
        """Take the state of each slot, and the form of the tree for each depth."""
        self.state = arena.per_slot("state", (self.sizes.hidden,), self.ctx.dtype)
        self.width = min(self.config.medusa_top_k, self.sizes.vocab)
        self.forms: dict[int, tuple[Tensor, Tensor]] = {}
        """By depth: where each node's token stands among the heads' candidates, and its parent, [n] each."""
        for depth in range(1, self.plan.depth + 1):
            paths = best_paths(self.config.num_draft_tokens - 1, depth, self.width)
            picks = arena.static(f"picks {depth}", (len(paths),), torch.int64)
            parents = arena.static(f"parents {depth}", (len(paths),), torch.int64)
            picks.copy_(torch.tensor([(len(path) - 1) * self.width + path[-1] for path in paths]))
            parents.copy_(torch.tensor(parents_of(paths)))
            self.forms[depth] = picks, parents

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both halves of a round."""
        self._keep_state = graphs.record("state", self._keep, over="rows_x_width")
        self._fill = graphs.record("tree", self._tree, variants=range(1, self.plan.depth + 1))

    def ingest(self, step: StepView) -> None:
        """Keep the state behind which the root was sampled."""
        self._keep_state(step, None, None)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Fill the tree of the depth that is wanted."""
        assert isinstance(out, Proposal)
        depth = min(step.depth, self.plan.depth)
        if depth > 0:
            self._fill(step, out, depth)

    def _keep(self, step: StepView, out: Proposal | None, variant: Any) -> None:
        self.state[step.slots] = step.taps[0][step.last_kept()]

    def _tree(self, step: StepView, out: Proposal | None, depth: Any) -> None:
        assert out is not None
        state = self.state[step.slots]
        best = [head(state).topk(self.width, dim=-1).indices for head in self.heads[:depth]]
        picks, parents = self.forms[depth]
        count = len(picks)
        out.tokens[step.slots, :count] = torch.cat(best, 1).index_select(1, picks)
        out.parents[step.slots, :count] = parents
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=count)
