"""The host commit: what a row's outcome does to its request. Lengths, output, stop rules and ledger, nothing else.

The next step needs lengths, output and whether the answer ends. What is only told about them is left to
`Request.count`, for when the device has that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

from specplug import tree
from specplug.accept import Verdict
from specplug.errors import Blame
from specplug.runtime.logprobs import TokenLogprob
from specplug.runtime.request import Draft
from specplug.runtime.scheduler import Row


class Outcome(NamedTuple):
    """What became of one row that ended in a sampled token. Set by the executor, once the host may know."""

    verdict: Verdict
    draft: Draft | None
    """The drafts that were verified; None if there were none."""
    logprobs: Sequence[TokenLogprob] = ()
    """One entry per token of the verdict, if the request asked for them."""

    @property
    def tokens(self) -> list[int]:
        """The row's output: accepted drafts, then the token that follows unless none could be chosen."""
        found = [self.draft.tokens[node] for node in self.verdict.path] if self.draft else []
        return found if self.verdict.error else [*found, self.verdict.token]

    @property
    def corrected(self) -> bool:
        """Whether the verdict's own token took the place of drafts: some stood below what was accepted."""
        path = self.verdict.path
        return self.draft is not None and (path[-1] if path else -1) in self.draft.parents


def commit(row: Row, outcome: Outcome | None) -> int:
    """Apply one row's outcome to its request; None: a prompt chunk that is not the last.

    Returns how many of the row's own tokens are output; a stop string may take back earlier ones too.
    """
    request = row.request
    decoding = bool(request.output.ids) and len(row.tokens) == 1
    request.drafted, request.draft = 0, None
    if outcome is None:
        request.kv_len = row.start + len(row.tokens)
        request.ledger.prefill_forwards += 1
        return 0
    verdict = outcome.verdict
    request.kv_len = row.start + len(row.tokens) + len(verdict.path)
    before = len(request.output.ids)
    tokens = outcome.tokens
    if outcome.logprobs:
        entries = enumerate(zip(tokens, outcome.logprobs, strict=True), 1)
        count = next((at for at, (token, entry) in entries if not request.output.commit(token, entry)), len(tokens))
    else:
        count = request.output.extend(tokens)
    del tokens[count:]
    request.tokens += tokens
    request.committed = monotonic()
    if request.processors:
        for token in tokens:
            request.processors.commit(token)
    error = verdict.error
    blame: Blame = "request"
    if request.grammar:
        request.grammar.commit(tokens)
        if request.grammar.error:
            error, blame = request.grammar.error, request.grammar.blame
    if error and request.output.finish_reason is None:  # unless a stop rule ended the answer before
        request.error, request.blame = error, blame
        request.output.end("error")
    kept = max(0, len(request.output.ids) - before)
    if not decoding:
        request.ledger.prefill_forwards += 1
        request.ledger.returned += kept if before else 0
    request.uncounted.append(partial(_count, row, outcome, count, kept, decoding))
    return kept


def _count(row: Row, outcome: Outcome, count: int, kept: int, decoding: bool) -> None:
    """Note of the row's first `count` tokens what they were, and the round in the ledger."""
    request, draft, path, corrected = row.request, outcome.draft, outcome.verdict.path, outcome.corrected
    accepted = min(len(path), count)
    request.depths += range(1, accepted + 1)
    request.corrected += [False] * accepted
    if count > accepted:  # the token that follows the drafts
        request.depths.append(0)
        request.corrected.append(corrected)
    if not decoding:
        return
    ledger, wanted = request.ledger, row.asked.decision.depth if row.asked.limit else 0
    if draft is None:
        ledger.add_round(0, 0, 0, depth=wanted)
        return
    # What lies beyond a cut answer's end was never compared.
    end = len(draft.tokens) if kept > len(path) else kept
    if tree.is_chain(draft.parents):
        offered = deepest = min(len(draft.tokens), end)
    else:
        levels = [depth for depth in tree.depths(draft.parents) if depth <= end]
        offered, deepest = len(levels), max(levels, default=0)
    # The walk compared one level below what it accepted, if drafts stood there and the answer went on.
    ledger.add_round(offered, deepest, min(len(path) + corrected, kept), depth=wanted)
