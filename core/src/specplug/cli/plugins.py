"""``specplug plugins``: what is installed, and in what state."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specplug.distributions import ALGORITHMS

if TYPE_CHECKING:
    from specplug.registry import Record, Registry

_STYLES = {"loaded": "green", "unusable": "yellow", "available": "dim"}


def listing(registry: "Registry") -> dict[str, Any]:
    """Return everything known of the installed plugins as plain JSON data."""
    registry.load()
    return {"plugins": [_plain(record) for record in registry.records], "warnings": list(registry.warnings)}


def _plain(record: "Record") -> dict[str, Any]:
    algorithms = [
        {
            "name": spec.name,
            "summary": spec.summary,
            "aliases": list(spec.aliases),
            "api": list(spec.api),
            "options": sorted(spec.config_model.model_fields),
            "capabilities": spec.capabilities.model_dump(mode="json"),
        }
        for spec in record.specs
    ]
    return {
        "group": record.group,
        "name": record.entry_point,
        "distribution": record.distribution,
        "version": record.version,
        "state": record.state,
        "reason": record.reason,
        "location": record.location,
        "notes": list(record.notes),
        "traceback": record.traceback,
        "algorithms": algorithms,
    }


def _table(registry: "Registry") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "PACKAGE", "STATE", "ABOUT"):
        table.add_column(heading, overflow="fold")
    for record in registry.records:
        spec = next((s for s in record.specs if s.name == record.entry_point), None)
        about = record.reason if record.state not in ("loaded", "available") else spec.summary if spec else ""
        if spec is not None and spec.aliases and record.state == "loaded":
            about += f" (also: {', '.join(spec.aliases)})"
        kind = "" if record.group == ALGORITHMS else f" ({record.group.rpartition('.')[2]})"
        style = _STYLES.get(record.state, "red")
        table.add_row(
            escape(record.entry_point + kind),
            escape(f"{record.distribution} {record.version}"),
            f"[{style}]{record.state}[/]",
            escape(about),
        )
    return table


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @app.command("plugins")
    def plugins(
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
        verbose: Annotated[bool, typer.Option("-v", "--verbose", help="also reasons, locations, tracebacks")] = False,
    ) -> None:
        """List the installed plugins and their state."""
        found = listing(registry)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        console = Console(highlight=False, soft_wrap=False)
        if not registry.records:
            console.print("no plugin is installed: install one with pip, named specplug-<algorithm>")
        else:
            console.print(_table(registry))
        if verbose:
            for record in registry.records:
                _details(console, record)
        for warning in registry.warnings:
            typer.echo(f"warning: {warning}", err=True)


def _details(console: Console, record: "Record") -> None:
    console.print(escape(f"\n{record.entry_point}: {record.distribution} {record.version} in {record.location}"))
    lines = [record.reason, *record.notes, *record.traceback.rstrip().splitlines()]
    for spec in record.specs:
        if spec.name == record.entry_point:
            options = ", ".join(sorted(spec.config_model.model_fields))
            lines.append(f"API {spec.api[0]}.{spec.api[1]}; drafter {spec.drafter}; options: {options}")
    for line in lines:
        if line:
            console.print("  " + escape(line), soft_wrap=True)
