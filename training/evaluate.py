"""Whether a trained head drafts in the engine as it did in training: acceptance by depth, counted in both.

    python training/evaluate.py --model demo --draft OUT --chats a.npz --count 16

The engine answers held-out prompts greedily with the draft. The trainer's own forward then reads these very answers,
and its rounds are played through: as many drafts at each depth, of which as many right. A shift of tokens or positions,
a norm left out or a state recycled wrongly parts the two at the depth where it is; equal numbers at a low level are a
draft that is trained too little. Exit code 1 if they differ by more than `--tolerance` at any depth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chats
import numpy as np
import target
import torch
from chats import Chat
from eagle3 import Eagle3
from safetensors.torch import load_file
from torch import Tensor

from specplug import Engine
from specplug.models.decoder import Decoder


def loaded(folder: Path, model: Decoder, device: torch.device) -> Eagle3:
    """Return the trainer's own module with the saved weights."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    ids = tensors.pop("d2t") + torch.arange(config["draft_vocab_size"])
    del tensors["t2d"]
    draft = Eagle3(model, ids, config["eagle_aux_hidden_state_layer_ids"])
    draft.load_state_dict({name: weight.float() for name, weight in tensors.items()})
    return draft.to(device)


@torch.no_grad()
def drafts(draft: Eagle3, model: Decoder, chat: Chat, steps: int, device: torch.device) -> Tensor:
    """Return int64 [R, steps] on the CPU: what every row of the chat drafts in each step, by teacher forcing."""
    batch = chats.together([chat]).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        reading = target.read(model, batch, draft.reads, draft.ids)
        found = draft.steps(batch, reading, steps)
    return torch.stack([draft.ids[logits.argmax(-1)] for logits in found], 1).cpu()


def rounds(drafted: Tensor, chat: Chat) -> tuple[list[int], list[int]]:
    """Play the rounds of a greedy chain through; return (drafts compared, drafts right) by depth.

    `drafted` [R, steps], row 0 being the one whose next token begins the answer.
    """
    steps = drafted.shape[1]
    compared, right = [0] * steps, [0] * steps
    tokens, root = chat.tokens, chat.prompt
    while root < len(tokens) - 1:
        accepted = 0
        # As many as are still wanted besides the token that the target adds itself.
        for depth in range(min(steps, len(tokens) - 2 - root)):
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
    known, tests = chats.split(chats.read(args.chats))
    picked = [chat for chat in (known if args.seen else tests) if chat.greedy][: args.count]
    prompts = [chat.tokens[: chat.prompt].tolist() for chat in picked]
    config = {"num_steps": args.steps, "eagle_topk": 1, "num_draft_tokens": args.steps + 1}
    options: dict[str, Any] = {"speculative_draft_model_path": str(args.draft), "device": device.type}
    options["dtype"] = str(dtype).removeprefix("torch.")
    with Engine(args.model, algorithm="eagle3", config=config, **options) as engine:
        results = engine.generate(prompts, {"temperature": 0, "max_tokens": args.max_tokens})
        report = engine.report()
    model = target.load(args.model, dtype=dtype, device=device)
    draft = loaded(args.draft, model, device)
    compared, right = np.zeros(args.steps, int), np.zeros(args.steps, int)
    for prompt, result in zip(prompts, results, strict=True):
        chat = Chat(np.array(prompt + list(result.ids)), len(prompt), True)
        if len(chat.tokens) < chat.prompt + 2:
            continue
        found = rounds(drafts(draft, model, chat, args.steps, device), chat)
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
    add("--draft", type=Path, required=True, help="folder that train.py wrote")
    add("--chats", nargs="+", type=Path, required=True, metavar="FILE.npz")
    add("--count", type=int, default=16, help="prompts, of greedy chats that were not trained on")
    add("--seen", action="store_true", help="prompts that were trained on instead")
    add("--max-tokens", type=int, default=128)
    add("--steps", type=int, default=4, help="length of the chain")
    add("--tolerance", type=float, default=0.03, help="most difference of a share, at any depth")
    add("--device", type=torch.device, help="[cuda where there is one]")
    add("--dtype", choices=("float32", "bfloat16"), help="[bfloat16 on cuda, else float32]")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(0 if compare(arguments()) else 1)
