"""Openings of user turns, from which a model goes on: so it writes chats of more kinds than it would by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from specplug import UserError

SHARE = 0.5
"""Of the chats that are opened, where no other share is given."""


class Opening(NamedTuple):
    """What a user turn begins with."""

    tokens: list[int]
    """The template's head included."""
    head: int
    """How many of `tokens` come before the turn."""


def lines_of(path: Path) -> list[tuple[int, str]]:
    """Return the openings of a file, each with the number of its line, from 1 on; UserError if there are none.

    An opening is a line in UTF-8, in which a backslash and an n stand for a newline. Empty lines and such as begin
    with # are skipped. Blanks around an opening are taken off: a real prompt's tokens hold a blank together with the
    word that follows.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not in UTF-8"
        raise UserError(f"--openings {path}: cannot be read ({why}); give a text file, one opening a line") from error
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
    read = ((number, line.replace("\\n", "\n").strip()) for number, line in lines if not line.startswith("#"))
    if not (found := [(number, line) for number, line in read if line]):
        raise UserError(f"--openings {path}: it holds no opening; give a text file, one opening a line")
    return found


def read(
    path: Path, encode: Callable[[str], list[int]], head: str, special: frozenset[int], longest: int
) -> list[Opening]:
    """Return the openings of a file in token ids; UserError for one that holds an id of `special` or is too long.

    `encode`: from text to ids, with nothing added; `head`: what the chat template writes before a user turn. The two
    are encoded as one text, as those of a real prompt are. `longest`: most tokens of an opening.
    """
    alone = encode(head)
    found = []
    for number, line in lines_of(path):
        tokens = encode(head + line)
        # Some tokenizers join the head's last blank to the first word: then the turn begins before it.
        same = (at for at, pair in enumerate(zip(tokens, alone, strict=False)) if pair[0] != pair[1])
        opening = Opening(tokens, next(same, len(alone)))
        said = tokens[opening.head :]
        if not special.isdisjoint(said):
            raise UserError(f"--openings {path}: line {number} holds a special token of the model; take it out")
        if len(said) > longest:
            raise UserError(f"--openings {path}: line {number} has {len(said)} tokens; give openings of 1 to {longest}")
        found.append(opening)
    return found


def drawn(openings: Sequence[Opening], share: float, seed: int) -> Opening | None:
    """Return the opening of the chat with that seed, None for 1 - `share` of the chats, whose user begins alone."""
    source = random.Random(seed)
    return source.choice(openings) if source.random() < share else None
