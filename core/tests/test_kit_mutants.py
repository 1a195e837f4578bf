"""Every check of the kit fails for a drafter, a manifest or a core that is wrong in the way it looks for.

One sound drafter (it proposes what followed the last token before), and mutants of it that differ in a
line or two. The table at the end says which check must notice which mutant.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specplug import AlgorithmSpec, Capabilities, Drafter, DraftPlan, SpecConfig, hookimpl
from specplug.models.target import Target
from specplug.runtime import drafting, host, kv, ledger, scheduler, stop
from specplug.testing.bench import Bench, Kind
from specplug.testing.conformance import DrafterConformance, check_names
from specplug.testing.registry import write_distribution
from specplug.testing.targets import table_target

# --- the sound drafter ---------------------------------------------------------------------------------------------


class LookBack(Drafter):
    """A host drafter: a chain of what followed the last token the time before."""

    def allocate(self, arena: Any) -> None:
        self.texts: dict[int, list[int]] = {}
        self.asked = 0

    def on_admit(self, request: Any) -> None:
        self.texts[request.slot] = []

    def ingest(self, step: Any) -> None:
        for row in step.host.rows:
            self.texts[row.slot].extend(row.new_tokens)

    def guess(self, text: Sequence[int]) -> list[int]:
        for at in range(len(text) - 2, -1, -1):
            if text[at] == text[-1]:
                return list(text[at + 1 : at + 1 + self.plan.nodes])
        return []

    def propose(self, step: Any, out: Any) -> None:
        self.asked += 1
        for row in step.host.rows:
            if row.limit:
                out.set(row.slot, self.guess(self.texts[row.slot])[: row.limit])


class DenseTable(Drafter):
    """A device drafter: draws a chain through the core from a fixed table of logits."""

    def allocate(self, arena: Any) -> None:
        vocab = self.ctx.facts.target.config["vocab_size"]
        self.table = arena.static("table", (vocab, vocab), torch.float32)
        self.table.copy_(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(5)))

    def propose(self, step: Any, out: Any) -> None:
        token = step.root
        for depth in range(1, min(step.depth, self.plan.depth) + 1):
            token = out.draw(step, depth, self.table[token])
        out.num_valid[step.slots] = out.limit[step.slots]


# --- its mutants ---------------------------------------------------------------------------------------------------


class Silent(LookBack):
    def guess(self, text: Sequence[int]) -> list[int]:
        return []


class IdsOutside(LookBack):
    def guess(self, text: Sequence[int]) -> list[int]:
        return [token + 1000 for token in super().guess(text)]


class EqualSiblings(LookBack):
    def propose(self, step: Any, out: Any) -> None:
        for row in step.host.rows:
            if row.limit > 1:
                out.set(row.slot, [1, 1], [-1, -1])


class ForeignWriter(LookBack):
    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        out.tokens[:, 0] = out.tokens[step.host.rows[0].slot, 0]


class ByRow(LookBack):
    """Takes the position in the batch for the request's identity."""

    def propose(self, step: Any, out: Any) -> None:
        texts = [self.texts[slot] for slot in sorted(self.texts)]
        for at, row in enumerate(step.host.rows):
            if row.limit:
                out.set(row.slot, self.guess(texts[at])[: row.limit])


class NeverReset(LookBack):
    def on_admit(self, request: Any) -> None:
        self.texts.setdefault(request.slot, [])


class NeighbourSpoiler(LookBack):
    """Drops everybody's text as soon as one row declines."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        if any(not row.limit for row in step.host.rows):
            for text in self.texts.values():
                text.clear()


class LearnsWhenAsked(LookBack):
    """Brings its state up to date in `propose`, with the newest forward only."""

    def ingest(self, step: Any) -> None:
        pass

    def propose(self, step: Any, out: Any) -> None:
        super().ingest(step)
        super().propose(step, out)


class ForgetsChunks(LookBack):
    def ingest(self, step: Any) -> None:
        for row, final in zip(step.host.rows, step.final.tolist(), strict=True):
            if final or len(row.new_tokens) > 4:
                self.texts[row.slot].extend(row.new_tokens)


class MissesLastAccepted(LookBack):
    """Off by one after a forward in which all drafts were accepted."""

    def ingest(self, step: Any) -> None:
        for row in step.host.rows:
            known = self.texts[row.slot]
            verify = known and len(row.new_tokens) == 4
            known.extend(row.new_tokens[1:] if verify else row.new_tokens)


class KeepsRejected(LookBack):
    """Reads every processed token, rejected drafts included."""

    def ingest(self, step: Any) -> None:
        for at, row in enumerate(step.host.rows):
            own = step.tokens[step.row_start[at] : step.row_start[at + 1]].tolist()
            known = self.texts[row.slot]
            known.extend([*own[1:], row.new_tokens[-1]] if known else [*own, row.new_tokens[-1]])


class PreemptionBlind(LookBack):
    """Takes the text of a request that comes back for one that was read before."""

    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        self.names: dict[int, str] = {}
        self.read: set[str] = set()

    def on_admit(self, request: Any) -> None:
        super().on_admit(request)
        self.names[request.slot] = request.request_id

    def on_release(self, slot: int, reason: Any) -> None:
        if reason == "preempted":
            self.read.add(self.names[slot])

    def ingest(self, step: Any) -> None:
        for row in step.host.rows:
            if self.names[row.slot] not in self.read:
                self.texts[row.slot].extend(row.new_tokens)


class TakesTooMuch(LookBack):
    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        arena.static("more", (64,), torch.float32)


class Asking(DenseTable):
    """Waits for the device to learn whether anything is wanted."""

    def propose(self, step: Any, out: Any) -> None:
        if step.root.max() >= 0:
            super().propose(step, out)


class Reading(DenseTable):
    """Reads the roots without an operation."""

    def propose(self, step: Any, out: Any) -> None:
        step.root.tolist()
        super().propose(step, out)


class Picking(DenseTable):
    """Indexes by a mask, whose result has a length that only the device knows."""

    def propose(self, step: Any, out: Any) -> None:
        out.num_valid[step.slots[step.final]] = 0
        super().propose(step, out)


class Copying(DenseTable):
    """Makes a tensor of Python's numbers in every step."""

    def propose(self, step: Any, out: Any) -> None:
        torch.tensor([1, 2])
        super().propose(step, out)


class NoScratchRow(DenseTable):
    """Keeps something for each slot, and nothing for the one of pad rows."""

    def propose(self, step: Any, out: Any) -> None:
        step.kv_len + torch.zeros(self.ctx.slots, dtype=torch.int64)[step.slots]
        super().propose(step, out)


class Truncating(DenseTable):
    """Drops a draft by its own probability: what exists no longer follows q."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        q = torch.softmax(self.table[step.root] / step.sampling.temperature.clamp_min(0.1).unsqueeze(1), 1)
        drawn = out.tokens[step.slots, 0]
        likely = q.gather(1, drawn.unsqueeze(1)).squeeze(1) > 0.05
        out.num_valid[step.slots] *= likely


class LyingQ(DenseTable):
    """Reports another distribution than the one it drew from."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        if out.q is not None:
            out.q[step.slots] = out.q[step.slots].roll(1, -1)


class Global(LookBack):
    """Keeps texts on the class."""

    shared: Any = {}  # noqa: RUF012 (the fault)

    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        self.texts = Global.shared


class Raising(LookBack):
    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        if self.asked > 3:
            raise RuntimeError("a mutant")


# --- manifests -----------------------------------------------------------------------------------------------------


class MutantConfig(SpecConfig):
    """Options of the sound drafter."""

    num_draft_tokens: int | None = 4


def sound_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    nodes = (config.num_draft_tokens or 4) - 1
    nodes = nodes if depth is None else min(nodes, depth)
    needs = Capabilities(runs_on=frozenset({"host"}), shapes=frozenset({"chain"}))
    return DraftPlan(needs=needs, nodes=nodes, depth=nodes)


def tree_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    plan = sound_plan(config, facts, depth)
    needs = plan.needs.model_copy(update={"shapes": frozenset({"tree"})})
    return plan.model_copy(update={"needs": needs})


def dense_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    plan = sound_plan(config, facts, depth)
    vocab = facts.target.config.get("vocab_size", 1)
    needs = Capabilities(proposal_probs="dense", graph_safe=True)
    return plan.model_copy(update={"needs": needs, "bytes_fixed": 4 * vocab * vocab})


def spec_of(drafter: type[Drafter], **changes: Any) -> AlgorithmSpec:
    dense = issubclass(drafter, DenseTable)
    capabilities = (
        Capabilities(proposal_probs="dense", graph_safe=True)
        if dense
        else Capabilities(runs_on=frozenset({"host"}), shapes=frozenset({"chain", "tree"}))
    )
    values: dict[str, Any] = {
        "name": "mutant",
        "api": (1, 0),
        "summary": "for the kit's own tests",
        "capabilities": capabilities,
        "config_model": _described(),
        "plan": dense_plan if dense else sound_plan,
        "drafter": f"{__name__}:{drafter.__name__}",
    }
    return AlgorithmSpec(**(values | changes))


def _described() -> type[SpecConfig]:
    return type("Described", (SpecConfig,), {"__doc__": "Only the shared option."})


@contextmanager
def opened(
    folder: Path, spec: AlgorithmSpec, requires: tuple[str, ...] = ("specplug>=0.1,<1",), **hooks: Any
) -> Iterator[tuple[DrafterConformance, Bench]]:
    """Offer `spec` through a distribution of its own, and open a bench for it."""
    module = ModuleType("kit_mutant_manifest")

    def specplug_algorithms() -> Sequence[AlgorithmSpec]:
        return (spec,)

    module.specplug_algorithms = hookimpl(specplug_algorithms)  # type: ignore[attr-defined]
    for name, hook in hooks.items():
        setattr(module, name, hook)
    site = folder / "site"
    write_distribution(site, "specplug-mutant", {"mutant": module.__name__}, requires=requires)

    class Subject(DrafterConformance):
        __test__ = False
        algorithm = "mutant"

        def search_path(self, folder: Path) -> Sequence[str]:
            return [str(site)]

        def make_target(self, kind: Kind, folder: Path) -> Target:
            # Eight tokens where drafts are drawn at random, so that they are accepted often enough to matter.
            dense = spec.capabilities.proposal_probs == "dense"
            return table_target(8, 1, 0) if dense and kind == "ids" else super().make_target(kind, folder)

    with patch.dict(sys.modules, {module.__name__: module, __name__: sys.modules[__name__]}):
        bench = Subject.open_bench(folder / "bench")
        (folder / "bench").mkdir()
        yield Subject(), bench


def run_check(check: str, subject: DrafterConformance, bench: Bench) -> None:
    """Call one check as pytest would."""
    name, _, rule = check.partition(":")
    function = getattr(subject, f"test_{name}")
    if name == "no_check_is_missing":
        function()
    elif rule:
        function(bench, rule)
    else:
        function(bench)


# --- drafters: check <- mutant -------------------------------------------------------------------------------------

DRAFTERS: dict[str, tuple[type[Drafter], dict[str, Any]]] = {
    "drafts_something": (Silent, {}),
    "proposals_are_well_formed": (IdsOutside, {}),
    "foreign_slots_stay_untouched": (ForeignWriter, {}),
    "row_order_does_not_matter": (ByRow, {}),
    "slot_keeps_nothing": (NeverReset, {}),
    "declined_rows_change_nothing": (NeighbourSpoiler, {}),
    "ingest_without_propose": (LearnsWhenAsked, {}),
    "chunked_prefill": (ForgetsChunks, {}),
    "full_acceptance": (MissesLastAccepted, {}),
    "rejected_drafts_leave_no_trace": (KeepsRejected, {}),
    "preempt_and_resume": (PreemptionBlind, {}),
    "memory_is_declared": (TakesTooMuch, {}),
    "q_is_honest": (Truncating, {}),
    "two_engines_do_not_interfere": (Global, {}),
    "greedy_equals_reference": (Raising, {}),
    "sampled_distribution:rejection": (LyingQ, {}),
    "nothing_waits": (Asking, {}),
    "device_path_equals_reference": (NoScratchRow, {}),
}


@pytest.mark.parametrize("check", sorted(DRAFTERS))
def test_a_faulty_drafter_is_noticed(check: str, tmp_path: Path) -> None:
    drafter, changes = DRAFTERS[check]
    with opened(tmp_path, spec_of(drafter, **changes)) as (subject, bench), pytest.raises(AssertionError):
        run_check(check, subject, bench)


@pytest.mark.parametrize("check", sorted(DRAFTERS))
def test_the_sound_drafter_passes(check: str, tmp_path: Path) -> None:
    sound = DenseTable if issubclass(DRAFTERS[check][0], DenseTable) else LookBack
    with opened(tmp_path, spec_of(sound)) as (subject, bench):
        run_check(check, subject, bench)


@pytest.mark.parametrize("drafter", [Asking, Reading, Picking, Copying])
def test_every_way_to_wait_is_noticed(drafter: type[Drafter], tmp_path: Path) -> None:
    with (
        opened(tmp_path, spec_of(drafter)) as (subject, bench),
        pytest.raises(AssertionError, match=f"in {drafter.__name__}.propose, line"),
    ):
        run_check("nothing_waits", subject, bench)


def test_equal_siblings_are_noticed(tmp_path: Path) -> None:
    with (
        opened(tmp_path, spec_of(EqualSiblings, plan=tree_plan)) as (subject, bench),
        pytest.raises(AssertionError, match="equal siblings"),
    ):
        run_check("proposals_are_well_formed", subject, bench)


def test_a_q_that_lies_is_noticed_by_its_draws(tmp_path: Path) -> None:
    with opened(tmp_path, spec_of(LyingQ)) as (subject, bench), pytest.raises(AssertionError, match="do not follow"):
        run_check("q_is_honest", subject, bench)


# --- manifests: check <- mutant ------------------------------------------------------------------------------------


def _raising_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    if not facts.target.config:
        raise KeyError("hidden_size")
    return sound_plan(config, facts, depth)


def _wide_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    plan = sound_plan(config, facts, depth)
    return plan.model_copy(update={"nodes": plan.nodes + 1})


def _needy_plan(config: Any, facts: Any, depth: int | None) -> DraftPlan:
    plan = sound_plan(config, facts, depth)
    return plan.model_copy(update={"needs": plan.needs.model_copy(update={"vocab": "mapped"})})


class _Undescribed(SpecConfig):
    mutant_width: int = 3


class _Lenient(SpecConfig):
    model_config = {"extra": "ignore", "frozen": True}  # noqa: RUF012


@hookimpl
def _defaulted(name: str, facts: Any = None) -> None:
    return None


MANIFESTS: dict[str, dict[str, Any]] = {
    "plan_never_raises": {"plan": _raising_plan},
    "plan_keeps_its_bounds": {"plan": _wide_plan},
    "options_are_described": {"config_model": _Undescribed},
    "config_round_trips": {"config_model": _Lenient},
}


@pytest.mark.parametrize("check", sorted(MANIFESTS))
def test_a_faulty_manifest_is_noticed(check: str, tmp_path: Path) -> None:
    with (
        opened(tmp_path, spec_of(LookBack, **MANIFESTS[check])) as (subject, bench),
        pytest.raises((AssertionError, pytest.fail.Exception)),
    ):
        run_check(check, subject, bench)


@pytest.mark.parametrize("check", sorted(MANIFESTS))
def test_the_sound_manifest_passes(check: str, tmp_path: Path) -> None:
    with opened(tmp_path, spec_of(LookBack)) as (subject, bench):
        run_check(check, subject, bench)


def test_needs_beyond_the_manifest_are_noticed(tmp_path: Path) -> None:
    with (
        opened(tmp_path, spec_of(LookBack, plan=_needy_plan)) as (subject, bench),
        pytest.raises(AssertionError, match="vocab"),
    ):
        run_check("plan_keeps_its_bounds", subject, bench)


def test_a_hook_with_a_default_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path / "sound", spec_of(LookBack)) as (subject, bench):
        run_check("manifest_loads", subject, bench)
    with (
        opened(tmp_path, spec_of(LookBack), specplug_resolve_name=_defaulted) as (subject, bench),
        pytest.raises(AssertionError, match="default"),
    ):
        run_check("manifest_loads", subject, bench)


@pytest.mark.parametrize("requires", [(), ("specplug>=0.1",), ("specplug<1",), ("numpy>=1,<3",)])
def test_a_range_without_bounds_is_noticed(requires: tuple[str, ...], tmp_path: Path) -> None:
    with opened(tmp_path, spec_of(LookBack), requires) as (subject, bench), pytest.raises(AssertionError):
        run_check("core_range_has_both_bounds", subject, bench)


@pytest.mark.parametrize(("text", "fails"), [("import torch", True), ("import json", False)])
def test_a_heavy_manifest_is_noticed(text: str, fails: bool, tmp_path: Path) -> None:
    with opened(tmp_path, spec_of(LookBack)) as (subject, bench):
        (tmp_path / "site" / "kit_mutant_manifest.py").write_text(text, encoding="utf-8")
        if not fails:
            return run_check("manifest_is_light", subject, bench)
        with pytest.raises(AssertionError, match="imports"):
            run_check("manifest_is_light", subject, bench)
    return None


# --- the core: check <- mutant -------------------------------------------------------------------------------------


def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return patch.object(owner, name, make(getattr(owner, name)))


def _leak(release: Any) -> Any:
    def leaky(self: Any, slot: int) -> None:
        self.held[slot] -= 1
        release(self, slot)

    return leaky


def _overcount(add_round: Any) -> Any:
    return lambda self, drafted, path, reached, **more: add_round(self, drafted // 2, path, reached, **more)


def _one_too_many(init: Any) -> Any:
    def generous(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.most += 1

    return generous


def _lossy_take(take: Any) -> Any:
    def lossy(self: Any, *more: Any) -> Any:
        taken = take(self, *more)
        return (taken[0][:3], *taken[1:])

    return lossy


def _forgets_progress(preempt: Any) -> Any:
    def faulty(self: Any, request: Any) -> None:
        preempt(self, request)
        request.tokens[-1] = (request.tokens[-1] + 1) % 8

    return faulty


def _ignores_request(wish: Any) -> Any:
    def faulty(self: Any, row: Any, *lengths: int) -> Any:
        row.request.max_drafted = None
        return wish(self, row, *lengths)

    return faulty


def _by_batch(accept: Any) -> Any:
    """Noise that depends on the row's place in the batch."""

    def faulty(rule: Any, logits: Any, rows: Any, *more: Any, **named: Any) -> Any:
        moved = [replace(row, seed=row.seed + at) for at, row in enumerate(rows)]
        return accept(rule, logits, moved, *more, **named)

    return faulty


def _by_draft(accept: Any) -> Any:
    """Noise that depends on whether there are drafts."""

    def faulty(rule: Any, logits: Any, rows: Any, *more: Any, **named: Any) -> Any:
        moved = [replace(row, seed=row.seed + len(row.tokens)) for row in rows]
        return accept(rule, logits, moved, *more, **named)

    return faulty


def _drops_first(accept: Any) -> Any:
    """Always takes the first draft under `rejection`."""

    def faulty(rule: Any, logits: Any, rows: Any, *more: Any, **named: Any) -> Any:
        found = accept(rule, logits, rows, *more, **named)
        return [
            verdict._replace(path=(0,)) if row.tokens and not verdict.path else verdict
            for row, verdict in zip(rows, found, strict=True)
        ]

    return faulty


CORE: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "pages_come_back": (kv.PagePool, "release", _leak),
    "ledger_is_bounded": (ledger.Ledger, "add_round", _overcount),
    "stop_rules": (stop.Output, "__init__", _one_too_many),
    "stream_equals_result": (stop.Output, "take", _lossy_take),
    "preempted_requests_equal_reference": (scheduler.Scheduler, "_preempt", _forgets_progress),
    "requests_can_decline": (drafting.Drafting, "wish", _ignores_request),
    "neighbours_do_not_matter": (host, "accept", _by_batch),
    "same_seed_same_text": (host, "accept", _by_draft),
    "greedy_equals_reference": (host, "accept", _drops_first),
    "sampled_distribution:coupled": (host, "accept", _drops_first),
    "a_grammar_is_kept:coupled": (host, "allowed", lambda real: lambda rows, vocab: None),
    "a_grammar_is_kept:rejection": (host, "allowed", lambda real: lambda rows, vocab: None),
    "sampled_distribution:rejection": (host, "accept", _drops_first),
}


@pytest.mark.parametrize("check", sorted(CORE))
def test_a_faulty_core_is_noticed(check: str, tmp_path: Path) -> None:
    owner, name, make = CORE[check]
    with (
        opened(tmp_path, spec_of(LookBack)) as (subject, bench),
        _patched(owner, name, make),
        pytest.raises((AssertionError, RuntimeError, IndexError)),
    ):
        run_check(check, subject, bench)


@pytest.mark.parametrize("check", sorted(CORE.keys() - DRAFTERS.keys()))
def test_the_sound_core_passes(check: str, tmp_path: Path) -> None:
    with opened(tmp_path, spec_of(LookBack)) as (subject, bench):
        run_check(check, subject, bench)


# --- the guard -----------------------------------------------------------------------------------------------------


def _subclass(**body: Any) -> type[DrafterConformance]:
    return type("Guarded", (DrafterConformance,), {"__test__": False, "algorithm": "mutant", **body})


@pytest.mark.parametrize(
    "body",
    [
        {"test_chunked_prefill": None},
        {"test_chunked_prefill": lambda self: None},
        {"expected_failures": {"no_such_check": "a reason"}},
        {"expected_failures": {"chunked_prefill": " "}},
    ],
)
def test_a_missing_check_is_noticed(body: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        _subclass(**body)().test_no_check_is_missing()


def test_a_check_with_a_reason_must_fail_strictly() -> None:
    cls = _subclass(expected_failures={"sampled_distribution": "a reason"})
    cls().test_no_check_is_missing()
    marks = cls.test_sampled_distribution.pytestmark  # type: ignore[attr-defined]
    assert {mark.name for mark in marks} == {"parametrize", "xfail"}
    (xfail,) = [mark for mark in marks if mark.name == "xfail"]
    assert xfail.kwargs == {"reason": "a reason", "strict": True}
    own = DrafterConformance.test_sampled_distribution.pytestmark  # type: ignore[attr-defined]
    assert [mark.name for mark in own] == ["parametrize"], "the kit's own check was marked too"


def test_every_check_has_a_mutant() -> None:
    one_by_one = {"manifest_loads", "manifest_is_light", "core_range_has_both_bounds", "no_check_is_missing"}
    one_by_one.add("cuda_equals_reference")  # needs CUDA; it says there what device_path_equals_reference says here
    covered = {name.partition(":")[0] for name in (*DRAFTERS, *MANIFESTS, *CORE)} | one_by_one
    assert covered == set(check_names())
