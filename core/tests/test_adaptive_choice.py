"""What a round of a depth is expected to take."""

import numpy as np
import pytest

from specplug.adaptive.choice import Offers
from specplug.adaptive.config import Measured
from specplug.adaptive.costs import Costs


def test_a_round_takes_the_mean_over_how_many_rows_get_drafts() -> None:
    """Any drafts make a forward of 8 rows dearer at once, more of them hardly: a row in eight gets a draft."""
    # Breaks with: the time of the mean number of tokens.
    costs = Costs(Measured({(8, 8): 1.0, (8, 10): 1.5, (8, 16): 1.6}, {(8, 0): 0.0, (8, 1): 0.0}))
    made = np.full((8, 1), 1 / 8)
    offers = Offers(costs, {1: 1}, 8, 8, 0, range(8), [1], 0.8 * made, made)
    none = (7 / 8) ** 8
    assert offers.drafting[0] == pytest.approx(none)
    assert sum(offers.drafting) == pytest.approx(1.0)
    found = offers.choices[0].seconds
    assert none + 1.5 * (1 - none) < found < none + 1.6 * (1 - none)


def test_rows_that_surely_get_drafts_are_counted_as_such() -> None:
    """The number of rows with drafts has one value where each always gets some, and no chance is negative."""
    # Breaks with: chances that are off by one; rounding of the transform left in.
    costs = Costs(Measured({(8, 8): 1.0, (8, 16): 1.6, (8, 32): 3.0}, {(8, 0): 0.0, (8, 1): 0.1}))
    made = np.ones((8, 1))
    offers = Offers(costs, {1: 1}, 8, 8, 0, range(8), [1], 0.5 * made, made)
    assert offers.drafting == pytest.approx([0.0] * 8 + [1.0], abs=1e-9)
    assert offers.choices[0].seconds == pytest.approx(1.7)
