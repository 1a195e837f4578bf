"""Discovery, isolation and states. The rival's name sorts before or after, so that order decides nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from specplug.distributions import ALGORITHMS, POLICIES
from specplug.errors import UserError
from specplug.registry import Record, Registry
from specplug.spec import Facts
from specplug.testing.stubs import FAULTS, Stub, on_path, stub_registry

GOOD = Stub("mid-good", algorithms=["good"], aliases={"good": ["fine"]}, claims={"good": "good"})

STATES = {
    "import-error": ("broken", "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'"),
    "missing-module": ("broken", "ModuleNotFoundError"),
    "raises": ("broken", "RuntimeError: first line second line"),
    "system-exit": ("broken", "SystemExit: 3"),
    "half-registered": ("broken", "weather"),
    "default-parameter": ("broken", "specplug_resolve_name gives its parameter 'facts' a default"),
    "star-parameter": ("broken", "'**others'"),
    "hook-wrapper": ("broken", "specplug_resolve_name is a hook wrapper"),
    "unknown-hook": ("broken", "unknown hook specplug_algoritms: did you mean specplug_algorithms?"),
    "unmarked-hook": ("broken", "specplug_algorithms lacks @specplug.hookimpl"),
    "other-names": ("broken", "differ: 'bad' against 'other-bad'"),
    "not-a-spec": ("broken", "returned a dict, not an AlgorithmSpec"),
    "offer-raises": ("broken", "KeyError: 'offer'"),
    "attribute": ("broken", "must name a module, not 'bad_pkg.plugin:algorithm'"),
    "newer-major": ("incompatible", "needs plugin API 2.0, this specplug"),
    "newer-minor": ("incompatible", "needs plugin API 1.1, this specplug"),
    "older-major": ("incompatible", "needs plugin API 0.0, this specplug"),
    "newer-core": ("incompatible", "needs specplug>=99, found"),
}
UNREADABLE = {"no-metadata", "no-version", "malformed-entry-points"}
WHEN_ASKED = {"resolve-raises", "resolve-exits", "resolve-wrong-type"}


@pytest.fixture(params=["aaa-rival", "zzz-rival"])
def rival(request: pytest.FixtureRequest) -> str:
    """A distribution name that sorts before or after every other one."""
    return str(request.param)


def record(registry: Registry, word: str) -> Record:
    (found,) = (r for r in registry.records if r.word == word)
    return found


def ask(registry: Registry, word: str, selected: str | None = None) -> list[tuple[str, str]]:
    answers = registry.each("specplug_resolve_name", selected=selected, name=word, facts=Facts.empty())
    return [(answer.distribution, answer.value.to) for answer in answers]


def test_every_fault_has_a_test() -> None:
    assert set(FAULTS) == {*STATES, *UNREADABLE, *WHEN_ASKED, "imports-torch"}


def test_discovery_reads_metadata_only(tmp_path: Path) -> None:
    with stub_registry(tmp_path, GOOD) as registry:
        assert record(registry, "good").state == "available"
        assert "mid_good" not in sys.modules
        registry.load()
        found = record(registry, "good")
        assert (found.state, found.distribution, found.version) == ("loaded", "mid-good", "1.0")
        assert (found.group, found.location, found.reason) == (ALGORITHMS, str(tmp_path), "")
        installed = registry.algorithms["good"]
        assert (installed.spec.name, installed.distribution, installed.version) == ("good", "mid-good", "1.0")
        assert registry.warnings == ()


@pytest.mark.parametrize("fault", STATES)
def test_a_bad_plugin_never_stops_the_host(tmp_path: Path, rival: str, fault: str) -> None:
    bad = Stub(rival, "2.5", algorithms=["bad"], claims={"good": "bad"}, package="bad_pkg", fault=fault)
    with stub_registry(tmp_path, GOOD, bad) as registry:
        registry.load()
        state, reason = STATES[fault]
        found = record(registry, "bad")
        assert found.state == state
        assert reason in found.reason
        assert "\n" not in found.reason
        assert list(registry.algorithms) == ["good"]
        (warning,) = registry.warnings
        assert warning == f"{rival} 2.5 is {state}: {found.reason}"
        assert registry.unusable_because("BAD") == warning
        assert ask(registry, "good") == [("mid-good", "good")], "a plugin that is out of service was asked"


@pytest.mark.parametrize("fault", ["import-error", "raises", "system-exit", "offer-raises"])
def test_broken_keeps_the_traceback(tmp_path: Path, fault: str) -> None:
    with stub_registry(tmp_path, Stub("bad", algorithms=["bad"], fault=fault)) as registry:
        registry.load()
        assert str(tmp_path / "bad" / "plugin.py") in record(registry, "bad").traceback


@pytest.mark.parametrize(
    ("fault", "command"),
    [
        ("newer-major", "pip install --upgrade specplug"),
        ("newer-minor", "pip install --upgrade specplug"),
        ("older-major", "pip install --upgrade old-one"),
        ("newer-core", "pip install 'specplug>=99'"),
    ],
)
def test_an_api_mismatch_says_both_numbers_and_the_command(tmp_path: Path, fault: str, command: str) -> None:
    with stub_registry(tmp_path, Stub("old-one", algorithms=["bad"], fault=fault)) as registry:
        registry.load()
        reason = record(registry, "bad").reason
        assert command in reason
        if fault != "newer-core":
            assert "speaks 1.0" in reason
            assert reason.endswith(command)


def test_a_hook_that_fails_takes_its_plugin_out_of_service(tmp_path: Path, rival: str) -> None:
    for number, fault in enumerate(sorted(WHEN_ASKED)):
        site = tmp_path / str(number)
        with stub_registry(site, GOOD, Stub(rival, algorithms=["bad"], fault=fault)) as registry:
            assert "bad" in registry.algorithms
            assert ask(registry, "good", selected="good") == [("mid-good", "good")]
            assert record(registry, "bad").state == "broken"
            assert "specplug_resolve_name failed: " in record(registry, "bad").reason
            assert "bad" not in registry.algorithms
            assert ask(registry, "good") == [("mid-good", "good")]


@pytest.mark.parametrize("fault", sorted(WHEN_ASKED))
def test_a_failing_hook_of_the_selected_algorithm_is_an_error(tmp_path: Path, fault: str) -> None:
    with (
        stub_registry(tmp_path, GOOD, Stub("bad", "3.1", algorithms=["bad"], fault=fault)) as registry,
        pytest.raises(UserError, match=r"^bad 3\.1: specplug_resolve_name failed: (KeyError|SystemExit|TypeError)"),
    ):
        ask(registry, "bad", selected="bad")


def test_a_failing_policy_stops_the_start_by_name(tmp_path: Path) -> None:
    source = "@hookimpl\ndef specplug_resolve_name(name):\n    return 1 / 0\n"
    policy = Stub("site-policy", policies=["site"], policy_source=source)
    with stub_registry(tmp_path, GOOD, policy) as registry:
        for _ in range(2):  # and again, or the second try would go on without it
            with pytest.raises(UserError, match=r"^site-policy 1\.0: .*ZeroDivisionError"):
                ask(registry, "good", selected="good")


def test_answers_come_sorted_with_their_source(tmp_path: Path) -> None:
    policy = "@hookimpl\ndef specplug_resolve_name(name):\n    return Claim(to='p', because='site')\n"
    # pluggy would put this one elsewhere.
    first = "@hookimpl(tryfirst=True)\ndef specplug_resolve_name(name):\n    return Claim(to='a', because='')\n"
    stubs = [
        Stub("c", algorithms=["c"], claims={"x": "c"}),
        Stub("b", policies=["b"], policy_source=policy),
        Stub("a", algorithms=["a"], extra=first),
        Stub("d", algorithms=["d"]),
    ]
    with stub_registry(tmp_path, *stubs) as registry:
        answers = list(registry.each("specplug_resolve_name", name="x", facts=Facts.empty()))
        assert [(a.distribution, a.group, a.value.to) for a in answers] == [
            ("a", ALGORITHMS, "a"),
            ("b", POLICIES, "p"),
            ("c", ALGORITHMS, "c"),
        ]
        some = registry.each("specplug_resolve_name", distributions={"b", "d"}, name="x", facts=Facts.empty())
        assert [a.distribution for a in some] == ["b"]


def test_a_hook_is_called_with_exactly_its_parameters(tmp_path: Path) -> None:
    with stub_registry(tmp_path, GOOD) as registry, pytest.raises(TypeError, match="facts"):
        list(registry.each("specplug_resolve_name", name="x"))


@pytest.mark.parametrize("spelling", ["EAGLE", "eagle", "Eagle"])
@pytest.mark.parametrize("swapped", [False, True])
def test_two_owners_of_a_name_clash_in_every_order(tmp_path: Path, rival: str, spelling: str, swapped: bool) -> None:
    sites = [tmp_path / "a", tmp_path / "b"]
    Stub("mid-eagle", algorithms=["eagle", "eagle3"]).write(sites[0])
    Stub(rival, "2.0", algorithms=[spelling, "other"]).write(sites[1])
    path = [str(site) for site in (reversed(sites) if swapped else sites)]
    with on_path(*sites):
        registry = Registry.discover(path=path, environ={})
        assert {r.state for r in registry.records if r.word == "eagle"} == {"clash"}, "metadata alone shows it"
        registry.load()
        assert {r.state for r in registry.records if r.word == "eagle"} == {"clash"}
        assert list(registry.algorithms) == ["eagle3", "other"]
        why = registry.unusable_because(f" {spelling} ")
        assert why is not None
        assert "mid-eagle 1.0" in why
        assert f"{rival} 2.0" in why
        assert "SPECPLUG_PLUGINS" in why
        for keep in ("mid-eagle", rival):
            kept = Registry.discover(path=path, environ={"SPECPLUG_PLUGINS": keep})
            assert kept.algorithms["eagle"].distribution == keep
            assert kept.unusable_because("eagle") is None


@pytest.mark.parametrize("alias", ["NEXTN", "nextn ", "Ngram "])
def test_an_alias_clashes_like_a_name(tmp_path: Path, rival: str, alias: str) -> None:
    owner = Stub("mid-owner", algorithms=["ngram", "mtp"], aliases={"mtp": ["nextn"]})
    with stub_registry(tmp_path, owner, Stub(rival, algorithms=["mine"], aliases={"mine": [alias]})) as registry:
        word = alias.strip().lower()
        assert len(registry.owners(word)) == 2
        assert "mid-owner 1.0" in str(registry.unusable_because(word))
        assert rival in str(registry.unusable_because(word))
        assert "mine" in registry.algorithms, "only the word is in clash"
        assert ("ngram" in registry.algorithms) == (word != "ngram")
        (warning,) = registry.warnings
        assert repr(word) in warning


def test_one_distribution_can_clash_with_itself(tmp_path: Path) -> None:
    with stub_registry(tmp_path, Stub("x", algorithms=["a", "b"], aliases={"a": ["w"], "b": ["w"]})) as registry:
        assert list(registry.algorithms) == ["a", "b"]
        assert "algorithm 'a'" in str(registry.unusable_because("w"))


def test_one_module_serves_several_entry_points_and_is_asked_once(tmp_path: Path) -> None:
    stub = Stub("pair", algorithms=["One", "two"], claims={"x": "two"})
    with stub_registry(tmp_path, stub) as registry:
        registry.load()
        assert {name: found.spec.name for name, found in registry.algorithms.items()} == {"one": "one", "two": "two"}
        assert record(registry, "one").entry_point == "One"
        assert ask(registry, "x") == [("pair", "two")]


def test_an_algorithm_without_an_entry_point_is_broken(tmp_path: Path) -> None:
    info = Stub("pair", algorithms=["one", "two"]).write(tmp_path)
    (info / "entry_points.txt").write_text(f"[{ALGORITHMS}]\none = pair.plugin\n", encoding="utf-8")
    with on_path(tmp_path):
        registry = Registry.discover(path=[str(tmp_path)], environ={})
        assert not registry.algorithms
        assert "differ: 'one' against 'one', 'two'" in record(registry, "one").reason


def test_a_failed_plugin_is_not_asked_for_its_second_implementation(tmp_path: Path) -> None:
    raising = "@hookimpl(specname='specplug_resolve_name')\ndef a_first(name):\n    raise KeyError(name)\n"
    with stub_registry(tmp_path, Stub("x", algorithms=["x"], claims={"w": "x"}, extra=raising)) as registry:
        assert ask(registry, "w") == []


def test_loading_twice_imports_once(tmp_path: Path) -> None:
    counting = "import builtins\nbuiltins.specplug_test_loads = getattr(builtins, 'specplug_test_loads', 0) + 1\n"
    try:
        with stub_registry(tmp_path, Stub("x", algorithms=["x"], extra=counting)) as registry:
            registry.load()
            registry.load()
            assert registry.algorithms
            assert __import__("builtins").specplug_test_loads == 1
    finally:
        vars(__import__("builtins")).pop("specplug_test_loads", None)


def test_two_distributions_with_one_module_are_both_named(tmp_path: Path) -> None:
    first = Stub("a", algorithms=["a"], package="shared")
    with stub_registry(tmp_path, first, Stub("b", algorithms=["b"], package="shared")) as registry:
        registry.load()
        assert record(registry, "a").state == "broken"
        assert record(registry, "b").state == "broken"
        assert "shared.plugin is also an entry point of b" in record(registry, "a").reason
        assert "shared.plugin is also an entry point of a" in record(registry, "b").reason


def test_one_module_in_both_groups_is_refused(tmp_path: Path) -> None:
    info = Stub("x", algorithms=["x"]).write(tmp_path)
    with (info / "entry_points.txt").open("a", encoding="utf-8") as file:
        file.write("site = x.plugin\n")
    with on_path(tmp_path):
        registry = Registry.discover(path=[str(tmp_path)], environ={})
        registry.load()
        assert {(r.group, r.state) for r in registry.records} == {(ALGORITHMS, "broken"), (POLICIES, "broken")}
        assert "both groups" in registry.records[0].reason


def test_one_name_for_two_modules_is_refused(tmp_path: Path) -> None:
    info = Stub("x", algorithms=["x"]).write(tmp_path)
    (info / "entry_points.txt").write_text(f"[{ALGORITHMS}]\nx = x.plugin\nX = x.drafter\n", encoding="utf-8")
    with on_path(tmp_path):
        registry = Registry.discover(path=[str(tmp_path)], environ={})
        assert not registry.algorithms
        assert "'x' two different modules" in record(registry, "x").reason


@pytest.mark.parametrize(
    "stub",
    [
        Stub("x", algorithms=["NONE"]),
        Stub("x", algorithms=["x"], aliases={"x": ["None "]}),
        Stub("x", algorithms=["x"], aliases={"x": [" "]}),
        Stub("x", algorithms=["x"], instead={"none": "y"}),
    ],
)
def test_the_word_none_and_blank_are_reserved(tmp_path: Path, stub: Stub) -> None:
    with stub_registry(tmp_path, stub) as registry:
        assert not registry.algorithms
        assert "is reserved" in registry.records[0].reason
        assert registry.owners("none") == ()


def test_a_word_cannot_be_a_name_and_no_value(tmp_path: Path) -> None:
    with stub_registry(tmp_path, Stub("x", algorithms=["x"], instead={"X": "y"})) as registry:
        assert not registry.algorithms


def test_a_policy_offers_no_algorithms(tmp_path: Path) -> None:
    source = "from x.plugin import specplug_algorithms\n"
    with stub_registry(tmp_path, Stub("x", algorithms=["x"], policies=["p"], policy_source=source)) as registry:
        assert list(registry.algorithms) == ["x"]
        assert record(registry, "p").state == "broken"
        assert "a policy offers no algorithms" in record(registry, "p").reason


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("specplug-absent>=0.5", "needs specplug-absent>=0.5, which is not installed: pip install"),
        ("mid-good>=1.5", "needs mid-good>=1.5, found 1.0"),
        ("numpy>=9000", "needs numpy>=9000, found"),
    ],
)
def test_an_unmet_requirement_makes_unusable(tmp_path: Path, rival: str, requirement: str, reason: str) -> None:
    with stub_registry(tmp_path, GOOD, Stub(rival, algorithms=["needy"], requires=[requirement])) as registry:
        assert list(registry.algorithms) == ["good"]
        assert record(registry, "needy").state == "unusable"
        assert reason in record(registry, "needy").reason
        assert f"{rival} 1.0 is unusable: needs" in str(registry.unusable_because("needy"))


def test_a_met_requirement_is_checked_without_importing(tmp_path: Path) -> None:
    needs = ["mid-good<2,>=1", "numpy", "specplug-absent; python_version < '3'"]
    with stub_registry(tmp_path, Stub("mid-good"), Stub("x", algorithms=["x"], requires=needs)) as registry:
        assert list(registry.algorithms) == ["x"]
        assert "mid_good" not in sys.modules


def test_a_requirement_that_is_none_is_broken(tmp_path: Path) -> None:
    with stub_registry(tmp_path, Stub("x", algorithms=["x"], requires=["no requirement!"])) as registry:
        registry.load()
        assert record(registry, "x").state == "broken"


def test_a_manifest_that_imports_torch_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch.py").write_text("", encoding="utf-8")
    with stub_registry(tmp_path, GOOD, Stub("heavy", algorithms=["heavy"], fault="imports-torch")) as registry:
        assert list(registry.algorithms) == ["good", "heavy"]
        assert registry.warnings == ("heavy 1.0: importing heavy.plugin imports torch; a manifest must not",)


def test_discovery_and_loading_leave_torch_unimported() -> None:
    code = (
        "import sys, specplug.resolve, specplug.testing.stubs\n"
        "from specplug.registry import Registry\n"
        "Registry.discover(environ={}).load()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
