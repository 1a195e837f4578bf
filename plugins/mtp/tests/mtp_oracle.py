"""What MTP heads propose, straight from their equations: dense tensors, whole sequences, nothing of the package's.

N rows of one text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specplug import TapRequest
from specplug.testing import Harness, Move
from specplug.testing.setup import Target
from specplug.testing.targets import dense_forward

TEXT = tuple(torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(7)).tolist())
"""What proposals are compared over."""
Head = Callable[[Tensor, Tensor], Tensor]
"""(embeddings [N, H], states [N, H]) -> outputs [N, H], row i at position i."""


def rms(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Return ``x / rms(x) * weight``, or ``* (1 + weight)``."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight if zero_centred else weight)


def rotated(x: Tensor, theta: float, width: int) -> Tensor:
    """Turn the first `width` dimensions of `x` [N, heads, D] by their row's angle, dimension i with i + width / 2."""
    half = width // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float64), rates)[:, None].float()
    one, two, rest = x[..., :half], x[..., half:width], x[..., width:]
    return torch.cat((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin(), rest), -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `q` [N, heads, D] over `k` and `v` [N, kv_heads, D]; returns [N, heads * D]."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def decoder_head(tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, embedding_first: bool) -> Head:
    """Return a head of MiMo's or speculators' names: a Llama, Qwen2 or Qwen3 block between the norms."""
    eps, heads, width = config["rms_norm_eps"], config["num_attention_heads"], config["head_dim"]
    theta = config["rope_parameters"]["rope_theta"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))

    def head(embedded: Tensor, hidden: Tensor) -> Tensor:
        pair = [
            rms(embedded, tensors["token_layernorm.weight"], eps),
            rms(hidden, tensors["hidden_layernorm.weight"], eps),
        ]
        x = linear("input_proj", torch.cat(pair if embedding_first else pair[::-1], -1))
        inside = rms(x, tensors["input_layernorm.weight"], eps)
        q, k, v = (linear(f"self_attn.{part}_proj", inside).unflatten(-1, (-1, width)) for part in "qkv")
        assert q.shape[1] == heads
        if "self_attn.q_norm.weight" in tensors:
            q, k = rms(q, tensors["self_attn.q_norm.weight"], eps), rms(k, tensors["self_attn.k_norm.weight"], eps)
        x = x + linear("self_attn.o_proj", attended(rotated(q, theta, width), rotated(k, theta, width), v))
        inside = rms(x, tensors["post_attention_layernorm.weight"], eps)
        gate, up = linear("mlp.gate_proj", inside), linear("mlp.up_proj", inside)
        return rms(x + linear("mlp.down_proj", gate / (1 + (-gate).exp()) * up), tensors["final_layernorm.weight"], eps)

    return head


def qwen_head(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Head:
    """Return a head of Qwen3-Next's: zero-centred norms, an output gate beside each query head, a dense MLP."""
    eps, width = config["rms_norm_eps"], config["head_dim"]
    rope = config["rope_parameters"]
    turned = int(width * rope["partial_rotary_factor"])

    def norm(name: str, x: Tensor) -> Tensor:
        return rms(x, tensors[f"{name}.weight"], eps, zero_centred=True)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    def head(embedded: Tensor, hidden: Tensor) -> Tensor:
        x = linear("fc", torch.cat((norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", hidden)), -1))
        inside = norm("layers.0.input_layernorm", x)
        q, gate = linear("layers.0.self_attn.q_proj", inside).unflatten(-1, (-1, 2 * width)).split(width, -1)
        k, v = (linear(f"layers.0.self_attn.{part}_proj", inside).unflatten(-1, (-1, width)) for part in "kv")
        q, k = norm("layers.0.self_attn.q_norm", q), norm("layers.0.self_attn.k_norm", k)
        found = attended(rotated(q, rope["rope_theta"], turned), rotated(k, rope["rope_theta"], turned), v)
        x = x + linear("layers.0.self_attn.o_proj", found / (1 + (-gate.flatten(1)).exp()))
        inside = norm("layers.0.post_attention_layernorm", x)
        gated, up = linear("layers.0.mlp.gate_proj", inside), linear("layers.0.mlp.up_proj", inside)
        return norm("norm", x + linear("layers.0.mlp.down_proj", gated / (1 + (-gated).exp()) * up))

    return head


@torch.inference_mode()
def one_head(target: Target, head: Head, text: Sequence[int], committed: int, steps: int) -> tuple[int, ...]:
    """Return `steps` drafts after `committed` tokens of `text`, whose next one is the root, by one head.

    Row i pairs t_{i+1} with h_i; a draft goes in as the next row's token, beside the output that it was read from.
    """
    embed, output = target.model.part("embed_tokens"), target.model.part("lm_head")
    hidden = dense_forward(target.model, text[:committed], (TapRequest(at="final_norm"),))[1][0]
    tokens, drafts = list(text[1 : committed + 1]), []
    for _ in range(steps):
        found = head(embed(torch.tensor(tokens)), hidden)
        drafts.append(int(output(found[-1:]).argmax()))
        tokens.append(drafts[-1])
        hidden = torch.cat((hidden, found[-1:]))
    return tuple(drafts)


@torch.inference_mode()
def head_by_head(
    target: Target, heads: Sequence[Head], text: Sequence[int], committed: int, *, chained: bool = True
) -> tuple[int, ...]:
    """Return one draft of each head: head k pairs t_{i+1+k} with the output of head k - 1 at row i, or with h_i."""
    embed, output = target.model.part("embed_tokens"), target.model.part("lm_head")
    states = hidden = dense_forward(target.model, text[:committed], (TapRequest(at="final_norm"),))[1][0]
    known, drafts = list(text[: committed + 1]), []
    for at, head in enumerate(heads):
        found = head(embed(torch.tensor(known[at + 1 : at + 1 + committed])), hidden)
        drafts.append(int(output(found[-1:]).argmax()))
        known.append(drafts[-1])
        hidden = found if chained else states
    return tuple(drafts)


def agree(harness: Harness, wanted: Callable[[int], tuple[int, ...]]) -> None:
    """Compare proposals over a text: whole prompts, one by one, with rejected drafts and in chunks."""
    for committed in (1, 2, 3, 9, 30):
        assert harness.fresh(0, TEXT, committed)[0] == wanted(committed), f"a prompt of {committed}"
    harness.admit(1, TEXT, 10)
    harness.ingest([Move(1, 4)])
    step, at = harness.ingest([Move(1, 6)]), 10
    for count, rejected in ((1, ()), (1, (5, 6)), (2, (7,)), (3, ()), (1, (9, 9, 9)), (4, ()), (1, ()), (1, ())):
        assert harness.propose(step)[1][0] == wanted(at), f"after {at} tokens"
        step, at = harness.ingest([Move(1, count, rejected)]), at + count
    assert harness.propose(step)[1][0] == wanted(at)
