"""Which nodes the tree keeps: against a slow oracle in plain Python, and against known trees."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specplug import SamplingParams
from specplug.testing.setup import Rule, VerifyRow, accept
from specplug.testing.setup import tree as parents_lists
from specplug_eagle.config import candidates
from specplug_eagle.tree import cheapest, expand, frontier, prune

Tree = tuple[list[int], list[int]]
"""Tokens and parents."""


def grown(levels: Sequence[tuple[Tensor, Tensor]], nodes: int) -> list[Tree]:
    """Run the selection as the drafter does, over costs and tokens per level: [R, K], then [R, K, K] by place."""
    cost, token = levels[0]
    rows, k = cost.shape
    node = torch.arange(k).expand(rows, k)
    costs, tokens, parents = [cost], [token], [torch.full_like(token, -1)]
    for depth, (below, words) in enumerate(levels[1:], 1):
        total = expand(cost, below)
        best = frontier(total, k)
        costs.append(total)
        tokens.append(words.flatten(1))
        parents.append(node.repeat_interleave(k, 1))
        cost, node = total.gather(1, best), candidates(depth, k) + best
    chosen, above = prune(torch.cat(costs, 1), torch.cat(parents, 1), nodes)
    found = torch.cat(tokens, 1).gather(1, chosen)
    return list(zip(found.tolist(), above.tolist(), strict=True))


def oracle(levels: Sequence[tuple[Tensor, Tensor]], row: int, nodes: int) -> Tree:
    """EAGLE-2 by its description: nodes as tuples, sorted by Python, which is stable."""
    k = levels[0][0].shape[1]
    made: list[tuple[float, int, int]] = []  # cost, token, parent's number
    frontier = [-1]
    for depth, (below, words) in enumerate(levels):
        first = len(made)
        for place, parent in enumerate(frontier):
            above = torch.tensor(0.0 if parent < 0 else made[parent][0])  # sums are rounded as the tensors' are
            for rank in range(k):
                at = (row, rank) if depth == 0 else (row, place, rank)
                made.append((float(above + below[at]), int(words[at]), parent))
        frontier = sorted(range(first, len(made)), key=lambda number: made[number][0])[:k]
    order = sorted(range(len(made)), key=lambda number: made[number][0])[:nodes]
    place_of = {number: place for place, number in enumerate(order)}
    return [made[number][1] for number in order], [
        -1 if made[number][2] < 0 else place_of[made[number][2]] for number in order
    ]


def drawn(seed: int, rows: int, k: int, depth: int, *, ties: bool) -> list[tuple[Tensor, Tensor]]:
    """Costs, ascending among siblings as `cheapest` returns them, and distinct tokens among siblings."""
    generator = torch.Generator().manual_seed(seed)
    levels = []
    for level in range(depth):
        shape = (rows, k) if level == 0 else (rows, k, k)
        if ties:
            cost = torch.randint(0, 3, shape, generator=generator).float()
        else:
            cost = -torch.rand(shape, generator=generator).log()
        tokens = torch.rand((*shape[:-1], 50), generator=generator).argsort(-1)[..., :k]
        levels.append((cost.sort(-1).values, tokens))
    return levels


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("k", "depth"), [(2, 1), (2, 3), (3, 4), (4, 4), (8, 5), (10, 3)])
def test_the_tree_is_the_oracles(k: int, depth: int, ties: bool) -> None:
    most = candidates(depth, k)
    for seed, nodes in itertools.product(range(3), sorted({1, 2, min(7, most), min(31, most), most})):
        levels = drawn(seed, 3, k, depth, ties=ties)
        for row, found in enumerate(grown(levels, nodes)):
            assert found == oracle(levels, row, nodes)


@pytest.mark.parametrize("ties", [False, True])
def test_every_prefix_is_a_tree_and_the_best_of_its_size(ties: bool) -> None:
    levels = drawn(7, 4, 4, 4, ties=ties)
    for row, (tokens, parents) in enumerate(grown(levels, 31)):
        assert parents_lists.valid_prefix(tokens, parents, 50) == 31
        assert max(parents_lists.depths(parents)) <= 4
        for size in range(1, 32):
            assert (tokens[:size], parents[:size]) == grown(levels, size)[row]


# Test values of SGLang (test_build_eagle_tree.py): topk 4, 4 steps, 8 nodes, sequences of 5 and 10 tokens. The inputs
# below are made for the same trees: path -> probability of its last token, everything else is unlikely.
GOLDEN = [
    (
        5,
        {(0,): 0.71, (1,): 0.28, (0, 0): 0.97, (1, 0): 0.88, (0, 0, 0): 0.96, (1, 0, 0): 0.98, (0, 0, 0, 0): 0.99},
        [5, 6, 6, 7, 7, 8, 8, 9],
        [1, 3, 4, 5, 6, 7, -1, -1],
        [-1, 2, -1, -1, -1, -1, -1, -1],
    ),
    (
        10,
        {
            (0,): 0.97,
            (0, 0): 0.087,
            (0, 1): 0.068,
            (0, 2): 0.060,
            (0, 3): 0.059,
            (0, 1, 0): 0.97,
            (0, 1, 0, 0): 0.91,
        },
        [10, 11, 12, 12, 12, 12, 13, 14],
        [1, 2, -1, 6, -1, -1, 7, -1],
        [-1, -1, 3, 4, 5, -1, -1, -1],
    ),
]


@pytest.mark.parametrize(("start", "likely", "positions", "first_child", "next_sibling"), GOLDEN)
def test_golden_trees(
    start: int,
    likely: dict[tuple[int, ...], float],
    positions: list[int],
    first_child: list[int],
    next_sibling: list[int],
) -> None:
    """In SGLang's order, which is that of creation; ours is by cost, and both name the same nodes."""
    k = 4
    going_on: list[tuple[int, ...]] = [()]
    made: list[tuple[float, tuple[int, ...]]] = []
    levels = []
    for depth in range(4):
        paths = [[(*parent, rank) for rank in range(k)] for parent in going_on]
        own = torch.tensor([[-math.log(likely.get(path, 1e-4 / (1 + path[-1]))) for path in row] for row in paths])
        words = torch.tensor([[path[-1] for path in row] for row in paths])
        levels.append((own, words) if depth == 0 else (own[None], words[None]))
        above = {path: cost for cost, path in made} | {(): 0.0}
        flat = itertools.chain.from_iterable(paths)
        born = [(above[path[:-1]] + cost, path) for path, cost in zip(flat, own.flatten().tolist(), strict=True)]
        made += born
        going_on = [path for _, path in sorted(born, key=lambda one: one[0])[:k]]
    ((tokens, parents),) = grown(levels, 7)
    paths_found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths_found.append((*(paths_found[parent] if parent >= 0 else ()), token))
    order = [path for _, path in made if path in paths_found]
    at = {path: place for place, path in enumerate(order)}
    by_creation = [at[path[:-1]] if len(path) > 1 else -1 for path in order]
    assert [start + depth for depth in [0, *parents_lists.depths(by_creation)]] == positions
    below = parents_lists.children(by_creation)
    assert [children[0] + 1 if children else -1 for children in below] == first_child
    siblings = [-1] * 8
    for children in below:
        for one, other in itertools.pairwise(children):
            siblings[one + 1] = other + 1
    assert siblings == next_sibling
    mask = parents_lists.ancestor_mask(by_creation)
    assert (mask.sum(1) + start - 1).tolist() == positions


def test_likeliest_tokens_and_their_surprisals() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=generator)
    ids = torch.arange(40)
    cost, found = cheapest(logits, ids, 6)
    wanted = (-logits.log_softmax(-1)).sort(dim=-1, stable=True)
    assert torch.equal(found, wanted.indices[:, :6])
    torch.testing.assert_close(cost, wanted.values[:, :6], rtol=0, atol=1e-6)
    assert cost.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_logits_go_by_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 3000, dtype=dtype)
    logits[1, 17::5] = 2.0
    ids = torch.arange(3000).flip(0)
    _, found = cheapest(logits, ids, 8)
    assert found[0].tolist() == list(range(8))
    assert found[1].tolist() == sorted(ids[17::5].tolist())[:8]


def test_a_certain_token_costs_nothing_and_the_impossible_comes_last() -> None:
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4] = 3.0
    cost, found = cheapest(logits, torch.arange(9), 3)
    assert found.tolist() == [[4, 0, 1]]
    assert cost.tolist() == [[0.0, math.inf, math.inf]]
    assert math.copysign(1.0, cost[0, 0]) == 1.0


def test_no_number_still_makes_a_tree() -> None:
    """A head that overflows proposes rubbish, but well-formed rubbish."""
    cost, token = cheapest(torch.full((1, 20), torch.nan), torch.arange(20), 3)
    assert token.tolist() == [[0, 1, 2]]
    below = torch.full((1, 3, 3), torch.nan)
    below[0, 1] = 0.5
    fine = torch.tensor([[0.1, 0.2, torch.nan]])
    for first in (cost, fine):
        levels = [(first, token), (below, torch.arange(9).view(1, 3, 3)), (below, torch.arange(9).view(1, 3, 3))]
        for nodes in (4, 12, 21):
            ((tokens, parents),) = grown(levels, nodes)
            assert parents_lists.valid_prefix(tokens, parents, 20) == nodes


# --- acceptance of trees ----------------------------------------------------------------------------------------------

# Test values of SGLang (test_tree_speculative_sampling.py): two trees of six nodes, and a target that is all but
# certain. Tokens of the drafts, their parents, the target's token at the nodes that it reaches, and the accepted nodes.
SURE = [
    ((1, 2, 3, 4, 5), (-1, 0, -1, 2, 3), {-1: 3, 2: 4, 3: 5, 4: 18}, (2, 3, 4)),
    ((8, 9, 10, 11, 12), (-1, 0, 1, -1, 3), {-1: 11, 3: 12, 4: 18}, (3, 4)),
]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize(("tokens", "parents", "says", "path"), SURE)
def test_a_sure_target_accepts_its_path(
    rule: Rule, tokens: tuple[int, ...], parents: tuple[int, ...], says: dict[int, int], path: tuple[int, ...]
) -> None:
    """At thresholds 1 the incumbent accepts these too; lower ones would change the text, and are not offered."""
    logits = torch.ones(6, 20)
    for node, token in says.items():
        logits[node + 1, token] = 10.0
    sampling = SamplingParams(temperature=0.01)
    for seed in range(20):
        row = VerifyRow(0, 30, sampling, seed, 0, tokens, parents)
        assert accept(rule, logits, [row]) == [(path, 18, "")]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_siblings_are_accepted_with_their_probabilities(rule: Rule) -> None:
    """The incumbent lets siblings tile one coin's range. Ours draws a coin for each, or the target's token first: with
    certain drafts all three accept sibling x with probability p(x), whatever their order."""
    p = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05])
    sampling = SamplingParams(temperature=1.0)
    counts = torch.zeros(5)
    for seed in range(4000):
        row = VerifyRow(0, 9, sampling, seed, 0, (3, 1, 0), (-1, -1, -1))
        ((path, token, _),) = accept(rule, p.log().repeat(4, 1), [row])
        counts[row.tokens[path[0]] if path else token] += 1
        assert path or token not in row.tokens
    assert float(((counts - 4000 * p) ** 2 / (4000 * p)).sum()) < 18.5  # chi-square of 4 degrees, p = 0.001
