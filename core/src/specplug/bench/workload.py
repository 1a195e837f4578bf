"""The prompts of a comparison: conversations of a file, or random token ids. Torch-free."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specplug.cli.prompts import Conversation
from specplug.errors import UserError


@dataclass(frozen=True, slots=True)
class Source:
    """One prompt of the set. Either `conversation` or `ids` is set."""

    number: int
    """Place in the set, from 0; its seed is the run's seed plus this."""
    category: str = ""
    conversation: Conversation | None = None
    ids: tuple[int, ...] = ()

    @property
    def rounds(self) -> int:
        """How many answers it takes."""
        return self.conversation.rounds if self.conversation else 1


@dataclass(frozen=True, slots=True)
class Item:
    """One request: what every column is given, token for token."""

    source: Source
    turn: int
    ids: tuple[int, ...]
    seed: int
    answers: tuple[str, ...] = ()
    """The first column's answers in the turns before."""


def from_conversations(
    conversations: Sequence[Conversation], limit: int | None, per_category: int | None
) -> list[Source]:
    """Return the first `limit` prompts, of each category the first `per_category`; None is all."""
    taken: dict[str, int] = {}
    found: list[Source] = []
    for conversation in conversations:
        count = taken.get(conversation.category, 0)
        if (limit is not None and len(found) >= limit) or (per_category is not None and count >= per_category):
            continue
        taken[conversation.category] = count + 1
        found.append(Source(len(found), conversation.category, conversation))
    return found


def random_sources(count: int, length: int, vocab: int, seed: int, exclude: Sequence[int] = ()) -> list[Source]:
    """Return `count` prompts of `length` ids drawn uniformly from the vocabulary, those of `exclude` left out."""
    generator = random.Random(seed)
    allowed = sorted(set(range(vocab)) - set(exclude))
    return [Source(number, ids=tuple(generator.choices(allowed, k=length))) for number in range(count)]


def split(sources: Sequence[Source], size: int) -> tuple[list[list[Source]], int]:
    """Return batches of exactly `size` prompts, in order, and how many prompts are left over.

    A smaller last batch would be measured as something it is not. Raises UserError if not one batch is full.
    """
    whole = len(sources) // size
    if not whole:
        raise UserError(
            f"--batch-sizes {size}: there are only {len(sources)} prompts, less than one batch: "
            "give more prompts, or a smaller size"
        )
    return [list(sources[at * size : (at + 1) * size]) for at in range(whole)], len(sources) - whole * size
