"""The longest files and functions of the packages, and the most parameters: a signal where to look, not a gate.

python tools/sizes.py [FOLDER ...]    default: the sources of the core and of the plugins
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 50, 8
"""From where on something is marked."""
SHOWN = 12


class Function(NamedTuple):
    """One function: where it is, its lines without the docstring, its parameters, the deepest nesting of its blocks."""

    where: str
    lines: int
    parameters: int
    depth: int


def functions(path: Path, name: str) -> Iterator[Function]:
    """Yield the functions of a file, methods and inner ones included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = node.body[0] if ast.get_docstring(node) else None
            described = 0 if words is None else (words.end_lineno or 0) - words.lineno + 1
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - described
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            yield Function(f"{name}:{node.lineno} {node.name}", lines, count, nesting(node))


def nesting(node: ast.AST) -> int:
    """Return how deep blocks lie in one another below `node`."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    inner = max((nesting(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, blocks)


def report(folders: list[Path]) -> str:
    """Return the report, as lines of text."""
    files: dict[str, int] = {}
    found: list[Function] = []
    for path in sorted(path for folder in folders for path in folder.rglob("*.py") if "build" not in path.parts):
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        files[name] = len(path.read_text(encoding="utf-8").splitlines())
        found += functions(path, name)
    total = sum(files.values())
    lines = [f"{len(files)} files, {total} lines, {len(found)} functions", "", "longest files"]
    longest = sorted(files.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]
    lines += [marked(count, FILE_LINES, name) for name, count in longest]
    lines += ["", "longest functions, docstrings not counted"]
    by_lines = sorted(found, key=lambda function: (-function.lines, function.where))[:SHOWN]
    lines += [marked(function.lines, FUNCTION_LINES, function.where) for function in by_lines]
    lines += ["", "most parameters"]
    by_parameters = sorted(found, key=lambda function: (-function.parameters, function.where))[:SHOWN]
    lines += [marked(function.parameters, PARAMETERS, function.where) for function in by_parameters]
    lines += ["", "deepest blocks"]
    by_depth = sorted(found, key=lambda function: (-function.depth, function.where))[:SHOWN]
    lines += [marked(function.depth, 4, function.where) for function in by_depth]
    return "\n".join(lines)


def marked(count: int, most: int, what: str) -> str:
    """Return one line, with a mark where `count` is above `most`."""
    return f"{count:6} {'!' if count > most else ' '} {what}"


if __name__ == "__main__":
    given = [Path(text).resolve() for text in sys.argv[1:]]
    sys.stdout.write(report(given or [ROOT / "core" / "src", *sorted(ROOT.glob("plugins/*/src"))]) + "\n")
