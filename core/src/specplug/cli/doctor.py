"""``specplug doctor``: would this run start, and why (not). The same path as every command that runs a model."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specplug.adaptive.depths import adaptive_request
from specplug.cli.flags import speculative_command
from specplug.cli.memory import estimate_memory, graphs_of
from specplug.errors import RefusedError, UserError
from specplug.names import fold
from specplug.options import EngineOptions
from specplug.planning import NONE, Run, plan_run
from specplug.resolve import resolve
from specplug.runtime.memory import device_memory
from specplug.settings import flag
from specplug.spec import Facts

if TYPE_CHECKING:
    from specplug.registry import Registry


def diagnose(
    registry: "Registry", word: str, model: str | None, options: EngineOptions, given: dict[str, object]
) -> dict[str, Any]:
    """Return what `doctor` found as plain JSON data; ``usable`` is the verdict, ``trace`` how it was reached.

    Without `model` only the name is checked, on empty facts.
    """
    report: dict[str, Any] = {"word": word, "model": model, "usable": False, "trace": [], "warnings": []}
    report["lossy"] = bool(options.lossy)
    try:
        adaptive = adaptive_request(options)
        if model is None:
            resolution = resolve(registry, word, Facts.empty())
            report["trace"] = list(resolution.trace)
            report["algorithm"] = resolution.algorithm
            if given:
                fields = ", ".join(flag(field) for field in given)
                raise RefusedError(f"{fields} cannot be checked without MODEL: give the folder or hub id of a model")
        else:
            from specplug.facts import build_facts  # reads checkpoints, and may import torch

            facts = build_facts(model, options, draft_files=registry.draft_files, elsewhere=True)
            run = plan_run(registry, word, given, facts, adaptive)
            report |= _settled(run)
            report |= _placed(run, options)
        report["usable"] = True
    except UserError as error:
        report["error"] = str(error)
        if isinstance(error, RefusedError) and error.trace:
            report["trace"] = list(error.trace)
    return report


def tell(report: Mapping[str, Any], warnings: Iterable[str]) -> None:
    """Print what `diagnose` found, and `warnings` to standard error; a refusal is the UserError of the start."""
    for line in (*report["trace"], *report.get("about", ())):
        typer.echo(line)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if not report["usable"]:
        raise UserError(report["error"])
    model = report["model"]
    scope = f"with {model}" if model is not None else "by name; give MODEL to check the run itself"
    typer.echo(f"usable: {report['algorithm']} {scope}")


def _settled(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {
        "algorithm": run.algorithm,
        "trace": list(run.trace),
        "warnings": [problem.message for problem in run.warnings],
        "settings": [setting.model_dump(mode="json") for setting in run.settings],
        "features": sorted(run.facts.features),
    }
    if run.installed is not None and run.plan is not None:
        found["distribution"], found["version"] = run.installed.distribution, run.installed.version
        found["plan"] = run.plan.model_dump(mode="json")
        found["adaptive"] = run.depths.as_json() if run.depths else None
    return found


def _placed(run: Run, options: EngineOptions) -> dict[str, Any]:
    """Return where the run would go and what it would take there; ``about`` is the same in words.

    Raises the UserError with which the start would refuse its sizes.
    """
    facts = run.facts
    on_device = facts.device != "cpu"
    memory = device_memory(facts.device) if on_device else None
    found = estimate_memory(run, options, memory)
    graphs = graphs_of(run, options)
    absent = on_device and memory is None
    return {
        "device": facts.device,
        "dtype": facts.dtype,
        "attention_backend": facts.attention_backend,
        "graphs": graphs,
        "memory": found.to_dict(),
        "about": [
            f"device {facts.device}{' (not on this machine)' if absent else ''}, {facts.dtype}, "
            f"attention {facts.attention_backend}",
            *(f"graphs of the {part}: {words}" for part, words in graphs.items()),
            *found.lines("not known: the device is not here" if absent else "not known before loading"),
        ],
    }


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @speculative_command(app, registry, "doctor")
    def doctor(
        algorithm: str,
        options: EngineOptions,
        given: dict[str, object],
        name: Annotated[str | None, typer.Argument(metavar="NAME", help="stands for --speculative-algorithm")] = None,
        model: str | None = None,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """Check whether a run would start, and why.

        Takes the options of the commands that run a model. Without MODEL only NAME is checked.
        Exit code 0: usable, 2: refused.
        """
        if name is None and algorithm == NONE and model is None:
            raise UserError("NAME is missing: give an algorithm, or --model-path to check a model alone")
        word = _word(name, algorithm)
        known = [*registry.warnings, *filter(None, [options.lossy])]  # said before; a hook that fails adds to them
        report = diagnose(registry, word, model, options, given)
        new = [warning for warning in registry.warnings if warning not in known] + report["warnings"]
        if as_json:
            report.pop("about", None)
            report["warnings"] = [*known, *new]
            typer.echo(json.dumps(report, indent=2, default=str))
            raise typer.Exit(0 if report["usable"] else 2)
        tell(report, new)


def _word(name: str | None, algorithm: str) -> str:
    """Settle NAME against ``--speculative-algorithm``."""
    if name is None:
        return algorithm
    if not name.strip():
        raise UserError(f"NAME '' is empty: give {NONE} or the name of an installed algorithm")
    if algorithm != NONE and fold(name) != fold(algorithm):
        raise UserError(f"NAME {name} and {flag('algorithm')} {algorithm} differ: give one of them")
    return name
