"""Two sound drafters, and mutants of them that differ in a line or two. What is wrong stands in each docstring."""

from collections.abc import Sequence
from typing import Any

import torch

from specplug import Drafter

# --- the sound drafters ----------------------------------------------------------------------------------------------


class LookBack(Drafter):
    """A host drafter: a chain of what followed the last token the time before."""

    def allocate(self, arena: Any) -> None:
        self.texts: dict[int, list[int]] = {}
        self.asked = 0

    def on_admit(self, request: Any) -> None:
        self.texts[request.slot] = []

    def ingest(self, step: Any) -> None:
        for row in step.host.rows:
            self.texts[row.slot].extend(row.new_tokens)

    def guess(self, text: Sequence[int]) -> list[int]:
        for at in range(len(text) - 2, -1, -1):
            if text[at] == text[-1]:
                return list(text[at + 1 : at + 1 + self.plan.nodes])
        return []

    def propose(self, step: Any, out: Any) -> None:
        self.asked += 1
        for row in step.host.rows:
            if row.limit:
                out.set(row.slot, self.guess(self.texts[row.slot])[: row.limit])


class DenseTable(Drafter):
    """A device drafter: draws a chain through the core from a fixed table of logits."""

    def allocate(self, arena: Any) -> None:
        vocab = self.ctx.facts.target.config["vocab_size"]
        self.table = arena.static("table", (vocab, vocab), torch.float32)
        self.table.copy_(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(5)))

    def propose(self, step: Any, out: Any) -> None:
        token = step.root
        for depth in range(1, min(step.depth, self.plan.depth) + 1):
            token = out.draw(step, depth, self.table[token])
        out.num_valid[step.slots] = out.limit[step.slots]


# --- their mutants ---------------------------------------------------------------------------------------------------


class Silent(LookBack):
    """Proposes nothing."""

    def guess(self, text: Sequence[int]) -> list[int]:
        return []


class IdsOutside(LookBack):
    """Proposes tokens that the vocabulary does not have."""

    def guess(self, text: Sequence[int]) -> list[int]:
        return [token + 1000 for token in super().guess(text)]


class EqualSiblings(LookBack):
    """Proposes one token twice below the root."""

    def propose(self, step: Any, out: Any) -> None:
        for row in step.host.rows:
            if row.limit > 1:
                out.set(row.slot, [1, 1], [-1, -1])


class ForeignWriter(LookBack):
    """Writes its first row's draft into every slot."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        out.tokens[:, 0] = out.tokens[step.host.rows[0].slot, 0]


class ByRow(LookBack):
    """Takes the position in the batch for the request's identity."""

    def propose(self, step: Any, out: Any) -> None:
        texts = [self.texts[slot] for slot in sorted(self.texts)]
        for at, row in enumerate(step.host.rows):
            if row.limit:
                out.set(row.slot, self.guess(texts[at])[: row.limit])


class NeverReset(LookBack):
    """Keeps the text of the request that had the slot before."""

    def on_admit(self, request: Any) -> None:
        self.texts.setdefault(request.slot, [])


class NeighbourSpoiler(LookBack):
    """Drops everybody's text as soon as one row wants no drafts."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        if any(not row.limit for row in step.host.rows):
            for text in self.texts.values():
                text.clear()


class Quitter(LookBack):
    """Drops everybody's text when one request leaves."""

    def on_release(self, slot: int, reason: Any) -> None:
        for text in self.texts.values():
            text.clear()


class StaysShallow(LookBack):
    """Never drafts farther than it was once asked to."""

    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        self.most = self.plan.depth

    def propose(self, step: Any, out: Any) -> None:
        self.most = min(self.most, step.depth)
        super().propose(step, out)

    def guess(self, text: Sequence[int]) -> list[int]:
        return super().guess(text)[: self.most]


class LearnsWhenAsked(LookBack):
    """Brings its state up to date in `propose`, with the newest forward only."""

    def ingest(self, step: Any) -> None:
        pass

    def propose(self, step: Any, out: Any) -> None:
        super().ingest(step)
        super().propose(step, out)


class ForgetsChunks(LookBack):
    """Leaves out short chunks of a prompt."""

    def ingest(self, step: Any) -> None:
        for row, final in zip(step.host.rows, step.final.tolist(), strict=True):
            if final or len(row.new_tokens) > 4:
                self.texts[row.slot].extend(row.new_tokens)


class MissesLastAccepted(LookBack):
    """Off by one after a forward in which all drafts were accepted."""

    def ingest(self, step: Any) -> None:
        for row in step.host.rows:
            known = self.texts[row.slot]
            verify = known and len(row.new_tokens) == 4
            known.extend(row.new_tokens[1:] if verify else row.new_tokens)


class KeepsRejected(LookBack):
    """Reads every processed token, rejected drafts included."""

    def ingest(self, step: Any) -> None:
        for at, row in enumerate(step.host.rows):
            own = step.tokens[step.row_start[at] : step.row_start[at + 1]].tolist()
            known = self.texts[row.slot]
            known.extend([*own[1:], row.new_tokens[-1]] if known else [*own, row.new_tokens[-1]])


class PreemptionBlind(LookBack):
    """Takes the text of a request that comes back for one that was read before."""

    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        self.names: dict[int, str] = {}
        self.read: set[str] = set()

    def on_admit(self, request: Any) -> None:
        super().on_admit(request)
        self.names[request.slot] = request.request_id

    def on_release(self, slot: int, reason: Any) -> None:
        if reason == "preempted":
            self.read.add(self.names[slot])

    def ingest(self, step: Any) -> None:
        for row in step.host.rows:
            if self.names[row.slot] not in self.read:
                self.texts[row.slot].extend(row.new_tokens)


class TakesTooMuch(LookBack):
    """Takes memory that its plan does not mention."""

    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        arena.static("more", (64,), torch.float32)


class TakesByWidth(LookBack):
    """Declares the memory of its default width, and takes what the width at hand needs."""

    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        arena.static("drafts", (self.plan.nodes,), torch.float32)


class Asking(DenseTable):
    """Waits for the device to learn whether anything is wanted."""

    def propose(self, step: Any, out: Any) -> None:
        if step.root.max() >= 0:
            super().propose(step, out)


class Reading(DenseTable):
    """Reads the roots without an operation."""

    def propose(self, step: Any, out: Any) -> None:
        step.root.tolist()
        super().propose(step, out)


class Picking(DenseTable):
    """Indexes by a mask, whose result has a length that only the device knows."""

    def propose(self, step: Any, out: Any) -> None:
        out.num_valid[step.slots[step.final]] = 0
        super().propose(step, out)


class Copying(DenseTable):
    """Makes a tensor of Python's numbers in every step."""

    def propose(self, step: Any, out: Any) -> None:
        torch.tensor([1, 2])
        super().propose(step, out)


class NoScratchRow(DenseTable):
    """Keeps something for each slot, and nothing for the one of pad rows."""

    def propose(self, step: Any, out: Any) -> None:
        step.kv_len + torch.zeros(self.ctx.slots, dtype=torch.int64)[step.slots]
        super().propose(step, out)


class OnTheHost(DenseTable):
    """Makes a tensor on the CPU, wherever the engine runs."""

    def propose(self, step: Any, out: Any) -> None:
        step.kv_len + torch.zeros(len(step.slots), dtype=torch.int64)
        super().propose(step, out)


class Truncating(DenseTable):
    """Drops a draft by its own probability: what exists no longer follows q."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        q = torch.softmax(self.table[step.root] / step.sampling.temperature.clamp_min(0.1).unsqueeze(1), 1)
        drawn = out.tokens[step.slots, 0]
        likely = q.gather(1, drawn.unsqueeze(1)).squeeze(1) > 0.05
        out.num_valid[step.slots] *= likely


class LyingQ(DenseTable):
    """Reports another distribution than the one it drew from."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        if out.q is not None:
            out.q[step.slots] = out.q[step.slots].roll(1, -1)


class Global(LookBack):
    """Keeps its state on the class, where every engine of the process finds it."""

    shared: Any = {}  # noqa: RUF012 (the fault)

    def allocate(self, arena: Any) -> None:
        super().allocate(arena)
        self.texts = Global.shared


class Raising(LookBack):
    """Raises when it has been asked a few times."""

    def propose(self, step: Any, out: Any) -> None:
        super().propose(step, out)
        if self.asked > 3:
            raise RuntimeError("a mutant")
