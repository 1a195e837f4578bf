"""Prompt files: one JSON object a line, with ``prompt``, ``messages`` or ``turns``; maybe ``category``. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug.errors import UserError

FORMS = ("prompt", "messages", "turns")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a prompt file. Exactly one of `text`, `messages` and `turns` is set."""

    text: str | None = None
    """A raw prompt, taken as it is."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages to answer."""
    turns: tuple[str, ...] = ()
    """User turns of one chat, answered one after another."""
    category: str = ""
    """What the file calls its kind of task, for reports; empty where it says nothing."""

    @property
    def rounds(self) -> int:
        """How many answers it takes."""
        return len(self.turns) or 1

    def prompt(self, answers: list[str]) -> str | list[Mapping[str, Any]]:
        """Return the prompt that follows `answers`, the earlier answers of this conversation."""
        if self.text is not None:
            return self.text
        if self.messages:
            return list(self.messages)
        chat: list[Mapping[str, Any]] = []
        for turn, answer in zip(self.turns, [*answers, None], strict=False):
            chat.append({"role": "user", "content": turn})
            if answer is not None:
                chat.append({"role": "assistant", "content": answer})
        return chat


def read_prompts(path: str, limit: int | None = None) -> list[Conversation]:
    """Read a JSONL file; every fault is a UserError that names the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--prompts {path}: cannot read it ({cause}): give a JSONL file") from None
    found = [_conversation(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise UserError(f"--prompts {path}: it holds no prompt: write one JSON object per line")
    return found[:limit]


def _conversation(path: str, number: int, line: str) -> Conversation:
    where = f"--prompts {path}, line {number}"
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}): write one object per line") from None
    present = [form for form in FORMS if isinstance(item, dict) and form in item]
    if len(present) != 1:
        raise UserError(f"{where}: has {' and '.join(present) or 'none'} of {', '.join(FORMS)}: give exactly one")
    value, category = item[present[0]], str(item.get("category", ""))
    if present == ["prompt"] and isinstance(value, str) and value:
        return Conversation(text=value, category=category)
    if present == ["messages"] and _is_list_of(value, Mapping):
        return Conversation(messages=tuple(value), category=category)
    if present == ["turns"] and _is_list_of(value, str):
        return Conversation(turns=tuple(value), category=category)
    wanted = {"prompt": "text", "messages": "a list of {role, content}", "turns": "a list of texts"}[present[0]]
    raise UserError(f"{where}: {present[0]} must be {wanted}, and not empty")


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
