"""Masks on a GPU: the Triton kernel against plain torch, and the engine against its CPU self, with a grammar by hand.

llguidance is not needed here: a trie of texts stands for its matcher.
"""

import os

import numpy as np
import pytest
import torch

from specplug.grammar import masks as masking
from specplug.grammar.masks import forbid, words64
from specplug.grammar.state import Grammar
from specplug.runtime import intake
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.testing.registry import bench_registry
from specplug.testing.targets import table_target

DEVICE = os.environ.get("SPECPLUG_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, EOS = 40, 39
TEXTS = ((1, 2, 3), (1, 2, 2, 5, 6), (1, 7), (8, 8, 8, 8, 8, 1), (8, 2), (9,))


@pytest.mark.parametrize("vocab", [1, 31, 64, 65, 1025, 49_153])
def test_forbid_is_plain_torch(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    masks = torch.from_numpy(
        words64(rng.integers(-(2**31), 2**31, (5, -(-vocab // 32)), dtype=np.int64).astype(np.int32))
    )
    at = torch.tensor([8, 0, 3, 5, 2])
    wide = torch.randn(9, vocab + 3)
    values = wide[:, :vocab]  # rows that do not lie against each other
    made = wide.to(DEVICE)[:, :vocab]
    forbid(made, at.to(DEVICE), masks.to(DEVICE))
    forbid(values, at, masks)
    assert torch.equal(made.cpu(), values)


class Trie:
    """A matcher over `TEXTS`, with what the core calls of llguidance's."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def allowed(self) -> list[int]:
        size = len(self.text)
        texts = [text for text in TEXTS if list(text[:size]) == self.text]
        return sorted({text[size] for text in texts if len(text) > size} | ({EOS} if self.is_accepting() else set()))

    def consume_token(self, token: int) -> bool:
        assert token in self.allowed()
        self.text.append(token)
        return True

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for at, token in enumerate(tokens):
            if token == EOS or token not in self.allowed():
                return at
            self.text.append(token)
        return len(tokens)

    def rollback(self, count: int) -> bool:
        del self.text[len(self.text) - count :]
        return True

    def validate_tokens(self, tokens: list[int]) -> int:
        count = self.try_consume_tokens(tokens)
        here = self.is_accepting()
        self.rollback(count) if count else None
        return count + (count < len(tokens) and tokens[count] == EOS and here)

    def is_accepting(self) -> bool:
        return tuple(self.text) in TEXTS

    def is_stopped(self) -> bool:
        return self.is_accepting() and self.allowed() == [EOS]

    def is_error(self) -> bool:
        return False


class Library:
    """llguidance's three functions that fill masks, for tries."""

    @staticmethod
    def fill_next_token_bitmask(matcher: Trie, masks: np.ndarray, at: int) -> None:
        masks[at] = 0
        for token in matcher.allowed():
            masks.view(np.uint32)[at, token // 32] |= np.uint32(1 << token % 32)

    @staticmethod
    def fill_next_token_bitmask_par(_: object, matchers: list[tuple[Trie, int]], masks: np.ndarray) -> None:
        for matcher, at in matchers:
            Library.fill_next_token_bitmask(matcher, masks, at)

    @staticmethod
    def fill_next_token_bitmask_par_with_draft_tokens(
        _: object, matchers: list[tuple[Trie, int, list[int]]], masks: np.ndarray
    ) -> None:
        for matcher, at, tokens in matchers:
            Library.fill_next_token_bitmask(matcher, masks, at)
            taken = 0
            for token in tokens:
                if not matcher.try_consume_tokens([token]):
                    break
                taken += 1
                Library.fill_next_token_bitmask(matcher, masks, at + taken)
            matcher.rollback(taken)


class Compiler:
    """Makes the one grammar there is."""

    def grammar(self, response_format: object) -> Grammar:
        return Grammar(Trie(), (EOS,), VOCAB, 2)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "compiler_for", lambda *_: Compiler())
    monkeypatch.setattr(masking, "_library", lambda: Library)
    monkeypatch.setattr(masking, "_executor", lambda: None)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_greedy_answers_are_the_cpus_and_all_are_allowed(tmp_path, rule: str) -> None:
    registry = bench_registry(tmp_path)
    target = table_target(VOCAB, 2, 3, eos=EOS)
    asked = {"type": "json_object"}
    greedy = SamplingParams(temperature=0.0, max_tokens=12, response_format=asked)
    mixed = [
        greedy,
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, response_format=asked),
        SamplingParams(temperature=0.0, max_tokens=12, response_format=asked, frequency_penalty=1.0, logit_bias={2: 2}),
        SamplingParams(temperature=0.9, seed=4, max_tokens=9),
        SamplingParams(temperature=1.3, seed=5, max_tokens=12, response_format=asked, top_k=3, n=3),
        SamplingParams(temperature=0.0, max_tokens=9),
    ]
    prompts = [[3, 1], [4], [5, 5], [1, 2, 1, 2], [6], [7, 3]]
    with Engine(target, device="cpu") as engine:
        wanted = [result.ids for result in engine.generate(prompts, mixed)]
    sampled: dict[str, list[list[int]]] = {}
    for algorithm, behaviour in (
        ("none", ""),
        ("scripted", "random_tree"),
        ("scripted-device", "right"),
        ("scripted-device", "random_tree"),
        ("scripted-device", "hostile"),
        ("scripted-dense", ""),
    ):
        config = {"num_draft_tokens": 5} if behaviour or algorithm == "scripted-dense" else {}
        if behaviour:
            answers = [ids for at, ids in enumerate(wanted) if at not in (5, 6)]
            texts = [[*prompt, *ids] for prompt, ids in zip(prompts, answers, strict=True)]
            config |= {"scripted_behaviour": behaviour, "scripted_texts": texts}
        moved = table_target(VOCAB, 2, 3, eos=EOS)
        moved.model.to(DEVICE)
        with Engine(
            moved, device=DEVICE, algorithm=algorithm, config=config, registry=registry, speculative_acceptance=rule
        ) as engine:
            found = engine.generate(prompts, mixed)
            assert engine.free_pages == engine.pages
        ids = [result.ids for result in found]
        for at in (0, 2, 7):
            assert ids[at] == wanted[at], (algorithm, behaviour)
        for at in (0, 1, 2, 4, 5, 6):
            assert tuple(ids[at][:-1]) in TEXTS
            assert ids[at][-1] == EOS
        if rule == "coupled":
            assert sampled.setdefault("ids", ids) == ids, (algorithm, behaviour)
