"""The five hooks, all called at set-up time and never between two steps.

Every answer is collected (no `firstresult`, no wrappers). An implementation may take a subset of the
parameters; a parameter with a default value is refused, because pluggy up to 1.6 never fills it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from specplug.spec import (
    AlgorithmSpec,
    Claim,
    Defaults,
    DraftPlan,
    Facts,
    Observer,
    Problem,
    Refusal,
    RunInfo,
    SpecConfig,
)

PROJECT = "specplug"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """What a plugin module may implement. An algorithm plugin needs the first only."""

    @hookspec
    def specplug_algorithms(self) -> Sequence[AlgorithmSpec]:  # type: ignore[empty-body]
        """Return the algorithms this package offers. Must not import torch."""

    @hookspec
    def specplug_resolve_name(self, name: str, facts: Facts) -> Claim | Refusal | None:
        """Say whether `name` (folded) means another algorithm for these models, or None.

        Asked for exact names too, and a second time with `Facts.empty()`: a claim on a word the
        package does not own must disappear then, or it was not made on facts.
        """

    @hookspec
    def specplug_defaults(
        self, algorithm: str, given: Mapping[str, Any], facts: Facts
    ) -> Defaults | Sequence[Defaults] | None:
        """Propose values for fields left unset; `given` is what the user set. Return, never mutate.

        A package answers for its own algorithms; answers from the group `specplug.policies` rank above them.
        """

    @hookspec
    def specplug_check(
        self, algorithm: str, config: SpecConfig, plan: DraftPlan, facts: Facts
    ) -> Sequence[Problem] | None:
        """Object to a settled configuration. All objections are shown together."""

    @hookspec
    def specplug_observer(self, run: RunInfo) -> Observer | None:
        """Return an observer of finished steps, or None."""
