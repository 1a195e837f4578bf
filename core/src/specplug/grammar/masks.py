"""Which tokens the grammars of a step allow at each of its positions: one bit per token id."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specplug import tree
from specplug.grammar.state import Grammar


class Looked(NamedTuple):
    """The positions of one row: its root, and the well-formed drafts below it."""

    grammar: Grammar
    tokens: Sequence[int]
    parents: Sequence[int]


def fill(rows: Sequence[Looked], sizes: Sequence[int]) -> np.ndarray:
    """Return int32 [sum(sizes), words]: bit i of a position's words says that token i may follow there.

    Row r has ``sizes[r]`` positions, at least ``1 + len(tokens)``: the root's, then one per node. Where a draft or one
    above it is not allowed, or ends the answer, nothing can follow and every bit is set. A row whose grammar has
    failed allows nothing, and its `error` says why.
    """
    if not rows:
        return np.zeros((0, 0), dtype=np.int32)
    masks = np.full((sum(sizes), rows[0].grammar.words), -1, dtype=np.int32)
    plain: list[tuple[Any, int]] = []
    drafted: list[tuple[Any, int, list[int]]] = []
    at = 0
    for (grammar, tokens, parents), size in zip(rows, sizes, strict=True):
        if grammar.ended:
            masks[at] = grammar.end_mask
        elif not grammar.error and tree.is_chain(parents):
            head = grammar.leading(tokens)
            if head:
                drafted.append((grammar.matcher, at, head))
            else:
                plain.append((grammar.matcher, at))
        elif not grammar.error:
            _walk(grammar, tokens, tree.children(parents), -1, masks[at : at + size])
        at += size
    if plain:
        _library().fill_next_token_bitmask_par(_executor(), plain, masks)
    if drafted:
        _library().fill_next_token_bitmask_par_with_draft_tokens(_executor(), drafted, masks)
    at = 0
    for (grammar, _, _), size in zip(rows, sizes, strict=True):
        if not grammar.ended:
            grammar.check()
        if grammar.error:
            masks[at : at + size] = 0
        at += size
    return masks


def _walk(grammar: Grammar, tokens: Sequence[int], below: Sequence[Sequence[int]], node: int, out: np.ndarray) -> None:
    """Fill the position of `node`, where the matcher stands, and of what it allows below."""
    if grammar.matcher.is_stopped():
        out[node + 1] = grammar.end_mask
        return
    _library().fill_next_token_bitmask(grammar.matcher, out, node + 1)
    for child in below[node + 1]:
        if grammar.step(tokens[child]):
            _walk(grammar, tokens, below, child, out)
            grammar.back()


def unpacked(masks: np.ndarray, vocab: int) -> Tensor:
    """Return bool [n, vocab] of packed masks, int32 [n, words]."""
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), axis=1, count=vocab, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def allowed(rows: Sequence[tuple[Grammar | None, Sequence[int], Sequence[int]]], vocab: int) -> Tensor | None:
    """Return bool [M, vocab] for the logits rows of a step, each row's root and drafts after each other.

    None: no row has a grammar.
    """
    if all(grammar is None for grammar, _, _ in rows):
        return None
    looked = [Looked(grammar, tokens, parents) for grammar, tokens, parents in rows if grammar is not None]
    found = iter(unpacked(fill(looked, [1 + len(row.tokens) for row in looked]), vocab))
    mask = torch.ones(sum(1 + len(tokens) for _, tokens, _ in rows), vocab, dtype=torch.bool)
    at = 0
    for grammar, tokens, _ in rows:
        for place in range(at, at + 1 + len(tokens)):
            if grammar is not None:
                mask[place] = next(found)
        at += 1 + len(tokens)
    return mask


def words64(masks: np.ndarray) -> np.ndarray:
    """Return packed masks, int32 [n, words], as int64 [n, ceil(words / 2)], to be uploaded with other numbers."""
    rows, words = masks.shape
    even = np.zeros((rows, words + words % 2), dtype=np.int32)
    even[:, :words] = masks
    return even.view(np.int64)


def forbid(values: Tensor, at: Tensor, masks: Tensor) -> None:
    """Set to -inf, in place, what the masks forbid: `values` float32 [n, V], rows `at` int64 [g].

    `masks` int64 [g, W]: of each such row, 64 token ids a word. Does not wait for the device.
    """
    if not len(at):
        return
    if values.is_cuda:
        from specplug.grammar.masks_triton import forbid as launch

        launch(values, at, masks)
        return
    shifts = torch.arange(64)
    bits = ((masks[:, :, None] >> shifts) & 1).flatten(1)[:, : values.shape[1]]
    values.index_copy_(0, at, values[at].masked_fill(bits == 0, float("-inf")))


@cache
def _executor() -> Any:
    """The threads that fill masks of several rows at once, one set for the process."""
    from llguidance import LLExecutor

    return LLExecutor()


def _library() -> Any:
    import llguidance.numpy  # its torch module compiles a kernel that is not needed here

    return llguidance.numpy
