"""Single tokens as text and as bytes, for log-probabilities and for reports of single tokens. Torch-free."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes that each token stands for: what a tokenizer's decoder does to one token on its own.

    ``decode([id])`` cannot tell them: half a character becomes a replacement character, and a leading blank is lost.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        """`tokenizer`: transformers' fast tokenizer, or None: tokens are then shown by their ids."""
        self._tokenizer = tokenizer
        self._special: frozenset[int] = frozenset()
        self._kinds: frozenset[str] = frozenset()
        if tokenizer is not None:
            backend = tokenizer.backend_tokenizer
            self._kinds = _kinds(json.loads(backend.to_str())["decoder"])
            self._special = frozenset(backend.get_added_tokens_decoder())
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes_of)

    def text_of(self, token: int) -> str:
        """Return a token's text, or ``bytes:\\xe2\\x82`` where it is part of a character, as OpenAI's API does."""
        raw = self.bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # an id of the model's head that no token has
            return b""
        if token in self._special:
            return str(piece).encode()
        if "ByteLevel" in self._kinds:
            return b"".join(_LEVEL[char] if char in _LEVEL else char.encode() for char in piece)
        if "ByteFallback" in self._kinds and (found := _BYTE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        if {"Metaspace", "Replace"} & self._kinds:
            return str(piece).replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token])).encode()


def _kinds(decoder: Any) -> frozenset[str]:
    if not decoder:
        return frozenset()
    return frozenset({decoder["type"]}).union(*map(_kinds, decoder.get("decoders", ())))


def _byte_level() -> dict[str, bytes]:
    """Return GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes come from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + at): bytes([byte]) for at, byte in enumerate(others)
    }


_LEVEL = _byte_level()
