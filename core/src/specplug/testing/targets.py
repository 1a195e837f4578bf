"""Target models small enough to be known by heart: a lookup table, and a random two-layer decoder.

A table target makes exact claims cheap: its logits are a function of the last one or two tokens, so a
distribution can be enumerated. At order 2 it learns the previous token through attention and nothing
else, so a wrong page, mask or compaction changes what it says.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specplug.models.base import ForwardBatch, KVGeometry, TargetModel
from specplug.models.target import Target
from specplug.spec import Checkpoint, TapRequest

MAX_POSITION = 512
_CONTEXTS = 4096  # rows of a table at most; above, contexts share rows

# The score of a key at distance d from the wanted position is -_SHARP * d**2. A power of 4, so that its
# root, which some kernels multiply into q and k, is exact; exp(-256) is 0 in float32.
_SHARP = 256.0


class TableModel(TargetModel):
    """Logits [V] looked up by the last token (order 1) or the last two (order 2).

    The hidden state is (token, previous token) as floats; the first token's previous one is itself.
    Taps: boundary 0 is (token, 0), boundary 1 and ``"final_norm"`` are the hidden state.
    """

    table: Tensor

    def __init__(self, table: Tensor, order: int, max_position: int = MAX_POSITION) -> None:
        """`table`: float32 [contexts, V]; context (previous, token) is row ``(previous * V + token) % contexts``."""
        super().__init__()
        self.register_buffer("table", table)
        self.order = order
        self.vocab_size = table.shape[1]
        self.hidden_size = 2
        self.max_position = max_position
        self.kv_layers = (KVGeometry(kv_heads=1, k_dim=2, v_dim=1, q_heads=1),) if order == 2 else ()
        self.config = {
            "model_type": "table",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "max_position_embeddings": max_position,
        }

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (token, previous token) [T, 2], and the taps."""
        token = batch.tokens.float()
        previous = torch.zeros_like(token)
        if self.order == 2:
            at = batch.positions.float()
            # q . k = 2 (p - 1) j - j**2, largest by 1 at j = p - 1: the softmax is exactly one-hot there.
            q = torch.stack((2.0 * (at - 1.0), -torch.ones_like(at)), 1).unsqueeze(1)
            k = torch.stack((at, at * at), 1).unsqueeze(1)
            previous = batch.attention.attend(0, q, k, token.view(-1, 1, 1), scale=_SHARP).view(-1)
        hidden = torch.stack((token, previous), 1)
        embedded = torch.stack((token, torch.zeros_like(token)), 1)
        return hidden, tuple(embedded if tap.at == 0 else hidden for tap in batch.taps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [*, V], in `out` where given."""
        token, previous = hidden.round().long().unbind(-1)
        context = token if self.order == 1 else previous * self.vocab_size + token
        looked_up: Tensor = self.table[context % self.table.shape[0]]
        return looked_up if out is None else out.copy_(looked_up)


def table_target(
    vocab: int = 32,
    order: int = 2,
    seed: int = 0,
    *,
    ties: bool = False,
    eos: int | Sequence[int] | None = None,
    alphabet: Sequence[int] | None = None,
    tokenizer: Any = None,
    max_position: int = MAX_POSITION,
) -> Target:
    """Return a target whose logits are a seeded table.

    `order`: 1 or 2 tokens of context; `ties`: logits are small integers, so that exact ties occur;
    `eos`: ids that end an answer; `alphabet`: the only tokens it ever says, for readable text;
    `tokenizer`: needs at most `vocab` ids.
    """
    if order not in (1, 2):
        raise ValueError(f"a table target has order 1 or 2, not {order}")
    generator = torch.Generator().manual_seed(seed)
    shape = (min(vocab**order, _CONTEXTS), vocab)
    if ties:
        table = torch.randint(0, 3, shape, generator=generator).float()
    else:
        table = 2.0 * torch.randn(shape, generator=generator)
    if alphabet is not None:
        silent = torch.ones(vocab, dtype=torch.bool)
        silent[list(alphabet)] = False
        table[:, silent] = -1e9
    model = TableModel(table, order, max_position).eval()
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return Target(model, tokenizer, Checkpoint(config=model.config, tensors={}), ends)


def decoder_config(vocab: int = 64) -> dict[str, Any]:
    """Return the ``config.json`` of a two-layer Llama with grouped heads, hidden size 32."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def decoder_target(
    seed: int = 0,
    vocab: int = 64,
    *,
    folder: Path | None = None,
    tokenizer: Any = None,
    eos: int | None = None,
    alphabet: Sequence[int] | None = None,
) -> Target:
    """Return a two-layer decoder with seeded random float32 weights.

    With `folder` its checkpoint is written there and stays: a complete Hugging Face folder where a
    `tokenizer` is given. Without, the target lives in memory only and its checkpoint has no path. Tokens
    outside `alphabet` get logit 0, which greedy decoding all but never picks.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            target = decoder_target(seed, vocab, folder=place, tokenizer=tokenizer, eos=eos, alphabet=alphabet)
        target.checkpoint = target.checkpoint.model_copy(update={"path": ""})
        return target
    from safetensors.torch import save_file

    from specplug.facts import read_checkpoint
    from specplug.models.target import load_target

    folder.mkdir(parents=True, exist_ok=True)
    config = decoder_config(vocab) | ({} if eos is None else {"eos_token_id": eos})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = _decoder_weights(config, seed)
    if alphabet is not None:
        weights["lm_head.weight"][[token for token in range(vocab) if token not in alphabet]] = 0.0
    save_file(weights, str(folder / "model.safetensors"))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    checkpoint = read_checkpoint(str(folder))
    return load_target(folder, checkpoint, dtype=torch.float32, device=torch.device("cpu"), needs_tokenizer=False)


def reference_logits(target: Target) -> Callable[[Sequence[int]], Tensor]:
    """Return ``tokens -> logits [len(tokens), V]`` by a full forward, for `specplug.reference`.

    Attention is computed here from its definition: no page, no cache, nothing of the engine's. Answers
    are remembered, so asking for a prefix twice costs one forward.
    """
    known: dict[tuple[int, ...], Tensor] = {}

    def logits(tokens: Sequence[int]) -> Tensor:
        key = tuple(tokens)
        if key not in known:
            known[key] = target.model.logits(dense_forward(target.model, key)[0])
        return known[key]

    return logits


@torch.inference_mode()
def dense_forward(
    model: TargetModel, tokens: Sequence[int], taps: tuple[TapRequest, ...] = ()
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return hidden states [T, H] and taps of one causal sequence, computed in one piece."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    batch = ForwardBatch(ids, torch.arange(len(ids)), DenseAttention(model.kv_layers), taps)
    answer: tuple[Tensor, tuple[Tensor, ...]] = model(batch)
    return answer


class DenseAttention:
    """Causal attention of one sequence, written down as its definition."""

    def __init__(self, layers: Sequence[KVGeometry]) -> None:
        self._layers = layers
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.models.base.AttentionStep`."""
        geometry = self._layers[layer]
        if k is not None and v is not None:
            self._kept[layer] = (k, v)
        keys, values = (part.repeat_interleave(q.shape[1] // geometry.kv_heads, 1) for part in self._kept[layer])
        scores = torch.einsum("qhd,khd->hqk", q, keys) * (geometry.k_dim**-0.5 if scale is None else scale)
        distance = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))
        seen = distance >= 0
        if geometry.window is not None:
            seen &= distance < geometry.window
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def _decoder_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Return seeded weights by their stored names; scales keep the logits' spread near 2."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden, hidden**0.5)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": torch.ones(hidden),
            at + "self_attn.q_proj.weight": matrix(queries, hidden),
            at + "self_attn.k_proj.weight": matrix(keys, hidden),
            at + "self_attn.v_proj.weight": matrix(keys, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, queries),
            at + "post_attention_layernorm.weight": torch.ones(hidden),
            at + "mlp.gate_proj.weight": matrix(inner, hidden),
            at + "mlp.up_proj.weight": matrix(inner, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights | {"model.norm.weight": torch.ones(hidden), "lm_head.weight": matrix(vocab, hidden, 2.0)}
