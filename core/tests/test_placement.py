"""What ``auto`` means for device, dtype and attention backend, and what is refused by name."""

from typing import Any

import pytest

from specplug import placement
from specplug.errors import UserError
from specplug.facts import facts_of
from specplug.options import EngineOptions
from specplug.placement import settle, settle_backend, settle_dtype
from specplug.spec import Checkpoint


def host(monkeypatch: pytest.MonkeyPatch, *, cuda: bool, flashinfer: bool) -> None:
    monkeypatch.setattr(placement, "has_cuda", lambda: cuda)
    monkeypatch.setattr(placement, "has_flashinfer", lambda: flashinfer)


@pytest.mark.parametrize(
    ("cuda", "flashinfer", "given", "expected"),
    [
        (False, True, {}, ("cpu", "float32", "torch")),
        (False, False, {"dtype": "bfloat16"}, ("cpu", "bfloat16", "torch")),
        (True, True, {}, ("cuda", "bfloat16", "flashinfer")),
        (True, False, {}, ("cuda", "bfloat16", "paged")),
        (True, True, {"dtype": "float32"}, ("cuda", "float32", "paged")),
        (True, True, {"attention_backend": "paged"}, ("cuda", "bfloat16", "paged")),
        (True, True, {"device": "cpu"}, ("cpu", "float32", "torch")),
        (True, False, {"device": "cuda", "dtype": "float16"}, ("cuda", "float16", "paged")),
    ],
)
def test_auto_means_the_best_of_this_host(
    cuda: bool, flashinfer: bool, given: dict[str, Any], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, cuda=cuda, flashinfer=flashinfer)
    assert settle(EngineOptions(**given), {"torch_dtype": "float32"}) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": None, "text_config": {"dtype": "float16"}}, "float16"),
        ({"dtype": "bfloat16", "vision_config": {"dtype": "float16"}}, "bfloat16"),
    ],
)
def test_cuda_takes_the_checkpoints_half_precision(config: dict[str, Any], expected: str) -> None:
    assert settle_dtype("auto", "cuda", config) == expected
    assert settle_dtype("auto", "cpu", config) == "float32"
    assert settle_dtype("float32", "cuda", config) == "float32"


@pytest.mark.parametrize(
    ("cuda", "given", "told"),
    [
        (False, {"device": "cuda"}, "--device cuda: torch finds no CUDA device here; use --device cpu"),
        (False, {"attention_backend": "flashinfer"}, "--attention-backend flashinfer does not run with --device cpu"),
        (False, {"attention_backend": "paged"}, "--attention-backend paged does not run with --device cpu, .* torch;"),
        (True, {"attention_backend": "torch"}, "torch does not run with --device cuda, .* flashinfer and paged"),
        (True, {"attention_backend": "flashinfer"}, r"flashinfer is not installed: pip install 'specplug\[cuda\]'"),
        (
            True,
            {"attention_backend": "flashinfer", "dtype": "float32"},
            "flashinfer has no kernels for --dtype float32: use --dtype bfloat16 or float16",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line(
    cuda: bool, given: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, cuda=cuda, flashinfer=False)
    with pytest.raises(UserError, match=told) as caught:
        settle(EngineOptions(**given), {})
    assert "\n" not in str(caught.value)


def test_another_machine_is_taken_on_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cuda=False, flashinfer=False)
    there = settle(EngineOptions(device="cuda"), {}, elsewhere=True)
    assert there == ("cuda", "bfloat16", "flashinfer")
    # Its GPU is this one's: then what is installed here is what there is.
    host(monkeypatch, cuda=True, flashinfer=False)
    assert settle(EngineOptions(device="cuda"), {}, elsewhere=True).attention_backend == "paged"


def test_float32_needs_the_backend_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cuda=True, flashinfer=True)
    assert settle_backend("auto", "cuda", "float32", trusted=True) == "paged"
    assert settle_backend("flashinfer", "cuda", "float16") == "flashinfer"


def test_a_model_at_hand_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cuda=True, flashinfer=True)
    facts = facts_of(Checkpoint(), EngineOptions(), at_hand=("cpu", "float32"))
    assert (facts.device, facts.dtype, facts.attention_backend) == ("cpu", "float32", "torch")
    facts = facts_of(Checkpoint(), EngineOptions(), at_hand=("cuda", "float16"))
    assert (facts.device, facts.dtype, facts.attention_backend) == ("cuda", "float16", "flashinfer")
    with pytest.raises(UserError, match="--device cuda: the model given is loaded on cpu"):
        facts_of(Checkpoint(), EngineOptions(device="cuda"), at_hand=("cpu", "float32"))
