"""What a drafter is built with, and the part of the target it may share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from specplug.accept import Rule
from specplug.drafter import Drafter, KVView, StepView
from specplug.errors import UserError
from specplug.models.base import TargetModel
from specplug.models.draft import DraftModel
from specplug.models.target import load_model
from specplug.models.weights import fill_dummy, fill_module, iterate_weights
from specplug.planning import run_of
from specplug.proposal import step_noise
from specplug.runtime.draft_kv import PartView
from specplug.spec import (
    Capabilities,
    Checkpoint,
    Facts,
    Parallel,
    SpecConfig,
)

if TYPE_CHECKING:
    from specplug.runtime.part import Part


_DUMMY_SEED = 1  # another one than the target's, or a draft of its shape would be right every time


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The `DraftContext` of an engine."""

    facts: Facts
    slots: int
    device: torch.device
    dtype: torch.dtype
    vocab: int
    parallel: Parallel = field(default_factory=Parallel)
    rule: Rule = "coupled"
    """The acceptance rule: what proposals record depends on it."""
    parts: list[Part] = field(default_factory=list)
    """Drafters that this one's drafter has built, in order."""

    def weights(self, which: Literal["draft", "target"], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """See `specplug.DraftContext`."""
        checkpoint = self._checkpoint(which)
        yield from iterate_weights(checkpoint.path, prefix, further=checkpoint.files)

    def load(
        self,
        module: nn.Module,
        which: Literal["draft", "target"],
        rename: Callable[[str], str | None],
        prefix: str = "",
    ) -> None:
        """See `specplug.DraftContext`."""
        if self._dummy(which):
            fill_dummy(module, _DUMMY_SEED)
            return
        checkpoint = self._checkpoint(which)
        # What the drafter calls its own and does not use was misread; a target's file holds much else.
        strict = which == "draft" or bool(prefix)
        fill_module(module, checkpoint.path, rename, prefix, strict=strict, further=checkpoint.files)

    def model(self, which: Literal["draft", "target"]) -> DraftModel:
        """See `specplug.DraftContext`."""
        checkpoint = self._checkpoint(which)
        try:
            model = load_model(
                Path(checkpoint.path),
                checkpoint,
                dtype=self.dtype,
                device=self.device,
                dummy_seed=_DUMMY_SEED if self._dummy(which) else None,
            )
        except UserError as error:
            if which == "target":
                raise
            raise UserError(f"--speculative-draft-model-path {checkpoint.path}: {error}") from error
        return DraftModel(model.requires_grad_(False))

    def _dummy(self, which: Literal["draft", "target"]) -> bool:
        """Whether its load format is dummy: weights are random then, and no file of it is read."""
        return self._checkpoint(which).tensors is None

    def _checkpoint(self, which: Literal["draft", "target"]) -> Checkpoint:
        checkpoint = self.facts.draft if which == "draft" else self.facts.target
        if checkpoint is None or not checkpoint.path:
            raise RuntimeError(f"this run has no {which} checkpoint to read weights from")
        return checkpoint

    def noise(self, step: StepView, depth: int, stream: Literal["target", "draft"] = "draft") -> Tensor:
        """See `specplug.DraftContext`."""
        return step_noise(step, depth, stream, self.vocab)

    def build(self, name: str, config: SpecConfig | Mapping[str, Any], *, draft: bool = True) -> Drafter:
        """See `specplug.DraftContext`."""
        from specplug.runtime.part import Part

        run = run_of(self.facts, name, config, draft=draft)
        own = dataclasses.replace(self, facts=run.facts, parts=[])
        part = Part(run, own, f"{len(self.parts)}:{run.algorithm}/", sum(part.kv_layers for part in self.parts))
        self.parts.append(part)
        return part


class GrantedTarget:
    """The `TargetView` of a run: parts that the plan asked for, and no others."""

    def __init__(self, model: TargetModel, needs: Capabilities, kv: KVView) -> None:
        self.config: Mapping[str, Any] = model.config
        self.needs = needs
        self._model = model
        self._kv = kv

    def part(self, needs: Capabilities, prefix: str) -> GrantedTarget:
        """Return what a drafter inside this one is granted; `prefix` names its patterns."""
        return GrantedTarget(self._model, needs, PartView(self._kv, prefix, 0, len(self._model.kv_layers)))

    def borrow(self, part: Literal["embed_tokens", "lm_head", "rope"]) -> nn.Module:
        """See `specplug.TargetView`."""
        if part not in self.needs.borrows:
            raise RuntimeError(f"the plan's needs.borrows has no {part!r}: {sorted(self.needs.borrows)}")
        return self._model.part(part)

    def kv(self) -> KVView:
        """See `specplug.TargetView`."""
        if "reads_target" not in self.needs.draft_kv:
            raise RuntimeError("the plan's needs.draft_kv has no 'reads_target'")
        return self._kv
