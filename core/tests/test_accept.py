"""Acceptance against the one-page oracle, and against the exact distribution."""

import random

import pytest
import torch

from specplug import reference, tree
from specplug.accept import VerifyRow, accept
from specplug.sampling import SamplingParams

VOCAB = 12


def table(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def random_tree(rng: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    parents = [rng.randrange(-1, node) for node in range(nodes)]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        tokens.append(rng.choice([token for token in range(VOCAB) if token not in taken]))
    return tokens, parents


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("dense", [False, True])
def test_equals_the_reference_on_random_trees(rule: str, temperature: float, dense: bool) -> None:
    # Breaks with: another stream, rank or token index in any draw; a child tried out of order; p not renormalised.
    rng = random.Random(7)
    for case in range(60):
        logits = table(case)
        tokens, parents = random_tree(rng, rng.randrange(0, 8))
        context = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
        q = torch.softmax(torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(case)), 1)
        sampling = SamplingParams(temperature=temperature, top_k=rng.choice([0, 3]), top_p=rng.choice([1.0, 0.8]))
        seeded = sampling.model_copy(update={"seed": case})
        expected = reference.accept(
            lambda text, logits=logits: logits[torch.tensor(text)],
            *(context, tokens, parents, q if dense else None, seeded, rule),
        )
        row = VerifyRow(0, len(context) - 1, sampling, case, 0, tokens, parents, q if dense else None)
        (verdict,) = accept(rule, logits[torch.tensor([context[-1], *tokens])], [row])
        assert [*(tokens[node] for node in verdict.path), verdict.token] == expected


def test_rows_do_not_touch_each_other() -> None:
    logits = table(3)
    rows = [
        VerifyRow(0, 4, SamplingParams(temperature=0), 1, 0, [5, 6], [-1, 0]),
        VerifyRow(3, 9, SamplingParams(temperature=0.9), 2, 0, [2], [-1]),
        VerifyRow(5, 1, SamplingParams(temperature=0.9), 3, 0),
    ]
    together = accept("coupled", logits[:6], rows)
    for row, verdict in zip(rows, together, strict=True):
        size = 1 + len(row.tokens)
        alone = VerifyRow(0, row.root_index, row.sampling, row.seed, 0, row.tokens, row.parents)
        assert accept("coupled", logits[row.start : row.start + size], [alone]) == [verdict]


def test_a_forbidden_token_is_never_emitted() -> None:
    logits = table(5)[:2]
    mask = torch.ones(2, VOCAB, dtype=torch.bool)
    mask[0, 4] = False
    for rule in ("coupled", "rejection"):
        for temperature in (0.0, 1.0):
            for seed in range(50):
                row = VerifyRow(0, 0, SamplingParams(temperature=temperature), seed, 0, [4], [-1])
                (verdict,) = accept(rule, logits, [row], mask)
                assert verdict.path == ()
                assert verdict.token != 4


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 7]] = 1.0
    assert accept("coupled", logits, [VerifyRow(0, 0, SamplingParams(temperature=0), 0, 0)])[0].token == 3


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_first_token_follows_p(rule: str) -> None:
    # Breaks with: a residual that is not p - q, a coin shared with the draft, a draft counted as certain when drawn.
    p = torch.softmax(table(1)[0], 0)
    q = torch.softmax(table(2)[0], 0)
    counts = torch.zeros(VOCAB)
    draws = 6000
    for seed in range(draws):
        sampling = SamplingParams()
        drafted = reference.draw(q, SamplingParams(seed=seed), 1, "draft")
        row = VerifyRow(0, 0, sampling, seed, 0, [drafted], [-1], q[None])
        (verdict,) = accept(rule, p.log().repeat(2, 1), [row])
        counts[drafted if verdict.path else verdict.token] += 1
    expected = p * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 31.3, chi_square  # 11 degrees of freedom, p = 0.001


def test_tree_helpers() -> None:
    parents = [-1, -1, 0, 1, 2]
    assert tree.depths(parents) == [1, 1, 2, 2, 3]
    assert tree.children(parents) == [[0, 1], [2], [3], [4], [], []]
    assert tree.is_chain([-1, 0, 1])
    assert not tree.is_chain(parents)
    seen = [[j for j in range(6) if tree.ancestor_mask(parents)[i, j]] for i in range(6)]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    assert tree.valid_prefix([1, 2, 99], [-1, 0, 1], VOCAB) == 2
    assert tree.valid_prefix([1, 2, 3], [-1, 1, 0], VOCAB) == 1
    assert tree.valid_prefix([1, -1], [-1, 0], VOCAB) == 1
