"""What a plugin declares and what the core tells it at set-up time. Torch-free.

Counting, everywhere in this project: *nodes*, `num_valid`, `limit`, `max_drafted` and *drafted* do
not count the root (the last committed token, which heads every verify row); widths and
`num_draft_tokens` do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import Field, PrivateAttr, field_validator

from specplug.frozen import Frozen
from specplug.names import fold

API: tuple[int, int] = (1, 0)
"""The plugin API this core speaks. A plugin needs the same major and a minor not above this one."""

Shape = Literal["chain", "tree", "block"]
Release = Literal["finished", "preempted", "aborted", "failed"]


class TapRequest(Frozen):
    """A hidden state of the target that a drafter reads.

    `at` is a boundary ``B_k`` (0 = embedding output, n = output of the last layer before the final
    norm), ``"final_norm"``, or, in an `AlgorithmSpec` only, ``"any"``: the plan says which.
    """

    at: Annotated[int, Field(ge=0)] | Literal["final_norm", "any"]


class Capabilities(Frozen):
    """What an algorithm may ask for (in a spec) or needs for this run (in a plan).

    Every field's default is the most conservative value.
    """

    shapes: frozenset[Shape] = Field(
        frozenset({"chain"}), description="forms of proposal: a chain, a tree, a block of one pass"
    )
    proposal_probs: Literal["one_hot", "dense"] = Field(
        "one_hot", description="dense: drafts are sampled through the core, which records q"
    )
    runs_on: frozenset[Literal["device", "host"]] = Field(
        frozenset({"device"}), description="host: committed tokens are read back before propose"
    )
    taps: tuple[TapRequest, ...] = Field((), description="target hidden states, in this order")
    draft_kv: frozenset[Literal["own_layers", "reads_target"]] = Field(
        frozenset(), description="KV the drafter keeps on the target's pages, or reads of the target"
    )
    borrows: frozenset[Literal["embed_tokens", "lm_head", "rope"]] = Field(
        frozenset(), description="modules of the target that the drafter shares"
    )
    vocab: Literal["same", "mapped"] = Field("same", description="mapped: a draft vocabulary of its own")
    variable_depth: bool = Field(False, description="asking for fewer nodes costs less")
    graph_safe: bool = Field(False, description="propose and ingest can be recorded; checked by the kit")

    def exceeding(self, allowed: "Capabilities") -> list[str]:
        """Return the names of the fields in which this asks for more than `allowed` does."""
        over = [
            name
            for name in ("shapes", "runs_on", "draft_kv", "borrows")
            if not getattr(self, name) <= getattr(allowed, name)
        ]
        if self.proposal_probs == "dense" and allowed.proposal_probs == "one_hot":
            over.append("proposal_probs")
        if self.vocab == "mapped" and allowed.vocab == "same":
            over.append("vocab")
        if TapRequest(at="any") not in allowed.taps and not set(self.taps) <= set(allowed.taps):
            over.append("taps")
        over += [
            name for name in ("variable_depth", "graph_safe") if getattr(self, name) and not getattr(allowed, name)
        ]
        return over


class SpecConfig(Frozen):
    """Base of every algorithm's options. Each field becomes ``--speculative-<field>``.

    Fields of a plugin start with its own word (``ngram_...``); a few shared names mean the same for
    every algorithm: `num_draft_tokens`, ``num_steps``, ``eagle_topk``, ``draft_sampling``.
    """

    num_draft_tokens: int | None = Field(
        None, ge=1, description="nodes verified per step, the root counted (1 drafts nothing)"
    )


class TensorInfo(NamedTuple):
    """Header of one stored tensor; the data is never read."""

    dtype: str
    shape: tuple[int, ...]


class Checkpoint(Frozen):
    """What can be known of a model folder without reading its weights. Set by `specplug.facts`."""

    path: str = ""
    revision: str | None = None
    config: Mapping[str, Any] = Field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] | None = None
    """Name -> dtype and shape; None under load format `dummy`, where nothing is stored."""
    files: tuple[str, ...] = ()
    """Weight files of a draft beside the standard ones. An algorithm's `plan` and drafter see those that it reads, and
    their tensors among `tensors`; hooks see all that installed algorithms name in `AlgorithmSpec.draft_files`."""
    tokenizer_size: int | None = None
    tokenizer_fingerprint: str | None = None
    generation: Mapping[str, Any] = Field(default_factory=dict)


class Limits(Frozen):
    """Sizes the engine was asked for."""

    max_running_requests: int = 8
    context_length: int | None = None


class Facts(Frozen):
    """Frozen plain data about the models and the host, handed to hooks and to `plan`.

    Built by the core after an algorithm word is given. `features` says what this host and this
    target can do: ``rollback`` (any plan with nodes > 0), ``tree_verify``, ``taps``, ``own_kv``,
    ``read_kv``, ``borrow:<part>``.
    """

    target: Checkpoint
    draft: Checkpoint | None = None
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = "torch"
    page_size: int = 16
    limits: Limits = Limits()
    features: frozenset[str] = frozenset()
    first_vocab_difference: tuple[int, str, str] | None = None
    """None, or (id, target's token, draft's token) of the first id on which the vocabularies differ."""

    _planner: Any = PrivateAttr(None)
    # A planning.Planner, which settles other algorithms; set while a run is planned, and kept for its drafter.

    @classmethod
    def empty(cls) -> "Facts":
        """Facts about nothing: empty target, no draft. A claim that survives these was not made on facts."""
        return cls(target=Checkpoint(tensors={}))

    def plan_of(
        self,
        name: str,
        config: "SpecConfig | Mapping[str, Any]",
        depth: int | None = None,
        *,
        draft: bool = True,
    ) -> "DraftPlan | Refusal":
        """Plan another installed algorithm for the same models, as `AlgorithmSpec.plan`; to combine drafters.

        `draft`: whether this part is given the run's draft model; without, it is planned as if there were none, and
        ``ctx.build`` must be told the same. A refusal names the part: `combined_plan` takes it as it is.
        """
        if self._planner is None:
            return Refusal(reason=f"no registry here can plan {name!r}")
        found: DraftPlan | Refusal = self._planner.plan_of(name, config, depth, draft)
        return found


class KVLayers(Frozen):
    """Geometry of KV layers a drafter keeps on the target's page table."""

    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    k_dim: int = Field(ge=1)
    v_dim: int = Field(ge=1)
    window: int | None = Field(None, ge=1)
    scratch_rows: int = Field(0, ge=0)
    """Temporary rows one round writes above the committed ones (steps x topk for a tree)."""


class ModelShape(Frozen):
    """What a plan needs to know of a causal language model, before it is loaded. Made by `specplug.model_shape`."""

    hidden_size: int
    vocab_size: int
    """Rows of its output head, padding included."""
    max_position: int
    """Positions it can be run at."""
    kv: tuple[KVLayers, ...]
    """Its KV layers, runs of equal ones grouped; without scratch rows."""


class DraftPlan(Frozen):
    """What one run will use. The engine sizes buffers, pages and graphs from this alone."""

    needs: Capabilities
    nodes: int = Field(ge=0)
    """Drafted tokens per request, the root not counted."""
    depth: int = Field(ge=0)
    """Longest path: the most drafts one step can accept."""
    kv: tuple[KVLayers, ...] = ()
    lookahead: int = Field(1, ge=1)
    """Next tokens per row that `ingest` needs (n for n chained heads)."""
    catch_up: Literal["taps", "tokens"] = "taps"
    """tokens: at depth 0 the core may skip `ingest` and hand the missed range over later as one StepView."""
    max_position: int | None = None
    """The core asks for no draft beyond this token index."""
    reads_back: bool = False
    """num_valid comes to the host before verify: a declared second wait that lets the verify shrink."""
    bytes_fixed: int = Field(0, ge=0)
    bytes_per_slot: int = Field(0, ge=0)


class Refusal(Frozen):
    """This configuration cannot work here, why, and the nearest thing that does."""

    reason: str
    try_instead: str = ""


class Claim(Frozen):
    """Answer of `specplug_resolve_name`: this word means algorithm `to` for these models."""

    to: str
    because: str


class Defaults(Frozen):
    """Answer of `specplug_defaults`: values for fields the user left unset."""

    values: Mapping[str, Any]
    because: str
    source: Literal["checkpoint", "algorithm"] = "algorithm"


class Problem(Frozen):
    """Answer of `specplug_check`: one objection. All of them are shown together."""

    severity: Literal["error", "warning"]
    field: str
    message: str
    try_instead: str = ""


class AlgorithmSpec(Frozen):
    """One algorithm, as its package's torch-free manifest declares it."""

    name: str
    api: tuple[int, int]
    summary: str
    aliases: tuple[str, ...] = ()
    """Other spellings of this algorithm."""
    instead: Mapping[str, str] = Field(default_factory=dict)
    """Words people type that are no value, and what to write."""
    foreign_options: Mapping[str, str] = Field(default_factory=dict)
    """Options of other engines (without dashes), and what to write."""
    capabilities: Capabilities
    """The most any run may ask for."""
    config_model: type[SpecConfig]
    plan: Callable[[Any, Facts, int | None], DraftPlan | Refusal]
    """plan(config, facts, depth): pure, torch-free, never raises. depth is None or a candidate."""
    drafter: str
    """``package.module:Class``, imported only when this algorithm is selected."""
    draft_files: tuple[str, ...] = ()
    """Weight files (``.safetensors``, or ``.pt`` and ``.bin``, of which tensors alone are read) that it reads of a
    draft's folder beside ``model*.safetensors`` or ``pytorch_model*.bin``, or in their absence. Of those that differ in
    the suffix only, the first that is there; a tensor that two files hold is refused."""
    requires: tuple[str, ...] = ()
    """PEP 508 requirements; one that is not met lists the algorithm as unusable, with why."""

    @field_validator("name")
    @classmethod
    def _folded(cls, name: str) -> str:
        if name != fold(name) or not name:
            raise ValueError(f"algorithm name {name!r} must be written folded: {fold(name)!r}")
        return name


@dataclass(frozen=True)
class Parallel:
    """Where this process stands among those that hold one model. Size 1 for now."""

    rank: int = 0
    size: int = 1


class Setting(Frozen):
    """One field of the settled configuration, and where its value came from."""

    field: str
    value: Any
    source: Literal["user", "policy", "checkpoint", "algorithm", "default"]
    because: str = ""


class RunInfo(Frozen):
    """The settled run, handed to `specplug_observer`. Set by the planner.

    Plain decoding is the algorithm ``"none"``, of no distribution and without a plan.
    """

    algorithm: str
    distribution: str
    version: str
    plan: DraftPlan | None
    settings: tuple[Setting, ...]
    facts: Facts


@dataclass(frozen=True)
class StepStats:
    """Host numbers of one finished step. Set by the engine after the host commit."""

    rows: int
    """Requests in the forward."""
    tokens: int
    """Tokens in the forward, drafts included."""
    drafted: int
    """Nodes verified."""
    accepted: int
    """Drafts that became output."""
    emitted: int
    """Tokens that became output."""
    depth: int
    """Longest path that was wanted for the next step."""
    drafted_rows: int
    """Rows verified with at least one draft."""
    first_accepted: int
    """Of these, rows whose first draft was accepted."""
    seconds: Mapping[str, float]
    """Host time by stage: schedule, plan, forward, accept, wait, commit, draft. On a device all but `wait` is launching
    and host work; `wait` is what is left of the device's."""
    exposed: float | None = None
    """Seconds the device idled before this step for want of host work; None on a CPU, or where it is not known."""
    graph: bool | None = None
    """Whether the forward was replayed from a graph; None on a CPU."""


class Observer(Protocol):
    """Told of finished steps; an exception is logged and the observer dropped."""

    def on_step(self, stats: StepStats) -> None:
        """Take the numbers of one step, whose tokens are committed; the engine waits until this returns."""

    def on_finish(self, request_id: str, ledger: Mapping[str, Any]) -> None:
        """Take the ledger's report of a request that ended, once for each of its choices; why it ended is not told."""

    def close(self) -> None:
        """Give back what is held; called once, when the engine closes, and not after an exception."""


EMPTY: Mapping[str, Any] = MappingProxyType({})
