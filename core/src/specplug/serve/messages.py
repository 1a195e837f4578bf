"""Chat messages as a chat template takes them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specplug.serve.errors import bad
from specplug.settings import shown

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of the API -> role in the template; templates do not know ``developer``, which took the place of ``system``."""

_EMPTY: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "tool_calls": ([],),
    "function_call": (),
    "annotations": ([],),
}
"""What an answer of the API has besides, at the values at which it says nothing; null is one."""


def read_messages(value: object) -> list[Mapping[str, Any]]:
    """Return the messages of a chat request as ``{"role", "content"}``, text only; an ApiError names the part at fault.

    An assistant's message as this API returns it is taken back as it is. The parts of a content of several texts are
    joined by line ends.
    """
    if not isinstance(value, list) or not value:
        raise bad("messages", "messages must be a list of at least one message")
    return [_message(f"messages[{at}]", item) for at, item in enumerate(value)]


def _message(where: str, item: object) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise bad(where, f"{where} must be an object with role and content")
    given = {key: value for key, value in item.items() if value is not None}
    role = given.pop("role", None)
    if not isinstance(role, str) or role not in ROLES:
        raise bad(f"{where}.role", f"{where}.role {shown(role)}: must be one of {', '.join(ROLES)}")
    name = given.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise bad(f"{where}.name", f"{where}.name {shown(name)}: must be text")
    text = _text(f"{where}.content", given.pop("content", None))
    for key, rest in given.items():
        if role != "assistant" or rest not in _EMPTY.get(key, ()):
            raise bad(f"{where}.{key}", f"{where}.{shown(key)} is not supported: leave it out", "unsupported_parameter")
    return {"role": ROLES[role], "content": text} | ({} if name is None else {"name": name})


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad(where, f"{where} must be text, or a list of text parts")
    texts = []
    for at, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad(f"{where}[{at}]", f'{where}[{at}] must be {{"type": "text", "text": ...}}: there is text only')
        if unknown := sorted(part.keys() - {"type", "text"}):
            raise bad(f"{where}[{at}].{unknown[0]}", f"{where}[{at}] has no {shown(unknown[0])}: it has type and text")
        texts.append(part["text"])
    return "\n".join(texts)
