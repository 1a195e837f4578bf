"""Parsers of numbers on the command line, for argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` on."""

    def whole(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return whole


def share(text: str) -> float:
    """Parse a number above 0 and up to 1."""
    return _number(text, lambda found: 0 < found <= 1, "number above 0 and up to 1")


def part(text: str) -> float:
    """Parse a number from 0 to 1, both included."""
    return _number(text, lambda found: 0 <= found <= 1, "number from 0 to 1")


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    return _number(text, lambda found: 0 < found < math.inf, "finite number above 0")


def _number(text: str, fits: Callable[[float], bool], wanted: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan  # which fits nowhere
    if not fits(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no {wanted}")
    return found
