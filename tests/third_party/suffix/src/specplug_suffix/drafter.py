"""The drafter: one trie per request and, if asked to, one of the answers of earlier requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from specplug import Arena, Drafter, HostProposal, Proposal, RequestView, StepView
from specplug_suffix.trie import Node, SuffixTrie, Tree, best_tree


class _Text:
    """What one slot's request has said so far."""

    def __init__(self, depth: int, asked: int) -> None:
        self.trie = SuffixTrie(depth)
        self.ends: list[Node] = []
        self.tokens: list[int] = []
        self.asked = asked
        """Tokens of the prompt: what follows them is an answer."""


class SuffixDrafter(Drafter):
    """Drafts the better of two trees: from the request itself, or from earlier answers."""

    def allocate(self, arena: Arena) -> None:
        """Begin with nothing; everything lives on the host."""
        self.texts: dict[int, _Text] = {}
        self.answers = SuffixTrie(self.config.suffix_max_depth)
        self.kept: deque[list[int]] = deque()
        self.drafted_from_answers = 0

    def on_admit(self, request: RequestView) -> None:
        """Begin a text. After a preemption its former answer counts as asked: it was kept when the slot was lost."""
        self.texts[request.slot] = _Text(self.config.suffix_max_depth, len(request.tokens))

    def ingest(self, step: StepView) -> None:
        """Count the tokens that are final now."""
        assert step.host is not None
        for row in step.host.rows:
            text = self.texts[row.slot]
            text.tokens.extend(row.new_tokens)
            for token in row.new_tokens:
                text.ends = text.trie.push(text.ends, token)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Draft for each row that may have drafts."""
        assert step.host is not None
        assert isinstance(out, HostProposal)
        for row in step.host.rows:
            if row.limit:
                text = self.texts[row.slot]
                tree = self._best(text.ends, row.limit, step.depth)
                if self.kept:
                    other = self._best(self.answers.ends(text.tokens), row.limit, step.depth)
                    if other.score > tree.score:
                        tree = other
                        self.drafted_from_answers += 1
                out.set(row.slot, tree.tokens, tree.parents)

    def on_release(self, slot: int, reason: Any) -> None:
        """Keep the answer for other requests, and forget the oldest one when there are too many."""
        text = self.texts.pop(slot)
        answer = text.tokens[text.asked :]
        if not answer or not self.config.suffix_cached_requests:
            return
        self.answers.add(answer)
        self.kept.append(answer)
        if len(self.kept) > self.config.suffix_cached_requests:
            self.answers.remove(self.kept.popleft())

    def metrics(self) -> Mapping[str, float]:
        """Return how often an earlier answer gave the better tree."""
        return {"suffix_drafted_from_answers": self.drafted_from_answers}

    def _best(self, ends: list[Node], nodes: int, depth: int) -> Tree:
        config = self.config
        depth = min(depth, self.plan.depth)
        return best_tree(ends, nodes, depth, config.suffix_factor, config.suffix_min_probability)
