"""frozen-device: one layer of attention over KV of its own. R rows, T tokens, H hidden size."""

import torch
from torch import Tensor, nn

from specplug import Arena, Drafter, GraphRecorder, Proposal, StepView, TargetView
from specplug.layers import Linear, RMSNorm
from specplug_frozen.plugin import WIDTH


class Layer(nn.Module):
    """What the checkpoint holds."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, 1e-5, dtype=dtype, device=device)
        self.qkv = Linear(hidden, 3 * WIDTH, dtype=dtype, device=device)
        self.o = Linear(WIDTH, hidden, dtype=dtype, device=device)


class DeviceDrafter(Drafter):
    """KV row i is made of the target's state at token i and of token i + 1."""

    def load(self, target: TargetView) -> None:
        """Load the layer; share the target's embedding and head."""
        assert self.ctx.parallel.size == 1
        assert dict(target.config) == dict(self.ctx.facts.target.config)
        hidden = target.config["hidden_size"]
        self.layer = Layer(hidden, self.ctx.dtype, self.ctx.device)
        names = [name for name, _ in self.ctx.weights("draft", "layer.")]
        assert sorted(names) == ["layer.norm.weight", "layer.o.weight", "layer.qkv.weight"]
        self.ctx.load(self.layer, "draft", lambda name: name.removeprefix("layer."), prefix="layer.")
        self.embed, self.head = target.borrow("embed_tokens"), target.borrow("lm_head")
        self.hidden = hidden

    def allocate(self, arena: Arena) -> None:
        """Take a state per slot, and say how KV is read."""
        self.kv = arena.draft_kv()
        self.rows = self.kv.pattern("rows", None)
        self.steps = [self.kv.pattern(f"step {at}", 1, "causal", offset=at) for at in range(self.plan.depth)]
        self.state = arena.per_slot("state", (self.hidden,), torch.float32)
        self.scale = arena.static("scale", (1,), torch.float32, fill=1.0)

    def capture(self, graphs: GraphRecorder) -> None:
        """Record both halves."""
        self.read = graphs.record("read", self._read, over="rows_x_width")
        self.draft = graphs.record("draft", self._draft, variants=range(1, self.plan.depth + 1))

    def ingest(self, step: StepView) -> None:
        """Write KV for what was kept."""
        self.read(step, None, None)

    def propose(self, step: StepView, out: Proposal) -> None:
        """Draft as deep as is wanted."""
        depth = min(step.depth, self.plan.depth)
        if depth:
            self.draft(step, out, depth)

    def _read(self, step: StepView, out: Proposal | None, variant: object) -> None:
        x = step.taps[0] + self.embed(step.shifted())
        q, k, v = self._qkv(x)
        self.kv.write(0, k, v)
        x = x + self._o(self.kv.attend(self.rows, 0, q))
        self.state[step.slots] = x[step.last_kept()].float()

    def _draft(self, step: StepView, out: Proposal | None, depth: int) -> None:
        state = self.state[step.slots].to(self.ctx.dtype)
        for node in range(depth):
            logits = self.head(self.layer.norm(state)) * self.scale
            if self.config.draft_sampling:
                token = out.draw(step, node + 1, logits)
            else:
                token = logits.argmax(-1)
                out.tokens[step.slots, node] = token
            if node + 1 < depth:
                x = state + self.embed(token)
                q, k, v = self._qkv(x)
                self.kv.write(0, k, v, (step.kv_len + node)[:, None])
                state = x + self._o(self.kv.attend(self.steps[node], 0, q))
        out.num_valid[step.slots] = out.limit[step.slots].clamp(max=depth)

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[:, None] for part in self.layer.qkv(self.layer.norm(x)).split(WIDTH, -1))

    def _o(self, read: Tensor) -> Tensor:
        return self.layer.o(read.flatten(1))
