"""The drafters of `specplug.testing.paper`, but for the trees. R rows, T tokens of the step, H hidden size."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specplug import Arena, CombinedDrafter, Drafter, HostProposal, KVView, Proposal, StepView, TargetView
from specplug.layers import Rotary, apply_rotary
from specplug.testing.paper import HEADS, V_DIM


class Head:
    """One attention layer over inputs [n, width], with seeded random weights."""

    def __init__(self, seed: int, width: int, hidden: int, head_dim: int, heads: int = HEADS, v_dim: int = V_DIM):
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            scale: float = rows**-0.5
            return torch.randn(rows, columns, generator=generator) * scale

        self._fuse = matrix(width, hidden)
        self._q, self._k = matrix(hidden, heads * head_dim), matrix(hidden, heads * head_dim)
        self._v, self._o = matrix(hidden, heads * v_dim), matrix(heads * v_dim, hidden)
        self._heads = heads

    def fuse(self, *parts: Tensor) -> Tensor:
        """Return [n, H] for inputs [n, *] that are `width` wide together."""
        return rms_norm(torch.cat(parts, 1) @ self._fuse, self._fuse.shape[1:])

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return q [n, heads, head_dim]."""
        return apply_rotary((x @ self._q).view(len(x), self._heads, -1), *rotary)

    def write(
        self, kv: KVView, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor], index: Tensor | None = None
    ) -> None:
        """Write K and V of `x` [n, H]."""
        k = apply_rotary((x @ self._k).view(len(x), self._heads, -1), *rotary)
        kv.write(layer, k, (x @ self._v).view(len(x), self._heads, -1), index)

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [n, H]."""
        return rms_norm(x + attended.reshape(len(x), -1) @ self._o, x.shape[1:])

    def run(
        self,
        kv: KVView,
        layer: int,
        pattern: Any,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        index: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of `x`, then attend with its queries."""
        self.write(kv, layer, x, rotary, index)
        return self.close(x, kv.attend(pattern, layer, self.queries(x, rotary), visible))


class Paper(Drafter):
    """What they share: the target's embedding, output head and rotary table."""

    def load(self, target: TargetView) -> None:
        self.embed, self.lm_head = target.borrow("embed_tokens"), target.borrow("lm_head")
        self._rope = cast(Rotary, target.borrow("rope"))
        self.hidden, self.head_dim = target.config["hidden_size"], target.config["head_dim"]

    def head(self, number: int = 0, inputs: int = 2, **sizes: int) -> Head:
        """Return the `number`-th head, over `inputs` vectors of the target's width side by side."""
        return Head(self.config.paper_seed + 1000 * number, inputs * self.hidden, self.hidden, self.head_dim, **sizes)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines; drafts that nobody asked for may lie beyond the table."""
        found: tuple[Tensor, Tensor] = self._rope(positions.clamp(0, self._rope.max_position - 1))
        return found

    def best(self, hidden: Tensor) -> Tensor:
        """Return the greedy token, int64 [R]."""
        return cast(Tensor, self.lm_head(hidden)).argmax(-1)


def last_kept(step: StepView) -> Tensor:
    """Return where each row's last kept token stands among the step's tokens, int64 [R]."""
    return step.row_start[:-1] + step.num_kept - 1


class Shifted(Paper):
    """Row i pairs the target's hidden state i with token i + 1, so the newest row already drafts."""

    def load(self, target: TargetView) -> None:
        super().load(target)
        self.layer = self.head()

    def allocate(self, arena: Arena) -> None:
        self.kv = arena.draft_kv()
        self.rows = self.kv.pattern("rows", None)
        self.steps = [self.kv.pattern(f"step {at}", 1, offset=at) for at in range(self.plan.nodes - 1)]
        self.state = arena.per_slot("state", (self.hidden,), torch.float32)
        self.first = arena.per_slot("first", (), torch.int64)

    def ingest(self, step: StepView) -> None:
        following = step.shifted()
        x = self.layer.fuse(self.embed(following), step.taps[0])
        out = self.layer.run(self.kv, 0, self.rows, x, self.rope(step.positions))[last_kept(step)]
        self.state[step.slots] = out
        self.first[step.slots] = self.best(out)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        assert isinstance(out, Proposal)
        token, hidden = self.first[step.slots], self.state[step.slots]
        out.tokens[step.slots, 0] = token
        for node in range(1, min(step.depth, self.plan.nodes)):
            at = step.kv_len + node - 1
            x = self.layer.fuse(self.embed(token), hidden)
            hidden = self.layer.run(self.kv, 0, self.steps[node - 1], x, self.rope(at), at[:, None])
            token = self.best(hidden)
            out.tokens[step.slots, node] = token
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=step.depth)


class Chained(Paper):
    """Head 1 pairs state i with token i + 1; head 2 pairs head 1's output i with token i + 2."""

    def load(self, target: TargetView) -> None:
        super().load(target)
        self.heads = [self.head(number) for number in range(2)]

    def allocate(self, arena: Arena) -> None:
        self.kv = arena.draft_kv()
        self.rows = self.kv.pattern("rows", None)
        self.newest = self.kv.pattern("newest", 1, offset=-1)
        self.state = arena.per_slot("state", (self.hidden,), torch.float32)

    def ingest(self, step: StepView) -> None:
        following, rotary = step.following().clamp_min(0), self.rope(step.positions)
        x = self.heads[0].fuse(self.embed(following[:, 0]), step.taps[0])
        out = self.heads[0].run(self.kv, 0, self.rows, x, rotary)
        if self.plan.lookahead == 2:
            # The row before this step's first lacked the token after the next, which is known now.
            begin = step.kv_len - step.num_kept
            first = step.row_start[:-1].clamp_max(len(following) - 1)  # a pad row may begin behind the last token
            missed = self.heads[1].fuse(self.embed(following[first, 0]), self.state[step.slots])
            self.heads[1].write(self.kv, 1, missed, self.rope(begin - 1), (begin - 1)[:, None])
            # This step's last row may lack it in turn: what is written for it stands until it is redone.
            self.heads[1].write(self.kv, 1, self.heads[1].fuse(self.embed(following[:, 1]), out), rotary)
        self.state[step.slots] = out[last_kept(step)]

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        assert isinstance(out, Proposal)
        hidden = self.state[step.slots]
        token = self.best(hidden)
        out.tokens[step.slots, 0] = token
        if min(step.depth, self.plan.nodes) == 2:
            at = step.kv_len - 1
            x = self.heads[1].fuse(self.embed(token), hidden)
            hidden = self.heads[1].run(self.kv, 1, self.newest, x, self.rope(at), at[:, None])
            out.tokens[step.slots, 1] = self.best(hidden)
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=step.depth)


class Reader(Paper):
    """Every draft asks the target's last layer from the position of the last kept token."""

    def load(self, target: TargetView) -> None:
        super().load(target)
        self.kv, self.last = target.kv(), target.config["num_hidden_layers"] - 1
        self.layer = self.head(heads=target.config["num_attention_heads"], v_dim=self.head_dim)

    def allocate(self, arena: Arena) -> None:
        self.context = self.kv.pattern("context", 1, offset=-1)
        self.state = arena.per_slot("state", (self.hidden,), torch.float32)

    def ingest(self, step: StepView) -> None:
        self.state[step.slots] = step.taps[0][last_kept(step)]

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        assert isinstance(out, Proposal)
        token, hidden, rotary = step.root, self.state[step.slots], self.rope(step.kv_len - 1)
        for node in range(min(step.depth, self.plan.nodes)):
            x = self.layer.fuse(self.embed(token.clamp_min(0)), hidden)
            hidden = self.layer.close(x, self.kv.attend(self.context, self.last, self.layer.queries(x, rotary)))
            token = self.best(hidden)
            out.tokens[step.slots, node] = token
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=step.depth)


class Block(Paper):
    """Context rows are made from hidden states in `ingest`; the root and N masks see them and each other."""

    def load(self, target: TargetView) -> None:
        super().load(target)
        self.layer, self.inject = self.head(0, inputs=1), self.head(1)
        self.mask = torch.randn(self.hidden, generator=torch.Generator().manual_seed(self.config.paper_seed))

    def allocate(self, arena: Arena) -> None:
        self.kv = arena.draft_kv()
        self.block = self.kv.pattern("block", 1 + self.plan.nodes, mask="full")

    def ingest(self, step: StepView) -> None:
        self.inject.write(self.kv, 0, self.inject.fuse(*step.taps), self.rope(step.positions))

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        assert isinstance(out, Proposal)
        width = 1 + self.plan.nodes
        at = step.kv_len[:, None] + torch.arange(width)
        inputs = self.mask.repeat(len(at), width, 1)
        inputs[:, 0] = self.embed(step.root.clamp_min(0))
        x = self.layer.fuse(inputs.flatten(0, 1))
        hidden = self.layer.run(self.kv, 0, self.block, x, self.rope(at.flatten()), at)
        logits = self.lm_head(hidden.view(len(at), width, -1)[:, 1:])
        for depth in range(1, min(step.depth, self.plan.nodes) + 1):
            out.draw(step, depth, logits[:, depth - 1])
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=step.depth)


class Combined(CombinedDrafter):
    """The parts one after the other; each fills the rows that have no draft yet."""

    def __init__(self, config: Any, plan: Any, ctx: Any) -> None:
        super().__init__(config, plan, ctx)
        self.parts = [ctx.build(name, options) for name, options in config.part_options()]
