"""The public surface, written down with its signatures in ``api_snapshot.txt``: nothing of it changes unseen.

After a change that is meant: ``python core/tests/test_api_snapshot.py`` writes the file anew. Then, by ADR 0011, an
addition needs a higher minor number in `specplug.API` once that number is released, a changelog fragment of type `api`,
and what vanishes or changes its meaning has to be deprecated first (`specplug.deprecated`).
"""

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specplug.hookspecs import Hooks
from specplug.testing.conformance import check_names

FILE = Path(__file__).with_name("api_snapshot.txt")
MODULES = ("specplug", "specplug.layers", "specplug.testing", "specplug.testing.setup")


def snapshot() -> str:
    """Return one line for each public name and each public part of it, as its source spells it."""
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        lines.append(f"# {name}")
        for public in sorted(module.__all__):
            lines += described(public, getattr(module, public))
        lines.append("")
    lines += ["# hooks", *described("Hooks", Hooks), "", "# checks of the kit", *check_names(), ""]
    return "\n".join(lines)


def described(name: str, value: Any) -> list[str]:
    """Describe one public name."""
    if inspect.isclass(value):
        return list(class_lines(name, definition(value)))
    if inspect.isfunction(value):
        node = definition(value)
        assert isinstance(node, ast.FunctionDef)
        return [f"{name}{signature(node)}"]
    if inspect.ismodule(value):
        return [f"{name}: module {value.__name__}"]
    # What a name stands for, such as a union of literals, is part of the surface; an object's address is not.
    return [f"{name} = {value!r}" if " at 0x" not in repr(value) else f"{name}: {type(value).__name__}"]


def definition(value: Any) -> ast.AST:
    """Return the node that defines a class or function; of one with overloads, the whole."""
    tree = ast.parse(Path(inspect.getsourcefile(value) or "").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__
        if named and not any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list):
            return node
    raise AssertionError(f"{value!r} is not defined where it says")


def class_lines(name: str, node: ast.AST) -> Iterator[str]:
    """Yield the class, its public fields with their defaults, and its public methods."""
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(map(ast.unparse, node.bases))
    marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
    yield f"{marks}class {name}({bases})"
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            default = "" if part.value is None else f" = {ast.unparse(without_prose(part.value))}"
            yield f"    {ast.unparse(part.target)}: {ast.unparse(part.annotation)}{default}"
        elif isinstance(part, ast.FunctionDef) and (part.name == "__init__" or not part.name.startswith("_")):
            marks = "".join(f"@{ast.unparse(mark)} " for mark in part.decorator_list)
            yield f"    {marks}{part.name}{signature(part)}"
            if part.name == "__init__":
                yield from (f"    self.{name}" for name in attributes(part))


def attributes(node: ast.FunctionDef) -> Iterator[str]:
    """Yield the public attributes that a constructor sets, once each."""
    stored = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    own = [part.attr for part in stored if isinstance(part.value, ast.Name) and part.value.id == "self"]
    yield from (name for name in dict.fromkeys(own) if not name.startswith("_"))


def without_prose(node: ast.expr) -> ast.expr:
    """Return a default without its description: words may be improved."""
    if isinstance(node, ast.Call):
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "description"]
    return node


def signature(node: ast.FunctionDef) -> str:
    """Return parameters with annotations and defaults, and what comes back."""
    answer = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"({ast.unparse(node.args)}){answer}"


def test_the_public_surface_is_the_one_written_down() -> None:
    difference = list(
        difflib.unified_diff(FILE.read_text(encoding="utf-8").splitlines(), snapshot().splitlines(), lineterm="", n=0)
    )
    assert not difference, "\n".join(["the public surface changed:", *difference, "", __doc__ or ""])


def test_all_is_sorted_and_complete() -> None:
    for name in MODULES:
        public = importlib.import_module(name).__all__
        assert len(set(public)) == len(public)
        assert sorted(public) == list(public), f"{name}.__all__ is not sorted"


if __name__ == "__main__":
    FILE.write_text(snapshot(), encoding="utf-8")
    sys.stdout.write(f"wrote {FILE.name}\n")
