"""The core's own host time per decode step, by batch: a model that costs nothing, and no drafter.

    python benchmarks/host_time.py [--vocab 49152] [--prompt 128] [--steps 200] [--profile FILE]

All but the stage `forward` is the core's: schedule, plan, accept, commit, and `other`, which is what the
step's wall time holds beside them (deltas, release, records). `accept` includes an argmax over the vocabulary
per row. The goal: under 1.5 ms at batch 8, on a CPU.
"""

import argparse
import cProfile
import os
import statistics
from collections.abc import Sequence
from time import perf_counter

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import torch
from torch import Tensor

from specplug import Engine
from specplug.bench.figures import STAGES
from specplug.bench.host import QUIET_LOAD, describe
from specplug.models.base import ForwardBatch, KVGeometry, TargetModel
from specplug.models.target import Target
from specplug.registry import Registry
from specplug.spec import Checkpoint

SIZES = (1, 2, 4, 8, 16, 64)


class InstantModel(TargetModel):
    """Hidden states and logits are views of ready tensors; token 0 is always the likeliest."""

    def __init__(self, vocab: int, most: int) -> None:
        """`most`: rows of the largest batch."""
        super().__init__()
        self.vocab_size, self.hidden_size, self.max_position = vocab, 1, 8192
        self.kv_layers = (KVGeometry(kv_heads=1, k_dim=1, v_dim=1, q_heads=1),)
        self.config = {"model_type": "instant", "vocab_size": vocab}
        self._hidden = torch.zeros(1, 1)
        self._logits = torch.zeros(most, vocab)
        self._logits[:, 0] = 1.0

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return zeros [T, 1]."""
        return self._hidden.expand(len(batch.tokens), 1), ()

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the same logits [M, V] for every row, in `out` where given."""
        logits = self._logits[: len(hidden)]
        return logits if out is None else out.copy_(logits)


def measure(engine: Engine, size: int, prompt: int, steps: int, profile: cProfile.Profile | None) -> dict[str, float]:
    """Return the median milliseconds per decode step, by stage, and ``total`` without the forward."""
    options = {"temperature": 0, "max_tokens": steps + 200, "ignore_eos": True}
    requests = [engine.submit([row % engine.target.model.vocab_size] * prompt, options) for row in range(size)]
    while not all(request.output.ids for request in requests):
        engine.step()
    for _ in range(10):
        engine.step()
    found: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "total")}
    if profile:
        profile.enable()
    for _ in range(steps):
        begin = perf_counter()
        engine.step()
        wall = perf_counter() - begin
        stats = engine.last_step
        assert stats is not None
        assert stats.rows == size
        seconds = {**dict.fromkeys(STAGES, 0.0), **stats.seconds}
        seconds["other"] = wall - sum(stats.seconds.values())
        seconds["total"] = wall - seconds["forward"]
        for stage, spent in seconds.items():
            found[stage].append(1e3 * spent)
    if profile:
        profile.disable()
    for request in requests:
        engine.abort(request)
    return {stage: statistics.median(each) for stage, each in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line per batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens per row")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", metavar="FILE", help="write a cProfile of the measured steps (slows them)")
    options = parser.parse_args(argv)
    host = describe({})
    load = host["load_average"]
    print(f"{host['date']}, {host['processor']}, {host['cores']} cores, {host['threads']} threads")
    print(", ".join(f"{name} {number}" for name, number in host["versions"].items()))
    print(f"load average {load:.2f}" + (f", above {QUIET_LOAD}: not to be trusted" if load > QUIET_LOAD else ""))
    print(f"vocabulary {options.vocab}, prompts of {options.prompt}, median of {options.steps} steps, milliseconds")
    print("batch  " + "".join(f"{stage:>10}" for stage in (*STAGES, "total")))
    model = InstantModel(options.vocab, max(SIZES)).eval()
    target = Target(model, None, Checkpoint(config=model.config, tensors={}), ())
    profile = cProfile.Profile() if options.profile else None
    for size in SIZES:
        with Engine(target, registry=Registry.discover(), max_running_requests=size) as engine:
            found = measure(engine, size, options.prompt, options.steps, profile)
        print(f"{size:5d}  " + "".join(f"{found[stage]:10.3f}" for stage in (*STAGES, "total")))
    if profile:
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    main()
