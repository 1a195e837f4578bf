"""What `ctx.load` takes from a checkpoint, and what it refuses."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specplug import Facts, UserError
from specplug.facts import read_checkpoint
from specplug.layers import Linear
from specplug.runtime.context import EngineContext
from specplug.testing.targets import decoder_target

CPU = torch.device("cpu")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = Linear(4, 3, dtype=torch.float32)


def context(folder: Path, stored: dict[str, torch.Tensor]) -> EngineContext:
    """Return the context of a target that holds `stored` beside its own tensors."""
    target = decoder_target(1, folder=folder)
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors")
    return EngineContext(Facts(target=read_checkpoint(str(folder))), 1, CPU, torch.float32, target.model.vocab_size)


def test_a_prefix_of_the_targets_file_is_the_drafters_own(tmp_path: Path) -> None:
    """Nothing under it may be left over; the rest of the file is the target's."""
    weight = torch.rand(3, 4)
    head = Head()
    whole = context(tmp_path, {"mine.fc.weight": weight, "mine.copy": torch.zeros(1)})
    renames = {"mine.fc.weight": "fc.weight", "mine.copy": None}
    whole.load(head, "target", lambda name: renames[name], prefix="mine.")
    assert head.fc.weight.equal(weight)
    with pytest.raises(UserError, match=r"1 unexpected: mine\.copy"):
        whole.load(head, "target", lambda name: name.removeprefix("mine."), prefix="mine.")
    whole.load(head, "target", lambda name: renames.get(name, name))


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    lacking = context(tmp_path, {"mine.other": torch.zeros(1)})
    with pytest.raises(UserError, match=r"1 missing: fc\.weight; 1 unexpected: mine\.other"):
        lacking.load(Head(), "target", lambda name: name.removeprefix("mine."), prefix="mine.")


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    nothing = decoder_target(1, folder=tmp_path).checkpoint.model_copy(update={"tensors": None, "path": "nowhere"})
    first, second = Head(), Head()
    for head in (first, second):
        EngineContext(Facts(target=nothing), 1, CPU, torch.float32, 64).load(head, "target", str, prefix="mine.")
    assert first.fc.weight.equal(second.fc.weight)
    assert 0 < float(first.fc.weight.std()) < 0.1
