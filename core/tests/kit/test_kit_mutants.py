"""Every check of the kit fails for a drafter, a manifest or a core that is wrong in the way it looks for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit_mutants import CUDA_MUTANTS, MUTANTS, ON_CUDA, Mutant, checks, opened, run_check, sound, values

from specplug.testing import checks_engine
from specplug.testing.bench import Bench
from specplug.testing.conformance import DrafterConformance, check_names

PAIRS = [pytest.param(mutant, check, id=f"{mutant.name}-{check}") for mutant in MUTANTS for check in mutant.must]
NOTICED = (AssertionError, RuntimeError, IndexError, pytest.fail.Exception)
SAYS = {
    "EqualSiblings": "equal siblings",
    "LyingQ-q_is_honest": "do not follow",
    "Asking": r"in Asking\.propose, line",
    "Reading": r"in Reading\.propose, line",
    "Picking": r"in Picking\.propose, line",
    "Copying": r"in Copying\.propose, line",
    "TakesByWidth": "num_draft_tokens 6: ",
    "a plan that needs more": "vocab",
    "a foreign option": "must start with one of",
    "an option without description": "has no description",
    "a hook with a default": "default",
    "a heavy manifest": r"imports \['torch'",
    "Scheduler.release keeps_failed": "pages are lost after a failure",
}
"""What is said, where a check could fail for something else."""


def run_fully(check: str, subject: DrafterConformance, bench: Bench) -> None:
    """Call a check; one that is skipped has noticed nothing, and shall not pass for it."""
    try:
        run_check(check, subject, bench)
    except pytest.skip.Exception as skipped:
        raise ValueError(f"{check} was not run: {skipped}") from skipped


@pytest.mark.parametrize(("mutant", "check"), PAIRS)
def test_a_fault_is_noticed(mutant: Mutant, check: str, tmp_path: Path) -> None:
    says = SAYS.get(mutant.name) or SAYS.get(f"{mutant.name}-{check}")
    with opened(mutant, tmp_path) as (subject, bench), pytest.raises(NOTICED, match=says):
        run_fully(check, subject, bench)


def sound_ones() -> Iterator[Any]:
    """Yield each check that a mutant must fail, with the drafter that the mutant was made from."""
    found = {(sound(mutant).name, check): sound(mutant) for mutant in MUTANTS for check in mutant.must}
    for (name, check), drafter in sorted(found.items(), key=lambda item: item[0]):
        yield pytest.param(drafter, check, id=f"{name}-{check}")


@pytest.mark.parametrize(("drafter", "check"), list(sound_ones()))
def test_what_is_sound_passes(drafter: Mutant, check: str, tmp_path: Path) -> None:
    with opened(drafter, tmp_path) as (subject, bench):
        run_fully(check, subject, bench)


def test_every_check_has_a_mutant() -> None:
    """A new check needs one in `MUTANTS`, or in `CUDA_MUTANTS` if it runs there alone."""
    assert {check for mutant in MUTANTS for check in mutant.must} == set(checks())
    there = {f"{name}:{value}" for name in ON_CUDA for value in values(name)}
    assert {check for mutant in CUDA_MUTANTS for check in mutant.must} == there
    assert {check.partition(":")[0] for check in checks()} | set(ON_CUDA) == set(check_names())


@pytest.mark.parametrize("check", ["greedy_equals_reference", "device_path_equals_reference", "nothing_waits"])
def test_a_tensor_on_the_cpu_shows_on_cuda_only(check: str, tmp_path: Path) -> None:
    [mutant] = [mutant for mutant in CUDA_MUTANTS if mutant.name == "OnTheHost"]
    with opened(mutant, tmp_path) as (subject, bench):
        run_fully(check, subject, bench)


def test_every_mutant_differs_and_says_what_is_wrong() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert all(mutant.fault.endswith(".") and "\n" not in mutant.fault for mutant in MUTANTS)
    known = {*names, *(param.id for param in PAIRS)}
    assert known >= SAYS.keys(), "a mutant is gone"


def test_a_missing_grammar_library_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that is skipped where something is missing would pass for one that holds."""
    monkeypatch.setattr(checks_engine, "find_spec", lambda name: None)
    [mutant] = [mutant for mutant in MUTANTS if "a_grammar_is_kept:coupled" in mutant.must]
    with (
        opened(sound(mutant), tmp_path) as (subject, bench),
        pytest.raises(
            pytest.fail.Exception, match=r"llguidance, which is not installed: pip install 'specplug\[testing\]'"
        ),
    ):
        run_check("a_grammar_is_kept:coupled", subject, bench)


def test_a_check_with_a_reason_must_fail_strictly() -> None:
    body = {"__test__": False, "algorithm": "mutant", "expected_failures": {"sampled_distribution": "a reason"}}
    cls: Any = type("Guarded", (DrafterConformance,), body)
    cls().test_no_check_is_missing()
    marks = cls.test_sampled_distribution.pytestmark
    assert {mark.name for mark in marks} == {"parametrize", "xfail"}
    (xfail,) = [mark for mark in marks if mark.name == "xfail"]
    assert xfail.kwargs == {"reason": "a reason", "strict": True}
    own = DrafterConformance.test_sampled_distribution.pytestmark  # type: ignore[attr-defined]
    assert [mark.name for mark in own] == ["parametrize"], "the kit's own check was marked too"
