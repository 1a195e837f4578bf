"""The drafters: context K/V from the target's states in `ingest`, one forward over the block in `propose`.

R rows of the step, b rows of a block, T tokens of the step, H hidden size, V vocabulary of the target, D of the draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    UserError,
)
from specplug.layers import Rotary, draft_vocabulary
from specplug_dflash.config import BlockConfig
from specplug_dflash.formats import DRAFT, BlockDraft
from specplug_dflash.model import BlockModel
from specplug_dflash.names import MASK, own_names
from specplug_dflash.plugin import DFLASH, DSPARK, draft_of


class DFlashDrafter(Drafter):
    """Drafts a block whose tokens are chosen independently of each other.

    A token's context K/V follows from the target's states at that token alone: `ingest` needs no attention, and what
    it writes below `kv_len` lasts. The block's own rows lie at `kv_len` and above for one round.
    """

    algorithm = DFLASH
    heads = False

    def __init__(self, config: BlockConfig, plan: DraftPlan, ctx: DraftContext) -> None:
        super().__init__(config, plan, ctx)
        draft = draft_of(self.algorithm, config, ctx.facts)
        if isinstance(draft, Refusal):  # `plan` was asked before
            raise UserError(draft.reason)
        self.draft: BlockDraft = draft

    def load(self, target: TargetView) -> None:
        """Load the draft; borrow from the target what it does not hold."""
        draft, ctx = self.draft, self.ctx
        embed = None if "embed_tokens" in draft.stored else target.borrow("embed_tokens")
        head = None if "lm_head" in draft.stored else target.borrow("lm_head")
        self.model = BlockModel(
            draft, heads=self.heads, confidence=self._confident(), dtype=ctx.dtype, device=ctx.device
        )
        checkpoint = ctx.facts.draft
        names = own_names(checkpoint.tensors or () if checkpoint else ())
        ctx.load(self.model, "draft", lambda name: self._wanted(names[name]))
        # The rows themselves: modules of some targets scale what they look up, and drafts were trained without.
        self.embedding: Tensor = (embed or self.model.embed_tokens).weight  # type: ignore[assignment]
        self.head = head or self.model.lm_head
        self.mask = (self._mask_row() * draft.embed_scale).to(ctx.dtype)
        sizes = draft.sizes
        self.max_position = sizes.max_position if self.plan.max_position is None else self.plan.max_position + 1
        self.rope = Rotary.of(sizes.rope, sizes.head_dim, self.max_position, device=ctx.device)
        try:
            self._ids = draft_vocabulary(self.model.d2t, self.model.t2d, draft.head_rows, draft.vocab)
        except ValueError as error:
            raise UserError(f"{DRAFT} {checkpoint.path if checkpoint else ''}: {error}; use another copy") from error

    def allocate(self, arena: Arena) -> None:
        """Declare how a block reads; take the projections of the context [2Lkd, H] and the ids of the draft's rows."""
        self.kv = arena.draft_kv()
        width = self.draft.block
        by_kind = {
            causal: self.kv.pattern("block, causal" if causal else "block", width, "causal" if causal else "full")
            for causal in dict.fromkeys(self.draft.causal)
        }
        self.patterns = tuple(by_kind[causal] for causal in self.draft.causal)
        weight, bias = self.model.context_weights()
        self.weight = arena.static("context", weight.shape, weight.dtype)
        self.weight.copy_(weight)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = arena.static("context bias", bias.shape, bias.dtype)
            self.bias.copy_(bias)
        self.ids: Tensor | None = None
        """[D] target id of each of the draft's rows; None: the same."""
        if self._ids is not None:
            self.ids = arena.static("target ids", self._ids.shape, torch.int64)
            self.ids.copy_(self._ids)

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both halves of a round."""
        self._catch_up = graphs.record("context", self._context, over="rows_x_width")
        self._fill = graphs.record("block", self._block)

    def ingest(self, step: StepView) -> None:
        """Write the context K/V of the step's tokens. What was rejected lands above `kv_len`, under the next block."""
        self._catch_up(step, None, None)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Draft the block of every row."""
        assert isinstance(out, Proposal)
        self._fill(step, out, None)

    def _context(self, step: StepView, out: Proposal | None, variant: Any) -> None:
        angles = self.rope.angles(step.positions.clamp_max(self.max_position - 1), self.ctx.dtype)
        found = self.model.context(step.taps, angles, self.weight, self.bias)
        layers = len(self.patterns)
        for layer in range(layers):
            self.kv.write(layer, found[layer], found[layers + layer])

    def _block(self, step: StepView, out: Proposal | None, variant: Any) -> None:
        assert out is not None
        rows, width = len(step.slots), self.draft.block
        # Where the root is not known nothing is asked for.
        anchor = F.embedding(step.root.clamp_min(0), self.embedding)[:, None]
        if self.draft.embed_scale != 1.0:
            anchor = anchor * self.draft.embed_scale
        x = torch.cat((anchor.to(self.mask.dtype), self.mask.expand(rows, width - 1, -1)), 1).flatten(0, 1)
        index = step.kv_len[:, None] + torch.arange(width, device=step.kv_len.device)
        angles = self.rope.angles(index.clamp_max(self.max_position - 1).flatten(), x.dtype)
        hidden = self.model(x, angles, KVStep(self.kv, [KVPart(self.patterns, index)])).view(rows, width, -1)
        self._write(step, out, hidden)

    def _write(self, step: StepView, out: Proposal, hidden: Tensor) -> None:
        """Write the drafts that follow from the block's states [R, b, H]."""
        nodes, first = self.plan.nodes, self._first
        logits = self._logits(hidden[:, first : first + nodes].flatten(0, 1)).view(len(hidden), nodes, -1)
        if self.config.draft_sampling:
            for node in range(nodes):
                out.draw(step, node + 1, logits[:, node], self.ids)
        else:
            best = logits.argmax(-1)
            out.tokens[step.slots, :nodes] = best if self.ids is None else self.ids[best]
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=nodes)

    @property
    def _first(self) -> int:
        """The first row of a block that drafts: the anchor's own, or the one behind it."""
        return 0 if self.draft.next_slot else 1

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return [n, D] for states after the final norm [n, H]."""
        logits: Tensor = self.head(hidden)
        if self.draft.logit_scale != 1.0:
            logits = logits * self.draft.logit_scale
        cap = self.draft.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _confident(self) -> bool:
        """Whether the confidence head is used."""
        return False

    def _wanted(self, name: str | None) -> str | None:
        """Return the name to load a tensor under, or None for a head that is not used."""
        if name is not None and name.startswith("confidence_head.") and not self._confident():
            return None
        return name

    def _mask_row(self) -> Tensor:
        """Return the mask's embedding [H]."""
        if not self.draft.mask_stored:
            return self.embedding[self.draft.mask_token]
        [(_, row)] = self.ctx.weights("draft", MASK)
        return row.flatten().to(self.ctx.device, self.ctx.dtype)


class DSparkDrafter(DFlashDrafter):
    """Drafts a block whose tokens follow one another: each slot's logits are biased by the draft before it."""

    algorithm = DSPARK
    heads = True

    def _write(self, step: StepView, out: Proposal, hidden: Tensor) -> None:
        markov = self.model.markov_head
        if markov is None and self.model.confidence_head is None:
            super()._write(step, out, hidden)
            return
        rows, nodes, first = len(step.slots), self.plan.nodes, self._first
        logits = self._logits(hidden[:, first : first + nodes].flatten(0, 1)).view(len(hidden), nodes, -1)
        token = step.root.clamp_min(0)
        state = None if markov is None else markov.start(rows)
        if first and markov is not None and state is not None:
            # Slot 0 drafts nothing here; a recurrent head was trained from it on, with the anchor before it.
            state = markov(markov.markov_w1(token), hidden[:, 0], state)[1]
        survival = torch.ones(rows, device=hidden.device)
        valid = torch.zeros_like(step.kv_len)
        for node in range(nodes):
            slot, previous, biased = hidden[:, first + node], None, logits[:, node]
            if markov is not None and state is not None:
                previous = markov.markov_w1(token)
                bias, state = markov(previous, slot, state)
                biased = biased + bias
            survival, valid = self._verified(slot, previous, survival, valid)
            token = self._next(step, out, node, biased)
        out.num_valid[step.slots] = torch.minimum(out.limit[step.slots], valid)

    def _next(self, step: StepView, out: Proposal, node: int, logits: Tensor) -> Tensor:
        """Write `node` from its logits [R, D]; returns target ids [R]."""
        if self.config.draft_sampling:
            return out.draw(step, node + 1, logits, self.ids)
        best = logits.argmax(-1)
        token = best if self.ids is None else self.ids[best]
        out.tokens[step.slots, node] = token
        return token

    def _verified(
        self, hidden: Tensor, previous: Tensor | None, survival: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return both counted on by one slot: the chance [R] that it is reached and accepted, and the drafts [R] that
        are worth verifying."""
        head = self.model.confidence_head
        if head is None:
            return survival, valid + 1
        wide = self.draft.confidence == "hidden and markov"
        survival = survival * head(hidden, previous if wide else None)
        # Survival never rises, so that what counts is always a prefix.
        return survival, valid + (survival >= self.config.dspark_confidence_threshold)

    def _confident(self) -> bool:
        return bool(self.config.dspark_confidence_threshold > 0)
