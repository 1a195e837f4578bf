"""Reads what the reference says of a class or function from its source text: signature, fields, docstrings.

From the text and not from the objects, so that a page does not depend on the Python that made it.
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTH = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Entry:
    """One public name, ready to be written down."""

    name: str
    kind: str
    """``class``, ``function`` or ``value``."""
    signature: str
    text: str
    """Its docstring, or what stands below it."""
    fields: list[tuple[str, str, str, str]] = field(default_factory=list)
    """(name, type, default or empty, what it is)."""
    methods: list["Entry"] = field(default_factory=list)


def entry(name: str, thing: Any, module: str) -> Entry:
    """Describe `thing`, public as `name`, defined in `module` if it is a plain value."""
    if inspect.isclass(thing) or inspect.isfunction(thing):
        path = Path(inspect.getsourcefile(thing) or "")
        # The last of its name: before it stand only what `typing.overload` says of it.
        node = next(found for found in reversed(_tree(path).body) if getattr(found, "name", None) == thing.__name__)
        if isinstance(node, ast.ClassDef):
            return _class(name, node, _lines(path))
        assert isinstance(node, Function)
        return _function(name, node)
    return _value(name, Path(inspect.getsourcefile(__import__(module, fromlist=["x"])) or ""))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines())


def _class(name: str, node: ast.ClassDef, lines: tuple[str, ...]) -> Entry:
    bases = [ast.unparse(base) for base in node.bases]
    found = Entry(name, "class", f"class {name}" + (f"({', '.join(bases)})" if bases else ""), _doc(node))
    for at, part in enumerate(node.body):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id[0] != "_":
            follows = _string(node.body[at + 1]) if at + 1 < len(node.body) else ""
            default, about = _default(part.value)
            text = about or follows or _comment(lines[(part.end_lineno or part.lineno) - 1])
            found.fields.append((part.target.id, ast.unparse(part.annotation), default, text))
        elif (
            isinstance(part, Function)
            and part.name == "__init__"
            and (ast.get_docstring(part) or len(part.args.args) > 1)
        ):
            found.methods.insert(0, _function("__init__", part))
        elif isinstance(part, Function) and part.name[0] != "_" and not _is_validator(part):
            found.methods.append(_function(part.name, part))
    return found


def _function(name: str, node: Function) -> Entry:
    bound = [part for part in node.decorator_list if ast.unparse(part) in ("property", "classmethod", "staticmethod")]
    prefix = "".join(f"@{ast.unparse(part)}\n" for part in bound)
    arguments = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"def {name}({arguments}){returns}"
    if len(line) > WIDTH:
        line = f"def {name}(\n    " + ",\n    ".join(_arguments(node.args)) + f",\n){returns}"
    return Entry(name, "function", prefix + line, _doc(node))


def _arguments(args: ast.arguments) -> Iterator[str]:
    """Yield the arguments one by one, as the parser would write them."""
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(positional, defaults, strict=True):
        yield ast.unparse(arg) + (f" = {ast.unparse(default)}" if default is not None else "")
    if args.vararg is not None:
        yield "*" + ast.unparse(args.vararg)
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield ast.unparse(arg) + (f" = {ast.unparse(default)}" if default is not None else "")
    if args.kwarg is not None:
        yield "**" + ast.unparse(args.kwarg)


def _value(name: str, path: Path) -> Entry:
    body = _tree(path).body
    for at, part in enumerate(body):
        target = (
            part.target
            if isinstance(part, ast.AnnAssign)
            else part.targets[0]
            if isinstance(part, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and target.id == name:
            follows = _string(body[at + 1]) if at + 1 < len(body) else ""
            return Entry(name, "value", ast.unparse(part), follows)
    raise LookupError(f"{name} is not defined in {path.name}")


def _is_validator(node: Function) -> bool:
    return any("validator" in ast.unparse(part) for part in node.decorator_list)


def _doc(node: ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _string(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _default(value: ast.expr | None) -> tuple[str, str]:
    """Return the default as text, and the description that pydantic's ``Field`` holds."""
    if value is None:
        return "", ""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field")):
        return ast.unparse(value), ""
    words = {keyword.arg: keyword.value for keyword in value.keywords}
    about = words.get("description")
    if value.args:
        default = ast.unparse(value.args[0])
    elif "default" in words:
        default = ast.unparse(words["default"])
    else:
        default = f"{ast.unparse(words['default_factory'])}()" if "default_factory" in words else ""
    return default, about.value if isinstance(about, ast.Constant) and isinstance(about.value, str) else ""


def _comment(line: str) -> str:
    found = re.search(r"\s#\s(.*)$", line)
    return re.sub(r"\s{2,}", " ", found.group(1)) if found else ""
