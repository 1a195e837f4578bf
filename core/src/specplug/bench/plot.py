"""The report as a picture: speed-up per column, and acceptance by depth. Needs matplotlib, an extra."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specplug.bench.figures import Figures
from specplug.errors import UserError


def check_plot(path: str) -> None:
    """Raise UserError, before anything is measured, if the picture could not be drawn."""
    if Path(path).suffix.lower() != ".png":
        raise UserError(f"--plot {path}: a PNG is written: give a file name that ends in .png")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UserError(
            f"--plot {path} needs matplotlib: pip install 'specplug[plot]', or leave it out and use --json"
        ) from None


def draw(path: str, title: str, sizes: Mapping[int, Mapping[str, Figures]]) -> None:
    """Write the picture. `sizes`: batch size -> column -> figures, as `figures` returns them."""
    # The object interface: no global state, no display.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    _speed_ups(left, sizes)
    _acceptance(right, sizes)
    figure.savefig(path, dpi=150)


def _speed_ups(axes: Any, sizes: Mapping[int, Mapping[str, Figures]]) -> None:
    labels = list(dict.fromkeys(label for columns in sizes.values() for label in columns))
    thick = 0.8 / len(sizes)
    for at, (size, columns) in enumerate(sizes.items()):
        found = {label: columns[label]["speed_up"]["decode"] for label in labels if label in columns}
        found = {label: each for label, each in found.items() if each}
        middles = [each["median"] for each in found.values()]
        below = [each["median"] - each["q1"] for each in found.values()]
        above = [each["q3"] - each["median"] for each in found.values()]
        places = [labels.index(label) + at * thick for label in found]
        axes.bar(places, middles, thick, yerr=(below, above), capsize=3, label=f"batch {size}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([at + thick * (len(sizes) - 1) / 2 for at in range(len(labels))], labels, rotation=20, ha="right")
    axes.set_ylabel(f"decode speed-up over {labels[0]} (median, quartiles)")
    axes.legend()


def _acceptance(axes: Any, sizes: Mapping[int, Mapping[str, Figures]]) -> None:
    drawn = False
    for size, columns in sizes.items():
        for label, column in columns.items():
            depths = column["ledger"]["acceptance_by_depth"] if column["ledger"] else []
            if depths:
                rates = [depth["conditional"] for depth in depths]
                axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, label=f"{label}, batch {size}")
                drawn = True
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("accepted, of those compared")
    if drawn:
        axes.legend()
