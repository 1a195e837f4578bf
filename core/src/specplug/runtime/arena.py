"""Device memory of a drafter: taken once, at start, and never more than its plan declared."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from specplug.drafter import KVView
from specplug.runtime.draft_kv import PartView
from specplug.spec import DraftPlan


class DraftArena:
    """The `Arena` handed to `Drafter.allocate`."""

    def __init__(
        self,
        plan: DraftPlan,
        slots: int,
        device: torch.device,
        owner: str,
        draft_kv: KVView | None = None,
    ) -> None:
        """`draft_kv`: the plan's own KV layers, if it has any; `owner`: who is named in errors."""
        self._plan = plan
        self._slots = slots
        self._device = device
        self._owner = owner
        self._draft_kv = draft_kv
        self._parent: DraftArena | None = None
        self._prefix = ""
        self._taken = {"bytes_fixed": 0, "bytes_per_slot": 0}
        self.buffers: dict[str, Tensor] = {}
        """Every buffer by name; the kit checks that their addresses never change."""

    def static(self, name: str, shape: Sequence[int], dtype: torch.dtype, fill: float = 0) -> Tensor:
        """See `specplug.Arena`."""
        self._account("bytes_fixed", name, prod(shape) * dtype.itemsize)
        if self._parent is not None:
            return self._parent.static(self._prefix + name, shape, dtype, fill)
        return self._keep(name, torch.full(tuple(shape), fill, dtype=dtype, device=self._device))

    def per_slot(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `specplug.Arena`."""
        self._account("bytes_per_slot", name, prod(shape) * dtype.itemsize)
        if self._parent is not None:
            return self._parent.per_slot(self._prefix + name, shape, dtype)
        return self._keep(name, torch.zeros((self._slots + 1, *shape), dtype=dtype, device=self._device))

    def draft_kv(self) -> KVView:
        """See `specplug.Arena`."""
        if self._draft_kv is None:
            raise RuntimeError(f"{self._owner}: its plan declares no KV layers (DraftPlan.kv)")
        return self._draft_kv

    def part(self, prefix: str, plan: DraftPlan, owner: str, first_layer: int) -> DraftArena:
        """Return the arena of a drafter inside this one: held to its own plan, and counted in this one's too.

        Its buffers and patterns are named with `prefix`; its KV layers are this one's from `first_layer` on.
        """
        view = None
        if plan.kv:
            view = PartView(self.draft_kv(), prefix, first_layer, sum(group.layers for group in plan.kv))
        arena = DraftArena(plan, self._slots, self._device, owner, view)
        arena._parent, arena._prefix = self, prefix
        return arena

    def _account(self, kind: str, name: str, size: int) -> None:
        self._taken[kind] += size
        declared = getattr(self._plan, kind)
        if self._taken[kind] > declared:
            raise RuntimeError(
                f"{self._owner}: buffer {name!r} brings {kind} to {self._taken[kind]}, its plan declared {declared}"
            )

    def _keep(self, name: str, buffer: Tensor) -> Tensor:
        if name in self.buffers:
            raise RuntimeError(f"{self._owner}: buffer {name!r} was taken twice")
        self.buffers[name] = buffer
        return buffer
