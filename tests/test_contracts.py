"""Rules that hold between packages, checked mechanically: who may name, import and require what."""

import ast
import functools
import importlib
import importlib.metadata
import importlib.resources
import inspect
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specplug
from specplug.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
STRANGERS = sorted(path.parent for path in ROOT.glob("tests/third_party/*/pyproject.toml"))
GROUPS = ("specplug.algorithms", "specplug.policies")

every_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=lambda path: path.name)
every_package = pytest.mark.parametrize("folder", [*PLUGINS, *STRANGERS], ids=lambda path: path.name)


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def import_name(folder: Path) -> str:
    return f"specplug_{folder.name}"


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not {"build", "__pycache__"} & set(path.parts))


def imports(path: Path) -> Iterator[tuple[str, str | None, int]]:
    """Yield (module, imported name or None, line) of every absolute import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name, node.lineno) for alias in node.names)


@functools.cache
def registry() -> Registry:
    found = Registry.discover(environ={})
    found.load()
    return found


def words_of_plugins() -> dict[str, str]:
    """Return every folded word that an installed package lays claim to, and its distribution."""
    words = {}
    for record in registry().records:
        if record.group == "specplug.algorithms":
            words[specplug.fold(record.entry_point)] = record.distribution
            for spec in record.specs:
                for word in (spec.name, *spec.aliases, *spec.instead):
                    words[specplug.fold(word)] = record.distribution
    return words


def whole_word(word: str) -> re.Pattern[str]:
    """Match `word` in any spelling that folds to it; an identifier that merely contains it is another word."""
    spelled = r"[-_.\s]+".join(map(re.escape, word.split("-")))
    return re.compile(rf"(?<!\w){spelled}(?!\w)", re.IGNORECASE)


def committed_files() -> list[Path]:
    """Return what git tracks or would add; skip where there is no repository (an unpacked archive)."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git repository")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


# --- the core knows no algorithm ---------------------------------------------------------------------------------


def test_core_names_no_algorithm() -> None:
    words = words_of_plugins()
    assert words, "no algorithm is installed, so this test would check nothing"
    patterns = {word: whole_word(word) for word in words}
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word!r} belongs to {words[word]}"
        for path in python_files(CORE / "src")
        if "_template" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word, pattern in patterns.items()
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("word", "text", "hit"),
    [
        ("abc", 'if name == "ABC":', True),
        ("abc", "abc_min_match = 1", False),
        ("abc", "alphabc", False),
        ("abc-de", "ABC_DE", True),
        ("abc-de", "an abc de", True),
        ("abc", "an ABC-like drafter", True),
    ],
)
def test_whole_word(word: str, text: str, hit: bool) -> None:
    assert bool(whole_word(word).search(text)) is hit


def test_core_imports_no_plugin() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in python_files(CORE / "src")
        if "_template" not in path.parts
        for module, _, line in imports(path)
        if module.startswith("specplug_")
    ]
    assert not found, "\n".join(found)


IMPORT_WITHOUT_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"importing {name} imports torch"
"""


def test_light_modules_and_manifests_leave_torch_unimported() -> None:
    light = [f"specplug.{name}" for name in ("names", "spec", "hookspecs", "registry", "settings", "facts", "cli")]
    manifests = sorted({entry.value for group in GROUPS for entry in importlib.metadata.entry_points(group=group)})
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, "specplug", *light, *manifests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", specplug.__all__)
def test_public_name_loads(name: str) -> None:
    assert getattr(specplug, name) is not None


# --- plugins are ordinary third parties --------------------------------------------------------------------------


def test_there_are_plugins() -> None:
    assert PLUGINS
    assert STRANGERS


@every_package
def test_plugin_imports_no_other_plugin(folder: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in python_files(folder)
        for module, _, line in imports(path)
        if module.startswith("specplug_") and module.partition(".")[0] != import_name(folder)
    ]
    assert not found, "\n".join(found)


@every_package
def test_plugin_uses_public_names_only(folder: Path) -> None:
    def public(module: str, name: str | None) -> bool:
        top = ".".join(module.split(".")[:2])
        if top in ("specplug.layers", "specplug.testing"):
            return True
        if module == "specplug":
            return name is None or name in specplug.__all__ or name in ("layers", "testing")
        return not module.startswith("specplug.")

    found = []
    for path in python_files(folder):
        found += [
            f"{path.relative_to(ROOT)}:{line}: {module}{f' import {name}' if name else ''}"
            for module, name, line in imports(path)
            if not public(module, name)
        ]
        # `import specplug` and then an attribute comes to the same as importing it.
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}: specplug.{node.attr}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "specplug"
            and not public("specplug", node.attr)
        ]
    assert not found, "\n".join(found)


@every_plugin
def test_plugin_pyproject(folder: Path) -> None:
    core, project = pyproject(CORE)["project"], pyproject(folder)["project"]
    package = import_name(folder)
    assert project["name"] == f"specplug-{folder.name}"
    assert project["requires-python"] == core["requires-python"]
    assert project["license"] == core["license"]
    assert project["readme"] == "README.md"
    assert (folder / "README.md").is_file()
    assert (folder / "src" / package / "py.typed").is_file()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), "each wheel carries the licence"

    groups = project["entry-points"]
    assert groups
    assert set(groups) <= set(GROUPS)
    for name, value in groups.get("specplug.algorithms", {}).items():
        assert name == specplug.fold(name)
        assert value.partition(".")[0] == package

    ranges = [r.specifier for r in map(Requirement, project["dependencies"]) if r.name == "specplug"]
    assert len(ranges) == 1, "one requirement on specplug"
    operators = {part.operator for part in ranges[0]}
    assert operators & {">=", ">", "~="}, f"no lower bound on specplug: {ranges[0]}"
    assert operators & {"<", "<=", "~="}, f"no upper bound on specplug: {ranges[0]}"
    assert not operators & {"==", "==="}, f"an exact pin on specplug: {ranges[0]}"
    assert ranges[0].contains(core["version"], prereleases=True)


IMPORT_A_STRANGER = """
import sys
sys.path.insert(0, sys.argv[1])
__import__(sys.argv[2])
assert not {"torch", "transformers"} & set(sys.modules), f"importing {sys.argv[2]} imports torch"
"""


@pytest.mark.parametrize("folder", STRANGERS, ids=lambda path: path.name)
def test_manifests_of_strangers_leave_torch_unimported(folder: Path) -> None:
    (module,) = pyproject(folder)["project"]["entry-points"]["specplug.algorithms"].values()
    command = [sys.executable, "-c", IMPORT_A_STRANGER, str(folder / "src"), module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- what is public is described ---------------------------------------------------------------------------------

PUBLIC = ("specplug", "specplug.layers", "specplug.testing", "specplug.testing.setup")
ANY_SHAPE = frozenset({"DraftContext.weights", "FusedLinear.part_tensors"})
"""They hand out stored tensors of whatever shape."""


def public_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yield (name, node) of every public class, method and function; a constructor is described by its class."""
    seen = set()
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if not (inspect.isclass(value) or inspect.isfunction(value)) or value in seen:
                continue
            seen.add(value)
            tree = ast.parse(Path(inspect.getsourcefile(value) or "").read_text(encoding="utf-8"))
            kinds = (ast.ClassDef, ast.FunctionDef)
            nodes = [node for node in tree.body if isinstance(node, kinds) and node.name == value.__name__]
            node = nodes[-1]  # those before it are overloads
            yield name, node
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                for part in [part for part in methods if not part.name.startswith("_")]:
                    # One that only overrides is described where it was introduced.
                    if ast.get_docstring(part) or not inspect.getdoc(getattr(value, part.name)):
                        yield f"{name}.{part.name}", part


def lacks_shape(node: ast.AST) -> bool:
    """Say whether a function takes or returns tensors and its docstring gives no shape, such as ``[R, V]``."""
    if not isinstance(node, ast.FunctionDef):
        return False
    annotations = [argument.annotation for argument in [*node.args.args, *node.args.kwonlyargs]]
    spelled = " ".join(ast.unparse(part) for part in [*annotations, node.returns] if part is not None)
    return re.search(r"\bTensor\b", spelled) is not None and "[" not in (ast.get_docstring(node) or "")


def lacks_error(node: ast.AST) -> bool:
    """Say whether a function raises by itself and its docstring says nothing of it."""
    if not isinstance(node, ast.FunctionDef):
        return False
    raised = [part.exc for part in ast.walk(node) if isinstance(part, ast.Raise) and part.exc is not None]
    own = [text for text in map(ast.unparse, raised) if not text.startswith(("NotImplementedError", "AssertionError"))]
    return bool(own) and re.search(r"[Rr]aise|Error|refuse", ast.get_docstring(node) or "") is None


@pytest.mark.parametrize(
    ("what", "lacks"),
    [
        ("docstring", lambda node: not ast.get_docstring(node)),
        ("shape", lacks_shape),
        ("error", lacks_error),
    ],
)
def test_public_docstrings_say_what_authors_need(what: str, lacks: Any) -> None:
    found = {name for name, node in public_functions() if lacks(node)}
    if what == "shape":
        assert found >= ANY_SHAPE, "a name that is exempt is gone"
        found -= ANY_SHAPE
    assert not found, f"without {what}: {sorted(found)}"


@pytest.mark.parametrize(
    ("code", "shape", "error"),
    [
        ("def f(x: Tensor) -> int: 'Return a number.'", True, False),
        ("def f(x: int) -> 'tuple[Tensor, int]': 'Return [R, V].'", False, False),
        ("def f(x: TensorInfo) -> int: 'Return a number.'", False, False),
        ("def f(*, x: Tensor | None = None): pass", True, False),
        ("def f(x):\n 'Return one.'\n raise ValueError", False, True),
        ("def f(x):\n 'Return one; ValueError for a two.'\n raise ValueError", False, False),
        ("def f(x):\n 'Return one.'\n raise", False, False),
    ],
)
def test_gaps_are_recognised(code: str, shape: bool, error: bool) -> None:
    [node] = ast.parse(code).body
    assert lacks_shape(node) is shape
    assert lacks_error(node) is error


def test_catalogue_agrees_with_installed_plugins() -> None:
    """The catalogue answers for packages that are not installed; where they are, it must say the same."""
    catalogue = json.loads(importlib.resources.files(specplug).joinpath("catalogue.json").read_text(encoding="utf-8"))
    declared: dict[str, dict[str, str | None]] = {}
    for record in registry().records:
        for spec in record.specs:
            for word in (spec.name, *spec.aliases):
                declared[specplug.fold(word)] = {"dist": record.distribution, "instead": None}
            for word, text in spec.instead.items():
                declared[specplug.fold(word)] = {"dist": record.distribution, "instead": text}
    ours = {pyproject(folder)["project"]["name"] for folder in PLUGINS}
    assert {word: entry for word, entry in declared.items() if entry["dist"] in ours} == {
        word: entry for word, entry in catalogue.items() if entry["dist"] in ours
    }
    assert all(word == specplug.fold(word) for word in catalogue)


# --- the workspace -----------------------------------------------------------------------------------------------


def requirement_lines(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def test_dev_requirements_list_every_package() -> None:
    listed = {
        line.removeprefix("-e ./").partition("[")[0] for line in requirement_lines("dev.txt") if line[:3] == "-e "
    }
    assert listed == {"core", *(f"plugins/{folder.name}" for folder in PLUGINS)}


def test_every_dependency_is_pinned() -> None:
    pins = [Requirement(line) for line in requirement_lines("constraints.txt")]
    assert all([part.operator for part in pin.specifier] == ["=="] for pin in pins)
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    for folder in (CORE, *PLUGINS):
        project = pyproject(folder)["project"]
        wanted = [*project["dependencies"], *itertools.chain(*project.get("optional-dependencies", {}).values())]
        for requirement in map(Requirement, wanted):
            name = canonicalize_name(requirement.name)
            if not name.startswith("specplug"):
                assert name in pinned, f"{folder.name} needs {name}, which constraints.txt does not pin"
                assert requirement.specifier.contains(pinned[name]), f"{folder.name}: {requirement} but {pinned[name]}"


ELSEWHERE = frozenset({"flashinfer", "triton", "gguf"})
"""Optional parts that no check of the kit needs: CUDA and GGUF files."""


def test_the_testing_extra_is_all_that_the_kit_needs() -> None:
    """The kit's checks and what they run of the optional parts of the core (grammars)."""
    project = pyproject(CORE)["project"]
    given = [*project["dependencies"], *project["optional-dependencies"]["testing"]]
    parts = [CORE / "src" / "specplug" / name for name in ("testing", "grammar", "runtime", "models")]
    needed = {module.partition(".")[0] for part in parts for path in python_files(part) for module, *_ in imports(path)}
    needed -= {*sys.stdlib_module_names, "specplug", *ELSEWHERE}
    assert {"llguidance", "pytest", "torch"} <= needed
    assert {canonicalize_name(name) for name in needed} <= {canonicalize_name(Requirement(line).name) for line in given}


def test_decisions_are_numbered_and_indexed() -> None:
    pages = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [page[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    index = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^- \[\d{4}\]\((.*?)\)", index, re.MULTILINE) == pages


def test_links_in_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in committed_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_nothing_ignored_is_tracked() -> None:
    committed_files()
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout == ""


# Written in pieces, so that this file does not contain what it forbids.
_FORBIDDEN = re.compile(
    "|".join(
        (
            r"(?<![\w.)}\]*-])/(?:work|root|home/\w+|tmp/w|opt/wheels|opt/" + r"pypi)/",
            r"\bpypi" + r"\.(?:org|python\.org)\b",
            r"\bfiles\.python" + r"hosted\.org\b",
            r"\bdownload\.py" + r"torch\.org\b",
            r"\bregistry\.npm" + r"js\.org\b",
            r"\bdeb\.deb" + r"ian\.org\b",
        )
    )
)


def test_no_machine_path_and_no_registry_host() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in committed_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        if (match := _FORBIDDEN.search(line))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["see /" + "work/main/x", "'/" + "root/.cache'", "https://py" + "pi.org/simple"])
def test_forbidden_text_is_recognised(text: str) -> None:
    assert _FORBIDDEN.search(text)
