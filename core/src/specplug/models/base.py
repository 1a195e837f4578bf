"""What the engine asks of a target model, whatever it is built from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from specplug.spec import TapRequest


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one layer's KV: `kv_heads` heads, `k_dim` and `v_dim` wide; `window` tokens visible (None: all)."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    q_heads: int = 0
    """Query heads that read it; a backend that plans ahead needs them. 0: not known before the first query."""


class AttentionStep(Protocol):
    """Attention of one step, planned by a backend; holds page tables, lengths and masks of its rows."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """Write `k` [T, kv_heads, k_dim] and `v` [T, kv_heads, v_dim] of this step's tokens into the pages of
        `layer`, then attend with `q` [T, q_heads, k_dim]; returns [T, q_heads, v_dim].

        None for both reads what another layer wrote. `scale` defaults to ``k_dim ** -0.5``.
        """


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a forward: its next `length` tokens, the first at token index `start` of `slot`."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Input of one forward: T tokens of R ragged rows, no phase. Set by the engine."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: AttentionStep
    taps: tuple[TapRequest, ...] = ()
    rows: tuple[BatchRow, ...] = ()  # in the order of `tokens`; empty where the caller has one sequence and no slots
    state: dict[int, Any] = field(default_factory=dict)
    """What a model without paged KV keeps for each slot between forwards. It is the engine's, so that engines on
    one model do not meet; a row with ``start`` 0 begins anew, whatever its slot held."""


class TargetModel(nn.Module):
    """A causal language model over paged KV."""

    config: Mapping[str, Any]
    """The checkpoint's config as a plain dict. Set by the model's constructor, like all below."""
    vocab_size: int
    hidden_size: int
    max_position: int
    kv_layers: tuple[KVGeometry, ...]
    recurrent = False
    """Whether it carries state that cannot be cut back to a length, so that no draft can be verified."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states after the final norm [T, H], and the taps asked for, [T, H] each."""

    @abstractmethod
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [*, V] of final hidden states [*, H], written to `out` where it is given."""

    def part(self, name: str) -> nn.Module:
        """Return the module ``embed_tokens``, ``lm_head`` or ``rope`` for a drafter to share."""
        raise KeyError(name)
