"""Where an answer ends, and which of its tokens and characters may be shown so far."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from tokenizers.decoders import DecodeStream

from specplug.runtime.logprobs import TokenLogprob

Finish = Literal["stop", "length", "abort", "error"]


class Output:
    """One request's output: committed tokens in, text out, the first stop rule that fires wins.

    Rules, asked for each token in this order: EOS or stop id (in ids, not in the text), stop string,
    `max_tokens`, end of the context. A stop string drops the tokens whose text begins at or after it and
    cuts the last kept one's text; it counts only behind the text of the first `min_tokens` tokens. Because
    a later token may complete a stop string, ids and text that could still be dropped are held back from
    `take`.
    """

    def __init__(
        self, tokenizer: Any | None, ends: Collection[int], stop: Sequence[str], most: int, least: int = 0
    ) -> None:
        """`tokenizer`: a transformers fast tokenizer or None (no text); `ends`: EOS and stop ids; `most`: tokens
        until ``length``; `least`: `min_tokens`, before which `ends` must not be sampled."""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        """One entry per token of `ids`, if `commit` is given them."""
        self._text = ""
        self._read = 0  # how many of `ids` have become text
        self.finish_reason: Finish | None = None
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True) if tokenizer is not None else None
        self._ends = frozenset(ends)
        self._stop = stop
        self.most = most
        """Tokens at which the answer ends with ``length``."""
        self._least = least
        self._stoppable = 0  # where in `text` a stop string may begin
        self._begins: list[int] = []  # where each token's text begins in `text`
        self._taken_ids = 0
        self._taken_text = 0

    @property
    def text(self) -> str:
        """The text so far. Without stop strings nothing but the reader needs it, and so it is made when asked for."""
        if self._stream is not None and self._tokenizer is not None:
            for token in self.ids[self._read :]:
                self._begins.append(len(self._text))
                if token not in self._ends:
                    self._text += self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
            self._read = len(self.ids)
        return self._text

    @property
    def taken(self) -> int:
        """How many ids `take` has returned."""
        return self._taken_ids

    def commit(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Append one committed token; returns False once the answer has ended with it."""
        self.ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in self._ends:
            return self._finish("stop")
        if self._stop:
            known = len(self._text)
            if len(self.text) > known:
                if len(self.ids) <= self._least:
                    self._stoppable = len(self._text)
                at = self._find_stop(max(known - max(map(len, self._stop)), self._stoppable))
                if at is not None:
                    return self._cut(at)
        if len(self.ids) >= self.most:
            return self._finish("length")
        return True

    def extend(self, tokens: Sequence[int]) -> int:
        """Append committed tokens up to the one that ends the answer; returns how many."""
        if not self._stop and len(self.ids) + len(tokens) < self.most and self._ends.isdisjoint(tokens):
            self.ids += tokens  # no rule can fire, so that none is asked token by token
            return len(tokens)
        return next((at for at, token in enumerate(tokens, 1) if not self.commit(token)), len(tokens))

    def end(self, reason: Finish) -> None:
        """End an unfinished answer from outside (abort, error)."""
        if self.finish_reason is None:
            self._finish(reason)

    def take(self) -> tuple[list[int], str]:
        """Return the ids and text that became final since the last call."""
        text = self.text
        safe_text, safe_ids = len(text), len(self.ids)
        if self._stop and self.finish_reason is None:
            safe_text -= self._held()
            # A token is kept by a stop string that begins after the token's own text does.
            while safe_ids and self._begins[safe_ids - 1] >= safe_text:
                safe_ids -= 1
        ids, text = self.ids[self._taken_ids : safe_ids], text[self._taken_text : safe_text]
        self._taken_ids, self._taken_text = max(self._taken_ids, safe_ids), max(self._taken_text, safe_text)
        return ids, text

    def _find_stop(self, start: int) -> int | None:
        found = [at for word in self._stop if (at := self.text.find(word, start)) >= 0]
        return min(found, default=None)

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string could begin with."""
        return max(
            (
                size
                for word in self._stop
                for size in range(1, min(len(word), len(self.text) + 1))
                if self.text.endswith(word[:size])
            ),
            default=0,
        )

    def _cut(self, at: int) -> bool:
        keep = max(sum(begin < at for begin in self._begins), self._least)
        self._text = self._text[:at]
        del self.ids[keep:], self._begins[keep:], self.logprobs[keep:]
        self._read = len(self.ids)
        self.finish_reason = "stop"
        return False

    def _finish(self, reason: Finish) -> bool:
        text = self.text  # all that the stream gives
        self.finish_reason = reason
        if self._tokenizer is not None:
            # DecodeStream withholds an unfinished character and has no flush.
            withheld = [
                token
                for token, begin in zip(self.ids, self._begins, strict=True)
                if begin == len(text) and token not in self._ends
            ]
            self._text += self._tokenizer.backend_tokenizer.decode(withheld, skip_special_tokens=True)
        return False
