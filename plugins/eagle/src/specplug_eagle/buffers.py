"""What the drafter takes of the arena and of the draft KV, as its plan declares it. Torch-free."""

STATES = 2
"""Vectors [H] that a slot keeps between `ingest` and `propose`: what makes the first draft, and what is recycled."""


def bytes_per_slot(hidden: int, dtype: str) -> int:
    """Return the arena bytes of a slot for a head of `hidden` units whose states are of `dtype` (``float32``, ...)."""
    return STATES * hidden * (4 if dtype == "float32" else 2)


def scratch_rows(depth: int, topk: int) -> int:
    """Return the rows that a round writes above the committed ones: `topk` for each depth but the last.

    Row i of the head's KV holds token i + 1 beside hidden state i. So the root's row is the last committed one, and
    what stands at the greatest depth is proposed and never read.
    """
    return max(depth - 1, 0) * topk
