"""Checks of whole answers: the invariants I1 to I11, by an engine against the reference."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any, Literal

import pytest
from torch import Tensor

from specplug.errors import RefusedError
from specplug.runtime.engine import Engine
from specplug.runtime.processors import LogitsProcessor
from specplug.runtime.request import Result
from specplug.sampling import SamplingParams
from specplug.testing.bench import LETTERS, PROMPTS, Bench
from specplug.testing.oracle import check_greedy, chi_square_p, sequence_probabilities
from specplug.testing.tokenizer import EOS

WIDTHS = (0, 1, 2, 3, 5, 8)
"""Drafts asked for: `num_draft_tokens` - 1."""
BATCHES = (1, 2, 3, 5)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20)
_DRAWS = 1500


class EngineChecks:
    """Each check asks the subject's engine, over tables or a tiny decoder, and compares with the reference."""

    def test_greedy_equals_reference(self, bench: Bench) -> None:
        """I1: greedy ids are the reference's for every number of drafts and every batch."""
        ran = 0
        for width in WIDTHS:
            try:
                engine = bench.engine({"num_draft_tokens": width + 1}, max_running_requests=max(BATCHES))
            except RefusedError:
                continue  # a width that the package does not offer
            ran += 1
            with engine:
                for batch in BATCHES:
                    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS[:batch], _GREEDY), strict=False):
                        wanted = bench.expected(prompt, _GREEDY)
                        who = f"{width} drafts, batch {batch}, prompt {list(prompt)}"
                        assert not result.error, f"{who}: {result.error}"
                        check_greedy(bench.logits(), prompt, wanted.ids, result.ids, who)
        assert ran, f"every number of drafts in {WIDTHS} is refused"

    def test_stop_rules(self, bench: Bench) -> None:
        """I2: the first of EOS, stop string, `max_tokens` and context ends an answer, wherever in a block it falls."""
        prompt = tuple(LETTERS[token] for token in PROMPTS[0])
        plain = bench.expected(prompt, _GREEDY, "text")
        with bench.engine(kind="text") as engine:
            limits = [_GREEDY.model_copy(update={"max_tokens": most}) for most in range(1, len(plain.ids) + 1)]
            words = [
                _GREEDY.model_copy(update={"max_tokens": most, "stop": (word,)})
                for at in (1, 2, 3, 5, 8)
                for word in (plain.text[at], plain.text[at - 1 : at + 2])
                for most in (at, at + 1, at + 2, 20)
            ]
            # Beside each other, so that rows of one step stop at different places, and others take their slots.
            _check_answers(bench, engine, prompt, [*limits, *words])
        for context in range(len(prompt) + 1, len(prompt) + 8):
            with bench.engine(kind="text", context_length=context) as engine:
                _check_answers(bench, engine, prompt, [SamplingParams(temperature=0.0)], context)
        target = bench.target("text")
        ends = target.eos_ids
        try:
            for eos in dict.fromkeys(plain.ids[:10]):
                target.eos_ids = (eos,)
                with bench.engine(kind="text") as engine:
                    _check_answers(bench, engine, prompt, [_GREEDY])
        finally:
            target.eos_ids = ends

    @pytest.mark.parametrize("rule", ["coupled", "rejection"])
    def test_a_grammar_is_kept(self, bench: Bench, rule: Literal["coupled", "rejection"]) -> None:
        """Structured output: answers keep to their schema; with one seed, and `coupled`, they are plain decoding's."""
        if find_spec("llguidance") is None:
            pytest.fail("needs the package llguidance, which is not installed: pip install 'specplug[testing]'")
        words = ["".join(map(chr, text)) for text in product(LETTERS[:3], repeat=3)]
        wanted = {"type": "json_schema", "json_schema": {"schema": {"enum": words}}}
        prompts = [tuple(LETTERS[token] for token in prompt) for prompt in PROMPTS]
        target = bench.target("text")
        ends = target.eos_ids
        try:
            target.eos_ids = (EOS,)
            for sampling in (_GREEDY, _SAMPLED.model_copy(update={"seed": 3})):
                asked = sampling.model_copy(update={"response_format": wanted})
                with bench.engine(kind="text", speculative_acceptance=rule) as engine:
                    found = [result.text for result in engine.generate(prompts, asked)]
                assert all(_parsed(text) in words for text in found), f"answers that break their grammar: {found}"
                if rule == "coupled" or sampling.greedy:
                    with Engine(target, algorithm="none") as engine:
                        plain = [result.text for result in engine.generate(prompts, asked)]
                    assert found == plain, f"a grammar's answers depend on the drafts: {found}, plain {plain}"
        finally:
            target.eos_ids = ends

    def test_stream_equals_result(self, bench: Bench) -> None:
        """I3, I4: deltas together are the answer, in ids and in text, and the ledger counts the same tokens."""
        prompts = [tuple(LETTERS[token] for token in prompt) for prompt in PROMPTS[:3]]
        sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=20, stop=("zq",))
        with bench.engine(kind="text") as engine:
            results = engine.generate(prompts, sampling)
            before = engine.ledger.output_tokens
            deltas = list(engine.stream(prompts, sampling))
            counted = engine.ledger.output_tokens - before
        names = list(dict.fromkeys(delta.request for delta in deltas))
        assert len(names) == len(prompts)
        for name, result in zip(sorted(names, key=int), results, strict=True):
            mine = [delta for delta in deltas if delta.request == name]
            assert [token for delta in mine for token in delta.ids] == result.ids
            assert "".join(delta.text for delta in mine) == result.text
            assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish_reason == result.finish_reason
            assert result.ledger["output_tokens"] == len(result.ids)
        assert counted == sum(len(result.ids) for result in results)

    def test_pages_come_back(self, bench: Bench) -> None:
        """I5: at idle every page is free, after answers, stops, aborts and preemption."""
        with bench.engine() as engine:
            engine.generate(PROMPTS, _SAMPLED.model_copy(update={"seed": 1}))
            assert engine.free_pages == engine.pages, "pages are lost after answers"
            stream = engine.stream(PROMPTS[:3], _GREEDY)
            for _ in range(4):
                next(stream)
            stream.close()  # type: ignore[attr-defined]
            assert engine.free_pages == engine.pages, "pages are lost after an abort"
        with bench.engine(max_total_tokens=48, context_length=48) as engine:
            engine.generate(PROMPTS, _GREEDY)
            assert engine.free_pages == engine.pages, "pages are lost after preemption"

    def test_preempted_requests_equal_reference(self, bench: Bench) -> None:
        """With too few pages for all, requests leave and come back, and say what they would have said."""
        sampling = SamplingParams(temperature=0.8, seed=11, max_tokens=20)
        with bench.engine(max_total_tokens=48, context_length=48, chunked_prefill_size=8) as engine:
            for options in (_GREEDY, sampling):
                for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, options), strict=True):
                    assert result.ids == bench.expected(prompt, options, context=48).ids, f"prompt {list(prompt)}"

    def test_ledger_is_bounded(self, bench: Bench) -> None:
        """I6: 0 <= accepted <= drafted, tokens add up, rates lie in 0..1 and are never NaN, counters never fall."""
        with bench.engine() as engine:
            last = engine.ledger.report()
            _check_report(last)
            requests = [engine.submit(prompt, _GREEDY) for prompt in PROMPTS]
            while any(request.output.finish_reason is None for request in requests):
                engine.step()
                report = engine.ledger.report()
                _check_report(report)
                for name in ("output_tokens", "rounds", "drafted_rounds", "drafted", "accepted"):
                    assert report[name] >= last[name], f"{name} fell from {last[name]} to {report[name]}"
                last = report
            results = engine.generate(PROMPTS, _GREEDY)
        for result in results:
            _check_report(result.ledger)
            # One token comes from the prompt's forward; every other forward emits its accepted drafts and one more.
            emitted = result.ledger["rounds"] + result.ledger["accepted"] + 1
            assert 0 <= emitted - len(result.ids) <= 1, f"{len(result.ids)} tokens, the ledger says {emitted}"
        assert last["output_tokens"] == sum(len(request.output.ids) for request in requests)

    def test_neighbours_do_not_matter(self, bench: Bench) -> None:
        """I7: an answer is the same alone, in any company and order, in any slot, after any requests."""
        options = [_SAMPLED.model_copy(update={"seed": seed}) for seed in range(len(PROMPTS))]
        with bench.engine(max_running_requests=5) as engine:
            together = engine.generate(PROMPTS, options)
            backwards = engine.generate(PROMPTS[::-1], options[::-1])[::-1]
            alone = [engine.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, options, strict=True)]
            first = engine.submit(PROMPTS[0], options[0])
            for _ in range(3):
                engine.step()
            late = [engine.submit(prompt, one) for prompt, one in zip(PROMPTS[1:], options[1:], strict=True)]
            for _ in range(2):
                engine.step()
            engine.abort(first)
            while any(request.output.finish_reason is None for request in late):
                engine.step()
        with bench.engine(max_running_requests=2, chunked_prefill_size=3) as engine:
            narrow = engine.generate(PROMPTS, options)
        ids = [result.ids for result in alone]
        for name, found in (("together", together), ("backwards", backwards), ("two at a time", narrow)):
            assert [result.ids for result in found] == ids, f"{name}, an answer differs from the one alone"
        assert [request.output.ids for request in late] == ids[1:], "an answer changed when a neighbour left"

    def test_failed_requests_leave_nothing(self, bench: Bench) -> None:
        """I8: a request that fails in mid-answer takes nobody along, and its slot, pages and drafter serve the next."""
        wanted = [bench.expected(prompt, _GREEDY).ids for prompt in PROMPTS]
        # As many slots as prompts, so that each round of them takes every slot, the failed one's too.
        with bench.engine(max_running_requests=len(PROMPTS)) as engine:
            before = [result.ledger["drafted"] for result in engine.generate(PROMPTS, _GREEDY)]
            for after in (0, 1, 5):
                fails = _fails_at(len(PROMPTS[0]) + after)
                failing = engine.submit(PROMPTS[0], _GREEDY, logits_processor=fails)
                beside = engine.submit(PROMPTS[3], _GREEDY)
                while any(request.output.finish_reason is None for request in (failing, beside)):
                    engine.step()
                assert failing.output.finish_reason == "error", f"ended with {failing.output.finish_reason!r}"
                assert beside.output.ids == wanted[3], f"an answer changed: its neighbour failed, {beside.error}"
                assert engine.free_pages == engine.pages, "pages are lost after a failure"
                results = engine.generate(PROMPTS, _GREEDY)
                assert [result.ids for result in results] == wanted, "an answer changed after a failure"
                drafted = [result.ledger["drafted"] for result in results]
                assert sum(drafted) or not sum(before), "nothing is drafted any more after a failure"

    def test_requests_can_decline(self, bench: Bench) -> None:
        """`max_drafted` 0 and 1 beside requests without: none resp. one draft per step, all answers the reference's."""
        most = (None, 0, 1, 0, None)
        for limits in (most, (0,) * len(PROMPTS)):
            with bench.engine() as engine:
                requests = [
                    engine.submit(prompt, _GREEDY, max_drafted=limit)
                    for prompt, limit in zip(PROMPTS, limits, strict=True)
                ]
                while any(request.output.finish_reason is None for request in requests):
                    engine.step()
                for prompt, request, limit in zip(PROMPTS, requests, limits, strict=True):
                    ledger = request.settled_ledger()
                    if limit is not None:
                        assert ledger.drafted <= limit * ledger.rounds, f"max_drafted {limit}, drafted {ledger.drafted}"
                    assert request.output.ids == bench.expected(prompt, _GREEDY).ids

    @pytest.mark.parametrize("rule", ["coupled", "rejection"])
    def test_sampled_distribution(self, bench: Bench, rule: Literal["coupled", "rejection"]) -> None:
        """I10: sampled answers follow the target's distribution under either rule (chi-square over 3-token answers)."""
        prompt = PROMPTS[0]
        sampling = SamplingParams(temperature=0.9, top_k=3, max_tokens=3)
        each = [sampling.model_copy(update={"seed": seed}) for seed in range(_DRAWS)]
        with bench.engine(speculative_acceptance=rule, max_running_requests=128, context_length=32) as engine:
            results = engine.generate([prompt] * _DRAWS, each)
            drafted = engine.ledger.drafted
        counts: Counter[tuple[int, ...]] = Counter(tuple(result.ids[:3]) for result in results)
        p_value = chi_square_p(counts, sequence_probabilities(bench.logits(), prompt, sampling, 3))
        assert p_value > 0.001, f"{_DRAWS} answers under {rule}, {drafted} drafts: chi-square p = {p_value:.2g}"

    def test_same_seed_same_text(self, bench: Bench) -> None:
        """I11: under `coupled` a seed's answer is that of plain decoding, in any batch and for any number of drafts."""
        options = [_SAMPLED.model_copy(update={"seed": 100 + seed}) for seed in range(len(PROMPTS))]
        wanted = [bench.expected(prompt, one).ids for prompt, one in zip(PROMPTS, options, strict=True)]
        for changes in ({}, {"num_draft_tokens": 2}, {"num_draft_tokens": 6}):
            try:
                engine = bench.engine(changes)
            except RefusedError:
                continue
            with engine:
                for batch in BATCHES:
                    found = engine.generate(PROMPTS[:batch], options[:batch])
                    assert [result.ids for result in found] == wanted[:batch], f"{changes}, batch {batch}"

    def test_two_engines_do_not_interfere(self, bench: Bench) -> None:
        """Two engines stepped in turns in one process: no state is shared through globals."""
        with bench.engine() as one, bench.engine() as two:
            pairs = [(one, PROMPTS[0]), (two, PROMPTS[3]), (one, PROMPTS[4]), (two, PROMPTS[1])]
            requests = [(engine.submit(prompt, _GREEDY), prompt) for engine, prompt in pairs]
            while any(request.output.finish_reason is None for request, _ in requests):
                one.step()
                two.step()
            drafted = [request.settled_ledger().drafted for request, _ in requests]
            alone = [_alone(bench, prompt) for _, prompt in requests]
            for request, prompt in requests:
                assert not request.error, request.error
                assert request.output.ids == bench.expected(prompt, _GREEDY).ids
            assert drafted == [result.ledger["drafted"] for result in alone], (
                "another engine's requests change the drafts"
            )


def _fails_at(length: int) -> LogitsProcessor:
    """Return a processor that raises where the text before the decided token has `length` tokens."""

    def processor(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if len(tokens) >= length:
            raise ValueError("a request that fails on purpose")
        return logits

    return processor


def _alone(bench: Bench, prompt: Sequence[int]) -> Result:
    with bench.engine() as engine:
        return engine.generate([prompt], _GREEDY)[0]


def _check_answers(
    bench: Bench, engine: Engine, prompt: Sequence[int], asked: Sequence[SamplingParams], context: int = 256
) -> None:
    """Ask for the answer to `prompt` under each of `asked`, all at once; each must be what the reference says."""
    for sampling, result in zip(asked, engine.generate([prompt] * len(asked), list(asked)), strict=True):
        wanted = bench.expected(prompt, sampling, "text", context)
        got = (result.ids, result.text, result.finish_reason)
        assert got == (wanted.ids, wanted.text, wanted.finish_reason), (
            f"{sampling!r}, context {context} {result.error}: {got} is not {wanted}"
        )


def _parsed(text: str) -> Any:
    """Return what JSON says, None where it says nothing."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _check_report(report: dict[str, Any]) -> None:
    assert 0 <= report["accepted"] <= report["drafted"], report
    assert report["drafted_rounds"] <= report["rounds"], report
    assert report["accepted"] <= report["path"] <= report["drafted"], report
    for name in ("draft_coverage", "accept_rate", "path_accept_rate"):
        assert math.isfinite(report[name]), f"{name} is {report[name]}"
        assert 0.0 <= report[name] <= 1.0, f"{name} is {report[name]}"
    for depth in report["acceptance_by_depth"]:
        assert all(0.0 <= rate <= 1.0 for rate in depth.values()), depth
