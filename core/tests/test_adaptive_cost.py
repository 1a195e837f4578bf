"""The cost policy in simulation: scripted acceptance, scripted costs, no clock.

Time is in plain steps of one row. A draft costs `draft` for all rows together, a token in the forward `token`.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from specplug.adaptive.acceptance import EDGES, UNASKED, UNKNOWN
from specplug.adaptive.config import Measured
from specplug.adaptive.cost import PROBE_SHARE, CostPolicy
from specplug.adaptive.guard import BOUND, TRYING, WINDOW
from specplug.adaptive.policy import Decision, Result, Round
from specplug.adaptive.tiers import one_tier

DEPTHS = range(8)
ROWS = [1, 2, 4, 8, 12, 16, 24, 32]


class World(NamedTuple):
    """What things take."""

    draft: float
    token: float
    fixed: float = 0.0

    def verify(self, tokens: int) -> float:
        return 1.0 + self.token * (tokens - 1)

    def between(self, depth: int) -> float:
        return self.fixed + self.draft * depth if depth else 0.0


WORLDS = {
    "a cheap draft": World(0.05, 0.01),
    "a draft model": World(0.2, 0.01),
    "a costly draft": World(0.5, 0.05),
    "mostly fixed costs": World(0.05, 0.02, 0.5),
    "dear tokens": World(0.02, 0.1),
}
Chance = Callable[[int, int], float]
"""(step, row) -> chance that a draft is accepted."""
ACCEPTANCE: dict[str, Chance] = {
    "dead": lambda step, row: 0.0,
    "perfect": lambda step, row: 1.0,
    "alternating": lambda step, row: 0.95 if step // 20 % 2 else 0.0,
    "alternating slowly": lambda step, row: 0.95 if step // 200 % 2 else 0.0,
    "drops": lambda step, row: 0.95 if step < 600 else 0.0,
    "rises": lambda step, row: 0.0 if step < 600 else 0.9,
    "middling": lambda step, row: 0.6,
    "rows differ": lambda step, row: 0.95 if row % 2 else 0.05,
    "rows change": lambda step, row: 0.95 if (step + 37 * row) // 40 % 2 else 0.05,
}


class Played(NamedTuple):
    """A run: per step its depth, its time, and the tokens it emitted per row."""

    depths: list[int]
    times: list[float]
    emitted: list[float]
    limits: list[list[int]]

    def speed(self, since: int = 0) -> float:
        return sum(self.emitted[since:]) / sum(self.times[since:])


def play(
    policy: CostPolicy | int, world: World, chance: Chance, rows: int, steps: int = 1200, behind: bool = False
) -> Played:
    """Run a policy, or a fixed depth. `behind`: a round is decided before the one ahead of it ends, as on a device."""
    rng = random.Random(7)
    found = Played([], [], [], [])
    slots, decided = list(range(rows)), deque[Decision]()
    for step in range(steps):
        while len(decided) <= behind:
            decided.append(policy.decide(rows, slots) if isinstance(policy, CostPolicy) else Decision(policy))
        decision, results = decided.popleft(), []
        for row in range(rows):
            limit, accepted = decision.limits.get(row, decision.depth), 0
            draws = [rng.random() for _ in DEPTHS]
            while accepted < limit and draws[accepted] < chance(step, row):
                accepted += 1
            results.append(Result(row, decision, limit, limit, accepted))
        tokens = rows + sum(one.limit for one in results)
        verify, between = world.verify(tokens), world.between(decision.depth)
        found.depths.append(decision.depth)
        found.limits.append([one.limit for one in results])
        found.times.append(verify + between)
        found.emitted.append(1 + sum(one.accepted for one in results) / rows)
        if isinstance(policy, CostPolicy):
            urgent = policy.urgent
            if behind and not urgent:  # what comes next is launched before it is told
                decided.append(policy.decide(rows, slots))
            policy.observe(Round(rows, tokens, results, verify, between))
            if behind and urgent:  # or at least before it learns
                decided.append(policy.decide(rows, slots))
            policy.learn()
    return found


def play_scripted(policy: CostPolicy, world: World, lengths: Mapping[int, float], rows: int, steps: int) -> float:
    """Run a policy where a depth always yields the same tokens; returns tokens of a row by time, of the second half."""
    tokens = seconds = 0.0
    decision = policy.decide(rows, range(rows))
    for step in range(steps):
        limits = [decision.limits.get(row, decision.depth) for row in range(rows)]
        accepted = [int(lengths[limit]) - 1 for limit in limits]
        results = [Result(row, decision, *each) for row, each in enumerate(zip(limits, limits, accepted, strict=True))]
        took = world.verify(rows + sum(limits)), world.between(decision.depth)
        if step >= steps // 2:
            tokens += 1 + sum(accepted) / rows
            seconds += sum(took)
        policy.observe(Round(rows, rows + sum(limits), results, *took))
        policy.learn()
        decision = policy.decide(rows, range(rows))
    return tokens / seconds


def cost_policy(measured: Measured | None = None, start: int = 3) -> CostPolicy:
    return CostPolicy({depth: depth for depth in DEPTHS}, one_tier(DEPTHS), ROWS, start, measured or Measured())


def worst_window(run: Played, plain: float) -> float:
    """Return the most time that any window took, over what plain decoding would have taken for its tokens."""
    at = range(len(run.times) - WINDOW + 1)
    return max(sum(run.times[one : one + WINDOW]) / (plain * sum(run.emitted[one : one + WINDOW])) for one in at)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("world", WORLDS)
def test_no_window_is_slower_than_plain_by_more_than_3_percent(
    world: str, acceptance: str, rows: int, behind: bool
) -> None:
    # Breaks with: no guard; gains that pay for later losses; tries at a fixed interval; rounds on their way that
    # count as lost only when they have ended.
    run = play(cost_policy(), WORLDS[world], ACCEPTANCE[acceptance], rows, behind=behind)
    assert worst_window(run, WORLDS[world].verify(rows)) <= 1.03


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("acceptance", ["dead", "perfect", "middling", "rows differ"])
@pytest.mark.parametrize("world", ["a cheap draft", "a draft model"])
def test_it_is_within_3_percent_of_the_best_fixed_depth(world: str, acceptance: str, rows: int, behind: bool) -> None:
    """Chosen in hindsight, plain decoding among them, of those that the bound allows round after round."""
    run = play(cost_policy(), WORLDS[world], ACCEPTANCE[acceptance], rows, behind=behind)
    fixed = [play(depth, WORLDS[world], ACCEPTANCE[acceptance], rows) for depth in DEPTHS]
    plain = WORLDS[world].verify(rows)
    allowed = [each for each in fixed if (1 + behind) * (each.times[0] / plain - 1) <= TRYING * BOUND * WINDOW]
    assert len(allowed) == len(fixed) or (world, rows, behind) == ("a draft model", 32, True)
    assert run.speed() >= 0.97 * max(each.speed() for each in allowed)


@pytest.mark.parametrize("world", WORLDS)
def test_it_returns_from_0(world: str) -> None:
    """Acceptance that rises is found out, though nothing is observed at 0."""
    # Breaks with: no tries at depth 0.
    run = play(cost_policy(), WORLDS[world], ACCEPTANCE["rises"], 1, 1800)
    best = max(play(depth, WORLDS[world], ACCEPTANCE["rises"], 1, 1800).speed(1200) for depth in DEPTHS)
    assert run.speed(1200) >= 0.9 * best
    assert run.depths[400:600].count(0) > 180


def test_rows_that_differ_get_drafts_of_their_own() -> None:
    """Where tokens are dear, a row whose drafts are rejected has none, and that is faster than any fixed depth."""
    # Breaks with: one limit for all rows.
    world = WORLDS["dear tokens"]
    policy = cost_policy()
    run = play(policy, world, ACCEPTANCE["rows differ"], 8)
    best = max(play(depth, world, ACCEPTANCE["rows differ"], 8).speed() for depth in DEPTHS)
    assert run.speed() > 1.1 * best
    given = [sum(limits[row] for limits in run.limits[200:]) for row in range(8)]
    assert max(given[::2]) < min(given[1::2]) / 2


@pytest.mark.parametrize(
    ("world", "rows", "more"), [("a cheap draft", 32, 1.1), ("mostly fixed costs", 8, 1.05), ("dear tokens", 8, 1.1)]
)
def test_rows_get_drafts_while_theirs_are_right(world: str, rows: int, more: float) -> None:
    """Each request copies for forty steps, then writes freely for forty: faster than any fixed depth."""
    # Breaks with: one expectation for all rows; grades that take long to change.
    run = play(cost_policy(), WORLDS[world], ACCEPTANCE["rows change"], rows, 2400)
    best = max(play(depth, WORLDS[world], ACCEPTANCE["rows change"], rows, 2400).speed() for depth in DEPTHS)
    assert run.speed() >= more * best


def test_a_depth_is_not_looked_at_for_having_been_the_best() -> None:
    """The best depth changes all the time; the one before was timed just now."""
    # Breaks with: a round of the best depth that begins a look at it.
    policy = cost_policy()
    play(policy, WORLDS["a cheap draft"], ACCEPTANCE["alternating"], 8, 2400)
    assert policy.report()["looks"] < 60


def test_a_look_gives_a_row_all_drafts_or_none() -> None:
    """What is thought of deep drafts is learned from nothing else."""
    # Breaks with: looks cut to the drafts that are thought worth their tokens.
    policy, cut = cost_policy(), 0
    for step in range(600):
        decision = policy.decide(8, range(8))
        looked = policy._flying[-1].why == "looked at"
        results = []
        for row in range(8):
            limit = decision.limits.get(row, decision.depth)
            results.append(Result(row, decision, limit, limit, min(limit, (step // 7 + row) % 3)))
            if looked:
                assert limit in (0, decision.depth)
                cut += limit == 0
        tokens = 8 + sum(one.limit for one in results)
        policy.observe(Round(8, tokens, results, WORLDS["dear tokens"].verify(tokens), 0.02 * decision.depth))
        policy.learn()
    assert policy.report()["looks"] > 3
    assert cut


def test_plain_steps_are_timed_more_often_where_they_are_nearly_as_fast() -> None:
    """Where drafts gain a twelfth a wrong time of plain steps would turn the choice."""
    # Breaks with: plain rounds at a fixed interval.
    lengths = {0: 1.0, **dict.fromkeys(range(1, 8), 2.0)}
    seen = []
    for token in (0.1, 0.8):
        policy = cost_policy()
        play_scripted(policy, World(0.05, token), lengths, 1, 1200)
        seen.append(policy._reasons["plain"])
    few, many = seen
    assert few < 20
    assert 40 < many < 90


def test_what_was_measured_before_is_used_from_the_first_step() -> None:
    world = WORLDS["a draft model"]
    known = Measured(
        {(1, tokens): world.verify(tokens) for tokens in range(1, 9)},
        {(1, depth): world.between(depth) for depth in DEPTHS},
        {1: [0.95] * 7},
    )
    assert cost_policy(known).decide(1, [0]).depth > 3
    assert cost_policy().decide(1, [0]).depth == 0, "without, plain steps are timed first"


def test_depths_that_can_never_gain_are_hardly_tried() -> None:
    """A draft that costs as much as the target's step."""
    run = play(cost_policy(), World(1.5, 0.0), ACCEPTANCE["perfect"], 1, 2000)
    assert sum(depth > 0 for depth in run.depths) < 12


def test_a_hiccup_in_the_first_times_does_not_last() -> None:
    """The first drafted round takes 50 times as long as those that would follow."""
    # Breaks with: costs that are never measured again.
    world, policy = WORLDS["a cheap draft"], cost_policy()
    decision, drafted = policy.decide(1, [0]), 0
    for _ in range(2000):
        depth = decision.depth
        slow = 50.0 if depth and not drafted else 1.0
        drafted += depth > 0
        took = slow * world.verify(1 + depth), slow * world.between(depth)
        policy.observe(Round(1, 1 + depth, [Result(0, decision, depth, depth, depth)], *took))
        policy.learn()
        decision = policy.decide(1, [0])
    assert drafted > 500


def test_plain_steps_are_timed_again_while_drafts_pay() -> None:
    """What drafting is measured against would be out of date otherwise."""
    run = play(cost_policy(), WORLDS["a cheap draft"], ACCEPTANCE["perfect"], 1, 900)
    assert run.depths[50:].count(0) == 3


def test_no_drafts_where_nobody_may_have_any() -> None:
    policy = cost_policy()
    assert all(policy.decide(2, []).depth == 0 for _ in range(5))


def test_a_row_is_forgotten_with_its_request() -> None:
    policy, decision = cost_policy(), Decision(3)
    for _ in range(30):
        policy.observe(Round(2, 8, [Result(5, decision, 3, 3, 0), Result(6, decision, 3, 3, 3)]))
        policy.learn()
    assert policy._scores.grades[4:7].tolist() == [UNKNOWN, 0, len(EDGES)]
    policy.forget(5)
    assert policy._scores.grades[4:7].tolist() == [UNKNOWN, UNKNOWN, len(EDGES)]


def test_a_row_that_was_given_up_is_asked_again_while_all_are_plain() -> None:
    """Nothing is learned in a plain round, but what was learned of a request grows old."""
    # Breaks with: grades that stand still while nothing is asked for; offers that are not weighed anew then.
    policy = cost_policy()
    step, learned = Decision(3), 0
    for _ in range(30):
        policy.observe(Round(2, 8, [Result(5, step, 3, 3, 0), Result(6, step, 3, 3, 3)]))
        policy.learn()
    plain = Decision(0)
    for _ in range(UNASKED):
        policy.observe(Round(2, 2, [Result(5, plain, 0, 0, 0), Result(6, plain, 0, 0, 0)]))
        learned += policy._learned
        policy.learn()
    assert policy._scores.grades[5:7].tolist() == [UNKNOWN, UNKNOWN]
    assert learned == 1


def test_rows_without_drafts_say_nothing_of_drafts() -> None:
    """A drafter that finds none in two rounds of three, and is right in the third."""
    # Breaks with: rounds without drafts that count as rejected ones.
    policy, decision = cost_policy(), Decision(3)
    for at in range(90):
        drafted = 0 if at % 3 else 3
        policy.observe(Round(1, 1 + drafted, [Result(0, decision, 3, drafted, drafted)], 1.0, 0.1))
        policy.learn()
    assert min(policy._shares[0].accepted.pooled()) > 0.9
    assert policy._shares[0].drafted.shares()[:, 0] == pytest.approx(1 / 3, abs=0.1)


@pytest.mark.parametrize("lost", [0.0, 0.8])
def test_tries_that_lose_more_than_is_believed_are_made_less_often(lost: float) -> None:
    """Drafts that are never right cost 0.3 plain steps a try; lately they were seen to lose `lost`."""
    # Breaks with: tries that are spaced by what is believed alone; losses of tries that are not noted.
    policy, tries = cost_policy(), 0
    for step in range(2000):
        decision = policy.decide(8, range(8))
        drafts = 8 * decision.depth
        results = [Result(row, decision, decision.depth, decision.depth, 0) for row in range(8)]
        policy.observe(Round(8, 8 + drafts, results, 1.3 if drafts else 1.0, 0.001))
        if step >= 1000:
            tries += drafts > 0
            if lost:
                policy._lost = lost
        policy.learn()
    if lost:
        assert 1 <= tries <= 1000 * PROBE_SHARE / lost + 1
    else:
        assert policy._lost == pytest.approx(0.3, abs=0.05)
        assert tries == pytest.approx(1000 * PROBE_SHARE / 0.3, rel=0.3)


@pytest.mark.parametrize(("first", "deeper"), [(0.2, 0.0), (1.0, 0.0), (0.75, 0.75)])
@pytest.mark.parametrize("rows", [1, 8])
def test_depths_that_are_nearly_as_good_are_told_apart(first: float, deeper: float, rows: int) -> None:
    """What the first draft and the later ones are right in; the best depth is chosen nearly always, hiccups or not."""
    # Breaks with: shares that drift while they are not observed; a request's share that is counted for its tier's
    # and once more for itself; a hiccup that is believed until the next look.
    rng, world, policy = random.Random(11), World(0.064, 0.004, 0.02), cost_policy(start=7)
    worth = {0: 1.0}
    for depth in DEPTHS[1:]:
        worth[depth] = 1 + first * sum(deeper**at for at in range(depth))
    rate = {depth: worth[depth] / (world.verify(rows + rows * depth) + world.between(depth)) for depth in DEPTHS}
    base, spent, gained = world.verify(rows), 0.0, 0.0
    for step in range(2400):
        decision = policy.decide(rows, range(rows))
        results = []
        for row in range(rows):
            limit, accepted = decision.limits.get(row, decision.depth), 0
            while accepted < limit and rng.random() < (deeper if accepted else first):
                accepted += 1
            results.append(Result(row, decision, limit, limit, accepted))
        tokens = rows + sum(one.limit for one in results)
        took = world.verify(tokens) * (1.0 + 0.02 * abs(rng.gauss(0, 1))), world.between(decision.depth)
        hiccup = 2.5 if rng.random() < 0.004 else 1.0
        policy.observe(Round(rows, tokens, results, hiccup * took[0], took[1]))
        policy.learn()
        if step >= 400:  # by expectation, so that luck is no part of it
            spent += (world.verify(tokens) + took[1]) / base
            gained += sum(worth[one.limit] for one in results) / rows
    assert gained / spent >= 0.97 * max(rate.values()) * base


@pytest.mark.parametrize("grown", [0.5, 2.0])
def test_costs_taken_for_granted_do_not_last(grown: float) -> None:
    """One depth was measured as dearer, or cheaper, than it is; a hundred rounds later it is chosen for what it is."""
    # Breaks with: depths that are never looked at because of what they are believed to cost.
    world = World(0.06, 0.01)
    known = Measured(
        {(8, 8 + 8 * depth): world.verify(8 + 8 * depth) for depth in DEPTHS},
        {(8, depth): world.between(depth) * (grown if depth == 1 else 1.0) for depth in DEPTHS},
    )
    lengths = {0: 1.0, **dict.fromkeys(range(1, 8), 2.0)}  # the first draft is right, all others wrong
    policy = cost_policy(known)
    found = play_scripted(policy, world, lengths, 8, 1500)
    best = max(lengths[depth] / (world.verify(8 + 8 * depth) + world.between(depth)) for depth in DEPTHS)
    assert found >= 0.985 * best
