"""A package's own tests run where it is installed; elsewhere `tests/test_third_party_packages.py` runs them."""

import importlib.metadata
from pathlib import Path

_installed = {found.metadata["Name"] for found in importlib.metadata.distributions() if found.metadata}
collect_ignore = [
    folder.name
    for folder in Path(__file__).parent.iterdir()
    if folder.is_dir() and f"specplug-{folder.name}" not in _installed
]
