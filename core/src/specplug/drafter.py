"""What authors program against: `Drafter`, and the views the core hands to it.

Shapes: S slots (requests that run at once; row S is scratch), R rows of this step, T tokens of this
step, N `plan.nodes`, L `plan.lookahead`, H hidden size, V vocabulary. All integer
tensors are int64. Every field says who sets it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from specplug.sampling import SamplingParams
from specplug.spec import (
    DraftPlan,
    Facts,
    Parallel,
    Release,
)

if TYPE_CHECKING:
    from specplug.models.draft import DraftModel
    from specplug.proposal import HostProposal, Proposal


class HostRow(NamedTuple):
    """One live row as Python ints, for drafters that declare ``"host"``. Set by the engine after the host commit."""

    slot: int
    new_tokens: Sequence[int]
    """The kept tokens not handed over before (all of a prompt chunk; in a verify without the old root),
    then the root if `final`; cut by the stop rules."""
    seq_len: int
    """Tokens handed over so far, the root included."""
    limit: int
    """Most drafts the core will take for this row now; meaningful in `propose` only."""


@dataclass(frozen=True, slots=True)
class HostView:
    """Host side of a step. Set by the engine; None for drafters that run on the device only."""

    rows: Sequence[HostRow]


@dataclass(frozen=True, slots=True)
class SamplingView:
    """Sampling options of the step's rows, on the device, [R] each. Set by the engine at schedule time."""

    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64; the request's seed
    choice: Tensor  # int64; index among the request's n choices


@dataclass(slots=True)
class StepView:
    """One target forward, seen after its tokens were committed. Views valid until the next step.

    A prefill chunk, a decode and a verify differ only in their numbers. On a device rows and tokens are padded:
    a pad row is empty, carries the scratch slot S and may begin at T, so clamp before indexing tokens by `row_start`.
    """

    slots: Tensor  # [R]    scheduler: identity of the row; pad rows carry the scratch slot S
    tokens: Tensor  # [T]    commit: what the target processed; in each row the kept ones first, in order
    positions: Tensor  # [T]    commit: position ids in the same order (root position + depth inside a tree)
    row_start: Tensor  # [R+1]  scheduler: row r owns tokens[row_start[r]:row_start[r+1]]
    num_kept: Tensor  # [R]    commit: the row's first tokens whose KV is now final (all of a prompt chunk)
    kv_len: Tensor  # [R]    commit: tokens whose target KV is final = token index of the root
    root: Tensor  # [R]    commit: next_tokens[:, 0]
    next_tokens: Tensor  # [R,L]  commit: the tokens that follow the last kept one; -1 = not known yet
    final: Tensor  # [R]    bool, scheduler: the root was sampled (else: an unfinished prompt chunk)
    taps: tuple[Tensor, ...]  # [T,H] each, commit: as plan.needs.taps orders them; rows as in `tokens`
    sampling: SamplingView  # scheduler
    depth: int  # scheduler: longest path wanted now
    host: HostView | None  # host commit: only with "host" in plan.needs.runs_on

    def last_kept(self) -> Tensor:
        """Return where each row's last kept token stands among the step's tokens, int64 [R]; any place for pad rows."""
        return torch.clamp(self.row_start[:-1] + self.num_kept - 1, 0, len(self.tokens) - 1)

    def shifted(self) -> Tensor:
        """Return the token that follows each kept one, int64 [T]: what is paired with its hidden state in `ingest`.

        For rejected and pad tokens, and where the next one is not known, it is any token: `following` tells them apart,
        at four times the kernels.
        """
        total = len(self.tokens)
        found = torch.cat((self.tokens[1:], self.tokens[:1], self.tokens[:1]))
        # What follows the last kept token is no token of this step. Pad rows keep none, and write behind all.
        at = torch.where(self.num_kept > 0, self.row_start[:-1] + self.num_kept - 1, total)
        return found.index_copy_(0, at, self.root.clamp_min(0))[:total]

    def following(self) -> Tensor:
        """Return the L tokens after each kept token, int64 [T,L]; -1 = not known yet, or the token was rejected."""
        token = torch.arange(len(self.tokens), device=self.tokens.device)
        # Pad tokens lie behind all rows; counted to the last one they are none of its kept tokens.
        row = torch.searchsorted(self.row_start[1:], token, right=True).clamp_max(len(self.slots) - 1)
        at = token - self.row_start[row]
        lookahead = self.next_tokens.shape[1]
        ahead = at[:, None] + 1 + torch.arange(lookahead, device=self.tokens.device)  # index into the row
        beyond = ahead - self.num_kept[row][:, None]  # index into next_tokens
        inside = self.tokens[(self.row_start[row][:, None] + ahead).clamp_max(len(self.tokens) - 1)]
        outside = self.next_tokens[row].gather(1, beyond.clamp(0, lookahead - 1))
        kept = (at < self.num_kept[row])[:, None]
        return torch.where(kept & (beyond < lookahead), torch.where(beyond < 0, inside, outside), -1)


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that got a slot. Set by the engine at admission."""

    slot: int
    request_id: str
    tokens: Sequence[int]
    """The prompt; after a preemption, the prompt and the output so far. It reaches the drafter through `ingest`."""
    sampling: SamplingParams
    max_drafted: int | None


class KVView(Protocol):
    """KV rows addressed by token index on the target's page table: the drafter's own layers, or the target's.

    Rows below `kv_len` hold what `ingest` wrote. Rows at or above it are scratch for one round: the core
    never moves them, `ingest` may write there what `propose` of the same step will read, and the next round
    overwrites them. A row whose pages could not be reserved has ``limit = 0``, and what is written for it
    goes nowhere; so what must last is written in `ingest`, below `kv_len`.
    """

    def pattern(
        self,
        name: str,
        q_len: int | None,
        mask: Literal["causal", "full", "ancestors"] = "causal",
        window: int | None = None,
        offset: int = 0,
    ) -> Any:
        """Declare, in `allocate`, a way to read; returns a handle for `attend`.

        `q_len` queries per row, the first at token index ``kv_len + offset``; each sees all rows below
        the first, and of the queries' own rows those up to itself (``causal``) or all (``full``).
        ``ancestors``: each sees all rows below `kv_len` and those scratch rows that `attend` is told.
        `q_len` None: the step's own rows, ragged and causal, each beginning where it began plus `offset`
        (at most 0): for `ingest`. What a query before token 0 returns means nothing.

        `window` (default: the layer's) counts positions, the query's own included; under ``ancestors`` a
        query's position is ``kv_len - 1`` plus the scratch rows it sees, and those are never cut.
        """

    def write(self, layer: int, k: Tensor, v: Tensor, index: Tensor | None = None) -> None:
        """Write `k` [n, kv_heads, k_dim] and `v` [n, kv_heads, v_dim] into `layer`.

        `index` int64 [R, q_len], n = R * q_len, or [T], n = T: token indices, below 0 = nowhere. None:
        n = T, each of the step's tokens at its own index (what was rejected lands at or above `kv_len`).
        """

    def attend(
        self, pattern: Any, layer: int, q: Tensor, visible: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attend with `q` [n, q_heads, k_dim] (n = R * q_len, or T); returns [n, q_heads, v_dim].

        `visible` bool [R, q_len, X], for ``ancestors`` only: scratch row ``kv_len + x`` is seen.
        """


class Arena(Protocol):
    """The only place where a drafter takes device memory; accounted against the plan."""

    def static(self, name: str, shape: Sequence[int], dtype: torch.dtype, fill: float = 0) -> Tensor:
        """Return ``[*shape]`` of `fill` at a fixed address for the engine's life; counts as `bytes_fixed`."""

    def per_slot(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return ``[S+1, *shape]`` zeros, scratch row last; counts as `bytes_per_slot`."""

    def draft_kv(self) -> KVView:
        """Return the layers that `plan.kv` declared, numbered through all its groups."""


class GraphRecorder(Protocol):
    """Turns a drafter's callables into one launch each; where there are no graphs it returns `fn` itself.

    `fn` is run and recorded at start, on an empty step, and a replay reads the same static tensors anew: what
    Python saw (`step.depth`, the variant, shapes) is fixed, what `fn` allocates is gone with the next replay,
    and nothing in it may wait for the device or branch on a tensor. Rows and tokens are padded: pad rows carry
    the scratch slot.
    """

    def record(
        self,
        name: str,
        fn: Callable[[StepView, Proposal | None, Any], None],
        over: str = "rows",
        variants: Sequence[Any] | None = None,
    ) -> Callable[[StepView, Proposal | None, Any], None]:
        """Return a callable of `fn`'s signature ``fn(step, out, variant)``.

        `over` says for which shapes: ``"rows"``, one graph per row count, for what looks at rows alone;
        ``"rows_x_width"``, one per row count and token total. There `fn` itself runs for a step that fits
        none, such as a long prompt chunk. One graph per entry of `variants`; another variant runs `fn`.
        """


class TargetView(Protocol):
    """The target, as far as the plan was granted it."""

    config: Mapping[str, Any]

    def borrow(self, part: Literal["embed_tokens", "lm_head", "rope"]) -> nn.Module:
        """Return the target's ``embed_tokens``, ``lm_head`` or ``rope`` module, shared and not copied."""

    def kv(self) -> KVView:
        """Return the target's KV, read-only; needs ``"reads_target"`` in `plan.needs.draft_kv`."""


class DraftContext(Protocol):
    """What a drafter is built with. Set by the engine, unchanged for its life."""

    facts: Facts
    slots: int
    device: torch.device
    dtype: torch.dtype
    parallel: Parallel

    def weights(self, which: Literal["draft", "target"], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the ``"draft"`` or ``"target"`` checkpoint whose name starts with `prefix`."""

    def load(
        self,
        module: nn.Module,
        which: Literal["draft", "target"],
        rename: Callable[[str], str | None],
        prefix: str = "",
    ) -> None:
        """Fill `module` from the stored tensors whose names start with `prefix`.

        `rename` turns a stored name into one of `module`'s parameters or persistent buffers (the parts of a
        `FusedLinear` under their own names), or None: skip it. A tensor missing, of another shape, or under `prefix`
        and neither used nor skipped is an error with the list; without a `prefix`, the rest of a target's file is not.
        Where the checkpoint's load format is ``dummy``, values are random.
        """

    def model(self, which: Literal["draft", "target"]) -> DraftModel:
        """Return the checkpoint as a causal language model to run over `Arena.draft_kv`, loaded as targets are.

        For `load`. `specplug.model_shape` says beforehand, for the plan, whether that works and what KV it keeps.
        """

    def noise(self, step: StepView, depth: int, stream: Literal["target", "draft"] = "draft") -> Tensor:
        """Return Gumbel noise [R, V] for the drafts at `depth` (1 = child of the root)."""

    def build(self, name: str, config: Any, *, draft: bool = True) -> Drafter:
        """Return another installed algorithm as a part of this one, planned as `facts.plan_of` plans it.

        Call it in the constructor, in the order in which `specplug.combined_plan` was given the plans, with the `draft`
        that `facts.plan_of` was given, and pass every method on to the part, as `CombinedDrafter` does. It has a
        proposal of its own, sees the step as its own plan describes it, and its `propose` fills only rows of `out`
        that have no draft yet: the first part with a draft wins.
        With parts on both sides `out` is the `Proposal`, `out.host` its host side, and a row set there wins.
        Raises RefusedError where `facts.plan_of` refuses, and where it was asked with another `draft` only.
        """


class Drafter(ABC):
    """A draft algorithm at work.

    Order of calls: construct, `load`, `allocate`, `capture`; then per request `on_admit`, per target
    forward `ingest` and, when the core wants drafts, `propose`; `on_release` once per admit; `close`.
    An exception in `ingest` or `propose` ends the step's requests with an error naming the package.
    """

    def __init__(self, config: Any, plan: DraftPlan, ctx: DraftContext) -> None:
        """Keep references only; no device work, no allocation."""
        self.config = config
        self.plan = plan
        self.ctx = ctx

    def load(self, target: TargetView) -> None:
        """Load weights and borrow parts of the target."""

    def allocate(self, arena: Arena) -> None:
        """Take every buffer that will ever be needed; nothing may be allocated later."""

    def capture(self, graphs: GraphRecorder) -> None:
        """Register callables to record."""

    def on_admit(self, request: RequestView) -> None:
        """Reset the state of `request.slot`. The prompt comes through `ingest`, once."""

    def ingest(self, step: StepView) -> None:
        """Bring state up to date with one target forward. Called after each, drafts wanted or not."""

    @abstractmethod
    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Write drafts for the step's slots into `out`: a `HostProposal` for a host drafter, else a `Proposal`."""

    def on_release(self, slot: int, reason: Release) -> None:
        """The slot will be used again; called once per `on_admit`."""

    def metrics(self) -> Mapping[str, float]:
        """Return extra counters; must not wait for the device."""
        return {}

    def close(self) -> None:
        """Give back what is not garbage-collected. May be called twice."""


class CombinedDrafter(Drafter):
    """Several drafters as one: every call goes to all `parts`, and the first with a draft for a row drafts it.

    A subclass builds them in its constructor, in the order in which `combined_plan` was given their plans::

        def __init__(self, config, plan, ctx):
            super().__init__(config, plan, ctx)
            self.parts = [ctx.build(name, options) for name, options in config.parts()]

    Another choice than the first is made by overriding `propose`. In `on_release` and `close` no part is left
    out because of another's exception.
    """

    parts: Sequence[Drafter] = ()

    def load(self, target: TargetView) -> None:
        for part in self.parts:
            part.load(target)

    def allocate(self, arena: Arena) -> None:
        for part in self.parts:
            part.allocate(arena)

    def capture(self, graphs: GraphRecorder) -> None:
        for part in self.parts:
            part.capture(graphs)

    def on_admit(self, request: RequestView) -> None:
        for part in self.parts:
            part.on_admit(request)

    def ingest(self, step: StepView) -> None:
        """Let every part follow the text, whoever drafts."""
        for part in self.parts:
            part.ingest(step)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Ask one after the other: a part fills only rows that have no draft yet."""
        for part in self.parts:
            part.propose(step, out)

    def on_release(self, slot: int, reason: Release) -> None:
        with ExitStack() as last_first:
            for part in reversed(self.parts):
                last_first.callback(part.on_release, slot, reason)

    def metrics(self) -> Mapping[str, float]:
        """Return the counters of all, which each part names apart."""
        return {name: value for part in self.parts for name, value in part.metrics().items()}

    def close(self) -> None:
        with ExitStack() as last_first:
            for part in reversed(self.parts):
                last_first.callback(part.close)
