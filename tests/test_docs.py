"""The documents say what is so: generated pages, links, commands and their output, the tutorial, CI."""

import functools
import importlib.util
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from specplug.cli import main
from specplug.testing.registry import write_distribution

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GENERATE = DOCS / "generate.py"
TUTORIAL = DOCS / "tutorial" / "publish-a-drafter.md"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("plugins/*/README.md")])
RUN = {"doctor", "estimate", "plugins"}
"""Commands that are cheap enough to be run as they are printed."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def generated() -> types.ModuleType:
    return load(GENERATE)


@functools.cache
def options() -> Mapping[str, set[str]]:
    """Every command -> the options that it has with this repository's packages."""
    found = {}
    for name, command in generated().commands().items():
        params = command.get_params(command.context_class(command))
        found[name] = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    return found


def test_generated_pages_are_up_to_date() -> None:
    pytest.importorskip("prometheus_client", reason="the page of metrics needs the extra `serve`")
    old = generated().outdated()
    assert not old, f"run python docs/generate.py: {', '.join(old)}"


def test_every_name_of_the_api_is_described() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    bare = [name for name, text in sections.items() if not re.sub(r"```.*?```", "", text, flags=re.S).strip()]
    assert "Drafter" in sections
    assert not bare, f"without a docstring: {bare}"


# --- links -----------------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """Return a page without its fenced code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Return the fragments of a page's headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles)


@every_page
def test_links_lead_to_headings(page: Path) -> None:
    broken = []
    for target, fragment in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(page)):
        if "://" not in target:
            aim = (page.parent / target).resolve() if target else page
            if not aim.is_file() or fragment not in anchors(aim):
                broken.append(f"{target}#{fragment}")
    assert not broken


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#\s]+)\)", index))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("adr/")} - {"README.md"} <= linked


# --- commands --------------------------------------------------------------------------------------------------------


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (language, lines) of the code of a page; ``indented`` for what is not fenced."""
    language, lines = "", []
    inside = False
    for line in [*page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines(), ""]:
        fence = line.startswith("```")
        if lines and (fence or (not inside and not line.startswith("    "))):
            yield language, lines
            lines = []
        if fence:
            inside, language = not inside, line.removeprefix("```")
        elif inside or line.startswith("    "):
            language = language if inside else "indented"
            lines = [*lines, line]


def commands(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (words behind ``specplug``, lines of output that follow) of each command line in the code of a page."""
    for language, block in blocks(page):
        found: list[tuple[list[str], list[str]]] = []
        for line in map(str.strip, block if language in ("", "console", "indented") else []):
            if re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*specplug [a-z]", line):
                words = shlex.split(line.removeprefix("$ "), comments=True)
                words = words[words.index("specplug") + 1 :]
                ends = [at for at, word in enumerate(words) if word in (">", "|", "&&")]
                found.append((words[: ends[0]] if ends else words, []))
            elif line.startswith("$ "):
                found.append(([], []))
            elif found:
                found[-1][1].append(line)
        yield from (each for each in found if each[0])


@every_page
def test_commands_have_the_options_that_are_written(page: Path) -> None:
    wrong = []
    for (command, *words), _ in commands(page):
        assert command in options(), f"there is no command {command!r}"
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        wrong += [f"specplug {command} {option}" for option in named - options()[command]]
    assert not wrong


CONSOLE = [
    pytest.param(words, output, id=" ".join(words))
    for page in PAGES
    if page != TUTORIAL
    for words, output in commands(page)
    if words[0] in RUN and any(output) and not {"MODEL", "[OPTIONS]"} & set(words)
]


def test_there_is_output_to_compare() -> None:
    assert len(CONSOLE) >= 10


@pytest.mark.parametrize(("words", "output"), CONSOLE)
def test_commands_print_what_is_written(
    words: list[str], output: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines may be left out of a document, and ``...`` stands for the rest of one."""
    code = main(words)
    printed = capsys.readouterr()
    actual = iter([*printed.out.splitlines(), *printed.err.splitlines()])
    for line in filter(None, output):
        begin, rest, _ = line.partition(" ...")
        assert any(each.strip().startswith(begin) if rest else each.strip() == line for each in actual), line
    assert code == (2 if printed.err.startswith("error:") else 0)


# --- the tutorial ----------------------------------------------------------------------------------------------------

KIT = "import sys, pytest; sys.path.insert(0, 'src'); sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
DOCTOR = (
    "import sys; sys.path.insert(0, 'src'); from specplug.cli import main; sys.exit(main(['doctor', 'bigram', 'demo']))"
)


@pytest.fixture
def bigram(tmp_path: Path) -> Path:
    """The tutorial's package: what ``specplug new`` writes, with the tutorial's files over it."""
    folder = tmp_path / "specplug-bigram"
    assert main(["new", "bigram", "--into", str(folder)]) == 0
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 2
    for path, code in blocks:
        assert (folder / path).is_file(), f"{path} is not in the template"
        (folder / path).write_text(code, encoding="utf-8")
    entry = {"bigram": "specplug_bigram.plugin"}
    write_distribution(folder / "src", "specplug-bigram", entry, requires=("specplug>=0.1,<0.2",))
    return folder


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_the_tutorial_ends_with_a_drafter_that_passes(bigram: Path) -> None:
    done = run(KIT, bigram)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed, \d skipped", done.stdout), done.stdout
    done = run(DOCTOR, bigram)
    assert done.returncode == 0, done.stderr
    assert "plan: 7 drafts of depth 7, chain" in done.stdout
    assert "--speculative-bigram-min-count = 1 (default)" in done.stdout


def test_the_tutorials_mistake_is_found_as_it_says(bigram: Path) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    [mistake] = re.findall(r"replace the last line by\n\n    (.+)\n", text)
    [check] = re.findall(r"`(test_\w+)` fails, and it alone", text)
    drafter = bigram / "src" / "specplug_bigram" / "drafter.py"
    good = "self.after[request.slot] = {}"
    assert drafter.read_text().count(good) == 1
    drafter.write_text(drafter.read_text().replace(good, mistake))
    done = run(KIT, bigram)
    assert re.findall(r"^FAILED .*::(\w+)", done.stdout, re.M) == [check], done.stdout


# --- CI --------------------------------------------------------------------------------------------------------------


def test_every_session_of_the_workflow_exists() -> None:
    sessions = set(re.findall(r"@nox\.session.*?\ndef (\w+)", (ROOT / "noxfile.py").read_text("utf-8"), re.S))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    matrix = jobs["nox"]["strategy"]["matrix"]
    used = {*matrix["session"], *(each["session"] for each in matrix["include"]), "plugin"}
    assert used == sessions, "a session that CI does not run, or the reverse"
    assert any("plugin(" in str(step) for step in jobs["plugin"]["steps"])


def test_the_workflow_to_paste_can_be_read() -> None:
    [block] = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "how-to" / "gate-ci.md").read_text("utf-8"), re.M | re.S)
    steps = yaml.safe_load(block)["jobs"]["swap"]["steps"]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    for line in lines:
        if line.startswith("specplug"):
            named = {word for word in shlex.split(line) if word.startswith("--")}
            assert named <= options()[line.split()[1]], line
    assert sum(" --gate " in line for line in lines) == 1
    assert all("--require" in line for line in lines if line.startswith("specplug doctor"))
