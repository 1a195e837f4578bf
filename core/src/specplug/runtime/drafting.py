"""The drafting stage: one drafter, its proposal, and what happens when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specplug import tree
from specplug.adaptive.depths import policy_of
from specplug.adaptive.policy import Decision, Policy, Result, Round
from specplug.drafter import HostRow, HostView, RequestView, StepView
from specplug.planning import Run
from specplug.proposal import HostProposal
from specplug.runtime.commit import Outcome
from specplug.runtime.device.buckets import row_ladder
from specplug.runtime.draft_kv import scratch_rows
from specplug.runtime.executor import Launched
from specplug.runtime.kv import PagePool
from specplug.runtime.request import Asked, Draft, Request
from specplug.runtime.scheduler import Row
from specplug.runtime.started import Started, owner_of
from specplug.spec import DraftPlan, Release

log = logging.getLogger("specplug")


class Wish(NamedTuple):
    """How many drafts the core wants next for one row of a step. Made by `Drafting.wish`."""

    request: Request
    slot: int
    final: bool
    cap: int
    """Most drafts, whatever the row's length turns out to be; 0 when it is unfinished, has ended, or wants none."""
    room: int
    """Token index that no draft may lie beyond."""

    def limit(self, kv_len: int) -> int:
        """Return the most drafts for a row whose root will lie at token index `kv_len`."""
        return max(0, min(self.cap, self.room - kv_len))

    def take(self, limit: int) -> None:
        """Note in the request how many drafts were asked for."""
        if limit:
            asked = self.request.asked
            self.request.asked = Asked(asked.decision, limit, asked.timed)


class Drafting:
    """Owns the drafter, its proposal and its failures. One per engine with an algorithm."""

    def __init__(self, run: Run, started: Started, pages: PagePool, vocab: int, max_tokens: int) -> None:
        """`pages`: the target's; `max_tokens`: most tokens of a request, prompt and output."""
        assert run.plan is not None
        self.plan: DraftPlan = run.plan
        self.owner = owner_of(run)
        self.failed = ""
        """Empty, or why speculation ended for good."""
        self.on_host = "host" in run.plan.needs.runs_on
        """Committed tokens must be on the host before it can propose."""
        self.started = started
        self.proposal = started.proposal
        slots = len(self.proposal.limit) - 1
        self.policy: Policy = policy_of(run.depths, self.plan.depth, row_ladder(slots))
        """Chooses how far to draft, once a step."""
        self.decision = Decision(self.plan.depth)
        """Its newest choice."""
        self.skips = False
        """Nothing is handed over of the newest step: no drafts are wanted, and its tokens can come later."""
        self._nodes = run.depths.nodes if run.depths else {0: 0, self.plan.depth: self.plan.nodes}
        # What the host's side of a drafter missed comes with the tokens that follow; its device's side would not.
        self._may_miss = run.plan.catch_up == "tokens" and run.plan.needs.runs_on != {"device", "host"}
        self._missed: dict[int, int] = {}  # slot -> token index from which on nothing was handed over
        self._timed = False
        self._decided: Sequence[Row] | None = None  # for these rows, before they ended
        self._untold: list[tuple[Launched, Sequence[tuple[Row, Outcome | None]]]] = []
        self._news = False  # a step was observed since the policy learned
        self._drafter = started.drafter
        self._pages = pages
        self._vocab = vocab
        self._max_tokens = max_tokens
        self._clipped = False
        self._closed = False

    def admit(self, request: Request) -> None:
        """A request got a slot, for the first time or again. An exception in the drafter sets `failed`."""
        request.handed = 0
        self._missed.pop(request.slot, None)
        if self.failed:
            return
        self.policy.forget(request.slot)
        self.proposal.reset(request.slot)
        view = RequestView(request.slot, request.id, tuple(request.tokens), request.sampling, request.max_drafted)
        try:
            self._drafter.on_admit(view)
        except Exception as cause:
            self._fail("on_admit", cause)

    def release(self, request: Request, reason: Release) -> None:
        """A request is about to lose its slot. Exceptions are logged: nothing depends on the answer."""
        if self._closed:
            return
        try:
            self._drafter.on_release(request.slot, reason)
        except Exception:
            log.exception("%s: on_release failed", self.owner)

    @property
    def depths(self) -> Collection[int]:
        """Depths that may be wanted, 0 among them."""
        return self._nodes.keys()

    def decide(self, rows: Sequence[Row]) -> None:
        """Choose how far to draft after `rows`. Unfinished prompts have no say; where all are, nothing changes."""
        early, self._decided = self._decided, None
        if early is rows:
            return
        going = [row for row in rows if row.final and row.request.output.finish_reason is None]
        if going:
            wanting = [row.slot for row in going if row.request.max_drafted != 0]
            self.decision = self.policy.decide(len(going), wanting)
        self._timed = all(len(row.tokens) == 1 for row in rows)
        self.skips = self._may_miss and self.decision.depth == 0
        if self.skips and not self.on_host:
            for row in rows:
                self._missed.setdefault(row.slot, row.start)

    def rests(self, rows: Sequence[Row]) -> bool:
        """Say whether no drafts will be wanted after `rows`, while these are still on their way.

        For a drafter that sees nothing of the device. Where the newest step wanted none either, it is decided
        now; else with what `rows` came to, and the answer is no.
        """
        if self.plan.needs.runs_on != {"host"} or self.decision.depth > 0:
            return False
        self.decide(rows)
        self._decided = rows
        return self.decision.depth == 0

    def observe(self, launched: Launched, pairs: Sequence[tuple[Row, Outcome | None]]) -> None:
        """Tell the policy what a step came to, if it is urgent, or note it for `learn`.

        `pairs` are the step's rows that count, with their outcomes.
        """
        self._untold.append((launched, pairs))
        self._news = True
        if self.policy.urgent:
            self._tell_all()

    def learn(self) -> None:
        """Let the policy learn. Where the device may wait for the host it has its next step by then."""
        if not self._news:  # a host's step has learned before it drafts
            return
        self._news = False
        self._tell_all()
        self.policy.learn()

    def _tell_all(self) -> None:
        for launched, pairs in self._untold:
            self._tell(launched, pairs)
        self._untold.clear()

    def _tell(self, launched: Launched, pairs: Sequence[tuple[Row, Outcome | None]]) -> None:
        decoded = [(row, outcome) for row, outcome in pairs if outcome is not None and len(row.tokens) == 1]
        if not decoded:
            return
        results = [
            Result(
                row.slot,
                row.asked.decision,
                row.asked.limit,
                len(outcome.draft.tokens) if outcome.draft else 0,
                len(outcome.verdict.path),
            )
            for row, outcome in decoded
        ]
        verify, between = launched.took() if len(decoded) == len(launched.rows) else (None, None)
        if not all(row.asked.timed for row, _ in decoded):
            between = None
        tokens = sum(row.q_len for row, _ in decoded)
        self.policy.observe(Round(len(results), tokens, results, verify, between))

    def wish(self, row: Row, least: int, most: int) -> Wish:
        """Say how many drafts `row` may have next, as `decide` chose, and reserve their pages.

        `least`, `most`: bounds of the token index of its next root, equal where the host knows it. Pages
        that cannot be had make the cap 0.
        """
        request, plan, decision = row.request, self.plan, self.decision
        nodes = self._nodes.get(decision.depth, plan.nodes)
        cap = min(nodes, decision.limits.get(row.slot, nodes))
        if request.max_drafted is not None:
            cap = min(cap, request.max_drafted)
        request.asked = Asked(decision, 0, self._timed)
        if not (cap and row.final) or request.output.finish_reason is not None:
            return Wish(request, row.slot, row.final, 0, 0)
        # A verify emits its accepted drafts and one token more; the root itself is output already.
        room = min(request.output.most + request.prompt_len, self._max_tokens) - 2
        if plan.max_position is not None:
            room = min(room, plan.max_position)
        limit = max(0, min(cap, room - least))
        if limit and not self._pages.reserve(row.slot, most + self._rows_beyond(limit)):
            cap = 0
        return Wish(request, row.slot, row.final, cap, room)

    def _rows_beyond(self, limit: int) -> int:
        """Rows above `kv_len` that must be reserved before a proposal of up to `limit` nodes."""
        if self.plan.kv:
            return max(1 + self.plan.nodes, scratch_rows(self.plan.kv))
        return 1 + limit

    def catch_up(self, rows: Sequence[Row], view: Callable[[Sequence[Row]], StepView], most: int) -> None:
        """Hand over what `rows` missed up to their own first tokens, in steps of at most `most` tokens.

        ``view(late)`` makes the step of such rows: tokens that are all kept, and not the last of their request's.
        """
        for late in self._late(() if self.skips else rows, most):
            self._timed = False
            step = view(late)
            step.host = HostView(()) if self.on_host else None
            self.hand(step, wanted=False)
            if self.failed:
                return

    def _late(self, rows: Sequence[Row], most: int) -> Iterator[list[Row]]:
        todo = [row for row in rows if row.slot in self._missed]
        while todo:
            late: list[Row] = []
            room = most
            for row in todo:
                begin = self._missed[row.slot]
                tokens = row.request.tokens[begin : min(row.start, begin + room)]
                if tokens:
                    late.append(Row(row.request, row.slot, begin, tokens, 0, None, final=False))
                    self._missed[row.slot] += len(tokens)
                    room -= len(tokens)
            if late:
                yield late
            for row in [row for row in todo if self._missed[row.slot] >= row.start]:
                todo.remove(row)
                del self._missed[row.slot]

    def hand(self, step: StepView, wanted: bool) -> None:
        """Hand the step to the drafter, and have it propose if drafts are `wanted`.

        An exception in the drafter sets `failed`; the drafter is not called again but to release and close.
        """
        if self.plan.max_position is not None:  # so that no table is read beyond its end
            step.positions.clamp_(max=self.plan.max_position)  # in place: what was recorded reads this tensor
        method = "ingest"
        try:
            self._drafter.ingest(step)
            if wanted:
                method = "propose"
                self._drafter.propose(step, self.started.out)
                self.proposal.merge_host()
        except Exception as cause:
            self._fail(method, cause)

    def round(self, rows: Sequence[Row], ready: Callable[[], StepView], written: HostProposal | None) -> None:
        """Hand over a step that the host has committed, and take over what is proposed for its rows.

        `decide` comes before. `ready` returns the step, its KV views set, once pages are reserved.
        `written`: the host's side of the proposal; None: the outcome stays on the device, and only widths are set.
        """
        wishes = [self.wish(row, row.request.kv_len, row.request.kv_len) for row in rows]
        limits = [wish.limit(wish.request.kv_len) for wish in wishes]
        for wish, limit in zip(wishes, limits, strict=True):
            wish.take(limit)
        if self.skips:
            return
        step = ready()
        step.host = self.host_view(wishes)
        out = self.started.out
        (out if isinstance(out, HostProposal) else self.proposal).begin(
            {wish.slot: limit for wish, limit in zip(wishes, limits, strict=True)}
        )
        self.hand(step, any(limits))
        if self.failed:
            return
        if written is not None:
            self._take(wishes, limits, written)
            return
        for wish, limit in zip(wishes, limits, strict=True):
            wish.request.drafted = limit

    def host_view(self, wishes: Sequence[Wish]) -> HostView | None:
        """Return the step as a drafter on the host sees it, after the host commit; None for the others."""
        if not self.on_host:
            return None
        found = []
        for wish in wishes:
            request = wish.request
            if request.output.finish_reason is not None:
                continue
            seen = request.kv_len + wish.final
            tokens = request.tokens[request.handed : seen]
            found.append(HostRow(request.slot, tokens, seen, wish.limit(request.kv_len)))
            request.handed = seen
        return HostView(found)

    def sound(self, slot: int, tokens: Sequence[int], parents: Sequence[int]) -> int:
        """Return how many of a row's proposed nodes are well formed; the first that is not is told once."""
        found = tree.valid_prefix(tokens, parents, self._vocab)
        if found < len(tokens) and not self._clipped:
            self._clipped = True
            log.warning(
                "%s: draft %d of slot %d is malformed (token %d, parent %d); such drafts are cut off, said once",
                *(self.owner, found, slot, tokens[found], parents[found]),
            )
        return found

    def _take(self, wishes: Sequence[Wish], limits: Sequence[int], written: HostProposal) -> None:
        """Take over what was proposed for each row, of at most `limits` nodes."""
        slots = [wish.slot for wish in wishes]
        counts = np.minimum(written.num_valid[slots], limits).tolist()
        tokens, parents = written.tokens[slots], written.parents[slots]
        malformed = (tokens < 0) | (tokens >= self._vocab) | (parents < -1) | (parents >= np.arange(parents.shape[1]))
        # What lies behind the count may be anything, so that this is a suspicion only.
        suspect: Sequence[bool] = np.any(malformed, axis=1).tolist()
        every = zip(wishes, counts, tokens.tolist(), parents.tolist(), suspect, strict=True)
        for wish, count, its_tokens, its_parents, look in every:
            if count <= 0:
                continue
            del its_tokens[count:], its_parents[count:]
            sound = self.sound(wish.slot, its_tokens, its_parents) if look else count
            if wish.request.grammar is not None and self.plan.needs.runs_on == {"host"}:
                # Certain drafts that it forbids would be rejected. What was sampled stays, or q would be wrong.
                kept = wish.request.grammar.legal(its_tokens[:sound], its_parents[:sound])
                its_tokens, its_parents = tree.restricted(its_tokens, its_parents, kept)
                sound = len(kept)
                written.set(wish.slot, its_tokens, its_parents)
            if sound:
                q = None
                if self.proposal.q is not None and bool(self.proposal.dense[wish.slot]):
                    q = self.proposal.q[wish.slot, :sound].clone()
                wish.request.drafted = sound
                wish.request.draft = Draft(its_tokens[:sound], its_parents[:sound], q)

    def metrics(self) -> Mapping[str, float]:
        """The drafter's own counters; an exception in them is logged and leaves none."""
        if self.failed:
            return {}
        try:
            return dict(self._drafter.metrics())
        except Exception:
            log.exception("%s: metrics failed", self.owner)
            return {}

    def close(self) -> None:
        """Close the drafter; from then on it hears nothing more."""
        self._closed = True
        try:
            self._drafter.close()
        except Exception:
            log.exception("%s: close failed", self.owner)

    def _fail(self, method: str, cause: Exception) -> None:
        self.failed = f"{self.owner}: {method} raised {type(cause).__name__}: {cause}"
        log.exception("%s", self.failed)
