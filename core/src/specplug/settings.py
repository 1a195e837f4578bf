"""From what a user typed to one settled configuration, with the source of every value. Torch-free.

Precedence: user > policy package > checkpoint > algorithm > the field's own default. Nothing is
mutated; the result is a validated `SpecConfig` and one `Setting` per field.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from specplug.distributions import POLICIES
from specplug.errors import RefusedError, UserError
from specplug.spec import (
    Defaults,
    Facts,
    Problem,
    Setting,
    SpecConfig,
)

if TYPE_CHECKING:
    from specplug.registry import Answer, Installed, Registry

RESERVED = frozenset({"algorithm", "config", "acceptance", "draft_load_format", "on_failure"})
RESERVED_PREFIXES = ("draft_model", "adaptive")
"""Names and beginnings of names that belong to the core's own ``--speculative-`` options."""

Source = Literal["user", "policy", "checkpoint", "algorithm", "default"]
Model = TypeVar("Model", bound=BaseModel)
Kind = Literal["switch", "list", "mapping", "text"]


# --- names and kinds of fields ---------------------------------------------------------------------------------------


def flag(field: str) -> str:
    """Return the command-line spelling of an algorithm's field: ``num_steps`` -> ``--speculative-num-steps``."""
    return "--speculative-" + field.replace("_", "-")


def option_of(field: str) -> str:
    """Return the command-line spelling of any other field: ``page_size`` -> ``--page-size``."""
    return "--" + field.replace("_", "-")


def plain(option: str) -> str:
    """Return the bare field name of an option however it is spelt: ``--speculative-num-steps`` -> ``num_steps``."""
    return option.strip().lstrip("-").replace("-", "_").lower().removeprefix("speculative_")


def is_reserved(field: str) -> bool:
    """Say whether the core keeps the name `field` for its own options."""
    return field in RESERVED or field.startswith(RESERVED_PREFIXES)


def kind_of(annotation: Any) -> Kind:
    """Say how a field of this type is typed on a command line.

    ``switch``: ``--x/--no-x``; ``list``: commas between items; ``mapping``: JSON only; else ``text``.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return kind_of(get_args(annotation)[0])
    if origin in (Union, UnionType):
        kinds = {kind_of(a) for a in get_args(annotation) if a is not type(None)}
        return kinds.pop() if len(kinds) == 1 else "text"
    base = origin if isinstance(origin, type) else annotation
    if base is bool:
        return "switch"
    if isinstance(base, type) and issubclass(base, (Mapping, BaseModel)):
        return "mapping"
    if isinstance(base, type) and issubclass(base, (Sequence, set, frozenset)) and not issubclass(base, (str, bytes)):
        return "list"
    return "text"


# --- one line per invalid value --------------------------------------------------------------------------------------


def _bounds(schema: Mapping[str, Any]) -> str:
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    # Whether a bound that was declared as 1 is 1 or 1.0 here depends on the version of pydantic.
    low, above, high, below = (
        int(bound) if isinstance(bound, float) and bound.is_integer() else bound for bound in map(schema.get, names)
    )
    if low is not None and high is not None:
        return f" from {low} to {high}"
    lower = f"at least {low}" if low is not None else f"above {above}" if above is not None else ""
    upper = f"at most {high}" if high is not None else f"below {below}" if below is not None else ""
    both = " and ".join(part for part in (lower, upper) if part)
    return f", {both}" if both else ""


def _allowed(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _allowed(definitions.get(str(schema["$ref"]).rsplit("/", 1)[-1], {}), definitions)
    if "enum" in schema:
        return "one of " + ", ".join(str(choice) for choice in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:
        parts = [_allowed(s, definitions) for s in schema["anyOf"] if s.get("type") != "null"]
        return " or ".join(part for part in parts if part)
    match schema.get("type"):
        case "integer":
            return "a whole number" + _bounds(schema)
        case "number":
            return "a number" + _bounds(schema)
        case "boolean":
            return "true or false"
        case "string":
            return f"text matching {schema['pattern']}" if "pattern" in schema else "text"
        case "array":
            items = _allowed(schema.get("items", {}), definitions)
            return "a list separated by commas" + (f" (each {items})" if items else "")
        case "object":
            return "a JSON object"
    return ""


def allowed_values(model: type[BaseModel]) -> dict[str, str]:
    """Return what each field of `model` accepts, in words; a field that cannot be told is left out."""
    try:
        schema = model.model_json_schema()
    except PydanticUserError:  # some field has no JSON form; pydantic's own wording is shown instead
        return {}
    definitions = schema.get("$defs", {})
    found = {name: _allowed(part, definitions) for name, part in schema.get("properties", {}).items()}
    return {name: words for name, words in found.items() if words}


def shown(value: object) -> str:
    """Return `value` as a user would recognise it, on one line and not too long."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) or "''"
    return text if len(text) <= 80 else text[:77] + "..."


def explain(
    error: ValidationError,
    model: type[BaseModel],
    option: Callable[[str], str] = flag,
    origin: Callable[[str], str] = lambda field: "",
) -> list[str]:
    """Turn a pydantic error into one line per bad option: name, value, what is allowed.

    `option` spells a field as its user knows it; `origin` says where its value came from, if not from them.
    """
    allowed = allowed_values(model)
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        said = " ".join(item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
        if not item["loc"]:
            lines.setdefault("", said)
            continue
        field = str(item["loc"][0])
        if field in lines:  # one line for a field, however many of its alternatives failed
            continue
        name, source = option(field), origin(field)
        if item["type"] == "missing":
            lines[field] = f"{name} is required: {allowed.get(field, 'give a value')}"
        elif item["type"] == "extra_forbidden":
            lines[field] = f"{name} is not an option here{_nearest(field, model.model_fields, option)}"
        else:
            own = item["type"] in ("value_error", "assertion_error")
            must = said if own or field not in allowed else f"must be {allowed[field]}"
            lines[field] = f"{name} {shown(item['input'])}{source}: {must}"
    return list(lines.values())


def validated(model: type[Model], values: Mapping[str, Any], option: Callable[[str], str] = str) -> Model:
    """Return `model` filled with text or typed `values`; raises `UserError` with one line per bad option.

    `option` spells a field as its user knows it (`option_of` on the command line).
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("\n".join(explain(error, model, option))) from None


def _nearest(field: str, names: Iterable[str], option: Callable[[str], str] = flag) -> str:
    close = difflib.get_close_matches(plain(field), list(names), n=1)
    return f"; the nearest is {option(close[0])}" if close else ""


# --- merging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """A validated configuration and where each of its values came from."""

    config: SpecConfig
    settings: tuple[Setting, ...]
    trace: tuple[str, ...]
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class _Offer:
    value: Any
    source: Source
    because: str
    who: str


def settle(registry: "Registry", installed: "Installed", given: Mapping[str, object], facts: Facts) -> Settled:
    """Merge what the user gave with what packages propose, and validate it.

    `given` maps field names (underscores, no ``speculative_``) to text or typed values.
    Raises `RefusedError` for an unknown field, a bad value, or packages that contradict each other.
    """
    spec = installed.spec
    model: type[SpecConfig] = spec.config_model
    owner = f"{installed.distribution} {installed.version}"
    for field in given:
        if field not in model.model_fields:
            raise RefusedError(unknown_field(registry, installed, field))
    mine = _typed(model, {f: _from_text(model, f, v) for f, v in given.items()})

    offers: dict[str, _Offer] = {f: _Offer(v, "user", "", "the user") for f, v in mine.items()}
    warnings: list[Problem] = []
    answers = registry.each("specplug_defaults", selected=spec.name, algorithm=spec.name, given=dict(mine), facts=facts)
    for rank, answer, defaults in sorted(_proposals(answers), key=lambda p: p[0]):
        who = f"{answer.distribution} {answer.version}"
        if rank > 0 and answer.distribution != installed.distribution:
            said = f"{who} proposes values for {spec.name!r}, which is {installed.distribution}'s: they are not used"
            warnings.append(Problem(severity="warning", field="", message=said))
            continue
        source: Source = "policy" if rank == 0 else defaults.source
        for field, value in defaults.values.items():
            if field not in model.model_fields:
                raise RefusedError(
                    f"{who} proposes {flag(field)}, which {spec.name!r} does not have"
                    f"{_nearest(field, model.model_fields)}: {_remedy(rank, who)}"
                )
            held = offers.get(field)
            if held is not None and held.source == source and held.value != value:
                raise RefusedError(
                    f"{flag(field)}: {held.who} says {shown(held.value)} ({held.because}) and {who} says "
                    f"{shown(value)} ({defaults.because}): give {flag(field)} yourself, or {_remedy(rank, who)}"
                )
            offers.setdefault(field, _Offer(value, source, defaults.because, who))

    def origin(field: str) -> str:
        offer = offers.get(field)
        return "" if offer is None or offer.source == "user" else f" (from {offer.who}: {offer.because})"

    try:
        config = model.model_validate({field: offer.value for field, offer in offers.items()})
    except ValidationError as error:
        raise RefusedError("\n".join(explain(error, model, origin=origin))) from None
    except Exception as error:  # a validator of the plugin's own
        raise RefusedError(f"{owner}: its option model failed with {type(error).__name__}: {error}") from error
    settings = tuple(_setting(field, getattr(config, field), offers.get(field)) for field in model.model_fields)
    return Settled(config, settings, tuple(describe(setting) for setting in settings), tuple(warnings))


def describe(setting: Setting) -> str:
    """Return one line of trace: option, value, source and reason."""
    reason = f": {setting.because}" if setting.because else ""
    return f"{flag(setting.field)} = {shown(setting.value)} ({setting.source}{reason})"


def unknown_field(registry: "Registry", installed: "Installed", field: str) -> str:
    """Return the one line that says why `field` is no option of this algorithm, and what to write instead."""
    spec = installed.spec
    foreign = {plain(key): text for key, text in spec.foreign_options.items()}
    name = plain(field)
    if name in foreign:
        return f"{flag(name)} is not an option of {spec.name!r}: {foreign[name]}"
    if is_reserved(name):
        return f"{flag(name)} is an option of the core: give it as a flag, not among the options of {spec.name!r}"
    if name in spec.config_model.model_fields:
        return f"{field} is written {name} in a configuration: {flag(name)} is the flag"
    having = sorted(n for n, other in registry.algorithms.items() if name in other.spec.config_model.model_fields)
    has = f"; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it" if having else ""
    near = _nearest(name, spec.config_model.model_fields)
    end = "" if has or near else f"; it has {', '.join(flag(f) for f in spec.config_model.model_fields)}"
    return f"{spec.name!r} has no option {flag(name)}{has}{near}{end}"


def answers_of(value: Any) -> tuple[Any, ...]:
    """Return a hook's answer, one or several, as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _proposals(answers: Iterable["Answer"]) -> Iterable[tuple[int, "Answer", Defaults]]:
    """Yield (rank, answer, defaults); rank 0 is a policy, 1 the checkpoint, 2 the algorithm."""
    for answer in answers:
        for defaults in answers_of(answer.value):
            yield (0 if answer.group == POLICIES else 1 if defaults.source == "checkpoint" else 2), answer, defaults


def _remedy(rank: int, who: str) -> str:
    return f"leave {who} out with SPECPLUG_PLUGINS" if rank == 0 else f"a bug of {who}, report it to its authors"


def _setting(field: str, value: Any, offer: _Offer | None) -> Setting:
    if offer is None:
        return Setting(field=field, value=value, source="default")
    if offer.source == "user":
        return Setting(field=field, value=value, source="user")
    return Setting(field=field, value=value, source=offer.source, because=f"{offer.who}, {offer.because}")


def _from_text(model: type[SpecConfig], field: str, value: object) -> object:
    """Split the text of a list option; every other text is read by pydantic itself."""
    if not isinstance(value, str) or kind_of(model.model_fields[field].annotation) != "list":
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value  # the field's own error names the option
    return [item.strip() for item in value.split(",") if item.strip()]


def _typed(model: type[SpecConfig], given: Mapping[str, object]) -> dict[str, Any]:
    """Return the user's values in their own types, so that hooks never see text.

    Only complaints about fields the user gave count here; the whole is validated after the merge.
    """
    try:
        config = model.model_validate(given)
        return {field: getattr(config, field) for field in given}
    except ValidationError as error:
        mine = [e for e in error.errors() if e["loc"] and e["loc"][0] in given]
        if mine:
            lines = [line for line in explain(error, model) if any(line.startswith(f"{flag(f)} ") for f in given)]
            raise RefusedError("\n".join(lines)) from None
    typed: dict[str, Any] = {}
    for field, value in given.items():
        info = model.model_fields[field]
        constrained: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        try:
            typed[field] = TypeAdapter(constrained).validate_python(value)
        except ValidationError:  # only the model's own validators can read it
            typed[field] = value
    return typed
