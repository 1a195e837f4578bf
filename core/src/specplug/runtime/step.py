"""The core step: one target forward, acceptance, commit, and the drafts for the next one.

schedule -> forward -> accept -> device commit -> ingest -> propose, and the host commit as soon as the
host knows. An `Executor` launches the device's half; this is the host's.
"""

from __future__ import annotations

from time import perf_counter

from specplug.runtime.commit import Outcome, commit
from specplug.runtime.drafting import Drafting
from specplug.runtime.executor import Launched
from specplug.runtime.scheduler import Row
from specplug.spec import StepStats


def finish(launched: Launched, drafting: Drafting | None) -> StepStats:
    """Wait for a step, commit it, and have drafts made where that could not begin before.

    Requests are changed here and nowhere else in a step; a row whose request has ended since is skipped.
    Whether the drafter failed, `drafting` knows.
    """
    begin = perf_counter()
    outcomes = launched.outcomes()
    waited = perf_counter()
    pairs = [(row, outcome) for row, outcome in zip(launched.rows, outcomes, strict=True) if _is_alive(row)]
    emitted = [commit(row, outcome) for row, outcome in pairs]
    if drafting is not None and not drafting.failed:
        drafting.observe(launched, pairs)
    committed = perf_counter()
    launched.draft()
    drafted = perf_counter()
    seconds = {**launched.seconds, "wait": waited - begin, "commit": committed - waited}
    if drafting is not None:
        seconds["draft"] = seconds.get("draft", 0.0) + drafted - committed
    return _stats(launched, pairs, emitted, drafting, seconds)


def _is_alive(row: Row) -> bool:
    return row.request.slot == row.slot and row.request.output.finish_reason is None


def _stats(
    launched: Launched,
    pairs: list[tuple[Row, Outcome | None]],
    emitted: list[int],
    drafting: Drafting | None,
    seconds: dict[str, float],
) -> StepStats:
    decided = [(outcome, kept) for (_, outcome), kept in zip(pairs, emitted, strict=True) if outcome]
    drafts = [outcome.draft for outcome, _ in decided if outcome.draft]
    return StepStats(
        rows=len(launched.rows),
        tokens=sum(row.q_len for row in launched.rows),
        drafted=sum(len(draft.tokens) for draft in drafts),
        accepted=sum(min(len(outcome.verdict.path), kept) for outcome, kept in decided),
        emitted=sum(emitted),
        depth=launched.depth if drafting else 0,
        drafted_rows=len(drafts),
        first_accepted=sum(bool(outcome.verdict.path) for outcome, _ in decided),
        seconds=seconds,
        exposed=launched.exposed(),
        graph=launched.graph,
    )
