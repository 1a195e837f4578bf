"""The bound on what drafts may lose against plain decoding."""

import pytest

from specplug.adaptive.guard import WINDOW, Guard


def test_the_guard_counts_every_run_of_rounds() -> None:
    """Gains before a run of losses do not pay for it, losses older than the window do not count."""
    guard = Guard()
    for _ in range(50):
        guard.add(-1.0)
    for _ in range(3):
        guard.add(1.0)
    assert guard.lost == 3.0
    assert guard.usual == pytest.approx(4.2 - 3.0)
    assert guard.trying > guard.usual
    for _ in range(WINDOW):
        guard.add(0.0)
    assert guard.lost == 0.0
