"""Compares figures of `specplug bench --json` and answers of `specplug generate --json` with stored ones. Copy it.

python gate.py bench BASELINE.json NEW.json [--slack 0.02] [--floor 0.9]
python gate.py texts EXPECTED.jsonl NEW.jsonl

Exit code 0, 1 with a line per thing that got worse, 2 where the two files cannot be compared.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIGURES = ("tokens_per_target_step", "accept_length", "draft_coverage")


def bench(old: dict[str, Any], new: dict[str, Any], slack: float, floor: float) -> Iterator[str]:
    """Yield what is worse: text, acceptance below the old one by more than `slack`, speed-up below `floor`."""
    for what in ("model", "prompts"):
        known = {key: value for key, value in old[what].items() if key != "file"}
        if known != {key: value for key, value in new[what].items() if key != "file"}:
            raise ValueError(f"{what} differs: {old[what]} and {new[what]}; make a new baseline")
    batches = {batch["size"]: batch["columns"] for batch in new["batches"]}
    first = next(iter(old["columns"]))
    for batch in old["batches"]:
        for label, before in batch["columns"].items():
            where, now = f"batch {batch['size']}, {label}", batches.get(batch["size"], {}).get(label)
            if now is None:
                yield f"{where}: is missing"
                continue
            if now["text"]["faults"] or now["text"]["skipped"]:
                yield f"{where}: text {now['text']['verdict']} {now['text']['skipped']}".rstrip()
            for figure in FIGURES:
                if now["ledger"][figure] < before["ledger"][figure] * (1 - slack):
                    yield f"{where}: {figure} {now['ledger'][figure]:.3f}, was {before['ledger'][figure]:.3f}"
            if label != first and now["speed_up"]["decode"]["median"] < floor:
                yield f"{where}: speed-up {now['speed_up']['decode']['median']:.2f}, at least {floor:.2f} is wanted"


def texts(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the answers whose tokens are not the expected ones."""
    if not old:
        raise ValueError("there is no expected answer")
    answers = {(each["prompt"], each["turn"], each["choice"]): each["ids"] for each in new}
    for each in old:
        key = each["prompt"], each["turn"], each["choice"]
        found = answers.get(key)
        if found != each["ids"]:
            at = next(
                (i for i, pair in enumerate(zip(found or [], each["ids"], strict=False)) if pair[0] != pair[1]), None
            )
            where = "it is missing" if found is None else "its end differs" if at is None else f"token {at} differs"
            yield f"prompt {key[0]}, turn {key[1]}, choice {key[2]}: {where}"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bench", "texts"))
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--slack", type=float, default=0.02, help="share by which acceptance may fall")
    parser.add_argument("--floor", type=float, default=0.9, help="smallest speed-up over the first column")
    asked = parser.parse_args()
    try:
        old, new = asked.old.read_text("utf-8"), asked.new.read_text("utf-8")
        if asked.what == "bench":
            worse = list(bench(json.loads(old), json.loads(new), asked.slack, asked.floor))
        else:
            worse = list(texts(*([json.loads(line) for line in text.splitlines()] for text in (old, new))))
    except (OSError, ValueError, KeyError) as error:
        print(f"gate: {asked.old} and {asked.new} cannot be compared: {error}", file=sys.stderr)
        return 2
    for line in worse:
        print(f"gate: {line}", file=sys.stderr)
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
