"""From scheduled rows to the arrays of a step's one upload. Host work only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specplug import tree
from specplug.proposal import HostProposal
from specplug.runtime.attention.backend import HostRows
from specplug.runtime.device.buckets import Bucket, Buckets
from specplug.runtime.device.statics import GIVEN, MOST_PAGES, Statics
from specplug.runtime.drafting import Wish
from specplug.runtime.scheduler import Row

_COUNTING = np.arange(1 << 16)


class Packed(NamedTuple):
    """The shape of a packed step. Made by `pack`."""

    bucket: Bucket | None
    """What it is padded to; None: its rows are padded, its tokens are not."""
    rows: int
    """Padded rows."""
    tokens: int
    """Padded tokens."""
    starts: Sequence[int]
    """Logits row of each live row's root; -1 for an unfinished prompt chunk."""
    wanted: int
    """Logits rows; in a bucket, every token has one."""
    host: HostRows


def may_branch(row: Row, trees: bool) -> bool:
    """Say whether a row has to be verified as a tree: its drafts branch, or only the device knows."""
    return trees and row.drafted > 0 and (row.draft is None or not tree.is_chain(row.draft.parents))


def pack(
    statics: Statics,
    buckets: Buckets,
    rows: Sequence[Row],
    wishes: Sequence[Wish],
    proposed: HostProposal | None,
    *,
    padded: bool,
) -> Packed:
    """Write `rows` (chains before trees) and what is wanted of their drafter into the inputs.

    `wishes`: one per row, or none where no drafter runs before the host commit; `proposed`: where drafts
    from the host stand; `padded`: whether there are graphs to pad for.
    """
    count, slots, lookahead = len(rows), statics.sizes.slots, statics.sizes.lookahead
    trees = statics.sizes.trees
    host = statics.inputs.begin()
    columns: list[tuple[int, ...]] = []  # as `ROW_FIELDS`, one row after the other
    flat: list[int] = []
    q_len: list[int] = []
    starts: list[int] = []
    total = 0
    wished = [(wish.cap, wish.room) for wish in wishes] or [(0, 0)] * count
    for row, (cap, room) in zip(rows, wished, strict=True):
        length, width = len(row.tokens), len(row.tokens) + row.drafted
        root = total + length - 1 if row.final else -1
        starts.append(root)
        columns.append((row.slot, total, row.start, length, row.drafted, root, cap, room))
        flat += row.tokens
        if row.drafted:
            flat += [0] * row.drafted
        q_len.append(width)
        total += width
    # A drafter may look at the first token of every row: behind a pad row's start there has to be one.
    looked_at = statics.sizes.nodes > 0
    bucket = buckets.fit(count, total) if padded else None
    if bucket is not None and looked_at and bucket.rows > count and bucket.tokens == total:
        bucket = buckets.fit(count, total + 1)
    rung = bucket.rows if bucket else buckets.rows_for(count)
    tokens = bucket.tokens if bucket else total + int(looked_at and rung > count)
    wanted = tokens

    block = host["rows"]
    block[:, :count] = np.array(columns, dtype=np.int64).T
    if bucket is None:
        starts, wanted = _pick(host["wanted"], rows, starts)
        block[len(GIVEN), :count] = starts
    # Pads up to one beyond the last row, where `row_start` ends, and the row that pad tokens belong to.
    pad = np.array((slots, total, 0, 0, 0, -1, 0, 0))
    block[:, count : rung + 1] = pad[:, None]
    block[:, -1] = pad
    if any(not row.final for row in rows) or lookahead > 1:
        host["following"][:rung] = -1
        for at, row in enumerate(rows):
            if not row.final:
                end = row.start + len(row.tokens)
                known = row.request.tokens[end : end + lookahead]
                host["following"][at, : len(known)] = known
    widths = np.array(q_len + [0] * (rung - count), dtype=np.int64)
    literal, token_row = host["tokens"][0], host["tokens"][1]  # to unpack it takes 3 us more
    literal[:total] = flat
    literal[total:tokens] = 0
    token_row[:total] = _COUNTING[:count].repeat(widths[:count])
    token_row[total:tokens] = slots
    if proposed is not None:
        its_slots = block[0, :rung]
        host["draft_tokens"][:rung] = proposed.tokens[its_slots]
        host["draft_parents"][:rung] = proposed.parents[its_slots]
    _pack_pages(statics, host)
    branch = np.zeros(rung, dtype=bool)
    if trees:
        branch[:count] = [may_branch(row, trees) for row in rows]
    return Packed(bucket, rung, tokens, starts, wanted, HostRows(block[2, :rung].copy(), widths, branch))


def prime(statics: Statics, bucket: Bucket) -> HostRows:
    """Upload an empty step of a bucket's shape, on the scratch slot: what graphs are captured on."""
    slots, (rows, tokens) = statics.sizes.slots, bucket
    q_len = np.full(rows, tokens // rows, np.int64)
    q_len[: tokens % rows] += 1
    host = statics.inputs.begin()
    for array in host.values():
        array[...] = 0
    slot, row_start, _, literals, _, start, _, _ = host["rows"]
    slot[:] = slots
    row_start[1 : rows + 1] = np.cumsum(q_len)
    literals[:rows] = q_len
    start[:] = -1
    host["tokens"][1, :tokens] = np.repeat(_COUNTING[:rows], q_len)
    host["pages"][...] = statics.pages.unchanged
    statics.inputs.upload()
    return HostRows(np.zeros(rows, np.int64), q_len, np.zeros(rows, bool))


def _pick(wanted: np.ndarray, rows: Sequence[Row], roots: Sequence[int]) -> tuple[list[int], int]:
    """Write the tokens whose logits are wanted; returns each row's first logits row and how many there are.

    `roots`: the row's root among the tokens, -1 where nothing is decided. If nothing is decided at all, one
    token is wanted that nobody reads.
    """
    starts: list[int] = []
    found: list[int] = []
    for row, root in zip(rows, roots, strict=True):
        starts.append(-1 if root < 0 else len(found))
        if root >= 0:
            found += range(root, root + 1 + row.drafted)
    found = found or [0]
    wanted[: len(found)] = found
    return starts, len(found)


def _pack_pages(statics: Statics, host: dict[str, np.ndarray]) -> None:
    changed = statics.pages.changed()
    if changed.shape[1] > MOST_PAGES:  # a long prompt was let in: rare, and its forward takes longer than this copy
        statics.pages.write(changed[:, MOST_PAGES:])
        changed = changed[:, :MOST_PAGES]
    host["pages"][:, : changed.shape[1]] = changed
    host["pages"][:, changed.shape[1] :] = statics.pages.unchanged
