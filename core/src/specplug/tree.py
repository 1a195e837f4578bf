"""Parents lists: the one form of a chain, a tree and a block.

A proposal of n nodes is n tokens and n parents; ``parents[i]`` is the index of node i's parent, -1 for
a child of the root, and a parent stands before its children. In a verify row the root comes first, so
node i is the row's token ``i + 1``.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def is_chain(parents: Sequence[int]) -> bool:
    """Say whether every node's parent is the node before it."""
    return list(parents) == list(range(-1, len(parents) - 1))


def depths(parents: Sequence[int]) -> list[int]:
    """Return each node's depth; children of the root have depth 1."""
    if is_chain(parents):
        return list(range(1, len(parents) + 1))
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def children(parents: Sequence[int]) -> list[list[int]]:
    """Return the children of the root (entry 0) and of each node i (entry i + 1), in order."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        found[parent + 1].append(node)
    return found


def restricted(tokens: Sequence[int], parents: Sequence[int], kept: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tokens and parents of the nodes `kept`, ascending, each with all that is above it."""
    place = {-1: -1} | {node: at for at, node in enumerate(kept)}
    return [tokens[node] for node in kept], [place[parents[node]] for node in kept]


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Return bool [1 + n, 1 + n]: entry (i, j) says that row token i sees row token j (itself, or an ancestor)."""
    mask = np.eye(len(parents) + 1, dtype=bool)  # numpy: a row at a time costs a tenth of torch's
    mask[:, 0] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node + 1] |= mask[parent + 1]
    return torch.from_numpy(mask)


def valid_prefix(tokens: Sequence[int], parents: Sequence[int], vocab: int) -> int:
    """Return how many leading nodes are well formed: token inside the vocabulary, parent before the node.

    Every prefix of a parents-first list is a tree, so cutting there is always safe.
    """
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not (0 <= token < vocab and -1 <= parent < node):
            return node
    return len(tokens)
