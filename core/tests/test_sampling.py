"""What a seed, a temperature, the filters and the ends of an answer mean, whoever drafts."""

from collections import Counter
from itertools import product

import pytest
import torch

from specplug import reference
from specplug.accept import VerifyRow, accept
from specplug.runtime.engine import Engine
from specplug.runtime.sampler import processed_logits
from specplug.sampling import SamplingParams
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.oracle import chi_square_p
from specplug.testing.registry import bench_registry
from specplug.testing.targets import reference_logits, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

WIDTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return bench_registry(tmp_path_factory.mktemp("registry"))


def engine_for(target, registry, width, texts, behaviour="right", **more):
    config = {"num_draft_tokens": width + 1, "scripted_texts": texts, "scripted_behaviour": behaviour}
    more = {"max_running_requests": 5, "context_length": 64, **more}
    return Engine(target, algorithm="scripted", config=config, registry=registry, **more)


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["scripted", "scripted-dense"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("width", WIDTHS)
def test_min_p_of_1_equals_greedy_also_with_ties(registry, width, rule, algorithm):
    # Breaks with: noise that chooses among tokens of equal logits, which a floor of log 1 keeps.
    target = table_target(16, 2, 3, ties=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    wanted = [reference.decode(reference_logits(target), prompt, greedy) for prompt in PROMPTS]
    config = {"num_draft_tokens": width + 1}
    if algorithm == "scripted":
        config["scripted_texts"] = [(*prompt, *ids) for prompt, ids in zip(PROMPTS, wanted, strict=True)]
    with Engine(
        *(target,),
        algorithm=algorithm,
        config=config,
        registry=registry,
        context_length=64,
        speculative_acceptance=rule,
    ) as engine:
        for batch in BATCHES:
            asked = [SamplingParams(temperature=1.3, min_p=1.0, max_tokens=16, seed=seed) for seed in range(batch)]
            assert [result.ids for result in engine.generate(PROMPTS[:batch], asked)] == wanted[:batch]


def test_filters_keep_the_lowest_of_equal_ids():
    # Breaks with: an unstable sort, or topk's order of equal values.
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 1.0])
    for options, kept in (
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.3}, [1, 3]),
        ({"min_p": 0.9}, [1, 3, 4]),
        ({"min_p": 0.3}, [1, 2, 3, 4, 5]),
        ({"top_k": 4, "min_p": 0.9}, [1, 3, 4]),
    ):
        values = processed_logits(logits, SamplingParams(**options))
        assert torch.nonzero(values > -1e9).flatten().tolist() == kept, options


def test_filters_come_after_the_temperature():
    # Breaks with: top_p or min_p of the distribution at temperature 1.
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for temperature, options, kept in (
        (1.0, {"top_p": 0.6}, [0, 1]),
        (0.2, {"top_p": 0.6}, [0]),
        (5.0, {"top_p": 0.6}, [0, 1, 2]),
        (1.0, {"min_p": 0.2}, [0, 1, 2]),
        (0.5, {"min_p": 0.2}, [0, 1]),
    ):
        values = processed_logits(logits, SamplingParams(temperature=temperature, **options))
        assert torch.nonzero(values > -1e9).flatten().tolist() == kept, (temperature, options)
        p = reference.distribution(logits, SamplingParams(temperature=temperature, **options))
        assert torch.allclose(torch.softmax(values, 0), p)


# --- seeds and temperature -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_seed_gives_the_same_text_alone_late_and_in_company(registry, rule):
    # Breaks with: noise from a generator that other requests advance, or keyed by slot or batch position.
    target = table_target(32, 2, 1)
    asked = SamplingParams(temperature=0.9, seed=21, max_tokens=16)
    texts = [(*prompt, *reference.decode(reference_logits(target), prompt, asked)) for prompt in PROMPTS]
    with engine_for(target, registry, 3, texts, "random_tree", speculative_acceptance=rule) as engine:
        (alone,) = engine.generate([PROMPTS[0]], asked)
        for number in range(50):
            engine.generate([PROMPTS[number % 5]], {"max_tokens": 2})
        (late,) = engine.generate([PROMPTS[0]], asked)
        others = [SamplingParams(temperature=0.7, seed=seed, max_tokens=20) for seed in range(3)]
        company = engine.generate([PROMPTS[1], PROMPTS[2], PROMPTS[0], PROMPTS[3]], [*others[:2], asked, others[2]])
    assert alone.ids == late.ids == company[2].ids


def test_a_drawn_seed_is_reported_and_replays():
    with Engine(table_target(32, 2, 1), context_length=64) as engine:
        first, second = engine.generate([PROMPTS[0]] * 2, {"max_tokens": 12})
        assert first.seed != second.seed
        for result in (first, second):
            (again,) = engine.generate([PROMPTS[0]], {"max_tokens": 12, "seed": result.seed})
            assert again.ids == result.ids


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.8, 1.5, 4.0])
def test_temperature_reaches_the_drafter(registry, temperature):
    # Breaks with: drafts drawn at temperature 1: with the target's own table every draft must be accepted.
    target = table_target(8, 1, 3)
    config = {"num_draft_tokens": 6, "scripted_seed": 3, "scripted_spread": 2.0}
    asked = [SamplingParams(temperature=temperature, seed=seed, max_tokens=25) for seed in range(5)]
    with Engine(target, algorithm="scripted-dense", config=config, registry=registry, context_length=64) as engine:
        for prompt, one, result in zip(PROMPTS, asked, engine.generate(PROMPTS, asked), strict=True):
            assert result.ids == reference.decode(reference_logits(target), prompt, one)
        assert engine.ledger.accepted == engine.ledger.drafted > 0


def test_a_draft_sampled_after_top_k_but_reported_before_is_caught():
    # Breaks with: acceptance that does not read q; shows that the honest case below would fail if q were wrong.
    generator = torch.Generator().manual_seed(1)
    p, raw = torch.softmax(torch.randn(8, generator=generator), 0), torch.randn(8, generator=generator) * 1.5
    sampled = reference.distribution(raw, SamplingParams(top_k=2))
    fits = {}
    for name, reported in (("honest", sampled), ("dishonest", torch.softmax(raw, 0))):
        counts = Counter()
        for seed in range(3000):
            drafted = reference.draw(sampled, SamplingParams(seed=seed), 1, "draft")
            row = VerifyRow(0, 0, SamplingParams(), seed, 0, [drafted], [-1], reported[None])
            (verdict,) = accept("rejection", p.log().repeat(2, 1), [row])
            counts[drafted if verdict.path else verdict.token] += 1
        fits[name] = chi_square_p(counts, dict(enumerate(p.tolist())))
    assert fits["honest"] > 0.001
    assert fits["dishonest"] < 1e-6


def test_a_replacement_does_not_use_the_noise_of_the_draft_it_replaces():
    # Breaks with: the residual drawn from stream "draft" or "target": given the draft, the replacement would lean.
    p = torch.tensor([0.05, 0.7, 0.25])
    q = torch.tensor([0.3, 0.6, 0.1])  # of what remains, token 1 was the likeliest draft
    counts = Counter()
    for seed in range(4000):
        drafted = reference.draw(q, SamplingParams(seed=seed), 1, "draft")
        row = VerifyRow(0, 0, SamplingParams(), seed, 0, [drafted], [-1], q[None])
        (verdict,) = accept("rejection", p.log().repeat(2, 1), [row])
        if drafted == 0 and not verdict.path:
            counts[verdict.token] += 1
    assert sum(counts.values()) > 800
    assert chi_square_p(counts, {1: 0.4, 2: 0.6}) > 0.001


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_every_end_wherever_it_falls_in_a_block(registry, width):
    # Breaks with: the first EOS id only, stop ids in the text, ignore_eos that drops the request's own stop ids.
    target = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    prompt = [LETTERS[token] for token in PROMPTS[0]]
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    ids = reference.decode(reference_logits(target), prompt, greedy)
    text = bytes(ids).decode()
    for at in range(10):
        end = ids.index(ids[at])
        target.eos_ids = (255, ids[at])
        with engine_for(target, registry, width, [(*prompt, *ids)]) as engine:
            by_eos, ignored, both, by_id = engine.generate(
                [prompt] * 4,
                [
                    greedy,
                    greedy.model_copy(update={"ignore_eos": True}),
                    greedy.model_copy(update={"ignore_eos": True, "stop_token_ids": (ids[12],)}),
                    greedy.model_copy(update={"stop_token_ids": (254, ids[2])}),
                ],
            )
        assert (by_eos.ids, by_eos.text, by_eos.finish_reason) == (ids[: end + 1], text[:end], "stop")
        assert (ignored.ids, ignored.text, ignored.finish_reason) == (ids, text, "length")
        own = ids.index(ids[12])
        assert (both.ids, both.text, both.finish_reason) == (ids[: own + 1], text[:own], "stop")
        first = min(end, ids.index(ids[2]))
        assert (by_id.ids, by_id.text, by_id.finish_reason) == (ids[: first + 1], text[:first], "stop")
        assert by_id.ledger["output_tokens"] == first + 1


@pytest.mark.parametrize("width", [0, 2, 5, 8])
def test_the_first_rule_wins(registry, width):
    # Breaks with: length asked before a stop (a tie goes to stop), or a stop string before a stop id of one token.
    target = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    prompt = [LETTERS[token] for token in PROMPTS[0]]
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    ids = reference.decode(reference_logits(target), prompt, greedy)
    text = bytes(ids).decode()
    with engine_for(target, registry, width, [(*prompt, *ids)]) as engine:
        for most, stop_id, word_end in product((4, 5, 6), (3, 4, 5), (4, 5, 6)):
            word = text[word_end - 2 : word_end]
            update = {"max_tokens": most, "stop_token_ids": (ids[stop_id],), "stop": (word,)}
            (result,) = engine.generate([prompt], greedy.model_copy(update=update))
            by_id, by_word = ids.index(ids[stop_id]) + 1, text.index(word) + 2  # tokens at which each fires
            if by_id <= min(by_word, most):
                wanted = (ids[:by_id], text[: by_id - 1], "stop")
            elif by_word <= most:
                wanted = (ids[: by_word - 2], text[: by_word - 2], "stop")
            else:
                wanted = (ids[:most], text[:most], "length")
            assert (result.ids, result.text, result.finish_reason) == wanted, update
