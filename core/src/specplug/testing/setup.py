"""Parts of the core that a plugin's own tests need: reading, naming, planning, loading, and acceptance by itself.

What stands in `__all__` is kept as long as the rest of `specplug.testing`; the modules behind it may change.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specplug import tree
from specplug.accept import Rule, VerifyRow, accept
from specplug.facts import facts_of, read_checkpoint
from specplug.models.target import Target, load_target
from specplug.models.weights import fill_module
from specplug.options import EngineOptions
from specplug.planning import Run, plan_run
from specplug.registry import Registry
from specplug.resolve import Resolution, resolve
from specplug.spec import Facts

__all__ = [
    "Registry",
    "Resolution",
    "Rule",
    "Run",
    "Target",
    "VerifyRow",
    "accept",
    "fill_module",
    "plan_run",
    "read_checkpoint",
    "resolve",
    "stored_facts",
    "stored_target",
    "tree",
]


def stored_target(folder: Path | str, device: str = "cpu", dtype: str = "float32") -> Target:
    """Load the model in `folder`, with its tokenizer where it has one."""
    checkpoint = read_checkpoint(str(folder))
    return load_target(Path(folder), checkpoint, dtype=dtype, device=device, needs_tokenizer=False)


def stored_facts(folder: Path | str, *, draft_files: Iterable[str] = (), **options: Any) -> Facts:
    """Return the facts of a target in `folder` under `options` of the engine, its draft's path among them.

    `draft_files`: what the algorithm's manifest names (`Registry.draft_files`).
    """
    return facts_of(read_checkpoint(str(folder)), EngineOptions(**options), draft_files=draft_files)
