"""Tables of what rounds take."""

import pytest

from specplug.adaptive.config import Measured
from specplug.adaptive.costs import STALE, Costs, Line

DEPTHS = range(8)


@pytest.mark.parametrize("exposed", [0.02, 0.15])
def test_the_level_of_what_is_granted_is_corrected(exposed: float) -> None:
    """At start nothing of the host's work is seen: it adds the same to every depth, also to those not tried yet."""
    line = Line()
    for depth in DEPTHS:
        line.grant(depth, 0.05 * depth)
    for _ in range(3):
        line.add(3, 0.15 + exposed)
    assert line.get(3) == pytest.approx(0.15 + exposed)
    assert line.get(5) == pytest.approx(0.25 + exposed)
    assert line.times()[1] == pytest.approx(0.05 + exposed)


def test_times_between_known_ones_lie_on_a_line() -> None:
    line = Line()
    line.add(4, 2.0)
    assert [line.get(at) for at in (1, 4, 9)] == [2.0, 2.0, 2.0]
    line.add(8, 4.0)
    assert [line.get(at) for at in (2, 4, 6, 8, 10)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    falling = Line()
    falling.add(1, 2.0)
    falling.add(2, 1.0)
    assert falling.get(9) == 1.0, "more never takes less"


def test_a_second_time_may_lower_the_first_and_later_ones_count_as_one_among_them() -> None:
    line = Line()
    for seconds, now in ((9.0, 9.0), (1.0, 1.0), (1.03, 1.01), (100.0, 1.01 + 0.25 * 0.0505)):
        line.add(1, seconds)
        assert line.get(1) == pytest.approx(now)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_few_times_that_do_not_fit_their_neighbours_are_doubted(times: int) -> None:
    """A slow machine for some rounds makes no depth look dear; many such times are believed."""
    # Breaks with: a place that was timed once or twice standing by itself.
    line = Line()
    for tokens in (8, 16, 24, 40, 48):
        for _ in range(20):
            line.add(tokens, 1.0 + tokens / 100)
    for _ in range(times):
        line.add(32, 1.6 * 1.32)
    assert line.get(32) < (1.25 if times < 2 else 1.5) * 1.32
    for _ in range(40):
        line.add(32, 1.6 * 1.32)
    assert line.get(32) == pytest.approx(1.6 * 1.32)


def test_costs_of_another_batch_size_stand_in() -> None:
    """What drafting adds there, on top of what a plain step takes here."""
    costs = Costs(Measured({(4, 4): 1.0, (4, 12): 3.0, (8, 8): 10.0}, {(4, 0): 0.5, (4, 2): 1.5, (8, 0): 2.0}))
    assert costs.round(8, 8, 0) == 12.0
    assert costs.between(8, 2) == 3.0
    assert costs.verify(8, 16) == 10.0 + 2.0
    assert costs.knows_plain(8)
    assert not costs.knows_plain(2)
    assert costs.knows_draft(8, 2)


def test_a_time_after_a_long_while_counts_for_more() -> None:
    """What is timed seldom would be believed wrong for thousands of rounds otherwise."""
    # Breaks with: one weight for all new times.
    line = Line()
    for _ in range(30):
        line.add(1, 1.0)
        line.add(4, 2.0)
    for at in range(1, 6):
        for _ in range(STALE):
            line.add(4, 2.0)
        before = line.get(1)
        line.add(1, 0.5)
        if at == 1:
            assert line.get(1) == pytest.approx(1.0 + 0.3 * (0.8 - 1.0)), "a hiccup is no trend"
        assert line.get(1) < before
    assert line.get(1) < 0.75
    assert line.get(4) == pytest.approx(2.0)
