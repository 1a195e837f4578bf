"""Drafting by its description: the whole text anew for every token, plain torch, no page, no mask, no cache.

Written from the equations of EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858) and EAGLE-3 (2503.01840). n rows, H hidden
size. Heads are given in the plain spelling of `eagle_checkpoints`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from eagle_checkpoints import Head
from torch import Tensor
from torch.nn import functional as F

from specplug import TapRequest
from specplug.testing.setup import Target
from specplug.testing.targets import dense_forward

Drafts = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens and parents."""


class Oracle:
    """What a head drafts after any text of a target."""

    def __init__(self, head: Head, target: Target, taps: Sequence[TapRequest]) -> None:
        """`taps`: what the head reads of the target, in its order."""
        self._w, self._config = head.tensors, head.config
        self._target, self._taps = target, tuple(taps)
        self.third = self._w["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * self._config["hidden_size"]
        decoder = target.model
        self._embed, self._lm_head = (
            self._w.get(f"{name}.weight", decoder.get_parameter(f"{name}.weight"))
            for name in ("embed_tokens", "lm_head")
        )
        rows = len(self._lm_head)
        offsets = self._w.get("d2t")
        self.ids = torch.arange(rows) if offsets is None else torch.arange(rows) + offsets

    # --- one forward ----------------------------------------------------------------------------------------------

    def project(self, taps: Sequence[Tensor]) -> Tensor:
        """Return what stands beside the tokens, [n, H], of the target's states."""
        if not self.third or "fc.weight" not in self._w:
            return taps[0]
        if self._config.get("fc_norm"):
            taps = [self._norm(tap, f"fc_norm.{at}.weight") for at, tap in enumerate(taps)]
        joined = torch.cat(tuple(taps), 1)
        if self._config.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm.weight")
        return F.linear(joined, self._w["fc.weight"], self._w.get("fc.bias"))

    def forward(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what makes logits and what is recycled, [n, H] each; row i at position i, causal."""
        e, at = self._embed[list(tokens)], "layers.0."
        if self.third:
            normed = self._norm(hidden, at + "hidden_norm.weight")
            x = torch.cat((self._norm(e, at + "input_layernorm.weight"), normed), 1)
            residual = normed if self._config.get("norm_before_residual") else hidden
        else:
            x = residual = F.linear(torch.cat((e, hidden), 1), self._w["fc.weight"], self._w.get("fc.bias"))
        a = residual + self._attention(x, at + "self_attn.")
        m = self._norm(a, at + "post_attention_layernorm.weight")
        gate, up = (F.linear(m, self._w[f"{at}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        h = a + F.linear(F.silu(gate) * up, self._w[at + "mlp.down_proj.weight"])
        if not self.third:
            return h, h
        final = self._norm(h, "norm.weight")
        return final, final if self._config.get("norm_output") else h

    def logits(self, state: Tensor) -> Tensor:
        """Return [*, rows of the output head]."""
        return F.linear(state, self._lm_head)

    def _attention(self, x: Tensor, at: str) -> Tensor:
        dim = self._config.get("head_dim") or self._config["hidden_size"] // self._config["num_attention_heads"]
        q, k, v = (
            F.linear(x, self._w[f"{at}{part}_proj.weight"], self._w.get(f"{at}{part}_proj.bias")).view(len(x), -1, dim)
            for part in "qkv"
        )
        q, k = (self._turned(part) for part in (q, k))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        hides = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        seen = scores.masked_fill(hides, -torch.inf).softmax(-1)
        return F.linear(torch.einsum("hqk,khd->qhd", seen, v).flatten(1), self._w[f"{at}o_proj.weight"])

    def _turned(self, x: Tensor) -> Tensor:
        dim = x.shape[-1]
        turn = self._config.get("rope_theta", 10000.0) ** (-torch.arange(0, dim, 2).float() / dim)
        angle = (torch.arange(len(x)).float()[:, None] * turn)[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name], self._config["rms_norm_eps"])

    # --- rounds ---------------------------------------------------------------------------------------------------

    def committed(self, text: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """Return the rows of a text whose first `count` tokens are final: row i holds token i + 1 and state i."""
        taps = dense_forward(self._target.model, text[:count], self._taps)[1]
        return list(text[1 : count + 1]), self.project(taps)

    def after(self, text: Sequence[int], count: int, drafted: Sequence[int] = ()) -> Tensor:
        """Return the logits [rows] of what follows the root and then `drafted`."""
        tokens, hidden = self.committed(text, count)
        for token in (*drafted, None):
            state, recycled = self.forward(tokens, hidden)
            if token is not None:
                tokens, hidden = [*tokens, token], torch.cat((hidden, recycled[-1:]))
        return self.logits(state[-1])

    def chain(self, text: Sequence[int], count: int, depth: int) -> Drafts:
        """Return the greedy chain of `depth` tokens."""
        drafted: list[int] = []
        for _ in range(depth):
            drafted.append(int(self.ids[self.after(text, count, drafted).argmax()]))
        return tuple(drafted), tuple(range(-1, depth - 1))

    def tree(self, text: Sequence[int], count: int, depth: int, topk: int, nodes: int) -> Drafts:
        """Return the `nodes` best candidates of EAGLE-2's expansion, the best first."""
        made: list[tuple[float, tuple[int, ...]]] = []
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(depth):
            born = []
            for cost, path in frontier:
                surprisal, rows = (-self.after(text, count, path).log_softmax(-1)).sort()
                born += [(cost + float(surprisal[rank]), (*path, int(self.ids[rows[rank]]))) for rank in range(topk)]
            made += born
            frontier = sorted(born)[:topk]
        order = [path for _, path in sorted(made)[:nodes]]
        at = {path: place for place, path in enumerate(order)}
        return tuple(path[-1] for path in order), tuple(at[path[:-1]] if len(path) > 1 else -1 for path in order)
