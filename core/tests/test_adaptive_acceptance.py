"""What is learned of how many drafts are accepted."""

import numpy as np
import pytest

from specplug.adaptive.acceptance import EDGES, GRADES, UNASKED, UNKNOWN, Scores, Shares, expected

ONE, BOTH = np.array([1]), np.array([1, 1])
"""Grades of one row, and of two."""
BEST = len(EDGES)
"""The grade of rows all of whose drafts pass."""


def test_shares_count_what_was_reached() -> None:
    """Depth 3 below a rejected depth 2 says nothing."""
    shares = Shares(3, 0.6)
    for _ in range(200):
        shares.add(BOTH, np.array([3, 3]), np.array([1, 3]))
    for first, second, third in (shares.pooled(), shares.shares()[1]):
        assert first == pytest.approx(1.0, abs=0.02)
        assert second == pytest.approx(0.5, abs=0.05)
        assert third > 0.95


def test_shares_that_are_not_observed_stay_and_give_way_at_once() -> None:
    """A depth that is not drafted is not believed to have become better; two rounds tell that it has."""
    # Breaks with: shares that drift towards a prior (depths nearly as good are tried over and over).
    shares = Shares(2, 0.6)
    for _ in range(100):
        shares.add(ONE, np.array([2]), np.array([1]))
    for _ in range(600):
        shares.add(ONE, np.array([1]), np.array([1]))
    assert shares.pooled()[1] < 0.1
    for _ in range(2):
        shares.add(ONE, np.array([2]), np.array([2]))
    assert shares.pooled()[1] > 0.5
    assert shares.shares()[1, 1] > 0.5


@pytest.mark.parametrize(("before", "after"), [(0.2, 0.7), (0.8, 0.3)])
def test_a_share_is_that_of_a_long_time_until_it_changes(before: float, after: float) -> None:
    """Both ways: long believed to within a tenth, and given up within forty rounds."""
    # Breaks with: no evidence for one of the two directions; a memory that is short all the time.
    rng, shares = np.random.default_rng(5), Shares(1, 0.6)
    found = []
    for step in range(2000):
        right = rng.random() < (before if step < 1000 else after)
        shares.add(ONE, np.array([1]), np.array([int(right)]))
        found.append(shares.shares()[1, 0])
    assert np.abs(np.array(found[300:1000]) - before).max() < 0.1
    assert np.abs(np.array(found[1040:]) - after).max() < 0.2


def test_a_change_is_believed_on_its_own_observations() -> None:
    """After a thousand rejections in a row a few in a row accepted count alone, and the next rejections again."""
    # Breaks with: what was seen before the change left in what was seen since.
    shares = Shares(1, 0.6)
    for came in (0, 1, 0):
        for _ in range(1000 if came == 0 else 12):
            shares.add(ONE, np.array([1]), np.array([came]))
        assert shares.pooled()[0] == pytest.approx(came, abs=0.1)


def test_rows_of_one_forward_say_less_than_as_many_forwards() -> None:
    """They are often alike: 16 rows with the same text, once, are no change of texts."""
    # Breaks with: a row's evidence that does not depend on how many there are.
    together, apart = Shares(1, 0.6), Shares(1, 0.6)
    rng = np.random.default_rng(3)
    for _ in range(300):
        for shares in (together, apart):
            shares.add(ONE, np.array([1]), np.array([int(rng.random() < 0.7)]))
    together.add(np.full(16, 1), np.full(16, 1), np.zeros(16, dtype=int))
    for _ in range(16):
        apart.add(ONE, np.array([1]), np.array([0]))
    assert apart.pooled()[0] < 0.1
    assert together.pooled()[0] > 0.6


def test_grades_have_shares_of_their_own_once_they_were_seen_often() -> None:
    """One grade is always right and seen a hundred times, another never and seen twice."""
    # Breaks with: one share for all; a grade that stands by itself from its first rows on.
    shares = Shares(1, 0.6)
    for _ in range(100):
        shares.add(np.array([3]), np.array([1]), np.array([1]))
    for _ in range(2):
        shares.add(np.array([0]), np.array([1]), np.array([0]))
    pooled, (seldom, unseen, _, often, _) = shares.pooled()[0], shares.shares()[:, 0]
    assert often > pooled == pytest.approx(unseen)
    assert 0.7 * pooled < seldom < pooled
    for _ in range(60):
        shares.add(np.array([0]), np.array([1]), np.array([0]))
    assert shares.shares()[0, 0] < 0.2
    assert shares.shares()[3, 0] > 0.9


def test_drafts_that_there_are_are_counted_by_grade_and_number() -> None:
    """One grade gets none, the other always four, asked for seven; the third never asked for more than two."""
    # Breaks with: one share of the drafts asked for, be they two or seven.
    shares = Shares(7, 0.99)
    for _ in range(100):
        shares.add(np.array([0, 1, 3]), np.array([7, 2, 7]), np.array([0, 2, 4]))
    assert shares.shares().shape == (GRADES, 7)
    none, few, _, four, _ = shares.shares().cumprod(1)
    assert none.max() < 0.25
    assert min(four[:4]) > 0.8
    assert max(four[4:]) < 0.1
    assert min(few[:2]) > 0.8


def test_the_newest_rounds_make_the_grade() -> None:
    """All accepted, all rejected, none made though asked for, and of the last two none wanted."""
    # Breaks with: a row without drafts that keeps its grade.
    scores = Scores(5)
    for _ in range(8):
        scores.add(np.arange(3), np.array([3, 3, 0]), np.array([3, 0, 0]))
        scores.skip(np.array([3]))
    assert scores.grades.tolist() == [BEST, 0, 0, UNKNOWN, UNKNOWN]
    for _ in range(4):
        scores.add(np.array([0]), np.array([3]), np.array([0]))
    assert scores.grades[0] <= 1
    scores.forget(0)
    assert scores.grades[0] == UNKNOWN


def test_a_row_that_was_not_asked_for_a_while_is_as_good_as_new() -> None:
    """Otherwise a request whose first drafts were rejected would never get any again."""
    # Breaks with: a grade that stays where no drafts are asked for; a score that outlives it.
    scores, row = Scores(1), np.array([0])
    for _ in range(20):
        scores.add(row, np.array([3]), np.array([0]))
    grades = []
    for _ in range(UNASKED):
        scores.skip(row)
        grades.append(scores.grades[0])
    assert grades == [0] * (UNASKED - 1) + [UNKNOWN]
    scores.add(row, np.array([3]), np.array([3]))
    assert scores.grades[0] == 2


def test_grades_that_were_handed_out_stay_as_they_were() -> None:
    """A round's results come rounds after its drafts were asked for, and count for the grades of that time."""
    # Breaks with: grades changed in place; an array that is replaced though nothing changed (and all weighed anew).
    scores, row = Scores(2), np.array([0])
    before = scores.grades
    scores.add(row, np.array([3]), np.array([0]))
    assert before.tolist() == [UNKNOWN, UNKNOWN]
    after = scores.grades
    scores.add(row, np.array([3]), np.array([0]))
    assert scores.grades is after


def test_expected_drafts_fall_with_depth() -> None:
    found = expected(np.array([[0.5, 0.5], [1.0, 1.0]]))
    assert found.tolist() == [[0.5, 0.25], [0.995, pytest.approx(0.995**2)]]
