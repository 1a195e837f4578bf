"""Answers as the OpenAI API shapes them: whole, and as chunks of a stream. Torch-free.

A stream has one chunk per delta of a choice, so all tokens that a step yielded come together; a delta that brings
nothing to show (half a character) has none, and its tokens' entries come with it where they were asked for.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specplug.runtime.ledger import Ledger, pooled
from specplug.serve.asked import Asked
from specplug.serve.protocol import AnswerEnd, Delta, TokenInfo
from specplug.serve.tokens import TokenBytes

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have, as in OpenAI's answers."""

dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""JSON without blanks; a number that JSON does not have is a fault of ours and raises."""
quoted = json.encoder.encode_basestring_ascii
"""A text as JSON: the part of `dumps` that most chunks need, without its own cost."""


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come."""

    text: list[str] = field(default_factory=list)
    count: int = 0
    """Tokens so far."""
    logprobs: list[TokenInfo] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    end: AnswerEnd | None = None
    begun: bool = False
    """A chunk of it was made."""
    offset: int = 0
    """Characters of the text up to the next token, for completions' ``text_offset``."""
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def add(self, delta: Delta, reported: list[dict[str, Any]]) -> None:
        """Take in what became final."""
        self.text.append(delta.text)
        self.count += len(delta.ids)
        self.logprobs += delta.logprobs or ()
        self.tokens += reported
        self.end = delta.end or self.end


class Shape:
    """Turns the deltas of one request into its endpoint's JSON."""

    def __init__(self, asked: Asked, answer_id: str, created: int, model: str, tokens: TokenBytes) -> None:
        """`answer_id`: without the endpoint's prefix; `model`: the served name; `tokens`: of this model."""
        chat = asked.kind == "chat"
        self._asked = asked
        self._chat = chat
        self._tokens = tokens
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer_id}",
            "object": ("chat.completion" if chat else "text_completion") + (".chunk" if chat and asked.stream else ""),
            "created": created,
            "model": model,
        }
        # What never changes in a chunk is written once.
        self._prefix = "data: " + dumps(self._head)[:-1] + ',"choices":[{"index":'
        self._suffix = '}],"usage":null}\n\n' if asked.include_usage else "}]}\n\n"
        self.choices = [Choice() for _ in range(len(asked.prompts) * asked.params.n)]

    def add(self, index: int, delta: Delta) -> bytes:
        """Take in a delta of choice `index`; returns its chunk of the stream, nothing where there is none."""
        choice, asked = self.choices[index], self._asked
        reported = self._reported(delta) if asked.tokens else []
        if not asked.stream:
            choice.add(delta, reported)
            return b""
        choice.count += len(delta.ids)
        choice.end = delta.end or choice.end
        if not (delta.text or delta.end or (delta.ids and (asked.tokens or delta.logprobs))):
            return b""
        text = quoted(delta.text)
        if self._chat:
            role = "" if choice.begun else '"role":"assistant",'
            said = f'"delta":{{{role}"content":{text}}}'
        else:
            said = f'"text":{text}'
        choice.begun = True
        rest = "null" if delta.logprobs is None else dumps(self._logprobs(choice, delta.logprobs))
        if asked.tokens:
            rest += f',"speculative":{{"tokens":{dumps(reported)}}}'
        reason = f'"{delta.end.finish_reason}"' if delta.end else "null"
        return f'{self._prefix}{index},{said},"logprobs":{rest},"finish_reason":{reason}{self._suffix}'.encode()

    def whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer, once all choices have ended."""
        return self._head | {"choices": [self._whole(at, one) for at, one in enumerate(self.choices)], "usage": usage}

    def usage_chunk(self, usage: Mapping[str, Any]) -> bytes:
        """Return the last chunk of a stream that was asked for usage: no choice, and the usage."""
        return f"data: {dumps(self._head | {'choices': [], 'usage': usage})}\n\n".encode()

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        entries = choice.logprobs if self._asked.params.logprobs else None
        found: dict[str, Any] = {"index": index}
        if self._chat:
            found["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            found["text"] = text
        found["logprobs"] = self._logprobs(choice, entries)
        found["finish_reason"] = choice.end.finish_reason if choice.end else None
        if self._asked.tokens:
            found["speculative"] = {"tokens": choice.tokens}
        return found

    def _reported(self, delta: Delta) -> list[dict[str, Any]]:
        return [
            {"id": token, "bytes": list(self._tokens.bytes_of(token)), "depth": depth, "corrected": corrected}
            for token, depth, corrected in zip(delta.ids, delta.depths, delta.corrected, strict=True)
        ]

    def _logprobs(self, choice: Choice, entries: Sequence[TokenInfo] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        if self._chat:
            return {"content": [self._entry(entry) for entry in entries], "refusal": None}
        texts, offsets = [], []
        for entry in entries:
            texts.append(self._tokens.text_of(entry.token))
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.decode(self._tokens.bytes_of(entry.token)))
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                # Of two tokens with one text the likelier stays.
                {self._tokens.text_of(token): _finite(value) for token, value in reversed(entry.top)}
                for entry in entries
            ]
            if self._asked.params.top_logprobs
            else None,
            "text_offset": offsets,
        }

    def _entry(self, entry: TokenInfo) -> dict[str, Any]:
        top = [self._one(token, value) for token, value in entry.top]
        return self._one(entry.token, entry.logprob) | {"top_logprobs": top}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        raw = self._tokens.bytes_of(token)
        return {"token": self._tokens.text_of(token), "logprob": _finite(value), "bytes": list(raw)}


def usage_of(choices: Iterable[Choice], prompt_tokens: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the usage of a request: OpenAI's counts, and under ``speculative`` the ledger of all its choices.

    `prompt_tokens`: of each prompt once, however many choices it has; `seeds`: one per prompt.
    """
    ends = [choice.end for choice in choices if choice.end is not None]
    count = sum(end.completion_tokens for end in ends)
    ledgers = [Ledger(**{name: end.ledger[name] for name in Ledger.__slots__}) for end in ends]
    states = [str(end.ledger.get("speculation", "off")) for end in ends]
    speculative = pooled(ledgers).report() | {
        "seed": seeds[0],
        "speculation": next((state for state in states if state.startswith("failed")), states[0] if states else "off"),
    }
    if len(seeds) > 1:
        speculative["seeds"] = list(seeds)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": count,
        "total_tokens": prompt_tokens + count,
        "speculative": speculative,
    }


def _finite(value: float) -> float:
    return max(value, LOWEST)
