"""Train a draft for a target on chats that the target wrote. See README.md.

    python training/train.py --kind eagle3 --model demo --chats a.npz b.npz --out OUT --seconds 240

Ends by itself within the time, and leaves in OUT the draft that was best on chats it never saw (``config.json``,
``model.safetensors``, its figures in ``figures.json``), and what a run with ``--resume`` goes on from (``state.pt``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import chats
import target
import torch
from chats import Batch
from draft import Draft
from kinds import KINDS
from measure import Sums, measure
from options import at_least, share

from specplug import UserError
from specplug.models.store import local_model

_STATE = "state.pt"


def held_out(draft: Draft, tests: Sequence[chats.Chat], args: Any) -> dict[str, Any]:
    """Return the figures on chats that were not trained on."""
    sums = Sums.zero(draft.depth, args.device)
    random = torch.Generator().manual_seed(args.seed)  # the same rows each time
    for batch in chats.batches(tests, args.tokens):
        picked = draft.pick(batch, random)
        moved = batch.to(args.device)
        reading = target.read(draft.target, moved, draft.reads)
        sums.add(measure(draft, moved, reading, picked, draft.depth))
    return sums.figures()


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
    source = local_model(args.model, needs_tokenizer=False)
    model = target.load(args.model, dtype=args.dtype, device=args.device)
    known, tests = chats.split(chats.read(args.chats, args.limit, args.cut), args.test_one_in)
    tests = chats.capped(tests)
    if not known or not tests:
        raise UserError(f"--chats, --limit: {len(known)} chats to train on and {len(tests)} to test on; give more")
    draft = KINDS[args.kind].begin(model, known, args).to(args.device)
    # The file that is carried and the file that is gone on from are one run: its schedule is that of all its parts.
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=args.device.type == "cuda"
    )
    step, before = 0, 0.0
    best: dict[str, Any] = {"length": 0.0}
    if args.resume:
        state = read_state(args)
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        step, before, best = state["step"], state["seconds"], state["best"]
    whole = args.total_seconds or before + args.seconds
    random = torch.Generator().manual_seed(args.seed + step)

    rows = sum(len(chat.tokens) - chat.prompt - 2 for chat in known)
    print(f"{len(known)} chats with {rows} rows to train on, {len(tests)} to test on; {args.device}, {args.dtype}")
    print(f"ready after {time.monotonic() - begun:.1f} s; step {step}, {before:.0f} s of {whole:.0f} s trained before")
    sums, said, done = Sums.zero(draft.trained, args.device), time.monotonic(), 0

    def save() -> None:
        nonlocal best
        figures = held_out(draft, tests, args)
        print(f"held out after step {step}: {json.dumps(figures)}", flush=True)
        if figures["length"] >= best["length"]:
            best = {**figures, "step": step}
            draft.save(args.out, source)
            (args.out / "figures.json").write_text(json.dumps(best, indent=2) + "\n", encoding="utf-8")
        write_state(args, draft, optimizer, best, step, before + time.monotonic() - begun)

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
        picked = draft.pick(batch, random)
        moved = batch.to(args.device)
        optimizer.zero_grad(set_to_none=True)
        reading = target.read(model, moved, draft.reads)
        seen = measure(draft, moved, reading, picked, draft.trained, learn=True)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        sums.add(seen)
        step, done = step + 1, done + batch.tokens.numel()
        if step % 8 == 0 or args.device.type == "cpu":
            float(seen.loss[0])  # wait, so that the clock above sees what was done
        if now - said > args.every:
            told = sums.figures()
            speed = done / (time.monotonic() - first)
            print(f"{now - begun:6.1f} s, step {step}, {speed:.0f} tokens/s: {json.dumps(told)}", flush=True)
            sums, said = Sums.zero(draft.trained, args.device), now
        if now - saved > args.save_every:
            save()
            saved = time.monotonic()
    save()
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device.type == "cuda" else 0.0
    print(f"{time.monotonic() - begun:.1f} s, step {step}, peak {peak:.1f} GB; kept: {json.dumps(best)}")
    return best


def read_state(args: Any) -> dict[str, Any]:
    """Return what a run with `args` goes on from."""
    path = args.out / _STATE
    if not path.is_file():
        raise UserError(f"--resume: there is no {path}; leave it out to begin anew")
    state: dict[str, Any] = torch.load(path, map_location=args.device, weights_only=True)
    if (kind := state.get("kind", "eagle3")) != args.kind:
        raise UserError(f"--resume: {path} is of --kind {kind}, and {args.kind} is asked for; give it another --out")
    return state


def write_state(
    args: Any, draft: Draft, optimizer: torch.optim.Optimizer, best: dict[str, Any], step: int, seconds: float
) -> None:
    """Write what a resumed run needs; the file is whole or the one before."""
    args.out.mkdir(parents=True, exist_ok=True)
    partial = args.out / f"{_STATE}.partial"
    state = {"kind": args.kind, "draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "best": best, "step": step, "seconds": seconds}, partial)
    partial.replace(args.out / _STATE)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Options of other kinds are refused, those of `kind` get its defaults."""
    parser = argparse.ArgumentParser(description="Train a draft on chats that the target wrote.")
    add = parser.add_argument
    add("--kind", choices=tuple(KINDS), default="eagle3", help="what is trained [eagle3]")
    add("--model", default="demo", help="folder, .gguf file or 'demo'")
    add("--chats", nargs="+", type=Path, required=True, metavar="FILE.npz")
    add("--out", type=Path, required=True, help="folder of the draft")
    add("--seconds", type=float, default=240.0, help="this run ends within so many seconds")
    add("--total-seconds", type=float, help="length of the schedule, where --resume runs follow")
    add("--most-steps", type=int, help="end after so many steps in all")
    add("--resume", action="store_true", help="go on from the state in --out")
    add("--tokens", type=int, default=16384, help="tokens in a batch, padding counted")
    add("--lr", type=float, default=2e-3)
    add("--warm", type=int, default=50, help="steps until the full learning rate")
    add("--limit", type=int, help="use only so many chats of each file")
    add("--cut", type=at_least(1), help="use only so many tokens of each chat")
    add("--test-one-in", type=int, default=chats.TEST_ONE_IN, help="prompts, of which one is tested on")
    add("--seed", type=int, default=0)
    add("--save-every", type=float, default=60.0, help="seconds between two tests on held-out chats; the best is kept")
    add("--every", type=float, default=10.0, help="seconds between two lines of progress")
    add("--device", type=torch.device, help="[cuda where there is one]")
    add("--dtype", choices=("float32", "bfloat16"), help="of the target [bfloat16 on cuda, else float32]")
    own = parser.add_argument_group("options of some kinds").add_argument
    own("--rows", type=at_least(1), help="rows of the draft's vocabulary (eagle3) [4096]")
    own("--at", nargs="+", type=at_least(0), help="boundaries that are read (eagle3 [2, n/2, n-3 of n layers], dflash)")
    own("--steps", type=at_least(1), help="steps drafted (eagle3 [5], mtp [3]); counted only: standalone [5]")
    own("--layers", type=at_least(1), help="layers of the draft (dflash [2], standalone [3])")
    own("--block", type=at_least(2), help="tokens of a block, the anchor included (dflash) [8]")
    own("--mask", type=at_least(0), help="id that stands for what is not known (dflash) [the chats' rarest]")
    own("--anchors", type=share, help="share of the answers' tokens that begin a block in a batch (dflash) [0.25]")
    args = parser.parse_args(words)
    takes = KINDS[args.kind].takes
    for name in dict.fromkeys(name for kind in KINDS.values() for name in kind.takes):
        if getattr(args, name) is None:
            setattr(args, name, takes.get(name))
        elif name not in takes:
            listed = ", ".join(f"--{each}" for each in takes)
            parser.error(f"--{name}: --kind {args.kind} has no such option; it has {listed}")
    args.device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.device.type == "cpu" and args.dtype == "bfloat16":
        parser.error("--dtype bfloat16: on the CPU drafts are trained in float32 alone; leave it out")
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device.type == "cuda" else "float32"))
    return args


if __name__ == "__main__":
    try:
        train(arguments())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
