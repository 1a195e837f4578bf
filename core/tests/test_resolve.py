"""From a word to an algorithm. The rival's name sorts before or after, so that order decides nothing."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from specplug.errors import RefusedError
from specplug.names import fold
from specplug.registry import Registry
from specplug.resolve import Known, Resolution, catalogue, resolve
from specplug.spec import Checkpoint, Facts
from specplug.testing.stubs import Stub, stub_registry

EAGLE = Stub("mid-eagle", algorithms=["eagle", "eagle3"], aliases={"eagle3": ["eagle-3"]})
MTP = Stub(
    "mid-mtp",
    "1.1",
    algorithms=["builtin-mtp", "frozen-kv-mtp"],
    aliases={"builtin-mtp": ["nextn"]},
    instead={"MTP": "nextn or builtin-mtp"},
    claims_if={"gemma": {"nextn": "frozen-kv-mtp", "eagle": "frozen-kv-mtp"}, "no_mtp": {"nextn": "eagle"}},
    refuses={"eagle3": "the draft is an assistant"},
)
NGRAM = Stub("mid-ngram", algorithms=["ngram"])


class Host:
    """Writes stubs and resolves words among them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.count = 0

    def registry(self, *stubs: Stub, **environ: str) -> Registry:
        self.count += 1
        return self.stack.enter_context(stub_registry(self.folder / str(self.count), *stubs, environ=environ))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(tmp_path, stack)


@pytest.fixture(params=["aaa-rival", "zzz-rival"])
def rival(request: pytest.FixtureRequest) -> str:
    """A distribution name that sorts before or after every other one."""
    return str(request.param)


def facts(*keys: str) -> Facts:
    """Facts whose target's config has these keys, and one that nobody asks for."""
    return Facts(target=Checkpoint(path="t", config=dict.fromkeys(("model_type", *keys), 1), tensors={}))


def refused(registry: Registry, word: str, about: Facts) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        resolve(registry, word, about)
    message = str(caught.value)
    assert message.startswith(f"--speculative-algorithm {word!r} ")
    assert "\n" not in message
    return caught.value


@pytest.mark.parametrize("word", ["none", "None", " NONE "])
def test_none_is_plain_decoding(host: Host, word: str) -> None:
    greedy = Stub("greedy", algorithms=["mine"], claims={"none": "mine"})
    found = resolve(host.registry(greedy), word, facts())
    assert (found.word, found.algorithm, found.installed) == (word, "none", None)


@pytest.mark.parametrize("word", ["frozen-kv-mtp", "FROZEN_KV_MTP", " Frozen.KV.mtp"])
def test_an_exact_name_in_any_spelling(host: Host, word: str) -> None:
    found = resolve(host.registry(MTP, NGRAM), word, facts())
    assert (found.word, found.algorithm) == (word, "frozen-kv-mtp")
    assert found.installed is not None
    assert (found.installed.distribution, found.installed.version) == ("mid-mtp", "1.1")
    assert found.trace[-1] == "'frozen-kv-mtp' is an algorithm of mid-mtp 1.1"


def test_an_alias_is_another_spelling(host: Host) -> None:
    found = resolve(host.registry(EAGLE), "EAGLE-3", facts())
    assert found.algorithm == "eagle3"
    assert found.trace == (
        "'EAGLE-3' is read as 'eagle-3'",
        "'eagle-3' -> 'eagle3': an alias, declared by mid-eagle 1.0",
        "'eagle3' is an algorithm of mid-eagle 1.0",
    )


@pytest.mark.parametrize(
    ("word", "about", "algorithm"),
    [
        ("NEXTN", (), "builtin-mtp"),
        ("NEXTN", ("no_mtp",), "eagle"),
        ("NEXTN", ("gemma",), "frozen-kv-mtp"),
        ("EAGLE", (), "eagle"),
        ("EAGLE", ("no_mtp",), "eagle"),
        ("EAGLE", ("gemma",), "frozen-kv-mtp"),
    ],
)
def test_claims_follow_the_facts(host: Host, word: str, about: tuple[str, ...], algorithm: str) -> None:
    assert resolve(host.registry(EAGLE, MTP), word, facts(*about)).algorithm == algorithm


def test_every_hop_says_who(host: Host) -> None:
    other = Stub("other", algorithms=["o"], claims_if={"no_mtp": {"eagle": "ngram"}})
    found = resolve(host.registry(EAGLE, MTP, NGRAM, other), "nextn", facts("no_mtp"))
    assert found.algorithm == "ngram"
    assert found.trace == (
        "'nextn' -> 'eagle': mid-mtp 1.1 says 'eagle' (the target has no_mtp)",
        "'eagle' -> 'ngram': other 1.0 says 'ngram' (the target has no_mtp)",
        "'ngram' is an algorithm of mid-ngram 1.0",
    )


def test_everybody_is_asked_for_what_an_alias_stands_for(host: Host) -> None:
    error = refused(host.registry(EAGLE, MTP), "EAGLE-3", facts())
    assert "mid-mtp 1.1 refuses it: the draft is an assistant" in str(error)
    assert error.trace[1].startswith("'eagle-3' -> 'eagle3'")


def test_an_owner_may_redirect_whatever_the_facts(host: Host) -> None:
    renamed = Stub("renamed", algorithms=["old", "new"], claims={"old": "new"})
    assert resolve(host.registry(renamed), "old", Facts.empty()).algorithm == "new"


def test_a_claim_of_a_stranger_must_be_made_on_facts(host: Host, rival: str) -> None:
    registry = host.registry(EAGLE, Stub(rival, "2.0", algorithms=["mine"], claims={"eagle": "mine"}))
    for about in (facts(), Facts.empty()):
        found = resolve(registry, "eagle", about)
        assert found.algorithm == "eagle"
        assert found.trace[0].startswith(f"not followed: {rival} 2.0 says 'mine' (because it says so) about 'eagle'")
    assert "mine" in registry.algorithms


def test_the_same_for_a_refusal_of_a_stranger(host: Host, rival: str) -> None:
    source = "@hookimpl\ndef specplug_resolve_name(name):\n    return Refusal(reason='no', try_instead='go away')\n"
    registry = host.registry(EAGLE, Stub(rival, policies=["p"], policy_source=source))
    found = resolve(registry, "eagle", facts())
    assert found.algorithm == "eagle"
    assert "refuses it: no (try go away)" in found.trace[0]


def test_a_word_nobody_owns_can_be_claimed_on_facts_only(host: Host) -> None:
    on_facts = Stub("a", algorithms=["mine"], claims_if={"gemma": {"best": "mine"}})
    assert resolve(host.registry(on_facts), "best", facts("gemma")).algorithm == "mine"
    blind = Stub("b", algorithms=["mine"], claims={"best": "mine"})
    error = refused(host.registry(blind), "best", facts())
    assert "is unknown" in str(error)
    assert "b 1.0 says 'mine'" in str(error)


def test_a_claim_on_the_word_itself_is_no_hop(host: Host) -> None:
    registry = host.registry(Stub("x", algorithms=["x"], claims={"x": "X"}))
    assert resolve(registry, "x", facts()).trace == ("'x' is an algorithm of x 1.0",)


def test_two_different_answers_name_both_sides(host: Host, rival: str) -> None:
    other = Stub(rival, "3.0", algorithms=["o"], claims_if={"gemma": {"nextn": "o"}})
    error = refused(host.registry(EAGLE, MTP, other), "NEXTN", facts("gemma"))
    assert "two meanings" in str(error)
    assert "mid-mtp 1.1 says 'frozen-kv-mtp' (the target has gemma)" in str(error)
    assert f"{rival} 3.0 says 'o' (the target has gemma)" in str(error)


def test_two_equal_answers_are_one(host: Host, rival: str) -> None:
    other = Stub(rival, algorithms=["o"], claims_if={"gemma": {"nextn": "Frozen_KV_MTP"}})
    found = resolve(host.registry(EAGLE, MTP, other), "NEXTN", facts("gemma"))
    assert found.algorithm == "frozen-kv-mtp"
    assert rival in found.trace[1]
    assert "mid-mtp" in found.trace[1]


def test_a_loop_is_an_error(host: Host) -> None:
    a = Stub("a", algorithms=["x"], claims={"x": "y"})
    b = Stub("b", algorithms=["y"], claims={"y": "x"})
    for word, chain in (("x", "'x' -> 'y' -> 'x'"), ("y", "'y' -> 'x' -> 'y'")):
        error = refused(host.registry(a, b), word, facts())
        assert f"goes in a loop, {chain}" in str(error)
        assert "a 1.0 says 'y'" in str(error)
        assert "b 1.0 says 'x'" in str(error)
        assert len(error.trace) == 2


def test_a_loop_through_an_alias(host: Host) -> None:
    registry = host.registry(Stub("a", algorithms=["x"], aliases={"x": ["w"]}, claims={"x": "w"}))
    assert "goes in a loop, 'w' -> 'x' -> 'w'" in str(refused(registry, "w", facts()))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("eagle", "'eagle' is not installed: pip install specplug-eagle"),
        ("nonsense", "'nonsense' is unknown"),
        ("mtp", "'mtp' is no value: write nextn"),
        ("none", "falling back to plain decoding is yours to decide"),
    ],
)
def test_a_claim_on_what_is_not_installed(host: Host, target: str, why: str) -> None:
    registry = host.registry(Stub("a", algorithms=["x"], claims={"x": target}))
    error = refused(registry, "x", facts())
    assert f"means {target!r} according to a 1.0" in str(error)
    assert why in str(error)
    assert error.trace == (f"'x' -> {target!r}: a 1.0 says {target!r} (because it says so)",)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"fault": "system-exit"}, "mid-bad 1.0 is broken: SystemExit: 3"),
        ({"fault": "newer-major"}, "mid-bad 1.0 is incompatible: needs plugin API 2.0"),
        ({"requires": ["absent>=2"]}, "mid-bad 1.0 is unusable: needs absent>=2"),
    ],
)
def test_selecting_what_cannot_be_used_says_why(host: Host, bad: dict[str, object], why: str) -> None:
    stub = replace(Stub("mid-bad", algorithms=["bad"]), **bad)  # type: ignore[arg-type]
    registry = host.registry(NGRAM, stub, Stub("z", algorithms=["z"], claims={"z": "bad"}))
    for word in ("bad", "z"):
        message = str(refused(registry, word, facts()))
        assert why in message
        assert "installed: ngram, z; or 'none'" in message


def test_an_unusable_algorithm_can_still_redirect(host: Host) -> None:
    old = Stub("old", algorithms=["old"], requires=["absent"], claims={"old": "ngram"})
    assert resolve(host.registry(NGRAM, old), "old", facts()).algorithm == "ngram"


@pytest.mark.parametrize("word", ["EAGLE", "eagle", "Eagle "])
def test_a_clash_is_refused_until_one_owner_is_left(host: Host, rival: str, word: str) -> None:
    stubs = (EAGLE, Stub(rival, algorithms=["Eagle"]))
    message = str(refused(host.registry(*stubs), word, facts()))
    assert "mid-eagle 1.0" in message
    assert f"{rival} 1.0" in message
    left = resolve(host.registry(*stubs, SPECPLUG_PLUGINS=rival), word, facts())
    assert left.installed is not None
    assert left.installed.distribution == rival


def test_a_claim_cannot_lead_into_a_clash(host: Host, rival: str) -> None:
    registry = host.registry(EAGLE, MTP, Stub(rival, algorithms=["eagle"]))
    error = refused(registry, "nextn", facts("no_mtp"))
    assert "'eagle' is claimed by" in str(error)
    assert len(error.trace) == 1


def test_what_is_no_value_says_what_to_write(host: Host) -> None:
    message = str(refused(host.registry(MTP), "MTP", facts()))
    assert "is no value: write nextn or builtin-mtp (says mid-mtp 1.1)" in message
    for word in ("MTP", "STANDALONE_NGRAM", "medusa"):
        message = str(refused(host.registry(), word, Facts.empty()))
        assert f"is no value: write {catalogue()[fold(word)].instead}" in message


def test_a_real_name_wins_over_somebody_elses_no_value(host: Host) -> None:
    assert resolve(host.registry(MTP, Stub("x", algorithms=["mtp"])), "MTP", facts()).algorithm == "mtp"


def test_a_known_word_says_what_to_install(host: Host) -> None:
    message = str(refused(host.registry(NGRAM), "EAGLE3", facts()))
    assert "is not installed: pip install specplug-eagle; installed: ngram; or 'none'" in message


@pytest.mark.parametrize(
    ("stub", "why"),
    [
        (Stub("specplug-far", "0.1", algorithms=["near"]), "specplug-far 0.1 does not offer it"),
        (Stub("specplug-far", algorithms=["near"], fault="system-exit"), "specplug-far 1.0 is broken"),
    ],
)
def test_a_known_package_that_lacks_the_word(host: Host, stub: Stub, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {**catalogue(), "far": Known("specplug-far", None)}
    monkeypatch.setattr("specplug.resolve.catalogue", lambda: known)
    message = str(refused(host.registry(stub), "far", facts()))
    assert f"should come from specplug-far, but {why}" in message


def test_a_word_left_out_by_the_allow_list(host: Host) -> None:
    message = str(refused(host.registry(EAGLE, NGRAM, SPECPLUG_PLUGINS="mid-ngram"), "eagle", facts()))
    assert "mid-eagle 1.0 offers it, but SPECPLUG_PLUGINS leaves it out" in message


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("ngrm", "did you mean 'ngram'"),
        ("nome", "did you mean 'none'"),
        ("egle3", "'eagle3', from pip install specplug-eagle?)"),
    ],
)
def test_a_misspelt_word_gets_the_nearest(host: Host, word: str, near: str) -> None:
    message = str(refused(host.registry(NGRAM), word, facts()))
    assert "is unknown" in message
    assert near in message
    assert "installed: ngram; or 'none'" in message


def test_a_strange_word_gets_the_list_only(host: Host) -> None:
    message = str(refused(host.registry(), "qqqqqqq", facts()))
    assert message == "--speculative-algorithm 'qqqqqqq' is unknown; installed: no algorithm; or 'none'"
    assert "is empty" in str(refused(host.registry(), " ", facts()))


@pytest.mark.parametrize("fault", ["resolve-raises", "resolve-exits", "resolve-wrong-type"])
def test_a_raising_hook_stops_its_own_algorithm_only(host: Host, rival: str, fault: str) -> None:
    registry = host.registry(NGRAM, Stub(rival, algorithms=["bad"], fault=fault))
    assert resolve(registry, "ngram", facts()).algorithm == "ngram"
    assert f"{rival} 1.0 is broken: specplug_resolve_name failed" in str(refused(registry, "bad", facts()))
    fresh = host.registry(NGRAM, Stub(rival, algorithms=["bad"], fault=fault, package="fresh"))
    assert f"{rival} 1.0: specplug_resolve_name failed" in str(refused(fresh, "bad", facts()))


def test_a_raising_policy_stops_the_start(host: Host) -> None:
    source = "@hookimpl\ndef specplug_resolve_name(name):\n    raise SystemExit\n"
    registry = host.registry(NGRAM, Stub("site-policy", policies=["p"], policy_source=source))
    assert "site-policy 1.0: specplug_resolve_name failed: SystemExit" in str(refused(registry, "ngram", facts()))


def test_a_policy_may_claim_on_facts(host: Host) -> None:
    source = (
        "@hookimpl\ndef specplug_resolve_name(name, facts):\n"
        "    if name == 'eagle' and facts.target.path:\n        return Claim(to='ngram', because='site rule')\n"
    )
    registry = host.registry(EAGLE, NGRAM, Stub("site-policy", policies=["p"], policy_source=source))
    assert resolve(registry, "eagle", facts()).algorithm == "ngram"


def test_a_stranger_that_fails_on_empty_facts_is_not_followed(host: Host, rival: str) -> None:
    extra = (
        "@hookimpl\ndef specplug_resolve_name(name, facts):\n"
        "    if name == 'eagle' and facts.target.config['model_type']:\n"
        "        return Claim(to='mine', because='of the type')\n"
    )
    registry = host.registry(EAGLE, Stub(rival, algorithms=["mine"], extra=extra))
    assert resolve(registry, "eagle", facts()).algorithm == "eagle"
    assert "KeyError" in str(registry.unusable_because("mine"))


def test_an_algorithm_that_fails_on_the_way_is_not_arrived_at(host: Host) -> None:
    raising = "@hookimpl\ndef specplug_resolve_name(name, facts):\n    raise KeyError(name)\n"
    bad = Stub("aaa-bad", algorithms=["bad"], extra=raising)
    error = refused(host.registry(bad, Stub("z", algorithms=["z"], claims={"z": "bad"})), "z", facts())
    assert "aaa-bad 1.0 is broken: specplug_resolve_name failed: KeyError: 'z'" in str(error)


def test_the_catalogue_is_folded_and_complete() -> None:
    known = catalogue()
    assert all(word == fold(word) for word in known)
    assert all(entry.dist or entry.instead for entry in known.values())
    for word in ("eagle", "eagle3", "ngram", "builtin-mtp", "frozen-kv-mtp", "nextn", "dflash", "dspark", "standalone"):
        assert known[word].instead is None
    for word in ("mtp", "standalone-ngram"):
        assert known[word].instead


def test_the_catalogue_agrees_with_the_installed_plugins() -> None:
    known = catalogue()
    ours = {entry.dist for entry in known.values()}
    for name, installed in Registry.discover(environ={}).algorithms.items():
        if installed.distribution not in ours:
            continue
        for word in (name, *map(fold, installed.spec.aliases)):
            assert (known[word].dist, known[word].instead) == (installed.distribution, None), word
        for word, text in installed.spec.instead.items():
            assert (known[fold(word)].dist, known[fold(word)].instead) == (installed.distribution, text), word


def test_the_answer_is_frozen(host: Host) -> None:
    found = resolve(host.registry(NGRAM), "ngram", facts())
    assert isinstance(found, Resolution)
    with pytest.raises(AttributeError):
        found.algorithm = "other"  # type: ignore[misc]
