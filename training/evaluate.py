"""Whether a trained draft drafts in the engine as it did in training: acceptance by depth, counted in both.

    python training/evaluate.py --model demo --draft OUT --chats a.npz --count 16

The engine answers held-out prompts greedily with the draft. The trainer's own forward then reads these very answers,
and its rounds are played through: as many drafts at each depth, of which as many right. A shift of tokens or positions,
a norm left out or a state recycled wrongly parts the two at the depth where it is; equal numbers at a low level are a
draft that is trained too little. Exit code 1 if they differ by more than `--tolerance` at any depth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chats
import numpy as np
import target
import torch
from chats import Chat
from draft import Draft
from kinds import KINDS, kind_in
from measure import precision
from torch import Tensor

from specplug import Engine, UserError
from specplug.models.decoder import Decoder


def loaded(folder: Path, model: Decoder, device: torch.device) -> Draft:
    """Return the trainer's own module with the saved weights."""
    return KINDS[kind_in(folder)].load(folder, model).to(device)


@torch.no_grad()
def drafts(draft: Draft, model: Decoder, chat: Chat, steps: int, device: torch.device) -> Tensor:
    """Return int64 [R, steps] on the CPU: what every row of the chat drafts in each step, by teacher forcing."""
    batch = chats.together([chat]).to(device)
    reading = target.read(model, batch, draft.reads)
    with precision(device):
        states = draft.states(batch, reading, torch.arange(len(batch.rows), device=device), steps)
        found = [draft.drafted(draft.logits(each)) for each in states]
    return torch.stack(found, 1).cpu()


def rounds(drafted: Tensor, chat: Chat, most: int) -> tuple[list[int], list[int]]:
    """Play the rounds of a greedy chain through; return (drafts compared, drafts right) by depth.

    `drafted` [R, steps], row 0 being the one whose next token begins the answer, which was to have `most` tokens. It
    has fewer if a stop token ended it.
    """
    steps = drafted.shape[1]
    compared, right = [0] * steps, [0] * steps
    tokens, root = chat.tokens, chat.prompt
    while root < len(tokens) - 1:
        accepted = 0
        # As many as are still wanted besides the token that the target adds itself; what a stop token cuts off is not
        # compared.
        for depth in range(min(steps, chat.prompt + most - 2 - root, len(tokens) - 1 - root)):
            compared[depth] += 1
            if int(drafted[root - chat.prompt, depth]) != tokens[root + 1 + depth]:
                break
            right[depth] += 1
            accepted += 1
        root += accepted + 1
    return compared, right


def compare(args: Any) -> bool:
    """Print both counts; return whether they agree."""
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    known, tests = chats.split(chats.read(args.chats, args.limit), args.test_one_in)
    picked = [chat for chat in (known if args.seen else tests) if chat.greedy][: args.count]
    if not picked:
        side = "known" if args.seen else "held-out"
        raise UserError(f"--chats, --limit: no {side} chat is greedy; give more")
    model = target.load(args.model, dtype=dtype, device=device)
    draft = loaded(args.draft, model, device)
    if not 1 <= args.steps <= (draft.longest or args.steps):
        allowed = f"1 to {draft.longest}" if draft.longest else "1 or more"
        raise UserError(f"--steps {args.steps}: the draft in {args.draft} drafts {allowed} tokens; give as many")
    prompts = [chat.tokens[: chat.prompt].tolist() for chat in picked]
    options = draft.engine(args.steps) | {"speculative_draft_model_path": str(args.draft), "device": device.type}
    options["dtype"] = str(dtype).removeprefix("torch.")
    with Engine(args.model, **options) as engine:
        results = engine.generate(prompts, {"temperature": 0, "max_tokens": args.max_tokens})
        report = engine.report()
    compared, right = np.zeros(args.steps, int), np.zeros(args.steps, int)
    for prompt, result in zip(prompts, results, strict=True):
        chat = Chat(np.array(prompt + list(result.ids)), len(prompt), True)
        if len(chat.tokens) < chat.prompt + 2:
            continue
        found = rounds(drafts(draft, model, chat, args.steps, device), chat, args.max_tokens)
        compared, right = compared + found[0], right + found[1]
    print(f"{len(picked)} answers, {report['tokens_per_target_step']:.3f} tokens per target step")
    print("depth   engine: right / compared         trainer: right / compared")
    agreed = True
    for depth in range(args.steps):
        ours = [report[key][depth] if depth < len(report[key]) else 0 for key in ("accepted_at", "reached")]
        theirs = [int(right[depth]), int(compared[depth])]
        shares = [a / max(1, b) for a, b in (ours, theirs)]
        agreed &= abs(shares[0] - shares[1]) <= args.tolerance
        print(
            f"{depth + 1:5}   {ours[0]:6} / {ours[1]:6} = {shares[0]:.4f}      "
            f"{theirs[0]:6} / {theirs[1]:6} = {shares[1]:.4f}"
        )
    print("the engine drafts as the trainer does" if agreed else f"they differ by more than {args.tolerance}")
    return agreed


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare a draft's acceptance in the engine with its trainer's.")
    add = parser.add_argument
    add("--model", default="demo", help="folder, .gguf file or 'demo'")
    add("--draft", type=Path, required=True, help="folder that train.py wrote, of any kind")
    add("--chats", nargs="+", type=Path, required=True, metavar="FILE.npz")
    add("--limit", type=int, help="as train.py was given it")
    add("--test-one-in", type=int, default=chats.TEST_ONE_IN, help="as train.py was given it")
    add("--count", type=int, default=16, help="prompts, of greedy chats that were not trained on")
    add("--seen", action="store_true", help="prompts that were trained on instead")
    add("--max-tokens", type=int, default=128)
    add("--steps", type=int, default=4, help="length of the chain")
    add("--tolerance", type=float, default=0.03, help="most difference of a share, at any depth")
    add("--device", type=torch.device, help="[cuda where there is one]")
    add("--dtype", choices=("float32", "bfloat16"), help="[bfloat16 on cuda, else float32]")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        sys.exit(0 if compare(arguments()) else 1)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
