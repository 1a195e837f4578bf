"""The conformance kit and the bench it stands on. Importing this package imports neither torch nor the engine."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specplug.testing.bench import Bench
    from specplug.testing.conformance import DrafterConformance
    from specplug.testing.harness import Harness, Move

__all__ = ["Bench", "DrafterConformance", "Harness", "Move"]

_MODULES = {"Bench": "bench", "DrafterConformance": "conformance", "Harness": "harness", "Move": "harness"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"specplug.testing.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'specplug.testing' has no attribute {name!r}")
