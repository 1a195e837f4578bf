"""How often each run of at most `depth` tokens occurred, and trees of what is likely to follow.

The method is that of SuffixDecoding (arXiv 2411.04975, section 4). A trie of bounded depth stands for the paper's
suffix tree: it holds the same counts up to that depth, and a forgotten text can be counted out again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple


class Node:
    """One run of tokens: how often it occurred, and what followed."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


class Tree(NamedTuple):
    """Drafts, parents first, and how many of them are expected to be right."""

    tokens: list[int]
    parents: list[int]
    score: float


class SuffixTrie:
    """Counts of all runs of at most `depth` tokens of the texts it was given."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node()

    def push(self, ends: Sequence[Node], token: int) -> list[Node]:
        """Count `token` at the end of a text, and return the nodes of that text's suffixes, longest first.

        `ends`: what the push before it returned; empty at the beginning of a text.
        """
        found = []
        for node in (*ends, self.root):
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node()
            child.count += 1
            found.append(child)
        # The longest one cannot grow.
        return found if len(found) < self.depth else found[1:]

    def add(self, text: Iterable[int]) -> None:
        """Count a whole text."""
        ends: list[Node] = []
        for token in text:
            ends = self.push(ends, token)

    def remove(self, text: Sequence[int]) -> None:
        """Count out a text that was added."""
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.depth]:
                child = node.children[token]
                child.count -= 1
                if not child.count:  # then nothing below is left either
                    del node.children[token]
                    break
                node = child

    def ends(self, text: Sequence[int]) -> list[Node]:
        """Return the nodes of the suffixes of `text` that occurred in any text, longest first."""
        found: list[Node] = []
        for length in range(1, min(len(text), self.depth - 1) + 1):
            node: Node | None = self.root
            for token in text[-length:]:
                node = node.children.get(token) if node is not None else None
            if node is None:  # a longer suffix ends with this one
                break
            found.append(node)
        return found[::-1]


def best_tree(ends: Sequence[Node], nodes: int, depth: int, factor: float, least: float) -> Tree:
    """Return the tree with the highest score among those that the matches `ends` (longest first) lead to.

    At most `nodes` drafts, `depth` deep, and `factor` drafts per token of the match; each likelier than `least`.
    """
    best = Tree([], [], 0.0)
    for at, node in enumerate(ends):
        length = len(ends) - at
        if node.children:
            tree = _expand(node, min(nodes, max(1, int(factor * length))), depth, least)
            if tree.score > best.score:
                best = tree
    return best


def _expand(start: Node, nodes: int, depth: int, least: float) -> Tree:
    """Take the likeliest node next to those taken, again and again."""
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    order = count()
    waiting: list[tuple[float, int, int, int, int, Node]] = []

    def open_(node: Node, probability: float, parent: int, level: int) -> None:
        if level < depth:
            for token, child in node.children.items():
                likely = probability * child.count / node.count
                if likely >= least:
                    heapq.heappush(waiting, (-likely, next(order), token, parent, level + 1, child))

    open_(start, 1.0, -1, 0)
    while waiting and len(tokens) < nodes:
        negative, _, token, parent, level, node = heapq.heappop(waiting)
        score -= negative
        tokens.append(token)
        parents.append(parent)
        open_(node, -negative, len(tokens) - 1, level)
    return Tree(tokens, parents, score)
