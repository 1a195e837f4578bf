"""What forwards take changes while they are timed: contexts grow and start anew, the machine has other work.

Scripted costs and acceptance, no clock. Scores leave out how fast the machine happens to be.
"""

import random
from collections.abc import Callable

import pytest

from specplug.adaptive.config import Measured
from specplug.adaptive.cost import CostPolicy
from specplug.adaptive.costs import RECENT, Costs, Paced
from specplug.adaptive.policy import Decision, Result, Round
from specplug.adaptive.tiers import one_tier

DEPTHS = (0, 1, 2, 4)
WAVE = 64
"""Steps after which all contexts start anew, as when equal requests come in waves."""


def forward(rows: int, tokens: int, step: int) -> float:
    """Return seconds: rows of two widths cost something by themselves, and full contexts a fifth."""
    return 1.0 + (0.06 + 0.2 * (tokens - rows) / rows if tokens > rows else 0.0) + 0.2 * (step % WAVE) / WAVE


def speed(
    policy: CostPolicy | int, rows: int, made: float, right: float, pace: Callable[[int], float], seed: int = 5
) -> float:
    """Return tokens of a row by seconds at pace 1. A row gets drafts with chance `made`, each right with `right`."""
    rng, noise = random.Random(seed), random.Random(seed + 1)
    tokens, seconds, steps = 0.0, 0.0, 2400
    for step in range(steps):
        decision = policy.decide(rows, range(rows)) if isinstance(policy, CostPolicy) else Decision(policy)
        results = []
        for row in range(rows):
            limit = decision.limits.get(row, decision.depth)
            drafted = limit if rng.random() < made else 0
            accepted = next((at for at in range(drafted) if rng.random() >= right), drafted)
            results.append(Result(row, decision, limit, drafted, accepted))
        width = rows + sum(one.drafted for one in results)
        took = forward(rows, width, step)
        if step >= steps // 4:
            tokens += 1 + sum(one.accepted for one in results) / rows
            seconds += took + 0.01
        if isinstance(policy, CostPolicy):
            slower = pace(step) * (1.0 + 0.03 * abs(noise.gauss(0, 1)))
            policy.observe(Round(rows, width, results, took * slower, 0.01))
            policy.learn()
    return tokens / seconds


def cost_policy(rows: int) -> CostPolicy:
    return CostPolicy({depth: depth for depth in DEPTHS}, one_tier(DEPTHS), [rows], 4, Measured())


def even(step: int) -> float:
    return 1.0


def busy(step: int) -> float:
    return 1.8 if step % 400 >= 250 else 1.0


@pytest.mark.parametrize("seed", [5, 15])
@pytest.mark.parametrize(
    ("rows", "made", "right", "pace"),
    [
        (8, 0.07, 0.2, even),
        (32, 0.07, 0.2, even),
        (8, 1.0, 0.8, even),
        (32, 0.07, 0.2, busy),
        (8, 1.0, 0.5, busy),
        (32, 0.5, 0.2, busy),
        (32, 1.0, 0.8, busy),
    ],
)
def test_it_keeps_up_while_contexts_grow_and_the_machine_is_busy(
    rows: int, made: float, right: float, pace: Callable[[int], float], seed: int
) -> None:
    """Against the best fixed depth, plain decoding among them."""
    # Breaks with: a few drafts' tokens rounded down to plain steps (even, 32 rows); times that are not scaled
    # together (busy).
    run = speed(cost_policy(rows), rows, made, right, pace, seed)
    assert run >= 0.98 * max(speed(depth, rows, made, right, pace, seed) for depth in DEPTHS)


@pytest.mark.parametrize("rows", [8, 32])
def test_the_time_of_plain_steps_is_theirs_alone(rows: int) -> None:
    """One draft in the batch already makes a forward of another kind."""
    # Breaks with: totals rounded down.
    costs = Costs(Measured())
    for _ in range(20):
        costs.add_verify(rows, rows, 1.0)
        costs.add_verify(rows, rows + 1, 1.2)
    assert costs.verify(rows, rows) == pytest.approx(1.0)
    assert costs.verify(rows, rows + 1) == pytest.approx(1.2)


def test_places_that_are_not_timed_move_with_those_that_are() -> None:
    """Everything takes twice as long, and only plain steps are run."""
    # Breaks with: no scaling; a scaling that spares what was taken for granted.
    line = Paced()
    line.grant(4, 3.0)
    for _ in range(20):
        line.add(1, 1.0)
        line.add(2, 1.5)
    for _ in range(2 * RECENT):
        line.add(1, 2.0)
    assert line.get(1) == pytest.approx(2.0, rel=0.05)
    assert line.get(2) == pytest.approx(3.0, rel=0.05)
    assert line.get(4) == pytest.approx(6.0, rel=0.05)


def test_hiccups_and_a_single_place_move_nothing_else() -> None:
    """Fewer than half of the newest times, or a change that is small."""
    # Breaks with: a mean in place of the median; a scaling by whatever the newest times say.
    line = Paced()
    for at in range(200):
        line.add(1, 9.0 if at % 5 == 0 and at > 9 else 1.0)
        line.add(2, 1.5 if at < 100 else 1.7)
    assert line.get(1) == pytest.approx(1.0, rel=0.05)
    assert line.get(2) == pytest.approx(1.7, rel=0.02)
