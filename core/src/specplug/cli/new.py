"""``specplug new``: a package for a draft algorithm of one's own, complete and passing, to start from."""

import keyword
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specplug.errors import UserError
from specplug.names import fold
from specplug.planning import NONE
from specplug.resolve import catalogue

if TYPE_CHECKING:
    from specplug.registry import Registry

EXAMPLE = "lookback"
"""The word that stands for the algorithm throughout the template."""
_DOTTED = ("gitignore", "github")
"""Files that begin with a dot once they are written: packaging tools leave such files out."""


def write_package(name: str, folder: Path) -> list[Path]:
    """Write the package of algorithm `name`, folded, into the empty or missing `folder`; return its files.

    Raises UserError for a folder that holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--into {folder} holds something already; give an empty or a new folder")
    words = {
        EXAMPLE.capitalize(): "".join(part.capitalize() for part in name.split("-")),
        f"specplug_{EXAMPLE}": f"specplug_{name.replace('-', '_')}",
        f"{EXAMPLE}_": f"{name.replace('-', '_')}_",
        EXAMPLE: name,
    }
    return sorted(_copied(files("specplug") / "_template", folder, words))


def _copied(source: Traversable, to: Path, words: dict[str, str]) -> list[Path]:
    if source.is_dir():
        to.mkdir(parents=True, exist_ok=True)
        parts = [part for part in source.iterdir() if part.name != "__pycache__"]
        return [path for part in parts for path in _copied(part, to / _named(part.name, words), words)]
    to.write_text(_renamed(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    return [to]


def _named(name: str, words: dict[str, str]) -> str:
    return "." + name if name in _DOTTED else _renamed(name, words)


def _renamed(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def checked_name(name: str, registry: "Registry") -> str:
    """Return `name` folded, or raise a UserError: it must be free and make a Python name and a distribution's."""
    folded = fold(name)
    module = folded.replace("-", "_")
    if not (folded.isascii() and module.isidentifier()) or keyword.iskeyword(module) or folded[-1] == "-":
        raise UserError(
            f"NAME {name!r} is no name for an algorithm; use letters, digits and single hyphens, as my-drafter"
        )
    owners = [owner.label for owner in registry.owners(folded)]
    known = catalogue().get(folded)
    if owners or folded == NONE or (known is not None and known.dist):  # a word of nobody's is anybody's to take
        by = ", ".join(owners) or (known.dist if known is not None else "") or "specplug itself"
        raise UserError(f"NAME {name!r} is taken, by {by}; choose a word that no algorithm is called by")
    return folded


def register(app: typer.Typer, registry: "Registry | None") -> None:
    """Add the command to `app`."""

    @app.command()
    def new(
        name: Annotated[str, typer.Argument(help="the algorithm's name, as --speculative-algorithm will take it")],
        into: Annotated[Path | None, typer.Option(help="folder to write to; default specplug-NAME here")] = None,
    ) -> None:
        """Write a package for a draft algorithm of your own: it installs, and passes the conformance kit."""
        from specplug.registry import Registry

        folded = checked_name(name, registry or Registry.discover())
        folder = into or Path(f"specplug-{folded}")
        for path in write_package(folded, folder):
            typer.echo(f"wrote {path}")
        typer.echo(f"\nnext: pip install -e '{folder}[testing]' && pytest {folder} && specplug plugins")
