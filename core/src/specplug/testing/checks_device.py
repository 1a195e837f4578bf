"""Checks of the path that a GPU takes: run on the CPU, and on CUDA where there is one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specplug.errors import RefusedError
from specplug.planning import load_drafter_class
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.testing.bench import PROMPTS, Bench
from specplug.testing.oracle import check_greedy
from specplug.testing.paths import device_path
from specplug.testing.waiting import Watch, watching

_GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=12)


class DeviceChecks:
    """Each check has an engine with static buffers, padded steps and, on CUDA, graphs answer the bench's prompts."""

    def test_device_path_equals_reference(self, bench: Bench) -> None:
        """Padded rows, chunks that end in mid-prompt, declining rows: the reference's answers, greedy and sampled."""
        with device_path():
            engine = bench.engine(chunked_prefill_size=8, max_running_requests=3)
        with engine:
            _check_answers(bench, engine)

    def test_nothing_waits(self, bench: Bench) -> None:
        """`ingest` and `propose` of a drafter that declares `graph_safe` ask no tensor for a number."""
        plan = bench.run().plan
        assert plan is not None
        if not plan.needs.graph_safe:
            pytest.skip("this configuration does not declare graph_safe")
        watch = Watch()

        def watched(method: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                with watching(watch):
                    method(*args)

            return call

        drafter = load_drafter_class(bench.run())
        calls: dict[str, Any] = {name: watched(getattr(drafter, name)) for name in ("ingest", "propose")}
        with patch.multiple(drafter, **calls), device_path(), bench.engine(max_running_requests=3) as engine:
            engine.generate(PROMPTS[:3], [_GREEDY, _SAMPLED, _GREEDY])
        assert watch.seen, "neither ingest nor propose did anything"
        assert not watch.found, f"the device would wait: {'; '.join(dict.fromkeys(watch.found))}"

    @pytest.mark.gpu
    @pytest.mark.parametrize("graphs", [True, False])
    def test_cuda_equals_reference(self, bench: Bench, graphs: bool) -> None:
        """On CUDA in float32, from graphs and without: the reference's greedy answers, and every page back."""
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        target = bench.target()
        there = dataclasses.replace(target, model=copy.deepcopy(target.model).to("cuda"))
        options: dict[str, Any] = {
            "chunked_prefill_size": 8,
            "max_running_requests": 3,
            "disable_cuda_graph": not graphs,
        }
        try:
            engine = bench.engine(target=there, **options)
        except RefusedError as refused:
            pytest.skip(f"refused on CUDA: {refused}")
        with engine:
            for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, _GREEDY), strict=True):
                assert not result.error, f"prompt {list(prompt)}: {result.error}"
                check_greedy(bench.logits(), prompt, bench.expected(prompt, _GREEDY).ids, result.ids, str(prompt))
            assert engine.free_pages == engine.pages, "pages are lost"


def _check_answers(bench: Bench, engine: Engine) -> None:
    most = (None, 0, 1, None, None)
    for sampling in (_GREEDY, _SAMPLED):
        requests = [
            engine.submit(prompt, sampling, max_drafted=limit) for prompt, limit in zip(PROMPTS, most, strict=True)
        ]
        while any(request.output.finish_reason is None for request in requests):
            engine.step()
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert not request.error, f"prompt {list(prompt)}: {request.error}"
            wanted = bench.expected(prompt, sampling).ids
            assert request.output.ids == wanted, f"prompt {list(prompt)}: {request.output.ids} is not {wanted}"
    assert engine.free_pages == engine.pages, "pages are lost"
