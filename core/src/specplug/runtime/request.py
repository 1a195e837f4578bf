"""A request from submission to its last token, and what callers see of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from specplug.adaptive.policy import Decision
from specplug.errors import Blame, UserError
from specplug.grammar.state import Grammar
from specplug.runtime.ledger import Ledger
from specplug.runtime.logprobs import TokenLogprob
from specplug.runtime.processors import Processors
from specplug.runtime.stop import Finish, Output
from specplug.sampling import SamplingParams


class Draft(NamedTuple):
    """What will be verified for one request: a parents-first list of nodes. Set by the drafting stage."""

    tokens: list[int]
    parents: list[int]
    q: Tensor | None  # [n, V] if the nodes were drawn and the rule needs to know from what


class Asked(NamedTuple):
    """What was wanted of the drafter for a row's next forward. Set by the drafting stage, and kept with the drafts."""

    decision: Decision
    limit: int
    """Most drafts; 0: the row could not have any."""
    timed: bool = False
    """The round was an ordinary one, so that its time tells what such rounds take."""


NOTHING = Asked(Decision(0), 0)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Progress is two lengths: `tokens` it has, `kv_len` of them in the KV for good.

    What lies between is still to be forwarded: more than one token is a prompt chunk (or a preempted
    request coming back), exactly one is the root of a decode or verify.
    """

    id: str  # engine, at submission; the same for all choices
    tokens: list[int]  # prompt, then output: engine at submission, commit
    prompt_len: int  # engine
    sampling: SamplingParams  # caller; defaults filled by the engine
    seed: int  # caller, or drawn from the OS at submission
    max_drafted: int | None  # caller: most drafts per step; 0 is speculation off, None the plan's
    output: Output  # engine; commit appends
    processors: Processors | None = None  # engine: what changes its logits; None if nothing does; commit counts
    grammar: Grammar | None = None  # engine: what its answer must keep to; commit walks it
    choice: int = 0  # engine: index among the request's n choices
    slot: int = -1  # scheduler: -1 while waiting
    kv_len: int = 0  # commit; preemption sets 0
    handed: int = 0  # drafting stage: tokens a host drafter has seen; admission sets 0
    drafted: int = 0  # drafting stage: drafts to verify in the next forward
    draft: Draft | None = None  # drafting stage: those drafts, unless only the device knows them
    asked: Asked = NOTHING  # drafting stage: what was wanted of the drafter for the next forward
    depths: list[int] = field(default_factory=list)  # count: per output token its draft depth, 0 = sampled
    corrected: list[bool] = field(default_factory=list)  # count: per output token, it stands in for rejected drafts
    committed: float = 0.0  # commit: when its newest token was, on `time.monotonic`
    ledger: Ledger = field(default_factory=Ledger)  # commit: prefill; count: rounds; settled_ledger: acceptance
    uncounted: list[Callable[[], None]] = field(default_factory=list)  # commit: what is left to do for `count`
    error: str = ""  # engine, commit: why it ended with "error"
    blame: Blame = "engine"  # commit: whose fault that is

    @property
    def pending(self) -> int:
        """Tokens whose KV is not final."""
        return len(self.tokens) - self.kv_len

    @property
    def started(self) -> bool:
        """A forward has held a row of it."""
        return self.ledger.prefill_forwards > 0

    def count(self) -> None:
        """Bring `depths`, `corrected` and `ledger` up to date. The engine does so at the end of each step."""
        for note in self.uncounted:
            note()
        self.uncounted.clear()

    def settled_ledger(self) -> Ledger:
        """Return the ledger with acceptance derived from the output that was kept."""
        self.count()
        self.ledger.settle(self.depths[: len(self.output.ids)])
        return self.ledger

    def take(self) -> Delta | None:
        """Return what became final since the last call, None where nothing did."""
        taken = self.output.taken
        ids, text = self.output.take()
        reason = self.output.finish_reason
        if not (ids or text or reason):
            return None
        entries = self.output.logprobs[taken : taken + len(ids)] if self.sampling.logprobs else None
        return Delta(self.id, self.choice, ids, text, reason, entries)


@dataclass(frozen=True, slots=True)
class Delta:
    """What became final of one request (one choice of it) in one step."""

    request: str
    choice: int
    """Index among the request's `n` answers."""
    ids: list[int]
    text: str
    finish_reason: Finish | None
    logprobs: list[TokenLogprob] | None = None
    """One entry per id, if asked for."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request, or one choice of it."""

    ids: list[int]
    text: str
    finish_reason: Finish
    logprobs: Sequence[TokenLogprob] | None
    """One entry per id, if asked for."""
    ledger: dict[str, Any]
    """Counts and figures of the acceptance ledger, with `seed` and `speculation` ("on", "off", "failed: ...")."""
    seed: int
    error: str = ""
    """Why it ended with "error"."""
    choice: int = 0
    """Index among the request's `n` answers."""


def answer_ends(sampling: SamplingParams, eos: Collection[int]) -> frozenset[int]:
    """Return the token ids that end an answer: the request's own, and the model's `eos` unless it ignores them."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos))


def check_sampling(
    sampling: SamplingParams, *, vocab: int, ends: Collection[int], room: int, has_tokenizer: bool
) -> None:
    """Raise UserError for an option that this model cannot honour.

    `ends`: what `answer_ends` returns; `room`: tokens that the context leaves for the answer.
    """
    for option, tokens in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in tokens:
            if token >= vocab:
                raise UserError(f"{option} names token {token}: this model's ids are 0..{vocab - 1}")
    if sampling.min_tokens > room:
        raise UserError(
            f"min_tokens {sampling.min_tokens} does not fit: the context leaves {room} tokens for the answer; "
            "lower it, shorten the prompt, or raise --context-length"
        )
    if sampling.min_tokens and len({token for token in ends if token < vocab}) == vocab:
        raise UserError(
            f"min_tokens {sampling.min_tokens} cannot be kept: every token id ends the answer; "
            "leave it out, or name fewer stop_token_ids"
        )
    if sampling.response_format is not None and sampling.ignore_eos:
        raise UserError("ignore_eos cannot go with response_format, whose answers end with an eos id: leave one out")
    if sampling.stop and not has_tokenizer:
        raise UserError("stop strings need a tokenizer, and this model has none: use stop_token_ids or max_tokens")
