"""Checks of what a package declares: manifest, options, plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from packaging.requirements import Requirement
from pydantic import BaseModel, ValidationError

from specplug.distributions import ALGORITHMS
from specplug.errors import UserError
from specplug.names import fold
from specplug.spec import (
    Checkpoint,
    DraftPlan,
    Facts,
    Refusal,
    SpecConfig,
)
from specplug.testing.bench import Bench

_SHARED = frozenset({"num_draft_tokens", "num_steps", "eagle_topk", "draft_sampling"})
_LOWER, _UPPER = {">=", ">", "~=", "=="}, {"<", "<=", "~=", "=="}


class DeclaredChecks:
    """Nothing here runs a model."""

    algorithm: str

    def test_manifest_is_light(self, bench: Bench) -> None:
        """Importing the manifest in a fresh interpreter leaves torch and transformers unimported."""
        module = _module(bench)
        code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
        paths = [*(bench.path or ()), *sys.path]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
        assert done.returncode == 0, f"importing {module} alone fails: {done.stderr}"
        assert done.stdout.strip() == "[]", f"importing {module} imports {done.stdout.strip()}"

    def test_manifest_loads(self, bench: Bench) -> None:
        """The registry takes the entry point: hooks are plain, names agree, the API version fits, needs are met."""
        found = [record for record in bench.registry.records if record.word == self.algorithm]
        assert found, f"no installed distribution has the entry point {self.algorithm!r}"
        bench.registry.load()
        (record,) = [record for record in bench.registry.records if record.word == self.algorithm]
        assert record.state == "loaded", f"{record.label} is {record.state}: {record.reason} {record.traceback}"

    def test_core_range_has_both_bounds(self, bench: Bench) -> None:
        """The distribution requires specplug from a version on and below another."""
        lines = list(bench.distribution.requires_of("specplug"))
        plain = [Requirement(line) for line in lines if "extra" not in str(Requirement(line).marker or "")]
        assert plain, f"{bench.distribution.name} does not require specplug"
        operators = {clause.operator for requirement in plain for clause in requirement.specifier}
        assert operators & _LOWER, f"{plain[0]} has no lower bound"
        assert operators & _UPPER, f"{plain[0]} has no upper bound"

    def test_config_round_trips(self, bench: Bench) -> None:
        """Defaults are valid, survive JSON, cannot be changed; an unknown key is refused."""
        model = bench.spec.config_model
        config = model()
        assert model.model_validate_json(config.model_dump_json()) == config
        assert model(**config.model_dump()) == config, "a default does not pass its own validation"
        with pytest.raises(ValidationError):
            model(no_such_option=1)  # type: ignore[call-arg]
        with pytest.raises(ValidationError):
            setattr(config, "num_draft_tokens", 2)  # noqa: B010 (the assignment is what must fail)

    def test_options_are_described(self, bench: Bench) -> None:
        """Every option has a description, and a name that is shared or starts with a word of the package."""
        words = {fold(bench.spec.name).split("-")[0], fold(bench.distribution.name).split("-")[-1]}
        for name, field in bench.spec.config_model.model_fields.items():
            assert field.description, f"option {name!r} has no description"
            own = any(name.startswith(f"{word}_") for word in words)
            assert name in _SHARED or own, f"option {name!r} must start with one of {sorted(words)}"

    def test_plan_never_raises(self, bench: Bench) -> None:
        """`plan` answers over a grid of options, depths and facts, the same when asked twice."""
        for config, facts, depth in _grid(bench):
            where = f"plan({config!r}, depth={depth}, features={sorted(facts.features)})"
            try:
                answer = bench.spec.plan(config, facts, depth)
            except Exception as error:
                raise AssertionError(f"{where} raised {error!r}") from error
            assert isinstance(answer, DraftPlan | Refusal), f"{where} returned {answer!r}"
            assert bench.spec.plan(config, facts, depth) == answer, f"{where} answers differently when asked again"

    def test_plan_keeps_its_bounds(self, bench: Bench) -> None:
        """Nodes stay below `num_draft_tokens`, depth below nodes and the depth asked for, needs within the manifest."""
        for config, facts, depth in _grid(bench):
            plan = bench.spec.plan(config, facts, depth)
            if isinstance(plan, Refusal):
                assert plan.reason.strip(), "a refusal must give its reason"
                continue
            where = f"plan({config!r}, depth={depth})"
            assert plan.depth <= plan.nodes, f"{where}: depth {plan.depth} of {plan.nodes} nodes"
            if config.num_draft_tokens is not None:
                assert plan.nodes < config.num_draft_tokens, f"{where}: {plan.nodes} nodes and the root are too many"
            if depth is not None:
                assert plan.depth <= depth, f"{where}: depth {plan.depth}"
            over = plan.needs.exceeding(bench.spec.capabilities)
            assert not over, f"{where} needs more {over} than the manifest declares"


def _module(bench: Bench) -> str:
    points = [point for point in bench.distribution.entry_points if point.group == ALGORITHMS]
    (module,) = [point.value for point in points if fold(point.name) == bench.subject.algorithm]
    return module


def _grid(bench: Bench) -> Iterator[tuple[SpecConfig, Facts, int | None]]:
    model: type[BaseModel] = bench.spec.config_model
    real = bench.facts()
    bare = Facts.empty()
    many = real.model_copy(update={"limits": real.limits.model_copy(update={"max_running_requests": 256})})
    drafted = bare.model_copy(update={"draft": Checkpoint(), "features": real.features})
    unread = real.model_copy(update={"target": real.target.model_copy(update={"tensors": None})})
    for tokens, facts, depth in product(
        (None, 1, 2, 3, 5, 8, 17, 64), (real, bare, many, drafted, unread), (None, 0, 1, 2, 8)
    ):
        values: dict[str, Any] = {**bench.config(), "num_draft_tokens": tokens}
        try:
            config = model(**values)
        except (ValidationError, UserError):  # out of the package's own range
            continue
        assert isinstance(config, SpecConfig)
        yield config, facts, depth
