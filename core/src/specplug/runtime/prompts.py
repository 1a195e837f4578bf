"""From what a caller calls a prompt to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from specplug.errors import UserError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages (``[{"role": ..., "content": ...}]``)."""


def encode(prompt: Prompt, tokenizer: Any | None) -> list[int]:
    """Return the token ids of a prompt; chat messages go through the tokenizer's template.

    Raises UserError when text or messages come without a tokenizer or template.
    """
    if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
        return [int(item) for item in prompt if isinstance(item, int)]
    if tokenizer is None:
        raise UserError("this model has no tokenizer: give prompts as lists of token ids")
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if tokenizer.chat_template is None:
        raise UserError("this model's tokenizer has no chat template: give the prompt as text")
    try:
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    except Exception as cause:  # a template is a program of the model's author: anything can come out of it
        raise UserError(f"the model's chat template refuses these messages: {cause}") from cause
    return list(tokenizer.encode(text, add_special_tokens=False))
