"""The drafters of `specplug.testing.paper` that draft trees: a dynamic one, and the target with decoys."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from specplug import Arena, Drafter, HostProposal, KVView, Proposal, StepView, TargetView
from specplug.models.base import ForwardBatch
from specplug.models.decoder import Decoder, stored_name
from specplug.testing.paper_drafters import Paper, last_kept


class Tree(Paper):
    """Each level expands the `topk` likeliest paths; the likeliest nodes of all levels are proposed."""

    def load(self, target: TargetView) -> None:
        super().load(target)
        self.layer = self.head()

    def allocate(self, arena: Arena) -> None:
        self.kv = arena.draft_kv()
        self.topk: int = self.config.paper_topk
        self.rows = self.kv.pattern("rows", None)
        self.level = self.kv.pattern("level", self.topk, mask="ancestors")
        self.state = arena.per_slot("state", (self.hidden,), torch.float32)

    def ingest(self, step: StepView) -> None:
        x = self.layer.fuse(self.embed(step.shifted()), step.taps[0])
        out = self.layer.run(self.kv, 0, self.rows, x, self.rope(step.positions))
        self.state[step.slots] = out[last_kept(step)]

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        assert isinstance(out, Proposal)
        rows, k, steps = len(step.slots), self.topk, min(step.depth, self.plan.depth)
        hidden = self.state[step.slots]
        score, token = self._scores(hidden).topk(k)
        node = torch.arange(k).repeat(rows, 1)  # the frontier, as numbers of candidates
        scores, tokens, parents = [score], [token], [torch.full_like(token, -1)]
        hidden = hidden[:, None].expand(rows, k, -1)
        seen = torch.zeros(rows, k, max(steps - 1, 1) * k, dtype=torch.bool)
        for level in range(steps - 1):
            own = level * k + torch.arange(k)
            seen[:, torch.arange(k), own] = True
            hidden = self._expand(step, level, own, token, hidden, seen)
            below, words = self._scores(hidden).topk(k)
            total = (score[:, :, None] + below).flatten(1)
            known = sum(part.shape[1] for part in scores)
            scores.append(total)
            tokens.append(words.flatten(1))
            parents.append(node.repeat_interleave(k, 1))
            score, best = total.topk(k)
            node, token = known + best, words.flatten(1).gather(1, best)
            above = (best // k)[:, :, None]
            hidden = hidden.gather(1, above.expand(-1, -1, hidden.shape[2]))
            seen = seen.gather(1, above.expand(-1, -1, seen.shape[2]))
        # A child is never likelier than its parent and comes later, so a stable sort keeps parents first.
        order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).repeat(rows, 1))
        kept = order[:, : self.plan.nodes]
        above = torch.cat(parents, 1).gather(1, kept)
        count = kept.shape[1]
        out.tokens[step.slots, :count] = torch.cat(tokens, 1).gather(1, kept)
        out.parents[step.slots, :count] = torch.where(above < 0, -1, rank.gather(1, above.clamp_min(0)))
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=count)

    def _expand(self, step: StepView, level: int, own: Tensor, token: Tensor, hidden: Tensor, seen: Tensor) -> Tensor:
        """Run the layer over one level's nodes [R, k]; returns hidden states [R, k, H]."""
        x = self.layer.fuse(self.embed(token.flatten()), hidden.flatten(0, 1))
        # Siblings share a position, which is their depth's, but each has a row of its own.
        rotary = self.rope((step.kv_len + level).repeat_interleave(self.topk))
        out = self.layer.run(self.kv, 0, self.level, x, rotary, step.kv_len[:, None] + own, seen)
        return out.view(hidden.shape)

    def _scores(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(hidden)).log_softmax(-1)


class Self(Drafter):
    """The target's weights over KV of its own: whatever it drafts, a greedy target accepts."""

    def load(self, target: TargetView) -> None:
        self.model = Decoder(target.config)
        self.ctx.load(self.model, "target", stored_name)

    def allocate(self, arena: Arena) -> None:
        self.kv = arena.draft_kv()
        self.rows = _Attention(self.kv, self.kv.pattern("rows", None))
        self.steps = [self.kv.pattern(f"step {at}", 1, offset=at) for at in range(self.plan.depth)]

    def ingest(self, step: StepView) -> None:
        self.model(ForwardBatch(step.tokens, step.positions, self.rows))

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        assert isinstance(out, Proposal)
        token, width = step.root.clamp_min(0), 2 if self.config.paper_decoys else 1
        for depth in range(min(step.depth, self.plan.depth)):
            at = step.kv_len + depth
            attention = _Attention(self.kv, self.steps[depth], at[:, None])
            positions = at.clamp_max(self.model.max_position - 1)
            logits = self.model.logits(self.model(ForwardBatch(token, positions, attention))[0])
            best = logits.topk(2).indices
            token = logits.argmax(-1)
            right = width * depth + width - 1
            if width == 2:  # the runner-up first, so that the accepted path is not the leading nodes
                out.tokens[step.slots, right - 1] = torch.where(best[:, 0] == token, best[:, 1], best[:, 0])
                out.parents[step.slots, right - 1] = right - width
            out.tokens[step.slots, right] = token
            out.parents[step.slots, right] = right - width
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=width * step.depth)


class _Attention:
    """The `AttentionStep` of a decoder over draft KV."""

    def __init__(self, kv: KVView, pattern: object, index: Tensor | None = None) -> None:
        self._kv, self._pattern, self._index = kv, pattern, index

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.models.base.AttentionStep`."""
        if k is not None and v is not None:
            self._kv.write(layer, k, v, self._index)
        return self._kv.attend(self._pattern, layer, q, scale=scale)
