"""Chats to train and test drafts on: read, split, and put together into batches of equal length.

A file of chats is an ``.npz`` with ``tokens`` (uint16, flat, template included), ``offsets`` (int64 [n + 1]),
``prompt_len`` (tokens before the answer) and ``greedy`` (whether the answer is the likeliest).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specplug import UserError

TEST_ONE_IN = 50
"""One prompt of so many is kept for tests."""
MOST_TESTED = 400
"""So many of these are tested on at each save, so that more data does not mean more time for tests."""
_MULTIPLE = 16
"""Batches are padded to a multiple of it."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat. `prompt` counts the tokens before the answer, the first `tokens` of all."""

    tokens: NDArray[np.int64]
    prompt: int
    greedy: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """B chats, padded behind to L tokens. Row (b, i) stands for token i of chat b."""

    tokens: Tensor
    """int64 [B, L]"""
    rows: Tensor
    """int64 [R], flat (b * L + i): the rows from which a draft is made while the answer is written, in order. Row i
    knows token i + 1 and drafts token i + 2: the first has token i + 1 as the answer's first, the last drafts the
    chat's last."""
    left: Tensor
    """int64 [R]: how many tokens of the chat follow the one that the row drafts first."""

    def to(self, device: torch.device) -> Batch:
        """Return it on `device`."""
        return Batch(*(moved(part, device) for part in (self.tokens, self.rows, self.left)))


def moved(part: Tensor, device: torch.device) -> Tensor:
    """Return `part` (on the CPU) on `device`; a GPU is not waited for, which pageable memory would do."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)


def read(paths: Sequence[Path], limit: int | None = None, cut: int | None = None) -> list[Chat]:
    """Return the chats of the files, `limit` at most of each, and of each chat `cut` tokens at most; such as are too
    short to draft in are left out."""
    chats = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"--chats {path}: there is no such file; give .npz files of chats (training/README.md)")
        with np.load(path) as data:
            tokens, offsets = data["tokens"].astype(np.int64), data["offsets"]
            for number, (prompt, greedy) in enumerate(zip(data["prompt_len"], data["greedy"], strict=True)):
                if limit is not None and number >= limit:
                    break
                chat = Chat(tokens[offsets[number] : offsets[number + 1]][:cut], int(prompt), bool(greedy))
                if len(chat.tokens) >= chat.prompt + 2:
                    chats.append(chat)
    return chats


def split(chats: Sequence[Chat], one_in: int = TEST_ONE_IN) -> tuple[list[Chat], list[Chat]]:
    """Return the chats to train on, and those to test on. Chats of one prompt stand on one side."""
    sides: tuple[list[Chat], list[Chat]] = ([], [])
    for chat in chats:
        sides[_key(chat) % one_in == 0].append(chat)
    return sides


def capped(chats: Sequence[Chat], most: int = MOST_TESTED) -> list[Chat]:
    """Return `most` of the chats, wherever they stand: those of the smallest checksum of the prompt. Fewer are kept
    as they are."""
    return list(chats) if len(chats) <= most else sorted(chats, key=_key)[:most]


def _key(chat: Chat) -> int:
    """Return the checksum of the prompt."""
    return zlib.crc32(chat.tokens[: chat.prompt].tobytes())


def frequent(chats: Sequence[Chat], rows: int, vocab: int) -> Tensor:
    """Return the `rows` ids that answers use most, ascending, int64 [rows]; equally frequent ones by id."""
    counts = sum((np.bincount(chat.tokens[chat.prompt :], minlength=vocab) for chat in chats), np.zeros(vocab, int))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:rows]))


def coverage(chats: Sequence[Chat], ids: Tensor) -> float:
    """Return the share of the answers' tokens that are among `ids`."""
    answers = np.concatenate([chat.tokens[chat.prompt :] for chat in chats])
    return float(np.isin(answers, ids.numpy()).mean())


def rarest(chats: Sequence[Chat], vocab: int) -> int:
    """Return the id that the chats use least, prompts included; the last of equally rare ones."""
    counts = sum((np.bincount(chat.tokens, minlength=vocab) for chat in chats), np.zeros(vocab, int))
    return int(vocab - 1 - np.argmin(counts[::-1]))


def together(chats: Sequence[Chat]) -> Batch:
    """Return the chats as one batch."""
    longest = max(len(chat.tokens) for chat in chats)
    width = -(-longest // _MULTIPLE) * _MULTIPLE
    tokens = np.zeros((len(chats), width), np.int64)
    rows, left = [], []
    for b, chat in enumerate(chats):
        tokens[b, : len(chat.tokens)] = chat.tokens
        at = np.arange(chat.prompt - 1, len(chat.tokens) - 2)
        rows.append(b * width + at)
        left.append(len(chat.tokens) - 3 - at)
    return Batch(*(torch.from_numpy(part) for part in (tokens, np.concatenate(rows), np.concatenate(left))))


def batches(chats: Sequence[Chat], size: int, seed: int | None = None) -> Iterator[Batch]:
    """Yield every chat once, in batches of about `size` tokens of nearly one length; shuffled where `seed` is given."""
    random = None if seed is None else np.random.default_rng(seed)
    lengths = np.array([len(chat.tokens) for chat in chats], float)
    if random is not None:
        lengths += random.uniform(0, 2 * _MULTIPLE, len(lengths))  # so that neighbours change from epoch to epoch
    groups: list[list[Chat]] = [[]]
    for number in np.argsort(lengths, kind="stable"):
        chat = chats[number]
        if groups[-1] and (len(groups[-1]) + 1) * max(len(chat.tokens), len(groups[-1][-1].tokens)) > size:
            groups.append([])
        groups[-1].append(chat)
    if random is not None:
        random.shuffle(groups)
    for group in groups:
        if group:
            yield together(group)
