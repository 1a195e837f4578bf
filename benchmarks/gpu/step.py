"""What a step costs on one GPU: plain and verifying, end to end through the engine and as a graph alone.

    python benchmarks/gpu/step.py [--json FILE] [--batches 1 8 32 64] [--only plain ngram ...] [--layers 32]

A dummy model of the Llama-3.1-8B shape, bf16, context about 1024. Prints milliseconds: `step` is the median
wall time of an engine's step with everything in it, `graph` the replay of its forward alone, `exposed` the
device's idle time between steps, `floor` weights and KV over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import torch
from model import circling_prompt, go_round, write_config

from specplug import Engine
from specplug.bench.host import describe
from specplug.facts import build_facts
from specplug.models.target import Target, load_target
from specplug.models.transformers import load_transformers
from specplug.options import EngineOptions
from specplug.registry import Registry
from specplug.runtime.demand import model_bytes
from specplug.runtime.kv import KVPool
from specplug.testing.registry import write_distribution

CONTEXT = 1024
GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1, "ignore_eos": True}
NGRAM = {"num_draft_tokens": 8, "ngram_max_bfs_breadth": 1, "ngram_min_bfs_breadth": 1}
FIXED = {"speculative_acceptance": "synthetic:1"}
CASES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    # name: algorithm, its options, the engine's
    "plain": ("none", {}, {}),
    "ngram-7": ("ngram", NGRAM, {}),
    **{f"chain-{width}": ("fixed", {"num_draft_tokens": width}, FIXED) for width in (4, 8, 16, 32)},
    **{f"tree-{width}": ("fixed", {"num_draft_tokens": width, "fixed_breadth": 3}, FIXED) for width in (4, 8, 16, 32)},
}


def copy_bandwidth() -> float:
    """Return bytes per second of a large copy, read and written ones counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = replay_seconds(lambda: target.copy_(source), 20)
    return 2 * source.numel() / seconds


def replay_seconds(work: Any, times: int) -> float:
    """Return the median device time of `work`."""
    for _ in range(3):
        work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def measure(
    engine: Engine,
    batch: int,
    sampling: Mapping[str, Any],
    steps: int,
    drafting: int | None,
    profile: cProfile.Profile | None,
) -> dict[str, Any]:
    """Return medians of `steps` decoding steps of `batch` requests, `drafting` of which draft (None: all)."""
    width = 1 + (engine.run.plan.nodes if engine.run.plan else 0)
    tokens = (steps + 8) * width
    begin = perf_counter()
    requests = [
        engine.submit(
            circling_prompt(max(CONTEXT - tokens // 2, 64), row),
            {**sampling, "max_tokens": 1000},  # more than are waited for: nobody ends early
            max_drafted=None if drafting is None or row < drafting else 0,
        )
        for row in range(batch)
    ]
    while not all(len(request.output.ids) > 1 for request in requests):
        engine.step()
    prefill = perf_counter() - begin
    for _ in range(8):
        engine.step()
    walls, stats, emitted = [], [], 0
    if profile:
        profile.enable()
    first = perf_counter()
    for _ in range(steps):
        at = perf_counter()
        engine.step()
        walls.append(perf_counter() - at)
        stats.append(engine.last_step)
        emitted += engine.last_step.emitted
    total = perf_counter() - first
    if profile:
        profile.disable()
    for request in requests:
        engine.abort(request)
    torch.cuda.synchronize()
    while engine.step():
        pass
    stages = {
        name: 1e3 * statistics.median(each.seconds.get(name, 0.0) for each in stats) for name in stats[-1].seconds
    }
    return {
        "batch": batch,
        "step_ms": 1e3 * total / steps,
        "median_ms": 1e3 * statistics.median(walls),
        "exposed_ms": 1e3 * statistics.median([each.exposed for each in stats if each.exposed is not None] or [0.0]),
        "host_ms": stages,
        "tokens_per_row": emitted / steps / batch,
        "coverage": sum(each.drafted_rows for each in stats) / sum(each.rows for each in stats),
        "width": sum(each.tokens for each in stats) / sum(each.rows for each in stats),
        "graphs": sum(bool(each.graph) for each in stats) / steps,
        "worst_ms": 1e3 * max(walls),
        "worst_host_ms": {name: 1e3 * spent for name, spent in stats[walls.index(max(walls))].seconds.items()},
        "prefill_s": prefill,
    }


def graph_ms(engine: Engine, rows: int, tokens: int) -> dict[str, float]:
    """Return the device time of the captured forwards that a step of so many rows and tokens takes, by mask kind.

    Each is replayed as it was last planned; a mask kind that no step needed was planned for the capture alone.
    """
    executor = engine._executor  # a benchmark may look where nobody else does
    bucket = executor._buckets.fit(rows, tokens)
    return {
        kind: 1e3 * replay_seconds(replay, 20)
        for (captured, kind), (_, replay) in executor._graphs.items()
        if captured == bucket
    }


def kernels(engine: Engine, rows: int, tokens: int) -> list[tuple[str, float, float]]:
    """Return (name, launches, milliseconds) of the kernels of such a step's forward, the costliest first."""
    executor, times = engine._executor, 5
    bucket = executor._buckets.fit(rows, tokens)
    replay = next(replay for (captured, _), (_, replay) in executor._graphs.items() if captured == bucket)
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            replay()
        torch.cuda.synchronize()
    found = [(each.key, each.count / times, each.device_time_total / times / 1e3) for each in profile.key_averages()]
    return sorted(found, key=lambda each: -each[2])


def cases(only: Sequence[str]) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the cases asked for."""
    for name, (algorithm, config, options) in CASES.items():
        if not only or name in only:
            yield name, algorithm, config, options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--only", nargs="+", default=[], choices=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--layers", type=int, default=32, help="fewer to try things out")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--transformers", action="store_true", help="run the model through transformers' modules")
    parser.add_argument("--kernels", action="store_true", help="print what the forward consists of")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes (slows it)")
    options = parser.parse_args(argv)
    work = Path(tempfile.mkdtemp())
    folder = write_config(work / "model", num_hidden_layers=options.layers)
    write_distribution(work / "site", "specplug-fixed", {"fixed": "fixed"}, requires=("specplug>=0.1,<1",))
    sys.path.insert(0, str(work / "site"))
    begin = perf_counter()
    settled = EngineOptions(load_format="dummy", device="cuda", dtype="bfloat16")
    facts = build_facts(str(folder), settled)
    target: Target = load_target(folder, facts.target, dtype="bfloat16", device="cuda", load_format="dummy")
    if options.transformers:
        target.model = None  # type: ignore[assignment]  # its memory is needed
        config = facts.target.config
        model = load_transformers(folder, config, dtype=torch.bfloat16, device="cuda", dummy_seed=0)
        target = Target(model, None, facts.target, target.eos_ids)
    go_round(target)
    loaded = perf_counter() - begin
    bandwidth = copy_bandwidth()
    weights = model_bytes(target.model) - target.model.part("embed_tokens").weight.nbytes
    kv_token = KVPool.bytes_per_token(target.model.kv_layers, torch.bfloat16)
    host = describe({})
    print(f"{host['date']}, {torch.cuda.get_device_name()}, load average {host['load_average']:.2f}")
    print(", ".join(f"{name} {number}" for name, number in host["versions"].items()))
    print(f"weights {weights / 1e9:.2f} GB, copy {bandwidth / 1e12:.2f} TB/s, loaded in {loaded:.1f} s")
    found: list[dict[str, Any]] = []
    for name, algorithm, config, extra in cases(options.only):
        begin = perf_counter()
        with Engine(
            target,
            algorithm=algorithm,
            config=config,
            registry=Registry.discover(),
            **{
                "max_running_requests": max(options.batches),
                "context_length": 2048,
                "chunked_prefill_size": 8192,
                "page_size": options.page_size,
                "attention_backend": options.backend,
                "speculative_alarm_below": 0.0,
                **extra,
            },
        ) as engine:
            started = perf_counter() - begin
            print(f"{name}: started in {started:.1f} s, {engine._executor.graphs} graphs {engine.eager}")
            for batch in options.batches:
                rounds = [("greedy", GREEDY, None)]
                if name in ("plain", "chain-8") and batch in (8, 64):
                    rounds.append(("sampled", SAMPLED, None))
                if name == "ngram-7" and batch == 64:
                    rounds.append(("one drafts", GREEDY, 1))
                for label, sampling, drafting in rounds:
                    profile = cProfile.Profile() if options.profile else None
                    row = measure(engine, batch, sampling, options.steps, drafting, profile)
                    row |= {"case": name, "rows": label, "started_s": started}
                    row["floor_ms"] = 1e3 * (weights + batch * CONTEXT * kv_token) / bandwidth
                    row["graph_ms"] = graph_ms(engine, batch, round(row["width"] * batch)) if label == "greedy" else {}
                    found.append(row)
                    stages = " ".join(f"{stage} {spent:.2f}" for stage, spent in row["host_ms"].items())
                    graph = " ".join(f"{shape} {spent:.2f}" for shape, spent in sorted(row["graph_ms"].items()))
                    share = 100 * row["floor_ms"] / row["step_ms"]
                    print(
                        f"  {batch:3d} {label:10} step {row['step_ms']:6.2f} median {row['median_ms']:6.2f} exposed "
                        f"{row['exposed_ms']:5.2f} floor {row['floor_ms']:5.2f} ({share:3.0f} %)"
                        f" tokens {row['tokens_per_row']:.2f} coverage {row['coverage']:.2f} width {row['width']:.2f}"
                        f" graphs {row['graphs']:.2f} worst {row['worst_ms']:.1f} | {stages} | {graph}",
                        flush=True,
                    )
                    if options.kernels and label == "greedy":
                        row["kernels"] = kernels(engine, batch, round(row["width"] * batch))
                        for kernel, launches, spent in row["kernels"][:14]:
                            print(f"      {spent:7.3f} ms {launches:5.0f} x {kernel[:110]}")
                    if profile:
                        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        torch.cuda.empty_cache()
    if options.json:
        report = {"host": host, "gpu": torch.cuda.get_device_name(), "bandwidth": bandwidth, "rows": found}
        Path(options.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
