"""Writes the pages under docs/reference that are made from code. Run it after a change to what they describe.

python docs/generate.py           # writes
python docs/generate.py --check   # says which pages are out of date, exit code 1; tests/test_docs.py does the same
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

from specplug.cli import COMMANDS, _app
from specplug.records import Installed
from specplug.registry import Registry
from specplug.settings import allowed_values, flag, plain
from specplug.spec import Capabilities

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
from source import Entry, entry  # noqa: E402  (no package)

PACKAGES = ("specplug-dflash", "specplug-eagle", "specplug-mtp", "specplug-ngram", "specplug-standalone")
NOTE = "<!-- Written by docs/generate.py: change the code, then run it again. -->\n<!-- fmt: off -->\n\n"
SHARED = ("Speculation", "Engine options")
"""Headings of the options that several commands have."""

ABOUT = {"hookimpl": "Decorates a function of a manifest that answers a [hook](hooks.md)."}
"""Of values without a docstring."""
SGLANG = "0.5.23"
SGLANG_FLAGS = (DOCS / "sglang-flags.txt").read_text(encoding="utf-8").split()
"""What SGLang writes behind ``--speculative-``."""


@cache
def registry() -> Registry:
    """Return this repository's packages, whatever else is installed."""
    found = Registry.discover(environ={"SPECPLUG_PLUGINS": ",".join(PACKAGES)})
    found.load()
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; an empty one is nothing."""
    body = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    names = list(head)
    return "\n".join([f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *body, "", ""]) if body else ""


def cell(text: str) -> str:
    """Return text that cannot end a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as code, or nothing of nothing."""
    return f"`{text}`" if text else ""


# --- command line ----------------------------------------------------------------------------------------------------


@cache
def commands() -> Mapping[str, Any]:
    """Return every command, as the parser has it."""
    app = _app()
    for module in COMMANDS.values():
        importlib.import_module(module).register(app, registry())
    found: Any = get_command(app)
    return {name: found.commands[name] for name in COMMANDS}


def records(command: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield (parameter, heading, how it is written, help) of the options that no algorithm owns."""
    context = command.context_class(command)
    for param in command.get_params(context):
        if param.name == "help" or param.name in getattr(command, "abouts", {}):
            continue
        heading = "Arguments" if param.param_type_name == "argument" else getattr(param, "rich_help_panel", None)
        written, about = param.get_help_record(context) or (param.make_metavar(context), "")
        yield param.name, heading or "Options", written, about


def cli_page() -> str:
    """Return the page of all commands."""
    shared: dict[str, dict[str, tuple[str, str]]] = {heading: {} for heading in SHARED}
    parts = []
    for name, command in commands().items():
        own: dict[str, list[tuple[str, str]]] = {}
        takes = False
        for param, heading, written, about in records(command):
            if heading in shared:
                shared[heading][param] = (written, about)
                takes = True
            else:
                own.setdefault(heading, []).append((written, about))
        usage = " ".join([f"specplug {name}", *command.collect_usage_pieces(command.context_class(command))])
        parts.append(f"## specplug {name}\n\n    {usage}\n\n{paragraphs(command.help or '')}\n\n")
        for heading, rows in own.items():
            parts.append(table((heading.lower(), ""), ((code(written), about) for written, about in rows)))
        if takes:
            parts.append("Also: [speculation](#speculation), [engine options](#engine-options).\n\n")
    for heading, options in shared.items():
        parts.append(f"## {heading}\n\n")
        if heading == "Speculation":
            parts.append("`--speculative-` options of the algorithms themselves: [algorithms](algorithms.md).\n\n")
        parts.append(table(("option", ""), ((code(written), about) for written, about in options.values())))
    intro = (
        "# Command line\n\nExit code 0; 2 for a mistake of the user's or a refusal, one line each on standard error; "
        "1 as the command says, and for a drafter that failed.\n\n"
    )
    return NOTE + intro + "".join(parts)


def paragraphs(text: str) -> str:
    """Return a docstring as prose: lines of a paragraph joined."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


# --- algorithms ------------------------------------------------------------------------------------------------------


def algorithms_page() -> str:
    """Return the page of all algorithms of this repository."""
    parts = [
        "# Algorithms\n\nWhat the packages of this repository declare. `--speculative-algorithm NAME` selects one; "
        "upper case and underscores do not matter. Each option is a flag, and, without `--speculative-` and with "
        "underscores, a key of `--speculative-config`.\n\n"
    ]
    default = Capabilities()
    for name, installed in registry().algorithms.items():
        spec = installed.spec
        also = f" Also: {', '.join(map(code, spec.aliases))}." if spec.aliases else ""
        package = installed.distribution
        readme = f"../../plugins/{package.removeprefix('specplug-')}/README.md"
        parts.append(f"## {name}\n\nPackage [{package}]({readme}). {sentence(spec.summary)}{also}\n\n")
        allowed = allowed_values(spec.config_model)
        rows = [
            (code(flag(field)), allowed.get(field) or "", default_of(info), info.description or "")
            for field, info in spec.config_model.model_fields.items()
        ]
        parts.append(table(("option", "values", "default", "meaning"), rows))
        wants = [
            f"{field} {shown(getattr(spec.capabilities, field))}"
            for field in type(spec.capabilities).model_fields
            if getattr(spec.capabilities, field) != getattr(default, field)
        ]
        parts.append(f"May ask for: {'; '.join(wants) or 'nothing beyond the defaults'}.\n\n")
    words = {word: text for each in registry().algorithms.values() for word, text in each.spec.instead.items()}
    parts.append("## Words that are no value\n\n")
    parts.append(table(("typed", "write"), ((code(word), text) for word, text in sorted(words.items()))))
    return NOTE + "".join(parts)


def sentence(text: str) -> str:
    """Return text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def shown(value: Any) -> str:
    """Return a capability's value, in an order that is always the same."""
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    if isinstance(value, tuple):
        return ", ".join(str(tap.at) for tap in value)
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def default_of(info: Any) -> str:
    """Return an option's default in words."""
    value = info.get_default(call_default_factory=True)
    return "" if value is None else {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def engines_page() -> str:
    """Return the page of other engines' options."""
    everywhere = {opt for command in commands().values() for param in command.params for opt in param.opts}
    installed = registry().algorithms
    rows = []
    for word in SGLANG_FLAGS:
        option, told = f"--speculative-{word}", list(foreign(installed, f"speculative-{word}"))
        having = [name for name, each in installed.items() if plain(word) in each.spec.config_model.model_fields]
        here = [f"the same, for {', '.join(having)}"] if having else ["the same"] if option in everywhere else []
        rows.append((code(option), "; ".join(here + told) or "refused: there is no such option"))
    known = {plain(f"speculative-{word}") for word in SGLANG_FLAGS}
    other = {key for each in installed.values() for key in each.spec.foreign_options if plain(key) not in known}
    head = ("written there", "here")
    intro = (
        "# Options of other engines\n\nThose that are not taken are answered with what to write; none is ignored. "
        "How to move: [from SGLang](../how-to/move-from-sglang.md).\n\n"
    )
    rest = ((code(f"--{key}"), "; ".join(foreign(installed, key))) for key in sorted(other))
    return (
        f"{NOTE}{intro}## SGLang {SGLANG}\n\n{table(head, rows)}## Others\n\n"
        f"From older releases, vLLM, TensorRT-LLM and transformers.\n\n{table(head, rest)}"
    )


def foreign(installed: Mapping[str, Installed], key: str) -> Iterator[str]:
    """Yield what the algorithms say to an option, those that say the same together."""
    said: dict[str, list[str]] = {}
    for name, each in installed.items():
        for word, text in each.spec.foreign_options.items():
            if plain(word) == plain(key):
                said.setdefault(re.sub(r"(--[\w-]+)", r"`\1`", text), []).append(name)
    yield from (f"{', '.join(names)}: {text}" for text, names in said.items())


# --- API, hooks, kit, metrics ----------------------------------------------------------------------------------------


def written(each: Entry, level: int) -> str:
    """Return one public name as a section."""
    parts = [f"{'#' * level} {each.name}\n\n```python\n{each.signature}\n```\n\n"]
    if each.text:
        parts.append(each.text + "\n\n")
    rows = [(code(name), code(kind), code(default), text) for name, kind, default, text in each.fields]
    parts.append(table(("field", "type", "default", ""), rows))
    for method in each.methods:
        parts.append(f"```python\n{method.signature}\n```\n\n")
        if method.text:
            parts.append(method.text + "\n\n")
    return "".join(parts)


def api_page() -> str:
    """Return the page of all public names."""
    parts = [
        "# Public names\n\nA plugin may import these and nothing else of the core. Importing `specplug` does not "
        "import torch. Kept stable as [decided](../adr/0011-api-numbers-and-calendar.md).\n\n"
    ]
    for module in ("specplug", "specplug.layers", "specplug.testing"):
        parts.append(f"## {module}\n\n")
        public = importlib.import_module(module)
        for name in sorted(public.__all__, key=str.lower):
            thing = getattr(public, name)
            home = {"API": "specplug.spec", "hookimpl": "specplug.hookspecs"}.get(name, module)
            try:
                found = entry(name, thing, home)
                found.text = found.text or ABOUT.get(name, "")
                parts.append(written(found, 3))
            except LookupError:  # a type that another module makes of others
                parts.append(f"### {name}\n\n```python\n{name} = {thing}\n```\n\n")
    return NOTE + "".join(parts)


def hooks_page() -> str:
    """Return the page of the hooks and entry-point groups."""
    from specplug.hookspecs import Hooks

    made = entry("Hooks", Hooks, "specplug.hookspecs")
    text = "".join(f"## {each.name}\n\n```python\n{each.signature}\n```\n\n{each.text}\n\n" for each in made.methods)
    return (
        f"{NOTE}# Hooks\n\nA module that an entry point names implements these, decorated with `specplug.hookimpl`. "
        "Group `specplug.algorithms` holds draft algorithms, the entry point's name being the algorithm's; group "
        "`specplug.policies` holds packages without one: site defaults, observers. Neither may import torch.\n\n"
        f"{paragraphs(inspect.getdoc(importlib.import_module('specplug.hookspecs')) or '')}\n\n{text}"
    )


def kit_page() -> str:
    """Return the page of the conformance kit's checks."""
    from specplug.testing import DrafterConformance
    from specplug.testing.conformance import check_names

    parts = [
        "# Conformance kit\n\n`pip install 'specplug[testing]'`; a test class that inherits from "
        "`specplug.testing.DrafterConformance` and names an `algorithm` runs all of this. What does not apply to the "
        'algorithm\'s plan is skipped with the reason. `expected_failures = {"check": "reason"}` turns one into a '
        "strict expected failure; a check that is overridden or deleted without being named there fails. Which faults "
        "each check notices: [mutants](kit-mutants.md).\n\n"
    ]
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in check_names():
        check = getattr(DrafterConformance, f"test_{name}")
        groups.setdefault(check.__module__, []).append((code(name), paragraphs(check.__doc__ or "")))
    for module, rows in sorted(groups.items()):
        about = paragraphs(inspect.getdoc(importlib.import_module(module)) or "").split("\n\n")[0]
        title = module.rpartition(".")[2].removeprefix("checks_").capitalize()
        parts.append(f"## {title}\n\n{about}\n\n{table(('check', 'holds if'), rows)}")
    return NOTE + "".join(parts)


def metrics_page() -> str:
    """Return the page of what ``/metrics`` exposes."""
    from specplug.serve.metrics import Metrics
    from specplug.serve.protocol import Counters, EngineInfo, Snapshot

    class Zero(dict[str, Any]):
        """A ledger of nothing: every count is 0, every list has one depth."""

        def __missing__(self, key: str) -> Any:
            return [0] if key in ("reached", "accepted_at") else 0

    def blank(kind: type[Any], **known: Any) -> Any:
        return kind(**{part.name: known.get(part.name, 0) for part in fields(kind)})

    made = Metrics(blank(EngineInfo, algorithm="NAME"), "MODEL")
    made.read(blank(Snapshot, counters=Counters(), report=Zero(drafter={"x": 1.0}), speculation="on", requests=()))
    made.refused(400)
    rows = []
    for metric in sorted(made._registry.collect(), key=lambda each: each.name):
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le", "model", "algorithm"})
        name = metric.name.removeprefix("specplug:") + ("_total" if metric.type == "counter" else "")
        rows.append((code(name), metric.type, ", ".join(map(code, labels)), metric.documentation))
    return (
        f"{NOTE}# Metrics\n\n`GET /metrics` of [`specplug serve`](server.md). All names begin with `specplug:`; all "
        "have the labels `model` and `algorithm`. What the acceptance figures count: "
        "[the ledger](../explanation/ledger.md).\n\n" + table(("name", "type", "more labels", "meaning"), rows)
    )


PAGES = {
    "reference/cli.md": cli_page,
    "reference/algorithms.md": algorithms_page,
    "reference/other-engines.md": engines_page,
    "reference/api.md": api_page,
    "reference/hooks.md": hooks_page,
    "reference/kit.md": kit_page,
    "reference/metrics.md": metrics_page,
}
"""Page -> what makes it."""


def outdated() -> list[str]:
    """Return the pages that say something else than the code does now."""
    return [
        name
        for name, make in PAGES.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text("utf-8") != page(name)
    ]


def page(name: str) -> str:
    """Return the page's text, with one newline at its end."""
    return PAGES[name]().rstrip() + "\n"


def main(argv: list[str]) -> int:
    """Write all pages, or with ``--check`` name those that are out of date."""
    if argv == ["--check"]:
        old = outdated()
        for name in old:
            print(f"docs/{name} is out of date: run python docs/generate.py")
        return bool(old)
    if argv:
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
