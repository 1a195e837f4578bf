"""Every mutant: what is wrong with it, the checks of the kit that must notice it, and a bench to run them on.

A mutant is a drafter, a manifest, a distribution or a conformance class with one fault, or the sound drafter on a core
with one. `docs/reference/kit-mutants.md` says what each of them fails.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import kit_drafters as drafters
import kit_faults as faults
import kit_manifests as manifests
from kit_drafters import DenseTable, LookBack

from specplug import AlgorithmSpec, Capabilities, Drafter, hookimpl
from specplug.models.target import Target
from specplug.runtime import drafting, host, kv, ledger, scheduler, stop
from specplug.runtime.device import capture
from specplug.testing.bench import Bench, Kind
from specplug.testing.conformance import DrafterConformance, check_names
from specplug.testing.registry import write_distribution
from specplug.testing.targets import table_target

MANIFEST = "kit_mutant_manifest"


@dataclass(frozen=True)
class Mutant:
    """One fault. `must`: the checks that have to notice it; ``check:value`` where a check is parametrised."""

    name: str
    fault: str
    must: tuple[str, ...]
    drafter: type[Drafter] = LookBack
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest's `AlgorithmSpec` that differ."""
    hooks: Mapping[str, Any] = field(default_factory=dict)
    """Other hooks of the manifest."""
    source: str = "import json"
    """What the manifest's file imports."""
    requires: tuple[str, ...] = ("specplug>=0.1,<1",)
    """What the distribution requires."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """What the conformance class has beside the kit's."""
    core: tuple[Any, str, Callable[[Any], Any]] | None = None
    """(owner, name, what turns the real one into the faulty one), of the core."""


def _drafter(kind: type[Drafter], *must: str, **more: Any) -> Mutant:
    return Mutant(kind.__name__, (kind.__doc__ or "").strip(), must, drafter=kind, **more)


def _core(owner: Any, name: str, make: Callable[[Any], Any], *must: str) -> Mutant:
    where = f"{owner.__name__.rpartition('.')[2]}.{name}"
    return Mutant(f"{where} {make.__name__}", (make.__doc__ or "").strip(), must, core=(owner, name, make))


MUTANTS: tuple[Mutant, ...] = (
    # --- drafters
    _drafter(drafters.Silent, "drafts_something"),
    _drafter(drafters.IdsOutside, "proposals_are_well_formed"),
    _drafter(drafters.EqualSiblings, "proposals_are_well_formed", spec={"plan": manifests.tree_plan}),
    _drafter(drafters.ForeignWriter, "foreign_slots_stay_untouched"),
    _drafter(drafters.ByRow, "row_order_does_not_matter"),
    _drafter(drafters.NeverReset, "slot_keeps_nothing"),
    _drafter(drafters.NeighbourSpoiler, "declined_rows_change_nothing"),
    _drafter(drafters.Quitter, "neighbours_come_and_go"),
    _drafter(drafters.StaysShallow, "depth_may_change"),
    _drafter(drafters.LearnsWhenAsked, "ingest_without_propose"),
    _drafter(drafters.ForgetsChunks, "chunked_prefill"),
    _drafter(drafters.MissesLastAccepted, "full_acceptance"),
    _drafter(drafters.KeepsRejected, "rejected_drafts_leave_no_trace"),
    _drafter(drafters.PreemptionBlind, "preempt_and_resume"),
    _drafter(drafters.TakesTooMuch, "memory_is_declared"),
    _drafter(drafters.TakesByWidth, "memory_is_declared", spec={"plan": manifests.fixed_plan}),
    _drafter(drafters.Truncating, "q_is_honest"),
    _drafter(drafters.LyingQ, "sampled_distribution:rejection", "q_is_honest"),
    _drafter(drafters.Asking, "nothing_waits"),
    _drafter(drafters.Reading, "nothing_waits"),
    _drafter(drafters.Picking, "nothing_waits"),
    _drafter(drafters.Copying, "nothing_waits"),
    _drafter(drafters.NoScratchRow, "device_path_equals_reference"),
    _drafter(drafters.Global, "two_engines_do_not_interfere"),
    _drafter(drafters.Raising, "greedy_equals_reference"),
    # --- what a package declares
    Mutant(
        "a plan that raises",
        "Reads a key that a checkpoint's configuration need not have.",
        ("plan_never_raises",),
        spec={"plan": manifests.raising_plan},
    ),
    Mutant(
        "a plan that is too wide",
        "Plans `num_draft_tokens` nodes, the root not counted.",
        ("plan_keeps_its_bounds",),
        spec={"plan": manifests.wide_plan},
    ),
    Mutant(
        "a plan that needs more",
        "Needs a mapped vocabulary, which the manifest does not declare.",
        ("plan_keeps_its_bounds",),
        spec={"plan": manifests.needy_plan},
    ),
    Mutant(
        "an option without description",
        "An option has no description.",
        ("options_are_described",),
        spec={"config_model": manifests.Undescribed},
    ),
    Mutant(
        "a foreign option",
        "An option's name does not begin with a word of the package.",
        ("options_are_described",),
        spec={"config_model": manifests.Foreign},
    ),
    Mutant(
        "lenient options",
        "Options that nobody knows are passed over.",
        ("config_round_trips",),
        spec={"config_model": manifests.Lenient},
    ),
    Mutant(
        "a hook with a default",
        "A parameter of a hook has a default, which pluggy never fills.",
        ("manifest_loads",),
        hooks={"specplug_resolve_name": manifests.defaulted},
    ),
    Mutant("a heavy manifest", "The manifest imports torch.", ("manifest_is_light",), source="import torch"),
    Mutant(
        "no upper bound",
        "Any later core is accepted.",
        ("core_range_has_both_bounds",),
        requires=("specplug>=0.1",),
    ),
    Mutant(
        "no lower bound", "Any earlier core is accepted.", ("core_range_has_both_bounds",), requires=("specplug<1",)
    ),
    Mutant("no core", "The core is not required.", ("core_range_has_both_bounds",), requires=("numpy>=1,<3",)),
    # --- what a package's test says
    Mutant(
        "a deleted check",
        "A check is taken out of the conformance class.",
        ("no_check_is_missing",),
        body={"test_chunked_prefill": None},
    ),
    Mutant(
        "an overridden check",
        "A check is replaced, and no reason given.",
        ("no_check_is_missing",),
        body={"test_chunked_prefill": lambda self, bench: None},
    ),
    Mutant(
        "a failure without check",
        "`expected_failures` names a check that there is not.",
        ("no_check_is_missing",),
        body={"expected_failures": {"no_such_check": "a reason"}},
    ),
    Mutant(
        "a failure without reason",
        "`expected_failures` gives no reason.",
        ("no_check_is_missing",),
        body={"expected_failures": {"chunked_prefill": " "}},
    ),
    # --- the core, under a sound drafter
    _core(kv.PagePool, "release", faults.leaky, "pages_come_back"),
    _core(scheduler.Scheduler, "release", faults.keeps_failed, "failed_requests_leave_nothing"),
    _core(ledger.Ledger, "add_round", faults.overcounted, "ledger_is_bounded"),
    _core(stop.Output, "__init__", faults.generous, "stop_rules"),
    _core(stop.Output, "take", faults.lossy, "stream_equals_result"),
    _core(scheduler.Scheduler, "_preempt", faults.forgetful, "preempted_requests_equal_reference"),
    _core(drafting.Drafting, "wish", faults.deaf, "requests_can_decline"),
    _core(host, "accept", faults.by_batch, "neighbours_do_not_matter"),
    _core(host, "accept", faults.by_draft, "same_seed_same_text"),
    _core(
        host,
        "accept",
        faults.believing,
        "greedy_equals_reference",
        "sampled_distribution:coupled",
        "sampled_distribution:rejection",
    ),
    _core(host, "allowed", faults.unmasked, "a_grammar_is_kept:coupled", "a_grammar_is_kept:rejection"),
    _core(capture.Capturer, "record", faults.once, "device_path_equals_reference"),
)

CUDA_MUTANTS: tuple[Mutant, ...] = (
    _drafter(drafters.OnTheHost, "cuda_equals_reference:True", "cuda_equals_reference:False"),
    _core(capture.Capturer, "record", faults.once, "cuda_equals_reference:True"),
)
"""What a check that needs CUDA must notice there (`test_kit_cuda`)."""

ON_CUDA = ("cuda_equals_reference",)
"""Checks that need CUDA, so that no row of the page tells of them."""


def checks() -> list[str]:
    """Return every check that is tried on a CPU, one entry for each value it is parametrised with."""
    found = []
    for name in check_names():
        if name not in ON_CUDA:
            found += [f"{name}:{value}" for value in values(name)] or [name]
    return found


def values(name: str) -> dict[str, Any]:
    """Return what a check is parametrised with, by its spelling; nothing where it is not."""
    marks = getattr(getattr(DrafterConformance, f"test_{name}"), "pytestmark", ())
    return {str(value): value for mark in marks if mark.name == "parametrize" for value in mark.args[1]}


def sound(mutant: Mutant) -> Mutant:
    """Return the drafter that `mutant` was made from, with nothing wrong."""
    dense = issubclass(mutant.drafter, DenseTable)
    kind = DenseTable if dense else LookBack
    return Mutant(f"sound {kind.__name__}", "", (), drafter=kind)


# --- a bench for one -----------------------------------------------------------------------------------------------


def spec_of(mutant: Mutant) -> AlgorithmSpec:
    """Return the mutant's manifest."""
    dense = issubclass(mutant.drafter, DenseTable)
    host_side = Capabilities(runs_on=frozenset({"host"}), shapes=frozenset({"chain", "tree"}))
    values: dict[str, Any] = {
        "name": "mutant",
        "api": (1, 0),
        "summary": "for the kit's own tests",
        "capabilities": Capabilities(proposal_probs="dense", graph_safe=True) if dense else host_side,
        "config_model": manifests.Described,
        "plan": manifests.dense_plan if dense else manifests.sound_plan,
        "drafter": f"{mutant.drafter.__module__}:{mutant.drafter.__name__}",
    }
    return AlgorithmSpec(**(values | dict(mutant.spec)))


def conformance(mutant: Mutant, site: Path) -> type[DrafterConformance]:
    """Return the mutant's conformance class; `site`: where its distribution lies."""
    dense = issubclass(mutant.drafter, DenseTable)

    def search_path(self: Any, folder: Path) -> Sequence[str]:
        return [str(site)]

    def make_target(self: Any, kind: Kind, folder: Path) -> Target:
        # Eight tokens where drafts are drawn at random, so that they are accepted often enough to matter.
        return table_target(8, 1, 0) if dense and kind == "ids" else DrafterConformance.make_target(self, kind, folder)

    own = {"__test__": False, "algorithm": "mutant", "search_path": search_path, "make_target": make_target}
    return type("Subject", (DrafterConformance,), own | dict(mutant.body))


@contextmanager
def _known_as(name: str, module: ModuleType) -> Iterator[None]:
    """Put `module` among those imported, for a while; others that are imported meanwhile stay, as some must."""
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def opened(mutant: Mutant, folder: Path) -> Iterator[tuple[DrafterConformance, Bench]]:
    """Offer `mutant` through a distribution of its own, open a bench for it, and put its fault into the core."""
    spec, module, site = spec_of(mutant), ModuleType(MANIFEST), folder / "site"

    def specplug_algorithms() -> Sequence[AlgorithmSpec]:
        return (spec,)

    for name, hook in {"specplug_algorithms": hookimpl(specplug_algorithms), **mutant.hooks}.items():
        setattr(module, name, hook)
    write_distribution(site, "specplug-mutant", {"mutant": MANIFEST}, requires=mutant.requires)
    (site / f"{MANIFEST}.py").write_text(mutant.source, encoding="utf-8")
    subject = conformance(mutant, site)
    drafters.Global.shared.clear()
    with ExitStack() as stack:
        stack.enter_context(_known_as(MANIFEST, module))
        bench = subject.open_bench(folder / "bench")
        (folder / "bench").mkdir()
        if mutant.core is not None:
            owner, name, make = mutant.core
            stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))
        yield subject(), bench


def run_check(check: str, subject: DrafterConformance, bench: Bench) -> None:
    """Call one check as pytest would."""
    name, _, value = check.partition(":")
    function = getattr(subject, f"test_{name}") or getattr(DrafterConformance, f"test_{name}").__get__(subject)
    if name == "no_check_is_missing":
        function()
    elif value:
        function(bench, values(name)[value])
    else:
        function(bench)
