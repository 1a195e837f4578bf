"""Chats that a model writes by itself, both sides of them, as data to train its drafts on. See README.md.

    python training/generate.py --model demo --out CHATS.npz --seconds 120 --seed 1

The user turn is what the model samples at temperature 1 after the head of its chat template, where a user would speak
(Magpie, arXiv 2406.08464); the answer follows, the likeliest for two chats of three, else drawn at temperature 0.8.
With `--openings` a share of the user turns begins as a line of that file, and the model goes on from there.
The file is as `chats` reads it. It is written at the end; requests that have not ended by then are dropped.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openings
from numpy.typing import NDArray
from openings import Opening
from options import above_zero, at_least, part
from transformers import AutoTokenizer

from specplug import Engine, SamplingParams, UserError
from specplug.facts import read_checkpoint
from specplug.models.store import local_model, reason

LONGEST_TURN = 256
"""Most tokens of a user turn, with its opening and its end; one that has not ended by then is dropped."""
ANSWER_TEMPERATURE = 0.8
"""Of the answers that are drawn."""
MOST_AT_ONCE = 2048
"""Largest batch: an engine has up to 4096 slots, and twice as many as requests are asked of it."""
_DROPPED = ("empty", "cut off", "with special tokens", "seen before", "failed")
_PAGE = 16
"""Tokens of a KV page."""
_MARK = "\u2042USER\u2042"


class Template(NamedTuple):
    """A chat of one user turn in token ids, without the turn and the answer."""

    head: list[int]
    tail: list[int]
    """From the token that ends the turn to where the answer begins."""
    special: frozenset[int]
    """Ids that no turn may hold."""
    text: str
    """Of the head."""

    @property
    def end(self) -> int:
        """The id that ends a turn."""
        return self.tail[0]


def template_of(tokenizer: Any) -> Template:
    """Return the template of `tokenizer`, system turn included where it adds one; UserError if there is none."""
    if tokenizer.chat_template is None:
        raise UserError("--model: its tokenizer has no chat template, in which a user would speak; give another model")
    messages = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, after = text.split(_MARK, 1)
    head, tail = (tokenizer.encode(words, add_special_tokens=False) for words in (before, after))
    marked = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = frozenset((*tokenizer.all_special_ids, *marked))  # the first are the named ones alone
    if not head or not tail or tail[0] not in special:
        raise UserError("--model: its chat template does not end a user turn with a special token; give another model")
    return Template(head, tail, special, before)


@dataclass(slots=True)
class Written:
    """A chat being written. `prompt` counts its tokens before the answer, 0 while the user speaks."""

    number: int
    request: Any
    opening: Opening
    prompt: int = 0


class Writer:
    """Keeps an engine busy with chats, numbered from 0. What it writes depends on `seed`, the batch and the engine."""

    def __init__(
        self,
        engine: Engine,
        template: Template,
        seed: int,
        batch: int,
        max_tokens: int,
        beginnings: Sequence[Opening] = (),
        share: float = 0.0,
    ) -> None:
        """`batch`: most requests at once; `max_tokens`: of an answer; `share`: of the turns, that `beginnings` open."""
        self.engine = engine
        self.template = template
        self._tokenizer: Any = engine.target.tokenizer
        self.chats: list[NDArray[np.uint16]] = []
        self.prompts: list[int] = []
        self.greedy: list[bool] = []
        self.opened: list[bool] = []
        self.dropped = Counter(dict.fromkeys(_DROPPED, 0))
        self._seed = seed
        self._batch = batch
        self._max_tokens = max_tokens
        self._beginnings = beginnings
        self._share = share
        self._unopened = Opening(template.head, len(template.head))
        self._turns = 0
        self._seen: set[bytes] = set()
        self._answers: deque[tuple[Written, list[int]]] = deque()  # turns that wait for their answer
        self._open: dict[str, Written] = {}  # by request id

    @property
    def tokens(self) -> int:
        """In `chats`."""
        return sum(map(len, self.chats))

    @property
    def unfinished(self) -> int:
        """Chats that are being written."""
        return len(self._open) + len(self._answers)

    def step(self) -> None:
        """Run one step of the engine, with as many requests as there is room for."""
        # Several at once: between two groups the engine can launch each step before it has read the last one.
        if self._batch - len(self._open) >= max(1, self._batch // 16):
            self._fill()
        for delta in self.engine.step():
            if delta.finish_reason is not None:
                self._ended(self._open.pop(delta.request))

    def cut(self, most: int) -> None:
        """Keep the first `most` chats: a step may end several."""
        del self.chats[most:], self.prompts[most:], self.greedy[most:], self.opened[most:]

    def save(self, path: Path) -> None:
        """Write the chats to `path`, whole or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate(self.chats) if self.chats else np.zeros(0, np.uint16),
                offsets=np.cumsum([0, *map(len, self.chats)], dtype=np.int64),
                prompt_len=np.array(self.prompts, np.uint16),
                greedy=np.array(self.greedy, bool),
            )
        partial.replace(path)

    def _fill(self) -> None:
        while len(self._open) < self._batch:
            if self._answers:
                chat, tokens = self._answers.popleft()
                chat.prompt = len(tokens)
                self._submit(chat, tokens)
            else:
                seed = seed_of(self._seed, self._turns, answering=False)
                opening = openings.drawn(self._beginnings, self._share, seed) or self._unopened
                self._submit(Written(self._turns, None, opening), opening.tokens)
                self._turns += 1

    def _submit(self, chat: Written, tokens: list[int]) -> None:
        answering = chat.prompt > 0
        left = LONGEST_TURN - len(chat.opening.tokens) + chat.opening.head
        sampling = SamplingParams(
            max_tokens=self._max_tokens if answering else left,
            temperature=(0.0 if _is_greedy(chat.number) else ANSWER_TEMPERATURE) if answering else 1.0,
            seed=seed_of(self._seed, chat.number, answering=answering),
            stop_token_ids=(self.template.end,),
            detokenize=False,
        )
        chat.request = self.engine.submit(tokens, sampling)
        self._open[chat.request.id] = chat

    def _ended(self, chat: Written) -> None:
        tokens = chat.request.tokens
        if chat.request.output.finish_reason == "error":
            self.dropped["failed"] += 1
        elif chat.prompt:
            self.chats.append(np.array(tokens, np.uint16))
            self.prompts.append(chat.prompt)
            self.greedy.append(_is_greedy(chat.number))
            self.opened.append(chat.opening is not self._unopened)
        else:
            turn = tokens[chat.opening.head :]
            if why := self._fault(turn):
                self.dropped[why] += 1
            else:
                self._answers.append((chat, tokens[:-1] + self.template.tail))

    def _fault(self, turn: list[int]) -> str:
        """Return why a turn is of no use, "" where it is."""
        if turn[-1] != self.template.end:
            return "cut off"
        said = turn[:-1]
        if not self.template.special.isdisjoint(said):
            return "with special tokens"
        if not self._tokenizer.decode(said).strip():
            return "empty"
        key = np.array(said, np.uint16).tobytes()
        if key in self._seen:
            return "seen before"
        self._seen.add(key)
        return ""


def seed_of(seed: int, number: int, *, answering: bool) -> int:
    """Return the seed of one request, below 2**63."""
    digest = hashlib.blake2b(f"{seed} {number} {answering}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_greedy(number: int) -> bool:
    return number % 3 < 2


def make(args: Any) -> Writer:
    """Make chats as `args` say, write them, and return what wrote them."""
    _check_out(args.out)
    begun = time.monotonic()
    template, beginnings, longest = _planned(args)
    with _engine(args, longest) as engine:
        share = (openings.SHARE if args.opened is None else args.opened) if beginnings else 0.0
        writer = Writer(engine, template, args.seed, args.batch, args.max_tokens, beginnings, share)
        print(f"ready after {time.monotonic() - begun:.1f} s; {args.batch} requests at once", flush=True)
        first = said = now = time.monotonic()
        try:
            while now - first < args.seconds and (args.most_chats is None or len(writer.chats) < args.most_chats):
                writer.step()
                now = time.monotonic()
                if now - said >= args.every:
                    print(f"{now - first:6.1f} s: {_figures(writer, now - first)}", flush=True)
                    said = now
        finally:  # a fault late in a run does not lose what there is
            writer.cut(args.most_chats or len(writer.chats))
            if writer.chats:
                writer.save(args.out)
        if not writer.chats:
            raise UserError(f"--seconds {args.seconds:g}: no chat was finished in that time; give more")
        dropped = ", ".join(f"{count} {why}" for why, count in writer.dropped.items())
        opened = f", {sum(writer.opened)} of them opened" if beginnings else ""
        print(
            f"{args.out}: {_figures(writer, now - first)} in {now - first:.1f} s{opened}; "
            f"user turns dropped: {dropped}; {writer.unfinished} chats unfinished",
            flush=True,
        )
    return writer


def _figures(writer: Writer, seconds: float) -> str:
    return f"{len(writer.chats)} chats, {writer.tokens} tokens, {writer.tokens / max(seconds, 1e-9):.0f} tokens/s"


def _check_out(out: Path) -> None:
    """Refuse a file that could not be written, before anything is made."""
    if out.suffix != ".npz":
        raise UserError(f"--out {out}: chats are written as one .npz file; give a name that ends so")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: its folder cannot be written ({error.strerror}); give another") from error


def _planned(args: Any) -> tuple[Template, list[Opening], int]:
    """Return the model's template, the openings and the most tokens of a chat; UserError for what cannot be done."""
    if args.opened is not None and args.openings is None:
        raise UserError(f"--opened {args.opened:g}: there is nothing to open chats with; give --openings FILE as well")
    if args.batch > MOST_AT_ONCE:
        raise UserError(f"--batch {args.batch}: give 1 to {MOST_AT_ONCE} requests at once")
    folder = local_model(args.model)
    config = read_checkpoint(str(folder)).config
    if (vocab := config.get("vocab_size", 0)) > 1 << 16:
        raise UserError(f"--model {args.model}: it has {vocab} ids, and a file of chats holds 65536; give another")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (ImportError, KeyError, OSError, ValueError) as error:
        raise UserError(f"--model {args.model}: its tokenizer cannot be read: {reason(error)}") from error
    template = template_of(tokenizer)
    before = len(template.head) + LONGEST_TURN + len(template.tail)
    most = config.get("max_position_embeddings", before + args.max_tokens) - before
    if most < 1:
        raise UserError(f"--model {args.model}: it has {before + most} positions, and a chat needs over {before}")
    if args.max_tokens > most:
        raise UserError(
            f"--max-tokens {args.max_tokens}: the model's positions leave an answer 1 to {most}; give as many"
        )
    beginnings: list[Opening] = []
    if args.openings is not None:

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

        beginnings = openings.read(args.openings, encode, template.text, template.special, LONGEST_TURN - 1)
    return template, beginnings, before + args.max_tokens


def _engine(args: Any, longest: int) -> Engine:
    """Return an engine whose pages hold `args.batch` chats of any length and no more: several fit on one device."""
    try:
        return Engine(
            args.model,
            device=args.device,
            dtype=args.dtype,
            context_length=longest,
            max_total_tokens=args.batch * (longest + _PAGE),
            page_size=_PAGE,
            # A step of prompts and running requests together has a graph if its tokens are no more than the slots.
            max_running_requests=2 * args.batch,
            chunked_prefill_size=args.batch,
            max_queued_requests=args.batch,
        )
    except UserError as error:
        if "--max-total-tokens" not in str(error):
            raise
        raise UserError(f"--batch {args.batch}: it is too large for the device, as the engine says: {error}") from error


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Let a model write chats, both sides, to train its drafts on.")
    add = parser.add_argument
    add("--model", default="demo", help="folder, .gguf file or 'demo'; it needs a chat template")
    add("--out", type=Path, required=True, metavar="FILE.npz")
    add("--seconds", type=above_zero, default=120.0, help="of writing; the start is not counted [120]")
    add("--seed", type=at_least(0), default=0, help="another seed makes other chats [0]")
    add("--batch", type=at_least(1), default=256, help="requests at once [256]")
    add("--most-chats", type=at_least(1), metavar="N", help="end after so many chats, if that is earlier")
    add("--max-tokens", type=at_least(1), default=320, help="most tokens of an answer [320]")
    add("--openings", type=Path, metavar="FILE", help="what user turns may begin with: one opening a line")
    add("--opened", type=part, metavar="SHARE", help=f"of the chats, 0 to 1, that begin so [{openings.SHARE}]")
    add("--every", type=above_zero, default=10.0, help="seconds between two lines of progress [10]")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="[bfloat16 on cuda, else float32]")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        make(arguments())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
