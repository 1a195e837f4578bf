"""Where a drafter writes what it proposes: `Proposal` on the device, `HostProposal` on the host.

Both are owned by the core and indexed by slot; S slots, row S is scratch, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specplug.drafter import StepView
from specplug.noise import Stream
from specplug.runtime.device.noise import gumbel_argmax, gumbel_rows
from specplug.runtime.device.upload import upload
from specplug.spec import Capabilities


class Proposal:
    """Drafts of every slot. Write in place; never rebind.

    What the drafter last wrote stays, except `num_valid` and `limit`, which the core sets before each
    `propose`; afterwards the core cuts `num_valid` to `limit`. Every prefix of a parents-first list is
    a tree, so ignoring `limit` is slow, not wrong.
    """

    def __init__(
        self,
        slots: int,
        nodes: int,
        vocab: int,
        *,
        rule: Literal["coupled", "rejection", "synthetic"],
        dense: bool,
        device: torch.device,
    ) -> None:
        rows = slots + 1
        self.tokens = torch.zeros(rows, nodes, dtype=torch.int64, device=device)
        """[S+1, N] int64, drafter: drafted token ids, in target ids."""
        self.parents = torch.arange(-1, nodes - 1, device=device).repeat(rows, 1)
        """[S+1, N] int64, drafter: -1 = child of the root, else an earlier node; reset to a chain on admit."""
        self.num_valid = torch.zeros(rows, dtype=torch.int64, device=device)
        """[S+1] int64, drafter: leading nodes that are drafts; 0 declines. Core: 0 before each propose."""
        self.limit = torch.zeros(rows, dtype=torch.int64, device=device)
        """[S+1] int64, core: most nodes it will verify for this slot now."""
        self.dense = torch.zeros(rows, dtype=torch.bool, device=device)
        """[S+1] bool, `draw`: this slot's drafts were sampled."""
        self.q: Tensor | None = None
        """[S+1, N, V] float32, `draw`: the distribution node i was drawn from; only under `rejection`."""
        self.host: HostProposal | None = None
        """Set by the core for a drafter that runs on both sides: a row set there wins over this one."""
        if dense and rule == "rejection":
            self.q = torch.zeros(rows, nodes, vocab, dtype=torch.float32, device=device)
        self._rule = rule
        self._vocab = vocab

    def reset(self, slot: int) -> None:
        """Make `slot` an empty chain. Called by the core when a request is admitted."""
        self.tokens[slot] = 0
        self.parents[slot] = torch.arange(-1, self.parents.shape[1] - 1, device=self.parents.device)
        self.num_valid[slot] = 0
        self.limit[slot] = 0
        self.dense[slot] = False

    def begin(self, limits: Mapping[int, int]) -> None:
        """Begin a round: no drafts, and `limits` by slot, 0 where none is given. Called by the core."""
        wanted = np.zeros(len(self.limit), dtype=np.int64)
        wanted[list(limits)] = list(limits.values())
        self.num_valid.zero_()
        (limit,) = upload([wanted], self.limit.device)
        self.limit.copy_(limit)
        if self.host is not None:
            self.host.begin(limits)

    def merge_host(self) -> None:
        """Let the rows that were set in `host` win. Called by the core after `propose`."""
        if self.host is None:
            return
        filled = np.flatnonzero(self.host.num_valid[:-1] > 0)
        if not filled.size:
            return
        sides = (self.host.tokens, self.host.parents, self.host.num_valid)
        slots, tokens, parents, valid = upload([filled, *(side[filled] for side in sides)], self.limit.device)
        self.tokens.index_copy_(0, slots, tokens)
        self.parents.index_copy_(0, slots, parents)
        self.num_valid.index_copy_(0, slots, valid)
        self.dense.index_fill_(0, slots, False)

    def take(self, other: Proposal, slots: Tensor) -> None:
        """Take over the drafts of `other`, which has at most as many nodes, for `slots` int64 [n].

        For drafters that combine others. The scratch row, `limit`'s last index, stands for no slot.
        """
        nodes = other.tokens.shape[1]
        self.tokens[slots, :nodes] = other.tokens[slots]
        self.parents[slots, :nodes] = other.parents[slots]
        self.num_valid[slots] = other.num_valid[slots]
        self.dense[slots] = other.dense[slots]
        if self.q is not None and other.q is not None:
            self.q[slots, :nodes] = other.q[slots]

    def draw(self, step: StepView, depth: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Draw the nodes at `depth` of a chain or block and write them to `tokens`; returns them, int64 [R].

        `depth` counts from 1 (the child of the root, node 0). `logits` is [R, V], or [R, V_draft] with
        `ids` [V_draft] mapping a draft vocabulary to target ids. The row's temperature is applied here;
        at 0 the draw is the argmax, lowest id first. Under `coupled` the noise is the target's own, and
        under `rejection` a stream for drafts, with q recorded so that `accept` stays exact.
        """
        node = depth - 1
        full = logits.float()
        if ids is not None:
            wide = full.new_full((full.shape[0], self._vocab), float("-inf"))
            full = wide.index_copy_(1, ids, full)
        temperature = step.sampling.temperature
        scaled = full / temperature.clamp_min(1e-6).unsqueeze(1)
        stream: Stream = "draft" if self._rule == "rejection" else "target"
        if scaled.is_cuda:
            sampling = step.sampling
            sampled = gumbel_argmax(scaled, sampling.seed, sampling.choice, step.kv_len + depth, stream)
        else:  # the same, without drawing noise for greedy rows
            sampled = (scaled + step_noise(step, depth, stream, self._vocab)).argmax(1)
        drawn = torch.where(temperature > 0, sampled, full.argmax(1))
        self.tokens[step.slots, node] = drawn
        self.dense.index_fill_(0, step.slots, True)
        if self.q is not None:
            self.q[step.slots, node] = torch.softmax(scaled, 1)
        return drawn


def step_noise(step: StepView, depth: int, stream: Stream, vocab: int) -> Tensor:
    """Return Gumbel noise [R, V] for the drafts at `depth`; zeros for rows at temperature 0. Does not wait."""
    sampling = step.sampling
    return gumbel_rows(
        sampling.seed, sampling.choice, step.kv_len + depth, stream, vocab, wanted=sampling.temperature > 0
    )


class HostProposal:
    """The host side of a `Proposal`, for drafters that declare ``"host"``: the same fields as numpy arrays.

    On a CPU engine the arrays share memory with the `Proposal`, unless the drafter writes to both. On a
    device they never do: the core uploads what was set.
    """

    def __init__(self, device: Proposal, *, shared: bool = True) -> None:
        """`shared`: the arrays are those of `device`, if it lies on the host; else copies, so that both can change."""

        def array(part: Tensor) -> np.ndarray:
            found: np.ndarray = (part if shared and part.is_cpu else part.to("cpu", copy=True)).numpy()
            return found

        self.tokens = array(device.tokens)
        self.parents = array(device.parents)
        self.num_valid = array(device.num_valid)
        self.limit = array(device.limit)

    def begin(self, limits: Mapping[int, int]) -> None:
        """Begin a round: no drafts, and `limits` by slot, 0 where none is given. Called by the core."""
        self.num_valid[:] = 0
        self.limit[:] = 0
        self.limit[list(limits)] = list(limits.values())

    def set(self, slot: int, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Propose `tokens` for `slot`; `parents` defaults to a chain. An empty list declines.

        Raises ValueError when there are more tokens than the plan's nodes, or not one parent a token.
        """
        count, nodes = len(tokens), self.tokens.shape[1]
        if count > nodes:
            raise ValueError(f"{count} drafts for slot {slot}, the plan allows {nodes}")
        if parents is not None and len(parents) != count:
            raise ValueError(f"{count} drafts but {len(parents)} parents for slot {slot}")
        self.tokens[slot, :count] = tokens
        self.parents[slot, :count] = range(-1, count - 1) if parents is None else parents
        self.num_valid[slot] = count


def proposal_to_write(proposal: Proposal, needs: Capabilities) -> Proposal | HostProposal:
    """Return what a drafter with `needs` is given to write: one side of `proposal`, or the device's with `host` set."""
    if needs.runs_on == {"host"}:
        return HostProposal(proposal)
    if "host" in needs.runs_on:
        proposal.host = HostProposal(proposal, shared=False)
    return proposal
