"""The form of the tree, which is the same for every text. Torch-free."""

from __future__ import annotations

import heapq

Path = tuple[int, ...]
"""A node by the ranks of the candidates that lead to it: (0, 2) is head 1's third candidate after head 0's first."""


def best_paths(nodes: int, depth: int, top_k: int) -> list[Path]:
    """Return the likeliest `nodes` paths of at most `depth` heads, parents first.

    The paper picks them by each candidate's accuracy on a data set. Without one, a head's candidate of rank r
    is taken to be right in 1 of 2 (r + 1) cases, whatever precedes it.
    """
    waiting: list[tuple[int, int, Path]] = [(2, 1, (0,))] if depth > 0 else []
    found: list[Path] = []
    while waiting and len(found) < nodes:
        cost, length, path = heapq.heappop(waiting)  # cost: in so many cases it is right once
        found.append(path)
        last = path[-1]
        if last + 1 < top_k:
            heapq.heappush(waiting, (cost // (last + 1) * (last + 2), length, (*path[:-1], last + 1)))
        if length < depth:
            heapq.heappush(waiting, (2 * cost, length + 1, (*path, 0)))
    return found


def parents_of(paths: list[Path]) -> list[int]:
    """Return each node's parent among `paths`; -1: the root."""
    place = {path: at for at, path in enumerate(paths)}
    return [place.get(path[:-1], -1) for path in paths]
