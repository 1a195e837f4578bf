"""Notices where code asks a tensor for a number: on a device each such question is a wait, and no graph holds it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ASKING = frozenset(
    (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "equal",
        "lift_fresh",
    )
)
"""Operations whose result, or its shape, the host has to know; `lift_fresh` makes a tensor of Python's numbers."""
_BYPASSING = ("tolist", "numpy", "__array__")
"""Methods that read memory without an operation."""
_SHARED, _CORE = "/specplug/", "/specplug/runtime/"
"""What the core is made of, and the part of it that has another form on a device than the one that a CPU runs."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, collects in `found` what was asked and where; `seen` counts all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self.seen = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside: to be kept out of torch's compiler would import it first, a second's work."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        if name in _ASKING or by_mask:
            self.note("indexing by a mask" if by_mask else name)
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        """Take down `what`, unless it was the core's runtime that asked."""
        frame = _asker(sys._getframe(1))
        if frame is not None:
            self.found.append(f"{what} in {frame.f_code.co_qualname}, line {frame.f_lineno}")


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Enter `watch`, methods that read memory directly included."""
    reading = {name: getattr(Tensor, name) for name in _BYPASSING}

    def told(name: str) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            watch.note(name)
            return reading[name](self, *args, **kwargs)

        return read

    instead: dict[str, Any] = {name: told(name) for name in _BYPASSING}
    with patch.multiple(Tensor, **instead), watch:
        yield


def _asker(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not torch's, or None if the core's runtime asked.

    What the core shares with drafters (layers, views) asks for whoever called it.
    """
    innermost = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "/torch/" not in file:
            innermost = innermost or frame
            if _CORE in file:
                return None
            if _SHARED not in file:
                return innermost
        frame = frame.f_back
    return innermost
