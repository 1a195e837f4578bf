"""What becomes of a checkpoint's generation_config.json: suppressed tokens, the server's defaults, and the warning."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from specplug import cli, reference
from specplug.generation import FILE, objection, sampling_defaults, suppressed
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.spec import Checkpoint
from specplug.testing.paths import device_path
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target, reference_logits, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

VOCAB, EOS = 8, (6, 7)
PROMPT = [1, 2, 3]
GENERATION = {"suppress_tokens": [2, 5, 999, -1], "begin_suppress_tokens": [0, 3, 6]}


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return bench_registry(tmp_path_factory.mktemp("registry"))


def forbids(tokens, logits):
    """The same for the oracle, by hand."""
    logits[[2, 5]] = float("-inf")
    if len(tokens) == len(PROMPT):
        logits[[0, 3, 6]] = float("-inf")
    return logits


@pytest.mark.parametrize("device", [False, True], ids=["host path", "device path"])
@pytest.mark.parametrize("behaviour", ["right", "wrong", "random_tree"])
def test_suppressed_tokens_are_never_said(registry, device, behaviour):
    # Breaks with: the root's position only, drafts accepted unasked, a ban of the first token that holds on drafts.
    target = table_target(VOCAB, 2, 5, eos=EOS)
    unsuppressed = replace(target)
    target = replace(target, checkpoint=Checkpoint(config=target.model.config, tensors={}, generation=GENERATION))
    logits, changed = reference_logits(target), 0
    for given in (
        {"temperature": 0.0},
        {"temperature": 0.0, "min_tokens": 6, "logit_bias": {2: 100.0, 4: 1.0}, "repetition_penalty": 1.4},
        {"temperature": 0.9, "seed": 3, "min_tokens": 1},
        {"temperature": 0.9, "seed": 4, "ignore_eos": True, "top_p": 0.9},
    ):
        sampling = SamplingParams(max_tokens=14, **given)
        wanted = reference.decode(logits, PROMPT, sampling, EOS, processor=forbids)
        plain = reference.decode(logits, PROMPT, sampling, EOS)
        changed += wanted != plain
        texts = [[*PROMPT, *(plain if behaviour == "wrong" else wanted)]]
        config = {"num_draft_tokens": 5, "scripted_texts": texts, "scripted_behaviour": behaviour}
        with device_path() if device else nullcontext():
            engine = Engine(target, algorithm="scripted", config=config, registry=registry, context_length=64)
        with engine:
            [result] = engine.generate([PROMPT], sampling)
            assert result.ids == wanted
            if behaviour == "right":
                assert engine.ledger.accepted == engine.ledger.drafted > 0
    assert changed == 4
    with Engine(unsuppressed) as engine:
        request = engine.submit(PROMPT, {"temperature": 0})
        assert request.processors is None  # who is not concerned pays nothing


def test_ids_are_those_of_the_vocabulary():
    assert suppressed(GENERATION, 6) == ((2, 5), (0, 3))
    assert suppressed({}, 6) == ((), ())


def test_defaults_are_what_differs_and_is_valid():
    file = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": None, "repetition_penalty": 0, "max_new_tokens": 9}
    assert sampling_defaults(file) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forced_eos_token_id", 2),
        ("forced_decoder_ids", [[1, 50]]),
        ("bad_words_ids", [[5]]),
        ("no_repeat_ngram_size", 3),
        ("max_new_tokens", 2048),
        ("do_sample", False),
        ("num_beams", 4),
        ("stop_strings", ["x"]),
        ("suppress_tokens", "5"),
        ("suppress_tokens", [True]),
        ("repetition_penalty", 0),
        ("temperature", "0.5"),
        ("top_p", float("nan")),
        ("a_field_of_tomorrow", {"x": 1}),
    ],
)
def test_what_is_not_carried_out_is_named(field, value):
    found = objection({"eos_token_id": 2, field: value, "top_k": 7})
    assert found is not None
    assert f"{field} {value}" in found.message
    assert "top_k" not in found.message
    assert "\n" not in found.message


def test_files_that_ask_for_nothing_more_are_not_spoken_of():
    from transformers import GenerationConfig

    asked = {"suppress_tokens": [1], "temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 2]}
    assert objection(GenerationConfig(**asked).to_dict()) is None
    assert objection({"max_length": 20, "bos_token_id": 0, "_from_model_config": True, "num_beams": 1}) is None


def test_doctor_lists_both_kinds(tmp_path, capsys):
    decoder_target(1, SIZE, folder=tmp_path / "model", tokenizer=byte_tokenizer())
    file = {"temperature": 0.6, "forced_bos_token_id": 3, "min_new_tokens": 2}
    (tmp_path / "model" / FILE).write_text(json.dumps(file))
    assert cli.main(["doctor", "none", str(tmp_path / "model")]) == 0
    told = capsys.readouterr()
    assert "requests that leave them out get temperature 0.6\n" in told.out
    assert told.err.count("forced_bos_token_id 3, min_new_tokens 2") == 1
    assert cli.main(["doctor", "none", str(tmp_path / "model"), "--json"]) == 0
    [warning] = json.loads(capsys.readouterr().out)["warnings"]
    assert "forced_bos_token_id 3" in warning
