"""Paged KV: pages are handed out by length, and rolling back is lowering a number.

One page table serves every layer, a drafter's too. A request's token at index i lies in row
``table[slot, i // page_size] * page_size + i % page_size`` of each layer's pool. What lies at or above
a request's committed length is scratch: a rejected draft needs no clean-up, the next write covers it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specplug.models.base import KVGeometry


class PagePool:
    """Free pages, and which of them each slot holds."""

    def __init__(self, slots: int, pages: int, page_size: int, max_tokens: int) -> None:
        """`max_tokens`: most rows a request can hold, scratch above its last token included."""
        self.page_size = page_size
        self.pages = pages
        self.table = np.full((slots, -(-max_tokens // page_size)), pages, dtype=np.int64)
        """[S, pages of a longest request] page ids; what is not held points at the trash page, number `pages`."""
        self.held = [0] * slots
        """Pages of each slot."""
        self.changes: dict[int, int] | None = None
        """Flat index in `table` -> page id of every entry that changed, for who keeps a copy of it: set to an empty
        dict by them, and emptied. None: nobody does."""
        self._free = list(range(pages - 1, -1, -1))  # popped from the end: low ids first, so rows stay close

    @property
    def trash_row(self) -> int:
        """A pool row that nobody reads: where writes to nowhere go."""
        return self.pages * self.page_size

    @property
    def rows_with_trash(self) -> int:
        """Pool rows to allocate."""
        return (self.pages + 1) * self.page_size

    @property
    def free(self) -> int:
        """Pages nobody holds; equals `pages` at idle."""
        return len(self._free)

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for `tokens` tokens in `slot`; returns False, and changes nothing, when pages are short."""
        if tokens <= self.held[slot] * self.page_size:
            return True
        wanted = -(-tokens // self.page_size)
        missing = wanted - self.held[slot]
        if missing > len(self._free) or wanted > self.table.shape[1]:
            return False
        row = slot * self.table.shape[1]
        for at in range(self.held[slot], wanted):
            page = self._free.pop()
            self.table[slot, at] = page
            if self.changes is not None:
                self.changes[row + at] = page
        self.held[slot] = wanted
        return True

    def release(self, slot: int) -> None:
        """Give back every page of `slot`."""
        self._free.extend(reversed(self.table[slot, : self.held[slot]].tolist()))
        if self.changes is not None:
            row = slot * self.table.shape[1]
            self.changes.update(dict.fromkeys(range(row, row + self.held[slot]), self.pages))
        self.table[slot] = self.pages
        self.held[slot] = 0

    def rows(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Return the pool rows of the tokens `start` to `stop` of `slot`, int64."""
        return self.rows_of(slot, np.arange(start, stop))

    def rows_of(self, slots: int | np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the pool rows, int64, of the tokens `index` of `slots`; the two are broadcast."""
        page, within = np.divmod(index, self.page_size)
        pages: np.ndarray = self.table[slots, page]
        return pages * self.page_size + within


class KVPool:
    """The K and V tensors of every layer, [rows, kv_heads, dim] each."""

    def __init__(self, layers: Sequence[KVGeometry], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = tuple(layers)
        shapes = [(layer.kv_heads, layer.k_dim, layer.v_dim) for layer in layers]
        counts = Counter(shapes)

        def zeros(count: int, *shape: int) -> Tensor:
            return torch.zeros(count, rows, *shape, dtype=dtype, device=device)

        self.groups = {
            (heads, k_dim, v_dim): (zeros(count, heads, k_dim), zeros(count, heads, v_dim))
            for (heads, k_dim, v_dim), count in counts.items()
        }
        """K [layers, rows, heads, k_dim] and V of all layers of one shape, so that one launch reaches all of them."""
        nth = {shape: iter(range(count)) for shape, count in counts.items()}
        places = [(self.groups[shape], next(nth[shape])) for shape in shapes]
        self.k = [k[at] for (k, _), at in places]
        self.v = [v[at] for (_, v), at in places]

    @staticmethod
    def bytes_per_token(layers: Sequence[KVGeometry], dtype: torch.dtype) -> int:
        """Bytes one token takes in all layers together."""
        return sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in layers) * dtype.itemsize

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy rows `source` to rows `target` in every layer: the accepted path of a tree, made contiguous."""
        read, write = torch.from_numpy(source), torch.from_numpy(target)
        for pool in (part for group in self.groups.values() for part in group):
            pool.index_copy_(1, write, pool.index_select(1, read))


def tokens_that_fit(layers: Sequence[KVGeometry], dtype: torch.dtype, budget: int) -> int:
    """Return how many tokens' KV fits into `budget` bytes; a model without KV is bounded by nothing here."""
    each = KVPool.bytes_per_token(layers, dtype)
    return budget // each if each else 2**31
