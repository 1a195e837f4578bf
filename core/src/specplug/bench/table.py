"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from specplug.bench.figures import STAGES, Figures

_DEPTHS = 6
"""Depths shown of acceptance by depth; JSON has all."""
_WIDTH = 180
"""Columns of output that goes to a file or a pipe."""


def console(stderr: bool) -> Console:
    """Return where to print: as wide as the terminal, and wide enough for every column if there is none."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_WIDTH)


def show(out: Console, size: int, columns: Mapping[str, Figures], texts: Mapping[str, Any], label: str = "") -> None:
    """Print the tables of one batch size. `texts`: each column's `TextCheck`; `label`: said in their titles."""
    base = next(iter(columns))
    for table in (
        _speeds(size, base, columns, texts),
        _acceptance(columns),
        _host(columns),
        _categories(base, columns),
    ):
        if table is not None:
            table.title = f"{label}{table.title}"
            out.print(table)


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    return table


def _speeds(size: int, base: str, columns: Mapping[str, Figures], texts: Mapping[str, Any]) -> Table:
    runs = len(columns[base]["runs"])
    title = f"batch {size}: median \\[quartiles] of {runs} runs, speed-up over {base} run by run"
    table = _table(title, "column", "tokens/s", "speed-up", "with prefill", "of floor", "TPOT ms", "prefill ms", "text")
    for label, column in columns.items():
        decode = column["decode"]
        floor = decode["share_of_floor"]
        table.add_row(
            label,
            _spread(decode["tokens_per_second"], ".1f"),
            _spread(column["speed_up"]["decode"], ".2f", "x"),
            _median(column["speed_up"]["with_prefill"], ".2f", "x"),
            "-" if floor is None else f"{100 * floor:.0f} %",
            _spread(decode["tpot_ms"], ".2f"),
            _median(column["prefill"]["batch_ms"], ".1f"),
            texts[label].verdict,
        )
    return table


def _acceptance(columns: Mapping[str, Figures]) -> Table | None:
    found = {label: column["ledger"] for label, column in columns.items() if column["ledger"]}
    found = {label: each for label, each in found.items() if each["drafted_rounds"]}
    if not found:
        return None
    deepest = min(max(len(each["acceptance_by_depth"]) for each in found.values()), _DEPTHS)
    depths = [str(depth + 1) for depth in range(deepest)]
    table = _table(
        "acceptance, pooled (mean of requests); by depth: conditional/unconditional",
        "column",
        *("tokens/step", "accept length", "coverage", "per node", "per path", *depths),
    )
    for label, each in found.items():
        means = each["mean_of_requests"]
        by_depth = each["acceptance_by_depth"][:deepest]
        cells = [f"{at['conditional']:.2f}/{at['unconditional']:.2f}" for at in by_depth]
        table.add_row(
            label,
            f"{each['tokens_per_target_step']:.2f} ({means['tokens_per_target_step']:.2f})",
            f"{each['accept_length']:.2f} ({means['accept_length']:.2f})",
            f"{each['draft_coverage']:.2f} ({means['draft_coverage']:.2f})",
            f"{each['accept_rate']:.2f} ({means['accept_rate']:.2f})",
            f"{each['path_accept_rate']:.2f}",
            *cells,
            *["-"] * (deepest - len(cells)),
        )
    return table


def _host(columns: Mapping[str, Figures]) -> Table | None:
    found = {label: column for label, column in columns.items() if column["steps"]["ms"]}
    if not found:
        return None
    shares = ("draft", "verify", "host")
    steps = [column["steps"] for column in found.values()]
    device = any(each[name] is not None for each in steps for name in ("exposed_ms", "graph_share"))
    heads = ("steps", "rows", "width", *STAGES, *(f"{share} %" for share in shares))
    heads = (*heads, *(("exposed", "graph %") if device else ()), "peak pages")
    title = "decode steps: rows and tokens per forward, host milliseconds by stage"
    table = _table(title + ("; exposed: device idle before a step" if device else ""), "column", *heads)
    for (label, column), each in zip(found.items(), steps, strict=True):
        table.add_row(
            label,
            str(each["count"]),
            f"{each['rows']:.2f}",
            f"{each['width']:.2f}",
            *(f"{each['ms'][stage]:.3f}" for stage in STAGES),
            *(f"{100 * each['time_share'][share]:.1f}" for share in shares),
            *(_on_device(each) if device else ()),
            f"{column['peak_pages']}/{column['pages']}",
        )
    return table


def _on_device(steps: Figures) -> tuple[str, str]:
    """Return the median of the device's idle milliseconds before a step, and the percentage of replayed steps."""
    share = steps["graph_share"]
    return _median(steps["exposed_ms"], ".3f"), "-" if share is None else f"{100 * share:.0f}"


def _categories(base: str, columns: Mapping[str, Figures]) -> Table | None:
    names: Sequence[str] = list(columns[base]["categories"])
    if not names:
        return None
    others = [label for label in columns if label != base]
    table = _table(
        f"by category: speed-up over {base} (accept length / coverage)",
        "category",
        "answers",
        f"{base} TPOT ms",
        *others,
    )
    for name in names:
        plain = columns[base]["categories"][name]
        cells = []
        for label in others:
            each = columns[label]["categories"][name]
            kept = each["ledger"]
            tail = f" ({kept['accept_length']:.2f} / {kept['draft_coverage']:.2f})" if kept else ""
            cells.append(_spread(each["speed_up"], ".2f", "x") + tail)
        table.add_row(name, str(plain["answers"]), _median(plain["tpot_ms"], ".2f"), *cells)
    return table


def _median(found: Mapping[str, float] | None, style: str, unit: str = "") -> str:
    return "-" if found is None else f"{found['median']:{style}}{unit}"


def _spread(found: Mapping[str, float] | None, style: str, unit: str = "") -> str:
    if found is None:
        return "-"
    return f"{found['median']:{style}}{unit} \\[{found['q1']:{style}}-{found['q3']:{style}}]"
