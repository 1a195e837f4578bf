"""Logits processors at every drafted position, against the oracle that recounts from the tokens."""

import random
from collections import Counter
from itertools import product

import pytest
import torch

from specplug import reference, tree
from specplug.accept import VerifyRow, accept
from specplug.runtime.engine import Engine
from specplug.runtime.processors import Processors, processors_for
from specplug.sampling import SamplingParams
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.oracle import chi_square_p
from specplug.testing.registry import bench_registry
from specplug.testing.targets import reference_logits, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

WIDTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (1, 2, 3, 5)
VOCAB = 8  # small, so that answers go round in circles and penalties bite
EOS = (6, 7)
LENGTH = 20

OPTIONS = {
    "frequency": {"ignore_eos": True, "frequency_penalty": 1.5},
    "frequency below 0": {"ignore_eos": True, "frequency_penalty": -1.0},
    "presence": {"ignore_eos": True, "presence_penalty": 1.9},
    "repetition": {"ignore_eos": True, "repetition_penalty": 1.7},
    "repetition below 1": {"ignore_eos": True, "repetition_penalty": 0.5},
    "bias": {"ignore_eos": True, "logit_bias": {1: 2.5, 3: -4.0, 6: -100.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (2,)},
    "all": {
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {0: -1.5, 4: 1.0},
        "min_tokens": 7,
        "stop_token_ids": (5,),
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return bench_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="module")
def target():
    return table_target(VOCAB, 2, 5, eos=EOS)


def options(name, temperature):
    return SamplingParams(temperature=temperature, seed=11, max_tokens=LENGTH, **OPTIONS[name])


def engine_for(target, registry, width, texts, behaviour="right", algorithm="scripted", **more):
    config = {"num_draft_tokens": width + 1, "scripted_texts": texts, "scripted_behaviour": behaviour}
    more = {"max_running_requests": 5, "page_size": 4, "context_length": 64, **more}
    return Engine(target, algorithm=algorithm, config=config, registry=registry, **more)


# --- engine against the oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", OPTIONS)
def test_equal_the_reference_at_every_width_and_batch(target, registry, name, temperature):
    # Breaks with: penalties from committed tokens only (accept rate falls below 1), prompt tokens counted by the
    # output penalties or left out of repetition, another order of the processors, a processor skipped on greedy rows.
    sampling = options(name, temperature)
    logits = reference_logits(target)
    wanted = [reference.decode(logits, prompt, sampling, EOS) for prompt in PROMPTS]
    plain = sampling.model_copy(
        update={"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    )
    unprocessed = [reference.decode(logits, prompt, plain, EOS) for prompt in PROMPTS]
    known = {
        "right": [(*prompt, *ids) for prompt, ids in zip(PROMPTS, wanted, strict=True)],
        "random_tree": [(*prompt, *ids) for prompt, ids in zip(PROMPTS, wanted, strict=True)],
        "wrong": [(*prompt, *ids) for prompt, ids in zip(PROMPTS, unprocessed, strict=True)],
    }
    for width, (behaviour, texts) in product(WIDTHS, known.items()):
        with engine_for(target, registry, width, texts, behaviour) as engine:
            for batch in BATCHES if behaviour == "right" else (3,):
                results = engine.generate(PROMPTS[:batch], sampling)
                assert [result.ids for result in results] == wanted[:batch], f"{name}, {width} drafts, {behaviour}"
            if width and behaviour == "right":
                assert engine.ledger.accepted == engine.ledger.drafted > 0


def test_processors_change_something(target):
    # The table above proves nothing if an option leaves the answer as it is.
    logits = reference_logits(target)
    for name in OPTIONS:
        plain = SamplingParams(temperature=0.8, seed=11, max_tokens=LENGTH)
        for temperature in (0.0, 0.8):
            both = options(name, temperature), plain.model_copy(update={"temperature": temperature})
            with_it, without = ([reference.decode(logits, prompt, s, EOS) for prompt in PROMPTS] for s in both)
            assert with_it != without, (name, temperature)


def test_a_bias_decides_against_and_for_the_drafts(target, registry):
    # Breaks with: a bias applied to the root's position only.
    logits = reference_logits(target)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    always = reference.decode(logits, PROMPTS[0], greedy)
    texts = [(*PROMPTS[0], *always)]
    common = Counter(always).most_common(1)[0][0]
    never = next(token for token in range(VOCAB) if token not in always[:8] and token not in EOS)
    for width in WIDTHS:
        with engine_for(target, registry, width, texts) as engine:
            (banned,) = engine.generate([PROMPTS[0]], greedy.model_copy(update={"logit_bias": {common: -100.0}}))
            (forced,) = engine.generate([PROMPTS[0]], greedy.model_copy(update={"logit_bias": {never: 100.0}}))
        assert common not in banned.ids
        assert forced.ids == [never] * 12


def test_counters_equal_a_recount_after_each_step(target, registry):
    # Breaks with: drafts left in the counts after a verify, a token counted twice, preemption counting again.
    sampling = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True, frequency_penalty=0.6)
    logits = reference_logits(target)
    texts = [(*prompt, *reference.decode(logits, prompt, sampling)[:9], *[3] * 15) for prompt in PROMPTS]
    for width in WIDTHS:
        with engine_for(target, registry, width, texts, max_total_tokens=60, context_length=60) as engine:
            requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
            while any(request.output.finish_reason is None for request in requests):
                engine.step()
                for request in requests:
                    assert request.processors is not None
                    assert request.processors.counts == Counter(request.tokens[request.prompt_len :])
            assert engine.preemptions > 0
            assert engine.free_pages == engine.pages


def test_rows_without_options_have_no_processors(target):
    # Breaks with: processors built for everybody, or a reached min_tokens that keeps costing.
    with Engine(target, context_length=64) as engine:
        assert engine.submit(PROMPTS[0], {"top_k": 3, "stop_token_ids": [1]}).processors is None
        request = engine.submit(PROMPTS[0], {"min_tokens": 2, "max_tokens": 4, "temperature": 0})
        assert request.processors is not None
        assert request.processors.active
        while request.output.finish_reason is None:
            engine.step()
        assert not request.processors.active


# --- accept against the oracle ---------------------------------------------------------------------------------------


def random_tree(rng, right):
    """A random tree in which many nodes are what plain decoding says at their depth."""
    nodes = rng.randrange(0, 9)
    parents = [node - 1 if rng.random() < 0.4 else rng.randrange(-1, node) for node in range(nodes)]
    tokens = []
    for node, (parent, depth) in enumerate(zip(parents, tree.depths(parents), strict=True)):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        token = right[depth - 1]
        if token in taken or rng.random() < 0.3:
            token = rng.choice([token for token in range(12) if token not in taken])
        tokens.append(token)
    return tokens, parents


def no_repeat(tokens, logits):
    logits[tokens[-1]] = float("-inf")
    return logits


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("dense", [False, True])
def test_accept_equals_the_reference_with_all_options_on(rule, temperature, dense):
    # Breaks with: p - q of the unprocessed p, a path that lacks or repeats a draft, the choice left out of a draw.
    rng = random.Random(3)
    accepted = 0
    for case in range(80):
        table = torch.randn(12, 12, generator=torch.Generator().manual_seed(case)) * 1.5
        prompt = [rng.randrange(12) for _ in range(rng.randrange(1, 5))]
        output = [rng.randrange(12) for _ in range(rng.randrange(0, 5))]
        sampling = SamplingParams(
            temperature=temperature,
            seed=case,
            frequency_penalty=rng.choice([0.0, 0.8]),
            presence_penalty=rng.choice([0.0, 0.5, -0.5]),
            repetition_penalty=rng.choice([1.0, 1.4, 0.7]),
            logit_bias=rng.choice([{}, {3: 1.0, 5: -2.0}]),
            min_tokens=rng.choice([0, 4]),
            stop_token_ids=(1,),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]),
        )
        custom = rng.choice([None, no_repeat])
        choice = rng.randrange(3)
        around = reference.Around(len(prompt), (2,), choice, custom)
        text = [*prompt, *output]

        def target(tokens, table=table):
            return table[torch.tensor(tokens)]

        right = []
        for index in range(len(text), len(text) + 9):
            p = reference.following(target, [*text, *right], sampling, around)
            right.append(reference.draw(p, sampling, index, choice=choice))
        tokens, parents = random_tree(rng, right)
        q = torch.softmax(torch.randn(len(tokens), 12, generator=torch.Generator().manual_seed(case)), 1)
        expected = reference.accept(
            target,
            *(text, tokens, parents, q if dense else None, sampling, rule, around),
        )
        made = processors_for(sampling, prompt, ends=around.ends(sampling), vocab=12, custom=custom)
        for token in output:
            if made:
                made.commit(token)
        row = VerifyRow(
            *(0, len(text) - 1, sampling, case, choice, tokens, parents, q if dense else None),
            processors=made if made and made.active else None,
        )
        (verdict,) = accept(rule, table[torch.tensor([text[-1], *tokens])], [row])
        assert [*(tokens[node] for node in verdict.path), verdict.token] == expected, case
        accepted += len(verdict.path)
    assert accepted > 40


def test_counts_are_restored_when_a_draft_repeats_itself():
    # Breaks with: rewinding that forgets a token seen twice on the path, or leaves a new token behind.
    sampling = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    made = Processors(sampling, [1, 2], ends=(), vocab=200)
    for token in range(100, 190):  # more distinct tokens than the arrays begin with
        made.commit(token)
    logits = torch.linspace(-1, 1, 200)
    before = made.apply(logits, [])
    path = made.apply(logits, [5, 5, 100])
    assert path[5] == logits[5] * 2.0 - 2.0
    assert path[100] == logits[100] / 2.0 - 2.0
    assert torch.equal(made.apply(logits, []), before)
    assert made.counts == dict.fromkeys(range(100, 190), 1)


def test_a_mask_holds_against_the_custom_processor():
    # Breaks with: the mask applied only before the custom processor.
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, 4] = False
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature)
        made = Processors(sampling, [1], ends=(), vocab=12, custom=lambda tokens, logits: torch.eye(12)[4] * 50)
        row = VerifyRow(0, 0, sampling, 1, 0, processors=made)
        assert accept("coupled", torch.zeros(1, 12), [row], mask)[0].token != 4


@pytest.mark.parametrize("algorithm", ["scripted", "scripted-dense"])
def test_rejection_follows_the_processed_distribution(registry, algorithm):
    # Breaks with: a residual of the unprocessed p, or penalties that do not see the drafts above.
    target = table_target(VOCAB, 1, 0)
    draws, prompt = 2000, PROMPTS[1]
    sampling = SamplingParams(
        max_tokens=4, frequency_penalty=1.5, repetition_penalty=1.4, logit_bias={3: 1.0}, top_k=4, min_p=0.02
    )
    logits, around = reference_logits(target), reference.Around(len(prompt))
    exact = {(): 1.0}
    for _ in range(3):
        exact = {
            (*head, token): mass * float(p[token])
            for head, mass in exact.items()
            for p in [reference.following(logits, [*prompt, *head], sampling, around)]
            for token in torch.nonzero(p).flatten().tolist()
        }
    likeliest = max(exact, key=exact.get)
    config = {"num_draft_tokens": 4}
    if algorithm == "scripted":
        config |= {"scripted_texts": [(*prompt, *likeliest, 1, 2)]}
    with Engine(
        *(target,),
        algorithm=algorithm,
        config=config,
        registry=registry,
        speculative_acceptance="rejection",
        max_running_requests=128,
        context_length=16,
    ) as engine:
        each = [sampling.model_copy(update={"seed": seed}) for seed in range(draws)]
        counts = Counter(tuple(result.ids[:3]) for result in engine.generate([prompt] * draws, each))
        assert 0 < engine.ledger.accepted < engine.ledger.drafted
    assert chi_square_p(counts, exact) > 0.001


# --- min_tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_min_tokens_bans_every_end(target, registry, width):
    # Breaks with: the output position of a draft counted from the root, or only EOS banned and not the stop ids.
    logits = reference_logits(target)
    for least in (0, 1, 3, 4, 8, 11):
        sampling = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=least, stop_token_ids=(0, 2, 4))
        wanted = [reference.decode(logits, prompt, sampling, EOS) for prompt in PROMPTS]
        texts = [(*prompt, *ids, 1, 1, 1) for prompt, ids in zip(PROMPTS, wanted, strict=True)]
        with engine_for(target, registry, width, texts) as engine:
            results = engine.generate(PROMPTS, sampling)
        for result, ids in zip(results, wanted, strict=True):
            assert result.ids == ids
            assert least <= len(result.ids) <= 12
            assert not {0, 2, 4, *EOS} & set(result.ids[:least])
            assert result.finish_reason == ("stop" if result.ids[-1] in {0, 2, 4, *EOS} else "length")


@pytest.mark.parametrize("width", [0, 3, 8])
def test_a_stop_string_counts_behind_min_tokens(registry, width):
    # Breaks with: a stop string found in the text of the first min_tokens tokens, or one that reaches into it.
    target = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    prompt = [LETTERS[token] for token in PROMPTS[0]]
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    ids = reference.decode(reference_logits(target), prompt, greedy)
    text = bytes(ids).decode()
    with engine_for(target, registry, width, [(*prompt, *ids)]) as engine:
        for least in range(1, 8):
            for word in (text[least - 1], text[least - 1 : least + 1], text[least : least + 2]):
                asked = greedy.model_copy(update={"min_tokens": least, "stop": (word,)})
                (result,) = engine.generate([prompt], asked)
                at = text.find(word, least)
                assert (result.text, result.finish_reason) == ((text[:at], "stop") if at >= 0 else (text, "length"))
                assert len(result.ids) == len(result.text) >= least


def test_no_token_left_is_an_error_of_that_request():
    # Breaks with: argmax over nothing, which is token 0.
    sampling = SamplingParams(min_tokens=3, stop_token_ids=(0,))
    made = Processors(sampling, [1], ends=(0,), vocab=4)
    only = torch.tensor([[True, False, False, False]])
    row = VerifyRow(0, 0, sampling, 1, 0, processors=made)
    (verdict,) = accept("coupled", torch.zeros(1, 4), [row], only)
    assert "no token is left at output position 0" in verdict.error
    assert tree.is_chain(verdict.path)
