"""The frozen target: hidden states at the boundaries a draft reads, and what it would say next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from chats import Batch
from torch import Tensor
from torch.nn import functional as F

from specplug import TapRequest, UserError
from specplug.facts import read_checkpoint
from specplug.models.base import ForwardBatch
from specplug.models.decoder import Decoder
from specplug.models.store import local_model
from specplug.models.target import load_target


class Reading(NamedTuple):
    """What the target makes of a batch. H its hidden size; R as in `Batch.rows`."""

    taps: tuple[Tensor, ...]
    """[B, L, H] each, in the order asked for."""
    final: Tensor
    """[R, H]: what the head makes token i + 2 of row i from, see `says`."""


class Rows:
    """Attention of B sequences of one length, each causal and apart. Padding stands behind, so nothing sees it."""

    def __init__(self, count: int) -> None:
        self._count = count

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.models.base.AttentionStep`; K and V are needed."""
        assert k is not None
        assert v is not None
        q, k, v = (part.reshape(self._count, -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def load(model: str, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return the decoder of `model`, a folder, a ``.gguf`` file or ``demo``, without gradients."""
    # cuDNN's attention makes a plan for each new shape, 3 ms of the host's time a layer, and batches have many shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    folder = local_model(model, needs_tokenizer=False)
    found = load_target(Path(folder), read_checkpoint(str(folder)), dtype=dtype, device=device, needs_tokenizer=False)
    if not isinstance(found.model, Decoder):
        raise UserError(f"--model {model}: drafts are trained for Llama-family decoders alone; give such a model")
    return found.model.eval().requires_grad_(False)


@torch.no_grad()
def read(model: Decoder, batch: Batch, at: Sequence[int | str]) -> Reading:
    """Return the states at `at` (boundaries or ``"final_norm"``), and those that the next tokens follow from."""
    count, length = batch.tokens.shape
    positions = torch.arange(length, device=batch.tokens.device).repeat(count)
    taps = (*(TapRequest(at=each) for each in at), TapRequest(at="final_norm"))
    _, states = model(ForwardBatch(batch.tokens.flatten(), positions, Rows(count), taps))
    # Row i asks for token i + 2, which the target says at token i + 1.
    final = states[-1][batch.rows + 1]
    return Reading(tuple(state.view(count, length, -1) for state in states[:-1]), final)


@torch.no_grad()
def says(model: Decoder, final: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what the target says next after states [n, H]: float32 [n, ids], the probability, at temperature 1 and of
    the whole vocabulary, of each of `ids` int64 (None: all), and int64 [n], the likeliest token of all."""
    logits = model.logits(final)
    best = logits.argmax(-1)
    if ids is None:
        return logits.softmax(-1), best
    return (logits[:, ids] - logits.logsumexp(-1, keepdim=True)).exp(), best
