"""`n` answers to one prompt: the seed and the choice's index make each, whoever drafts."""

import json
from collections import Counter

import pytest

from specplug import cli, reference
from specplug.errors import UserError
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.oracle import chi_square_p, sequence_probabilities
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target, reference_logits, table_target
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer

WIDTHS = (0, 1, 2, 3, 5, 8)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return bench_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="module")
def target():
    return table_target(32, 2, 1)


@pytest.mark.parametrize("behaviour", ["right", "random_tree"])
@pytest.mark.parametrize("width", WIDTHS)
def test_each_choice_is_the_references(target, registry, width, behaviour):
    # Breaks with: a choice left out of the noise key, counts shared between choices, choice 0 unlike n = 1.
    sampling = SamplingParams(temperature=0.9, seed=8, max_tokens=14, frequency_penalty=0.8)
    logits = reference_logits(target)
    wanted = [[reference.decode(logits, p, sampling, choice=choice) for choice in range(4)] for p in PROMPTS]
    texts = [(*p, *ids) for p, answers in zip(PROMPTS, wanted, strict=True) for ids in answers]
    config = {"num_draft_tokens": width + 1, "scripted_texts": texts, "scripted_behaviour": behaviour}
    with Engine(target, algorithm="scripted", config=config, registry=registry, context_length=64) as engine:
        for n in (1, 2, 4):
            asked = sampling.model_copy(update={"n": n})
            for batch in (1, 2, 5):
                results = engine.generate(PROMPTS[:batch], asked)
                assert [result.choice for result in results] == [*range(n)] * batch
                assert [result.ids for result in results] == [ids for answers in wanted[:batch] for ids in answers[:n]]
    for answers in wanted:
        assert len({tuple(ids) for ids in answers}) == 4


def test_a_drafter_that_samples_knows_the_choice(registry):
    # Breaks with: draws for choice 0's noise, which the other choices would then reject.
    target = table_target(8, 1, 3)
    config = {"num_draft_tokens": 5, "scripted_seed": 3, "scripted_spread": 2.0}  # the target's own table
    sampling = SamplingParams(temperature=1.0, seed=2, max_tokens=21, n=5)
    with Engine(target, algorithm="scripted-dense", config=config, registry=registry, context_length=64) as engine:
        engine.generate([PROMPTS[0]], sampling)
        assert engine.ledger.accepted == engine.ledger.drafted > 0


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_choices_follow_the_distribution(registry, rule):
    # Breaks with: choices that share a coin or a residual, and so are not independent draws of a seed.
    target, prompt = table_target(8, 1, 0), PROMPTS[2]
    sampling = SamplingParams(temperature=0.9, top_k=4, max_tokens=3)
    with Engine(
        *(target,),
        algorithm="scripted-dense",
        config={"num_draft_tokens": 3},
        registry=registry,
        speculative_acceptance=rule,
        max_running_requests=128,
        context_length=16,
    ) as engine:
        each = [sampling.model_copy(update={"seed": seed, "n": 100}) for seed in range(15)]
        results = engine.generate([prompt] * len(each), each)
    counts = Counter(tuple(result.ids[:2]) for result in results)
    assert chi_square_p(counts, sequence_probabilities(reference_logits(target), prompt, sampling, 2)) > 0.001


def test_deltas_name_their_choice(target):
    with Engine(target, context_length=64) as engine:
        options = {"n": 3, "max_tokens": 9, "seed": 1}
        results = engine.generate(PROMPTS[:2], options)
        deltas = list(engine.stream(PROMPTS[:2], options))
        joined = {}
        for delta in deltas:
            joined.setdefault((int(delta.request), delta.choice), []).extend(delta.ids)
        assert [joined[key] for key in sorted(joined)] == [result.ids for result in results]
        assert sum(delta.finish_reason is not None for delta in deltas) == 6
        assert engine.free_pages == engine.pages


def test_choices_without_a_seed_share_one_and_can_be_replayed(target):
    with Engine(target, context_length=64) as engine:
        results = engine.generate([PROMPTS[0]], {"n": 3, "max_tokens": 9})
        assert len({result.seed for result in results}) == 1
        again = engine.generate([PROMPTS[0]], {"n": 3, "max_tokens": 9, "seed": results[0].seed})
        assert [result.ids for result in again] == [result.ids for result in results]
        assert engine.generate([PROMPTS[0]], {"n": 1, "max_tokens": 9})[0].seed != results[0].seed


def test_more_choices_than_slots_and_leaving_early(target):
    with Engine(target, context_length=64, max_running_requests=2) as engine:
        requests = engine.submit_choices(PROMPTS[0], {"n": 5, "max_tokens": 9, "seed": 1})
        assert [request.choice for request in requests] == [0, 1, 2, 3, 4]
        engine.step()
        engine.abort(requests[1])
        while any(request.output.finish_reason is None for request in requests):
            engine.step()
        assert [request.output.finish_reason for request in requests] == ["length", "abort", *["length"] * 3]
        assert engine.free_pages == engine.pages
        (fourth,) = engine.generate([PROMPTS[0]], {"n": 5, "max_tokens": 9, "seed": 1})[3:4]
        assert requests[3].output.ids == fourth.ids
        with pytest.raises(UserError, match="n 2: submit queues one answer"):
            engine.submit(PROMPTS[0], {"n": 2})


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    decoder_target(1, SIZE, folder=place, tokenizer=byte_tokenizer(), eos=EOS)
    return str(place)


def run(capsys, *args):
    code = cli.main(["generate", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_takes_every_option(folder, capsys):
    options = {"temperature": 0.8, "seed": 3, "max_tokens": 6, "min_tokens": 2, "n": 2, "top_logprobs": 1}
    options |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--logit-bias", '{"97": 3.5}', "--stop-token-ids", "98,99", "--ignore-eos", "--logprobs", "--json"]
    code, out, _ = run(capsys, folder, "--prompt", "hello", *flags)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    with Engine(folder) as engine:
        more = {"logit_bias": {97: 3.5}, "stop_token_ids": (98, 99), "ignore_eos": True, "logprobs": True}
        wanted = engine.generate(["hello"], options | more)
    assert [(line["choice"], line["ids"]) for line in lines] == [(result.choice, result.ids) for result in wanted]
    for line, result in zip(lines, wanted, strict=True):
        assert [entry["logprob"] for entry in line["logprobs"]] == [entry.logprob for entry in result.logprobs]
        assert [len(entry["top"]) for entry in line["logprobs"]] == [1] * len(result.ids)


def test_the_command_prints_choices_one_after_the_other(folder, capsys):
    code, out, _ = run(capsys, folder, "--prompt", "hello", "--n", "2", "--temperature", "1", "--max-tokens", "2")
    assert code == 0
    assert "prompt 1, turn 1, choice 1 (length)" in out
    assert "prompt 1, turn 1, choice 2 (length)" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--logprobs"], "--logprobs is shown in JSON only"),
        (["--top-logprobs", "2"], "--top-logprobs 2: needs logprobs"),
        (["--n", "0"], "--n 0: must be a whole number from 1 to 128"),
        (["--logit-bias", "5"], "--logit-bias 5: must map token ids to numbers"),
        (["--logit-bias", '{"1": 2, "1": 3}'], "stands there twice"),
        (["--logit-bias", "{"], "not valid JSON"),
        (["--repetition-penalty", "0"], "--repetition-penalty 0: must be a number, above 0"),
        (["--stop-token-ids", "1,x"], "--stop-token-ids x"),
        (["--min-tokens", "9", "--max-tokens", "3"], "--min-tokens 9: must be at most max_tokens"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, args, says):
    code, out, err = run(capsys, "nowhere", "--prompt", "x", *args)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_the_command_refuses_choices_of_a_conversation(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a", "b"]}\n', encoding="utf-8")
    code, _, err = run(capsys, "nowhere", "--prompts", str(prompts), "--n", "2")
    assert code == 2
    assert "--n 2 answers a single turn" in err
