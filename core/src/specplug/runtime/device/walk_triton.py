"""Triton form of `specplug.runtime.device.walk`: one program per row, one per node."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.runtime.device.walk import Drafts, Walked

# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = ["choice", "start", "drafted", "slots", "lead", "accepted", "path", "token", "node", "slot", "count"]


@triton.jit(do_not_specialize=_LOOSE)
def _walk(
    choice, start, drafted, slots, lead, tokens, parents, num_valid, accepted, path, token, vocab,
    NODES: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(start + row)
    slot = tl.load(slots + row)
    nodes = tl.arange(0, BLOCK).to(tl.int64)
    inside = nodes < NODES
    its_tokens = tl.load(tokens + slot * NODES + nodes, mask=inside, other=-1)
    its_parents = tl.load(parents + slot * NODES + nodes, mask=inside, other=-2)
    bad = (its_tokens < 0) | (its_tokens >= vocab) | (its_parents < -1) | (its_parents >= nodes)
    first = tl.min(tl.where(bad, nodes, BLOCK), 0)
    count = tl.minimum(tl.minimum(tl.load(drafted + row), tl.load(num_valid + slot)), first)
    exists = inside & (nodes < count)
    decided = base >= 0
    node = base * 0 - 1
    done = base * 0
    going = decided
    most = base * 0 + DEPTH
    if LEAD:
        most = tl.load(lead + row)
    for depth in range(DEPTH):
        below = exists & (its_parents == node)
        if LEAD:
            going = going & (depth < most)
        else:
            wanted = tl.load(choice + base + 1 + node, mask=going, other=-1)
            below = below & (its_tokens == wanted)
        child = tl.min(tl.where(below, nodes, BLOCK), 0)
        going = going & (child < BLOCK)
        tl.store(path + row * DEPTH + depth, tl.where(going, child, -1))
        node = tl.where(going, child, node)
        done = done + going.to(tl.int64)
    tl.store(accepted + row, done)
    tl.store(token + row, tl.load(choice + base + 1 + node, mask=decided, other=-1))


@triton.jit(do_not_specialize=_LOOSE)
def _lineage(node, slot, tokens, parents, depths, above, count, vocab, NODES: tl.constexpr, DEPTH: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    here = tl.load(node + at, mask=live, other=-1)
    base = tl.load(slot + at, mask=live, other=0) * NODES
    depth = here * 0
    for up in range(DEPTH):
        inside = live & (here >= 0) & (here < NODES)
        token = tl.load(tokens + base + here, mask=inside, other=-1)
        parent = tl.load(parents + base + here, mask=inside, other=-1)
        known = inside & (token >= 0) & (token < vocab)
        tl.store(above + at * DEPTH + up, tl.where(known, token, -1), mask=live)
        depth = depth + inside.to(tl.int64)
        here = tl.where(inside, tl.minimum(parent, here - 1), here)
    tl.store(depths + at, depth, mask=live)


def walk(
    choice: Tensor,
    start: Tensor,
    drafted: Tensor,
    slots: Tensor,
    drafts: Drafts,
    lead: Tensor | None = None,
    out: Walked | None = None,
) -> Walked:
    """See `specplug.runtime.device.walk.walk`. What `out` holds is contiguous."""
    rows, nodes = len(start), drafts.tokens.shape[1]
    found = out or Walked(
        torch.empty(rows, dtype=torch.int64, device=start.device),
        torch.empty(rows, drafts.depth, dtype=torch.int64, device=start.device),
        torch.empty(rows, dtype=torch.int64, device=start.device),
    )
    if rows:
        _walk[(rows,)](
            choice, start, drafted, slots, start if lead is None else lead,
            drafts.tokens, drafts.parents, drafts.num_valid, *found, drafts.vocab,
            NODES=nodes, BLOCK=max(16, triton.next_power_of_2(nodes)), DEPTH=drafts.depth, LEAD=lead is not None,
            num_warps=1,
        )  # fmt: skip
    return found


def lineage(node: Tensor, slot: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """See `specplug.runtime.device.walk.lineage`."""
    count = len(node)
    depth = torch.empty(count, dtype=torch.int64, device=node.device)
    above = torch.empty(count, drafts.depth, dtype=torch.int64, device=node.device)
    if count:
        _lineage[(triton.cdiv(count, 64),)](
            node, slot, drafts.tokens, drafts.parents, depth, above, count, drafts.vocab,
            NODES=drafts.tokens.shape[1], DEPTH=drafts.depth, BLOCK=64, num_warps=1,
        )  # fmt: skip
    return depth, above
