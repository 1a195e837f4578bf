"""What will be removed from the public surface, when, and what to write instead. Torch-free.

The calendar of ADR 0011, in versions of the plugin API: what is deprecated warns from a minor version on, is an error
by default in the next major one, and leaves one minor version later. Deprecated code calls `warn_deprecated` with the
key of its entry; a test holds the two to each other, and fails when an entry is overdue.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specplug.spec import API

SWITCH = "SPECPLUG_DEPRECATED"
"""Environment variable: ``warn`` turns the errors of the next major version back into warnings."""

Version = tuple[int, int]


@dataclass(frozen=True)
class Deprecation:
    """One entry of the calendar."""

    what: str
    """As an author writes it: ``Drafter.draft``, ``specplug.testing.Old``, ``the parameter x of y``."""
    instead: str
    """What to write, as the end of "use ..."."""
    since: Version
    """API version from which it warns."""

    @property
    def error_in(self) -> Version:
        """API version from which it is an error by default."""
        return self.since[0] + 1, 0

    @property
    def removed_in(self) -> Version:
        """API version in which it is gone."""
        return self.since[0] + 1, 1

    def sentence(self) -> str:
        """Say all of it in one line."""
        since, error_in, removed_in = (
            f"{major}.{minor}" for major, minor in (self.since, self.error_in, self.removed_in)
        )
        return (
            f"{self.what} is deprecated since plugin API {since}, an error from {error_in} on"
            f" and gone in {removed_in}: use {self.instead}"
        )


class SpecplugDeprecationWarning(DeprecationWarning):
    """A plugin or a script uses what will be removed. An error from the next major API version on."""


CALENDAR: Mapping[str, Deprecation] = MappingProxyType({})
"""Key -> entry. Empty: nothing of API 1.0 is deprecated."""


def warn_deprecated(
    key: str, *, calendar: Mapping[str, Deprecation] = CALENDAR, api: Version = API, stacklevel: int = 2
) -> None:
    """Warn the caller's caller of the entry `key`; from its `error_in` on raise the warning instead.

    `stacklevel` as for `warnings.warn`, seen from the deprecated code: 2 is whoever called that. With
    ``SPECPLUG_DEPRECATED=warn`` in the environment it only warns, for as long as the thing exists. Raises KeyError
    for an unknown `key`.
    """
    entry = calendar[key]
    warning = SpecplugDeprecationWarning(entry.sentence())
    if api >= entry.error_in and os.environ.get(SWITCH, "").strip().lower() != "warn":
        raise SpecplugDeprecationWarning(f"{entry.sentence()} ({SWITCH}=warn lets it pass until then)")
    warnings.warn(warning, stacklevel=stacklevel + 1)
