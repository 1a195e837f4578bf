"""What is learned of how many drafts are accepted."""

import numpy as np
import pytest

from specplug.adaptive.acceptance import GRADES, ByDepth, Scores, expected

ONE, BOTH = np.array([1]), np.array([1, 1])
"""Grades of one row, and of two."""


def test_shares_count_what_was_reached() -> None:
    """Depth 3 below a rejected depth 2 says nothing."""
    shares = ByDepth(3, 3)
    for _ in range(200):
        shares.add(BOTH, np.array([3, 3]), np.array([1, 3]))
    for first, second, third in (shares.pooled(), shares.shares()[1]):
        assert first == pytest.approx(1.0, abs=0.02)
        assert second == pytest.approx(0.5, abs=0.05)
        assert third > 0.95


def test_shares_that_are_not_observed_stay_and_give_way_at_once() -> None:
    """A depth that is not drafted is not believed to have become better; two rounds tell that it has."""
    # Breaks with: shares that drift towards a prior (depths nearly as good are tried over and over).
    shares = ByDepth(2, 2)
    for _ in range(100):
        shares.add(ONE, np.array([2]), np.array([1]))
    for _ in range(600):
        shares.add(ONE, np.array([1]), np.array([1]))
    assert shares.pooled()[1] < 0.1
    for _ in range(2):
        shares.add(ONE, np.array([2]), np.array([2]))
    assert shares.pooled()[1] > 0.5
    assert shares.shares()[1, 1] > 0.5


def test_a_share_is_that_of_a_long_time_until_it_changes() -> None:
    rng, shares = np.random.default_rng(5), ByDepth(1, 1)
    found = []
    for step in range(2000):
        right = rng.random() < (0.2 if step < 1000 else 0.7)
        shares.add(ONE, np.array([1]), np.array([int(right)]))
        found.append(shares.shares()[1, 0])
    assert np.abs(np.array(found[300:1000]) - 0.2).max() < 0.1
    assert min(found[1040:]) > 0.5


def test_grades_have_shares_of_their_own_once_they_were_seen_often() -> None:
    """One grade is always right and seen a hundred times, another never and seen twice."""
    # Breaks with: one share for all; a grade that stands by itself from its first rows on.
    shares = ByDepth(1, 1)
    for _ in range(100):
        shares.add(np.array([3]), np.array([1]), np.array([1]))
    for _ in range(2):
        shares.add(np.array([0]), np.array([1]), np.array([0]))
    pooled, (seldom, unseen, _, often) = shares.pooled()[0], shares.shares()[:, 0]
    assert often > pooled == pytest.approx(unseen)
    assert 0.7 * pooled < seldom < pooled
    for _ in range(60):
        shares.add(np.array([0]), np.array([1]), np.array([0]))
    assert shares.shares()[0, 0] < 0.2
    assert shares.shares()[3, 0] > 0.9


def test_drafts_that_there_are_are_counted_by_grade_and_number() -> None:
    """One grade gets none, the other always four, asked for seven; the third never asked for more than two."""
    # Breaks with: one share of the drafts asked for, be they two or seven.
    shares = ByDepth(7, 7)
    for _ in range(100):
        shares.fill(np.array([0, 1, 3]), np.array([7, 2, 7]), np.array([0, 2, 4]))
    none, few, _, four = shares.made
    assert shares.made.shape == (GRADES, 7)
    assert none.max() < 0.25
    assert min(four[:4]) > 0.8
    assert max(four[4:]) < 0.1
    assert min(few[:2]) > 0.8


def test_the_newest_rounds_make_the_grade() -> None:
    """All accepted, all rejected, none made though asked for, and of the last row none wanted."""
    # Breaks with: a row without drafts that keeps its grade; one that had not been asked for any and loses it.
    scores, rows = Scores(5), np.arange(4)
    for _ in range(8):
        scores.add(rows, np.array([True, True, True, False]), np.array([3, 3, 0, 0]), np.array([3, 0, 0, 0]))
    neutral = scores.grades[4]
    assert scores.grades.tolist() == [GRADES - 1, 0, 0, neutral, neutral]
    for _ in range(4):
        scores.add(np.array([0]), np.array([True]), np.array([3]), np.array([0]))
    assert scores.grades[0] <= 1
    scores.forget(0)
    assert scores.grades[0] == neutral


def test_a_row_that_gets_none_is_asked_again_before_long() -> None:
    """Otherwise a request whose first drafts were rejected would never get any again."""
    # Breaks with: scores that stay where no drafts are asked for.
    scores, row = Scores(1), np.array([0])
    for _ in range(20):
        scores.add(row, np.array([True]), np.array([3]), np.array([0]))
    grades = []
    for _ in range(64):
        scores.add(row, np.array([False]), np.array([0]), np.array([0]))
        grades.append(scores.grades[0])
    assert 8 <= grades.count(0) <= 32
    assert grades[-1] > 0


def test_expected_drafts_fall_with_depth() -> None:
    found = expected(np.array([[0.5, 0.5], [1.0, 1.0]]))
    assert found.tolist() == [[0.5, 0.25], [0.995, pytest.approx(0.995**2)]]
