"""Where an answer ends, wherever in a verified block that falls: every drafter, width, batch, streamed or not.

What is right is computed by `specplug.testing.oracle.expected`: plain decoding, then the rules by hand.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest

from specplug import SamplingParams
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.oracle import Expected, expected
from specplug.testing.registry import bench_registry
from specplug.testing.targets import reference_logits, table_target
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer

WIDTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (1, 2, 3, 5)
DRAFTERS = {
    "right": ("scripted", "right"),
    "right on the device": ("scripted-device", "right"),
    "wrong": ("scripted", "wrong"),
    "right, then wrong": ("scripted-device", "right_then_wrong"),
    "ragged": ("scripted", "ragged"),
    "too long": ("scripted-device", "too_long"),
    "tree": ("scripted", "random_tree"),
    "tree on the device": ("scripted-device", "random_tree"),
    "hostile": ("scripted", "hostile"),
    "hostile on the device": ("scripted-device", "hostile"),
    "ngram": ("ngram", ""),
}
LENGTH = 16
TARGET = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
LOGITS = reference_logits(TARGET)
TEXTS = tuple(tuple(LETTERS[token] for token in prompt) for prompt in PROMPTS)
"""The prompts, in letters."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH)
LONG = SamplingParams(temperature=0.0, max_tokens=48)

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
every_width = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"), installed=True)


@cache
def answer(prompt: tuple[int, ...], sampling_json: str, context: int, eos: tuple[int, ...]) -> Expected:
    sampling = SamplingParams.model_validate_json(sampling_json)
    return expected(LOGITS, prompt, sampling, context=context, eos=eos, tokenizer=TARGET.tokenizer)


def wanted(prompt: Sequence[int], sampling: SamplingParams, context: int = 64, eos: Sequence[int] = ()) -> Expected:
    return answer(tuple(prompt), sampling.model_dump_json(), context, tuple(eos))


def engine_for(registry: Registry, drafter: str, width: int, **options: Any) -> Engine:
    """Return an engine whose drafter knows what comes long after any end of the answer."""
    algorithm, behaviour = DRAFTERS[drafter]
    if algorithm not in registry.algorithms:
        pytest.skip(f"{algorithm} is not installed")
    config: dict[str, Any] = {"num_draft_tokens": width + 1}
    if behaviour:
        texts = [(*prompt, *wanted(prompt, LONG).ids) for prompt in TEXTS]
        config |= {"scripted_behaviour": behaviour, "scripted_texts": texts, "scripted_n": 2, "scripted_seed": width}
    options = {"page_size": 4, "context_length": 64, **options}
    return Engine(TARGET, algorithm=algorithm, config=config, registry=registry, **options)


def check(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    stream: bool,
    context: int = 64,
    eos: Sequence[int] = (),
) -> None:
    """Answer all, whole or streamed, and compare ids, text, reason, logprobs and counts with what is wanted."""
    asked = [one.model_copy(update={"logprobs": True}) for one in sampling]
    counted = engine.ledger.output_tokens
    if stream:
        deltas = list(engine.stream(prompts, asked))
        names = sorted({delta.request for delta in deltas}, key=int)
        parts = [[delta for delta in deltas if delta.request == name] for name in names]
        got = [
            (
                [token for delta in mine for token in delta.ids],
                "".join(delta.text for delta in mine),
                mine[-1].finish_reason,
                [entry.token for delta in mine for entry in delta.logprobs or ()],
            )
            for mine in parts
        ]
        assert all(delta.finish_reason is None for mine in parts for delta in mine[:-1])
    else:
        results = engine.generate(prompts, asked)
        got = [
            (result.ids, result.text, result.finish_reason, [entry.token for entry in result.logprobs or ()])
            for result in results
        ]
        assert [result.ledger["output_tokens"] for result in results] == [len(result.ids) for result in results]
        for result in results:
            assert 0 <= result.ledger["accepted"] <= result.ledger["drafted"]
    assert len(got) == len(prompts)
    for prompt, one, (ids, text, reason, entries) in zip(prompts, sampling, got, strict=True):
        right = wanted(prompt, one, context, eos)
        assert (ids, text, reason) == (right.ids, right.text, right.finish_reason), one
        assert entries == ids, "a logprob for each id, and for no other"
    assert engine.ledger.output_tokens - counted == sum(len(ids) for ids, *_ in got)
    assert engine.free_pages == engine.pages
    assert not engine.speculation.startswith("failed")


def rotation(drafter: str, width: int) -> tuple[int, bool]:
    """Return (batch, streamed): over the table each pair of drafter and width meets another pair of them."""
    number = 3 * list(DRAFTERS).index(drafter) + 2 * WIDTHS.index(width)
    return BATCHES[number % 4], bool(number // 4 % 2)


# --- the table -------------------------------------------------------------------------------------------------------


@every_width
@every_drafter
def test_stop_string_and_length_cap_inside_one_block_at_every_offset_in_both_orders(
    registry: Registry, drafter: str, width: int
) -> None:
    # Breaks with: length asked before the stop string (the tie), ids or logprobs kept behind the cut, text emitted
    # that a stop string took back.
    batch, stream = rotation(drafter, width)
    prompt = TEXTS[0]
    text = wanted(prompt, LONG).text
    options = [
        GREEDY.model_copy(update={"stop": (text[end - 2 : end],), "max_tokens": most})
        for end, most in product(range(2, 12), range(1, 12))
        if drafter == "right" or (end + most + width) % 3 == 0
    ]
    with engine_for(registry, drafter, width, max_running_requests=batch) as engine:
        check(engine, [prompt] * len(options), options, stream=stream)


@every_width
@every_drafter
def test_eos_at_every_index_of_the_plain_output(registry: Registry, drafter: str, width: int) -> None:
    """Index 0 to k and the bonus slot, as one id and as one of a list; with `ignore_eos` it is an ordinary token."""
    # Breaks with: stop rules on a step's last token only; EOS left out of ids or counts, or put into the text.
    batch, stream = rotation(drafter, width)
    plain = wanted(TEXTS[0], GREEDY)
    try:
        for at in range(width + 3):
            TARGET.eos_ids = (plain.ids[at],) if at % 2 else (EOS, plain.ids[at])
            ignoring = GREEDY.model_copy(update={"ignore_eos": True})
            with engine_for(registry, drafter, width, max_running_requests=batch) as engine:
                check(engine, TEXTS, [GREEDY] * len(TEXTS), stream=stream, eos=TARGET.eos_ids)
                check(engine, TEXTS[:2], [ignoring] * 2, stream=not stream, eos=())
    finally:
        TARGET.eos_ids = ()


@every_width
@every_drafter
def test_a_stop_string_may_straddle_two_steps_or_stand_first_in_a_block(
    registry: Registry, drafter: str, width: int
) -> None:
    """Strings of 1 to 4 tokens beginning at every place, so over every border between two steps, whatever the width."""
    # Breaks with: the stop string looked for in the newest piece of text only; ids emitted that it cuts later.
    batch, stream = rotation(drafter, width)
    text = wanted(TEXTS[0], LONG).text
    words = [text[at : at + size] for at in range(12) for size in (1, 2, 3, 4)]
    options = [GREEDY.model_copy(update={"stop": (word,), "max_tokens": 20}) for word in words]
    if drafter != "right":
        options = options[width % 3 :: 3]
    with engine_for(registry, drafter, width, max_running_requests=batch) as engine:
        check(engine, [TEXTS[0]] * len(options), options, stream=stream)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
@every_width
def test_max_tokens_1_to_20_with_a_perfect_drafter_delivers_exactly_that_many(
    registry: Registry, width: int, batch: int, device: bool
) -> None:
    # Breaks with: a draft that reaches past the cap (rate below 1), or a cap asked per step instead of per token.
    options = [GREEDY.model_copy(update={"max_tokens": most}) for most in range(1, 21)]
    prompts = [TEXTS[number % len(TEXTS)] for number in range(20)]
    drafter = "right on the device" if device else "right"
    with engine_for(registry, drafter, width, max_running_requests=batch) as engine:
        check(engine, prompts, options, stream=bool(batch % 2))
        for most, result in enumerate(engine.generate(prompts, options), start=1):
            assert len(result.ids) == most
            assert result.finish_reason == "length"
            assert result.ledger["accepted"] == result.ledger["drafted"]
            assert result.ledger["accept_rate"] == float(bool(width and most > 2))
            # One token by the prompt's forward, then width + 1 a round.
            assert result.ledger["rounds"] == -(-(most - 1) // (width + 1))


@every_width
@every_drafter
def test_window_32_prompts_24_to_31_end_with_length_at_the_window(registry: Registry, drafter: str, width: int) -> None:
    # Breaks with: drafts or pages beyond the window, an answer one token short of it or one over.
    batch, stream = rotation(drafter, width)
    whole = (*TEXTS[0], *wanted(TEXTS[0], LONG).ids)
    prompts = [whole[:length] for length in range(24, 32)]
    unbounded = SamplingParams(temperature=0.0)
    over = SamplingParams(temperature=0.0, max_tokens=100)
    with engine_for(registry, drafter, width, context_length=32, max_running_requests=batch) as engine:
        assert engine.max_tokens == 32
        check(engine, prompts, [unbounded] * 8, stream=stream, context=32)
        results = engine.generate(prompts, [over, unbounded] * 4)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(prompt) + len(result.ids) == 32
        assert result.finish_reason == "length"


# --- single cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("device", [False, True])
def test_a_stop_string_first_in_a_block_of_9_cuts_the_whole_block(
    registry: Registry, device: bool, stream: bool
) -> None:
    # The block after the first token is tokens 1 to 9: the word is token 1. Breaks with: a block kept or lost whole.
    plain = wanted(TEXTS[0], LONG)
    at = plain.text.index(plain.text[1])
    options = GREEDY.model_copy(update={"stop": (plain.text[1:3],)})
    drafter = "right on the device" if device else "right"
    with engine_for(registry, drafter, 8) as engine:
        check(engine, [TEXTS[0]], [options], stream=stream)
        (result,) = engine.generate([TEXTS[0]], options)
        assert result.ids == plain.ids[: plain.text.index(plain.text[1:3])]
        assert at <= 1
        assert result.ledger["rounds"] == 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@every_width
def test_sampled_answers_end_where_plain_decoding_ends(registry: Registry, width: int, rule: str) -> None:
    """I2 at temperature 0.8: a sampled answer is the plain one of its seed, cut by the same rules (coupled)."""
    # Under rejection the words differ, but not what a stop rule leaves of them.
    samples = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=12, stop=("ab", "c"), stop_token_ids=(LETTERS[7],))
        for seed in range(10)
    ]
    prompts = [TEXTS[seed % len(TEXTS)] for seed in range(10)]
    with engine_for(registry, "tree", width, speculative_acceptance=rule, max_running_requests=3) as engine:
        if rule == "coupled":
            for prompt, one, result in zip(prompts, samples, engine.generate(prompts, samples), strict=True):
                right = wanted_sampled(prompt, one)
                assert (result.ids, result.text, result.finish_reason) == right
        for result in engine.generate(prompts, samples):
            assert "ab" not in result.text
            assert "c" not in result.text
            assert LETTERS[7] not in result.ids[:-1]
            assert chr(LETTERS[7]) not in result.text
            assert len(result.ids) <= 12
            assert result.finish_reason == "length" or len(result.ids) < 12 or result.ids[-1] == LETTERS[7]


def wanted_sampled(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], str, str]:
    """Return the plain answer's cut, walked token by token, so that what comes first wins."""
    free = sampling.model_copy(update={"stop": (), "stop_token_ids": ()})
    ids = wanted(prompt, free).ids
    text = ""
    for count, token in enumerate(ids, start=1):
        if token in sampling.stop_token_ids:
            return ids[:count], text, "stop"
        text += chr(token)
        found = [text.index(word) for word in sampling.stop if word in text]
        if found:
            return ids[: min(found)], text[: min(found)], "stop"
    return ids, text, "length"


@pytest.mark.parametrize("width", [0, 3, 8])
def test_stop_wins_a_tie_with_length_and_length_a_miss_by_one(registry: Registry, width: int) -> None:
    plain = wanted(TEXTS[0], LONG)
    end = plain.text.index(plain.text[3:6]) + 3
    word = (plain.text[3:6],)
    with engine_for(registry, "right", width) as engine:
        tie, miss = engine.generate(
            [TEXTS[0]] * 2,
            [GREEDY.model_copy(update={"stop": word, "max_tokens": most}) for most in (end, end - 1)],
        )
    assert (tie.finish_reason, len(tie.ids)) == ("stop", end - 3)
    assert (miss.finish_reason, len(miss.ids)) == ("length", end - 1)


def test_a_streamed_id_is_never_taken_back(registry: Registry) -> None:
    """Deltas of a request that a stop string ends hold nothing of what it cuts, at the time they are given."""
    # Breaks with: ids handed out before the text that could still become a stop string.
    plain = wanted(TEXTS[0], LONG)
    word = plain.text[4:8]
    cut = plain.text.index(word)
    for width in WIDTHS:
        with engine_for(registry, "right", width) as engine:
            seen: list[int] = []
            for delta in engine.stream([TEXTS[0]], GREEDY.model_copy(update={"stop": (word,)})):
                seen += delta.ids
                assert seen == plain.ids[: len(seen)]
                assert len(seen) <= cut
            assert len(seen) == cut
