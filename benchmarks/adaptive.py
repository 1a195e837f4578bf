"""Whether depths chosen by cost keep up with the best fixed depth, known only afterwards, and with plain decoding.

    python benchmarks/adaptive.py [--json FILE] [--batches 1 8 32] [--tokens 64]        # CPU, demo model, NGRAM
    python benchmarks/adaptive.py --dummy-8b [--json FILE] [--steps 240]                # one GPU, EAGLE-3

On the CPU the same greedy requests are decoded by every policy, in turn and `--repeat` times: prompts that copy, free
prompts, and both in one batch, `--per-slot` times as many as there are slots. Steps with a prompt in them do not
count, and a run is over when a slot stays empty: the last requests, few in a large batch, would count for more the
sooner the others ended. The dummy 8B model (Llama-3.1's shape, a dummy EAGLE-3 head) cannot copy; there drafts are
accepted at random, with 1.2, 2.0 and 4.0 tokens a round where enough are drafted. *cost* is the policy of an engine
that has been running: it goes on from run to run. Figures are tokens per second, medians; all of a row from one
engine, whose policies take turns and begin with another one each time, since a machine is not as fast at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded
sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from adaptive_texts import COPYING, FREE

from specplug import Engine, SamplingParams
from specplug.adaptive.cost import CostPolicy
from specplug.adaptive.policy import Forced, Policy
from specplug.bench.host import describe

EAGLE3_8B = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
}

MIXES = {"copying": COPYING, "free": FREE, "both": [text for pair in zip(COPYING, FREE, strict=True) for text in pair]}


def compared(
    engine: Engine, depths: Sequence[int], repeat: int, run: Callable[[], tuple[int, float]]
) -> dict[str, Any]:
    """Return tokens per second by policy, medians of `repeat` runs in turn, and what *cost* keeps of the best."""
    drafting = engine._built.drafting  # a benchmark may look where nobody else does
    assert drafting is not None
    warm = drafting.policy
    assert isinstance(warm, CostPolicy)
    run()
    found: dict[str, list[float]] = {}
    policies: list[tuple[str, Policy | None]] = [*((str(depth), None) for depth in depths), ("cost", warm)]
    for turn in range(repeat):
        first = turn * len(policies) // repeat
        for name, policy in policies[first:] + policies[:first]:
            drafting.policy = policy or Forced([int(name)])
            tokens, seconds = run()
            found.setdefault(name, []).append(tokens / seconds)
    drafting.policy = warm
    rates = {name: statistics.median(each) for name, each in found.items()}
    best = max(map(str, depths), key=lambda name: rates[name])
    return {
        "tokens_per_s": rates,
        "runs": found,
        "best": best,
        "of_best": rates["cost"] / rates[best],
        "of_plain": rates["cost"] / rates["0"],
        "report": warm.report(),
    }


def finish(engine: Engine, requests: Sequence[Any]) -> None:
    """End what is still running."""
    for request in requests:
        engine.abort(request)
    while engine.step():
        pass


def on_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the demo model."""
    found = []
    depths = [0, *options.depths]
    for batch in options.batches:
        engine = Engine(
            "demo",
            algorithm="ngram",
            config={"num_draft_tokens": max(depths) + 1, "ngram_max_bfs_breadth": 1},
            speculative_adaptive=True,
            speculative_adaptive_policy="cost",
            max_running_requests=batch,
            context_length=2048,
        )
        with engine:
            for mix in options.mixes:
                texts = MIXES[mix]
                chosen = [texts[at % len(texts)] for at in range(max(options.per_slot * batch, 8))]
                prompts = [
                    engine.target.tokenizer.apply_chat_template(
                        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                    )
                    for text in chosen
                ]
                sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens)

                def run(
                    engine: Engine = engine, prompts: Any = prompts, sampling: Any = sampling, batch: int = batch
                ) -> tuple[int, float]:
                    requests = [engine.submit(prompt, sampling) for prompt in prompts]
                    unfinished, tokens, spent = len(requests), 0, 0.0
                    while unfinished >= batch:
                        begin = perf_counter()
                        unfinished -= sum(delta.finish_reason is not None for delta in engine.step())
                        step = engine.last_step
                        if step and step.tokens == step.rows + step.drafted:  # no prompt in it
                            tokens, spent = tokens + step.emitted, spent + perf_counter() - begin
                    finish(engine, requests)
                    return tokens, spent

                row = {"batch": batch, "mix": mix} | compared(engine, depths, options.repeat, run)
                found.append(told(row))
    return found


def on_gpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the dummy 8B model."""
    from model import circling_prompt, write_config

    from specplug.facts import build_facts
    from specplug.models.target import load_target
    from specplug.options import EngineOptions

    work, found = Path(tempfile.mkdtemp()), []
    folder, head = write_config(work / "model"), write_config(work / "head", **EAGLE3_8B)
    facts = build_facts(str(folder), EngineOptions(load_format="dummy", device="cuda", dtype="bfloat16"))
    target = load_target(folder, facts.target, dtype="bfloat16", device="cuda", load_format="dummy")
    depths = [0, *options.depths]
    for batch in options.batches:
        for mean in (1.2, 2.0, 4.0):
            engine = Engine(
                target,
                algorithm="eagle3",
                config={"num_steps": max(depths), "eagle_topk": 1},
                speculative_draft_model_path=str(head),
                speculative_draft_load_format="dummy",
                speculative_acceptance=f"synthetic:{mean}",
                speculative_adaptive=True,
                speculative_adaptive_policy="cost",
                max_running_requests=batch,
                context_length=4096,
            )
            with engine:

                def run(engine: Engine = engine, batch: int = batch) -> tuple[int, float]:
                    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 2500}
                    requests = [engine.submit(circling_prompt(512, row), sampling) for row in range(batch)]
                    while not all(len(request.output.ids) > 1 for request in requests):
                        engine.step()
                    tokens, begin = 0, perf_counter()
                    for _ in range(options.steps):
                        engine.step()
                        tokens += engine.last_step.emitted if engine.last_step else 0
                    spent = perf_counter() - begin
                    finish(engine, requests)
                    return tokens, spent

                found.append(told({"batch": batch, "mix": f"{mean}"} | compared(engine, depths, options.repeat, run)))
    return found


def told(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row and return it."""
    rates: Mapping[str, float] = row["tokens_per_s"]
    print(
        f"batch {row['batch']:>2} {row['mix']:<8}",
        " ".join(f"{name} {rate:.1f}" for name, rate in rates.items()),
        f"| best {row['best']}, cost {row['of_best']:.3f} of it, {row['of_plain']:.3f} of plain",
        flush=True,
    )
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dummy-8b", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 7], help="0 is always among them")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES), help="of prompts, on the CPU")
    parser.add_argument("--per-slot", type=int, default=6, help="requests for each slot; 8 requests at least")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(argv)
    host = describe({})
    print(f"{host['date']}, load average {host['load_average']:.2f}, depths 0 {options.depths}", flush=True)
    rows = on_gpu(options) if options.dummy_8b else on_cpu(options)
    if options.json:
        Path(options.json).write_text(json.dumps({"host": host, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
