"""Which ids of two vocabularies can stand for each other. Torch-free.

Where tokenizers agree, an id means the same on both sides as far as both have it. Else tokens are compared by the
bytes that they stand for, and what both vocabularies have is the common ground.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specplug import Facts, ModelShape, UserError, model_shape

FEW = 100
"""Fewer shared tokens than this are hardly worth drafting from."""
_MARK = "▁"  # SentencePiece's word-initial mark
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def extends(facts: Facts) -> bool:
    """Whether one tokenizer is the other with further ids behind, so that the smaller one's ids mean the same."""
    difference, sizes = facts.first_vocab_difference, _tokenizer_sizes(facts)
    return difference is not None and len(sizes) == 2 and "" in difference[1:] and difference[0] >= min(sizes)


def target_vocab(facts: Facts) -> int:
    """Return the rows of the target's output head; 0 where nothing says it."""
    stated = facts.target.config.get("vocab_size")
    if isinstance(stated, int):
        return stated
    shape = model_shape(facts.target, "the target")
    if isinstance(shape, ModelShape):
        return shape.vocab_size
    return facts.target.tokenizer_size or 0


def common(facts: Facts, draft_vocab: int) -> int:
    """Return how many leading ids both sides have, for tokenizers that agree; padding is no difference."""
    sizes = [size for size in (target_vocab(facts), draft_vocab) if size]
    if extends(facts):
        sizes += _tokenizer_sizes(facts)
    return min(sizes)


def shared(facts: Facts, draft_vocab: int) -> list[tuple[int, int]]:
    """Return (target id, draft id) of every token that both vocabularies have, by target id.

    Raises UserError where a tokenizer cannot be read.
    """
    assert facts.draft is not None
    ours, theirs = _ids(facts.target.path), _ids(facts.draft.path)
    most = target_vocab(facts)
    pairs = ((number, theirs[text]) for text, number in ours.items() if text in theirs)
    return sorted((mine, other) for mine, other in pairs if mine < most and other < draft_vocab)


def _tokenizer_sizes(facts: Facts) -> list[int]:
    sides = [facts.target, *([facts.draft] if facts.draft else [])]
    return [side.tokenizer_size for side in sides if side.tokenizer_size is not None]


@functools.lru_cache(maxsize=4)
def _ids(folder: str) -> Mapping[bytes, int]:
    """Return what each token of the tokenizer in `folder` stands for -> its id."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"a tokenizer.json is needed on both sides, and {folder} has none; leave it out")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    first = "".join(tokenizer.encode(" a", add_special_tokens=False).tokens)
    in_bytes = _byte_alphabet() if first.startswith("Ġ") else None
    found: dict[bytes, int] = {}
    single: dict[bytes, int] = {}
    for text, number in sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        if number in special:
            found.setdefault(b"\0special " + text.encode(), number)
        elif in_bytes is not None:
            known = all(letter in in_bytes for letter in text)
            found.setdefault(bytes(in_bytes[letter] for letter in text) if known else text.encode(), number)
        elif byte := _BYTE.fullmatch(text):
            single.setdefault(bytes([int(byte[1], 16)]), number)
        else:
            found.setdefault(text.replace(_MARK, " ").encode(), number)
    return {**single, **found}  # a model says the letter, and its byte only where it has no letter


def _byte_alphabet() -> dict[str, int]:
    """Return the letter that byte-level tokenizers write for each byte -> the byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


def stand_in(config: Mapping[str, Any], draft_vocab: int) -> int:
    """Return the draft id that is fed for a token which the draft does not have."""
    return next((each for each in _ends(config) if 0 <= each < draft_vocab), 0)


def _ends(config: Mapping[str, Any]) -> Iterator[int]:
    named = config.get("eos_token_id")
    yield from (each for each in (named if isinstance(named, list) else [named]) if isinstance(each, int))
