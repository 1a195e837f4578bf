"""The fused kernels against the layers' own torch, on a GPU: awkward sizes, strided views, inside a graph.

The kernels round once where torch rounds at every step, so half-precision results are compared with what torch
computes in float64 from the same values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specplug.layers import RMSNorm, Rotary, apply_rotary, fused, silu_and_mul
from specplug.models.base import ForwardBatch
from specplug.models.decoder import Decoder
from specplug.models.weights import fill_dummy
from specplug.spec import TapRequest
from specplug.testing.targets import decoder_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
    pytest.mark.filterwarnings("ignore"),  # FlashInfer's own, at import and while it compiles
]
HALF = [torch.bfloat16, torch.float16]
SIZES: dict[str, Any] = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
CONFIG: dict[str, Any] = decoder_config(1000) | SIZES | {"intermediate_size": 1536}
QWEN3: dict[str, Any] = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
ODD: dict[str, Any] = CONFIG | {"head_dim": 72}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def near(found: Tensor, exact: Tensor, ulps: float = 1.0) -> None:
    """`found` is `exact`, which is float64, up to `ulps` roundings of its dtype."""
    step = torch.finfo(found.dtype).eps * ulps
    torch.testing.assert_close(found.double(), exact, rtol=step, atol=step * 1e-2)


def exact_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def norm_of(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype=dtype, device="cuda")
    norm.weight.data.copy_(random(size, dtype=dtype, seed=7))
    return norm


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 8), (3, 576), (130, 4096), (2, 5, 64), (7, 8192)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm, x = norm_of(shape[-1], dtype), random(*shape, dtype=dtype)
    assert fused.fits(x)
    near(norm(x), exact_norm(x, norm))
    assert not fused.fits(random(3, 20, dtype=dtype))
    near(
        norm_of(20, dtype)(random(3, 20, dtype=dtype)), exact_norm(random(3, 20, dtype=dtype), norm_of(20, dtype)), 2.5
    )


@pytest.mark.parametrize("dtype", HALF)
def test_norm_of_heads_in_place(dtype: torch.dtype) -> None:
    norm, qkv = norm_of(128, dtype), random(33, 7, 128, dtype=dtype)
    before, part = qkv.clone(), qkv[:, 2:5]
    assert fused.fits(part)
    norm(part, out=part)
    near(part, exact_norm(before[:, 2:5], norm))
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 5:], before[:, 5:])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 576), (65, 4096), (2, 3, 2048)])
def test_add_and_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm, x, residual = norm_of(shape[-1], dtype), random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    exact = x.double() + residual.double()
    normed, total = norm.add(x, residual)
    assert total.data_ptr() == residual.data_ptr(), "in place"
    near(total, exact)
    near(normed, exact_norm(exact, norm))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_rotary_in_place_on_a_view(head_dim: int, dtype: torch.dtype) -> None:
    rope, tokens = Rotary(head_dim, 4096, 5e5, device="cuda"), 19
    positions = torch.randint(0, 4096, (tokens,), generator=torch.Generator().manual_seed(0)).cuda()
    qkv = random(tokens, 9, head_dim, dtype=dtype)
    before = qkv.clone()
    turned = rope.angles(positions, dtype).turn(qkv[:, :7])
    assert turned.data_ptr() == qkv.data_ptr(), "in place"
    exact = apply_rotary(before[:, :7].double(), *rope(positions, torch.float64))
    torch.testing.assert_close(turned.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(qkv[:, 7:], before[:, 7:]), "values are not turned"


@pytest.mark.parametrize("head_dim", [64, 80])
def test_positions_off_the_table_end_nothing(head_dim: int) -> None:
    rope = Rotary(head_dim, 16, 1e4, device="cuda")
    x = random(4, 2, head_dim, dtype=torch.bfloat16)
    given, inside = torch.tensor([-5, 3, 16, 2**40]).cuda(), torch.tensor([0, 3, 15, 15]).cuda()
    turned, expected = (rope.angles(at, x.dtype).turn(x.clone()) for at in (given, inside))
    assert torch.equal(turned, expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 16), (3, 3072), (2, 5, 28672), (9, 24)])
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    near(silu_and_mul(x), F.silu(gate) * up, 2.5)


class Values:
    """Attention of each token to itself, weighted by how its query and key match: no cache, and nothing waits."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        assert k is not None
        assert v is not None
        groups = q.shape[1] // v.shape[1]
        keys, values = (part[:, :, None].expand(-1, -1, groups, -1).flatten(1, 2) for part in (k, v))
        return torch.sigmoid((q * keys).sum(-1, keepdim=True)) * values


def model_of(config: dict[str, Any], dtype: torch.dtype) -> Decoder:
    model = Decoder(config, dtype=dtype, device="cuda")
    fill_dummy(model, 0)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(random(*parameter.shape, dtype=dtype, seed=number) * 0.02)
    return model.eval()


def forward_of(model: Decoder, tokens: Tensor, positions: Tensor) -> Callable[[], list[Tensor]]:
    taps = tuple(TapRequest(at=at) for at in (0, 1, 2, "final_norm"))

    def forward() -> list[Tensor]:
        hidden, states = model(ForwardBatch(tokens, positions, Values(), taps))
        return [model.logits(hidden), hidden, *states]

    return forward


@pytest.mark.parametrize("config", [CONFIG, QWEN3, ODD], ids=["llama", "qk-norm", "odd-heads"])
@pytest.mark.parametrize("dtype", HALF)
@torch.inference_mode()
def test_forward_is_that_of_plain_torch(
    config: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(config, dtype)
    tokens, positions = torch.arange(37, device="cuda") * 7 % 1000, torch.arange(37, device="cuda")
    forward = forward_of(model, tokens, positions)
    forward()  # compiles
    with no_waiting():
        fast = forward()
    monkeypatch.setattr(fused, "fits", lambda x: False)
    for found, plain in zip(fast, forward(), strict=True):
        apart = (found.float() - plain.float()).norm() / plain.float().norm()
        assert float(apart) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_replay_is_the_eager_forward(dtype: torch.dtype) -> None:
    model = model_of(QWEN3, dtype)
    tokens, positions = torch.zeros(12, dtype=torch.int64, device="cuda"), torch.zeros(12, dtype=torch.int64).cuda()
    forward = forward_of(model, tokens, positions)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        tokens.copy_(torch.randint(0, 1000, (12,), generator=generator))
        positions.copy_(torch.randint(0, 512, (12,), generator=generator))
        graph.replay()
        for replayed, eager in zip(captured, forward(), strict=True):
            assert torch.equal(replayed, eager)


def test_dummy_weights_are_made_on_the_device() -> None:
    model = Decoder(CONFIG, dtype=torch.bfloat16, device="cuda")
    fill_dummy(model, 3)
    first = model.layers[1].get_submodule("mlp").get_parameter("down_proj.weight").clone()
    fill_dummy(model, 3)
    assert torch.equal(model.layers[1].get_submodule("mlp").get_parameter("down_proj.weight"), first)
    assert float(first.float().std()) == pytest.approx(0.02, rel=0.05)
