"""What the registry tells about plugins. Torch-free."""

from dataclasses import dataclass
from typing import Any, Literal

from specplug.names import fold
from specplug.spec import AlgorithmSpec

State = Literal["available", "loaded", "unusable", "broken", "incompatible", "clash"]


class _Labelled:
    """Says where it comes from."""

    distribution: str
    version: str

    @property
    def label(self) -> str:
        """Distribution and version, as every message says them."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Record(_Labelled):
    """One entry point of one installed distribution, and what became of it."""

    group: str
    entry_point: str
    """As its metadata spells it."""
    distribution: str
    version: str
    state: State = "available"
    reason: str = ""
    """One line; empty for available and loaded."""
    specs: tuple[AlgorithmSpec, ...] = ()
    """The algorithm of this name, once its manifest was read."""
    location: str = ""
    notes: tuple[str, ...] = ()
    traceback: str = ""
    """Of the exception that made it broken, if there was one."""

    @property
    def word(self) -> str:
        """The entry point's name, folded."""
        return fold(self.entry_point)


@dataclass(frozen=True)
class Installed(_Labelled):
    """An algorithm that can be selected."""

    spec: AlgorithmSpec
    distribution: str
    version: str


@dataclass(frozen=True)
class Owner(_Labelled):
    """A distribution whose entry point or alias a word is, and the algorithm it means."""

    distribution: str
    version: str
    algorithm: str


@dataclass(frozen=True)
class Answer(_Labelled):
    """What one plugin said to a hook."""

    distribution: str
    version: str
    group: str
    value: Any
