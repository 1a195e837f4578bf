"""What a round of drafting and verifying costs on one GPU, against its parts measured in the same run.

    python benchmarks/gpu/rounds.py [--json FILE] [--batches 1 8 32] [--only CASE ...] [--layers 32]

Dummy weights, bf16, context about 1024, drafts accepted at random with the mean that the case names. Milliseconds:

- `plain`: a step of plain decoding; `verify`: a step with a drafter that costs nothing, of the same width and shape;
- `round`: a step that verifies and drafts; `exposed`: device time in it that waited for the host;
- `catch-up`, `draft`: what `ingest` and `propose` launch, replayed alone; `own step`: one draft step of theirs,
  the difference between two depths; `model step`: a draft model's own plain step, for cases with a whole model;
- `ratio`: round / (verify + drafts x step), with `model step` or else `own step` as the step; for a drafter that
  drafts in one pass round / (verify + draft).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import torch
from model import write_config
from step import FIXED, GREEDY, graph_ms, measure, replay_seconds

from specplug import Engine
from specplug.bench.host import describe
from specplug.facts import build_facts
from specplug.models.target import Target, load_target
from specplug.options import EngineOptions
from specplug.registry import Registry
from specplug.testing.registry import write_distribution

QWEN3_8B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
MTP_8B: Mapping[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_nextn_predict_layers": 1,
}
QWEN_HALF_B: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
EAGLE3_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
}
DFLASH_8B: Mapping[str, Any] = {
    **QWEN3_8B,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


@dataclass(frozen=True)
class Case:
    """One algorithm with its options, and the models that it runs on."""

    algorithm: str
    config: Mapping[str, Any]
    accepted: float
    """Mean tokens per verify, the bonus counted."""
    draft: Mapping[str, Any] | None = None
    """The draft's ``config.json``, as changes of the 8B shape; None: the target's own files."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the 8B shape."""
    whole_model: bool = False
    """The draft is a language model by itself, so that its plain step is the yardstick."""
    one_pass: bool = False
    breadth: int = 1
    """For the verify: chains side by side."""


def _chain(steps: int) -> dict[str, int]:
    return {"num_steps": steps, "eagle_topk": 1, "num_draft_tokens": steps + 1}


CASES: Mapping[str, Case] = {
    "standalone-4": Case("standalone", _chain(4), 2.5, QWEN_HALF_B, whole_model=True),
    "eagle3-3": Case("eagle3", _chain(3), 2.5, EAGLE3_8B),
    "eagle3-7": Case("eagle3", _chain(7), 4.0, EAGLE3_8B),
    "eagle3-tree": Case("eagle3", {"num_steps": 5, "eagle_topk": 8, "num_draft_tokens": 32}, 4.0, EAGLE3_8B, breadth=6),
    "mtp-3": Case("builtin-mtp", _chain(3), 2.5, target=MTP_8B),
    "mtp-1": Case("builtin-mtp", _chain(1), 1.7, target=MTP_8B),
    "dflash-8": Case("dflash", {"num_draft_tokens": 8}, 4.0, {**DFLASH_8B, "block_size": 8}, QWEN3_8B, one_pass=True),
    "dflash-16": Case("dflash", {"num_draft_tokens": 16}, 6.0, DFLASH_8B, QWEN3_8B, one_pass=True),
}


def launched_ms(engine: Engine, batch: int) -> dict[str, float]:
    """Return device times of a drafter's calls on the step that the engine ran last, replayed alone."""
    executor = engine._executor  # a benchmark may look where nobody else does
    drafting, recorder, statics, plan = executor.drafting, executor._recorder, executor._statics, engine.run.plan
    bucket = executor._buckets.fit(batch, batch * (1 + plan.nodes))
    view = statics.view(*bucket)
    drafting.started.begin(statics.rows(*bucket), view.kv_len)
    recorder.bucket, recorder.rows = bucket, bucket.rows
    drafter, out = drafting._drafter, drafting.proposal

    def ask(depth: int) -> None:
        view.depth = depth
        drafter.propose(view, out)

    with torch.inference_mode():
        found = {
            "catch-up": 1e3 * replay_seconds(partial(drafter.ingest, view), 20),
            "draft": 1e3 * replay_seconds(partial(ask, plan.depth), 20),
        }
        if plan.depth > 1 and plan.needs.variable_depth:
            found["own step"] = found["draft"] - 1e3 * replay_seconds(partial(ask, plan.depth - 1), 20)
    return found


class Bench:
    """The models of one run, made when first needed; one target is held at a time."""

    def __init__(self, work: Path, layers: int, steps: int) -> None:
        self._work = work
        self._layers = layers
        self._steps = steps
        self._target: tuple[Mapping[str, Any], Target] | None = None
        self._plain: dict[int, float] = {}
        self._folders = 0
        write_distribution(work / "site", "specplug-fixed", {"fixed": "fixed"}, requires=("specplug>=0.1,<1",))
        sys.path.insert(0, str(work / "site"))
        self._registry = Registry.discover()

    def row(self, case: Case, batch: int, own_step: float | None) -> dict[str, Any]:
        """Return the figures of `case`; `own_step` stands in where its depth does not let one be measured."""
        target, draft = self._loaded(case.target), {}
        common: dict[str, Any] = {"context_length": 2048, "registry": self._registry, "max_running_requests": batch}
        row: dict[str, Any] = {"batch": batch}
        if case.draft is not None:
            folder = self._folder(case.draft)
            draft = {"speculative_draft_model_path": str(folder), "speculative_draft_load_format": "dummy"}
            if case.whole_model:
                with Engine(str(folder), load_format="dummy", device="cuda", dtype="bfloat16", **common) as engine:
                    measure(engine, batch, GREEDY, 4, None, None)
                    row["model step"] = graph_ms(engine, batch, batch)["causal"]
        if batch not in self._plain:
            with Engine(target, **common) as engine:
                self._plain[batch] = self._median(engine, batch)["median_ms"]
        row["plain"] = self._plain[batch]
        width = case.config["num_draft_tokens"]
        with Engine(
            target,
            algorithm="fixed",
            config={"num_draft_tokens": width, "fixed_breadth": case.breadth},
            **FIXED,
            **common,
        ) as engine:
            row["verify"] = self._median(engine, batch)["median_ms"]
        accepted = {"speculative_acceptance": f"synthetic:{case.accepted}"}
        with Engine(target, algorithm=case.algorithm, config=case.config, **accepted, **draft, **common) as engine:
            measured = self._median(engine, batch)
            row |= {"round": measured["median_ms"], "exposed": measured["exposed_ms"]}
            row |= {"tokens": measured["tokens_per_row"], "graphs": measured["graphs"]}
            row |= launched_ms(engine, batch)
            steps = engine.run.plan.depth
        if case.one_pass:
            row["ratio"] = row["round"] / (row["verify"] + row["draft"])
        elif step := row.get("model step") or row.get("own step") or own_step:
            row["ratio"] = row["round"] / (row["verify"] + steps * step)
        row["of plain"] = row["round"] / row["tokens"] / row["plain"]
        return row

    def _median(self, engine: Engine, batch: int) -> dict[str, Any]:
        return measure(engine, batch, GREEDY, self._steps, None, None)

    def _loaded(self, changes: Mapping[str, Any]) -> Target:
        if self._target is None or self._target[0] != changes:
            self._target = None
            torch.cuda.empty_cache()
            layers = self._layers if self._layers else changes.get("num_hidden_layers", 32)
            folder = self._folder({**changes, "num_hidden_layers": layers})
            facts = build_facts(str(folder), EngineOptions(load_format="dummy", device="cuda", dtype="bfloat16"))
            target = load_target(folder, facts.target, dtype="bfloat16", device="cuda", load_format="dummy")
            self._target, self._plain = (changes, target), {}
        return self._target[1]

    def _folder(self, changes: Mapping[str, Any]) -> Path:
        self._folders += 1
        return write_config(self._work / f"model-{self._folders}", **changes)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--layers", type=int, default=0, help="of the target; fewer to try things out")
    options = parser.parse_args(argv)
    bench = Bench(Path(tempfile.mkdtemp()), options.layers, options.steps)
    host = describe({})
    print(f"{host['date']}, {torch.cuda.get_device_name()}, load average {host['load_average']:.2f}")
    print(", ".join(f"{name} {number}" for name, number in host["versions"].items()))
    found, own_steps = [], {}
    for name in options.only:
        for batch in options.batches:
            case = CASES[name]
            try:
                row = {"case": name} | bench.row(case, batch, own_steps.get((case.algorithm, batch)))
            except Exception as error:  # one case that fails must not cost the device time of the others
                print(f"{name} batch {batch}: {type(error).__name__}: {error}", flush=True)
                continue
            own_steps.setdefault((case.algorithm, batch), row.get("own step"))
            found.append(row)
            told = (f"{key} {each:.2f}" if isinstance(each, float) else f"{key} {each}" for key, each in row.items())
            print(" ".join(told), flush=True)
            torch.cuda.empty_cache()
    if options.json:
        Path(options.json).write_text(json.dumps({"host": host, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
