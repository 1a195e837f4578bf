"""Parsers of numbers on the command line, for argparse."""

from __future__ import annotations

import argparse
import sys
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
    return _above_zero(text, 1.0, "number above 0 and up to 1")


def part(text: str) -> float:
    """Parse a number from 0 to 1, both included."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return found


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    return _above_zero(text, sys.float_info.max, "finite number above 0")


def _above_zero(text: str, most: float, wanted: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no {wanted}")
    return found
