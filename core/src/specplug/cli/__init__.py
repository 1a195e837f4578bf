"""The ``specplug`` command. Torch-free: a command imports what is heavy when it runs."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import TyperException

from specplug.errors import DrafterFailedError, UserError
from specplug.runtime.progress import printed

if TYPE_CHECKING:
    from specplug.registry import Registry

COMMANDS = {
    "plugins": "specplug.cli.plugins",
    "doctor": "specplug.cli.doctor",
    "estimate": "specplug.cli.estimate",
    "generate": "specplug.cli.generate",
    "demo": "specplug.cli.demo",
    "bench": "specplug.cli.bench",
    "tune": "specplug.cli.tune",
    "serve": "specplug.cli.serve",
    "new": "specplug.cli.new",
}
"""Command -> module with ``register(app, registry)``. Add a command here; it imports what is heavy inside functions."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0; 2 for a mistake of the user's (one line each on stderr); 1 for a drafter that failed.
    """
    # Spinning worker threads starve a second process on few cores; read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with printed():
            return _run(args)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except DrafterFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(args: list[str]) -> int:
    from specplug.registry import Registry

    app = _app()
    command = next((word for word in args if not word.startswith("-")), None)
    if command is None and "--version" in args:  # must answer even where a plugin setting is wrong
        registry = None
    else:
        registry = Registry.discover()
        for name, module in COMMANDS.items():
            if name == command or command not in COMMANDS:
                importlib.import_module(module).register(app, registry)
    try:
        code = app(args=args, prog_name="specplug", standalone_mode=False)
    except TyperException as error:
        raise UserError(_parse_error(error, args, registry)) from None
    return code if isinstance(code, int) else 0


def _app() -> typer.Typer:
    # No markup mode: its tables cut long option names short.
    app = typer.Typer(
        name="specplug",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def specplug(
        ctx: typer.Context,
        show_version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
    ) -> None:
        """Speculative decoding with draft algorithms that are installed as packages."""
        if show_version:
            typer.echo(f"specplug {version('specplug')}")
            raise typer.Exit
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())

    return app


def _parse_error(error: Any, args: list[str], registry: "Registry | None") -> str:
    """Return one line for what the argument parser refused; for an unknown option, whose it may be."""
    from specplug.cli.flags import unknown_option

    option = getattr(error, "option_name", None)
    if registry is not None and type(error).__name__ == "NoSuchOption" and isinstance(option, str):
        return unknown_option(registry, option, args, getattr(error, "possibilities", None) or ())
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message}: see {context.command_path if context else 'specplug'} --help"
