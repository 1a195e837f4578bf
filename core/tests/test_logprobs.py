"""Log-probabilities: one per output token, of the model's own distribution, whatever the drafter and the options."""

import pytest
import torch

from specplug import reference
from specplug.runtime.engine import Engine
from specplug.runtime.logprobs import token_logprobs
from specplug.sampling import SamplingParams
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target, reference_logits, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

WIDTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (1, 2, 3, 5)
CHANGED = {"temperature": 0.8, "seed": 4, "frequency_penalty": 1.0, "logit_bias": {2: 3.0}, "top_k": 5, "min_tokens": 6}


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return bench_registry(tmp_path_factory.mktemp("registry"))


def engine_for(target, registry, width, texts, behaviour="right"):
    config = {"num_draft_tokens": width + 1, "scripted_texts": texts, "scripted_behaviour": behaviour}
    return Engine(
        target, algorithm="scripted", config=config, registry=registry, max_running_requests=5, context_length=64
    )


def check(logits, prompt, result, top):
    assert [entry.token for entry in result.logprobs] == result.ids
    wanted = reference.logprobs(logits, prompt, result.ids)
    for entry, row in zip(result.logprobs, wanted, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert entry.logprob < 0
        ranked = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[:top]
        assert [token for token, _ in entry.top] == ranked
        assert [value for _, value in entry.top] == pytest.approx(row[ranked].tolist(), abs=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, CHANGED], ids=["greedy", "changed"])
@pytest.mark.parametrize("behaviour", ["right", "random_tree"])
@pytest.mark.parametrize("width", WIDTHS)
def test_are_those_of_the_plain_run(registry, width, behaviour, options):
    # Breaks with: the row of the leading node instead of the accepted one, processed logits, the bonus token's lost.
    target = table_target(8, 2, 5, eos=(7,))
    logits = reference_logits(target)
    sampling = SamplingParams(max_tokens=18, logprobs=True, top_logprobs=4, **options)
    ids = [reference.decode(logits, prompt, sampling, (7,)) for prompt in PROMPTS]
    texts = [(*prompt, *answer) for prompt, answer in zip(PROMPTS, ids, strict=True)]
    assert any(answer[-1] == 7 for answer in ids)  # EOS has an entry too
    with engine_for(target, registry, width, texts, behaviour) as engine:
        for batch in BATCHES:
            results = engine.generate(PROMPTS[:batch], sampling)
            assert [result.ids for result in results] == ids[:batch]
            for prompt, result in zip(PROMPTS, results, strict=False):
                check(logits, prompt, result, 4)


def test_a_decoder_gives_what_it_gives_plain(registry):
    target = decoder_target(2)
    sampling = SamplingParams(max_tokens=16, logprobs=True, top_logprobs=2, temperature=0.7, seed=1)
    logits = reference_logits(target)
    with Engine(target, context_length=64) as engine:
        plain = engine.generate(PROMPTS, sampling)
    texts = [(*prompt, *result.ids) for prompt, result in zip(PROMPTS, plain, strict=True)]
    for behaviour in ("right", "ragged", "random_tree"):
        with engine_for(target, registry, 5, texts, behaviour) as engine:
            results = engine.generate(PROMPTS, sampling)
            assert engine.ledger.accepted > 0
        for prompt, mine, theirs in zip(PROMPTS, results, plain, strict=True):
            check(logits, prompt, mine, 2)
            assert [a.logprob for a in mine.logprobs] == pytest.approx([b.logprob for b in theirs.logprobs], abs=1e-3)


@pytest.mark.parametrize("width", WIDTHS)
def test_stop_strings_and_stop_ids_cut_them(registry, width):
    # Breaks with: entries left behind a cut, or held back less than the ids are.
    target = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    prompt = [LETTERS[token] for token in PROMPTS[0]]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, logprobs=True)
    logits = reference_logits(target)
    ids = reference.decode(logits, prompt, sampling)
    text = bytes(ids).decode()
    with engine_for(target, registry, width, [(*prompt, *ids)]) as engine:
        for at in range(1, 10):
            for changes in ({"stop": (text[at : at + 2],)}, {"stop_token_ids": (ids[at],)}, {"max_tokens": at}):
                asked = sampling.model_copy(update=changes)
                (result,) = engine.generate([prompt], asked)
                check(logits, prompt, result, 0)
                assert len(result.ids) == result.ledger["output_tokens"]
                deltas = list(engine.stream([prompt], asked))
                assert all(len(delta.logprobs) == len(delta.ids) for delta in deltas)
                assert [entry for delta in deltas for entry in delta.logprobs] == result.logprobs
                request = engine.submit(prompt, asked)
                while request.output.finish_reason is None:
                    engine.step()
                assert request.output.logprobs == result.logprobs


def test_only_those_who_ask_get_them(registry):
    target = table_target(8, 2, 5)
    asks, does_not = SamplingParams(max_tokens=6, logprobs=True, seed=1), SamplingParams(max_tokens=6, seed=1)
    with Engine(target, context_length=64) as engine:
        first, second = engine.generate(PROMPTS[:2], [asks, does_not])
        assert (len(first.logprobs), second.logprobs) == (6, None)
        assert all(entry.top == () for entry in first.logprobs)
        assert {delta.logprobs for delta in engine.stream(PROMPTS[:1], does_not)} == {None}


def test_tokens_before_a_failure_keep_theirs(registry):
    # Breaks with: an entry for the token that was never chosen.
    target = table_target(8, 2, 5)
    prompt, sampling = PROMPTS[0], SamplingParams(max_tokens=12, temperature=0.0, logprobs=True)
    logits = reference_logits(target)
    ids = reference.decode(logits, prompt, sampling)

    def processor(tokens, values):
        return values if len(tokens) < len(prompt) + 4 else None

    with engine_for(target, registry, 8, [(*prompt, *ids)]) as engine:
        request = engine.submit(prompt, sampling, logits_processor=processor)
        deltas = []
        while request.output.finish_reason is None:
            deltas += engine.step()
    assert [entry.token for delta in deltas for entry in delta.logprobs] == ids[:4]


def test_equal_logits_are_ranked_by_id():
    # Breaks with: topk's own order, which leaves equal values open; more tokens asked for than there are.
    logits = torch.zeros(1, 40)
    logits[0, [30, 3, 17]] = 2.0
    (entry,) = token_logprobs(logits, [5], 6)
    assert [token for token, _ in entry.top] == [3, 17, 30, 0, 1, 2]
    assert entry.top[0][1] - entry.logprob == pytest.approx(2.0)
    assert len(token_logprobs(logits[:, :4], [1], 20)[0].top) == 4
