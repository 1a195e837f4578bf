"""A registry that offers the scripted drafters, through a distribution written for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from specplug.registry import Registry


def write_distribution(
    folder: Path, name: str, entry_points: Mapping[str, str], *, version: str = "0.1.0", requires: tuple[str, ...] = ()
) -> Path:
    """Write the ``.dist-info`` of an algorithm package into `folder`, metadata only, and return it.

    `entry_points`: algorithm -> module; `requires`: its ``Requires-Dist`` lines.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines = [*head, *(f"Requires-Dist: {text}" for text in requires), ""]
    (info / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    points = ["[specplug.algorithms]", *(f"{word} = {module}" for word, module in entry_points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(points), encoding="utf-8")
    return info


def bench_registry(folder: Path, *, installed: bool = False) -> Registry:
    """Return a registry with ``scripted``, ``scripted-device`` and ``scripted-dense``.

    `folder` is an empty one; `installed`: what is really installed is found too. Environment variables
    are not read.
    """
    if not any(folder.glob("specplug_scripted-*.dist-info")):
        module = "specplug.testing.scripted"
        points = dict.fromkeys(("scripted", "scripted-device", "scripted-dense"), module)
        write_distribution(folder, "specplug-scripted", points, requires=("specplug>=0.1,<1",))
    return Registry.discover(path=[str(folder), *(sys.path if installed else ())], environ={})
