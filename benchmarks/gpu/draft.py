"""What drafting with a model costs on one GPU: a whole round against the verify step and the draft steps in it.

    python benchmarks/gpu/draft.py [--json FILE] [--batches 1 8 32] [--drafts 4] [--layers 32] [--draft-layers 24]

A dummy 8B target (Llama-3.1-8B's shape) and a dummy draft of Qwen2.5-0.5B's, with the target's vocabulary; bf16,
context about 1024, drafts accepted at random, 2.5 tokens a round on average. All in milliseconds and in one run:

- `round`: wall time of an engine's step that verifies and drafts;
- `verify`: the same with a drafter that costs nothing, of the same width;
- `step`: one plain step of the draft model as an engine of its own would replay it, the output head included;
- `catch-up`, `draft`: what `ingest` and `propose` launch, and `own step`: one draft step of theirs;
- `ratio`: round / (verify + drafts x step), the target is 1.10; `own ratio` has `own step` for `step`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import torch
from model import go_round, write_config
from step import FIXED, GREEDY, graph_ms, measure, replay_seconds

from specplug import Engine
from specplug.bench.host import describe
from specplug.facts import build_facts
from specplug.models.target import load_target
from specplug.options import EngineOptions
from specplug.registry import Registry
from specplug.testing.registry import write_distribution

QWEN_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
ACCEPTED = {"speculative_acceptance": "synthetic:2.5"}


def launched_ms(engine: Engine, batch: int, drafts: int) -> dict[str, float]:
    """Return device times of a drafter's calls on the step that the engine ran last, replayed alone."""
    executor = engine._executor  # a benchmark may look where nobody else does
    drafting, recorder, statics = executor.drafting, executor._recorder, executor._statics
    bucket = executor._buckets.fit(batch, batch * (1 + drafts))
    view = statics.view(*bucket)
    drafting.started.begin(statics.rows(*bucket), view.kv_len)
    recorder.bucket, recorder.rows = bucket, bucket.rows
    drafter, out = drafting._drafter, drafting.proposal

    def ask(depth: int) -> None:
        view.depth = depth
        drafter.propose(view, out)

    with torch.inference_mode():
        whole, fewer = (1e3 * replay_seconds(partial(ask, depth), 20) for depth in (drafts, drafts - 1))
        catch_up = 1e3 * replay_seconds(partial(drafter.ingest, view), 20)
    return {"catch-up": catch_up, "draft": whole, "own step": whole - fewer}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=4, help="drafted tokens, the root not counted; at least 2")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--layers", type=int, default=32, help="of the target; fewer to try things out")
    parser.add_argument("--draft-layers", type=int, default=24)
    options = parser.parse_args(argv)
    work = Path(tempfile.mkdtemp())
    folder = write_config(work / "model", num_hidden_layers=options.layers)
    small = write_config(work / "draft", **QWEN_HALF_B, num_hidden_layers=options.draft_layers)
    write_distribution(work / "site", "specplug-fixed", {"fixed": "fixed"}, requires=("specplug>=0.1,<1",))
    sys.path.insert(0, str(work / "site"))
    settled = EngineOptions(load_format="dummy", device="cuda", dtype="bfloat16")
    facts = build_facts(str(folder), settled)
    target = load_target(folder, facts.target, dtype="bfloat16", device="cuda", load_format="dummy")
    go_round(target)
    common: dict[str, Any] = {"context_length": 2048, "registry": Registry.discover()}
    width = {"num_draft_tokens": options.drafts + 1}
    from_draft = {"speculative_draft_model_path": str(small), "speculative_draft_load_format": "dummy"}
    host = describe({})
    print(f"{host['date']}, {torch.cuda.get_device_name()}, load average {host['load_average']:.2f}")
    print(", ".join(f"{name} {number}" for name, number in host["versions"].items()))
    found = []
    for batch in options.batches:
        common["max_running_requests"] = batch
        row: dict[str, Any] = {"batch": batch}
        with Engine(str(small), load_format="dummy", device="cuda", dtype="bfloat16", **common) as engine:
            measure(engine, batch, GREEDY, 4, None, None)
            row["step"] = graph_ms(engine, batch, batch)["causal"]
        torch.cuda.empty_cache()
        with Engine(target, algorithm="fixed", config=width, **FIXED, **common) as engine:
            row["verify"] = measure(engine, batch, GREEDY, options.steps, None, None)["median_ms"]
        torch.cuda.empty_cache()
        with Engine(target, algorithm="standalone", config=width, **ACCEPTED, **from_draft, **common) as engine:
            measured = measure(engine, batch, GREEDY, options.steps, None, None)
            row |= {"round": measured["median_ms"], "exposed": measured["exposed_ms"], "width": measured["width"]}
            row |= launched_ms(engine, batch, options.drafts)
        torch.cuda.empty_cache()
        row["ratio"] = row["round"] / (row["verify"] + options.drafts * row["step"])
        row["own ratio"] = row["round"] / (row["verify"] + options.drafts * row["own step"])
        found.append(row)
        print("  ".join(f"{name} {number:.2f}" for name, number in row.items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"host": host, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
