"""A stranger's package, the one the README prints, beside broken ones: found, selected by name, lossless."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specplug import Engine, RefusedError
from specplug.registry import Registry
from specplug.testing.registry import write_distribution
from specplug.testing.stubs import Stub, on_path
from specplug.testing.targets import table_target

README = Path(__file__).resolve().parent.parent / "README.md"
PROMPTS = [[1, 2, 3, 1, 2], [4, 4], [7, 0, 7]]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder as pip would leave it: the README's package, one that cannot be imported, one that exits."""
    text = README.read_text(encoding="utf-8")
    package = tmp_path / "specplug_echo"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("plugin", "drafter"):
        [code] = re.findall(rf"^```python\n# src/specplug_echo/{name}\.py\n(.*?)^```", text, re.M | re.S)
        (package / f"{name}.py").write_text(code)
    write_distribution(tmp_path, "specplug-echo", {"echo": "specplug_echo.plugin"}, requires=("specplug>=0.1,<0.2",))
    Stub("specplug-torn", algorithms=("torn",), fault="import-error").write(tmp_path)
    Stub("specplug-gone", algorithms=("gone",), fault="system-exit").write(tmp_path)
    return tmp_path


def test_it_is_written_against_public_names_and_short(site: Path) -> None:
    code = "".join((site / "specplug_echo" / f"{name}.py").read_text() for name in ("plugin", "drafter"))
    imported = re.findall(r"^(?:from|import) (\S+)", code, re.M)
    assert set(imported) == {"pydantic", "specplug"}
    drafter = (site / "specplug_echo" / "drafter.py").read_text().splitlines()
    assert len([line for line in drafter if line.strip()]) <= 45


def test_it_is_selected_by_name_and_changes_nothing(site: Path) -> None:
    target = table_target(vocab=8, order=1, seed=3)
    with on_path(site):
        registry = Registry.discover(path=[str(site), *sys.path], environ={})
        for sampling in ({"temperature": 0, "max_tokens": 40}, {"seed": 11, "max_tokens": 40}):
            with Engine(target) as plain:
                wanted = [result.ids for result in plain.generate(PROMPTS, sampling)]
            with Engine(target, algorithm="Echo", registry=registry) as engine:
                assert [result.ids for result in engine.generate(PROMPTS, sampling)] == wanted
                assert engine.ledger.accepted > 0
        states = {record.distribution: record.state for record in registry.records}
        assert (states["specplug-echo"], states["specplug-torn"], states["specplug-gone"]) == (
            *("loaded", "broken", "broken"),
        )
        with pytest.raises(RefusedError, match="specplug-torn"):
            Engine(target, algorithm="torn", registry=registry)


def test_the_command_lists_it_beside_the_broken_ones(site: Path) -> None:
    command = [sys.executable, "-m", "specplug", "plugins"]
    done = subprocess.run(command, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True)
    assert re.search(r"echo\b.*loaded", done.stdout)
    assert re.search(r"torn\b.*broken", done.stdout)
