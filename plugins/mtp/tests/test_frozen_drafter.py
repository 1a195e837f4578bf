"""Parts of frozen-kv-mtp that no other model can vouch for: suppressed tokens, ties, and that nothing waits."""

import json
import sys
from pathlib import Path
from typing import Any

import frozen_checkpoints as gemma
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specplug import SamplingParams, UserError
from specplug.testing import Harness, Move
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.setup import fill_module
from specplug_mtp.frozen_drafter import FrozenDrafter
from specplug_mtp.frozen_model import Assistant
from specplug_mtp.frozen_sizes import AssistantSizes, assistant_sizes

ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
KERNELS = ("/runtime/attention/paged.py", "/runtime/device/noise.py")
"""What has another form on CUDA."""
OURS = "/specplug_mtp/frozen_drafter.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a target, and an assistant with either head."""
    place = tmp_path_factory.mktemp("gemma")
    target = gemma.write_target(place / "target", sliding_window=6)
    ways = {"whole": False, "clusters": True}
    return {"target": target} | {
        name: gemma.write_assistant(place / name, target, ordered=ordered) for name, ordered in ways.items()
    }


class Asked(TorchDispatchMode):
    """Notes which operations of the drafter would wait; the core's kernels are its own affair."""

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


@pytest.mark.parametrize("head", ["whole", "clusters"])
@pytest.mark.parametrize("draws", [False, True])
def test_nothing_is_asked(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, head: str, draws: bool, tmp_path: Path
) -> None:
    asked = Asked()

    def watched(method: Any) -> Any:
        def call(*args: Any) -> None:
            with asked:
                method(*args)

        return call

    for name in ("_last_state", "_chain"):
        monkeypatch.setattr(FrozenDrafter, name, watched(getattr(FrozenDrafter, name)))
    with device_path():
        engine = gemma.engine(gemma.loaded(folders["target"]), folders[head], {"draft_sampling": draws})
    with engine:
        engine.generate(PROMPTS[:2], SamplingParams(temperature=0.8, seed=1, max_tokens=8))
    assert asked.seen > 500
    assert not asked.found


@pytest.mark.parametrize("head", ["whole", "clusters"])
@pytest.mark.parametrize("draws", [False, True])
def test_suppressed_tokens_are_never_drafted(folders: dict[str, Path], head: str, draws: bool, tmp_path: Path) -> None:
    target, text = gemma.loaded(folders["target"]), tuple(range(1, 40))

    def drafted(folder: Path) -> set[int]:
        with gemma.engine(target, folder, {"draft_sampling": draws}) as engine:
            harness, found = Harness(engine.run, target), set[int]()
        for at in range(2, 32):
            harness.admit(0, text, at, SamplingParams(temperature=0.9, seed=at))
            found.update(harness.propose(harness.ingest([Move(0, at)]))[0][0])
            harness.release(0)
        return found

    usual = sorted(drafted(folders[head]))[::2][:6]
    assert len(usual) == 6
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    for name in ("config.json", "model.safetensors"):
        (quiet / name).symlink_to(folders[head] / name)
    (quiet / "generation_config.json").write_text(json.dumps({"suppress_tokens": usual}))
    assert not drafted(quiet) & {*usual}


def sizes_of(folders: dict[str, Path], head: str) -> AssistantSizes:
    return assistant_sizes(*(json.loads((folders[name] / "config.json").read_text()) for name in (head, "target")))


def model(folders: dict[str, Path], head: str) -> Assistant:
    made = Assistant(sizes_of(folders, head), dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for part in (made.model.embed_tokens, *([made.masked_embedding.centroids] if made.masked_embedding else [])):
        part.weight.data.copy_(torch.randn(part.weight.shape, generator=generator))
    if made.masked_embedding:
        made.masked_embedding.token_ordering.copy_(torch.randperm(64, generator=generator))
    return made


@pytest.mark.parametrize("head", ["whole", "clusters"])
def test_logits_and_state_are_those_of_transformers(folders: dict[str, Path], head: str) -> None:
    """One step from random inputs over random KV, number by number."""
    other = gemma.theirs(folders[head])
    ours = Assistant(sizes_of(folders, head), dtype=torch.float32, device=torch.device("cpu"))
    fill_module(ours, folders[head], lambda name: name, strict=True)
    generator = torch.Generator().manual_seed(2)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    embedded, state, position = some(1, 32), some(1, 32), torch.tensor([700])  # beyond what a table would be made for
    shared = {kind: (some(1, 2, 6, dim), some(1, 2, 6, dim)) for kind, dim in ((gemma.SLIDING, 8), (gemma.FULL, 16))}

    def attend(number: int, q: torch.Tensor) -> torch.Tensor:
        k, v = (part[0].repeat_interleave(2, 0) for part in shared[ours.sizes.layers[number].kind])
        return torch.einsum("hk,hkd->hd", torch.einsum("hd,hkd->hk", q[0], k).softmax(-1), v)[None]

    with torch.inference_mode():
        wanted = other(
            inputs_embeds=torch.cat((embedded, state), -1)[None], position_ids=position[None], shared_kv_states=shared
        )
        hidden = ours(embedded, state, ours.angles(position), attend)
        logits = ours.logits(hidden)
    torch.testing.assert_close(ours.post_projection(hidden), wanted.last_hidden_state[0], rtol=1e-4, atol=1e-5)
    seen = logits > float("-inf")
    assert int(seen.sum()) == (12 if head == "clusters" else 64)
    torch.testing.assert_close(logits[seen], wanted.logits[0][seen], rtol=1e-4, atol=1e-5)
    assert (wanted.logits[0][~seen] < logits[seen].min()).all()


@pytest.mark.parametrize("head", ["whole", "clusters"])
def test_the_best_is_the_first_of_the_likeliest(folders: dict[str, Path], head: str) -> None:
    made, hidden = model(folders, head), torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    made.model.embed_tokens.weight.data[32:] = made.model.embed_tokens.weight[:32].clone()  # every token twice
    logits = made.logits(hidden)
    assert logits.shape == (9, 64)
    assert made.best(hidden).tolist() == logits.argmax(-1).tolist()
    assert int(logits.isinf().sum()) == (9 * (64 - 12) if head == "clusters" else 0)
    banned = torch.zeros(64, dtype=torch.bool).index_fill_(0, made.best(hidden), True)
    assert not banned[made.best(hidden, banned)].any()


def test_a_file_that_does_not_fit_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """A tensor that the assistant has no place for was misread, and so was one that it lacks."""
    from safetensors.torch import load_file, save_file

    weights = load_file(str(folders["whole"] / "model.safetensors"))
    weights["model.layers.0.self_attn.k_proj.weight"] = weights.pop("model.layers.0.layer_scalar")
    save_file(weights, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text((folders["whole"] / "config.json").read_text())
    with pytest.raises(UserError, match=r"missing: model.layers.0.layer_scalar.*unexpected: .*k_proj") as told:
        gemma.engine(gemma.loaded(folders["target"]), tmp_path)
    assert "\n" not in str(told.value)


def test_dummy_weights_need_no_file(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders["clusters"] / "config.json").read_text())
    target = gemma.loaded(folders["target"])
    with (
        gemma.engine(target, tmp_path, speculative_draft_load_format="dummy") as engine,
        gemma.engine(target, None) as p,
    ):
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        assert engine.generate(PROMPTS[:1], greedy)[0].ids == p.generate(PROMPTS[:1], greedy)[0].ids
        assert engine.ledger.report()["drafted"] > 0
