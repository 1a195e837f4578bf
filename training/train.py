"""Train a draft for a target on chats that the target wrote. See README.md.

    python training/train.py --model demo --chats a.npz b.npz --out OUT --seconds 240

Ends by itself within the time, and leaves in OUT the draft that was best on chats it never saw (``config.json``,
``model.safetensors``, its figures in ``figures.json``), and what a run with ``--resume`` goes on from (``state.pt``).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chats
import target
import torch
from chats import Batch
from eagle3 import Eagle3
from torch import Tensor

from specplug.models.decoder import Decoder

_DECAY = 0.8
"""Weight of each step's loss relative to that of the step before."""
_STATE = "state.pt"


@dataclass(slots=True)
class Sums:
    """Loss and accuracy summed over rows, for each step; float64 [steps] on the device."""

    loss: Tensor
    right: Tensor
    """Rows whose draft of this step and of all before are what the target finds likeliest."""
    tried: Tensor
    """Rows right up to the step before, of those that the chat does not end before."""
    rows: Tensor

    @classmethod
    def zero(cls, steps: int, device: torch.device) -> Sums:
        """Return sums of nothing."""
        return cls(*(torch.zeros(steps, dtype=torch.float64, device=device) for _ in range(4)))

    def add(self, other: Sums) -> None:
        """Add `other` in place."""
        self.loss += other.loss
        self.right += other.right
        self.tried += other.tried
        self.rows += other.rows

    def figures(self) -> dict[str, Any]:
        """Return by depth the loss, and the share of right drafts among the rows that were right up to there; and the
        length of text that a chain of all steps would be good for on average, begun at every token alike."""

        def shares(part: Tensor, whole: Tensor) -> list[float]:
            return [round(each, 4) for each in (part / whole.clamp(min=1)).tolist()]

        loss, accepted = shares(self.loss, self.rows), shares(self.right, self.tried)
        drafted = sum(math.prod(accepted[:depth]) for depth in range(1, len(accepted) + 1))
        return {"loss": loss, "accepted": accepted, "length": round(1 + drafted, 4)}


def measure(draft: Eagle3, reading: target.Reading, batch: Batch, steps: int) -> tuple[Tensor, Sums]:
    """Return the loss to be reduced, and the sums of every step.

    A row's loss is minus the sum over the draft's vocabulary of p log q: what of p lies outside cannot be drafted, and
    counts for nothing.
    """
    device = batch.tokens.device
    sums, total = Sums.zero(steps, device), torch.zeros((), device=device)
    so_far = torch.ones(len(batch.rows), dtype=torch.bool, device=device)
    weights = 0.0
    for step, logits in enumerate(draft.steps(batch, reading, steps)):
        # `step` rows on stands the same token of the same chat; where the chat has ended, nothing counts.
        here = batch.left >= step
        p = reading.log_p.roll(-step, 0).float().exp()
        wide = logits.float()
        each = p.sum(-1) * wide.logsumexp(-1) - (p * wide).sum(-1)
        count = here.sum()
        loss = (each * here).sum()
        total = total + _DECAY**step * loss / count.clamp(min=1)
        weights += _DECAY**step
        tried = so_far & here
        so_far = tried & (draft.ids[logits.detach().argmax(-1)] == reading.best.roll(-step))
        sums.loss[step], sums.right[step], sums.rows[step] = loss.detach(), so_far.sum(), count
        sums.tried[step] = tried.sum()
    return total / weights, sums


def held_out(read: Callable[[Batch], target.Reading], draft: Eagle3, tests: Sequence[chats.Chat], args: Any) -> Any:
    """Return the figures on chats that were not trained on."""
    sums = Sums.zero(args.steps, args.device)
    with torch.no_grad():
        for batch in chats.batches(tests, args.tokens):
            moved = batch.to(args.device)
            with precision(args):
                sums.add(measure(draft, read(moved), moved, args.steps)[1])
    return sums.figures()


def precision(args: Any) -> torch.autocast:
    """Return the context that products are computed in: bfloat16 on CUDA, as they come elsewhere."""
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type == "cuda")


def epochs(found: Sequence[chats.Chat], tokens: int, seed: int) -> Iterator[Batch]:
    """Yield batches for ever, every chat once an epoch."""
    while True:
        yield from chats.batches(found, tokens, seed)
        seed += 1


def rate(progress: float, step: int, warm: int) -> float:
    """Return the share of the learning rate: up over `warm` steps, then down as a cosine, to 2 % at progress 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / warm) * (0.02 + 0.98 * cosine)


def train(args: Any) -> dict[str, Any]:
    """Train as `args` say, and return the figures."""
    begun = time.monotonic()
    torch.manual_seed(args.seed)
    model = target.load(args.model, dtype=args.dtype, device=args.device)
    known, tests = chats.split(chats.read(args.chats, args.limit), args.test_one_in)
    if not known or not tests:
        raise SystemExit(f"--chats, --limit: {len(known)} chats to train on and {len(tests)} to test on; give more")
    draft, at = made(args, model, known)
    # The file that is carried and the file that is gone on from are one run: its schedule is that of all its parts.
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=args.device.type == "cuda"
    )
    step, before = 0, 0.0
    best: dict[str, Any] = {"length": 0.0}
    if args.resume:
        state = torch.load(args.out / _STATE, map_location=args.device, weights_only=True)
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        step, before, best = state["step"], state["seconds"], state["best"]
    whole = args.total_seconds or before + args.seconds

    def read(batch: Batch) -> target.Reading:
        with torch.autocast(args.device.type, enabled=False):
            return target.read(model, batch, at, draft.ids)

    rows = sum(len(chat.tokens) - chat.prompt - 2 for chat in known)
    print(f"{len(known)} chats with {rows} rows to train on, {len(tests)} to test on; {args.device}, {args.dtype}")
    print(f"ready after {time.monotonic() - begun:.1f} s; step {step}, {before:.0f} s of {whole:.0f} s trained before")
    sums, said, done = Sums.zero(args.steps, args.device), time.monotonic(), 0

    def save() -> None:
        nonlocal best
        figures = held_out(read, draft, tests, args)
        print(f"held out after step {step}: {json.dumps(figures)}", flush=True)
        if figures["length"] >= best["length"]:
            best = {**figures, "step": step}
            draft.save(args.out)
            (args.out / "figures.json").write_text(json.dumps(best, indent=2) + "\n", encoding="utf-8")
        write_state(args.out, draft, optimizer, best, step, before + time.monotonic() - begun)

    # Time to test and to write: measured by doing both once.
    saved = time.monotonic()
    save()
    reserve = 2 * (time.monotonic() - saved) + 2
    first = saved = time.monotonic()
    for batch in epochs(known, args.tokens, args.seed + step):
        now = time.monotonic()
        if now - begun > args.seconds - reserve or (args.most_steps and step >= args.most_steps):
            break
        progress = (before + now - begun) / (whole - reserve)
        if args.most_steps:
            progress = max(progress, step / args.most_steps)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(progress, step, args.warm)
        moved = batch.to(args.device)
        with precision(args):
            loss, seen = measure(draft, read(moved), moved, args.steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        sums.add(seen)
        step, done = step + 1, done + batch.tokens.numel()
        if step % 8 == 0 or args.device.type == "cpu":
            float(loss.detach())  # wait, so that the clock above sees what was done
        if now - said > args.every:
            told = sums.figures()
            speed = done / (time.monotonic() - first)
            print(f"{now - begun:6.1f} s, step {step}, {speed:.0f} tokens/s: {json.dumps(told)}", flush=True)
            sums, said = Sums.zero(args.steps, args.device), now
        if now - saved > args.save_every:
            save()
            saved = time.monotonic()
    save()
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device.type == "cuda" else 0.0
    print(f"{time.monotonic() - begun:.1f} s, step {step}, peak {peak:.1f} GB; kept: {json.dumps(best)}")
    return best


def made(args: Any, model: Decoder, known: Sequence[chats.Chat]) -> tuple[Eagle3, tuple[int, ...]]:
    """Return the draft at its beginning, and the boundaries that it reads."""
    layers = len(model.kv_layers)
    at = tuple(args.at) if args.at else (2, layers // 2, layers - 3)
    ids = chats.frequent(known, args.rows, model.vocab_size)
    print(f"boundaries {at}; {len(ids)} draft ids cover {coverage(known, ids):.4f} of the answers")
    return Eagle3(model, ids, at).to(args.device), at


def coverage(found: Sequence[chats.Chat], ids: Tensor) -> float:
    """Return the share of the answers' tokens that are among `ids`."""
    known = set(ids.tolist())
    answers = [token for chat in found for token in chat.tokens[chat.prompt :].tolist()]
    return sum(token in known for token in answers) / max(1, len(answers))


def write_state(
    out: Path, draft: Eagle3, optimizer: torch.optim.Optimizer, best: dict[str, Any], step: int, seconds: float
) -> None:
    """Write what a resumed run needs; the file is whole or the one before."""
    partial = out / f"{_STATE}.partial"
    state = {"draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "best": best, "step": step, "seconds": seconds}, partial)
    partial.replace(out / _STATE)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head on chats that the target wrote.")
    add = parser.add_argument
    add("--model", default="demo", help="folder, .gguf file or 'demo'")
    add("--chats", nargs="+", type=Path, required=True, metavar="FILE.npz")
    add("--out", type=Path, required=True, help="folder of the draft")
    add("--seconds", type=float, default=240.0, help="this run ends within so many seconds")
    add("--total-seconds", type=float, help="length of the schedule, where --resume runs follow")
    add("--most-steps", type=int, help="end after so many steps in all")
    add("--resume", action="store_true", help="go on from the state in --out")
    add("--rows", type=int, default=4096, help="rows of the draft's vocabulary")
    add("--at", nargs="+", type=int, help="boundaries that are read [2, n/2, n-3 of n layers]")
    add("--steps", type=int, default=5, help="steps of the training-time test")
    add("--tokens", type=int, default=32768, help="tokens in a batch, padding counted")
    add("--lr", type=float, default=1e-3)
    add("--warm", type=int, default=50, help="steps until the full learning rate")
    add("--limit", type=int, help="use only so many chats of each file")
    add("--test-one-in", type=int, default=chats.TEST_ONE_IN, help="prompts, of which one is tested on")
    add("--seed", type=int, default=0)
    add("--save-every", type=float, default=60.0, help="seconds between two tests on held-out chats; the best is kept")
    add("--every", type=float, default=10.0, help="seconds between two lines of progress")
    add("--device", type=torch.device, help="[cuda where there is one]")
    add("--dtype", choices=("float32", "bfloat16"), help="of the target [bfloat16 on cuda, else float32]")
    args = parser.parse_args(words)
    args.device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device.type == "cuda" else "float32"))
    return args


if __name__ == "__main__":
    train(arguments())
