"""What drafts are worth on real text: every draft of a model on Spec-Bench, HumanEval and GSM8K, greedy and sampled.

    python benchmarks/drafts.py --prompts PROMPTS --out OUT [--only NGRAM EAGLE3-chain-2] [--limit 4] [--max-tokens 64]

`PROMPTS` holds `spec-bench/question.jsonl`, `humaneval.jsonl` and `gsm8k-200.jsonl`. `--columns` (default: drafts.json
beside this file) names the drafts: label -> {"algorithm": NAME, and what a column's file of `specplug bench` holds}. A
column whose draft model is not there is left out, and said. Each set and temperature is one `specplug bench` against
plain decoding, whose tables and JSON go to OUT; OUT/drafts.md and OUT/drafts.json are written anew after each of them,
so that a run that is cut short leaves what it has. Without `--speed` no time is reported: on a machine that does other
work, acceptance and texts can be trusted and times cannot. Exit code 1 if a text differs by more than a tie.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

from specplug.bench.columns import DRAFT_PATH, ColumnSpec, column
from specplug.bench.session import Job, run
from specplug.bench.workload import from_conversations
from specplug.cli.prompts import read_prompts
from specplug.errors import UserError
from specplug.options import EngineOptions
from specplug.planning import NONE
from specplug.registry import Registry

SETS = {"spec-bench": "spec-bench/question.jsonl", "humaneval": "humaneval.jsonl", "gsm8k": "gsm8k-200.jsonl"}
DEPTHS = 6
"""Depths shown of acceptance by depth; JSON has all."""
Row = dict[str, Any]


def columns_of(path: Path, only: Sequence[str]) -> tuple[list[ColumnSpec], list[str]]:
    """Return plain decoding and the columns of the file, and one line for each that cannot be had here."""
    found = json.loads(path.read_text(encoding="utf-8"))
    unknown = [label for label in only if label not in found]
    if unknown:
        raise UserError(f"--only {unknown[0]}: {path} has {', '.join(found)}: name one of them")
    columns, missing = [ColumnSpec(NONE, NONE)], []
    for label, given in found.items():
        draft = given.get(DRAFT_PATH)
        if only and label not in only:
            continue
        if draft is not None and not Path(draft).is_dir():
            missing.append(f"{label} is left out: there is no draft model in {draft}")
        else:
            columns.append(column(label, given["algorithm"], {key: given[key] for key in given if key != "algorithm"}))
    return columns, missing


def rows_of(report: Mapping[str, Any], name: str, temperature: float) -> list[Row]:
    """Return a row for each category and draft of one `specplug bench`; category "" is the whole set."""
    rows = []
    for label, whole in report["batches"][0]["columns"].items():
        if whole["ledger"] is None or label == NONE:
            continue
        text = whole["text"]
        gaps = [float("inf") if gap is None else gap for gap in text["gaps"]]
        for category, part in {"": whole, **whole["categories"]}.items():
            speed = whole["speed_up"]["decode"] if part is whole else part["speed_up"]
            kept = ("tokens_per_target_step", "accept_length", "draft_coverage", "accept_rate", "rounds", "accepted_at")
            row = {"set": name, "category": category, "temperature": temperature, "column": label}
            row |= {"answers": part["answers"], "speed_up": speed}
            row |= {key: part["ledger"][key] for key in (*kept, "reached", "acceptance_by_depth")}
            if part is whole:
                differing = {key: text[key] for key in ("different", "faults", "tie", "verdict", "skipped")}
                row["text"] = differing | {"largest_gap": max(gaps, default=None)}
            rows.append(row)
    return rows


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table and an empty line."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)] + [""]


def markdown(rows: Sequence[Row], speed: bool) -> list[str]:
    """Return the tables: tokens per target step by category, acceptance by depth, first differences."""
    lines = []
    labels = list(dict.fromkeys(row["column"] for row in rows))
    at = {(row["temperature"], row["set"], row["category"], row["column"]): row for row in rows}
    places = list(dict.fromkeys((row["set"], row["category"]) for row in rows if row["category"]))
    places += list(dict.fromkeys((row["set"], "") for row in rows))
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = {key[1:]: row for key, row in at.items() if key[0] == temperature}
        spread = ", speed-up over plain (median)" if speed else ""
        lines += [f"T = {temperature:g}: tokens per target step{spread}", ""]
        body = []
        for name, category in places:
            found = [here.get((name, category, label)) for label in labels]
            if any(found):
                answers = next(row["answers"] for row in found if row)
                body.append([category or f"**{name}**", str(answers), *(_worth(row, speed) for row in found)])
        lines += table(["", "answers", *labels], body)
        lines += [f"T = {temperature:g}: acceptance at each depth, of the drafts that were reached there", ""]
        wholes = [(name, label, row) for (name, category, label), row in here.items() if not category]
        body = [
            [name, label, f"{row['accept_length']:.2f}", f"{row['draft_coverage']:.2f}", _depths(row)]
            for name, label, row in wholes
        ]
        lines += table(["set", "draft", "accept length", "coverage", "depth 1, 2, ..."], body)
        lines += [f"T = {temperature:g}: first differences from plain decoding", ""]
        lines += table(["set", "draft", "texts"], [[name, label, _texts(row)] for name, label, row in wholes])
    return lines


def _worth(row: Row | None, speed: bool) -> str:
    if row is None:
        return "-"
    steps, ratio = f"{row['tokens_per_target_step']:.2f}", row["speed_up"]
    return f"{steps}, {ratio['median']:.2f}x" if speed and ratio else steps


def _depths(row: Row) -> str:
    found = row["acceptance_by_depth"]
    said = [f"{depth['conditional']:.2f}" for depth in found[:DEPTHS]]
    return " ".join([*said, "..."] if len(found) > DEPTHS else said)


def _texts(row: Row) -> str:
    text = row["text"]
    if text["skipped"]:
        return f"not compared: {text['skipped']}"
    if not text["different"]:
        return f"0 of {row['answers']}"
    said = f"{text['different']} of {row['answers']}, largest gap {text['largest_gap']:.1e}"
    return f"{said}, {text['faults']} MORE THAN A TIE" if text["faults"] else f"{said}, all within {text['tie']:g}"


def measure(args: argparse.Namespace) -> int:
    """Run everything that was asked for; return the exit code."""
    columns, notes = columns_of(args.columns, args.only)
    options = EngineOptions.model_validate({"device": args.device, "dtype": args.dtype})
    registry = Registry.discover()
    registry.load()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    host: dict[str, Any] = {}
    described: dict[str, Any] = {}
    code = 0
    for note in notes:
        print(note, file=sys.stderr)
    for temperature in args.temperatures:
        for name in args.sets:
            path = args.prompts / SETS[name]
            limits = (None, args.per_category) if name == "spec-bench" else (args.limit, None)
            part = args.out / f"{name}-t{temperature:g}"
            job = Job(
                model=args.model,
                columns=columns,
                options=options,
                sources=from_conversations(read_prompts(str(path)), *limits),
                random_input=None,
                count=0,
                sizes=[args.batch_size],
                sampling={"temperature": temperature, "max_tokens": args.max_tokens, "ignore_eos": False},
                seed=args.seed,
                repeat=args.repeat,
                json_path=f"{part}.json",
                about={"file": SETS[name]},
            )
            with open(f"{part}.txt", "w", encoding="utf-8") as tables, contextlib.redirect_stdout(tables):
                code |= run(job, registry)
            report = json.loads(Path(f"{part}.json").read_text(encoding="utf-8"))
            host, described = report["host"], report["columns"]
            found = rows_of(report, name, temperature)
            rows += found
            told = [f"{row['column']} {row['tokens_per_target_step']:.2f}" for row in found if not row["category"]]
            print(f"{name}, T = {temperature:g}: tokens per step {', '.join(told)}", flush=True)
            _write(args, rows, host, described, notes)
    return code


def _write(
    args: argparse.Namespace, rows: Sequence[Row], host: Mapping[str, Any], columns: Mapping[str, Any], notes: list[str]
) -> None:
    whole = {"host": host, "columns": columns, "left_out": notes, "speed": args.speed, "rows": rows}
    if not args.speed:
        whole["rows"] = [{key: row[key] for key in row if key != "speed_up"} for row in rows]
    (args.out / "drafts.json").write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    where = ", ".join(host["gpus"]) or f"{host['cores']} cores of an {host['processor']}"
    about = [
        f"{host['date']}, {where}, {versions}, load average {host['load_average']:.2f}",
        f"{args.max_tokens} tokens at most, batch {args.batch_size}, {args.repeat} times.",
        *notes,
        "",
    ]
    (args.out / "drafts.md").write_text("\n".join([*about, *markdown(rows, args.speed)]), encoding="utf-8")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help="folder, .gguf file or 'demo'")
    add("--prompts", type=Path, required=True, help="folder of the prompt sets")
    add("--out", type=Path, required=True, help="folder for what is found")
    add("--columns", type=Path, default=Path(__file__).with_suffix(".json"), metavar="FILE.json")
    add("--only", nargs="+", default=[], metavar="LABEL", help="these columns of the file")
    add("--sets", nargs="+", choices=tuple(SETS), default=list(SETS))
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--per-category", type=int, default=1, help="prompts of each category of Spec-Bench")
    add("--limit", type=int, default=4, help="prompts of each of the other sets")
    add("--max-tokens", type=int, default=64)
    add("--batch-size", type=int, default=1)
    add("--repeat", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--speed", action="store_true", help="report speed-ups: only on a machine that does nothing else")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        sys.exit(measure(arguments()))
    except UserError as mistake:
        sys.exit(f"error: {mistake}")
