"""A block's drafts from the definition: one sequence, no cache, no pages, nothing of the plugin's code.

Equations: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specplug import TapRequest
from specplug.testing.targets import dense_forward

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A draft, as the reference is told of it: everything said outright."""

    weights: Weights
    boundaries: Sequence[int] = (0, 2)
    block: int = 5
    mask: int = 63
    next_slot: bool = False
    windows: Sequence[int | None] = (None, None)
    causal: Sequence[bool] = (False, False)
    kind: str = ""
    """Markov head, if any."""
    ids: Sequence[int] | None = None
    """Target id of each of the draft's rows."""
    scale: float = 1.0
    """Of the embeddings."""
    theta: float = 10000.0
    heads: int = 4
    kv_heads: int = 2
    ends: Weights = field(default_factory=dict)
    """``embed_tokens.weight`` and ``lm_head.weight`` of the target, for what the draft does not hold."""


@torch.inference_mode()
def block_states(case: Case, model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the final-normed states [b, H] of the block that begins with the last of `tokens`."""
    past = len(tokens) - 1
    taps = tuple(TapRequest(at=boundary) for boundary in case.boundaries)
    states = torch.cat(dense_forward(model, tokens[:past], taps)[1], -1)
    w = case.weights
    context = _norm(states @ w["fc.weight"].T, w["hidden_norm.weight"])
    table = _end(case, "embed_tokens.weight")
    x = table[[tokens[-1], *[case.mask] * (case.block - 1)]] * case.scale
    for layer in range(len(case.windows)):
        x = x + _attend(case, layer, context, _norm(x, w[f"layers.{layer}.input_layernorm.weight"]))
        y = _norm(x, w[f"layers.{layer}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return _norm(x, w["norm.weight"])


@torch.inference_mode()
def block_drafts(case: Case, model: Any, tokens: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return the greedy drafts behind `tokens` (the last one is the anchor), and the confidence of each."""
    states = block_states(case, model, tokens)
    logits = states @ _end(case, "lm_head.weight").T
    w = {name.removeprefix("markov_head."): tensor for name, tensor in case.weights.items()}
    rank = w["markov_w1.weight"].shape[1] if case.kind else 0
    state = torch.zeros(rank)
    previous, drafts, sure = tokens[-1], [], []
    for slot in range(case.block):
        bias = torch.zeros(logits.shape[1])
        if case.kind:
            before = w["markov_w1.weight"][previous]
            seen = before
            if case.kind == "gated":
                both = torch.cat((states[slot], before))
                seen = torch.sigmoid(w["gate_proj.weight"] @ both + w["gate_proj.bias"]) * before
            if case.kind == "rnn":
                both = torch.cat((state, before, states[slot]))
                g, c, o = (w["joint_proj.weight"] @ both + w["joint_proj.bias"]).chunk(3)
                state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                seen = torch.tanh(o)
            bias = w["markov_w2.weight"] @ seen
        if slot == 0 and not case.next_slot:
            continue
        if "confidence_head.proj.weight" in w:
            features = torch.cat((states[slot], before))[: w["confidence_head.proj.weight"].shape[1]]
            logit = w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0]
            sure.append(float(torch.sigmoid(logit)))
        best = int((logits[slot] + bias).argmax())
        previous = best if case.ids is None else case.ids[best]
        drafts.append(previous)
    return drafts, sure


def _end(case: Case, name: str) -> Tensor:
    return case.weights[name] if name in case.weights else case.ends[name]


def _attend(case: Case, layer: int, context: Tensor, x: Tensor) -> Tensor:
    w, at = case.weights, f"layers.{layer}.self_attn."
    past, rows = len(context), len(x)
    both = torch.cat((context, x))

    def heads(name: str, source: Tensor, count: int, norm: str | None) -> Tensor:
        found = source @ w[f"{at}{name}_proj.weight"].T + w.get(f"{at}{name}_proj.bias", torch.zeros(1))
        found = found.view(len(source), count, -1)
        return _norm(found, w[at + norm]) if norm and at + norm in w else found

    q = heads("q", x, case.heads, "q_norm.weight")
    k = heads("k", both, case.kv_heads, "k_norm.weight")
    v = heads("v", both, case.kv_heads, None)
    q, k = _rotate(q, range(past, past + rows), case.theta), _rotate(k, range(past + rows), case.theta)
    row, key = torch.arange(rows)[:, None] + past, torch.arange(past + rows)
    seen = (key < past) | (key <= row) | torch.tensor(not case.causal[layer])
    window = case.windows[layer]
    if window is not None:
        seen = seen & (key > row - window)
    k, v = (part.repeat_interleave(case.heads // case.kv_heads, 1) for part in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("hrk,khd->rhd", torch.softmax(scores.masked_fill(~seen, float("-inf")), -1), v)
    flat = out.reshape(rows, -1)
    return flat @ w[at + "o_proj.weight"].T + w.get(at + "o_proj.bias", torch.zeros(1))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotate(x: Tensor, positions: range, theta: float) -> Tensor:
    """Rotate pairs (i, i + d/2) as complex numbers."""
    half = x.shape[-1] // 2
    speed = theta ** -(torch.arange(half).float() / half)
    turn = torch.polar(torch.ones(len(positions), half), torch.outer(torch.tensor(list(positions)).float(), speed))
    turned = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
    return torch.cat((turned.real, turned.imag), -1)
