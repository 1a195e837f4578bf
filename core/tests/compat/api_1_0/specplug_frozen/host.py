"""frozen-host: a tree of two chains."""

from collections.abc import Mapping, Sequence

from specplug import Arena, Drafter, HostProposal, RequestView, StepView


class HostDrafter(Drafter):
    """Reads kept tokens as numbers."""

    def allocate(self, arena: Arena) -> None:
        """Begin with nothing."""
        self.texts: dict[int, list[int]] = {}
        self.rounds = 0
        self.closed = False

    def on_admit(self, request: RequestView) -> None:
        """Begin a text."""
        assert request.request_id
        assert len(request.tokens) > 0
        assert request.sampling.temperature >= 0
        self.texts[request.slot] = []

    def ingest(self, step: StepView) -> None:
        """Read on."""
        for row in step.host.rows:
            self.texts[row.slot].extend(row.new_tokens)
            assert row.seq_len == len(self.texts[row.slot])

    def propose(self, step: StepView, out: HostProposal) -> None:
        """Draft what followed the newest match, and beside it the first token after another."""
        self.rounds += 1
        for row in step.host.rows:
            found = self._found(self.texts[row.slot])
            if not row.limit or not found:
                continue
            chain = found[0][: min(row.limit, step.depth)]
            parents = list(range(-1, len(chain) - 1))
            others = [other[0] for other in found if other[0] != chain[0]]
            if others and len(chain) < row.limit:
                chain, parents = [*chain, others[0]], [*parents, -1]
            out.set(row.slot, chain, parents)

    def on_release(self, slot: int, reason: str) -> None:
        """Forget the text."""
        assert reason in ("finished", "preempted", "aborted", "failed")
        del self.texts[slot]

    def metrics(self) -> Mapping[str, float]:
        """Count rounds."""
        return {"frozen_rounds": float(self.rounds)}

    def close(self) -> None:
        """May be called twice."""
        self.closed = True

    def _found(self, text: Sequence[int]) -> list[list[int]]:
        """Return what followed earlier matches, the newest first."""
        match = self.config.frozen_match
        last = list(text[-match:])
        ends = range(len(text) - 1, match - 1, -1)
        return [list(text[end:]) for end in ends if list(text[end - match : end]) == last]
