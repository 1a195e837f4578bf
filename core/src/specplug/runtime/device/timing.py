"""What forwards and drafts take on this device, measured at start on empty steps, for policies that go by costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from specplug.adaptive.cost import CostPolicy
from specplug.adaptive.policy import Decision
from specplug.runtime.device.buckets import Bucket
from specplug.runtime.device.executor import DeviceExecutor
from specplug.runtime.device.stream import Mark
from specplug.runtime.drafting import Drafting

TIMES = 3


def measure(executor: DeviceExecutor, drafting: Drafting, rows: list[int], device: torch.device) -> None:
    """Tell a policy that goes by costs what every recorded forward takes, and every depth of a drafter on the device.

    Contexts are empty here and no host work is in between, so that real times are longer; those take their place.
    `rows`: padded row counts. Runs on the scratch slot only. Without timers, as on a CPU, nothing is measured.
    """
    policy = drafting.policy
    if not isinstance(policy, CostPolicy) or _seconds(lambda: None, device) is None:
        return
    for bucket, replay in executor.recorded():
        took = _seconds(replay, device)
        if took is not None:
            policy.costs.grant_verify(*bucket, took)
    if drafting.on_host or drafting.failed:
        return
    before = drafting.decision
    for count in rows:
        for depth in sorted(drafting.depths):
            drafting.decision = Decision(depth)
            took = _seconds(partial(executor.empty_draft, Bucket(count, count)), device)
            if took is not None:
                policy.costs.grant_between(count, depth, took)
    drafting.decision = before


def _seconds(work: Callable[[], None], device: torch.device) -> float | None:
    """Return the median device time of `work`, which runs once before; None without timers."""
    begin, end = Mark(device, timed=True), Mark(device, timed=True)
    found = []
    work()
    for _ in range(TIMES):
        begin.record()
        work()
        end.record()
        end.wait()
        took = end.seconds_since(begin)
        if took is None:
            return None
        found.append(took)
    return median(found)
