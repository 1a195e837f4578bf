"""`SPECPLUG_PLUGINS`, `SPECPLUG_REQUIRED_PLUGINS` and `--require`."""

import sys
from pathlib import Path

import pytest

from specplug.errors import UserError
from specplug.registry import Registry
from specplug.testing.stubs import Stub, stub_registry

GOOD = Stub("mid-good", algorithms=["good"])


def test_the_allow_list_holds_for_both_groups(tmp_path: Path) -> None:
    stubs = [GOOD, Stub("other", algorithms=["other"], policies=["p"])]
    with stub_registry(tmp_path, *stubs, environ={"SPECPLUG_PLUGINS": " Mid_Good ,"}) as registry:
        assert [r.word for r in registry.records] == ["good"]
        assert list(registry.algorithms) == ["good"]
        assert registry.unusable_because("OTHER") == "other 1.0 offers it, but SPECPLUG_PLUGINS leaves it out"
        assert registry.about("other") == "SPECPLUG_PLUGINS leaves other 1.0 out"
        assert "other" not in sys.modules


def test_a_blank_allow_list_allows_nothing(tmp_path: Path) -> None:
    with stub_registry(tmp_path, GOOD, environ={"SPECPLUG_PLUGINS": ""}) as registry:
        assert not registry.records
        assert "SPECPLUG_PLUGINS" in str(registry.unusable_because("good"))


@pytest.mark.parametrize(("listed", "what"), [("mid-goood", "is not installed"), ("plain", "offers no plugin")])
def test_listing_what_is_not_there_is_an_error(tmp_path: Path, listed: str, what: str) -> None:
    with (
        pytest.raises(UserError, match=rf"SPECPLUG_PLUGINS.*'{listed}' {what}; installed plugins: mid-good$"),
        stub_registry(tmp_path, GOOD, Stub("plain"), environ={"SPECPLUG_PLUGINS": f"mid-good,{listed}"}),
    ):
        pass


@pytest.mark.parametrize(
    ("requirement", "why"),
    [
        ("mid-good>=1.2", "found 1.0"),
        ("absent", "not installed: pip install 'absent'"),
        ("plain", "offers no plugin"),
        ("bad>=1", "bad 1.0 is broken: SystemExit: 3"),
        ("mid good", "not a requirement"),
        ("specplug>=99", r"needs specplug>=99, found .*: pip install 'specplug>=99'"),
        ("mid-good[fast]>=1", r"what the extra \[fast\] brings is not checked; leave \[fast\] out"),
    ],
)
def test_require(tmp_path: Path, requirement: str, why: str) -> None:
    stubs = [GOOD, Stub("plain"), Stub("bad", algorithms=["bad"], fault="system-exit")]
    with stub_registry(tmp_path, *stubs) as registry:
        registry.require(["Mid_Good>=1,<2", "mid-good", "specplug>=0.1", "SpecPlug"])
        with pytest.raises(UserError, match=why) as caught:
            registry.require(["mid-good", requirement])
        assert str(caught.value).startswith(f"--require {requirement!r}: ")
        assert "\n" not in str(caught.value)


def test_required_plugins_of_the_environment(tmp_path: Path) -> None:
    ok = {"SPECPLUG_REQUIRED_PLUGINS": "mid-good>=1,<2, other\nmid-good"}
    path = [str(tmp_path)]
    with stub_registry(tmp_path, GOOD, Stub("other", algorithms=["other"]), environ=ok):
        for value in ("mid-good>=1,<2 other>=3", "other>=3,mid-good"):
            with pytest.raises(UserError, match=r"^SPECPLUG_REQUIRED_PLUGINS 'other>=3': needs other>=3, found 1.0"):
                Registry.discover(path=path, environ={"SPECPLUG_REQUIRED_PLUGINS": value})
        environ = {"SPECPLUG_REQUIRED_PLUGINS": "other", "SPECPLUG_PLUGINS": "mid-good"}
        with pytest.raises(UserError, match="left out by SPECPLUG_PLUGINS"):
            Registry.discover(path=path, environ=environ)
