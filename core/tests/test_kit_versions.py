"""A check that is newer than a plugin warns for one minor version, and then fails."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from specplug import API
from specplug.testing import since as module
from specplug.testing.conformance import DrafterConformance
from specplug.testing.since import NewCheckWarning, as_it_is, is_new, since


@pytest.mark.parametrize(
    ("check", "asked", "api", "warns"),
    [
        ((1, 1), (1, 0), (1, 1), True),
        ((1, 1), (1, 1), (1, 1), False),  # the plugin asked for it
        ((1, 1), (1, 0), (1, 2), False),  # one minor version is over
        ((1, 2), (1, 0), (1, 2), True),
        ((1, 2), (1, 1), (1, 3), False),
        ((2, 0), (1, 9), (2, 0), True),
        ((1, 0), (1, 0), (1, 0), False),
    ],
)
def test_for_whom_a_check_is_new(check: Any, asked: Any, api: Any, warns: bool) -> None:
    assert is_new(check, asked, api) is warns


class Subject:
    algorithm = "subject"

    @since(1, 1)
    @pytest.mark.parametrize("fails", [True, False])
    def test_new(self, bench: Any, fails: bool) -> None:
        """A new check."""
        assert not fails, "it is wrong"

    @since(1, 1)
    def test_skipping(self, bench: Any) -> None:
        pytest.skip("not for this one")

    @since(1, 1)
    def test_unraised(self, bench: Any) -> None:
        with pytest.raises(ValueError):
            pass


def bench(*api: int) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(api=api))


@pytest.fixture
def _api_1_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "API", (1, 1))


@pytest.mark.usefixtures("_api_1_1")
def test_an_older_plugin_is_warned_and_a_newer_one_fails() -> None:
    says = r"'subject' \(API 1.0\) fails 'new', which is new in API 1.1 and fails the suite from 1.2 on: it is wrong"
    with pytest.warns(NewCheckWarning, match=says):
        Subject().test_new(bench(1, 0), True)
    with pytest.raises(AssertionError, match="it is wrong"):
        Subject().test_new(bench(1, 1), True)
    with pytest.warns(NewCheckWarning, match="DID NOT RAISE"):
        Subject().test_unraised(bench(1, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Subject().test_new(bench(1, 0), fails=False)
        with pytest.raises(pytest.skip.Exception):
            Subject().test_skipping(bench(1, 0))


def test_after_one_minor_version_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "API", (1, 2))
    with pytest.raises(AssertionError, match="it is wrong"):
        Subject().test_new(bench(1, 0), True)


@pytest.mark.usefixtures("_api_1_1")
def test_an_expected_failure_is_held_to_its_reason_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would pass with a warning, which a strict xfail takes for a repair."""
    monkeypatch.setattr(DrafterConformance, "test_newest", Subject.test_new, raising=False)
    body = {"__test__": False, "algorithm": "subject", "expected_failures": {"newest": "a reason"}}
    cls: Any = type("Guarded", (DrafterConformance,), body)
    assert {mark.name for mark in cls.test_newest.pytestmark} == {"parametrize", "xfail"}
    with pytest.raises(AssertionError, match="it is wrong"):
        cls().test_newest(bench(1, 0), True)


def test_marks_and_description_survive() -> None:
    assert [mark.name for mark in Subject.test_new.pytestmark] == ["parametrize"]  # type: ignore[attr-defined]
    assert Subject.test_new.__doc__ == "A new check."
    assert as_it_is(Subject.test_new) is not Subject.test_new
    plain = DrafterConformance.test_drafts_something
    assert as_it_is(plain) is plain


def test_no_check_is_newer_than_the_api() -> None:
    """Nor marked any longer than its mark means something."""
    for name in dir(DrafterConformance):
        new_since = getattr(getattr(DrafterConformance, name), "new_since", None)
        assert new_since is None or new_since == API, f"{name} is marked since {new_since}, the API is {API}"
