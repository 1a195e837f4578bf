"""``specplug serve``: the OpenAI API over one model, with or without drafts."""

import importlib.util
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specplug.cli.doctor import diagnose, tell
from specplug.cli.flags import speculative_command
from specplug.errors import UserError
from specplug.options import EngineOptions
from specplug.serve.options import API_KEY_VARIABLE, ServeOptions
from specplug.settings import option_of, validated

if TYPE_CHECKING:
    from specplug.registry import Registry

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
"""Modules of the extra ``serve``."""
PANEL = "Server"


def _text(option: str, metavar: str, about: str) -> Any:
    return typer.Option(option, metavar=metavar, help=about, rich_help_panel=PANEL)


def _about(field: str) -> str:
    info = ServeOptions.model_fields[field]
    value = f"{info.default:g}" if isinstance(info.default, int | float) else info.default
    return (info.description or "") + ("" if value is None else f" [default {value}]")


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @speculative_command(app, registry, "serve")
    def serve(
        model: str,
        options: EngineOptions,
        algorithm: str,
        given: dict[str, object],
        host: Annotated[str | None, _text("--host", "ADDRESS", _about("host"))] = None,
        port: Annotated[str | None, _text("--port", "N", _about("port"))] = None,
        api_key: Annotated[str | None, _text("--api-key", "KEY", _about("api_key"))] = None,
        served_model_name: Annotated[
            str | None, _text("--served-model-name", "NAME", _about("served_model_name"))
        ] = None,
        request_timeout: Annotated[str | None, _text("--request-timeout", "SECONDS", _about("request_timeout"))] = None,
        drain_timeout: Annotated[str | None, _text("--drain-timeout", "SECONDS", _about("drain_timeout"))] = None,
        sampling_defaults: Annotated[
            str | None, _text("--sampling-defaults", "WORD", _about("sampling_defaults"))
        ] = None,
        max_body_bytes: Annotated[str | None, _text("--max-body-bytes", "N", _about("max_body_bytes"))] = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="say whether it would start, as doctor does, and end")
        ] = False,
    ) -> None:
        """Serve MODEL over the OpenAI API: a folder, a .gguf file, a hub id, or 'demo'.

        Chat and completions, metrics for Prometheus, and a status page. Ctrl-C or SIGTERM ends it, once
        what runs is answered.
        """
        typed = {
            "host": host,
            "port": port,
            "api_key": api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE),
            "served_model_name": served_model_name,
            "request_timeout": request_timeout,
            "drain_timeout": drain_timeout,
            "sampling_defaults": sampling_defaults,
            "max_body_bytes": max_body_bytes,
        }
        settled = validated(
            ServeOptions, {field: value for field, value in typed.items() if value is not None}, option_of
        )
        if dry_run:
            _dry_run(registry, algorithm, model, options, given)
            return
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(f"specplug serve needs {', '.join(missing)}: pip install 'specplug[serve]'")

        from specplug.serve.engine_process import EngineArgs
        from specplug.serve.run import serve as run

        chosen = {name: getattr(options, name) for name in options.model_fields_set}
        code = run(EngineArgs(model, algorithm, given, chosen, announce=True), settled)
        if code:
            raise typer.Exit(code)


def _dry_run(
    registry: "Registry", algorithm: str, model: str, options: EngineOptions, given: dict[str, object]
) -> None:
    """Say what `doctor` would; a refusal is the UserError that the start would end with."""
    known = list(registry.warnings)
    report = diagnose(registry, algorithm, model, options, given)
    tell(report, [*(one for one in registry.warnings if one not in known), *report["warnings"]])
