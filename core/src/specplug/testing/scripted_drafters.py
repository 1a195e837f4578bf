"""The drafters of `specplug.testing.scripted`: what each behaviour puts into a proposal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import torch

from specplug.drafter import Arena, Drafter, RequestView, StepView
from specplug.proposal import HostProposal, Proposal
from specplug.spec import Release

Drafts = tuple[list[int], list[int], int]
"""Tokens, parents, and the claimed number of valid ones, which a faulty drafter gets wrong."""


class Script:
    """From a request's text to drafts: a pure function, so slots and neighbours cannot matter."""

    def __init__(self, config: Any, nodes: int, vocab: int) -> None:
        self._behaviour: str = config.scripted_behaviour
        self._texts: tuple[tuple[int, ...], ...] = config.scripted_texts
        self._n: int = config.scripted_n
        self._seed: int = config.scripted_seed
        self._nodes = nodes
        self._vocab = vocab

    def following(self, text: Sequence[int]) -> list[int]:
        """Return what follows `text` in the known sequences, at most one token per node."""
        head = tuple(text)
        for known in self._texts:
            if len(known) > len(head) and known[: len(head)] == head:
                return list(known[len(head) : len(head) + self._nodes])
        return []

    def drafts(self, text: Sequence[int], limit: int) -> Drafts:
        """Return what the behaviour makes of the continuation of `text`."""
        right = self.following(text)
        wrong = [(token + 1) % self._vocab for token in right]
        rng = random.Random(repr((self._seed, list(text))))
        match self._behaviour:
            case "wrong":
                return _chain(wrong[:limit])
            case "right_then_wrong":
                return _chain((right[: self._n] + wrong[self._n :])[:limit])
            case "empty":
                return [], [], 0
            case "ragged":
                return _chain(right[: len(text) % (self._nodes + 1)][:limit])
            case "too_long":
                tokens, parents, _ = _chain(right)
                return tokens, parents, self._nodes + 1_000
            case "negative_id":
                return _chain([*right[:1], -1, *right[2:]])
            case "huge_id":
                return _chain([*right[:1], self._vocab, *right[2:]])
            case "bad_parents":
                # The second node is its own parent, the third's comes after it.
                return right, [-1, 1, 7, *range(2, self._nodes)][: len(right)], len(right)
            case "duplicates":
                # Two equal children of the root; the second one's branch can never be reached.
                tokens = [token for token in right[:1] for _ in range(2)] + right[1:]
                parents = [-1, -1, 1, *range(2, self._nodes)]
                return tokens[: self._nodes], parents[: len(tokens)][: self._nodes], min(len(tokens), self._nodes)
            case "random_tree":
                return self._random_tree(rng, right, limit)
            case "hostile":
                return self._hostile(rng, right)
            case _:
                return _chain(right[:limit])

    def _random_tree(self, rng: random.Random, right: Sequence[int], limit: int) -> Drafts:
        """Hide the right path among wrong nodes, parents first and siblings distinct."""
        tokens: list[int] = []
        parents: list[int] = []
        path = [-1]  # the right path so far, by node
        for node in range(min(limit, self._nodes)):
            grow = len(path) <= len(right) and rng.random() < 0.5
            parent = path[-1] if grow else rng.randrange(-1, node)
            taken = {tokens[other] for other in range(node) if parents[other] == parent}
            if grow:
                token = right[len(path) - 1]
                if token in taken:
                    path.append(next(at for at in range(node) if parents[at] == parent and tokens[at] == token))
                    grow = False
            if not grow:
                token = rng.choice([token for token in range(self._vocab) if token not in taken])
                taken = {tokens[other] for other in range(node) if parents[other] == parent}
            else:
                path.append(node)
            tokens.append(token)
            parents.append(parent)
        return tokens, parents, len(tokens)

    def _hostile(self, rng: random.Random, right: Sequence[int]) -> Drafts:
        """Anything a broken drafter might write, the right tokens among it."""
        pool = [*right, -1, self._vocab, 2**40, -(2**40), *range(self._vocab)]
        tokens = [rng.choice(pool) for _ in range(self._nodes)]
        tokens[: len(right)] = [
            token if rng.random() < 0.6 else drawn for token, drawn in zip(right, tokens, strict=False)
        ]
        parents = [
            node - 1 if rng.random() < 0.5 else rng.randrange(-3, self._nodes + 2) for node in range(self._nodes)
        ]
        return tokens, parents, rng.choice([-5, 0, 1, self._nodes, self._nodes, 2**31])


def _chain(tokens: list[int]) -> Drafts:
    return tokens, list(range(-1, len(tokens) - 1)), len(tokens)


class _Scripted(Drafter):
    """Keeps each slot's text and counts calls, for the behaviours that fail at the n-th."""

    def allocate(self, arena: Arena) -> None:
        vocab = self.ctx.facts.target.config["vocab_size"]
        self._script = Script(self.config, max(self.plan.nodes, 1), vocab)
        self._texts: dict[int, list[int]] = {}
        self._calls = {"ingest": 0, "propose": 0}

    def on_admit(self, request: RequestView) -> None:
        self._texts[request.slot] = []

    def on_release(self, slot: int, reason: Release) -> None:
        del self._texts[slot]  # fails when released twice, or without an admit

    def _called(self, method: str) -> None:
        self._calls[method] += 1
        if self.config.scripted_behaviour == f"raise_{method}" and self._calls[method] > self.config.scripted_n:
            raise RuntimeError(f"scripted to fail in {method}")


class HostScripted(_Scripted):
    """Reads the step as host rows."""

    def ingest(self, step: StepView) -> None:
        assert step.host is not None
        for row in step.host.rows:
            text = self._texts[row.slot]
            text += row.new_tokens
            if len(text) != row.seq_len:
                raise AssertionError(f"slot {row.slot} was given {len(text)} tokens, seq_len says {row.seq_len}")
        self._called("ingest")

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        assert step.host is not None
        host = cast(HostProposal, out)
        for row in step.host.rows:
            if row.limit > 0:
                _write(host, row.slot, *self._script.drafts(self._texts[row.slot], row.limit))
        self._called("propose")


class DeviceScripted(_Scripted):
    """Reads the step's tensors. A test double: it may wait for the device, which a real one must not."""

    def ingest(self, step: StepView) -> None:
        for row, slot in enumerate(step.slots.tolist()):
            if slot not in self._texts:
                continue
            own = step.tokens[step.row_start[row] : step.row_start[row + 1]]
            text = self._texts[slot]
            text += own[: step.num_kept[row]].tolist()
            if len(text) != int(step.kv_len[row]):
                raise AssertionError(f"slot {slot} was given {len(text)} tokens, kv_len says {int(step.kv_len[row])}")
        self._called("ingest")

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        device = cast(Proposal, out)
        for row, slot in enumerate(step.slots.tolist()):
            limit = int(device.limit[slot])
            if slot in self._texts and limit > 0:
                text = [*self._texts[slot], int(step.root[row])]
                _write(device, slot, *self._script.drafts(text, limit))
        self._called("propose")


class DenseScripted(Drafter):
    """Draws a chain through `Proposal.draw` from a table of logits [V, V], looked up by the token before."""

    def allocate(self, arena: Arena) -> None:
        vocab = self.ctx.facts.target.config["vocab_size"]
        self._table = arena.static("table", (vocab, vocab), torch.float32)
        generator = torch.Generator().manual_seed(self.config.scripted_seed)
        self._table.copy_(self.config.scripted_spread * torch.randn(vocab, vocab, generator=generator))

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        device = cast(Proposal, out)
        token = step.root
        for depth in range(1, min(step.depth, self.plan.depth) + 1):
            token = device.draw(step, depth, self._table[token])
        device.num_valid[step.slots] = device.limit[step.slots].clamp(max=step.depth)


def _write(out: Proposal | HostProposal, slot: int, tokens: list[int], parents: list[int], claimed: int) -> None:
    """Write without the checks of `HostProposal.set`: a faulty drafter writes the arrays."""
    count = len(tokens)
    if isinstance(out, Proposal):
        out.tokens[slot, :count] = torch.tensor(tokens, dtype=torch.int64)
        out.parents[slot, :count] = torch.tensor(parents, dtype=torch.int64)
        out.num_valid[slot] = claimed
    else:
        out.tokens[slot, :count] = tokens
        out.parents[slot, :count] = parents
        out.num_valid[slot] = claimed
