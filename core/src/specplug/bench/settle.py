"""Every column planned, or the comparison refused, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from specplug.adaptive.depths import adaptive_request
from specplug.bench.columns import DRAFT_PATH, ColumnSpec
from specplug.errors import RefusedError, UserError
from specplug.facts import facts_of
from specplug.options import EngineOptions
from specplug.planning import NONE, Run, plan_run
from specplug.registry import Registry
from specplug.settings import option_of
from specplug.spec import Checkpoint


def settle_columns(
    registry: Registry, columns: Sequence[ColumnSpec], checkpoint: Checkpoint, options: EngineOptions
) -> dict[str, Run]:
    """Return each column's run by its label.

    `options` are those of all columns. Raises UserError, or RefusedError, which names the column.
    """
    shared = facts_of(checkpoint, options, draft_files=registry.draft_files)
    runs = {}
    for column in columns:
        own = column.engine_options(options)
        try:
            facts = shared if own is options else facts_of(checkpoint, own, draft_files=registry.draft_files)
            run = plan_run(registry, column.algorithm, column.config, facts, adaptive_request(own))
        except RefusedError as error:
            said = f"--algorithms {column.label}: {error}{_elsewhere(column, str(error))}"
            raise RefusedError(said, error.trace) from None
        except UserError as error:
            raise UserError(f"--algorithms {column.label}: {error}") from None
        idle = [name for name, value in column.options.items() if value not in (None, False)]
        if run.algorithm == NONE and idle:
            raise UserError(
                f"--algorithms {column.label}: {option_of(idle[0])} has no effect with --speculative-algorithm {NONE}: "
                "name an algorithm, or leave it out"
            )
        runs[column.label] = run
    return runs


def _elsewhere(column: ColumnSpec, said: str) -> str:
    """Return how a draft model is given to one column, where this one misses it or objects to that of all."""
    if option_of(DRAFT_PATH) not in said or DRAFT_PATH in column.options:
        return ""
    return f"; one column's own draft model is {DRAFT_PATH} in its FILE.json"
