"""The options that every command with a model has, generated from `EngineOptions` and the installed manifests.

An algorithm's options must be known before MODEL is read, and the algorithm follows from MODEL. So
the flags are the union of all installed fields, taken as text in one pass; the algorithm that the
word resolves to validates them later (`specplug.planning`).
"""

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand

from specplug.errors import UserError
from specplug.names import fold
from specplug.options import EngineOptions
from specplug.planning import NONE
from specplug.resolve import resolve
from specplug.settings import allowed_values, flag, is_reserved, kind_of, option_of, plain, validated
from specplug.spec import Facts

if TYPE_CHECKING:
    from specplug.registry import Registry

ALIASES = {"speculative_draft_model_path": ("--speculative-draft-model",)}
"""Other spellings of core options, by field."""

ENGINE_PANEL = "Engine options"
CORE_PANEL = "Speculation"

_ALGORITHM = "speculative_algorithm"
_CONFIG = "speculative_config"
_HELP_FOR = "specplug.help_for"
_OWN_NAMES = frozenset({"model", "options", "algorithm", "given"})


class PanelCommand(TyperCommand):
    """A command whose help groups options under headings and prints every flag in full.

    An algorithm's options are listed when ``--speculative-algorithm`` names it beside ``--help``.
    """

    abouts: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Parameter name -> algorithm -> help text, for the options that belong to algorithms."""
    words: ClassVar[Mapping[str, str]] = {}
    """Every folded name and alias -> the algorithm's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note which algorithm is meant before ``--help`` stops the parsing."""
        typed = typed_algorithm(args)
        candidates = [typed] if typed is not None else args
        ctx.meta[_HELP_FOR] = next((self.words[fold(a)] for a in candidates if fold(a) in self.words), None)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading, in order of declaration."""
        algorithm = ctx.meta.get(_HELP_FOR)
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        param: Any  # the parser's own classes are private to typer
        for param in self.get_params(ctx):
            heading = "Arguments" if param.param_type_name == "argument" else "Options"
            heading = getattr(param, "rich_help_panel", None) or heading
            if param.name in self.abouts:
                about = self.abouts[param.name].get(algorithm or "")
                if about is None:
                    continue
                param.help, heading = about, f"Options of {algorithm}"
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def speculative_command(
    app: typer.Typer, registry: "Registry", name: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as command `name` with every engine and speculation option.

    The function takes ``model: str``, ``options: EngineOptions``, ``algorithm: str`` (the word typed,
    ``"none"`` if none was), ``given: dict[str, object]`` (for `plan_run`), and any typer parameters of
    its own. With a default for ``model`` the argument may be left out.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(fn, eval_str=True).parameters
        missing = _OWN_NAMES - own.keys()
        if missing:
            raise TypeError(f"command {name!r} must take {', '.join(sorted(missing))}")
        registry.load()
        abouts, algorithms = _plugin_options(registry)
        shared = [*_core_options(registry), *algorithms]
        clash = sorted((own.keys() - _OWN_NAMES) & {p.name for p in (*shared, _model_path())})
        if clash:
            raise TypeError(f"command {name!r} redefines the shared option {', '.join(clash)}")
        optional = own["model"].default is not inspect.Parameter.empty

        def command(**values: Any) -> Any:
            registry.require(values.pop("require", None) or ())
            model = _model(values.pop("model"), values.pop("model_path"), optional)
            options = _engine_options(values)
            algorithm, given = _speculation(registry, values)
            for warning in (*registry.warnings, options.lossy):
                if warning:
                    typer.echo(f"warning: {warning}", err=True)
            return fn(model=model, options=options, algorithm=algorithm, given=given, **values)

        params: list[inspect.Parameter] = []
        for param in own.values():
            if param.name == "model":
                about = "folder or hub id of the model" + (" (may be left out)" if optional else "")
                params += [_option("model", str | None, typer.Argument(help=about, metavar="MODEL")), _model_path()]
            elif param.name not in _OWN_NAMES:
                params.append(param.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        command.__signature__ = inspect.Signature(params + shared)  # type: ignore[attr-defined]
        command.__annotations__ = {}
        command.__doc__ = fn.__doc__
        cls = type("PanelCommand", (PanelCommand,), {"abouts": abouts, "words": _words(registry)})
        epilog = (
            f"Installed algorithms: {', '.join(sorted(registry.algorithms)) or 'none'}. "
            "--speculative-algorithm NAME --help lists NAME's options as well."
        )
        app.command(name, cls=cls, epilog=epilog)(command)
        return fn

    return register


def typed_algorithm(argv: Sequence[str]) -> str | None:
    """Return the value of ``--speculative-algorithm`` in `argv`, without parsing the rest."""
    found = None
    for at, word in enumerate(argv):
        if word == flag("algorithm") and at + 1 < len(argv):
            found = argv[at + 1]
        elif word.startswith(flag("algorithm") + "="):
            found = word.partition("=")[2]
    return found


# --- building the signature ------------------------------------------------------------------------------------------


def _option(name: str, annotation: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, info])


def _model_path() -> inspect.Parameter:
    return _option("model_path", str | None, typer.Option("--model-path", help="another way to write MODEL"))


def _words(registry: "Registry") -> dict[str, str]:
    words = {fold(alias): name for name, found in registry.algorithms.items() for alias in found.spec.aliases}
    return words | {name: name for name in registry.algorithms}


def _core_options(registry: "Registry") -> list[inspect.Parameter]:
    """Return the parameters that are the same whatever is installed."""
    names = ", ".join(sorted(registry.algorithms)) or "no algorithm is installed"

    def core(name: str, annotation: Any, option: str, metavar: str, about: str) -> inspect.Parameter:
        return _option(name, annotation, typer.Option(option, metavar=metavar, help=about, rich_help_panel=CORE_PANEL))

    params = [
        core(_ALGORITHM, str | None, flag("algorithm"), "NAME", f"none, or one of: {names}"),
        core(_CONFIG, str | None, flag("config"), "JSON|@FILE", "the algorithm's options as one JSON object"),
        core(
            "require",
            list[str] | None,
            "--require",
            "REQUIREMENT",
            "refuse to start without this package, for example 'package>=1.2'; repeatable",
        ),
    ]
    allowed = allowed_values(EngineOptions)
    for field, info in EngineOptions.model_fields.items():
        panel = CORE_PANEL if field.startswith("speculative_") else ENGINE_PANEL
        spellings = (option_of(field), *ALIASES.get(field, ()))
        about = _about(info.description, allowed.get(field), info.default)
        params.append(_field_option(field, spellings, kind_of(info.annotation) == "switch", about, panel))
    return params


def _plugin_options(registry: "Registry") -> tuple[dict[str, dict[str, str]], list[inspect.Parameter]]:
    """Return one text option per field of the installed algorithms (a switch where all of them have a switch).

    The first part is the help text per parameter and algorithm.
    """
    abouts: dict[str, dict[str, str]] = {}
    kinds: dict[str, set[str]] = {}
    for name, installed in sorted(registry.algorithms.items()):
        model = installed.spec.config_model
        allowed = allowed_values(model)
        for field, info in model.model_fields.items():
            kind = kind_of(info.annotation)
            if kind == "mapping" or is_reserved(field):  # `plan_run` refuses a reserved name, naming the package
                continue
            kinds.setdefault(field, set()).add(kind)
            default = info.get_default(call_default_factory=False)
            abouts.setdefault(f"speculative_{field}", {})[name] = _about(info.description, allowed.get(field), default)
    params = [
        _field_option(f"speculative_{field}", (flag(field),), found == {"switch"}, "", None)
        for field, found in kinds.items()
    ]
    return abouts, params


def _field_option(name: str, flags: tuple[str, ...], switch: bool, about: str, panel: str | None) -> inspect.Parameter:
    if switch:
        flags = tuple(f"{f}/--no-{f.removeprefix('--')}" for f in flags)
    info = typer.Option(*flags, help=about, rich_help_panel=panel, metavar=None if switch else "VALUE")
    return _option(name, bool | None if switch else str | None, info)


def _about(description: str | None, allowed: str | None, default: object) -> str:
    parts = [part for part in (allowed,) if part and part not in ("text", "true or false")]
    if default is not None and default is not PydanticUndefined:
        parts.append(f"default {'on' if default is True else 'off' if default is False else default}")
    return (description or "") + (f" [{'; '.join(parts)}]" if parts else "")


# --- from what was typed to values -----------------------------------------------------------------------------------


def _model(positional: str | None, option: str | None, optional: bool) -> str | None:
    if positional is not None and option is not None and positional != option:
        raise UserError(f"MODEL {positional} and --model-path {option} differ: give one of them")
    model = positional if positional is not None else option
    if model is None and not optional:
        raise UserError("MODEL is missing: give the folder or hub id of a model")
    if model is not None and not model.strip():
        raise UserError("MODEL '' is empty: give the folder or hub id of a model")
    return model


def _engine_options(values: dict[str, Any]) -> EngineOptions:
    """Take the engine's options out of `values`."""
    taken = {field: values.pop(field) for field in EngineOptions.model_fields}
    given = {field: value for field, value in taken.items() if value is not None}
    return validated(EngineOptions, given, option_of)


def _speculation(registry: "Registry", values: dict[str, Any]) -> tuple[str, dict[str, object]]:
    """Take the algorithm's word and its options out of `values`."""
    word = values.pop(_ALGORITHM)
    if word is not None and not word.strip():
        raise UserError(
            f"{flag('algorithm')} '' is empty: give none, or one of {', '.join(sorted(registry.algorithms))}"
        )
    config = values.pop(_CONFIG)
    given = {} if config is None else read_config(config)
    for name in [name for name in values if name.startswith("speculative_")]:
        value, field = values.pop(name), plain(name)
        if value is None:
            continue
        if field in given and not _same(given[field], value):
            configured = json.dumps(given[field])
            raise UserError(
                f"{flag(field)} {value} and {field} {configured} in {flag('config')} differ: give one of them"
            )
        given.setdefault(field, value)
    return word or NONE, given


def read_config(text: str) -> dict[str, object]:
    """Read the value of ``--speculative-config``: a JSON object, or ``@file`` that holds one."""
    option, source = flag("config"), text
    if text.startswith("@"):
        try:
            source = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UserError(f"{option} {text}: cannot read the file ({cause}): give @FILE or a JSON object") from None
    where = text if text.startswith("@") else "JSON"
    try:
        found = json.loads(source, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{option} {where}: not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}): "
            """write an object like '{"num_draft_tokens": 8}'"""
        ) from None
    except ValueError as error:
        raise UserError(f"{option} {where}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{option} {where} is {json.dumps(found)[:60]}: give a JSON object of option names and values")
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the name {twice!r} stands there twice: keep one of them")
    return found


def _same(configured: object, typed: object) -> bool:
    """Say whether a JSON value and a flag's text mean the same."""
    if configured == typed and type(configured) is type(typed):
        return True
    if not isinstance(typed, str):
        return False
    if isinstance(configured, list):
        return [str(item) for item in configured] == [item.strip() for item in typed.split(",")] or _json(
            typed
        ) == configured
    return _json(typed) == configured


def _json(text: str) -> object:
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false", "null") else text)
    except json.JSONDecodeError:
        return text


# --- an option nobody has --------------------------------------------------------------------------------------------


def unknown_option(registry: "Registry", option: str, argv: Sequence[str], possibilities: Iterable[str] = ()) -> str:
    """Return the one line for an option that no installed package and no command has."""
    word = typed_algorithm(argv)
    if word is None and argv[:1] == ["doctor"]:  # its NAME stands for the option
        word = next((a for a in argv[1:2] if not a.startswith("-")), None)
    said = f"there is no option {option}"
    algorithms = registry.algorithms
    if word is not None and fold(word) != NONE:
        try:
            resolve(registry, word, Facts.empty())
        except UserError as error:  # an algorithm that cannot be had explains an option that is missing
            if fold(word) not in _words(registry):
                return f"{said}; {error}"
        name = _words(registry).get(fold(word))
        algorithms = {name: algorithms[name]} if name else {}
    for name, installed in algorithms.items():
        for key, text in installed.spec.foreign_options.items():
            if plain(key) == plain(option):
                return f"{option} is not an option of {name!r}: {text}"
    prefix = flag("") if option.startswith(flag("")) else "--"  # a shared prefix would make every option look near
    rest = {known.removeprefix(prefix): known for known in possibilities if known.startswith(prefix)}
    near = [rest[match] for match in difflib.get_close_matches(option.removeprefix(prefix), list(rest), n=1)]
    if near:
        said += f"; the nearest is {near[0]}"
    elif prefix == flag(""):
        said += f"; no installed algorithm has it (installed: {', '.join(registry.algorithms) or 'none'})"
    return f"{said}: --help lists all"
