"""Layers and decoder as the device path uses them: nothing waits, taps stay, fused kernels get what they can take.

FlashInfer runs on CUDA alone. Here stand-ins of its four functions, in torch and in place as its own are, show that
the layers call them rightly; tensors without data that claim to lie on CUDA show that nothing syncs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from specplug.facts import read_checkpoint
from specplug.layers import GatedMLP, RMSNorm, Rotary, apply_rotary, fused, silu_and_mul
from specplug.models.base import ForwardBatch
from specplug.models.decoder import Decoder
from specplug.models.target import load_target
from specplug.models.transformers import TransformersTarget
from specplug.models.weights import fill_dummy
from specplug.spec import TapRequest
from specplug.testing.targets import DenseAttention, decoder_config

FITTING: dict[str, Any] = decoder_config() | {"hidden_size": 64, "head_dim": 64, "intermediate_size": 96}
QWEN3: dict[str, Any] = FITTING | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
TAPS: tuple[Any, ...] = (0, 1, 2, "final_norm")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def norm_of(size: int, dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype=dtype)
    norm.weight.data.copy_(random(size, seed=9))
    return norm


class StandIns:
    """FlashInfer's functions in torch, with its checks, counting calls. In place where its own are."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self.calls["rmsnorm"] += 1
        assert x.dim() in (2, 3)
        assert x.shape == out.shape
        assert x.stride(-1) == out.stride(-1) == 1
        assert weight.shape == x.shape[-1:]
        wide = x.float()
        out.copy_((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype))

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        self.calls["fused_add_rmsnorm"] += 1
        assert x.dim() == residual.dim() == 2
        residual.add_(x)
        self.rmsnorm(residual, weight, eps, x)
        self.calls["rmsnorm"] -= 1

    def apply_rope(self, positions: Tensor, q: Tensor, k: Tensor, head_dim: int, table: Tensor) -> None:
        self.calls["apply_rope"] += 1
        assert table.dtype == torch.float32
        assert table.is_contiguous()
        assert positions.is_contiguous()
        assert q.shape[0] == k.shape[0] == len(positions)
        assert q.shape[2] == k.shape[2] == head_dim == table.shape[1]
        cos, sin = F.embedding(positions, table).unsqueeze(1).chunk(2, dim=-1)
        for part in (q, k):
            part.copy_(apply_rotary(part.float(), cos, sin).to(part.dtype))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        self.calls["silu_and_mul"] += 1
        assert gate_up.is_contiguous()
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def kernels(self) -> fused.Kernels:
        return fused.Kernels(self.rmsnorm, self.fused_add_rmsnorm, self.apply_rope, self.silu_and_mul)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """FlashInfer is "installed"; tensors still have to lie on CUDA, in half precision."""
    made = StandIns()
    monkeypatch.setattr(fused, "kernels", made.kernels)
    return made


@pytest.fixture
def everywhere(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """The same, and tensors on the CPU in any dtype are taken too."""
    monkeypatch.setattr(fused, "fits", lambda x: x.is_contiguous() or x.dim() in (2, 3))
    return stand_ins


@contextmanager
def dataless(*, cuda: bool = True) -> Iterator[None]:
    """Tensors have no data, so that asking for a value raises, and say that they lie on CUDA."""
    with FakeTensorMode(), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", cuda)
        patch.setattr(Tensor, "is_cpu", not cuda)
        yield


class Nothing:
    """Attention whose answer has the right shape."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        assert v is not None
        return torch.zeros_like(q)


def batch_of(tokens: Tensor, positions: Tensor, attention: Any, taps: tuple[Any, ...] = TAPS) -> ForwardBatch:
    return ForwardBatch(tokens, positions, attention, tuple(TapRequest(at=at) for at in taps))


def decoder(config: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    return Decoder(config, dtype=dtype, device=device)


def filled(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Decoder:
    model = decoder(config, dtype)
    fill_dummy(model, 0)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * random(*parameter.shape, seed=number))
    return model


# --- plain torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_is_the_sum_then_its_norm(dtype: torch.dtype) -> None:
    norm = norm_of(24, dtype)
    x, residual = random(5, 24, dtype=dtype), random(5, 24, dtype=dtype, seed=1)
    given = x.clone(), residual.clone()
    normed, total = norm.add(x, residual)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, norm(residual + x))
    assert torch.equal(x, given[0])
    assert torch.equal(residual, given[1])
    normed, total = norm.add(x, None)
    assert total is x
    assert torch.equal(normed, norm(x))


def test_norm_writes_where_it_is_told() -> None:
    norm, whole = norm_of(8), random(3, 5, 8)
    expected = norm(whole[:, 1:3])
    before = whole.clone()
    part = whole[:, 1:3]
    assert norm(part, out=part) is part
    assert torch.equal(whole[:, 1:3], expected)
    assert torch.equal(whole[:, 3:], before[:, 3:])
    assert torch.equal(whole[:, :1], before[:, :1])


def test_turning_is_apply_rotary_and_stays_inside_the_table() -> None:
    rope = Rotary(16, 10, 1e4)
    x, positions = random(4, 3, 16), torch.tensor([0, 9, 3, 3])
    kept = x.clone()
    angles = rope.angles(positions, x.dtype)
    for _ in range(2):  # the second time from what was kept
        assert torch.equal(angles.turn(x), apply_rotary(x, *rope(positions)))
    assert torch.equal(x, kept)
    with pytest.raises(IndexError):
        rope.angles(torch.tensor([10]), x.dtype).turn(x[:1])


def test_logits_go_where_they_are_told() -> None:
    model = filled(decoder_config(), torch.bfloat16)
    hidden = random(3, 32, dtype=torch.bfloat16)
    out = torch.empty(3, model.vocab_size)
    assert model.logits(hidden, out) is out
    assert torch.equal(out, model.logits(hidden))


def test_layers_know_their_query_heads() -> None:
    assert {layer.q_heads for layer in decoder(decoder_config(), device="meta").kv_layers} == {4}


# --- the fused kernels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FITTING, QWEN3], ids=["llama", "qk-norm"])
def test_fused_layers_compute_the_same_and_leave_taps_alone(
    config: dict[str, Any], everywhere: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = filled(config)
    tokens, positions = torch.tensor([5, 9, 9, 1, 30]), torch.arange(5)
    batch = batch_of(tokens, positions, DenseAttention(model.kv_layers))
    with torch.inference_mode():
        fast, fast_taps = model(batch)
        monkeypatch.setattr(fused, "fits", lambda x: False)
        plain, taps = model(batch)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    for one, other in zip(fast_taps, taps, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    norms = 4 if config is QWEN3 else 0
    assert everywhere.calls == {"rmsnorm": 1 + norms, "fused_add_rmsnorm": 4, "apply_rope": 2, "silu_and_mul": 2}


def test_norm_flattens_what_lies_together(everywhere: StandIns) -> None:
    norm, x = norm_of(8), random(2, 3, 5, 8)
    torch.testing.assert_close(norm(x), norm_of(8)(x.clone()))
    assert norm(x).shape == x.shape
    normed, total = norm.add(x.clone(), x.clone())
    assert normed.shape == total.shape == x.shape
    torch.testing.assert_close(total, 2 * x)


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((4, 64), True), ((4, 3, 64), True), ((2, 2, 2, 64), True), ((0, 64), False), ((4, 60), False), ((8,), True)],
)
def test_sizes_the_kernels_take(shape: tuple[int, ...], taken: bool, stand_ins: StandIns) -> None:
    with dataless():
        x = torch.empty(shape, dtype=torch.bfloat16)
        assert fused.fits(x) is taken
        assert not fused.fits(torch.empty(shape))
    with dataless(cuda=False):
        assert not fused.fits(torch.empty(shape, dtype=torch.bfloat16))


def test_views_the_kernels_take(stand_ins: StandIns) -> None:
    with dataless():
        whole = torch.empty(4, 6, 64, dtype=torch.float16)
        assert fused.fits(whole[:, 2:4])
        assert not fused.fits(whole[..., 4:36]), "begins inside a chunk of 16 bytes"
        assert fused.fits(whole[..., 8:40])
        assert not fused.fits(whole[..., ::2])
        assert not fused.fits(torch.empty(4, 12, dtype=torch.float16)[:, :8]), "rows drift"
        assert fused.fits_rotary(whole[:, 2:4])
        assert not fused.fits_rotary(whole[:, 2:3]), "one head"
        assert not fused.fits_rotary(torch.empty(4, 6, 96, dtype=torch.float16))


def test_nothing_is_fused_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "kernels", lambda: None)
    with dataless():
        assert not fused.fits(torch.empty(4, 64, dtype=torch.bfloat16))


def test_flashinfer_that_cannot_be_imported_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> Any:
        raise ImportError(f"{name}: libcudart.so is missing")

    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(fused.importlib, "import_module", broken)
    fused.kernels.cache_clear()
    try:
        assert fused.kernels() is None
        assert fused.kernels() is None
    finally:
        fused.kernels.cache_clear()
    assert [record.message.count("libcudart.so is missing") for record in caplog.records] == [1]


# --- nothing waits for the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [FITTING, QWEN3, decoder_config()], ids=["llama", "qk-norm", "small-heads"])
def test_a_forward_asks_the_device_nothing(config: dict[str, Any], dtype: torch.dtype, stand_ins: StandIns) -> None:
    with dataless():
        model = decoder(config, dtype)
        tokens = torch.empty(7, dtype=torch.int64)
        hidden, taps = model(batch_of(tokens, torch.empty_like(tokens), Nothing()))
        out = torch.empty(7, model.vocab_size)
        model.logits(hidden, out)
        assert [part.shape for part in (hidden, *taps)] == [hidden.shape] * 5
        assert hidden.dtype == dtype
    half = dtype == torch.bfloat16
    assert stand_ins.calls["fused_add_rmsnorm"] == (4 if half else 0)
    assert stand_ins.calls["silu_and_mul"] == (2 if half else 0)
    assert stand_ins.calls["apply_rope"] == (2 if half and config["head_dim"] == 64 else 0)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Phi3ForCausalLM"])
def test_our_share_of_a_transformers_forward_asks_nothing_either(architecture: str, tmp_path: Path) -> None:
    kind = {"Gemma3ForCausalLM": "gemma3_text", "Phi3ForCausalLM": "phi3"}[architecture]
    config = decoder_config() | {"architectures": [architecture], "model_type": kind, "pad_token_id": 0}
    del config["rope_parameters"]  # one set for each kind of layer in some, and transformers 5.17 takes no other form
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_activation": "gelu_pytorch_tanh"}))
    checkpoint = read_checkpoint(str(tmp_path), load_format="dummy")
    model = load_target(tmp_path, checkpoint, dtype="float32", device="cpu", load_format="dummy").model
    assert isinstance(model, TransformersTarget)
    # Its weights are real, so nothing may claim to lie on CUDA here.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tokens = torch.empty(7, dtype=torch.int64)
        hidden, taps = model(batch_of(tokens, torch.empty_like(tokens), Nothing()))
        assert [part.shape for part in (hidden, *taps)] == [hidden.shape] * 5
        assert model.logits(hidden, torch.empty(7, model.vocab_size)).shape == (7, 64)


def test_that_check_sees_a_wait() -> None:
    with dataless(), pytest.raises(Exception, match="_local_scalar_dense"):
        torch.empty(3).sum().item()


def test_positions_off_the_table_end_nothing_on_cuda(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(Tensor, "clamp", lambda self, low, high: (seen.append(self), self)[1])
    with dataless():
        rope = Rotary(64, 10, 1e4)
        positions = torch.empty(4, dtype=torch.int64)
        rope.angles(positions, torch.bfloat16)
        assert seen == [positions]
        rope(positions)
        assert seen == [positions] * 2
    Rotary(64, 10, 1e4)(torch.tensor([3]))
    assert len(seen) == 2, "on a CPU a wrong position is an error"


def test_gated_mlp_keeps_leading_dimensions(everywhere: StandIns) -> None:
    mlp = GatedMLP(16, 24, dtype=torch.float32)
    fill_dummy(mlp, 0)
    x = random(2, 3, 16)
    torch.testing.assert_close(mlp(x), mlp(x.view(6, 16)).view(2, 3, 16))
    gate_up = random(3, 48)
    assert everywhere.calls["silu_and_mul"] == 2
    torch.testing.assert_close(silu_and_mul(gate_up), F.silu(gate_up[:, :24]) * gate_up[:, 24:])
