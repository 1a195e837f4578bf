"""Which distributions are installed, read from metadata alone and each one in isolation.

`importlib_metadata.entry_points()` raises for everybody when one `entry_points.txt` anywhere is
malformed, and a `.dist-info` without METADATA raises on `.name`. Here a distribution that cannot be
read becomes one warning and the others stay visible.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from email.message import Message
from email.parser import HeaderParser
from typing import cast

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from specplug.names import fold

ALGORITHMS = "specplug.algorithms"
POLICIES = "specplug.policies"
GROUPS = (ALGORITHMS, POLICIES)


@dataclass(frozen=True)
class Found:
    """One installed distribution; of several with one name, the one that Python would import."""

    name: str
    """Normalised as PEP 503 does."""
    version: str
    location: str
    """Folder that holds the metadata."""
    entry_points: tuple[importlib_metadata.EntryPoint, ...]
    """Of the groups `GROUPS` only."""
    requires: tuple[str, ...]
    """The `Requires-Dist` lines."""
    notes: tuple[str, ...] = ()
    """``also found: 1.0 in FOLDER``, one for each shadowed namesake."""

    @property
    def label(self) -> str:
        """Name and version, as every message says them."""
        return f"{self.name} {self.version}"

    def requires_of(self, name: str) -> Iterator[str]:
        """Yield what it requires of distribution `name`, where that can be parsed."""
        for text in self.requires:
            with suppress(InvalidRequirement):
                if fold(Requirement(text).name) == name:
                    yield text


def installed(path: Sequence[str] | None = None) -> tuple[dict[str, Found], tuple[str, ...]]:
    """Walk the distributions on `path` (default ``sys.path``) once.

    Returns them by normalised name, the first on the path winning, and one warning for each that
    could not be read. Inside one folder, where file systems list in any order, the highest version wins.
    """
    warnings: list[str] = []
    ranks: dict[str, int] = {}
    seen: list[Found] = []
    for distribution in _walk(path, warnings):
        location = _location(distribution)
        ranks.setdefault(location, len(ranks))
        if _is_leftover(distribution):
            warnings.append(f"a leftover of an interrupted pip run in {location} is not used: remove the folders '~*'")
            continue
        try:
            found = _read(distribution, location)
        except Exception as error:
            warnings.append(f"unreadable distribution {_where(distribution, location)}: {one_line(error)}")
            continue
        seen.append(found)
    # Two stable sorts: newest first, then by place on the path.
    seen.sort(key=_version_key, reverse=True)
    seen.sort(key=lambda found: ranks[found.location])
    first: dict[str, Found] = {}
    for found in seen:
        winner = first.setdefault(found.name, found)
        if winner is found or (winner.location, winner.version) == (found.location, found.version):
            continue  # the same folder listed twice on the path is one distribution
        note = f"also found: {found.version} in {found.location}"
        first[found.name] = replace(winner, notes=(*winner.notes, note))
        if found.entry_points and not winner.entry_points:
            warnings.append(
                f"{found.label} in {found.location} offers plugins but is hidden by {winner.version} in"
                f" {winner.location}, which offers none: uninstall {found.name} twice, then install it again"
            )
    return first, tuple(sorted(set(warnings)))


def unmet(requirement: str, among: dict[str, Found]) -> str | None:
    """Return why a PEP 508 `requirement` is not met by what is installed, or None.

    Reads versions only and imports nothing. Raises `packaging.requirements.InvalidRequirement`.
    """
    need = Requirement(requirement)
    if need.marker is not None and not need.marker.evaluate():
        return None
    version = version_of(need.name, among)
    command = f"pip install '{requirement}'"
    if version is None:
        return f"needs {requirement}, which is not installed: {command}"
    try:
        met = need.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else f"needs {requirement}, found {version}: {command}"


def version_of(name: str, among: dict[str, Found]) -> str | None:
    """Return the installed version of distribution `name`: from `among`, else from ``sys.path``; None if absent."""
    found = among.get(fold(name))
    if found is not None:
        return found.version
    try:
        # Metadata without a Version yields None in some releases, whatever the annotation says.
        return importlib_metadata.version(name) or None
    except Exception:
        return None


def one_line(error: BaseException) -> str:
    """Return type and message of `error` on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _walk(path: Sequence[str] | None, warnings: list[str]) -> Iterator[importlib_metadata.Distribution]:
    options = {} if path is None else {"path": list(path)}
    try:
        # The annotation names a protocol that lacks what is read here; every finder yields this class.
        yield from cast("Iterable[importlib_metadata.Distribution]", importlib_metadata.distributions(**options))
    except Exception as error:  # a foreign metadata finder failed; what it listed so far stays
        warnings.append(f"listing the installed distributions stopped early: {one_line(error)}")


def _location(distribution: importlib_metadata.Distribution) -> str:
    try:
        return os.path.realpath(str(distribution.locate_file("")))
    except Exception:  # finders need not know a folder
        return "?"


def _where(distribution: importlib_metadata.Distribution, location: str) -> str:
    # `_path` is the only thing that names a distribution without metadata; other finders lack it.
    return str(getattr(distribution, "_path", location))


def _is_leftover(distribution: importlib_metadata.Distribution) -> bool:
    # pip renames what it is about to remove to "~ame"; its METADATA still carries the old name.
    return os.path.basename(str(getattr(distribution, "_path", ""))).startswith("~")


def _read(distribution: importlib_metadata.Distribution, location: str) -> Found:
    header = _header(distribution)
    name, version = header["Name"], header["Version"]
    if not name or not version:
        raise ValueError("no Name and Version in its metadata")
    points = tuple(point for point in distribution.entry_points if point.group in GROUPS)
    requires = tuple(header.get_all("Requires-Dist") or ())
    return Found(fold(name), version, location, points, requires)


def _header(distribution: importlib_metadata.Distribution) -> Message:
    # `Distribution.metadata` parses the long description as well, three times the cost of the walk.
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or distribution.read_text("") or ""
    return HeaderParser().parsestr(text.partition("\n\n")[0])


def _version_key(found: Found) -> tuple[bool, Version]:
    try:
        return True, Version(found.version)
    except InvalidVersion:
        return False, Version("0")
