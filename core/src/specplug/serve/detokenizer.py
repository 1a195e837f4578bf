"""From ids to text, one choice at a time: what `specplug.runtime.stop.Output` does without stop strings. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tokenizers.decoders import DecodeStream

from specplug.serve.protocol import Delta


class Detokenizer:
    """Makes the text of one choice's deltas. A character that is not complete yet comes with a later one."""

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        """`tokenizer`: transformers' fast tokenizer; `ends`: ids that end the answer and are not in its text."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ends = frozenset(ends)
        self._withheld: list[int] = []  # tokens since the last that made text

    def completed(self, delta: Delta) -> Delta:
        """Return the delta with its text; the last one brings what was held back."""
        text, withheld = "", self._withheld
        for token in delta.ids:
            if token in self._ends:
                continue
            withheld.append(token)
            piece = self._stream.step(self._tokenizer, token)
            if piece:
                text += piece
                withheld.clear()
        if delta.end is not None and withheld:
            text += self._tokenizer.decode(withheld, skip_special_tokens=True)
        return delta._replace(text=text) if text else delta
