"""One run, settled before any weight loads: resolve -> defaults -> validate -> plan -> check. Torch-free.

The engine, `specplug doctor` and every other command go through `plan_run`, so what `doctor` says
is what happens.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specplug.adaptive.depths import SWITCH, Depths, Request
from specplug.adaptive.settle import Adapted, adapt
from specplug.draft_files import own_draft
from specplug.errors import RefusedError, UserError
from specplug.generation import FILE, objection, sampling_defaults, spelt
from specplug.names import fold
from specplug.plans import ask, bug, check_features, sentence
from specplug.resolve import resolve
from specplug.settings import answers_of, flag, is_reserved, settle, shown
from specplug.spec import (
    Checkpoint,
    DraftPlan,
    Facts,
    Problem,
    Refusal,
    RunInfo,
    Setting,
    SpecConfig,
)

if TYPE_CHECKING:
    from specplug.registry import Installed, Registry

NONE = "none"
"""The reserved word for plain decoding."""


@dataclass(frozen=True)
class Run:
    """A settled run. Set by `plan_run`; for plain decoding `installed`, `config` and `plan` are None."""

    word: str
    """What was asked for, as typed."""
    algorithm: str
    """Folded name of what that means for these models, or ``"none"``."""
    installed: "Installed | None"
    config: SpecConfig | None
    plan: DraftPlan | None
    settings: tuple[Setting, ...]
    facts: Facts
    trace: tuple[str, ...]
    """One line per decision, in order, with who made it."""
    warnings: tuple[Problem, ...]
    depths: Depths | None = None
    """What an adaptive run may choose from; `plan` is that of the deepest. None where the depth is fixed."""
    draft: Checkpoint | None = None
    """The draft model with all the tensors that the algorithm and its parts read."""

    @property
    def info(self) -> RunInfo:
        """The run as observers are told of it."""
        return RunInfo(
            algorithm=self.algorithm,
            distribution=self.installed.distribution if self.installed else "",
            version=self.installed.version if self.installed else "",
            plan=self.plan,
            settings=self.settings,
            facts=self.facts,
        )


def plan_run(
    registry: "Registry",
    word: str,
    given: Mapping[str, object],
    facts: Facts,
    adaptive: Request | None = None,
) -> Run:
    """Settle a run, or refuse it with the reason and the nearest thing that works.

    `given` maps an algorithm's field names (underscores, no ``speculative_`` prefix) to text or typed
    values; `adaptive`: what `adaptive_request` made of the engine's options. Raises
    `RefusedError`, whose `trace` holds the lines up to the refusal.
    """
    resolution = resolve(registry, word, facts)
    trace = list(resolution.trace)
    try:
        if resolution.installed is None:
            run = _plain(word, given, facts, trace, adaptive)
        else:
            run = _drafted(registry, word, resolution.installed, given, facts, trace, adaptive)
        return _with_generation(run)
    except RefusedError as error:
        raise RefusedError(str(error), (*trace, *error.trace)) from error.__cause__
    except UserError as error:
        raise RefusedError(str(error), tuple(trace)) from error.__cause__


def _with_generation(run: Run) -> Run:
    """Return the run with what is to be said of the target's generation config."""
    asked = run.facts.target.generation
    lines, warnings = list[str](), run.warnings
    if defaults := sampling_defaults(asked):
        lines.append(f"{FILE}: in specplug serve, requests that leave them out get {spelt(defaults)}")
    if found := objection(asked):
        lines.append(f"warning: {found.message}")
        warnings = (*warnings, found)
    return replace(run, trace=(*run.trace, *lines), warnings=warnings)


def _plain(word: str, given: Mapping[str, object], facts: Facts, trace: list[str], adaptive: Request | None) -> Run:
    if given:
        options = ", ".join(flag(field) for field in given)
        raise RefusedError(
            f"{options} has no effect with --speculative-algorithm {NONE}: name an algorithm, or leave it out"
        )
    warnings: tuple[Problem, ...] = ()
    if facts.draft is not None:
        said = f"the draft model {facts.draft.path} is not used: --speculative-algorithm is {NONE}"
        warnings = (Problem(severity="warning", field="draft_model_path", message=said),)
    if adaptive is not None:
        said = f"{SWITCH} has no effect: --speculative-algorithm is {NONE}"
        warnings = (*warnings, Problem(severity="warning", field="adaptive", message=said))
    return Run(word, NONE, None, None, None, (), facts, tuple(trace), warnings)


def _drafted(
    registry: "Registry",
    word: str,
    installed: "Installed",
    given: Mapping[str, object],
    facts: Facts,
    trace: list[str],
    adaptive: Request | None,
) -> Run:
    spec = installed.spec
    reserved = [field for field in spec.config_model.model_fields if is_reserved(field)]
    if reserved:
        raise bug(installed, f"its options {', '.join(reserved)} have names that the core keeps for itself")
    facts = _own_facts(registry, facts, (installed,))
    if facts.draft is not None and facts.draft.files:
        trace.append(f"draft weights: {', '.join(facts.draft.files)} of {facts.draft.path}, as {spec.name!r} asks")
    settled = settle(registry, installed, given, facts)
    trace += settled.trace
    answer = ask(installed, settled.config, facts)
    if isinstance(answer, Refusal):
        raise RefusedError(f"{spec.name!r} cannot run here: {sentence(answer.reason, answer.try_instead)}")
    adapted = Adapted(settled, answer, None, ())
    if adaptive is not None:
        adapted = adapt(
            adaptive,
            given,
            settled,
            answer,
            settle=lambda values: settle(registry, installed, values, facts),
            ask=lambda config, depth: ask(installed, config, facts, depth),
            bug=lambda said: bug(installed, said),
        )
        trace += adapted.trace
    settled, answer, depths = adapted.settled, adapted.plan, adapted.depths
    draft = _draft_read(installed, facts)
    trace.append(
        f"plan: {answer.nodes} drafts of depth {answer.depth}, {'/'.join(sorted(answer.needs.shapes))}, "
        f"{answer.bytes_fixed + answer.bytes_per_slot * facts.limits.max_running_requests} bytes"
    )
    if depths is not None:
        trace += depths.lines()
    check_features(installed, answer, facts)
    warnings = (*settled.warnings, *_objections(registry, installed, settled.config, answer, facts, trace))
    if adapted.warning is not None:
        trace.append(f"warning: {adapted.warning.message}")
        warnings = (*warnings, adapted.warning)
    name = spec.name
    config, settings = settled.config, settled.settings
    return Run(word, name, installed, config, answer, settings, facts, tuple(trace), warnings, depths, draft)


def _objections(
    registry: "Registry",
    installed: "Installed",
    config: SpecConfig,
    plan: DraftPlan,
    facts: Facts,
    trace: list[str],
) -> tuple[Problem, ...]:
    """Collect what every package says to the settled run; errors are raised together, warnings returned."""
    errors: list[str] = []
    warnings: list[Problem] = []
    name = installed.spec.name
    for answer in registry.each("specplug_check", selected=name, algorithm=name, config=config, plan=plan, facts=facts):
        who = f"{answer.distribution} {answer.version}"
        for problem in answers_of(answer.value):
            field = f"{flag(problem.field)}: " if problem.field else ""
            line = f"{field}{sentence(problem.message, problem.try_instead)} ({who})"
            trace.append(f"{problem.severity}: {line}")
            if problem.severity == "error":
                errors.append(line)
            else:
                warnings.append(problem)
    if errors:
        raise RefusedError("; ".join(errors))
    return tuple(warnings)


# --- Facts.plan_of ---------------------------------------------------------------------------------------------------


class Planner:
    """What `Facts.plan_of` and ``ctx.build`` of one algorithm ask for its parts."""

    def __init__(self, registry: "Registry", facts: Facts, owners: tuple["Installed", ...]) -> None:
        """`facts`: of the algorithm, its draft as the folder holds it. `owners`: it, after those it is a part of."""
        self._registry = registry
        self._owners = owners
        self.facts = facts
        self.planned: dict[str, set[bool]] = {}
        """For each part that was asked for: with the draft model, without it, or both."""
        self.drafts: list[Checkpoint] = []
        """The draft as the parts read it, theirs included."""

    def plan_of(
        self, name: str, config: SpecConfig | Mapping[str, Any], depth: int | None, draft: bool
    ) -> DraftPlan | Refusal:
        """See `Facts.plan_of`."""
        self.planned.setdefault(fold(name), set()).add(draft)
        found = self._settle(name, config, depth, draft)
        if isinstance(found, Refusal):
            return found.model_copy(update={"reason": f"its part {name!r}: {found.reason}"})
        if found.draft is not None:
            self.drafts.append(found.draft)
        assert found.plan is not None
        return found.plan

    def part(self, name: str, config: SpecConfig | Mapping[str, Any], draft: bool) -> Run:
        """Settle a part that is to be built; raises `RefusedError` where `plan_of` refuses, or was asked otherwise."""
        asked = self.planned.get(fold(name), {draft})
        if draft not in asked:
            planned, built = ("without", "with") if draft else ("with", "without")
            raise bug(
                self._owners[-1],
                f"its part {name!r} was planned {planned} the draft model and is built {built} it; "
                "facts.plan_of and ctx.build have to be given the same draft",
            )
        found = self._settle(name, config, None, draft)
        if isinstance(found, Refusal):
            raise RefusedError(f"{name!r} cannot be a part here: {sentence(found.reason, found.try_instead)}")
        return found

    def _settle(
        self, name: str, config: SpecConfig | Mapping[str, Any], depth: int | None, draft: bool
    ) -> Run | Refusal:
        word, registry = fold(name), self._registry
        installed = registry.algorithms.get(word)
        if installed is None:
            have = ", ".join(sorted(registry.algorithms)) or "nothing"
            return Refusal(reason=f"no algorithm {name!r} is installed (installed: {have})")
        chain = [owner.spec.name for owner in self._owners]
        if word in chain:
            return Refusal(reason=f"{' -> '.join((*chain, word))}: an algorithm cannot be part of itself")
        facts = self.facts
        if not draft:
            facts = facts.model_copy(update={"draft": None, "first_vocab_difference": None})
        try:
            inner = _own_facts(registry, facts, (*self._owners, installed))
            settings: tuple[Setting, ...] = ()
            if not isinstance(config, SpecConfig):
                settled = settle(registry, installed, config, inner)
                config, settings = settled.config, settled.settings
            plan = ask(installed, config, inner, depth)
            if isinstance(plan, Refusal):
                return plan
            draft_read = _draft_read(installed, inner)
            return Run(name, word, installed, config, plan, settings, inner, (), (), draft=draft_read)
        except UserError as error:  # a combinator must be able to fall back: its `plan` never raises
            return Refusal(reason=str(error))


def _own_facts(registry: "Registry", facts: Facts, owners: tuple["Installed", ...]) -> Facts:
    """Return the facts as the last of `owners` sees them: the draft as it reads it, and a planner for its parts."""
    own = facts.model_copy()
    if facts.draft is not None:
        own = facts.model_copy(update={"draft": own_draft(facts.draft, owners[-1].spec)})
    own._planner = Planner(registry, facts, owners)
    return own


def _draft_read(installed: "Installed", facts: Facts) -> Checkpoint | None:
    """Return the draft with all that an algorithm and its parts read; raises `UserError` where none can be read.

    `facts`: its own, once it is planned.
    """
    draft, planner = facts.draft, facts._planner
    if draft is None or draft.tensors is None:
        return draft
    if not draft.tensors and not planner.drafts and planner.facts.draft.files:
        raise UserError(
            f"--speculative-draft-model-path {draft.path}: {installed.spec.name!r} reads nothing of its "
            f"{', '.join(planner.facts.draft.files)}, and there is no model*.safetensors or pytorch_model*.bin: "
            "give a draft of this algorithm, or choose the one that these weights are for"
        )
    tensors = dict(draft.tensors)
    for part in planner.drafts:
        tensors.update(part.tensors or {})
    return draft.model_copy(update={"tensors": tensors})


def run_of(facts: Facts, name: str, config: SpecConfig | Mapping[str, Any], *, draft: bool = True) -> Run:
    """Settle another installed algorithm as `Facts.plan_of` does; raises `RefusedError` where that refuses."""
    if facts._planner is None:
        raise RefusedError(f"{name!r} cannot be a part here: no registry can plan it")
    run: Run = facts._planner.part(name, config, draft)
    return run


# --- the heavy half --------------------------------------------------------------------------------------------------


def load_drafter_class(run: Run) -> type:
    """Import the `Drafter` class of a planned run.

    Raises `UserError` naming distribution, version and cause when it cannot be had, and `ValueError`
    for a run of plain decoding.
    """
    if run.installed is None:
        raise ValueError("plain decoding has no drafter")
    spec = run.installed.spec
    who = f"{run.installed.distribution} {run.installed.version}"
    cannot = f"--speculative-algorithm {run.word}: the drafter {spec.drafter!r} of {who}"
    module, _, name = spec.drafter.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {shown(str(error))}"
        raise UserError(f"{cannot} cannot be imported ({cause}): reinstall it, or choose another algorithm") from error
    from specplug.drafter import Drafter  # imports torch, which the drafter needs anyway

    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise UserError(f"{cannot} is {shown(found)}, not a subclass of specplug.Drafter: report it to its authors")
    return found
