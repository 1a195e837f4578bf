"""NGRAM at work: every step's tokens go into the store, and drafts come out of it."""

from collections.abc import Mapping
from typing import Any, cast

from specplug import (
    DraftContext,
    Drafter,
    DraftPlan,
    HostProposal,
    Proposal,
    RequestView,
    StepView,
    TargetView,
    UserError,
)
from specplug_ngram import corpus
from specplug_ngram._store import Store
from specplug_ngram.config import NgramConfig

_PREEMPTED = 1024
"""Preempted texts whose end is kept; a request that is older than as many more says its text a second time."""


class NgramDrafter(Drafter):
    """Proposes what followed the same tokens earlier: in the same request, in the corpus, or in any request.

    Unless `ngram_shared` is on, a request's text never reaches another request: each has a history of its
    own, made when the request is admitted and dropped when it leaves.
    """

    def __init__(self, config: NgramConfig, plan: DraftPlan, ctx: DraftContext) -> None:
        super().__init__(config, plan, ctx)
        self._store: Store | None = Store(
            slots=ctx.slots,
            nodes=plan.nodes,
            bytes=config.ngram_store_mb << 20,
            max_depth=config.ngram_max_trie_depth,
            min_match=config.ngram_min_match,
            min_breadth=config.ngram_min_bfs_breadth,
            max_breadth=config.ngram_max_bfs_breadth,
            by_count=config.ngram_match_type == "prob",
            min_confidence=config.ngram_min_confidence,
            min_gain=config.ngram_min_gain,
            shared=config.ngram_shared,
            corpus_nodes=min(config.ngram_external_sam_budget, plan.nodes),
        )
        self._requests: dict[int, str] = {}
        self._preempted: dict[str, list[tuple[int, list[int]]]] = {}

    def load(self, target: TargetView) -> None:
        """Read the corpus. Raises UserError, naming file and line, where that is not possible."""
        config, path = self.config, self.config.ngram_external_corpus_path
        if path is None or not self.plan.nodes:
            return
        try:
            for number, tokens in corpus.encoded(path, self.ctx.facts.target.path):
                if not self._open.add_document(tokens):
                    raise UserError(
                        f"ngram_store_mb {config.ngram_store_mb} is full at line {number} of {path};"
                        " raise it (a token takes about 100 bytes) or shorten the corpus"
                    )
        except UserError as error:
            raise UserError(f"{corpus.OPTION}: {error}") from error

    def on_admit(self, request: RequestView) -> None:
        """Start an empty text; the prompt comes through `ingest`."""
        known = 0
        if self.config.ngram_shared:
            self._requests[request.slot] = request.request_id
            known = self._said_before(request)
        self._open.admit(request.slot, known)

    def ingest(self, step: StepView) -> None:
        """Append every row's new tokens to its text."""
        assert step.host is not None, "a host drafter is called with host rows"
        rows = step.host.rows
        self._open.insert([row.slot for row in rows], [row.new_tokens for row in rows])

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Write drafts for the rows with a limit above 0; a row whose text matches nothing has none."""
        assert step.host is not None, "a host drafter is called with host rows"
        rows, host = step.host.rows, cast(HostProposal, out)
        self._open.propose(
            [row.slot for row in rows],
            [min(row.limit, self.plan.nodes) for row in rows],
            min(step.depth, self.plan.depth),
            host.tokens,
            host.parents,
            host.num_valid,
        )

    def on_release(self, slot: int, reason: Any) -> None:
        """Drop the text; where the store is shared, what it said stays there."""
        if self._store is None:
            return
        length, end = self._store.release(slot)
        request = self._requests.pop(slot, None)
        if request is not None and length and reason == "preempted":
            self._preempted.setdefault(request, []).append((length, end))
            if len(self._preempted) > _PREEMPTED:
                del self._preempted[next(iter(self._preempted))]

    def metrics(self) -> Mapping[str, float]:
        """Return lookups, those that found nothing good enough, and what the store holds and has forgotten."""
        if self._store is None:
            return {}
        stats = self._store.stats()
        return {name: float(stats[name]) for name in ("lookups", "declined", "tokens", "forgotten", "bytes")}

    def close(self) -> None:
        """Drop everything."""
        self._store = None

    @property
    def _open(self) -> Store:
        assert self._store is not None, "called after close"
        return self._store

    def _said_before(self, request: RequestView) -> int:
        """Return how many tokens of a request that was preempted the shared history has already."""
        texts = self._preempted.get(request.request_id, [])  # of all its choices
        for text in sorted(texts, reverse=True):
            length, end = text
            if list(request.tokens[length - len(end) : length]) == end:
                texts.remove(text)
                return length
        return 0
