"""The plugin in the README is run as it is printed there."""

import re
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specplug import AlgorithmSpec, DraftPlan, Facts

README = Path(__file__).resolve().parent.parent / "README.md"


def block(path: str) -> str:
    """Return the code block of the README whose first line is ``# path``."""
    [found] = re.findall(rf"^```\w+\n# {re.escape(path)}\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    return found


def module(path: str) -> types.ModuleType:
    made = types.ModuleType(Path(path).stem)
    exec(compile(block(path), path, "exec"), made.__dict__)
    return made


@pytest.fixture
def spec() -> AlgorithmSpec:
    [spec] = module("src/specplug_echo/plugin.py").specplug_algorithms()
    return spec


@pytest.mark.parametrize(
    ("tokens", "depth", "nodes"), [(None, None, 5), (8, None, 7), (8, 3, 3), (8, 20, 7), (1, None, 0)]
)
def test_plan(spec: AlgorithmSpec, tokens: int | None, depth: int | None, nodes: int) -> None:
    plan = spec.plan(spec.config_model(num_draft_tokens=tokens), Facts.empty(), depth)
    assert isinstance(plan, DraftPlan)
    assert (plan.nodes, plan.depth) == (nodes, nodes)
    assert plan.needs.exceeding(spec.capabilities) == []


@pytest.mark.parametrize(
    ("chunks", "limit", "drafts"),
    [
        ([[1, 2, 3, 4, 1]], 5, [2, 3, 4, 1]),
        ([[1, 2, 3], [4, 1]], 2, [2, 3]),
        ([[1, 5, 1, 2, 1]], 5, [2, 1]),
        ([[1, 2, 3]], 5, []),
        ([[1, 2, 1]], 0, []),
    ],
)
def test_drafter(spec: AlgorithmSpec, chunks: list[list[int]], limit: int, drafts: list[int]) -> None:
    config = spec.config_model()
    drafter = module("src/specplug_echo/drafter.py").EchoDrafter(config, spec.plan(config, Facts.empty(), None), None)
    out = {}
    proposal = SimpleNamespace(
        set=lambda slot, tokens: out.__setitem__(slot, np.array(tokens, dtype=np.int64).tolist())
    )
    drafter.allocate(None)
    drafter.on_admit(SimpleNamespace(slot=3))
    for tokens in chunks:
        row = SimpleNamespace(slot=3, new_tokens=tokens, limit=limit)
        drafter.ingest(SimpleNamespace(depth=5, host=SimpleNamespace(rows=[row])))
    drafter.propose(SimpleNamespace(depth=5, host=SimpleNamespace(rows=[row])), proposal)
    assert out.get(3, []) == drafts
    drafter.on_release(3, "finished")
