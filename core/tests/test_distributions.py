"""The isolated walk over installed metadata."""

from pathlib import Path

import pytest

from specplug.distributions import installed, one_line, unmet
from specplug.registry import Record, Registry
from specplug.testing.stubs import Stub, on_path, stub_registry

GOOD = Stub("mid-good", algorithms=["good"])


def record(registry: Registry, word: str) -> Record:
    (found,) = (r for r in registry.records if r.word == word)
    return found


@pytest.mark.parametrize("rival", ["aaa-rival", "zzz-rival"])
@pytest.mark.parametrize("fault", ["no-metadata", "no-version", "malformed-entry-points"])
def test_an_unreadable_distribution_is_a_warning(tmp_path: Path, rival: str, fault: str) -> None:
    with stub_registry(tmp_path, GOOD, Stub(rival, algorithms=["bad"], fault=fault)) as registry:
        assert list(registry.algorithms) == ["good"]
        assert [r.word for r in registry.records] == ["good"]
        (warning,) = registry.warnings
        assert f"{rival.replace('-', '_')}-1.0.dist-info" in warning


def test_a_distribution_seen_twice_is_loaded_once(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    stub = Stub("twice", "2.0", algorithms=["twice"])
    stub.write(new)
    Stub("Twice", "1.0", algorithms=["twice", "gone"]).write(old)
    with on_path(new, old):
        registry = Registry.discover(path=[str(new), str(old), str(new)], environ={})
        (found,) = registry.records
        assert (found.version, found.location) == ("2.0", str(new))
        assert found.notes == (f"also found: 1.0 in {old}",)
        assert list(registry.algorithms) == ["twice"]
        assert registry.warnings == ()
        # The first on the path wins, also when it is the older one.
        found = record(Registry.discover(path=[str(old), str(new)], environ={}), "twice")
        assert (found.version, found.notes) == ("1.0", (f"also found: 2.0 in {new}",))


def test_of_two_versions_in_one_folder_the_newest_counts(tmp_path: Path) -> None:
    for version in ("1.9", "1.10", "1.2"):
        Stub("twice", version, algorithms=["twice"]).write(tmp_path)
    (found,) = Registry.discover(path=[str(tmp_path)], environ={}).records
    assert found.version == "1.10"
    assert len(found.notes) == 2


def test_a_leftover_of_pip_is_not_a_distribution(tmp_path: Path) -> None:
    Stub("mine", "2.0", algorithms=["mine"]).write(tmp_path).rename(tmp_path / "~ine-2.0.dist-info")
    Stub("mine", "1.0", algorithms=["mine"]).write(tmp_path)
    registry = Registry.discover(path=[str(tmp_path)], environ={})
    assert [(r.version, r.notes) for r in registry.records] == [("1.0", ())]
    assert "leftover" in registry.warnings[0]


def test_a_shadowed_distribution_that_offered_more_is_said(tmp_path: Path) -> None:
    Stub("mine", "2.0").write(tmp_path / "a")
    Stub("mine", "1.0", algorithms=["mine"]).write(tmp_path / "b")
    registry = Registry.discover(path=[str(tmp_path / "a"), str(tmp_path / "b")], environ={})
    assert registry.records == ()
    assert "mine 1.0" in registry.warnings[0]


def test_a_foreign_distribution_offers_nothing(tmp_path: Path) -> None:
    info = Stub("plain").write(tmp_path)
    (info / "entry_points.txt").write_text("[console_scripts]\nrun = plain:main\n", encoding="utf-8")
    found, warnings = installed([str(tmp_path)])
    assert found["plain"].entry_points == ()
    assert warnings == ()


def test_an_egg_info_folder_counts(tmp_path: Path) -> None:
    info = Stub("egg", algorithms=["egg"]).write(tmp_path)
    (info / "METADATA").rename(info / "PKG-INFO")
    info.rename(tmp_path / "egg.egg-info")
    assert installed([str(tmp_path)])[0]["egg"].version == "1.0"


def test_requirements_are_met_by_pre_releases_too(tmp_path: Path) -> None:
    Stub("early", "2.0rc1").write(tmp_path)
    Stub("odd", "not-a-version").write(tmp_path)
    found, _ = installed([str(tmp_path)])
    assert unmet("early>=1.5", found) is None
    assert unmet("early>=2.0", found) == "needs early>=2.0, found 2.0rc1: pip install 'early>=2.0'"
    assert unmet("odd>=1", found) == "needs odd>=1, found not-a-version: pip install 'odd>=1'"


def test_a_reason_is_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(SystemExit()) == "SystemExit"
    assert len(one_line(ValueError("x" * 1000))) == 300
