"""New checks of the kit arrive as warnings for one minor version of the API, as ADR 0011 and 0012 promise."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from specplug.spec import API
from specplug.testing.bench import Bench

Check = Callable[..., None]


class NewCheckWarning(UserWarning):
    """A drafter fails a check that is newer than the API version its manifest names."""


def since(major: int, minor: int) -> Callable[[Check], Check]:
    """Mark a check as new in API ``major.minor``: write ``@since(1, 1)`` above it, outermost; it takes `bench`.

    While the core speaks just that version, a plugin whose manifest names an older one fails the check with a
    `NewCheckWarning`; from the next version on, and for plugins that name this one, it fails like any other. A
    check that is named in `expected_failures` is held to its reason at once.
    """

    def mark(check: Check) -> Check:
        @functools.wraps(check)
        def run(self: Any, bench: Bench, *args: Any, **kwargs: Any) -> None:
            try:
                check(self, bench, *args, **kwargs)
            except (Exception, pytest.fail.Exception) as error:
                asked = bench.spec.api
                if not is_new((major, minor), asked, API):
                    raise
                name = check.__name__.removeprefix("test_")
                warnings.warn(
                    f"{self.algorithm!r} (API {asked[0]}.{asked[1]}) fails {name!r}, which is new in API"
                    f" {major}.{minor} and fails the suite from {major}.{minor + 1} on: {error}",
                    NewCheckWarning,
                    stacklevel=2,
                )

        run.new_since = (major, minor)  # type: ignore[attr-defined]
        return run

    return mark


def is_new(check: tuple[int, int], asked: tuple[int, int], api: tuple[int, int]) -> bool:
    """Say whether a check of API `check` may only warn a plugin of API `asked`, in a core that speaks `api`."""
    return asked < check and api <= check


def as_it_is(check: Check) -> Check:
    """Return a check without `since`: it fails where it fails, however new it is."""
    found: Check = vars(check)["__wrapped__"] if "new_since" in vars(check) else check
    return found
