"""One run, settled before any weight loads: resolve -> defaults -> validate -> plan -> check. Torch-free.

The engine, `specplug doctor` and every other command go through `plan_run`, so what `doctor` says
is what happens.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specplug.adaptive.depths import SWITCH, Depths, Request
from specplug.adaptive.settle import Adapted, adapt
from specplug.errors import RefusedError, UserError
from specplug.names import fold
from specplug.resolve import resolve
from specplug.settings import answers_of, flag, is_reserved, settle, shown
from specplug.spec import (
    DraftPlan,
    Facts,
    Problem,
    Refusal,
    RunInfo,
    Setting,
    SpecConfig,
    TapRequest,
)

if TYPE_CHECKING:
    from specplug.registry import Installed, Registry

NONE = "none"
"""The reserved word for plain decoding."""

_FEATURES = {
    "rollback": "taking back the KV of rejected drafts, which a target with recurrent state cannot",
    "tree_verify": "verifying several branches at once",
    "taps": "reading hidden states of the target",
    "own_kv": "keeping KV of the drafter's own on the target's pages",
    "read_kv": "reading the target's KV",
}


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
            return _plain(word, given, facts, trace, adaptive)
        return _drafted(registry, word, resolution.installed, given, facts, trace, adaptive)
    except RefusedError as error:
        raise RefusedError(str(error), (*trace, *error.trace)) from error.__cause__
    except UserError as error:
        raise RefusedError(str(error), tuple(trace)) from error.__cause__


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
        raise _bug(installed, f"its options {', '.join(reserved)} have names that the core keeps for itself")
    facts = _with_planner(registry, facts, (spec.name,))
    settled = settle(registry, installed, given, facts)
    trace += settled.trace
    answer = _ask(installed, settled.config, facts)
    if isinstance(answer, Refusal):
        raise RefusedError(f"{spec.name!r} cannot run here: {_sentence(answer.reason, answer.try_instead)}")
    adapted = Adapted(settled, answer, None, ())
    if adaptive is not None:
        adapted = adapt(
            adaptive,
            given,
            settled,
            answer,
            settle=lambda values: settle(registry, installed, values, facts),
            ask=lambda config, depth: _ask(installed, config, facts, depth),
            bug=lambda said: _bug(installed, said),
        )
        trace += adapted.trace
    settled, answer, depths = adapted.settled, adapted.plan, adapted.depths
    trace.append(
        f"plan: {answer.nodes} drafts of depth {answer.depth}, {'/'.join(sorted(answer.needs.shapes))}, "
        f"{answer.bytes_fixed + answer.bytes_per_slot * facts.limits.max_running_requests} bytes"
    )
    if depths is not None:
        trace += depths.lines()
    _check_features(installed, answer, facts)
    warnings = (*settled.warnings, *_objections(registry, installed, settled.config, answer, facts, trace))
    if adapted.warning is not None:
        trace.append(f"warning: {adapted.warning.message}")
        warnings = (*warnings, adapted.warning)
    name = spec.name
    return Run(word, name, installed, settled.config, answer, settled.settings, facts, tuple(trace), warnings, depths)


# --- planning and what the core checks itself ------------------------------------------------------------------------


def _bug(installed: "Installed", said: str) -> RefusedError:
    who = f"{installed.distribution} {installed.version}"
    return RefusedError(f"{installed.spec.name!r} cannot be used, a fault of {who}: {said}; report it to its authors")


def _ask(installed: "Installed", config: SpecConfig, facts: Facts, depth: int | None = None) -> DraftPlan | Refusal:
    """Call a package's `plan`, and hold the answer to what its manifest and the contract allow."""
    spec = installed.spec
    try:
        plan = spec.plan(config, facts, depth)
    except Exception as error:
        raise _bug(installed, f"plan raised {type(error).__name__}: {shown(str(error))}") from error
    if isinstance(plan, Refusal):
        return plan
    if not isinstance(plan, DraftPlan):
        raise _bug(installed, f"plan returned {shown(plan)}, neither a DraftPlan nor a Refusal")
    faults = list(_faults(plan, config))
    over = plan.needs.exceeding(spec.capabilities)
    if over:
        faults.insert(0, f"its plan needs more {', '.join(over)} than its manifest declares")
    if faults:
        raise _bug(installed, "; ".join(faults))
    return plan


def _faults(plan: DraftPlan, config: SpecConfig) -> Iterator[str]:
    if plan.depth > plan.nodes or (plan.nodes > 0 and plan.depth == 0):
        yield f"its plan drafts {plan.nodes} tokens with a longest path of {plan.depth}"
    if config.num_draft_tokens is not None and plan.nodes >= config.num_draft_tokens:
        yield f"its plan drafts {plan.nodes} tokens where num_draft_tokens {config.num_draft_tokens} leaves one fewer"
    if TapRequest(at="any") in plan.needs.taps:
        yield "its plan asks for a tap without saying which"
    if plan.catch_up == "tokens" and plan.needs.taps:
        yield "its plan catches up from tokens and still needs taps"


def features_needed(plan: DraftPlan) -> tuple[str, ...]:
    """Return the entries of `Facts.features` without which this plan cannot run."""
    needs = plan.needs
    wanted = {
        "rollback": plan.nodes > 0,
        "tree_verify": "tree" in needs.shapes,
        "taps": bool(needs.taps),
        "own_kv": bool(plan.kv) or "own_layers" in needs.draft_kv,
        "read_kv": "reads_target" in needs.draft_kv,
    }
    return (*(name for name, needed in wanted.items() if needed), *(f"borrow:{part}" for part in sorted(needs.borrows)))


def _check_features(installed: "Installed", plan: DraftPlan, facts: Facts) -> None:
    missing = [name for name in features_needed(plan) if name not in facts.features]
    if not missing:
        return
    why = "; ".join(f"{name} ({_FEATURES.get(name, 'sharing a module of the target')})" for name in missing)
    has = ", ".join(sorted(facts.features)) or "nothing of the kind"
    raise RefusedError(
        f"{installed.spec.name!r} needs what this target and host do not offer: {why}; they offer {has}: "
        f"choose options or an algorithm that need no more, or --speculative-algorithm {NONE}"
    )


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
            line = f"{field}{_sentence(problem.message, problem.try_instead)} ({who})"
            trace.append(f"{problem.severity}: {line}")
            if problem.severity == "error":
                errors.append(line)
            else:
                warnings.append(problem)
    if errors:
        raise RefusedError("; ".join(errors))
    return tuple(warnings)


def _sentence(reason: str, try_instead: str) -> str:
    return f"{reason}: try {try_instead}" if try_instead else reason


# --- Facts.plan_of ---------------------------------------------------------------------------------------------------


def _with_planner(registry: "Registry", facts: Facts, busy: tuple[str, ...]) -> Facts:
    """Return facts whose `plan_of` plans other installed algorithms; `busy` are those being planned now."""

    def planner(name: str, config: SpecConfig | Mapping[str, Any], depth: int | None = None) -> Run | Refusal:
        word = fold(name)
        installed = registry.algorithms.get(word)
        if installed is None:
            have = ", ".join(sorted(registry.algorithms)) or "nothing"
            return Refusal(reason=f"no algorithm {name!r} is installed (installed: {have})")
        if word in busy:
            return Refusal(reason=f"{' -> '.join((*busy, word))}: an algorithm cannot be part of itself")
        inner = _with_planner(registry, facts, (*busy, word))
        try:
            settings: tuple[Setting, ...] = ()
            if not isinstance(config, SpecConfig):
                settled = settle(registry, installed, config, inner)
                config, settings = settled.config, settled.settings
            plan = _ask(installed, config, inner, depth)
            if isinstance(plan, Refusal):
                return plan
            return Run(name, word, installed, config, plan, settings, inner, (), ())
        except UserError as error:  # a combinator must be able to fall back: its `plan` never raises
            return Refusal(reason=str(error))

    copy = facts.model_copy()
    copy._planner = planner
    return copy


def run_of(facts: Facts, name: str, config: SpecConfig | Mapping[str, Any]) -> Run:
    """Settle another installed algorithm as `Facts.plan_of` does; raises `RefusedError` where that refuses."""
    planned = facts._planner(name, config, None) if facts._planner is not None else facts.plan_of(name, config)
    if isinstance(planned, Refusal):
        raise RefusedError(f"{name!r} cannot be a part here: {_sentence(planned.reason, planned.try_instead)}")
    assert isinstance(planned, Run)
    return planned


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
