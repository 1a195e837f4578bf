"""Where and in what a run computes: the words behind ``auto`` in ``--device``, ``--dtype`` and ``--attention-backend``.

Torch-free at import, and on a host without NVIDIA's driver also when asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from specplug.errors import UserError
from specplug.options import EngineOptions

HALF = ("bfloat16", "float16")
_BACKENDS: Mapping[str, tuple[str, ...]] = {"cpu": ("torch",), "cuda": ("flashinfer", "paged")}
"""Attention backends of each device, the best first."""


class Placement(NamedTuple):
    """Concrete words, as `Facts` holds them."""

    device: str
    dtype: str
    attention_backend: str


def settle(options: EngineOptions, config: Mapping[str, Any], *, elsewhere: bool = False) -> Placement:
    """Return where a target of `config` runs under `options`; what cannot be had is a `UserError` naming the option.

    With `elsewhere` the run is for another machine: a ``--device cuda`` that this one lacks is taken on trust, and
    FlashInfer with it.
    """
    device = settle_device(options.device, elsewhere=elsewhere)
    dtype = settle_dtype(options.dtype, device, config)
    trusted = elsewhere and device == "cuda" and not has_cuda()
    return Placement(device, dtype, settle_backend(options.attention_backend, device, dtype, trusted=trusted))


@functools.cache
def has_cuda() -> bool:
    """Whether torch can use a CUDA device here. Without NVIDIA's driver the answer comes without importing torch."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


@functools.cache
def has_flashinfer() -> bool:
    """Whether FlashInfer is installed; it is not imported."""
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec("flashinfer") is not None
    return False


def settle_device(asked: str, *, elsewhere: bool = False) -> str:
    """Return ``cpu`` or ``cuda`` for ``--device``; `elsewhere` as for `settle`."""
    if asked == "auto":
        return "cuda" if has_cuda() else "cpu"
    if asked == "cuda" and not elsewhere and not has_cuda():
        raise UserError(
            "--device cuda: torch finds no CUDA device here; use --device cpu, or check that nvidia-smi lists a GPU "
            "and that the installed torch is a CUDA build"
        )
    return asked


def settle_dtype(asked: str, device: str, config: Mapping[str, Any]) -> str:
    """Return the dtype's word for ``--dtype``. ``auto`` on CUDA is the checkpoint's own half precision, or bfloat16."""
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    return next((stored for stored in _stored_dtypes(config) if stored in HALF), "bfloat16")


def settle_backend(asked: str, device: str, dtype: str, *, trusted: bool = False) -> str:
    """Return the backend's word for ``--attention-backend``; `trusted`: FlashInfer counts as installed."""
    offered = _BACKENDS[device]
    if asked not in ("auto", *offered):
        raise UserError(
            f"--attention-backend {asked} does not run with --device {device}, which has {' and '.join(offered)}; "
            f"leave it out, or give one of these"
        )
    lacks = "" if trusted or has_flashinfer() else "is not installed: pip install 'specplug[cuda]'"
    if dtype not in HALF:
        lacks = f"has no kernels for --dtype {dtype}: use --dtype bfloat16 or float16"
    if asked == "flashinfer" and lacks:
        raise UserError(f"--attention-backend flashinfer {lacks}, or leave the option out")
    if asked != "auto":
        return asked
    return offered[-1] if device == "cuda" and lacks else offered[0]


def _stored_dtypes(config: Mapping[str, Any]) -> list[str]:
    """Return what `config`, and then the configs inside it, say that their weights are stored in."""
    named = [str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key)]
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    return named or [stored for each in inner for stored in _stored_dtypes(each)]
