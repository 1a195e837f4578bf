"""The EMA policy's update rule, with vectors worked out by hand, and which tier and which results count."""

from typing import Any

import pytest

from specplug.adaptive.ema import EmaPolicy, Steps
from specplug.adaptive.policy import Decision, Forced, Result, Round
from specplug.adaptive.tiers import DEFAULTS, Tier

QUICK: dict[str, Any] = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1, "down_hysteresis": 0.0}


def after(tier: Tier, start: int, *means: float) -> int:
    """Return the depth after one verify for each of `means`."""
    steps = Steps(tier, start)
    for mean in means:
        steps.update([mean])  # type: ignore[list-item]
    return steps.depth


@pytest.mark.parametrize(
    ("start", "mean", "to", "down"),
    [
        (3, 2.5, 3, 0.0),  # up needs more than current - 0.5
        (3, 2.51, 7, 0.0),
        (3, 3.0, 7, 0.0),
        (3, 0.5, 1, 0.0),  # down at previous - 0.5 or less
        (3, 0.51, 3, 0.0),
        (7, 2.0, 7, -0.75),  # 2.5 - 0.75 = 1.75
        (7, 1.0, 3, -0.75),
        (7, 0.0, 1, 0.0),  # several at once
        (1, 7.0, 7, 0.0),
    ],
)
def test_moves(start: int, mean: float, to: int, down: float) -> None:
    # Breaks with: < for <=, hysteresis with the other sign, one move at most.
    tier = Tier(1, (1, 3, 7), **{**QUICK, "down_hysteresis": down})
    assert after(tier, start, mean) == to


def test_up_hysteresis_holds_back() -> None:
    tier = Tier(1, (1, 3), **{**QUICK, "up_hysteresis": 0.4})
    assert after(tier, 1, 0.9) == 1
    assert after(tier, 1, 1.0) == 3


def test_nothing_changes_in_the_warm_up_or_between_intervals() -> None:
    tier = Tier(1, (1, 3), **{**QUICK, "warmup_batches": 10, "update_interval": 5})
    steps = Steps(tier, 1)
    for _ in range(14):
        steps.update([1])
        assert steps.depth == 1
    steps.update([1])
    assert steps.depth == 3
    steps.update([])
    assert steps._seen == 15, "nothing observed is no observation"


def test_from_0_it_goes_up_to_learn_and_comes_back() -> None:
    """The threshold down to 0 is half a draft."""
    tier = Tier(8, (0, 1, 3), **QUICK)
    steps = Steps(tier, 0)
    assert steps.ema == -1.0
    steps.update([0, 0])
    assert (steps.depth, steps.ema) == (1, 0.0), "the mean begins anew, and what 0 accepted is none of it"
    steps.update([0, 1])
    assert steps.depth == 0
    steps.update([0, 0])
    assert steps.depth == 1
    assert steps.ema == 0.5, "it was not below 0"
    steps.update([1, 1])
    assert steps.depth == 3
    only = Steps(Tier(64, (0,), **QUICK), None)
    only.update([0])
    assert only.depth == 0


def test_the_ceiling_holds_for_what_does_not_move_up() -> None:
    tier = Tier(1, (1, 3, 5, 7), **{**QUICK, "ceiling_coeff": 1.0, "down_hysteresis": -9.0})
    assert after(tier, 7, 4.2) == 5
    assert after(tier, 3, 3.0) == 5, "a move up is not held back"
    assert after(tier, 7, 0.0) == 1, "never below 1"


def test_the_mean_is_weighted() -> None:
    steps = Steps(Tier(1, (1, 3), ema_alpha=0.2), 3)
    steps.update([3, 0])
    assert steps.ema == pytest.approx(0.8 * 2 + 0.2 * 1.5)


def test_it_starts_where_it_is_told_or_in_the_middle() -> None:
    assert [Steps(tier, 3).depth for tier in DEFAULTS] == [3, 3, 1, 0]
    assert Steps(DEFAULTS[0], None).depth == 5


def result(slot: int, decision: Decision, accepted: int, limit: int | None = None) -> Result:
    most = decision.depth if limit is None else limit
    return Result(slot, decision, most, most, accepted)


def policy(*tiers: Tier) -> EmaPolicy:
    return EmaPolicy(tiers, [1, 2, 4, 8, 12, 16], 3)


def test_the_padded_batch_size_chooses_the_tier() -> None:
    """7 rows run as 8."""
    one = policy(Tier(1, (1, 3), **QUICK), Tier(8, (0,), **QUICK))
    assert [one.decide(rows, range(rows)).depth for rows in (1, 4, 5, 7, 9)] == [3, 3, 0, 0, 0]


def test_results_of_another_depth_are_left_out() -> None:
    """The drafts of a step may have been asked for before the last change."""
    # Breaks with: feedback credited to the present depth.
    one = policy(Tier(1, (1, 3, 7), **QUICK))
    old = one.decide(1, [0])
    one.observe(Round(1, 4, [result(0, old, 0)]))
    assert one.decide(1, [0]).depth == 1
    one.observe(Round(1, 4, [result(0, old, 3)]))
    assert one.decide(1, [0]).depth == 1, "3 accepted of 3 says nothing about a depth of 1"
    one.observe(Round(1, 2, [result(0, one.decide(1, [0]), 1)]))
    assert one.decide(1, [0]).depth == 3


def test_a_row_that_could_not_have_drafts_is_left_out() -> None:
    one = policy(Tier(1, (1, 3), **QUICK))
    now = one.decide(2, [0])
    one.observe(Round(2, 5, [result(0, now, 3), result(1, now, 0, limit=0)]))
    assert one.steps[0].ema == 3.0


def test_results_go_to_the_tier_that_asked() -> None:
    one = policy(Tier(1, (1, 3), **QUICK), Tier(8, (1, 3), **QUICK))
    small = one.decide(2, [0, 1])
    one.decide(8, range(8))
    one.observe(Round(2, 8, [result(0, small, 0), result(1, small, 0)]))
    assert [steps.depth for steps in one.steps] == [1, 3]


def test_forced_depths_come_once_each_and_the_last_stays() -> None:
    one = Forced([3, 0, 2])
    assert [one.decide(1, [0]).depth for _ in range(5)] == [3, 0, 2, 2, 2]
