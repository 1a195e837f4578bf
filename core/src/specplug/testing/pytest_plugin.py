"""Loaded by pytest in every run, so it is light: neither torch nor the engine is imported here.

Switches off spinning threads before torch is imported, which two test runs on one machine would pay for
dearly; registers a marker; and checks that the plugins a test run needs are installed.
"""

import os
import sys
import tomllib
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_ASSERTING = ("checks_declared", "checks_device", "checks_drafter", "checks_engine", "conformance", "oracle")
_MODULES = [f"specplug.testing.{name}" for name in _ASSERTING]
# What is imported already cannot be rewritten any more, and pytest warns of it.
pytest.register_assert_rewrite(*(name for name in _MODULES if name not in sys.modules))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and hold the run to its required plugins."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    required = required_plugins(config.rootpath)
    if not required and not os.environ.get("SPECPLUG_REQUIRED_PLUGINS", "").strip():
        return
    from specplug.errors import UserError
    from specplug.registry import Registry

    try:
        # Reads SPECPLUG_REQUIRED_PLUGINS by itself.
        Registry.discover().require(required, option="[tool.specplug] required_plugins")
    except UserError as error:
        raise pytest.UsageError(str(error)) from None


def required_plugins(start: Path) -> list[str]:
    """Return ``[tool.specplug] required_plugins`` of the nearest ``pyproject.toml`` at or above `start`."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("specplug", {})
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise pytest.UsageError(f"{file} cannot be read: {error}") from None
        named = table.get("required_plugins", [])
        if not isinstance(named, list) or not all(isinstance(text, str) for text in named):
            raise pytest.UsageError(f"{file}: [tool.specplug] required_plugins must be a list of texts, not {named!r}")
        return named
    return []
