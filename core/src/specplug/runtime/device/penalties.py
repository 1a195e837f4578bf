"""What a request's options do to the logits before temperature: the device's form of `specplug.runtime.processors`.

Custom processors are not here: they are Python, and their rows are decided on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specplug.runtime.device.upload import upload
from specplug.runtime.request import Request
from specplug.sampling import SamplingParams


class Penalties:
    """Per slot how often its output holds each token, and which tokens its text holds.

    The counts, [S+1, V], are allocated when the first request needs them and cost 5 bytes a token id and slot.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._slots = slots
        self._vocab = vocab
        self._device = device
        self._counts: Tensor | None = None  # int32 [S+1, V]
        self._seen: Tensor | None = None  # bool [S+1, V]
        self._options = torch.zeros(slots + 1, 3, dtype=torch.float32, device=device)
        self._options[:, 0] = 1.0  # repetition; then frequency, presence

    def admit(self, request: Request) -> None:
        """Count a request's text anew; its slot is set. Does not wait for the device."""
        sampling, slot = request.sampling, request.slot
        for at, value in enumerate(
            (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        ):
            self._options[slot, at].fill_(value)
        if not counts_tokens(sampling):
            return
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(self._slots + 1, self._vocab, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(self._slots + 1, self._vocab, dtype=torch.bool, device=self._device)
        (text,) = upload([np.array(request.tokens, dtype=np.int64)], self._device)
        output = text[request.prompt_len :]
        self._counts[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._seen[slot].zero_().index_fill_(0, text, True)

    def commit(self, slots: Tensor, tokens: Tensor) -> None:
        """Count tokens that became output: `slots` int64 [n], distinct, and `tokens` int64 [n, W], -1 padded."""
        if self._counts is None or self._seen is None or not len(slots):
            return
        # What is no token is counted for the scratch slot, which nobody reads.
        flat = torch.where(tokens >= 0, slots[:, None] * self._vocab + tokens, self._slots * self._vocab).flatten()
        self._counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        self._seen.view(-1).index_fill_(0, flat, True)

    def penalise(self, values: Tensor, slots: Tensor, above: Tensor) -> None:
        """Apply the penalties in place to `values`, float32 [n, V], of positions of `slots`, int64 [n].

        `above` int64 [n, D], -1 padded: drafts that stand above each position and count as output there.
        """
        if self._counts is None or self._seen is None or not len(slots):
            return
        if values.is_cuda:
            from specplug.runtime.device.penalties_triton import penalise

            penalise(values, slots, above, self._counts, self._seen, self._options)
            return
        counts, seen = self._counts[slots], self._seen[slots]
        one = torch.ones(1, dtype=torch.int32, device=values.device)
        for tokens in above.T:
            there = tokens >= 0
            at = tokens.clamp_min(0)[:, None]
            counts.scatter_add_(1, at, (one * there)[:, None].int())
            seen.scatter_(1, at, seen.gather(1, at) | there[:, None])
        repetition, frequency, presence = self._options[slots].unsqueeze(2).unbind(1)
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        changed = torch.where(seen, repeated, values)
        changed -= frequency * counts
        changed -= presence * (counts > 0)
        values.copy_(changed)

    def warm_up(self, values: Tensor, above: Tensor) -> None:
        """Compile what `penalise` runs on CUDA, from rows of its arguments, [1, V] and [1, D]; nothing is changed."""
        if values.is_cuda:
            from specplug.runtime.device.penalties_triton import penalise

            counts = torch.zeros_like(values, dtype=torch.int32)
            penalise(values.clone(), torch.zeros_like(above[:, 0]), above, counts, counts.bool(), self._options)


def counts_tokens(sampling: SamplingParams) -> bool:
    """Whether a request with these options needs its tokens counted."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


class Edits:
    """Logits of single tokens that a step adds to (logit_bias, suppressed tokens) or forbids for a while (min_tokens).

    Collected on the host.
    """

    def __init__(self) -> None:
        self._bias_at: list[np.ndarray] = []
        self._bias: list[np.ndarray] = []
        self._ban_at: list[np.ndarray] = []
        self._ban_depth: list[np.ndarray] = []

    def add(self, request: Request, positions: Sequence[int], vocab: int, length: int) -> None:
        """Collect one request's, for its `positions`, indices into the values that `apply` will be given.

        `length`: its output tokens up to the row's root.
        """
        processors = request.processors
        if processors is None:
            return
        rows = np.asarray(positions, dtype=np.int64)[:, None] * vocab
        if len(processors.bias):
            self._bias_at.append((rows + processors.bias_ids).ravel())
            self._bias.append(np.tile(processors.bias, len(positions)))
        for ban in processors.bans:
            if length < ban.least:
                self._ban_at.append((rows + ban.ids).ravel())
                self._ban_depth.append(np.full(len(positions) * len(ban.ids), ban.least - length, dtype=np.int64))

    def arrays(self) -> list[np.ndarray]:
        """Return what `apply` needs on the device, int64 four times."""
        bias = np.concatenate(self._bias) if self._bias else np.zeros(0, dtype=np.float32)
        return [
            _joined(self._bias_at),
            bias.view(np.int32).astype(np.int64),  # the bits: one upload has one type
            _joined(self._ban_at),
            _joined(self._ban_depth),
        ]


def apply_edits(values: Tensor, depth: Tensor, arrays: Sequence[Tensor]) -> None:
    """Apply an `Edits`, whose `arrays` were uploaded, in place to `values` [n, V]; `depth` int64 [n], root 0."""
    bias_at, bias, ban_at, ban_depth = arrays
    flat = values.view(-1)
    if len(bias_at):
        flat.index_add_(0, bias_at, bias.int().view(torch.float32))
    if len(ban_at):
        early = depth[ban_at // values.shape[1]] < ban_depth
        flat.index_copy_(0, ban_at, torch.where(early, float("-inf"), flat[ban_at]))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
