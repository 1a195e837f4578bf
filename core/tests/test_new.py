"""`specplug new`: the package that it writes installs, passes the kit, and is selected by its name."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specplug.cli import main
from specplug.registry import Registry
from specplug.testing.registry import write_distribution
from specplug.testing.stubs import on_path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "specplug-my-idea"
    assert main(["new", "My_Idea", "--into", str(folder)]) == 0
    return folder


def test_it_is_called_by_the_name_throughout(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == "specplug-my-idea"
    assert project["entry-points"] == {"specplug.algorithms": {"my-idea": "specplug_my_idea.plugin"}}
    written = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*") if path.is_file()}
    assert {".gitignore", ".github/workflows/test.yml", "README.md", "tests/test_conformance.py"} <= written.keys()
    assert not [path for path, text in written.items() if "lookback" in (path + text).lower()]
    assert "class TestMyIdea(DrafterConformance):" in written["tests/test_conformance.py"]
    assert "my_idea_words: int" in written["src/specplug_my_idea/config.py"]
    assert "--speculative-my-idea-words" in written["README.md"]


def test_the_test_is_five_lines(package: Path) -> None:
    lines = (package / "tests" / "test_conformance.py").read_text().splitlines()
    assert len([line for line in lines if line]) <= 5


def test_it_passes_the_kit_from_outside_the_tree(package: Path) -> None:
    """As pip would have installed it: its modules and metadata on the path."""
    entry = {"my-idea": "specplug_my_idea.plugin"}
    write_distribution(package / "src", "specplug-my-idea", entry, requires=("specplug>=0.1,<0.2",))
    code = "import sys, pytest; sys.path.insert(0, 'src'); sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    with on_path(package / "src"):
        registry = Registry.discover(path=[str(package / "src"), *sys.path])
        registry.load()
    assert [record.state for record in registry.records if record.distribution == "specplug-my-idea"] == ["loaded"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("3d", "is no name for an algorithm"),
        ("class", "is no name for an algorithm"),
        ("grüße", "is no name for an algorithm"),
        ("a/b", "is no name for an algorithm"),
        ("none", "is taken, by specplug itself"),
        ("NextN", "is taken, by specplug-mtp"),
    ],
)
def test_names_that_cannot_be_are_refused(name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", name]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_word_that_only_a_hint_is_kept_for_is_free(tmp_path: Path) -> None:
    """No package of ours owns it: whoever writes that algorithm may call it so."""
    assert main(["new", "medusa", "--into", str(tmp_path / "package")]) == 0


def test_nothing_is_written_over(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "README.md").write_text("mine")
    assert main(["new", "another", "--into", str(package)]) == 2
    assert "holds something already" in capsys.readouterr().err
    assert (package / "README.md").read_text() == "mine"
