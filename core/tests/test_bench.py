"""The bench itself: targets that notice a wrong page or mask, tokenizer, scripted drafters, oracle, pytest plugin."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from specplug import Engine, SamplingParams, reference
from specplug.models.target import Target
from specplug.registry import Registry
from specplug.runtime import host
from specplug.testing import pytest_plugin
from specplug.testing.bench import PROMPTS
from specplug.testing.oracle import check_greedy, chi_square_p, expected, sequence_probabilities
from specplug.testing.registry import bench_registry
from specplug.testing.scripted import Behaviour
from specplug.testing.targets import decoder_target, reference_logits, table_target
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"))


def scripted(target: Target, registry: Registry, behaviour: str, device: bool = False, **more: Any) -> Engine:
    logits = reference_logits(target)
    texts = [(*prompt, *reference.decode(logits, prompt, GREEDY)) for prompt in PROMPTS]
    config = {"scripted_texts": texts, "scripted_behaviour": behaviour, "num_draft_tokens": 8, **more}
    algorithm = "scripted-device" if device else "scripted"
    return Engine(target, algorithm=algorithm, config=config, registry=registry, page_size=4, context_length=64)


TARGETS = {
    "order 2": lambda: table_target(),
    "order 1": lambda: table_target(order=1),
    "ties": lambda: table_target(ties=True),
    "decoder": lambda: decoder_target(2),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("behaviour", ["none", "random_tree", "right", "hostile", "duplicates", "bad_parents"])
def test_engine_equals_reference(name: str, behaviour: str, registry: Registry) -> None:
    target = TARGETS[name]()
    logits = reference_logits(target)
    with (
        Engine(target, page_size=4, context_length=64)
        if behaviour == "none"
        else scripted(target, registry, behaviour, scripted_seed=4) as engine
    ):
        for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            assert not result.error
            check_greedy(logits, prompt, reference.decode(logits, prompt, GREEDY), result.ids, name)
        assert behaviour == "none" or engine.ledger.accepted > 0


@pytest.mark.parametrize("name", ["order 2", "decoder"])
def test_a_target_with_attention_notices_missing_compaction(name: str, registry: Registry) -> None:
    target = TARGETS[name]()
    logits = reference_logits(target)
    wanted = [reference.decode(logits, prompt, GREEDY) for prompt in PROMPTS]
    with (
        scripted(target, registry, "random_tree") as engine,
        patch.object(host.HostExecutor, "_compact", lambda *_: None),
    ):
        assert [result.ids for result in engine.generate(PROMPTS, GREEDY)] != wanted


def test_a_table_of_order_2_notices_a_wrong_mask(registry: Registry) -> None:
    target = table_target()
    logits = reference_logits(target)
    wanted = [reference.decode(logits, prompt, GREEDY) for prompt in PROMPTS]
    everything = "specplug.tree.ancestor_mask"
    with (
        scripted(target, registry, "random_tree") as engine,
        patch(everything, lambda parents: torch.ones(len(parents) + 1, len(parents) + 1, dtype=torch.bool).tril()),
    ):
        assert [result.ids for result in engine.generate(PROMPTS, GREEDY)] != wanted


def test_table_target_reads_two_tokens() -> None:
    target = table_target(vocab=16)
    logits = reference_logits(target)
    text = [3, 9, 9, 1, 15, 0, 2]
    table = target.model.table
    assert torch.equal(logits(text)[0], table[3 * 16 + 3])
    for at in range(1, len(text)):
        assert torch.equal(logits(text)[at], table[text[at - 1] * 16 + text[at]])


def test_table_target_options() -> None:
    assert (table_target(ties=True).model.table.unique() == torch.tensor([0.0, 1.0, 2.0])).all()
    assert table_target(eos=3).eos_ids == (3,)
    assert table_target(eos=[3, 4]).eos_ids == (3, 4)
    said = reference.decode(reference_logits(table_target(alphabet=[5, 6])), [1], GREEDY)
    assert set(said) == {5, 6}
    with pytest.raises(ValueError, match="order"):
        table_target(order=3)


def test_targets_are_seeded() -> None:
    text = [1, 2, 3]
    for make in (table_target, decoder_target):
        same, again, other = (reference_logits(make(seed=seed))(text) for seed in (1, 1, 2))
        assert torch.equal(same, again)
        assert not torch.equal(same, other)


def test_decoder_target_on_disk(tmp_path: Path) -> None:
    kept = decoder_target(3, SIZE, folder=tmp_path / "model", tokenizer=byte_tokenizer())
    assert kept.checkpoint.path == str(tmp_path / "model")
    assert kept.checkpoint.tokenizer_size == SIZE
    assert "lm_head.weight" in (kept.checkpoint.tensors or {})
    assert decoder_target(3).checkpoint.path == ""
    with Engine(str(tmp_path / "model")) as engine:
        (result,) = engine.generate(["hello"], GREEDY)
    assert result.ids == reference.decode(reference_logits(kept), list(b"hello"), GREEDY, kept.eos_ids)


def test_byte_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == SIZE
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.encode("aß€", add_special_tokens=False) == list("aß€".encode())
    assert tokenizer.decode([*"aß€ z".encode(), EOS], skip_special_tokens=True) == "aß€ z"
    swapped = byte_tokenizer((65, 66))
    assert len(swapped) == SIZE
    assert swapped.encode("AB", add_special_tokens=False) == [66, 65]


def test_characters_split_over_tokens_come_out_whole() -> None:
    word = "€ß!".encode()
    target = table_target(SIZE, 1, tokenizer=byte_tokenizer())
    for token, following in zip(word, word[1:] + word[:1], strict=True):
        target.model.table[token, following] = 100.0
    with Engine(target) as engine:
        prompt = list("€ß!".encode())
        deltas = list(engine.stream([prompt], SamplingParams(temperature=0.0, max_tokens=12)))
    assert "".join(delta.text for delta in deltas) == "€ß!€ß!"
    assert all("�" not in delta.text for delta in deltas)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("behaviour", get_args(Behaviour))
def test_scripted_behaviours(behaviour: str, device: bool, registry: Registry) -> None:
    """Each behaviour is what its name says, seen from the ledger; what the core makes of it is the engine's tests'."""
    with scripted(table_target(), registry, behaviour, device, scripted_n=2) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        counts = engine.ledger
        free, later, pages = engine.free_pages, engine.generate(PROMPTS[:2], GREEDY), engine.pages
        status = engine.speculation
    assert free == pages
    if behaviour.startswith("raise_"):
        assert {result.finish_reason for result in results} == {"error"}
        assert all(behaviour.removeprefix("raise_") in result.error for result in results)
        # What comes after is decoded plain, and says so.
        assert not any(result.error for result in later)
        assert status.startswith("failed: specplug-scripted 0.1.0")
        return
    assert not any(result.error for result in results)
    if behaviour in ("right", "ragged", "too_long"):
        assert counts.accepted == counts.drafted > 0
    elif behaviour == "wrong":
        assert counts.drafted > counts.accepted == 0
    elif behaviour == "empty":
        assert counts.drafted == 0
    elif behaviour == "right_then_wrong":
        assert counts.accepted_at[0] == counts.drafted_rounds
        assert counts.accepted_at[1] > 0 == sum(counts.accepted_at[2:])
    elif behaviour in ("negative_id", "huge_id", "bad_parents"):
        assert counts.drafted == counts.accepted == counts.drafted_rounds, "cut before the second node"
    elif behaviour == "duplicates":
        assert counts.accepted == counts.drafted_rounds
    else:
        assert 0 < counts.accepted < counts.drafted


def test_bench_registry_sees_what_is_installed_when_asked(tmp_path: Path) -> None:
    names = {"scripted", "scripted-device", "scripted-dense"}
    assert set(bench_registry(tmp_path).algorithms) == names
    assert set(bench_registry(tmp_path, installed=True).algorithms) >= names


def test_chi_square() -> None:
    fair = {0: 0.5, 1: 0.3, 2: 0.2}
    assert chi_square_p({0: 500, 1: 300, 2: 200}, fair) == pytest.approx(1.0)
    assert chi_square_p({0: 520, 1: 290, 2: 190}, fair) == pytest.approx(
        math.exp(-(400 / 500 + 100 / 300 + 100 / 200) / 2)
    )
    assert chi_square_p({0: 600, 1: 250, 2: 150}, fair) < 1e-6
    assert chi_square_p({0: 5, 7: 1}, fair) == 0.0
    with pytest.raises(ValueError, match="too few"):
        chi_square_p({0: 2}, fair)


def test_sequence_probabilities_are_exact() -> None:
    logits = reference_logits(table_target(8, 2))
    sampling = SamplingParams(temperature=0.7, top_k=3)
    found = sequence_probabilities(logits, [1], sampling, 2)
    assert len(found) == 9
    assert sum(found.values()) == pytest.approx(1.0)
    (first, second), mass = next(iter(found.items()))
    one = reference.distribution(logits([1])[-1], sampling)[first]
    two = reference.distribution(logits([1, first])[-1], sampling)[second]
    assert mass == pytest.approx(float(one * two))


def test_expected_cuts_at_the_first_rule() -> None:
    target = table_target(SIZE, 1, tokenizer=byte_tokenizer())
    word = b"abcdef"
    for token, following in zip(word, word[1:] + word[:1], strict=True):
        target.model.table[token, following] = 100.0

    def answer(**options: Any) -> tuple[list[int], str, str]:
        context, eos = options.pop("context", 64), options.pop("eos", ())
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 9} | options)
        found = expected(reference_logits(target), b"f", sampling, context=context, eos=eos, tokenizer=target.tokenizer)
        return found.ids, found.text, found.finish_reason

    assert answer() == (list(b"abcdefabc"), "abcdefabc", "length")
    assert answer(context=4) == (list(b"abc"), "abc", "length")
    assert answer(stop=("de", "cd")) == (list(b"ab"), "ab", "stop")
    assert answer(stop=("c",), max_tokens=3) == (list(b"ab"), "ab", "stop")
    assert answer(stop=("d",), max_tokens=3) == (list(b"abc"), "abc", "length")
    assert answer(eos=(ord("c"),)) == (list(b"abc"), "ab", "stop")


def test_check_greedy_lets_only_ties_pass(capsys: pytest.CaptureFixture[str]) -> None:
    def logits(tokens: Any) -> torch.Tensor:
        return torch.tensor([[1.0, 1.0 + gap, 0.0]])

    gap = 1e-5
    check_greedy(logits, [0], [1, 2], [0, 2], "here")
    assert "top-two gap 1" in capsys.readouterr().out
    gap = 1e-2
    with pytest.raises(AssertionError, match=r"top-two gap 0\.01"):
        check_greedy(logits, [0], [1, 2], [0, 2], "here")
    gap = 1e-5
    with pytest.raises(AssertionError):
        check_greedy(logits, [0], [1, 2], [1], "a missing token is no tie")


# --- the pytest plugin ---------------------------------------------------------------------------------------------


def test_pytest_plugin_is_light() -> None:
    code = "import sys, specplug.testing.pytest_plugin as p, specplug.testing, os; "
    code += "print([m for m in sys.modules if m in ('torch', 'transformers') or m.startswith('specplug.runtime')])"
    code += "; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "PASSIVE"]


def test_required_plugins(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    inner = tmp_path / "tests"
    inner.mkdir()
    file.write_text('[tool.specplug]\nrequired_plugins = ["specplug-none>=1"]\n', encoding="utf-8")
    assert pytest_plugin.required_plugins(inner) == ["specplug-none>=1"]
    file.write_text("[tool.other]\n", encoding="utf-8")
    assert pytest_plugin.required_plugins(inner) == []
    for text in ('[tool.specplug]\nrequired_plugins = "specplug-none"\n', "[tool.specplug\n"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(pytest.UsageError, match=r"pyproject\.toml"):
            pytest_plugin.required_plugins(inner)


def test_a_run_without_its_required_plugins_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        rootpath = tmp_path

        def addinivalue_line(self, name: str, line: str) -> None:
            assert (name, line.partition(":")[0]) == ("markers", "gpu")

    monkeypatch.delenv("SPECPLUG_REQUIRED_PLUGINS", raising=False)
    monkeypatch.delenv("SPECPLUG_PLUGINS", raising=False)
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    pytest_plugin.pytest_configure(Config())  # type: ignore[arg-type]
    monkeypatch.setenv("SPECPLUG_REQUIRED_PLUGINS", "specplug-not-there>=1")
    with pytest.raises(pytest.UsageError, match=r"SPECPLUG_REQUIRED_PLUGINS.*specplug-not-there"):
        pytest_plugin.pytest_configure(Config())  # type: ignore[arg-type]
