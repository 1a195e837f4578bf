"""A histogram that is filled for every chunk of every stream: prometheus_client's own costs several times as much."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from prometheus_client.core import HistogramMetricFamily, Metric


class Histogram:
    """Counts values between bounds. All of it belongs to one thread."""

    def __init__(self, name: str, about: str, labels: Sequence[tuple[str, str]], bounds: Sequence[float]) -> None:
        """`labels`: (name, value) of each; `bounds`: upper ones, ascending, which belong to what is below them."""
        self._name = name
        self._about = about
        self._labels = labels
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was seen `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> Metric:
        """Return it as Prometheus wants it: of each bound, how many values were at most that."""
        found = HistogramMetricFamily(self._name, self._about, labels=[name for name, _ in self._labels])
        buckets, below = [], 0
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == inf else str(float(bound)), float(below)))
        found.add_metric([value for _, value in self._labels], buckets, self._sum)
        return found
