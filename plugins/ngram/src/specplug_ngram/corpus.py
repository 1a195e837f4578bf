"""The external corpus: a JSONL file, each line a JSON string. Torch-free."""

import json
from collections.abc import Iterator
from pathlib import Path

from specplug import UserError

OPTION = "--speculative-ngram-external-corpus-path"

_EACH_LINE = 'each line must be one JSON string, such as "some text"'


def documents(path: str) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each document in `path`; blank lines are skipped.

    Raises UserError, naming file and line, for a file that cannot be read or a line that is no JSON string.
    """
    number = 0
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    text = json.loads(line)
                    if not isinstance(text, str):
                        raise UserError(f"line {number} of {path} is a JSON {type(text).__name__}; {_EACH_LINE}")
                    yield number, text
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a JSONL file, or leave it out") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"line {number} of {path} is not valid JSON; {_EACH_LINE}") from error


def tokenizer_file(target: str) -> Path:
    """Return the tokenizer of the target in folder `target`; raises UserError where there is none."""
    path = Path(target) / "tokenizer.json"
    if not target or not path.is_file():
        raise UserError(f"a tokenizer.json is needed, and {target or 'this target'} has none; leave it out")
    return path


def encoded(path: str, target: str) -> Iterator[tuple[int, list[int]]]:
    """Yield (line number, tokens) of each document, in the tokens of `target`, without special tokens.

    Raises UserError as `documents` and `tokenizer_file` do.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file(target)))
    for number, text in documents(path):
        yield number, tokenizer.encode(text, add_special_tokens=False).ids
