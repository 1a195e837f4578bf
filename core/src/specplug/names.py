"""One spelling for every name a user, an entry point or a distribution can type."""

import re

_SEPARATORS = re.compile(r"[-_.\s]+")


def fold(name: str) -> str:
    """Fold `name` as PEP 503 does, after stripping blanks: ``MY_Drafter`` -> ``my-drafter``.

    The hyphen itself is never dropped: ``draft-3`` and ``draft3`` stay two words, and a plugin that
    wants both declares an alias.
    """
    return _SEPARATORS.sub("-", name.strip()).lower()
