"""On the device's path `ingest` and `propose` ask for no number: each would be a wait, and no graph could hold it."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specplug import SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug_standalone.drafter import StandaloneDrafter

ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
KERNELS = ("/runtime/attention/paged.py", "/runtime/device/noise.py")
"""What has another form on CUDA."""
OURS = "/specplug_standalone/drafter.py"
HEADS = ("model.embed_tokens.weight", "lm_head.weight")


def cut(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, **{name: weights[name][:40].contiguous() for name in HEADS}}


class Asked(TorchDispatchMode):
    """Notes which operations of the drafter and its model would wait; the core's kernels are its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        name = func.overloadpacket.__name__
        if name in ASKS or (name == "index" and any(part is not None and part.dtype == torch.bool for part in args[1])):
            frame = sys._getframe()
            while frame.f_back and not frame.f_code.co_filename.endswith((*KERNELS, OURS)):
                frame = frame.f_back
            if not frame.f_code.co_filename.endswith(KERNELS):
                self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("vocab", [64, 40])
@pytest.mark.parametrize("draws", [False, True])
def test_nothing_is_asked(models: Any, monkeypatch: pytest.MonkeyPatch, draws: bool, vocab: int) -> None:
    asked = Asked()

    def watched(method: Any) -> Any:
        def call(*args: Any) -> None:
            with asked:
                method(*args)

        return call

    for name in ("_read", "_chain"):
        monkeypatch.setattr(StandaloneDrafter, name, watched(getattr(StandaloneDrafter, name)))
    folder = models.noisy() if vocab == 64 else models.draft("forty", cut, {"vocab_size": vocab})
    with device_path():
        engine = models.engine(folder, {"draft_sampling": draws})
    with engine:
        engine.generate(PROMPTS[:2], SamplingParams(temperature=0.8, seed=1, max_tokens=12))
    assert asked.seen > 500
    assert not asked.found
