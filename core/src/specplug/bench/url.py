"""``specplug bench --url``: load on a running server, percentiles of its times, and its ledger's gain. Torch-free."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from specplug.bench.load import Endpoint, Load, Timing
from specplug.cli.prompts import Conversation
from specplug.errors import UserError
from specplug.runtime.ledger import Ledger

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class UrlJob:
    """One comparison of loads on one server."""

    target: Endpoint
    model: str | None
    """The served model's name; None: the first that the server lists."""
    conversations: Sequence[Conversation]
    sampling: Mapping[str, Any]
    clients: Sequence[int]
    """Closed loop: clients at once, one row each."""
    rates: Sequence[float]
    """Open loop: conversations started a second, one row each; instead of `clients`."""
    seed: int
    repeat: int
    json_path: str | None


def run(job: UrlJob) -> int:
    """Put each load on the server, print the figures; returns 1 where a request failed."""
    model = job.model or _first_model(job.target)
    load = Load(job.target, job.conversations, {"model": model, **job.sampling}, job.seed)
    report: dict[str, Any] = {"url": job.target.url, "model": model, "sampling": dict(job.sampling), "loads": []}
    levels = [("rate", rate) for rate in job.rates] or [("clients", clients) for clients in job.clients]
    for kind, level in levels:
        before, begin, timings = ledger_of(job.target), perf_counter(), []
        for _ in range(job.repeat):
            timings += load.open(level) if kind == "rate" else load.closed(int(level))
        seconds = perf_counter() - begin
        report["loads"].append({kind: level, **figures(timings, seconds), "ledger": gained(before, job.target)})
    out = sys.stderr if job.json_path == "-" else sys.stdout
    for line in lines(report):
        print(line, file=out)
    if job.json_path is not None:
        _write(job.json_path, report)
    return int(any(each["failed"] for each in report["loads"]))


def _first_model(target: Endpoint) -> str:
    try:
        found = target.get("/v1/models")
        return str(found["data"][0]["id"])
    except OSError as error:
        raise UserError(f"--url {target.url}: nobody answers there ({error}): start the server first") from None
    except (TypeError, KeyError, IndexError):
        raise UserError(
            f"--url {target.url}: it does not list a model at /v1/models: name it as MODEL, or set the API key"
        ) from None


def figures(timings: Sequence[Timing], seconds: float) -> dict[str, Any]:
    """Return counts, rates and percentiles (milliseconds) of the requests that were answered."""
    answered = [timing for timing in timings if not timing.error]
    tokens = sum(timing.tokens for timing in answered)
    errors = [timing.error for timing in timings if timing.error]
    return {
        "requests": len(timings),
        "failed": len(errors),
        "errors": sorted(set(errors))[:5],
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "requests_per_second": len(answered) / seconds if seconds else 0.0,
        "ttft_ms": percentiles(1e3 * (one.first - one.due) for one in answered if one.first is not None),
        "itl_ms": percentiles(1e3 * gap for one in answered for gap in one.gaps),
        "tpot_ms": percentiles(
            1e3 * (one.last - one.first) / (one.tokens - 1)
            for one in answered
            if one.first is not None and one.tokens > 1
        ),
        "whole_ms": percentiles(1e3 * (one.last - one.due) for one in answered),
    }


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Return p50, p90 and p99 by the nearest rank, with the count; None over nothing."""
    found = sorted(values)
    if not found:
        return None
    ranks = {f"p{share}": found[math.ceil(share / 100 * len(found)) - 1] for share in PERCENTILES}
    return {"count": len(found), **ranks}


def ledger_of(target: Endpoint) -> Ledger | None:
    """Return the server's acceptance ledger, None where it keeps none that can be read."""
    try:
        found = target.get("/server_info")
        return Ledger(**{name: found["ledger"][name] for name in Ledger.__slots__})
    except (OSError, TypeError, KeyError):
        return None


def gained(before: Ledger | None, target: Endpoint) -> dict[str, Any] | None:
    """Return the report of what the server's ledger gained since `before`, other clients' requests included."""
    after = ledger_of(target)
    if before is None or after is None:
        return None
    change = Ledger()
    for name in Ledger.__slots__:
        new, old = getattr(after, name), getattr(before, name)
        if isinstance(new, list):
            old = [*old, *[0] * (len(new) - len(old))]
            setattr(change, name, [max(0, a - b) for a, b in zip(new, old, strict=True)])
        else:
            setattr(change, name, max(0, new - old))
    return change.report()


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    found = [f"{report['model']} at {report['url']}; times in ms as p50 / p90 / p99"]
    for each in report["loads"]:
        head = f"{each['rate']:g} requests/s" if "rate" in each else f"{each['clients']} clients"
        found.append(
            f"{head}: {each['requests']} requests, {each['failed']} failed, {each['seconds']:.1f} s, "
            f"{each['tokens_per_second']:.1f} tokens/s, {each['requests_per_second']:.2f} requests/s"
        )
        names = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("whole", "whole_ms"))
        found.append("  " + "; ".join(f"{name} {_shown(each[key])}" for name, key in names))
        found += [f"  failed: {error}" for error in each["errors"]]
        if (ledger := each["ledger"]) is not None:
            depths = ", ".join(f"{at['conditional']:.2f}" for at in ledger["acceptance_by_depth"]) or "-"
            found.append(
                f"  ledger: {ledger['tokens_per_target_step']:.2f} tokens per forward, accept length when drafted "
                f"{ledger['accept_length']:.2f}, coverage {ledger['draft_coverage']:.2f}, accepted "
                f"{ledger['accepted']} of {ledger['drafted']}, by depth {depths}"
            )
    return found


def _shown(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else " / ".join(f"{found[f'p{share}']:.1f}" for share in PERCENTILES)


def _write(path: str, report: Mapping[str, Any]) -> None:
    text = json.dumps(report, indent=2)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: cannot write it ({error.strerror}): give another place") from None
