"""CUDA graphs: a function over static tensors becomes one launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from specplug.drafter import StepView
from specplug.proposal import Proposal
from specplug.runtime.device.buckets import Bucket, Buckets
from specplug.runtime.device.statics import Statics

log = logging.getLogger("specplug")

Recorded = Callable[[StepView, Proposal | None, Any], None]


class Capturer:
    """Records functions into graphs that share one memory pool; on a CPU a function is its own graph.

    Record the largest shapes first: the pool then holds the smaller ones' memory already. What a graph
    computes lies in that pool and is overwritten by the next one that is replayed: whatever must outlive
    it belongs in a static tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]

    def record(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Return what runs `fn` again, on the same tensors. `fn` runs twice here: kernels compile in the first."""
        if not self._cuda:
            fn()
            return fn
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            fn()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            fn()
        return graph.replay


class BucketRecorder:
    """The `GraphRecorder` of a device: a drafter's callable is recorded once per bucket and variant.

    ``over="rows"`` records one graph per row count, for callables that look at rows alone; a step that fits
    no bucket (a long prompt chunk) still has a row count that does. ``over="rows_x_width"`` records one per
    bucket; a step that fits none runs the callable as it is, and so does every step where a capture failed.
    """

    def __init__(
        self,
        statics: Statics,
        buckets: Buckets,
        capturer: Capturer | None,
        prime: Callable[[Bucket], None],
        out: Proposal,
    ) -> None:
        """`capturer`: None records nothing; `prime` fills the statics with an empty step of a bucket."""
        self._statics = statics
        self._buckets = buckets
        self._capturer = capturer
        self._prime = prime
        self._out = out
        self.bucket: Bucket | None = None
        """The current step's. Set by the executor; None: it fits none."""
        self.rows = 0
        """The current step's padded rows. Set by the executor."""

    def record(self, name: str, fn: Recorded, over: str = "rows", variants: Sequence[Any] | None = None) -> Recorded:
        """See `specplug.GraphRecorder`."""
        if over not in ("rows", "rows_x_width"):
            raise ValueError(f"graph {name!r}: over={over!r}, expected 'rows' or 'rows_x_width'")
        if self._capturer is None:
            return fn
        try:
            graphs = self._record(fn, over, variants)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as cause:
            log.warning("%s runs without CUDA graphs: its capture failed: %s: %s", name, type(cause).__name__, cause)
            return fn

        def replay(step: StepView, out: Proposal | None, variant: Any = None) -> None:
            bucket = Bucket(self.rows, self.rows) if over == "rows" else self.bucket
            graph = graphs.get((bucket, variant)) if bucket is not None else None
            if graph is None:
                fn(step, out, variant)
            else:
                graph()

        return replay

    def _record(
        self, fn: Recorded, over: str, variants: Sequence[Any] | None
    ) -> dict[tuple[Bucket, Any], Callable[[], None]]:
        assert self._capturer is not None
        if over == "rows":
            shapes = [Bucket(rows, rows) for rows in reversed(self._buckets.rows)]
        else:
            shapes = list(self._buckets.all)
        graphs: dict[tuple[Bucket, Any], Callable[[], None]] = {}
        for bucket in shapes:
            self._prime(bucket)
            view = self._statics.view(*bucket)
            for variant in variants or (None,):
                graphs[bucket, variant] = self._capturer.record(partial(fn, view, self._out, variant))
        return graphs
