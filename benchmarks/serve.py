"""What the server costs: tokens per second through HTTP against the engine alone, and from a commit to its bytes.

    python benchmarks/serve.py [--model demo] [--clients 8] [--prompt 64] [--output 64] [--rounds 2] [--repeat 3]
    python benchmarks/serve.py --dummy-8b      # on a GPU: 64 clients, prompts of 256 and answers of 128 tokens

A server process and an engine in this one have the same options and take turns on the same prompts, given as token
ids; whoever begins changes from turn to turn. Both have --clients requests running, and the next one begins when
one has ended. The engine alone makes no text. Answers of the server are streamed to clients in processes of their
own; `commit_to_bytes_ms` is interpolated in the buckets of the server's own histogram. Goal: a ratio of 0.95.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

from specplug.bench.load import Endpoint, Timing, send

if TYPE_CHECKING:
    from specplug import Engine

# Torch is imported where it is needed: client processes import this file too, and have no use for it.

HISTOGRAM = "specplug:commit_to_bytes_seconds_bucket"
GOAL = 0.95
Prompts = Sequence[Sequence[int]]


# --- the two sides -------------------------------------------------------------------------------------------------


def alone(engine: Engine, prompts: Prompts, sampling: Mapping[str, Any], clients: int) -> tuple[int, float]:
    """Answer the prompts, `clients` at a time; returns output tokens and seconds."""
    left, running, tokens = deque(prompts), 0, 0
    begin = perf_counter()
    while left or running:
        while left and running < clients:
            engine.submit(left.popleft(), {**sampling, "detokenize": False})
            running += 1
        for delta in engine.step():
            tokens += len(delta.ids)
            running -= delta.finish_reason is not None
    return tokens, perf_counter() - begin


def ask(url: str, body: Mapping[str, Any], prompts: Prompts, clients: int) -> list[Timing]:
    """Send the prompts to a server from `clients` threads, each of which asks again once it was answered."""
    target, left = Endpoint(url), deque(prompts)

    def client(_: int) -> list[Timing]:
        connection, found = target.open(), list[Timing]()
        while True:
            try:
                prompt = left.popleft()
            except IndexError:
                connection.close()
                return found
            found.append(send(target, connection, "/v1/completions", {**body, "prompt": prompt}, perf_counter()))

    with ThreadPoolExecutor(clients) as pool:
        return [timing for each in pool.map(client, range(clients)) for timing in each]


class Clients:
    """Processes that put load on a server; none has more than 16 clients where there are cores enough."""

    def __init__(self, clients: int) -> None:
        count = max(1, min(clients // 16, (os.cpu_count() or 1) // 4))
        self._shares = [len(range(at, clients, count)) for at in range(count)]
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
        list(self._pool.map(abs, range(count)))  # they are started now

    def run(self, url: str, body: Mapping[str, Any], prompts: Prompts) -> tuple[int, float]:
        """Have the prompts answered; returns output tokens, and seconds from the first request to the last answer."""
        count = len(self._shares)
        work = [
            self._pool.submit(ask, url, body, prompts[at::count], clients) for at, clients in enumerate(self._shares)
        ]
        timings = [timing for each in work for timing in each.result()]
        if errors := {timing.error for timing in timings if timing.error}:
            raise SystemExit(f"requests failed: {sorted(errors)[:3]}")
        return sum(one.tokens for one in timings), max(one.last for one in timings) - min(one.due for one in timings)

    def close(self) -> None:
        """End them."""
        self._pool.shutdown()


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[str]:
    """Run ``specplug serve`` with `arguments` on a free port; yields its URL once it answers."""
    command = [sys.executable, "-m", "specplug", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"at (http://[\d.:]+)", line):
                Thread(target=process.stderr.read, daemon=True).start()  # so that it never waits for a reader
                yield found[1]
                break
        else:
            raise SystemExit(f"the server did not start: {''.join(said)}")
    finally:
        process.terminate()
        process.wait()


# --- figures -------------------------------------------------------------------------------------------------------


def buckets(url: str) -> dict[float, float]:
    """Return the server's histogram so far: upper bound in seconds -> observations up to it."""
    connection = Endpoint(url).open()
    text = Endpoint(url).request(connection, "GET", "/metrics").read().decode()
    connection.close()
    lines = re.findall(rf'^{HISTOGRAM}{{.*?le="([^"]+)".*?}} (\S+)$', text, re.MULTILINE)
    return {float(bound): float(count) for bound, count in lines}


def quantile(share: float, before: Mapping[float, float], after: Mapping[float, float]) -> float | None:
    """Return a quantile of what was observed in between, linear inside of a bucket; None of nothing."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    wanted, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count and count >= wanted:
            # What lies above the last bound is not known better.
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / max(count - below, 1.0)
        low, below = bound, count
    return None


def word_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of `size` words, so that the server has text to make."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"\u0120w{at}": at for at in range(size)}, unk_token="\u0120w0"))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def dummy_8b(folder: Path) -> str:
    """Write a folder of the Llama-3.1-8B shape, without weights."""
    sys.path.insert(0, str(Path(__file__).parent / "gpu"))
    from model import LLAMA_8B, write_config

    word_tokenizer(write_config(folder), LLAMA_8B["vocab_size"])
    return str(folder)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; what is not given depends on --dummy-8b."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dummy-8b", action="store_true", help="random weights of the Llama-3.1-8B shape instead")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--prompt", type=int, metavar="TOKENS")
    parser.add_argument("--output", type=int, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=2, help="requests per client and turn")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each side")
    parser.add_argument("--algorithm", default="none", help="of both sides")
    parser.add_argument("--json", metavar="FILE", help="write it there as well")
    options = parser.parse_args(argv)
    for name, small, large in (("clients", 8, 64), ("prompt", 64, 256), ("output", 64, 128)):
        if getattr(options, name) is None:
            setattr(options, name, large if options.dummy_8b else small)
    return options


def compare(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Let both sides take turns and return the report."""
    from specplug import Engine
    from specplug.bench.host import describe

    longest = options.prompt + options.output
    engine_options: dict[str, Any] = {
        "context_length": longest + 16,
        "max_running_requests": options.clients,
        "max_total_tokens": options.clients * (longest + 64),
    }
    if options.dummy_8b:
        engine_options |= {"load_format": "dummy", "dtype": "bfloat16"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine_options.items()]
    arguments = [model, *flags, "--speculative-algorithm", options.algorithm]
    report: dict[str, Any] = {**describe({}), "command": ["benchmarks/serve.py", *sys.argv[1:]]}
    report |= {name: getattr(options, name) for name in ("clients", "prompt", "output", "rounds", "algorithm")}
    report |= {"model": "Llama-3.1-8B shape" if options.dummy_8b else model, "engine_options": engine_options}
    sampling = {"temperature": 0, "max_tokens": options.output, "ignore_eos": True}
    body = {**sampling, "stream": True, "stream_options": {"include_usage": True}}
    speeds: dict[str, list[float]] = {"engine": [], "server": []}
    with serving(arguments) as url, Engine(model, algorithm=options.algorithm, **engine_options) as engine:
        clients = Clients(options.clients)
        generator, vocab = random.Random(0), engine.target.model.vocab_size
        prompts = [generator.choices(range(vocab), k=options.prompt) for _ in range(options.clients * options.rounds)]

        def turn(side: str, prompts: Prompts) -> float:
            if side == "engine":
                tokens, seconds = alone(engine, prompts, sampling, options.clients)
            else:
                tokens, seconds = clients.run(url, body, prompts)
            if tokens != len(prompts) * options.output:
                raise SystemExit(f"{side}: {tokens} tokens of {len(prompts)} answers of {options.output}")
            return tokens / seconds

        try:
            for side in speeds:
                turn(side, prompts[: options.clients])  # not counted
            before = buckets(url)
            for number in range(options.repeat):
                for side in sorted(speeds, reverse=bool(number % 2)):
                    speeds[side].append(turn(side, prompts))
            after = buckets(url)
        finally:
            clients.close()
    ratios = [mine / alone for mine, alone in zip(speeds["server"], speeds["engine"], strict=True)]
    times = {f"p{share}": quantile(share / 100, before, after) for share in (50, 90, 99)}
    return report | {
        "tokens_per_second": {side: round(statistics.median(each), 1) for side, each in speeds.items()},
        "turns": {side: [round(speed, 1) for speed in each] for side, each in speeds.items()},
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "goal": GOAL,
        "commit_to_bytes_ms": {
            "count": int(max(after.values()) - max(before.values())),
            **{name: None if value is None else round(1e3 * value, 3) for name, value in times.items()},
        },
        "load_average_after": round(os.getloadavg()[0], 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report as JSON."""
    options = parsed(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = compare(options, dummy_8b(Path(folder) / "llama-8b") if options.dummy_8b else options.model)
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
