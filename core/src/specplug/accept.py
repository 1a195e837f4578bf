"""Acceptance: which drafts become output, and the token that follows them. One rule for chains, trees and blocks.

`coupled`: the target's token at a node is ``argmax(log p + g)`` with noise keyed by token index, and the
walk follows the child equal to it. The output is a function of p and the noise alone, so no drafter can
change it. `rejection`: Leviathan et al. 2023 (arXiv 2211.17192), extended to siblings by retrying on the
residual (SpecInfer, arXiv 2305.09781); exact in distribution for drafts whose q is honest. Greedy rows are
greedy under either. p is the distribution after all of the request's options at that position, the drafts
above it counted as output (`specplug.runtime.processors`). `specplug.reference` is the oracle of this file.

`synthetic` is for measuring what a step costs, and lossy: it accepts drafts as they stand, as many as make
a verify emit a given mean number of tokens. `specplug.runtime.device.decide` is all this on a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specplug import tree
from specplug.noise import Stream, gumbel, uniform
from specplug.runtime.processors import ProcessorError, Processors
from specplug.runtime.sampler import processed_logits
from specplug.sampling import SamplingParams

Rule = Literal["coupled", "rejection", "synthetic"]


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One request's row whose logits are to be decided. Set by the engine from the proposal it verified."""

    start: int
    """Row of `logits` that belongs to the root (or to a prompt's last token); node i's is ``start + 1 + i``."""
    root_index: int
    """Token index of the root in the sequence."""
    sampling: SamplingParams
    seed: int
    choice: int
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    q: Tensor | None = None
    """[n, V] float32 if the nodes were sampled and recorded; None: each was certain (or the rule needs no q)."""
    processors: Processors | None = None
    """What changes the row's logits before temperature; None: nothing does."""


class Verdict(NamedTuple):
    """The outcome for one row: accepted nodes from the root downwards, and the token that follows the last."""

    path: tuple[int, ...]
    token: int
    error: str = ""
    """Why no token could be chosen below `path`; `token` is then 0 and is no output."""

    @property
    def in_order(self) -> bool:
        """Whether the accepted nodes are the leading ones, as in a chain, so that nothing has to be moved."""
        return self.path == tuple(range(len(self.path)))


_Values = Callable[[int, Sequence[int]], Tensor]
"""(node, tokens of the path down to it) -> the logits [V] before temperature of what follows; node -1 is the root."""


def accept(
    rule: Rule, logits: Tensor, rows: Sequence[VerifyRow], mask: Tensor | None = None, *, mean: float = 0.0
) -> list[Verdict]:
    """Decide every row. `logits` is float32 [M, V]; `mask`, bool [M, V], forbids what is False at each node.

    `mean`, at least 1 and for `synthetic` only: tokens that a row with enough drafts emits on average.
    A row whose processors fail gets a verdict with an error; the others are decided all the same.
    """
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    # One pass decides the common case: greedy rows that change no logits.
    plain = any(row.sampling.greedy and row.processors is None for row in rows)
    best = _argmax(logits) if plain else []
    return [_decide(rule, row, _values(row, logits, mask), best, mean) for row in rows]


def _argmax(logits: Tensor) -> list[int]:
    """Return the largest entry of each row, of equal ones the lowest id."""
    # On a CPU numpy's argmax is vectorised along the row and torch's is not (8 x 49k: 0.03 against 0.3 ms).
    rows = logits.numpy().argmax(1) if logits.is_cpu else logits.argmax(1)
    return rows.tolist()


def _values(row: VerifyRow, logits: Tensor, mask: Tensor | None) -> _Values:
    def at(node: int, path: Sequence[int]) -> Tensor:
        index = row.start + node + 1
        if mask is not None and not bool(mask[index].any()):
            raise ProcessorError("no token is left: the mask forbids all")
        if row.processors is None:
            return logits[index]
        return row.processors.apply(logits[index], path, None if mask is None else mask[index])

    return at


def _decide(rule: Rule, row: VerifyRow, values: _Values, best: Sequence[int], mean: float) -> Verdict:
    """Walk down from the root, from child to accepted child, until a token is chosen that is no child."""
    below = tree.children(row.parents)
    lead = _lead(row, mean) if rule == "synthetic" else 0
    node, nodes, path = -1, list[int](), list[int]()
    child: int | None
    while True:
        children = below[node + 1]
        if len(nodes) < lead and children:
            token, child = row.tokens[children[0]], children[0]
        else:
            try:
                if rule == "rejection" and not row.sampling.greedy:
                    token, child = _rejection(row, values(node, path), len(path), children)
                else:
                    token = _choice(row, values, best, node, path)
                    child = None if rule == "synthetic" else _child(row, children, token)
            except ProcessorError as failure:
                return Verdict(tuple(nodes), 0, str(failure))
        if child is None:
            return Verdict(tuple(nodes), token)
        node = child
        nodes.append(node)
        path.append(token)


def _choice(row: VerifyRow, values: _Values, best: Sequence[int], node: int, path: Sequence[int]) -> int:
    """Return the target's token below `node`: the likeliest of a greedy row, else a draw with the row's noise."""
    if not row.sampling.greedy:
        return _coupled(row, values(node, path), len(path))
    if row.processors is not None:
        return int(values(node, path).argmax())
    token = best[row.start + node + 1]
    if token == 0:
        values(node, path)  # raises where the mask forbids all, of which the argmax is 0 too
    return token


def _lead(row: VerifyRow, mean: float) -> int:
    """Return how many drafts `synthetic` accepts, if there are so many: one less than the tokens it emits."""
    whole = int(mean)
    coin = float(uniform(row.seed, row.choice, row.root_index, "coin", 1)[0])
    return whole - 1 + (coin < mean - whole)


def _child(row: VerifyRow, below: Sequence[int], token: int) -> int | None:
    return next((child for child in below if row.tokens[child] == token), None)


def _coupled(row: VerifyRow, logits: Tensor, depth: int) -> int:
    noise = gumbel(row.seed, row.choice, row.root_index + depth + 1, "target", len(logits))
    return int((processed_logits(logits, row.sampling) + noise).argmax())


def _rejection(row: VerifyRow, logits: Tensor, depth: int, below: Sequence[int]) -> tuple[int, int | None]:
    """Try each child with min(1, p/q); on a refusal go on with the normalised positive part of p - q.

    Returns the token and the child that it is, None if it was drawn from what remained.
    """
    index = row.root_index + depth + 1
    p = torch.softmax(processed_logits(logits, row.sampling), 0)
    for rank, child in enumerate(below):
        token = row.tokens[child]
        q = torch.zeros_like(p).index_fill_(0, torch.tensor(token), 1.0) if row.q is None else row.q[child]
        coin = float(uniform(row.seed, row.choice, index, "coin", 1, rank)[0])
        remaining = (p - q).clamp_min_(0.0)
        mass = float(remaining.sum())
        # Without mass left p equals q up to rounding: a refusal has probability 0.
        if coin * float(q[token]) < float(p[token]) or mass <= 0.0:
            return token, child
        p = remaining / mass
    stream: Stream = "residual" if below else "target"
    noise = gumbel(row.seed, row.choice, index, stream, len(p))
    return int((p.log() + noise).argmax()), None
