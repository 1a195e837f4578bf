"""The drafter. It is imported only when its algorithm is selected."""

from collections.abc import Sequence

from specplug import Arena, Drafter, HostProposal, Proposal, RequestView, StepView


class LookbackDrafter(Drafter):
    """A chain of what followed the last tokens the time before."""

    def allocate(self, arena: Arena) -> None:
        """Take what is needed for all requests; memory of a device would come from `arena`."""
        self.texts: dict[int, list[int]] = {}

    def on_admit(self, request: RequestView) -> None:
        """A request got a slot. Its prompt comes through `ingest`."""
        self.texts[request.slot] = []

    def ingest(self, step: StepView) -> None:
        """Read the tokens that are final now."""
        assert step.host is not None
        for row in step.host.rows:
            self.texts[row.slot].extend(row.new_tokens)

    def propose(self, step: StepView, out: Proposal | HostProposal) -> None:
        """Draft at most `row.limit` tokens for each row."""
        assert step.host is not None
        assert isinstance(out, HostProposal)
        for row in step.host.rows:
            if row.limit:
                out.set(row.slot, self.guess(self.texts[row.slot], row.limit))

    def guess(self, text: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow `text`; none declines."""
        words = self.config.lookback_words
        last = list(text[-words:])
        for end in range(len(text) - 1, words - 1, -1):
            if list(text[end - words : end]) == last:
                return text[end : end + most]
        return ()
