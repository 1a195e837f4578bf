"""Every tensor of a step that must keep its address, and the views of it for a bucket."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from specplug.drafter import SamplingView, StepView
from specplug.runtime.device.inputs import Pages, StepInputs
from specplug.runtime.device.prologue import PrologueInputs
from specplug.runtime.device.rows import StepRows, words_for
from specplug.runtime.kv import PagePool

MOST_PAGES = 512
"""Changed page table entries that one upload has room for; more go in a copy of their own."""


GIVEN = ("slots", "row_start", "begin", "literals", "drafted")
"""What the host says of every row: its slot, its first token and that one's token index, and how many tokens it has
before its drafts and how many drafts."""
ROW_FIELDS = (*GIVEN, "start", "cap", "room")
"""These, and: logits row of its root (-1: not decided), most drafts wanted next, and where they must end."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the buffers of an engine are sized by. Set by `build`."""

    slots: int
    tokens: int
    """Most tokens of a step."""
    nodes: int
    """Most drafts of a row."""
    depth: int
    lookahead: int
    vocab: int
    hidden: int
    graph_tokens: int
    """Most tokens of a step that runs in a bucket: logits are kept for as many."""
    trees: bool
    """Whether drafts may branch."""
    host_drafts: bool
    """Whether drafts come from the host."""


class Statics:
    """Buffers for the largest step, R_max = S rows; smaller ones are leading parts of them."""

    def __init__(
        self,
        sizes: Sizes,
        pages: PagePool,
        taps: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`taps`: how many boundaries of the target a drafter looks at."""
        self.sizes = sizes
        self.device = device
        self.page_size = pages.page_size
        self.trash_row = pages.trash_row
        slots, tokens, nodes = sizes.slots, sizes.tokens, sizes.nodes
        drafts = (slots, nodes) if sizes.host_drafts else (0, 0)
        self.inputs = StepInputs(
            {
                # One entry more than rows: pad tokens belong to it.
                "rows": (len(ROW_FIELDS), slots + 1),
                "following": (slots, sizes.lookahead),
                "draft_tokens": drafts,
                "draft_parents": drafts,
                "pages": (2, MOST_PAGES),
                "tokens": (2, tokens),
                "wanted": (tokens,),
            },
            device,
        )
        self.given: dict[str, Tensor] = dict(zip(ROW_FIELDS, self.inputs.device["rows"], strict=True))
        """Each of `ROW_FIELDS`, [S+1], on the device."""
        self.literal, self._token_row = self.inputs.device["tokens"]
        self.pages = Pages(pages, device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.roots = zeros(slots + 1)
        self._tokens, self._positions, self._kv_rows = zeros(tokens), zeros(tokens), zeros(tokens)
        self._ancestors = zeros(tokens, words_for(nodes)) if sizes.trees else None
        self._num_kept, self._kv_len, self._next = zeros(slots), zeros(slots), zeros(slots, sizes.lookahead)
        self._final = zeros(slots, dtype=torch.bool)
        self._taps = [zeros(tokens, sizes.hidden, dtype=dtype) for _ in range(taps)]
        self.spare: tuple[Tensor, ...] = ()
        """For `kept_first`."""
        if sizes.trees:
            self.spare = (zeros(tokens), zeros(tokens), zeros(tokens if taps else 0, sizes.hidden, dtype=dtype))
        self._sampling = SamplingView(
            temperature=zeros(slots, dtype=torch.float32),
            top_k=zeros(slots),
            top_p=zeros(slots, dtype=torch.float32),
            min_p=zeros(slots, dtype=torch.float32),
            seed=zeros(slots),
            choice=zeros(slots),
        )
        self._rows: dict[tuple[int, int], StepRows] = {}
        self._views: dict[tuple[int, int], StepView] = {}
        self.logits = zeros(sizes.graph_tokens, sizes.vocab, dtype=torch.float32)
        """Float32 logits of a step in a bucket, one row per token."""
        self.choice = zeros(sizes.graph_tokens)
        """Their largest entries."""

    def rows(self, rows: int, tokens: int) -> StepRows:
        """Return the leading `rows` rows and `tokens` tokens. Nobody changes what is returned."""
        found = self._rows.get((rows, tokens))
        if found is None:
            found = self._make_rows(rows, tokens)
            if tokens <= self.sizes.graph_tokens:  # steps of these shapes come again and again
                self._rows[rows, tokens] = found
        return found

    def _make_rows(self, rows: int, tokens: int) -> StepRows:
        given = self.given
        return StepRows(
            slots=given["slots"][:rows],
            row_start=given["row_start"][: rows + 1],
            begin=given["begin"][:rows],
            drafted=given["drafted"][:rows],
            token_row=self._token_row[:tokens],
            tokens=self._tokens[:tokens],
            positions=self._positions[:tokens],
            kv_rows=self._kv_rows[:tokens],
            ancestors=None if self._ancestors is None else self._ancestors[:tokens],
            tables=self.pages.tables,
            page_size=self.page_size,
        )

    def prologue_inputs(self, tokens: int) -> PrologueInputs:
        """Return what the prologue of a step with `tokens` tokens reads."""
        given = self.given
        return PrologueInputs(
            literal=self.literal[:tokens],
            slots=given["slots"],
            starts=given["row_start"],
            begins=given["begin"],
            literals=given["literals"],
            roots=self.roots,
            vocab=self.sizes.vocab,
            depth=self.sizes.depth,
            trash_row=self.trash_row,
        )

    def taps(self, tokens: int) -> tuple[Tensor, ...]:
        """Return where the taps of a step go, [T, H] each."""
        return tuple(tap[:tokens] for tap in self._taps)

    def view(self, rows: int, tokens: int) -> StepView:
        """Return the step as a drafter sees it, once it is committed; what the host knows is left out."""
        found = self._views.get((rows, tokens))
        if found is None:
            found = self._make_view(rows, tokens)
            if tokens <= self.sizes.graph_tokens:
                self._views[rows, tokens] = found
        return dataclasses.replace(found)  # a step's own: some of its fields are set later

    def _make_view(self, rows: int, tokens: int) -> StepView:
        sampling = self._sampling
        next_tokens = self._next[:rows]
        return StepView(
            slots=self.given["slots"][:rows],
            tokens=self._tokens[:tokens],
            positions=self._positions[:tokens],
            row_start=self.given["row_start"][: rows + 1],
            num_kept=self._num_kept[:rows],
            kv_len=self._kv_len[:rows],
            root=next_tokens[:, 0],
            next_tokens=next_tokens,
            final=self._final[:rows],
            taps=self.taps(tokens),
            sampling=SamplingView(
                temperature=sampling.temperature[:rows],
                top_k=sampling.top_k[:rows],
                top_p=sampling.top_p[:rows],
                min_p=sampling.min_p[:rows],
                seed=sampling.seed[:rows],
                choice=sampling.choice[:rows],
            ),
            depth=self.sizes.depth,
            host=None,
        )
