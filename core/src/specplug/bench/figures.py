"""From runs to figures: medians with their quartiles, ratios of pairs, pooled ledgers.

A ratio is taken per batch, against the first column's run of the same batch in the same repetition, and
then the median over batches: what the machine did meanwhile weighs on both sides of each pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specplug.bench.floor import Floor
from specplug.bench.measure import Answer, BatchRun
from specplug.runtime.ledger import MEANS, Ledger, pooled

STAGES = ("schedule", "plan", "forward", "accept", "wait", "commit", "draft", "other")
"""Host time of a step, in order; ``wait`` is for a device, ``other`` what the step's wall time holds beside them."""

_VERIFY = ("plan", "forward", "accept", "wait")

Figures = dict[str, Any]


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return count, median and quartiles, None over nothing. None among `values` is left out."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return {"count": len(found), "median": middle, "q1": low, "q3": high}


def figures(runs: Mapping[str, Sequence[BatchRun]], floor: Floor | None) -> dict[str, Figures]:
    """Return every column's figures; the first column is what ratios refer to."""
    base = next(iter(runs.values()))
    return {label: _column(each, base, floor) for label, each in runs.items()}


def _column(runs: Sequence[BatchRun], base: Sequence[BatchRun], floor: Floor | None) -> Figures:
    answers = [answer for run in runs for answer in run.answers]
    steps, decoded = sum(run.steps for run in runs), sum(run.decode_tokens for run in runs)
    decode_seconds, prefill_seconds = (
        sum(run.decode_seconds for run in runs),
        sum(run.prefill_seconds for run in runs),
    )
    speed = _ratio(decoded, decode_seconds)
    rows, width = _ratio(sum(run.rows for run in runs), steps), _ratio(sum(run.width for run in runs), steps)
    at_floor = None
    if floor is not None and speed and answers:
        context = statistics.fmean(len(answer.item.ids) + len(answer.ids) / 2 for answer in answers)
        plain_rows = rows or len(runs[0].answers)
        at_floor = speed * floor.step_seconds(plain_rows, context) / plain_rows
    peaks = [run.peak_pages for run in runs if run.peak_pages is not None]
    return {
        "answers": len(answers),
        "output_tokens": sum(len(answer.ids) for answer in answers),
        "decode": {
            "tokens": decoded,
            "seconds": decode_seconds,
            "tokens_per_second": spread(run.speed for run in runs),
            "tokens_per_second_total": speed,
            "tpot_ms": spread(_ms(answer.seconds_per_token) for answer in answers),
            "share_of_floor": at_floor,
        },
        "prefill": {
            "tokens": sum(run.prompt_tokens for run in runs),
            "seconds": prefill_seconds,
            "batch_ms": spread(_ms(run.prefill_seconds) for run in runs),
            "first_token_ms": spread(_ms(answer.first) for answer in answers if answer.ids),
            "tokens_per_second": _ratio(sum(run.prompt_tokens for run in runs), prefill_seconds),
        },
        "speed_up": {
            "decode": spread(_pairs(runs, base, _decode_ratio)),
            "decode_total": _divided(
                speed, _ratio(sum(run.decode_tokens for run in base), sum(run.decode_seconds for run in base))
            ),
            "with_prefill": spread(_pairs(runs, base, _whole_ratio)),
        },
        "steps": _steps(runs, steps) | {"rows": rows, "width": width},
        "peak_pages": max(peaks, default=None),
        "ledger": ledger(answers),
        "categories": _categories(runs, base),
        "runs": [_run(run) for run in runs],
    }


def ledger(answers: Sequence[Answer]) -> Figures | None:
    """Return the pooled ledger with its means over requests; None where the column keeps none."""
    ledgers = [answer.ledger for answer in answers if answer.ledger is not None]
    if not ledgers:
        return None
    return pooled(ledgers).report() | {"mean_of_requests": _means(ledgers)}


def _means(ledgers: Sequence[Ledger]) -> dict[str, float]:
    reports = [one.report() for one in ledgers if one.rounds]
    return {name: statistics.fmean(report[name] for report in reports) if reports else 0.0 for name in MEANS}


def _steps(runs: Sequence[BatchRun], steps: int) -> Figures:
    """Return host milliseconds per decode step by stage, the shares of draft, verify and host, and the device's."""
    spent = {stage: sum(run.stages.get(stage, 0.0) for run in runs) for stage in STAGES}
    graphed = [each for run in runs for each in run.graphed]
    device: Figures = {
        "exposed_ms": spread(_ms(seconds) for run in runs for seconds in run.exposed),
        "graph_share": _ratio(sum(graphed), len(graphed)) if graphed else None,
    }
    if not any(run.stages for run in runs):
        return {"count": steps, "ms": None, "time_share": None} | device
    whole = sum(spent.values())
    verify, draft = sum(spent[stage] for stage in _VERIFY), spent["draft"]
    return {
        "count": steps,
        "ms": {stage: _ratio(1e3 * seconds, steps) for stage, seconds in spent.items()},
        "time_share": {
            "draft": _ratio(draft, whole),
            "verify": _ratio(verify, whole),
            "host": _ratio(whole - verify - draft, whole),
        },
    } | device


def _categories(runs: Sequence[BatchRun], base: Sequence[BatchRun]) -> dict[str, Figures]:
    """Return figures per category, by request: a batch may hold several. Empty if no prompt has one."""
    found: dict[str, list[tuple[Answer, Answer]]] = {}
    for mine, theirs in zip(runs, base, strict=True):
        for pair in zip(mine.answers, theirs.answers, strict=True):
            if pair[0].item.source.category:
                found.setdefault(pair[0].item.source.category, []).append(pair)
    return {
        name: {
            "answers": len(pairs),
            "tpot_ms": spread(_ms(mine.seconds_per_token) for mine, _ in pairs),
            "speed_up": spread(_divided(theirs.seconds_per_token, mine.seconds_per_token) for mine, theirs in pairs),
            "ledger": ledger([mine for mine, _ in pairs]),
        }
        for name, pairs in found.items()
    }


def _run(run: BatchRun) -> Figures:
    return {
        "prompts": [answer.item.source.number for answer in run.answers],
        "turn": run.answers[0].item.turn if run.answers else 0,
        "prompt_tokens": run.prompt_tokens,
        "prefill_seconds": run.prefill_seconds,
        "decode_tokens": run.decode_tokens,
        "decode_seconds": run.decode_seconds,
        "steps": run.steps,
        "peak_pages": run.peak_pages,
    }


def _pairs(
    runs: Sequence[BatchRun], base: Sequence[BatchRun], ratio: Callable[[BatchRun, BatchRun], float | None]
) -> list[float | None]:
    return [ratio(mine, theirs) for mine, theirs in zip(runs, base, strict=True)]


def _decode_ratio(mine: BatchRun, theirs: BatchRun) -> float | None:
    return _divided(mine.speed, theirs.speed)


def _whole_ratio(mine: BatchRun, theirs: BatchRun) -> float | None:
    """Ratio of output tokens per second from submission to the last token."""
    each = [_divided(sum(len(answer.ids) for answer in run.answers), run.seconds) for run in (mine, theirs)]
    return _divided(*each)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _divided(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
