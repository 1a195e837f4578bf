"""Tokens per second through `specplug serve` against the engine alone, and how long a token takes to leave.

    python benchmarks/serve.py [--json FILE]                         # CPU, demo model, 8 clients
    python benchmarks/serve.py --dummy-8b [--json FILE]              # one GPU, Llama-3.1-8B's shape, 64 clients

Every client streams one completion of a prompt of token ids, all at once; the same requests go to an engine in this
process afterwards. Waves take turns only within each: two processes cannot both hold the GPU's memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded
sys.path.insert(0, str(Path(__file__).parent / "gpu"))


def prompts_of(clients: int, length: int) -> list[list[int]]:
    """Return prompts of token ids that differ."""
    return [[1000 + (31 * row + 7 * at) % 5000 for at in range(length)] for row in range(clients)]


def wave(port: int, clients: int, length: int, tokens: int) -> dict[str, float]:
    """Stream one completion per client, all at once; return tokens, and seconds from the first request to the end."""

    def one(prompt: list[int]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse().read().decode()
        found = re.findall(r'"completion_tokens": ?(\d+)', answer)
        if not found:
            raise RuntimeError(answer[:300])
        return int(found[-1])

    with ThreadPoolExecutor(clients) as pool:
        begin = time.perf_counter()
        made = sum(pool.map(one, prompts_of(clients, length)))
        return {"tokens": made, "seconds": time.perf_counter() - begin}


def served(model: str, options: dict[str, Any], clients: int, length: int, tokens: int, repeat: int) -> dict[str, Any]:
    """Return tokens per second of waves on a server process, and what it says of commit to bytes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "specplug", "serve", model, "--served-model-name", "model", "--port", str(port)]
    server = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as health:
                    if health.status == 200:
                        break
            except OSError:
                time.sleep(0.2)
        # The clients have a process of their own: their reading must not slow down whoever measures.
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import json, serve; "
        code += f"print(json.dumps([serve.wave({port}, {clients}, {length}, {tokens}) for _ in range({repeat + 1})]))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        waves = json.loads(done.stdout.splitlines()[-1])[1:]
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as metrics:
            text = metrics.read().decode()
    finally:
        server.terminate()
        server.wait(60)
    buckets = re.findall(r'commit_to_bytes_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} ([\d.e+]+)', text)
    total = float(buckets[-1][1]) if buckets else 0.0

    def within(share: float) -> float | None:
        return next((float(at) for at, count in buckets if total and float(count) >= share * total), None)

    rates = [each["tokens"] / each["seconds"] for each in waves]
    return {"rates": rates, "commit_to_bytes_at_most_s": {"p50": within(0.5), "p99": within(0.99)}}


def alone(model: str, options: dict[str, Any], clients: int, length: int, tokens: int, repeat: int) -> list[float]:
    """Return tokens per second of the same requests on an engine in this process."""
    from specplug import Engine, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rates = []
    with Engine(model, **options) as engine:
        for _ in range(repeat + 1):
            begin = time.perf_counter()
            made = sum(len(result.ids) for result in engine.generate(prompts_of(clients, length), sampling))
            rates.append(made / (time.perf_counter() - begin))
    return rates[1:]


def main(argv: Sequence[str] | None = None) -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dummy-8b", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--clients", type=int, help="default 8, on a GPU 64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args(argv)
    from specplug.bench.host import describe

    clients, length, model = given.clients or (64 if given.dummy_8b else 8), 32, "demo"
    options: dict[str, Any] = {"max_running_requests": clients, "context_length": 1024}
    if given.dummy_8b:
        from model import write_config

        length, model = 256, str(write_config(Path(tempfile.mkdtemp()) / "model"))
        options |= {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16"}
    host = describe({})
    shape = (model, options, clients, length, given.tokens, given.repeat)
    through = served(*shape)
    rates = alone(*shape)
    ratio = statistics.median(through["rates"]) / statistics.median(rates)
    found = {"host": host, "clients": clients, "served": through, "alone": rates, "ratio": ratio}
    print(f"{host['date']}, load average {host['load_average']:.2f}, {clients} clients")
    print(
        f"served {[round(rate, 1) for rate in through['rates']]}, alone {[round(rate, 1) for rate in rates]} tokens/s"
    )
    print(f"ratio of medians {ratio:.3f}; commit to bytes at most {through['commit_to_bytes_at_most_s']} s")
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
