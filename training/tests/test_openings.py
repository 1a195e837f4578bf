"""Openings of user turns: what of a file is read, in which tokens, and that none is a test's prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openings
import pytest
from openings import Opening

from specplug import UserError
from specplug.testing.tokenizer import EOS, byte_tokenizer

OURS = Path(__file__).parents[1] / "openings.txt"
PROMPTS = Path(__file__).parents[3] / "shared" / "data"
HEAD = "<user>"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "openings.txt"


def encode(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text, add_special_tokens=False)
    return ids


def read(path: Path, longest: int = 99) -> list[Opening]:
    return openings.read(path, encode, HEAD, frozenset({EOS}), longest)


def test_lines_are_openings(file: Path) -> None:
    file.write_text("# about\n\nSay: \r\n  Sum\\n\\nup\\n\n \\n \n  # no\nC# is é\n", encoding="utf-8-sig")
    assert openings.lines_of(file) == [(3, "Say:"), (4, "Sum\n\nup"), (7, "C# is é")]


def test_tokens_begin_with_the_head(file: Path) -> None:
    file.write_text("ab\n", encoding="utf-8")
    assert read(file) == [Opening([*b"<user>ab"], len(HEAD))]


def test_tokens_are_those_of_head_and_opening_as_one_text(file: Path) -> None:
    """With a tokenizer that joins a blank to the word behind it, the turn begins where the head's own tokens end."""
    file.write_text("ab\n", encoding="utf-8")
    ids = {"[I] ": [7, 8], "[I] ab": [7, 9, 5]}
    assert openings.read(file, ids.__getitem__, "[I] ", frozenset({7}), 2) == [Opening([7, 9, 5], 1)]


def test_a_share_of_the_chats_is_opened_and_each_opening_used() -> None:
    some = [Opening([number], 0) for number in range(4)]
    found = [openings.drawn(some, 0.25, seed) for seed in range(2000)]
    used = [found.count(opening) for opening in some]
    assert 400 <= sum(used) <= 600
    assert min(used) >= 80
    assert found == [openings.drawn(some, 0.25, seed) for seed in range(2000)]
    assert not any(openings.drawn(some, 0.0, seed) for seed in range(100))
    assert all(openings.drawn(some, 1.0, seed) for seed in range(100))


@pytest.mark.parametrize(
    ("holds", "says"),
    [
        (None, "cannot be read .No such file or directory.; give a text file"),
        (b"", "it holds no opening; give a text file"),
        (b"# one\n \n\\n\n", "it holds no opening; give a text file"),
        (b"caf\xe9\n", "cannot be read .it is not in UTF-8.; give"),
        (b"fine\n\nab</s>c\n", "line 3 holds a special token of the model; take it out"),
        (b"fine\n123456789\n", "line 2 has 9 tokens; give openings of 1 to 8"),
    ],
)
def test_faults_of_a_file_are_one_line(file: Path, holds: bytes | None, says: str) -> None:
    if holds is not None:
        file.write_bytes(holds)
    with pytest.raises(UserError, match=f"^--openings .*openings.txt: {says}") as raised:
        read(file, longest=8)
    assert "\n" not in str(raised.value)


def test_the_longest_opening_is_taken(file: Path) -> None:
    file.write_text("12345678\n", encoding="utf-8")
    assert len(read(file, longest=8)) == 1


def test_ours_are_many_and_different() -> None:
    ours = [line for _, line in openings.lines_of(OURS)]
    assert len(ours) >= 250
    assert len({_plain(line) for line in ours}) == len(ours)


@pytest.mark.skipif(not PROMPTS.exists(), reason="the prompt sets are not part of the repository")
def test_ours_are_no_part_of_a_test_prompt() -> None:
    """None begins a prompt, nor do its first six words; none of five words or more is in one, and no prompt in one."""
    paths = sorted(PROMPTS.rglob("*.jsonl"))
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    prompts = {_plain(text) for line in lines for text in _strings(json.loads(line))}
    assert len(prompts) > 800
    whole = "".join(f"\n{prompt}" for prompt in prompts)
    for number, line in openings.lines_of(OURS):
        ours = _plain(line)
        words = ours.split()
        assert f"\n{' '.join(words[:6])}" not in whole, number
        assert len(words) < 5 or ours not in whole, number
    ours = "\n".join(_plain(line) for _, line in openings.lines_of(OURS))
    assert not [prompt for prompt in prompts if len(prompt.split()) >= 5 and prompt in ours]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
