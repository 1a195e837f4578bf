"""The removal calendar: who is warned when, and that code and calendar agree."""

import ast
import re
from pathlib import Path

import pytest

import specplug
from specplug import deprecated
from specplug.deprecated import CALENDAR, SWITCH, Deprecation, SpecplugDeprecationWarning, warn_deprecated

OLD = {"old": Deprecation("Drafter.old", "Drafter.new", since=(1, 3))}


def old(api: tuple[int, int]) -> str:
    warn_deprecated("old", calendar=OLD, api=api)
    return "works"


def test_the_dates_follow_from_the_first() -> None:
    assert OLD["old"].error_in == (2, 0)
    assert OLD["old"].removed_in == (2, 1)


@pytest.mark.parametrize("api", [(1, 3), (1, 9)])
def test_it_warns_whoever_called(api: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    says = "Drafter.old is deprecated since plugin API 1.3, an error from 2.0 on and gone in 2.1: use Drafter.new"
    with pytest.warns(SpecplugDeprecationWarning, match=f"^{re.escape(says)}$") as found:
        assert old(api) == "works"
    assert found[0].filename == __file__
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[found[0].lineno - 1]
    assert "assert old(api)" in line, "the line of the caller is what helps, not that of the deprecated code"


def test_in_the_next_major_version_it_is_an_error_that_can_be_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    with pytest.raises(SpecplugDeprecationWarning, match=f"{SWITCH}=warn"):
        old((2, 0))
    monkeypatch.setenv(SWITCH, " Warn ")
    with pytest.warns(SpecplugDeprecationWarning):
        assert old((2, 0)) == "works"


def test_nothing_is_overdue() -> None:
    overdue = [entry.what for entry in CALENDAR.values() if entry.removed_in <= specplug.API]
    assert not overdue, f"API {specplug.API} promised that these are gone; remove code and entry: {overdue}"
    early = [entry.what for entry in CALENDAR.values() if entry.since > specplug.API]
    assert not early, f"API is {specplug.API}, so these cannot be deprecated yet: {early}"


def test_code_and_calendar_agree() -> None:
    """Every key that code warns of is in the calendar, written out, and the reverse."""
    used = []
    for path in Path(specplug.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn_deprecated"):
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}: write the key out"
                used.append(node.args[0].value)
    assert set(used) == set(CALENDAR)
    assert deprecated.__doc__
