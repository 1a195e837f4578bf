"""What a report of `specplug bench` keeps, so that answers, prompts and models are told apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from specplug.bench.identity import answer_rows, model_fingerprint, prompts_fingerprint
from specplug.bench.measure import Answer as Answered
from specplug.bench.measure import BatchRun
from specplug.bench.workload import Item, Source, from_conversations
from specplug.cli.prompts import Conversation
from specplug.spec import Checkpoint


def test_rows_hold_the_first_repetition_and_what_differs() -> None:
    def run(number: int, *ids: int, turn: int = 0) -> BatchRun:
        return BatchRun(answers=[Answered(Item(Source(number), turn, (9,), 0), list(ids), 1, 1.0, 1.0, None)])

    plain = [run(1, 1, 2), run(1, 8, 8), run(1, 4, turn=1), run(0)]
    other = [run(1, 1, 3), run(1, 1, 2), run(1, 4, turn=1), run(0)]
    asked = answer_rows({"a": [run(0)]})[0]["asked"]
    assert answer_rows({"none": plain, "x": other}) == [
        {"prompt": 0, "turn": 0, "asked": asked, "ids": "", "other": {}},
        {"prompt": 1, "turn": 0, "asked": asked, "ids": "1 2", "other": {"x": "1 3"}},
        {"prompt": 1, "turn": 1, "asked": asked, "ids": "4", "other": {}},
    ]


def test_prompts_are_told_apart_by_what_they_say() -> None:
    def fingerprint(*conversations: Conversation) -> str | None:
        return prompts_fingerprint(from_conversations(conversations, None, None))

    a, b = Conversation(text="a", category="x"), Conversation(turns=("a", "b"))
    assert fingerprint(a, b) == fingerprint(replace(a, category="y"), b) != fingerprint(b, a)
    assert fingerprint(a) != fingerprint(Conversation(text="b"))
    assert fingerprint(b) != fingerprint(Conversation(turns=("ab",)))
    assert fingerprint(Conversation(messages=({"role": "user", "content": "a"},))) not in (None, fingerprint(a))
    assert prompts_fingerprint([Source(0, ids=(1, 2))]) is None


def test_weights_are_told_apart_and_folders_are_not(tmp_path: Path) -> None:
    def fingerprint(name: str, weights: bytes, config: dict[str, Any], tensors: Any = ()) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        return model_fingerprint(Checkpoint(path=str(folder), config=config, tensors=None if tensors is None else {}))

    weights = bytes(range(256)) * 1000
    one = fingerprint("one", weights, {"a": 1})
    assert fingerprint("two", weights, {"a": 1}) == one
    assert fingerprint("longer", weights + b"\0", {"a": 1}) != one
    for at in (0, len(weights) - 1):
        trained = bytearray(weights)
        trained[at] ^= 1
        assert fingerprint(f"trained{at}", bytes(trained), {"a": 1}) != one
    # Without weights the config stands for them.
    dummy = fingerprint("dummy", weights, {"a": 1, "transformers_version": "5.17"}, None)
    assert fingerprint("dummy2", b"", {"a": 1, "transformers_version": "5.24"}, None) == dummy
    assert fingerprint("dummy3", weights, {"a": 2}, None) != dummy
