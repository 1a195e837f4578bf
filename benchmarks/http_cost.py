"""What the HTTP process costs: its CPU time per streamed token, with an engine that costs nothing.

    python benchmarks/http_cost.py [--clients 64] [--rate 8500] [--per-step 1] [--output 256] [--seconds 10]

The server is the real one; in its engine's process a script stands in, which gives every running answer `--per-step`
tokens a step, at a pace that makes `--rate` tokens per second of all clients together. The clients are in this process:
plain sockets that ask again once they were answered, and only count events. Text is made with MODEL's tokenizer, of ids
drawn at random from it. Goal: at most 40 us of CPU per token, so that one core carries 25,000 tokens per second.

`tokens_per_second` below the rate that was asked for says that the server, the clients or the machine did not keep up.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, perf_counter, sleep
from typing import Any

from serve import buckets, quantile

GOAL = 40.0
VARIABLE = "SPECPLUG_HTTP_COST"
"""Environment variable that carries tokens per step and steps per second to the stand-in."""
VOCAB = 32000


# --- the stand-in, in the engine's process -------------------------------------------------------------------------


def engine_main(connection: Any, args: Any) -> None:
    """Answer every request with random ids, at a pace; what `specplug.serve.engine_loop.main` is otherwise."""
    from transformers import AutoTokenizer

    from specplug.models.store import local_model
    from specplug.runtime.ledger import Ledger
    from specplug.serve.protocol import Abort, Accepted, AnswerEnd, Ask, Batch, Close, Delta, Ready, Submit, Told

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    width, pace = json.loads(os.environ[VARIABLE])
    tokenizer = AutoTokenizer.from_pretrained(str(local_model(args.model, needs_weights=False)))
    connection.send(Ready(_info(args.model), pickle.dumps(tokenizer)))
    inbox: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(None)

    Thread(target=read, daemon=True).start()
    left: dict[int, list[int]] = {}  # submission -> output tokens so far and most
    generator, due = random.Random(0), monotonic()
    while True:
        while True:
            try:
                command = inbox.get_nowait() if left else inbox.get()
            except Empty:
                break
            match command:
                case Submit():
                    left[command.id] = [0, command.sampling.max_tokens or 16]
                    connection.send(Accepted(command.id, 0, len(command.tokens)))
                case Abort():
                    left.pop(command.id, None)
                case Ask():
                    connection.send(Told(command.ticket, _snapshot(len(left))))
                case Close() | None:
                    return
        due = max(due + 1 / pace, monotonic() - 0.1)
        sleep(max(0.0, due - monotonic()))
        deltas = []
        for id, count in list(left.items()):
            ids = tuple(generator.randrange(VOCAB) for _ in range(min(width, count[1] - count[0])))
            count[0] += len(ids)
            end = None
            if count[0] == count[1]:
                del left[id]
                ledger = Ledger(output_tokens=count[0], prefill_forwards=1).report() | {"speculation": "off"}
                end = AnswerEnd("length", count[0], ledger)
            deltas.append((id, Delta(0, ids, "", (0,) * len(ids), (False,) * len(ids), None, end)))
        connection.send(Batch(deltas, monotonic()))


def _info(model: str) -> Any:
    from specplug.serve.protocol import EngineInfo

    return EngineInfo(
        model=model,
        vocab=VOCAB,
        max_tokens=1 << 20,
        eos_ids=(),
        pages=1,
        page_size=1,
        max_running_requests=1024,
        max_queued_requests=1024,
        device="cpu",
        dtype="float32",
    )


def _snapshot(running: int) -> Any:
    from specplug.runtime.ledger import Ledger
    from specplug.serve.protocol import Counters, Snapshot

    return Snapshot(running, 0, 1, 1, 0, 1, False, "off", Counters(), Ledger(requests=0).report())


def serve(model: str) -> int:
    """Run the server with the stand-in; returns its exit code."""
    from specplug.serve import engine_loop
    from specplug.serve.options import ServeOptions
    from specplug.serve.protocol import EngineArgs
    from specplug.serve.run import serve as run

    engine_loop.main = engine_main
    return run(EngineArgs(model), ServeOptions(port=0))


# --- the clients ---------------------------------------------------------------------------------------------------


def load(address: tuple[str, int], clients: int, output: int, seconds: float) -> tuple[int, int]:
    """Keep `clients` streams running for some seconds; returns how many events and how many answers came."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": output, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    events, done, until = 0, 0, perf_counter() + seconds
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            client = socket.create_connection(address)
            selector.register(client, selectors.EVENT_READ)
            client.sendall(request)
        while perf_counter() < until:
            for key, _ in selector.select(0.1):
                found: bytes = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not found:
                    raise SystemExit("the server closed a connection")
                events += found.count(b"data: ")
                if b"data: [DONE]" in found:
                    done += 1
                    key.fileobj.sendall(request)  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return events - done, done


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the report."""
    pace = options.rate / options.clients / options.per_step
    environ = {**os.environ, VARIABLE: json.dumps([options.per_step, pace])}
    command = [sys.executable, __file__, "--serve", "--model", options.model]
    before_load = os.getloadavg()[0]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = next((re.search(r"http://([\d.]+):(\d+)", line) for line in process.stderr if "http" in line), None)
            if found is None:
                raise SystemExit("the server did not start")
            Thread(target=process.stderr.read, daemon=True).start()
            address, url = (found[1], int(found[2])), found[0]
            load(address, options.clients, options.output, 1.0)
            before, spent, begin = buckets(url), cpu_seconds(process.pid), perf_counter()
            chunks, answers = load(address, options.clients, options.output, options.seconds)
            spent, seconds = cpu_seconds(process.pid) - spent, perf_counter() - begin
            after = buckets(url)
        finally:
            process.terminate()
    tokens = chunks * options.per_step
    times = {f"p{share}": quantile(share / 100, before, after) for share in (50, 99)}
    return {
        "command": ["benchmarks/http_cost.py", *sys.argv[1:]],
        "clients": options.clients,
        "per_step": options.per_step,
        "rate": options.rate,
        "tokens_per_second": round(tokens / seconds),
        "answers": answers,
        "cpu_us_per_token": round(1e6 * spent / tokens, 1),
        "cpu_us_per_chunk": round(1e6 * spent / chunks, 1),
        "cores": round(spent / seconds, 2),
        "goal_us": GOAL,
        "commit_to_bytes_ms": {name: None if each is None else round(1e3 * each, 2) for name, each in times.items()},
        "load_average": [round(before_load, 2), round(os.getloadavg()[0], 2)],
    }


def main() -> None:
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="whose tokenizer makes the text")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8500, metavar="TOKENS/S")
    parser.add_argument("--per-step", type=int, default=1, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", metavar="FILE", help="write it there as well")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        raise SystemExit(serve(options.model))
    text = json.dumps(measure(options), indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
