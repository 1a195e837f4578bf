"""One request's place in its grammar."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from specplug import tree
from specplug.errors import Blame

log = logging.getLogger("specplug")


class Grammar:
    """Walks a matcher along the committed output of one answer, and along drafts and back.

    The matcher (llguidance's `LLMatcher`) is fed each committed token once; a token that it refuses would leave it
    in a state for good, so that it is never shown one that it might. It is not called any more once nothing but an
    end may follow.
    """

    def __init__(self, matcher: Any, ends: Collection[int], vocab: int, words: int) -> None:
        """`ends`: end-of-sequence ids; `vocab`: the model's; `words`: 32-bit words of a mask, which hold `vocab`."""
        self.matcher = matcher
        self.ends = frozenset(ends)
        self.words = words
        self.error = ""
        """One line, if the grammar cannot be followed any further."""
        self.blame: Blame = "request"
        """Whose fault `error` is."""
        self._vocab = vocab
        self._ended = False
        self._note()

    @property
    def ended(self) -> bool:
        """Nothing but an end-of-sequence id may follow; the matcher is not called any more."""
        return self._ended

    @property
    def end_mask(self) -> np.ndarray:
        """The mask, int32 [words], of a position where only an end may follow."""
        mask = np.zeros(self.words, dtype=np.uint32)
        for token in self.ends:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask.view(np.int32)

    def commit(self, tokens: Sequence[int]) -> None:
        """Follow tokens that became output, up to the one that ends it. `error` says so where it cannot."""
        for token in tokens:
            if self.error or token in self.ends:
                return
            # Asked first: no rule lets it say no, but a matcher that was fed a wrong token never recovers.
            if self._ended or not self._known(token) or self.matcher.validate_tokens([token]) != 1:
                self.error = (
                    f"response_format: token {token} became output and is not allowed there; please report this"
                )
                self.blame = "engine"  # the mask of that position was wrong
                return
            self.matcher.consume_token(token)
            self._note()

    def leading(self, tokens: Sequence[int]) -> list[int]:
        """Return the leading tokens of a chain that the matcher may be shown: known ones, before any end."""
        stop = next((at for at, t in enumerate(tokens) if t in self.ends or not self._known(t)), len(tokens))
        return list(tokens[:stop])

    def legal(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the nodes, ascending, of a well-formed proposal that the grammar allows; below an end nothing is."""
        if self.error:
            return []
        if self._ended:
            return [node for node, parent in enumerate(parents) if parent < 0 and tokens[node] in self.ends]
        if tree.is_chain(parents):
            head = self.leading(tokens)
            count = self.matcher.validate_tokens(head) if head else 0
            # An end may follow where the matcher says so; it knows that of the whole run at once.
            if count == len(head) < len(tokens) and tokens[count] in self.ends:
                count = self.matcher.validate_tokens([*head, tokens[count]])
            return list(range(count))
        found: list[int] = []
        below = tree.children(parents)

        def visit(node: int) -> None:
            for child in below[node + 1]:
                if tokens[child] in self.ends:
                    if self.matcher.is_accepting():
                        found.append(child)
                elif self.step(tokens[child]):
                    found.append(child)
                    visit(child)
                    self.back()

        visit(-1)
        return sorted(found)

    def step(self, token: int) -> bool:
        """Try one drafted token; True: the matcher stands behind it, until `back`."""
        if not self._known(token) or token in self.ends or self.matcher.is_stopped():
            return False
        return bool(self.matcher.try_consume_tokens([token]) == 1)

    def back(self) -> None:
        """Undo the newest `step` that was True."""
        self.matcher.rollback(1)

    def check(self) -> None:
        """Note if the matcher failed, as it does where a schema is too complex to follow."""
        if not self.error and self.matcher.is_error():
            log.warning("a grammar failed: %s", self.matcher.get_error().partition("\n")[0])
            self.error = "response_format: its schema became too complex to follow here; simplify it"

    def _known(self, token: int) -> bool:
        return 0 <= token < self._vocab

    def _note(self) -> None:
        self.check()
        self._ended = not self.error and bool(self.matcher.is_stopped())
