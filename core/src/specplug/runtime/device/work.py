"""Which positions of a step have their token chosen anew, and what the device must be told for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specplug.grammar.masks import words64
from specplug.runtime.device.penalties import Edits, counts_tokens
from specplug.runtime.device.sampling import Filters
from specplug.runtime.device.upload import upload
from specplug.runtime.request import Request

NO_MASKS: Mapping[int, np.ndarray] = MappingProxyType({})
"""Of a step in which nobody has a grammar."""


def needs_host(request: Request) -> bool:
    """Say whether rows of `request` are decided on the host, so that the host must know every token before."""
    return request.processors is not None and request.processors.custom


class LiveRow(Protocol):
    """What acceptance reads of a `specplug.runtime.scheduler.Row`."""

    @property
    def request(self) -> Request:
        """Whose row it is."""

    @property
    def slot(self) -> int:
        """Its slot when the row was made."""

    @property
    def start(self) -> int:
        """Token index of the first token."""

    @property
    def tokens(self) -> Sequence[int]:
        """Literal tokens: their number counts, their values may not be known yet."""

    @property
    def drafted(self) -> int:
        """Drafts below the last of them."""


def is_plain(request: Request) -> bool:
    """Say whether each token of `request` is the largest entry of its logits as they are."""
    return request.processors is None and request.grammar is None and request.sampling.greedy


class WorkRow(NamedTuple):
    """A row whose next token is decided, as the host knows it."""

    at: int
    """Index among the step's rows."""
    live: LiveRow
    start: int
    """Logits row of its root."""

    @property
    def root_index(self) -> int:
        """Token index of the root."""
        return self.live.start + len(self.live.tokens) - 1

    @property
    def sampled(self) -> bool:
        """Its tokens are drawn."""
        return not self.live.request.sampling.greedy

    @property
    def length(self) -> int:
        """Output tokens up to the root."""
        return self.root_index + 1 - self.live.request.prompt_len

    @property
    def edited(self) -> bool:
        """Its options change logits before temperature."""
        request = self.live.request
        if request.grammar is not None:
            return True
        processors = request.processors
        return processors is not None and (
            counts_tokens(request.sampling)
            or len(processors.bias) > 0
            or any(self.length < ban.least for ban in processors.bans)
        )

    @property
    def custom(self) -> bool:
        """It has a processor that only the host can call."""
        return needs_host(self.live.request)


@dataclass(frozen=True, slots=True)
class Work:
    """The n positions of rows that are sampled or edited: greedy rows, sampled edited ones, sampled ones.

    So what is edited lies together in front, and what is sampled behind. int64 tensors on the device.
    """

    edited: int
    """Positions of edited rows."""
    greedy: int
    """Positions of greedy rows, edited all."""
    counting: bool
    """Some row's options need its tokens counted."""
    drafted: int
    """Most drafts of a row that is sampled."""
    use: Filters
    """What some sampled row filters by."""
    source: Tensor  # [n] row of the logits
    node: Tensor  # [n] node of the row's proposal, -1 = the root
    slot: Tensor  # [n]
    root_index: Tensor  # [n] token index of the row's root
    masks: Tensor  # [g, W] what the grammars of g positions allow, 64 token ids a word
    mask_at: Tensor  # [g] these positions, all of them edited
    edits: Sequence[Tensor]  # of `Edits`
    row_at: Tensor  # [m] sampled rows: index among the step's rows
    row_slot: Tensor  # [m]
    row_first: Tensor  # [m] place of the row's root among the sampled positions
    row_index: Tensor  # [m] token index of its root
    row_drafted: Tensor  # [m]
    count_at: Tensor  # [c] rows whose output is counted: index among the step's rows
    count_slot: Tensor  # [c]


def plan_work(
    rows: Sequence[WorkRow], vocab: int, device: torch.device, masks: Mapping[int, np.ndarray] = NO_MASKS
) -> Work | None:
    """Say what is to be done for `rows`, those with custom processors excepted; None: nothing. One upload.

    `masks`: `WorkRow.at` -> int32 [1 + drafted, words], of each row with a grammar: what it allows at its positions.
    """
    work = sorted(
        (row for row in rows if not row.custom and (row.sampled or row.edited)),
        key=lambda row: (row.sampled, not row.edited),
    )
    if not work:
        return None
    sizes = np.array([1 + row.live.drafted for row in work], dtype=np.int64)
    first = np.cumsum(sizes) - sizes
    node = np.arange(int(sizes.sum())) - np.repeat(first, sizes) - 1
    edited = [row for row in work if row.edited]
    drawn = [row for row in work if row.sampled]
    greedy = len(work) - len(drawn)
    split = int(sizes[:greedy].sum())
    counting = [row for row in edited if counts_tokens(row.live.request.sampling)]
    edits = Edits()
    mask_at: list[int] = []
    for row, begin, size in zip(edited, first.tolist(), sizes.tolist(), strict=False):
        edits.add(row.live.request, range(begin, begin + size), vocab, row.length)
        if row.at in masks:
            mask_at += range(begin, begin + size)
    packed = [masks[row.at] for row in edited if row.at in masks]

    def each(some: Sequence[WorkRow], of: Callable[[WorkRow], int]) -> np.ndarray:
        return np.array([of(row) for row in some], dtype=np.int64)

    def spread(of: Callable[[WorkRow], int]) -> np.ndarray:
        return np.repeat(each(work, of), sizes)

    arrays = {
        "masks": words64(np.concatenate(packed)) if packed else np.zeros((0, 0), dtype=np.int64),
        "mask_at": np.array(mask_at, dtype=np.int64),
        "source": spread(lambda row: row.start) + 1 + node,
        "node": node,
        "slot": spread(lambda row: row.live.slot),
        "root_index": spread(lambda row: row.root_index),
        "row_at": each(drawn, lambda row: row.at),
        "row_slot": each(drawn, lambda row: row.live.slot),
        "row_first": first[greedy:] - split,
        "row_index": each(drawn, lambda row: row.root_index),
        "row_drafted": sizes[greedy:] - 1,
        "count_at": each(counting, lambda row: row.at),
        "count_slot": each(counting, lambda row: row.live.slot),
    }
    tensors = upload([*arrays.values(), *edits.arrays()], device)
    options = [row.live.request.sampling for row in drawn]
    return Work(
        edited=int(sizes[: len(edited)].sum()),
        greedy=split,
        counting=bool(counting),
        drafted=max((row.live.drafted for row in drawn), default=0),
        use=Filters(
            top_k=any(0 < option.top_k < vocab for option in options),
            top_p=any(option.top_p < 1.0 for option in options),
            min_p=any(option.min_p > 0.0 for option in options),
        ),
        edits=tensors[len(arrays) :],
        **dict(zip(arrays, tensors, strict=False)),
    )
