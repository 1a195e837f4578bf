"""The core step: one target forward, acceptance, commit, and the drafts for the next one.

schedule -> forward -> accept -> device commit -> ingest -> propose, and the host commit as soon as the
host knows. An `Executor` launches the device's half; this is the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from specplug.runtime.commit import Outcome, commit
from specplug.runtime.drafting import Drafting
from specplug.runtime.executor import Launched
from specplug.runtime.scheduler import Row
from specplug.spec import StepStats


class Finished(NamedTuple):
    """A step that the host has committed. Made by `finish`."""

    launched: Launched
    pairs: Sequence[tuple[Row, Outcome | None]]
    """The rows that counted, with their outcomes."""
    emitted: Sequence[int]
    """Tokens of each that became output."""
    seconds: Mapping[str, float]

    def stats(self) -> StepStats:
        """Have the requests count what the step came to, and return its numbers.

        Nothing of the next step depends on either, so that both can wait for its launch.
        """
        for row, _ in self.pairs:
            row.request.count()
        launched = self.launched
        decided = [(outcome, kept) for (_, outcome), kept in zip(self.pairs, self.emitted, strict=True) if outcome]
        drafts = [outcome.draft for outcome, _ in decided if outcome.draft]
        return StepStats(
            rows=len(launched.rows),
            tokens=sum(row.q_len for row in launched.rows),
            drafted=sum(len(draft.tokens) for draft in drafts),
            accepted=sum(min(len(outcome.verdict.path), kept) for outcome, kept in decided),
            emitted=sum(self.emitted),
            depth=launched.depth,
            drafted_rows=len(drafts),
            first_accepted=sum(bool(outcome.verdict.path) for outcome, _ in decided),
            seconds=self.seconds,
            exposed=launched.exposed(),
            graph=launched.graph,
        )


def finish(launched: Launched, drafting: Drafting | None, scheduling: float) -> Finished:
    """Wait for a step, commit it, and have drafts made where that could not begin before.

    Requests are changed here and nowhere else in a step; a row whose request has ended since is skipped.
    Whether the drafter failed, `drafting` knows. `scheduling`: seconds that choosing the step's rows took.
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
    seconds = {"schedule": scheduling, **launched.seconds, "wait": waited - begin, "commit": committed - waited}
    if drafting is not None:
        seconds["draft"] = seconds.get("draft", 0.0) + drafted - committed
    return Finished(launched, pairs, emitted, seconds)


def _is_alive(row: Row) -> bool:
    return row.request.slot == row.slot and row.request.output.finish_reason is None
