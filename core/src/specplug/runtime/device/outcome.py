"""The device commit: from what was accepted to lengths, roots and limits, and the report that goes to the host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from specplug.drafter import SamplingView, StepView
from specplug.proposal import Proposal


@dataclass(slots=True)
class Verdicts:
    """What acceptance decided for R rows. Set by `Decider`."""

    accepted: Tensor  # [R]    drafts accepted
    path: Tensor  # [R,D]  which, from the root downwards; -1 padded
    token: Tensor  # [R]    the token that follows; -1: none could be chosen


@dataclass(slots=True)
class Committed:
    """Where the commit of R rows is written. Views of static buffers."""

    slots: Tensor  # [R]    executor
    begin: Tensor  # [R]    executor: token index of the row's first token
    literals: Tensor  # [R]    executor: its tokens before the drafts
    drafted: Tensor  # [R]    executor
    start: Tensor  # [R]    executor: logits row of the root; -1: an unfinished prompt chunk
    cap: Tensor  # [R]    executor: most drafts wanted next
    room: Tensor  # [R]    executor: token index that none of them may lie beyond
    following: Tensor  # [R,L]  executor: prompt tokens after an unfinished chunk; -1 = not known
    roots: Tensor  # [S+1]  commit: newest token of each slot
    num_kept: Tensor  # [R]    commit
    kv_len: Tensor  # [R]    commit
    next_tokens: Tensor  # [R,L]  commit
    final: Tensor  # [R]    bool, commit
    sampling: SamplingView  # [R] each, commit: the rows' options
    report: Tensor  # [R, 3 + D + 2 N]  commit: see `Reports`


def commit(to: Committed, verdicts: Verdicts, options: SamplingView, proposal: Proposal | None) -> None:
    """Write lengths, roots, limits and the report of a step; begin the next round of its slots' proposals.

    `options`: the sampling options of all slots, [S+1] each.
    """
    if to.slots.is_cuda:
        from specplug.runtime.device.outcome_triton import commit as launch

        launch(to, verdicts, options, proposal)
        return
    depth = verdicts.path.shape[1]
    final = to.start >= 0
    accepted = torch.where(final, verdicts.accepted, 0)
    token = torch.where(final, verdicts.token, -1)
    to.final.copy_(final)
    to.num_kept.copy_(to.literals + accepted)
    to.kv_len.copy_(to.begin + to.num_kept)
    to.next_tokens.copy_(to.following)
    to.next_tokens[:, 0] = torch.where(final, token, to.following[:, 0])
    to.roots.index_copy_(0, to.slots, torch.where(final, token.clamp_min(0), to.roots[to.slots]))
    to.report[:, 0] = accepted
    to.report[:, 1] = token
    to.report[:, 2] = 0
    to.report[:, 3 : 3 + depth] = verdicts.path
    for field in dataclasses.fields(options):
        getattr(to.sampling, field.name).copy_(getattr(options, field.name)[to.slots])
    if proposal is None:
        return
    nodes = proposal.tokens.shape[1]
    to.report[:, 2] = torch.where(final, to.drafted.minimum(proposal.num_valid[to.slots]).clamp_min(0), 0)
    to.report[:, 3 + depth : 3 + depth + nodes] = proposal.tokens[to.slots]
    to.report[:, 3 + depth + nodes :] = proposal.parents[to.slots]
    proposal.num_valid.index_copy_(0, to.slots, torch.zeros_like(to.cap))
    proposal.limit.index_copy_(0, to.slots, to.cap.minimum(to.room - to.kv_len).clamp_min(0))


def begin_late(
    view: StepView, literals: Tensor, begin: Tensor, following: Tensor, roots: Tensor, options: SamplingView
) -> None:
    """Write the lengths of a step whose tokens were all committed before: none of its rows is its request's last.

    `literals`, `begin` [R]: tokens of each row and the first one's token index; `following` [R,L]: the tokens
    after them, -1 where only the device knows; `roots` [S+1]: the newest token of each slot; `options`: the sampling
    options of all slots, [S+1] each.
    """
    view.num_kept.copy_(literals)
    view.kv_len.copy_(begin + literals)
    view.next_tokens.copy_(following)
    # What the host does not know yet is the token that the newest step has sampled.
    view.next_tokens[:, 0] = torch.where(following[:, 0] < 0, roots[view.slots], following[:, 0])
    view.final.zero_()
    for field in dataclasses.fields(options):
        getattr(view.sampling, field.name).copy_(getattr(options, field.name)[view.slots])
