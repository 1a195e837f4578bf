"""The store in C++ (src/cpp): what requests said, and what followed the same tokens before."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_BYTES: int
"""Least memory of one history."""
OWN: int
SHARED: int
CORPUS: int
"""The histories that a slot drafts from."""

class Store:
    """The texts of an engine's requests, by slot. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        slots: int,
        nodes: int,
        bytes: int,
        max_depth: int,
        min_match: int,
        min_breadth: int,
        max_breadth: int,
        by_count: bool,
        min_confidence: float,
        min_gain: float,
        shared: bool = False,
        corpus_nodes: int = 0,
    ) -> None:
        """Make a store of at most `bytes` for `slots` requests and `nodes` drafts each.

        `shared`: keep a history of all requests too. `corpus_nodes`: drafts reserved for the corpus; 0 = none.
        The others are fields of `NgramConfig`. Raises ValueError where `bytes` is too small.
        """

    def add_document(self, tokens: Sequence[int]) -> bool:
        """Add a text to the corpus, before the first `admit`; False where the memory does not suffice."""

    def admit(self, slot: int, known: int = 0) -> None:
        """Start a text. Its first `known` tokens are context only to the shared history, which has them already."""

    def release(self, slot: int) -> tuple[int, list[int]]:
        """End the text of `slot`; return its length and its last tokens. A slot without text is (0, [])."""

    def insert(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append `tokens[i]` to the text of `slots[i]`."""

    def propose(
        self,
        slots: Sequence[int],
        limits: Sequence[int],
        depth: int,
        tokens: npt.NDArray[np.int64],
        parents: npt.NDArray[np.int64],
        num_valid: npt.NDArray[np.int64],
    ) -> None:
        """Look up each slot with a limit above 0 and write its row of the C-contiguous int64 arrays.

        `tokens` and `parents` [rows, N], `num_valid` [rows] are indexed by slot; other rows stay as they are.
        """

    def stats(self) -> dict[str, int]:
        """Return lookups, declined (of these), tokens held, forgotten, bytes, nodes and entries of the trees."""

    def held(self, slot: int, source: int = OWN) -> dict[str, int]:
        """Return the part of `stats` that is about one history. This and the next two are for tests."""

    def followers(self, slot: int, context: Sequence[int], source: int = OWN) -> list[tuple[int, int]]:
        """Return (token, times) of what followed `context` in a history of `slot`, the most recent first."""

    def anchors(self, slot: int, source: int = OWN) -> list[tuple[int, int]]:
        """Return (tokens, occurrences) of the contexts that the text of `slot` ends with, the longest first."""
