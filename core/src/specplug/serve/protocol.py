"""What the HTTP process and the engine's process say to each other. Torch-free: it is read on both sides.

Every message is plain data that nobody changes, pickled over one pipe in each direction. Ids are the client's: an id is
used once in the life of a client. What is sent for every token is a named tuple, which costs a third of a dataclass to
pickle and read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specplug.errors import Blame
from specplug.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


# --- what callers of the client see --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is true of an engine for its whole life. Sent once, when it is ready.

    What has a default is what plain decoding has, without anything out of the ordinary.
    """

    model: str
    """As it was asked for: a folder, a hub id, or the word the caller gave."""
    algorithm: str = "none"
    """``"none"`` for plain decoding."""
    distribution: str = ""
    """Package and version of the algorithm; empty for plain decoding."""
    vocab: int
    max_tokens: int
    """Most tokens of a request, prompt and output."""
    eos_ids: tuple[int, ...]
    nodes: int = 0
    """Most drafted tokens per request and step, root not counted; 0 without drafts."""
    depth: int = 0
    """Longest drafted path."""
    pages: int
    page_size: int
    max_running_requests: int
    max_queued_requests: int
    acceptance: str = "auto"
    """The rule as the option says it."""
    lossy: str = ""
    """Why what is generated is not the model's text; empty where it is."""
    device: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settled option -> ``{"value", "source", "because"}``, of the algorithm."""
    warnings: tuple[str, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    """`MemoryReport.to_dict`."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Field of `SamplingParams` -> value, of those that the checkpoint's generation config names."""


class TokenInfo(NamedTuple):
    """One output token's log-probability, natural logarithm, of the model's own distribution; may be -inf."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), likeliest first."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """What is known of one choice when it has ended."""

    finish_reason: FinishReason
    completion_tokens: int
    ledger: Mapping[str, Any]
    """The request's acceptance ledger, as `Result.ledger`, with ``speculation`` ("on", "off", "failed: ...")."""
    error: str = ""
    """One line: why it ended with ``"error"``."""
    blame: Blame = "engine"
    """Whose fault that is: what the request itself asked for, or what ran it."""


class Delta(NamedTuple):
    """What became final of one choice of a submission in one step."""

    choice: int
    ids: tuple[int, ...]
    text: str
    """Of these ids; a character that is not complete yet comes with a later delta."""
    depths: tuple[int, ...]
    """Per id: its depth in the draft it came from; 0 = the target's own."""
    corrected: tuple[bool, ...]
    """Per id: the target chose it where drafts stood, and it was none of them. Not behind a draft that was accepted
    to its end, and not where there was no draft."""
    logprobs: tuple[TokenInfo, ...] | None = None
    """One per id, if asked for."""
    end: AnswerEnd | None = None
    """Set on the last delta of a choice, and on no other."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice ended; None while it goes on."""
        return self.end.finish_reason if self.end else None


@dataclass(frozen=True, slots=True)
class RequestState:
    """One choice of a request that has not ended."""

    id: int
    choice: int
    state: Literal["queued", "running"]
    prompt_tokens: int
    output_tokens: int
    drafted: int
    accepted: int
    seconds: float
    """Since it was submitted."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What all steps so far add up to; none of them ever falls."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    """Tokens forwarded, drafts included."""
    emitted: int = 0
    """Tokens that became output."""
    drafted: int = 0
    accepted: int = 0
    verify_rows: int = 0
    """Rows verified with at least one draft."""
    first_accepted: int = 0
    """Of these, rows whose first draft was accepted."""
    submitted: int = 0
    """Choices taken into the queue."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Choices that ended, by finish reason."""
    preemptions: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Host time by stage of a step: schedule, plan, forward, accept, wait, commit, draft, between."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment, between two steps."""

    running: int
    queued: int
    pages: int
    free_pages: int
    depth: int
    """Longest path that is drafted now; 0: nothing is."""
    width: int
    """Tokens per row of a verify now, the root counted."""
    alarm: bool
    """Acceptance at depth 1 stays under its floor."""
    speculation: str
    """``"off"``, ``"on"``, or ``"failed: ..."``."""
    counters: Counters
    report: Mapping[str, Any]
    """`Engine.report`: the acceptance ledger of all requests, running ones included."""
    requests: tuple[RequestState, ...] = ()

    @property
    def kv_use(self) -> float:
        """Share of the KV pages that somebody holds, 0 to 1."""
        return 1.0 - self.free_pages / self.pages if self.pages else 0.0


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """What the engine's process makes its `Engine` from, as plain data."""

    model: str
    algorithm: str = "none"
    config: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's options, without ``speculative_``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineOptions` that were given."""
    announce: bool = False
    """Print the stages of the start to standard error."""
    search_path: tuple[str, ...] | None = None
    """Where plugins are looked for; None is ``sys.path``."""


# --- client to engine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request; answered by `Accepted` or `Refused`."""

    id: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    max_drafted: int | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End all choices of a submission now; what has ended is left alone."""

    id: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a `Snapshot`; answered by `Told`."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Close:
    """End. `drain`: seconds that what is queued and running may still take; what is left is aborted."""

    drain: float = 0.0


Command = Submit | Abort | Ask | Close


# --- engine to client ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has started. `tokenizer` is transformers' fast tokenizer, pickled, or None where it has none."""

    info: EngineInfo
    tokenizer: bytes | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start, or stopped for good. `user`: the caller's own mistake, said in one line."""

    message: str
    user: bool = False
    refused: bool = False
    """The configuration was planned and refused."""
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """A submission is queued."""

    id: int
    seed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A submission was not queued, and why, in one line. `full`: the queue is; try again later."""

    id: int
    message: str
    full: bool = False


class Batch(NamedTuple):
    """What became final in one step: (submission id, delta) each. Text is empty where the client makes it."""

    deltas: Sequence[tuple[int, Delta]]
    at: float
    """When the step's tokens were committed, on `time.monotonic`, which all processes of a machine share."""


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to `Ask`."""

    ticket: int
    snapshot: Snapshot


Event = Ready | Failed | Accepted | Refused | Batch | Told
