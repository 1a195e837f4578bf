"""Triton form of `specplug.runtime.device.prologue`: one program per token."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from specplug.proposal import Proposal
from specplug.runtime.device.prologue import PrologueInputs
from specplug.runtime.device.rows import StepRows


@triton.jit
def _parent(parents, slot, here, NODES: tl.constexpr):
    parent = tl.load(parents + slot * NODES + here, mask=here >= 0, other=-1)
    return tl.maximum(tl.where(here >= 0, tl.minimum(parent, here - 1), here), -1)


# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = [
    "token_row", "literal", "slots", "starts", "begins", "literals", "roots", "tables",
    "draft_tokens", "draft_parents", "num_valid", "tokens", "positions", "kv_rows", "ancestors",
    "pad_row", "vocab", "columns", "page_size", "trash_row",
]  # fmt: skip


@triton.jit(do_not_specialize=_LOOSE)
def _prologue(
    token_row, literal, slots, starts, begins, literals, roots, tables,
    draft_tokens, draft_parents, num_valid,
    tokens, positions, kv_rows, ancestors,
    pad_row, vocab, columns, page_size, trash_row,
    NODES: tl.constexpr, DEPTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    row = tl.load(token_row + t)
    pad = row == pad_row
    slot = tl.load(slots + row)
    begin = tl.load(begins + row)
    count = tl.load(literals + row)
    at = t - tl.load(starts + row)
    node = at - count
    index = begin + at
    given = tl.load(literal + t)
    token = tl.where(given >= 0, given, tl.load(roots + slot))
    position = index
    if NODES > 0:
        valid = (node >= 0) & (node < tl.load(num_valid + slot)) & (node < NODES)
        draft = tl.load(draft_tokens + slot * NODES + node, mask=valid, other=0)
        draft = tl.minimum(tl.maximum(draft, 0), vocab - 1)
        token = tl.where(node >= 0, draft, token)
        first = tl.where(valid, node, -1)
        here = first
        depth = first * 0
        for _ in range(DEPTH):
            depth += (here >= 0).to(tl.int64)
            here = _parent(draft_parents, slot, here, NODES)
        position = tl.where(node >= 0, begin + count - 1 + depth, position)
        # A register per word, filled by a walk of its own: storing and loading back would race within the warp.
        for word in tl.static_range(WORDS):
            here = first
            seen = first * 0 + (1 if word == 0 else 0)
            for _ in range(DEPTH):
                bit = here + 1
                inside = (here >= 0) & (bit // 64 == word)
                seen = tl.where(inside, seen | ((first * 0 + 1) << (bit % 64)), seen)
                here = _parent(draft_parents, slot, here, NODES)
            tl.store(ancestors + t * WORDS + word, seen)
    page = tl.minimum(tl.maximum(index // page_size, 0), columns - 1)
    kv_row = tl.load(tables + slot * columns + page).to(tl.int64) * page_size + index % page_size
    tl.store(tokens + t, tl.where(pad, 0, token))
    tl.store(positions + t, tl.where(pad, 0, position))
    tl.store(kv_rows + t, tl.where(pad, trash_row, kv_row))


def prologue(rows: StepRows, inputs: PrologueInputs, proposal: Proposal | None) -> None:
    """See `specplug.runtime.device.prologue.prologue`."""
    none = inputs.literal
    _prologue[(rows.total,)](
        rows.token_row, inputs.literal, inputs.slots, inputs.starts, inputs.begins, inputs.literals, inputs.roots,
        rows.tables,
        none if proposal is None else proposal.tokens,
        none if proposal is None else proposal.parents,
        none if proposal is None else proposal.num_valid,
        rows.tokens, rows.positions, rows.kv_rows, none if rows.ancestors is None else rows.ancestors,
        len(inputs.slots) - 1, inputs.vocab, rows.tables.shape[1], rows.page_size, inputs.trash_row,
        NODES=0 if proposal is None else proposal.tokens.shape[1],
        DEPTH=inputs.depth,
        WORDS=0 if rows.ancestors is None else rows.ancestors.shape[1],
        num_warps=1,
    )  # fmt: skip
