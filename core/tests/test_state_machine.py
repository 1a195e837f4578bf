"""A hypothesis state machine over one engine: requests come, are cut, leave, lose their pages, return; drafters fail.

After every step I2, I3, I6 and I7 are checked for every request there ever was (I5 whenever nothing runs): its ids
are the one-page reference's, computed alone, up to where its own stop rules cut them.

Broken by, among others: a preemption that keeps `kv_len` or the draft, pages not given back, a rule asked once a step,
counts taken before the cut, drafts of a slot's last owner, noise keyed by slot, a failed drafter called again.
"""

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specplug import SamplingParams
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.runtime.request import Request
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.oracle import Expected, expected
from specplug.testing.registry import bench_registry
from specplug.testing.scripted_drafters import Script
from specplug.testing.targets import reference_logits, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

TARGET = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
LOGITS = reference_logits(TARGET)
TEXTS = tuple(tuple(LETTERS[token] for token in prompt) for prompt in PROMPTS)
EOS = LETTERS[6]
MOST = 12
CONTEXT = 24
"""Tokens of a longest request, and of the pool where it is tight: two of the longer ones do not fit together."""
ANSWERS = [
    SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=MOST, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=2, top_k=4, max_tokens=MOST, ignore_eos=True, frequency_penalty=0.7),
]
BEHAVIOURS = ("right", "wrong", "right_then_wrong", "ragged", "random_tree", "duplicates", "too_long", "hostile")
COUNTERS = ("requests", "output_tokens", "prefill_forwards", "rounds", "drafted_rounds", "drafted", "path", "accepted")


@cache
def wanted(prompt: tuple[int, ...], sampling_json: str) -> Expected:
    sampling = SamplingParams.model_validate_json(sampling_json)
    # The oracle knows one kind of token that ends an answer.
    ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,)))
    sampling = sampling.model_copy(update={"stop_token_ids": (), "ignore_eos": False})
    return expected(LOGITS, prompt, sampling, context=CONTEXT, eos=ends, tokenizer=TARGET.tokenizer)


@cache
def registry() -> Registry:
    return bench_registry(Path(tempfile.mkdtemp()))


@cache
def known() -> tuple[tuple[int, ...], ...]:
    """What the drafters know: every answer before any rule cuts it."""
    return tuple((*prompt, *wanted(prompt, one.model_dump_json()).ids) for one in ANSWERS for prompt in TEXTS)


class MixedScript(Script):
    """A behaviour per text instead of one for all: by its length, so it changes from step to step."""

    def drafts(self, text: Any, limit: int) -> Any:
        self._behaviour = BEHAVIOURS[(self._seed + len(text)) % len(BEHAVIOURS)]
        return super().drafts(text, limit)


class Asked:
    """One request and what came out of it."""

    def __init__(self, request: Request, sampling: SamplingParams) -> None:
        self.request = request
        self.right = wanted(tuple(request.tokens), sampling.model_dump_json())
        self.sampling = sampling
        self.ids: list[int] = []
        self.text = ""
        self.entries = 0
        self.reason: str | None = None
        self.aborted = False
        self.checked = False


class EngineMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    @initialize(
        algorithm=st.sampled_from(["scripted", "scripted-device"]),
        width=st.sampled_from([1, 2, 3, 5, 8]),
        batch=st.sampled_from([1, 2, 3, 5]),
        tight=st.booleans(),
        chunk=st.sampled_from([2, 5, 512]),
        seed=st.integers(0, 7),
    )
    def start(self, algorithm: str, width: int, batch: int, tight: bool, chunk: int, seed: int) -> None:
        self.asked: list[Asked] = []
        self.last = dict.fromkeys(COUNTERS, 0)
        TARGET.eos_ids = (EOS,)
        config = {"num_draft_tokens": width + 1, "scripted_texts": known(), "scripted_behaviour": "random_tree"}
        limits = {"max_total_tokens": CONTEXT} if tight else {}
        self.engine = Engine(
            TARGET,
            algorithm=algorithm,
            config={**config, "scripted_seed": seed},
            registry=registry(),
            page_size=4,
            context_length=CONTEXT,
            max_running_requests=batch,
            chunked_prefill_size=chunk,
            **limits,
        )
        drafting = self.engine._built.drafting
        assert drafting is not None
        self.drafter: Any = drafting._drafter
        self.drafter._script.__class__ = MixedScript

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(400):
            if not any(one.reason is None for one in self.asked):
                break
            self.step()
            self.holds()
        assert all(one.reason for one in self.asked), "a request does not end"
        for one in self.asked:
            self.answer_holds(one)
        self.engine.close()
        assert self.engine.free_pages == self.engine.pages
        TARGET.eos_ids = ()

    # --- rules -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: sum(one.reason is None for one in self.asked) < 10)
    @rule(
        prompt=st.sampled_from(TEXTS),
        answer=st.sampled_from(ANSWERS),
        most=st.integers(1, MOST),
        stop=st.sampled_from([(), (), ("ab",), ("c", "fed"), ("ehg",)]),
        stop_id=st.sampled_from([(), (), (LETTERS[3],)]),
        ignore_eos=st.booleans(),
        logprobs=st.booleans(),
        max_drafted=st.sampled_from([None, None, None, 0, 1, 3]),
    )
    def admit(
        self,
        prompt: tuple[int, ...],
        answer: SamplingParams,
        most: int,
        stop: tuple[str, ...],
        stop_id: tuple[int, ...],
        ignore_eos: bool,
        logprobs: bool,
        max_drafted: int | None,
    ) -> None:
        changes = {"max_tokens": most, "stop": stop, "stop_token_ids": stop_id, "ignore_eos": ignore_eos}
        sampling = answer.model_copy(update={**changes, "logprobs": logprobs})
        right = sampling.model_copy(update={"logprobs": False})
        self.asked.append(Asked(self.engine.submit(prompt, sampling, max_drafted=max_drafted), right))

    @precondition(lambda self: sum(one.reason is None for one in self.asked) < 4)
    @rule(answer=st.sampled_from(ANSWERS), prompts=st.sampled_from([(0, 4, 3), (4, 0), (3, 3, 0, 4)]))
    def admit_many(self, answer: SamplingParams, prompts: tuple[int, ...]) -> None:
        """More long answers at once than a tight pool holds, so that some lose their pages and return."""
        for prompt in prompts:
            self.asked.append(Asked(self.engine.submit(TEXTS[prompt], answer), answer))

    @rule(times=st.integers(1, 4))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()
            self.holds()

    def step(self) -> None:
        """Run one step and take in its deltas."""
        was_on = self.engine.speculation == "on"
        by_id = {one.request.id: one for one in self.asked}
        for delta in self.engine.step():
            one = by_id[delta.request]
            assert one.reason is None, "nothing comes after the end"
            one.ids += delta.ids
            one.text += delta.text
            one.entries += len(delta.logprobs or ())
            one.reason = delta.finish_reason
            if delta.finish_reason == "error":
                assert was_on
                assert "specplug-scripted 0.1.0" in one.request.error

    @precondition(lambda self: any(one.reason is None for one in self.asked))
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        one = data.draw(st.sampled_from([one for one in self.asked if one.reason is None]))
        self.engine.abort(one.request)
        one.reason, one.aborted = "abort", True

    @precondition(lambda self: self.engine.speculation == "on" and len(self.asked) > 4)
    @rule(method=st.sampled_from(["ingest", "propose"]), sure=st.integers(0, 7))
    def fail(self, method: str, sure: int) -> None:
        """The drafter will raise in its next call of `method` (one time in eight that this is drawn)."""
        if sure:
            return

        def raises(*_: Any) -> None:
            raise RuntimeError("told to fail")

        setattr(self.drafter, method, raises)

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        for one in self.asked:
            if not one.checked:  # what has ended is looked at again at the end only
                self.answer_holds(one)
                one.checked = one.reason is not None
        self.counts_hold()
        running = self.engine._scheduler.running
        held = sum(self.engine._built.parts.pages.held[request.slot] for request in running)
        assert held + self.engine.free_pages == self.engine.pages
        if not running:
            assert self.engine.free_pages == self.engine.pages  # I5

    def answer_holds(self, one: Asked) -> None:
        """I2, I3, I4 and I7: a beginning of the reference's cut, all of it at the end."""
        output, right = one.request.output, one.right
        cut = one.reason in ("abort", "error")
        if one.reason in ("stop", "length"):
            assert (one.ids, one.text, one.reason) == (right.ids, right.text, right.finish_reason)
            assert output.ids == one.ids
        else:
            assert one.ids == right.ids[: len(one.ids)], "streamed, so final"
            assert right.text.startswith(one.text) or cut
        if cut and not one.aborted:
            assert one.ids == output.ids
        assert one.reason == output.finish_reason
        assert one.entries == (len(one.ids) if one.request.sampling.logprobs else 0)
        assert len(output.logprobs) == (len(output.ids) if one.request.sampling.logprobs else 0)
        assert one.request.settled_ledger().output_tokens == len(output.ids)
        assert (one.request.slot >= 0) <= (one.reason is None)

    def counts_hold(self) -> None:
        """I6: bounds, sums, no NaN, and no counter falls but by what a stop string takes back."""
        report = self.engine.ledger.report()
        assert 0 <= report["accepted"] <= report["path"] <= report["drafted"]
        assert report["drafted_rounds"] <= report["rounds"]
        for name in ("accept_rate", "path_accept_rate", "draft_coverage"):
            assert math.isfinite(report[name])
            assert 0.0 <= report[name] <= 1.0
        counts = [one.request.settled_ledger() for one in self.asked]
        assert report["output_tokens"] == sum(len(one.request.output.ids) for one in self.asked)
        for name in COUNTERS[2:]:
            assert report[name] == sum(getattr(ledger, name) for ledger in counts)
        for name in COUNTERS:
            # A stop string can take back tokens of earlier steps.
            assert report[name] >= self.last[name] or name in ("output_tokens", "accepted")
        self.last = report
        for one, ledger in zip(self.asked, counts, strict=True):
            assert ledger.output_tokens <= ledger.prefill_forwards + ledger.rounds + ledger.accepted
            if one.request.max_drafted == 0:
                assert ledger.drafted == 0


EngineMachine.TestCase.settings = settings(
    derandomize=True,
    max_examples=90,
    stateful_step_count=20,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # shrinking takes minutes: add Phase.shrink to look for the shortest way to a failure
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase
