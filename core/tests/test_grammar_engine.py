"""Structured output in the engine: the oracle is plain decoding with a mask made by hand, and answers must parse."""

import json
import random
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import pytest
import torch

from specplug import UserError, reference
from specplug.grammar import masks as masking
from specplug.grammar.compile import Compiler, compiler_for
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.testing.oracle import chi_square_p
from specplug.testing.paths import device_path
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target, reference_logits, table_target
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer

WORDS = ("ab", "abba", "b", "baab", "bbbb", "aa", "c", 1, 12, 127)
TEXTS = tuple(json.dumps(word).encode() for word in WORDS)
FORMAT = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": list(WORDS)}}}
OBJECT = {
    "type": "json_schema",
    "json_schema": {
        "name": "pet",
        "schema": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["cat", "dog"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
                "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
            },
            "required": ["kind", "age", "tags"],
            "additionalProperties": False,
        },
    },
}
PROMPTS = (b"hello", b"a", b"abab", b'{"', b"zz top")
GREEDY = {"temperature": 0.0}
NO_SPACE = {token: -100.0 for token in b" \t\r\n"}  # of which a table may want to write no end
OPTIONS = {
    "greedy": GREEDY,
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.3, "seed": 4, "top_k": 4, "top_p": 0.9, "min_p": 0.01},
    "greedy, all": {
        "temperature": 0.0,
        "repetition_penalty": 1.7,
        "frequency_penalty": 1.2,
        "presence_penalty": -0.5,
        "logit_bias": {34: -3.0, 98: 1.5, 120: 100.0},
        "min_tokens": 3,
    },
    "sampled, all": {
        "temperature": 0.9,
        "seed": 5,
        "frequency_penalty": 1.5,
        "logit_bias": {97: -2.0, 120: 100.0},
        "stop_token_ids": (99,),
        "top_k": 5,
    },
}
DRAFTERS = [
    ("none", ""),
    *(("scripted", kind) for kind in ("right", "wrong", "right_then_wrong", "random_tree", "hostile", "bad_parents")),
    *(("scripted-device", kind) for kind in ("right", "random_tree", "hostile", "duplicates", "too_long")),
    ("scripted-dense", ""),
]


class Recorder:
    """A matcher that raises when it is misused, and remembers what it was fed."""

    made: ClassVar[list] = []

    def __init__(self, matcher):
        self.inner = matcher
        self.fed = []
        self.tried = 0
        Recorder.made.append(self)

    def consume_token(self, token):
        assert not self.tried, "committed in the middle of a walk"
        assert not self.inner.is_stopped(), f"fed {token} after its end"
        assert self.inner.validate_tokens([token]) == 1, f"fed {token}, which it refuses"
        self.fed.append(token)
        assert self.inner.consume_token(token)
        return True

    def try_consume_tokens(self, tokens):
        assert tokens, "nothing to try"
        assert not self.inner.is_stopped(), "tried something after its end"
        assert all(0 <= token < SIZE for token in tokens)
        count = self.inner.try_consume_tokens(tokens)
        self.tried += count
        return count

    def rollback(self, count):
        assert 0 < count <= self.tried, "rolled back what was committed"
        self.tried -= count
        assert self.inner.rollback(count)
        return True

    def validate_tokens(self, tokens):
        assert not self.inner.is_stopped(), "asked after its end"
        assert all(0 <= token < SIZE for token in tokens)
        return self.inner.validate_tokens(tokens)

    def is_stopped(self):
        return self.inner.is_stopped()

    def is_error(self):
        assert not self.inner.is_error(), self.inner.get_error()
        return False

    def get_error(self):
        return self.inner.get_error()

    def is_accepting(self):
        return self.inner.is_accepting()

    def masked(self):
        assert not self.inner.is_stopped(), "asked for a mask after its end"
        return self.inner


class Library:
    """llguidance's functions, for recorders."""

    def __init__(self, real):
        self.real = real
        self.calls = 0

    def fill_next_token_bitmask(self, matcher, masks, at):
        self.calls += 1
        self.real.fill_next_token_bitmask(matcher.masked(), masks, at)

    def fill_next_token_bitmask_par(self, executor, matchers, masks):
        self.calls += 1
        assert not any(matcher.tried for matcher, _ in matchers)
        self.real.fill_next_token_bitmask_par(executor, [(m.masked(), at) for m, at in matchers], masks)

    def fill_next_token_bitmask_par_with_draft_tokens(self, executor, matchers, masks):
        self.calls += 1
        assert not any(matcher.tried for matcher, *_ in matchers)
        assert all(tokens for _, _, tokens in matchers)
        self.real.fill_next_token_bitmask_par_with_draft_tokens(
            executor, [(m.masked(), at, tokens) for m, at, tokens in matchers], masks
        )


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """Have every matcher recorded; afterwards none stands in the middle of a walk."""
    real_grammar, recorded = Compiler.grammar, Library(masking._library())

    def grammar(self, response_format):
        made = real_grammar(self, response_format)
        made.matcher = Recorder(made.matcher)
        return made

    monkeypatch.setattr(Compiler, "grammar", grammar)
    monkeypatch.setattr(masking, "_library", lambda: recorded)
    Recorder.made.clear()
    yield recorded
    assert not any(matcher.tried for matcher in Recorder.made)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return bench_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="module")
def target():
    return table_target(SIZE, 2, 5, eos=EOS, tokenizer=byte_tokenizer())


def by_hand(prompt_len):
    """Return a processor that allows what may follow in `TEXTS`: nothing of the engine's is in it."""

    def processor(tokens, logits):
        text = bytes(tokens[prompt_len:])
        allowed = {known[len(text)] for known in TEXTS if known.startswith(text) and len(known) > len(text)}
        if text in TEXTS:
            allowed.add(EOS)
        masked = torch.full_like(logits, float("-inf"))
        index = sorted(allowed)
        masked[index] = logits[index]
        return masked

    return processor


def oracle(target, options, choice=0):
    logits = reference_logits(target)
    params = SamplingParams(**{"max_tokens": 32, **options})
    return [
        reference.decode(logits, list(prompt), params, (EOS,), choice=choice, processor=by_hand(len(prompt)))
        for prompt in PROMPTS
    ]


def answers(target, registry, drafter, options, *, device=False, tokens=6, rows=5, response_format=FORMAT, **engine):
    algorithm, behaviour = drafter
    config = {} if algorithm == "none" else {"num_draft_tokens": tokens}
    if behaviour:
        texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, oracle(target, options), strict=True)]
        config |= {"scripted_behaviour": behaviour, "scripted_texts": texts, "scripted_n": 2}
    with device_path() if device else nullcontext():
        made = Engine(
            target, algorithm=algorithm, config=config, registry=registry, max_running_requests=rows, **engine
        )
    with made:
        asked = {"max_tokens": 32, **options, "response_format": response_format}
        found = made.generate([list(prompt) for prompt in PROMPTS], asked)
        assert made.free_pages == made.pages
    return found


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=" ".join)
def test_answers_are_the_oracles_for_every_drafter_and_option(target, registry, drafter, device):
    # Breaks with: a mask at the wrong node, penalties before the mask, drafts of the grammar's end, a shared matcher.
    for name, options in OPTIONS.items():
        Recorder.made.clear()
        found = answers(target, registry, drafter, options, device=device, tokens=4 + len(name) % 4)
        assert [result.ids for result in found] == oracle(target, options), name
        assert all(result.finish_reason == "stop" for result in found)
        # Fed once, in order, and with what was committed only.
        fed = sorted(tuple(matcher.fed) for matcher in Recorder.made)
        assert fed == sorted(tuple(token for token in result.ids if token != EOS) for result in found)
        if "stop_token_ids" not in options:
            assert all(json.loads(result.text) in WORDS for result in found)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batch_size_changes_nothing(target, registry, rows):
    for drafter in (("scripted", "random_tree"), ("scripted-device", "right")):
        found = answers(target, registry, drafter, OPTIONS["sampled"], device=rows != 2, rows=rows)
        assert [result.ids for result in found] == oracle(target, OPTIONS["sampled"])


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_right_drafts_are_accepted_and_illegal_ones_of_a_host_are_not_verified(target, registry, device):
    right = answers(target, registry, ("scripted", "right"), GREEDY, device=device)
    assert sum(result.ledger["accepted"] for result in right) == sum(result.ledger["drafted"] for result in right) > 0
    # A wrong draft is the right token plus one: here never allowed, but for "a" -> "b" and "b" -> "c".
    cut = answers(target, registry, ("scripted", "wrong"), GREEDY, device=device)
    kept = answers(target, registry, ("scripted-device", "wrong"), GREEDY, device=device)
    drafted = [sum(result.ledger["drafted"] for result in found) for found in (cut, kept)]
    assert drafted[0] < drafted[1]  # breaks where validate_tokens is not asked, or a device's drafts are cut


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_objects_parse_with_every_drafter_and_rule(target, registry, device):
    plain = {}
    for rule in ("coupled", "rejection"):
        for drafter in (
            ("none", ""),
            ("scripted", "random_tree"),
            ("scripted-device", "hostile"),
            ("scripted-dense", ""),
        ):
            for name in ("greedy", "sampled"):
                found = answers(
                    target,
                    registry,
                    drafter,
                    {**OPTIONS[name], "max_tokens": 400, "logit_bias": NO_SPACE},
                    device=device,
                    response_format=OBJECT,
                    speculative_acceptance=rule,
                )
                for result in found:
                    assert result.finish_reason == "stop"
                    made = json.loads(result.text)
                    assert made["kind"] in ("cat", "dog")
                    assert 0 <= made["age"] <= 99
                    assert set(made["tags"]) <= {"x", "y"}
                if rule == "coupled" or name == "greedy":
                    ids = [result.ids for result in found]
                    assert plain.setdefault(name, ids) == ids


def test_json_mode_gives_an_object_or_is_cut_by_max_tokens(registry):
    texts = [b"{}", b'{"a":[1,2,{"b":null}]}', b'{"x":"\\n \xc3\xa9","y":-1.5e3}']
    for text in texts:
        # A target that says this text and ends, whatever the prompt is.
        follow = {1 + at: [*text, EOS][at] for at in range(len(text) + 1)}

        def steer(tokens, logits, follow=follow):
            logits[follow[len(tokens)]] += 1000.0
            return logits

        target = table_target(SIZE, 1, 2, eos=EOS, tokenizer=byte_tokenizer())
        with Engine(target) as engine:
            for most in range(1, len(text) + 3):
                request = engine.submit(
                    [7],
                    {"temperature": 0, "max_tokens": most, "response_format": {"type": "json_object"}},
                    logits_processor=steer,
                )
                while request.output.finish_reason is None:
                    engine.step()
                if most <= len(text):
                    assert request.output.finish_reason == "length"
                    assert request.output.ids == list(text[:most])
                else:
                    assert request.output.finish_reason == "stop"
                    assert isinstance(json.loads(request.output.text), dict)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_what_a_callers_processor_prefers_stays_forbidden(target, registry, device):
    def steer(tokens, logits):
        logits[:] = -50.0
        logits[33] = 1e6  # "!" is never allowed
        logits[98] = 5.0
        return logits

    with device_path() if device else nullcontext():
        engine = Engine(target, algorithm="scripted-device", config={"scripted_texts": ()}, registry=registry)
    with engine:
        request = engine.submit([1], {**GREEDY, "response_format": FORMAT}, logits_processor=steer)
        while request.output.finish_reason is None:
            engine.step()
    assert json.loads(request.output.text) in WORDS


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_rejection_gives_the_masked_distribution(registry, device):
    # Breaks with: q masked, a dropped draft, a residual of the unmasked p.
    target = table_target(SIZE, 1, 5, eos=EOS, tokenizer=byte_tokenizer())
    logits, params = reference_logits(target), SamplingParams(temperature=1.5, max_tokens=4, n=125)
    prompt, processor = (98,), by_hand(1)
    wanted = {(): 1.0}
    for _ in range(params.max_tokens):
        longer = {}
        for head, mass in wanted.items():
            if EOS in head:
                longer[head] = longer.get(head, 0.0) + mass
                continue
            tokens = [*prompt, *head]
            p = reference.distribution(processor(tokens, logits(tokens)[-1]), params)
            for token in torch.nonzero(p).flatten().tolist():
                longer[*head, token] = mass * float(p[token])
        wanted = longer
    counts: dict = {}
    with device_path() if device else nullcontext():
        engine = Engine(
            target,
            algorithm="scripted-dense",
            config={"num_draft_tokens": 4, "scripted_spread": 0.3},
            registry=registry,
            speculative_acceptance="rejection",
            speculative_alarm_below=0.0,
            max_running_requests=64,
        )
    with engine:
        for seed in range(16):
            asked = params.model_copy(update={"seed": seed, "response_format": FORMAT})
            for result in engine.generate([list(prompt)], asked):
                counts[tuple(result.ids)] = counts.get(tuple(result.ids), 0) + 1
    assert sum(counts.values()) == 2000
    assert chi_square_p(counts, wanted) > 0.001


def test_choices_have_a_grammar_each(target, registry):
    for device in (False, True):
        with device_path() if device else nullcontext():
            engine = Engine(target, registry=registry)
        with engine:
            found = engine.generate([list(PROMPTS[0])], {**OPTIONS["sampled"], "n": 3, "response_format": FORMAT})
        assert [result.ids for result in found] == [
            oracle(target, OPTIONS["sampled"], choice)[0] for choice in range(3)
        ]


def test_neighbours_without_a_grammar_are_left_alone(target, registry):
    asked = [{**OPTIONS["sampled"], "max_tokens": 9}, {**GREEDY, "max_tokens": 9}]
    for device in (False, True):
        with device_path() if device else nullcontext():
            engine = Engine(target, algorithm="scripted-dense", registry=registry)
        with engine:
            alone = [engine.generate([list(PROMPTS[at])], options)[0].ids for at, options in enumerate(asked)]
            mixed = engine.generate(
                [list(PROMPTS[0]), list(PROMPTS[2]), list(PROMPTS[1]), list(PROMPTS[3])],
                [asked[0], {**GREEDY, "response_format": FORMAT}, asked[1], {**GREEDY, "response_format": FORMAT}],
            )
        assert [mixed[0].ids, mixed[2].ids] == alone
        assert [mixed[1].ids, mixed[3].ids] == [oracle(target, GREEDY)[2], oracle(target, GREEDY)[3]]


def test_penalties_of_a_slots_last_request_do_not_reach_a_grammar_row(target, registry):
    # Breaks where a row that is edited by its mask only is not admitted to the penalties.
    with device_path():
        engine = Engine(target, registry=registry, max_running_requests=2)
    with engine:
        strong = {**GREEDY, "frequency_penalty": 2.0, "repetition_penalty": 9.0, "max_tokens": 6}
        engine.generate([list(PROMPTS[0]), list(PROMPTS[1])], strong)
        found = engine.generate(
            [list(PROMPTS[0]), list(PROMPTS[2])], [{**strong, "max_tokens": 20}, {**GREEDY, "response_format": FORMAT}]
        )
    assert found[1].ids == oracle(target, GREEDY)[2]


def test_a_step_without_a_grammar_reads_no_drafts_back(target, registry, library, monkeypatch):
    from specplug.runtime.device import readback

    with device_path():
        engine = Engine(target, algorithm="scripted-device", config={"scripted_texts": ()}, registry=registry)
    with engine:
        monkeypatch.setattr(readback, "upload", None)  # the copy back begins with it
        engine.generate([list(PROMPTS[0])], {**OPTIONS["sampled"], "max_tokens": 8})
        assert not library.calls


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_preempted_answer_goes_on_where_it_was(registry, device):
    target = decoder_target(3, SIZE, tokenizer=byte_tokenizer(), eos=EOS)
    target.eos_ids = (EOS,)
    asked = {"temperature": 1.0, "seed": 2, "max_tokens": 60, "response_format": OBJECT}
    prompts = [list(range(40, 60)), list(range(60, 80)), list(range(20, 40))]
    with Engine(target) as engine:
        wanted = [result.ids for result in engine.generate(prompts, asked)]
    Recorder.made.clear()
    with device_path() if device else nullcontext():
        engine = Engine(target, registry=registry, max_total_tokens=112, page_size=4, max_running_requests=3)
    with engine:
        found = engine.generate(prompts, asked)
        assert engine.preemptions > 0
    assert [result.ids for result in found] == wanted
    fed = sorted(tuple(matcher.fed) for matcher in Recorder.made)
    assert fed == sorted(tuple(token for token in ids if token != EOS) for ids in wanted)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_ends_that_are_the_requests_own(target, registry, device):
    wanted = {bytes(ids[:-1]).decode() for ids in oracle(target, GREEDY)}
    for drafter in (("scripted", "right"), ("scripted-device", "right")):
        found = answers(target, registry, drafter, {**GREEDY, "stop": ("b",)}, device=device)
        for result, ids in zip(found, oracle(target, GREEDY), strict=True):
            assert result.text == bytes(ids[:-1]).decode().split("b")[0]
        found = answers(target, registry, drafter, {**GREEDY, "logprobs": True, "top_logprobs": 2}, device=device)
        raw = reference_logits(target)
        for prompt, result in zip(PROMPTS, found, strict=True):
            assert result.text in wanted
            expected = reference.logprobs(raw, list(prompt), result.ids)
            for entry, row in zip(result.logprobs, expected, strict=True):
                assert abs(entry.logprob - float(row[entry.token])) < 1e-4  # of the distribution before the mask
                assert entry.top[0][0] == int(row.argmax())


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_options_that_leave_nothing_end_that_request_with_the_reason(target, registry, device):
    with device_path() if device else nullcontext():
        engine = Engine(target, algorithm="scripted-dense", registry=registry)
    with engine:
        long = {**GREEDY, "min_tokens": 20, "max_tokens": 25, "response_format": FORMAT}
        found = engine.generate([list(PROMPTS[0]), list(PROMPTS[1])], [long, {**GREEDY, "response_format": FORMAT}])
        assert found[0].finish_reason == "error"
        assert "no token is left" in found[0].error
        assert found[1].ids == oracle(target, GREEDY)[1]
        assert engine.free_pages == engine.pages


def test_a_rule_that_takes_wrong_drafts_is_refused(target, registry):
    with (
        Engine(target, algorithm="scripted", registry=registry, speculative_acceptance="synthetic:4") as engine,
        pytest.raises(UserError, match="response_format cannot be kept under --speculative-acceptance synthetic:4"),
    ):
        engine.generate([list(PROMPTS[1])], {**GREEDY, "response_format": FORMAT})


def test_random_schemas_parse_and_are_the_same_with_and_without_drafts(registry):
    rng = random.Random(5)
    target = table_target(SIZE, 2, 9, eos=EOS, tokenizer=byte_tokenizer())

    def schema(depth):
        kind = rng.choice(["enum", "integer", "boolean", "null", *(["array", "object"] * (depth > 0))])
        if kind == "enum":
            return {"enum": [rng.choice(["é", "ab", "", 'q"', 3, None, True]) for _ in range(2)]}
        if kind == "array":
            return {"type": kind, "items": schema(depth - 1), "minItems": 1, "maxItems": 2}
        if kind == "object":
            inner = {name: schema(depth - 1) for name in rng.sample(["a", "b", "ü"], 2)}
            return {"type": kind, "properties": inner, "required": list(inner), "additionalProperties": False}
        return {"type": kind} | ({"minimum": -20, "maximum": 500} if kind == "integer" else {})

    for at in range(12):
        wanted = {"type": "json_schema", "json_schema": {"schema": schema(2)}}
        options = {"temperature": 1.0, "seed": at, "max_tokens": 300, "response_format": wanted}
        found = []
        for algorithm, device in (("none", False), ("scripted-dense", False), ("scripted-dense", True)):
            with device_path() if device else nullcontext():
                engine = Engine(target, algorithm=algorithm, registry=registry, speculative_alarm_below=0.0)
            with engine:
                (result,) = engine.generate([[5, at]], options)
            found.append(result.ids)
        assert found[0] == found[1] == found[2]
        if result.finish_reason == "stop":
            json.loads(result.text)
        assert result.finish_reason in ("stop", "length")


def test_a_token_that_no_mask_should_have_let_through_is_the_engines_fault(target, monkeypatch):
    def blind(rows, sizes):
        return np.full((sum(sizes), rows[0].grammar.words), -1, dtype=np.int32)

    monkeypatch.setattr(masking, "fill", blind)
    with Engine(target) as engine:
        wrong = engine.submit(list(PROMPTS[0]), {**GREEDY, "response_format": FORMAT, "logit_bias": {120: 100.0}})
        while wrong.output.finish_reason is None:
            engine.step()
    assert (wrong.output.finish_reason, wrong.blame) == ("error", "engine")
    assert "please report this" in wrong.error


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_grammar_that_fails_ends_its_answer_and_no_other(registry, monkeypatch, device):
    import llguidance

    # Breaks with: the argmax of nothing at all taken for token 0.
    target = table_target(SIZE, 2, 5, eos=EOS, tokenizer=byte_tokenizer())
    compiler = compiler_for(target.tokenizer, SIZE, (EOS,))
    compiler.grammar(FORMAT)  # is kept, with the limits it was compiled with
    compiler._limits = llguidance.LLParserLimits(step_max_items=1, step_lexer_fuel=1, verbose_errors=False)
    monkeypatch.setattr(Recorder, "is_error", lambda self: self.inner.is_error())
    hard = {"type": "string", "pattern": "(a|b)*c(d|e)*[^z]{40}"}
    failing = {"response_format": {"type": "json_schema", "json_schema": {"schema": hard}}}
    with device_path() if device else nullcontext():
        engine = Engine(target, algorithm="scripted-dense", registry=registry)
    with engine:
        for options in (GREEDY, {"temperature": 1.0, "seed": 1}):
            found = engine.generate(
                [list(PROMPTS[0]), list(PROMPTS[1])], [{**options, **failing}, {**options, "response_format": FORMAT}]
            )
            assert found[0].finish_reason == "error"
            assert "too complex" in found[0].error
            assert 0 not in found[0].ids  # a raw zero is in no JSON
            assert found[1].ids == oracle(target, options)[1]
        assert engine.free_pages == engine.pages
