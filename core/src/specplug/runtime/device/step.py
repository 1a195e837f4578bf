"""A step on its way on the device, and what the host makes of its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from specplug.accept import Verdict
from specplug.runtime.commit import Outcome
from specplug.runtime.device.packing import Packed
from specplug.runtime.device.reports import Line, Report
from specplug.runtime.device.stream import Mark
from specplug.runtime.drafting import Wish
from specplug.runtime.logprobs import TokenLogprob, token_logprobs
from specplug.runtime.request import Draft
from specplug.runtime.scheduler import Row

if TYPE_CHECKING:
    from specplug.runtime.device.executor import DeviceExecutor


class StepMarks(NamedTuple):
    """Points of a step in the stream, timed."""

    begun: Mark
    decided: Mark
    over: Mark


class DeviceStep:
    """The `Launched` of a `DeviceExecutor`."""

    def __init__(
        self,
        executor: DeviceExecutor,
        rows: Sequence[Row],
        packed: Packed,
        wishes: Sequence[Wish],
        report: Report,
        marks: StepMarks,
        before: StepMarks | None,
    ) -> None:
        """`wishes`: of the drafter that ran already, if one did; `before`: the marks of the step before."""
        self.rows = rows
        self.seconds: dict[str, float] = {}
        self.graph: bool | None = None
        self.depth = 0
        self._executor = executor
        self._packed = packed
        self._wishes = wishes
        self._report = report
        self._marks = marks
        self._before = before
        self._logits: dict[int, Tensor] = {}

    def keep_logits(self, logits: Tensor, starts: Sequence[int]) -> None:
        """Copy the logits that log-probabilities will be read from, before another step overwrites them."""
        for at, (row, start) in enumerate(zip(self.rows, starts, strict=True)):
            if start >= 0 and row.request.sampling.logprobs:
                self._logits[at] = logits[start : start + 1 + row.drafted].clone()

    def outcomes(self) -> list[Outcome | None]:
        """See `Launched`."""
        told = enumerate(zip(self.rows, self._report.read(), strict=True))
        return [self._outcome(at, row, line) if row.final else None for at, (row, line) in told]

    def draft(self) -> None:
        """See `Launched`: what ran already has its width set now that the lengths are known."""
        for row in self.rows:
            if row.request.output.finish_reason is not None:
                self._executor.forget(row.slot)
        for wish in self._wishes:
            request = wish.request
            if request.slot == wish.slot and request.output.finish_reason is None:
                request.drafted = wish.limit(request.kv_len)
                wish.take(request.drafted)
        drafting = self._executor.drafting
        if drafting is not None and drafting.on_host:
            self.depth = self._executor.host_draft(self.rows, self._packed)

    def exposed(self) -> float | None:
        """See `Launched`: of decoding steps only, because before a prompt the device may have had nothing to do."""
        if self._before is None or any(len(row.tokens) > 1 for row in self.rows):
            return None
        return self._marks.begun.seconds_since(self._before.over)

    def took(self) -> tuple[float | None, float | None]:
        """See `Launched`."""
        marks, before = self._marks, self._before
        between = marks.begun.seconds_since(before.decided) if before is not None else None
        return marks.decided.seconds_since(marks.begun), between

    def _outcome(self, at: int, row: Row, line: Line) -> Outcome:
        draft = row.draft
        if draft is None and line.valid:
            drafting, tokens, parents = self._executor.drafting, line.tokens, line.parents
            assert drafting is not None
            sound = drafting.sound(row.slot, tokens, parents)
            del tokens[sound:], parents[sound:]
            draft = Draft(tokens, parents, None) if sound else None
        error = self._report.errors.get(at, "")
        if line.token < 0 and not error:
            place = len(row.request.output.ids) + len(line.path)
            error = (
                f"no token is left at output position {place}: min_tokens, logit_bias, the filters and what the model "
                "suppresses together forbid all"
            )
        verdict = Verdict(line.path, max(line.token, 0), error)
        return Outcome(verdict, draft, self._logprobs(at, row, draft, verdict) if self._logits else ())

    def _logprobs(self, at: int, row: Row, draft: Draft | None, verdict: Verdict) -> list[TokenLogprob]:
        if at not in self._logits:
            return []
        outcome = Outcome(verdict, draft)
        nodes = [0, *(node + 1 for node in verdict.path)][: len(outcome.tokens)]
        return token_logprobs(self._logits[at][nodes], outcome.tokens, row.request.sampling.top_logprobs)
