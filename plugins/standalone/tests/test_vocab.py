"""Vocabularies that differ: in padding, in tokens behind the end, in everything."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from specplug import Checkpoint, Engine, Facts, SamplingParams
from specplug.testing.bench import PROMPTS
from specplug_standalone import vocab

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
HEADS = ("model.embed_tokens.weight", "lm_head.weight")


def padded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """16 rows more, whose logits beat all others wherever they may."""
    more = {name: torch.cat((weights[name], 9.0 * weights[name][:16])) for name in HEADS}
    return {**weights, **more}


def cut(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, **{name: weights[name][:48].contiguous() for name in HEADS}}


@pytest.mark.parametrize("draws", [False, True])
def test_ids_behind_the_targets_are_never_proposed(models: Any, draws: bool) -> None:
    draft = models.draft("padded", padded, {"vocab_size": 80})
    with models.engine(draft, {"draft_sampling": draws}) as engine, models.engine(None) as plain:
        results = engine.generate(PROMPTS, GREEDY)
        assert [result.ids for result in results] == [result.ids for result in plain.generate(PROMPTS, GREEDY)]
        ledger = engine.ledger.report()
        assert ledger["accepted"] == ledger["drafted"] > 0


@pytest.mark.parametrize("draws", [False, True])
def test_a_smaller_vocabulary_is_fed_a_stand_in(models: Any, draws: bool) -> None:
    """The target says ids above 47, which the draft has not: it goes on, and never proposes one."""
    draft = models.draft("cut", cut, {"vocab_size": 48})
    with models.engine(draft, {"draft_sampling": draws}) as engine, models.engine(None) as plain:
        wanted = plain.generate(PROMPTS, GREEDY)
        results = engine.generate(PROMPTS, GREEDY)
        assert [result.ids for result in results] == [result.ids for result in wanted]
        assert any(token >= 48 for result in wanted for token in result.ids)
        ledger = engine.ledger.report()
        assert 0 < ledger["accepted"] < ledger["drafted"]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_another_tokenizer_by_common_tokens(swapped: Any, draws: bool, temperature: float) -> None:
    """One model under two tokenizers: translated, it is right as often as the target itself."""
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    config = {"standalone_heterogeneous_vocab": True, "draft_sampling": draws}
    options: dict[str, Any] = {"page_size": 4, "context_length": 128}
    with (
        Engine(
            swapped.loaded,
            algorithm="standalone",
            config=config,
            speculative_draft_model_path=str(swapped.draft),
            **options,
        ) as engine,
        Engine(swapped.loaded, **options) as plain,
    ):
        prompts = ["abcab", "hgfe", "b"]
        results = engine.generate(prompts, sampling)
        assert [result.ids for result in results] == [result.ids for result in plain.generate(prompts, sampling)]
        ledger = engine.ledger.report()
        if draws or temperature == 0.0:
            assert ledger["accepted"] == ledger["drafted"] > 0


def byte_level(folder: Path) -> None:
    ids = {"a": 0, "Ġa": 1, "Ċ": 2, "Ã": 3, "©": 4, "Ã©": 5, "<eos>": 6, "Ġ": 7}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("Ġ", "a"), ("Ã", "©")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def marked(folder: Path) -> None:
    ids = {"<0x61>": 0, "a": 1, "▁a": 2, "<0x0A>": 3, "é": 4, "<eos>": 5, "▁": 6, "Ã": 7}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_tokens_are_compared_by_what_they_stand_for(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    byte_level(one)
    marked(other)
    target = Checkpoint(path=str(one), config={"vocab_size": 8})
    facts = Facts(target=target, draft=Checkpoint(path=str(other)))
    # a, " a", newline by its byte, é, the special token, the blank; but not the byte C3, which "Ã" is not.
    assert vocab.shared(facts, 8) == [(0, 1), (1, 2), (2, 3), (5, 4), (6, 5), (7, 6)]
    assert vocab.shared(facts, 5) == [(0, 1), (1, 2), (2, 3), (5, 4)]


@pytest.mark.parametrize(
    ("difference", "sizes", "answer"),
    [
        ((90, "", "x"), (90, 95), True),
        ((90, "x", ""), (95, 90), True),
        ((50, "", "x"), (90, 95), False),  # a hole, not an end
        ((50, "y", "x"), (90, 95), False),
        ((90, "", "x"), (90, None), False),
        (None, (90, 90), False),
    ],
)
def test_what_is_a_longer_vocabulary(difference: Any, sizes: tuple[int, int | None], answer: bool) -> None:
    sides = [Checkpoint(config={"vocab_size": 100}, tokenizer_size=size) for size in sizes]
    facts = Facts(target=sides[0], draft=sides[1], first_vocab_difference=difference)
    assert vocab.extends(facts) is answer
    if answer:
        assert vocab.common(facts, 128) == 90


@pytest.mark.parametrize(("ends", "answer"), [(2, 2), ([90, 7], 7), (None, 0), ([90], 0), ("x", 0), (-1, 0)])
def test_stand_in(ends: Any, answer: int) -> None:
    assert vocab.stand_in({"eos_token_id": ends}, 80) == answer
