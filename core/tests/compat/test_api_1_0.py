"""A package of plugin API 1.0 passes today's kit, unchanged, and its hooks are asked as they were."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specplug import Engine, RefusedError, SamplingParams
from specplug.registry import Registry
from specplug.testing.bench import PROMPTS
from specplug.testing.conformance import DrafterConformance
from specplug.testing.registry import write_distribution
from specplug.testing.targets import decoder_target, table_target

PACKAGE = Path(__file__).with_name("api_1_0")
DIGEST = "6f3f9ce817979e6432d8bc4d9f1d6ed47799305a1a50597ed6b5a78c666b2a01"
"""Of all its files."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


PARTS = """
from specplug import AlgorithmSpec, Capabilities, SpecConfig, TapRequest, combined_plan, hookimpl

def plan(config, facts, depth):
    return combined_plan(
        facts.plan_of("frozen-host", {}, depth, draft=False), facts.plan_of("frozen-device", {}, depth)
    )

@hookimpl
def specplug_algorithms():
    most = Capabilities(
        shapes={"chain", "tree"}, proposal_probs="dense", runs_on={"host", "device"}, taps=(TapRequest(at="any"),),
        draft_kv={"own_layers"}, borrows={"embed_tokens", "lm_head"}, variable_depth=True, graph_safe=True,
    )
    return [AlgorithmSpec(
        name="parts", api=(1, 0), summary="both", capabilities=most, config_model=SpecConfig, plan=plan,
        drafter="frozen_parts.drafter:Parts",
    )]
"""
PARTS_DRAFTER = """
from specplug import CombinedDrafter

class Parts(CombinedDrafter):
    def __init__(self, config, plan, ctx):
        super().__init__(config, plan, ctx)
        self.parts = [ctx.build("frozen-host", {}, draft=False), ctx.build("frozen-device", {})]
"""


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(PACKAGE))
    yield
    sys.path.remove(str(PACKAGE))
    for name in [name for name in sys.modules if name.startswith("specplug_frozen")]:
        del sys.modules[name]


def write_metadata(folder: Path) -> list[str]:
    points = dict.fromkeys(("frozen-host", "frozen-device"), "specplug_frozen.plugin")
    write_distribution(folder, "specplug-frozen", points, version="1.0", requires=("specplug>=0.1,<99",))
    return [str(folder), str(PACKAGE)]


def make_draft(target_dir: Path, out_dir: Path, seed: int) -> None:
    hidden = json.loads((target_dir / "config.json").read_text())["hidden_size"]
    (out_dir / "config.json").write_text("{}")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "layer.norm.weight": torch.ones(hidden),
        "layer.qkv.weight": torch.randn(48, hidden, generator=generator) * hidden**-0.5,
        "layer.o.weight": torch.randn(hidden, 16, generator=generator) / 4,
    }
    save_file(weights, str(out_dir / "model.safetensors"))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry.discover(path=write_metadata(tmp_path / "site"), environ={})


def test_it_was_never_edited() -> None:
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    assert digest.hexdigest() == DIGEST, "packages out there do not change either: make the core accept this one again"


class Frozen(DrafterConformance):
    __test__ = False

    def search_path(self, folder: Path) -> Sequence[str]:
        return write_metadata(folder)


class TestHost(Frozen):
    __test__ = True
    algorithm = "frozen-host"
    config = {"num_draft_tokens": 6, "frozen_match": 1}  # noqa: RUF012


class TestDevice(Frozen):
    __test__ = True
    algorithm = "frozen-device"

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        make_draft(target_dir, out_dir, seed)


@pytest.mark.slow
class TestDeviceDrawn(TestDevice):
    config = {"draft_sampling": True, "num_steps": 2}  # noqa: RUF012


def test_its_hooks_are_asked(registry: Registry, tmp_path: Path) -> None:
    target = table_target(8, 1, 3)
    with Engine(target, algorithm="Icy", registry=registry) as engine:
        assert {setting.field: setting.value for setting in engine.run.settings}["frozen_match"] == 2
    with Engine(decoder_target(1), algorithm="frozen_device", registry=registry) as engine:
        assert engine.run.algorithm == "frozen-host"
        from specplug_frozen.plugin import COUNTERS

        results = engine.generate(PROMPTS, GREEDY)
        counter = COUNTERS[-1]
        assert counter.steps > 0
        assert counter.emitted == sum(len(result.ids) for result in results)
        assert len(counter.finished) == len(PROMPTS)
    assert counter.closed == 1
    for word, config, says in (
        ("frozen-host", {"frozen_match": 8}, "8 is too cold"),
        ("frosty", {}, "frozen-host"),
        ("frozen-host", {"frozen_match": 9}, "frozen.match"),
    ):
        with pytest.raises(RefusedError, match=says):
            Engine(target, algorithm=word, config=config, registry=registry)


def test_it_can_be_part_of_todays_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One refuses a draft and one needs it: the combinator says which is given it."""
    site, target = tmp_path / "site", decoder_target(1, folder=tmp_path / "target")
    draft = tmp_path / "draft"
    draft.mkdir()
    make_draft(tmp_path / "target", draft, 0)
    (site / "frozen_parts").mkdir(parents=True)
    (site / "frozen_parts" / "__init__.py").write_text(PARTS)
    (site / "frozen_parts" / "drafter.py").write_text(PARTS_DRAFTER)
    write_distribution(site, "frozen-parts", {"parts": "frozen_parts"})
    monkeypatch.syspath_prepend(str(site))
    registry = Registry.discover(path=write_metadata(site), environ={})
    with Engine(target, algorithm="parts", registry=registry, speculative_draft_model_path=str(draft)) as engine:
        results = engine.generate(PROMPTS, GREEDY)
    with Engine(target) as plain:
        assert [result.ids for result in results] == [result.ids for result in plain.generate(PROMPTS, GREEDY)]
    assert sum(result.ledger["drafted"] for result in results) > 0


@pytest.mark.parametrize(("api", "works"), [((1, 0), True), ((1, 7), True), ((2, 0), False), ((0, 9), False)])
def test_a_mismatch_shows_both_numbers_and_the_command(
    api: tuple[int, int], works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.registry.API", api)
    registry = Registry.discover(path=[*write_metadata(tmp_path / "site"), *sys.path], environ={})
    if works:
        Engine(table_target(8, 1, 3), algorithm="frozen-host", registry=registry).close()
        return
    upgrade = "specplug-frozen" if api > (1, 0) else "specplug"
    with pytest.raises(RefusedError) as refused:
        Engine(table_target(8, 1, 3), algorithm="frozen-host", registry=registry)
    message = str(refused.value)
    assert "specplug-frozen 1.0 is incompatible: needs plugin API 1.0, this specplug " in message
    assert f" speaks {api[0]}.{api[1]}: pip install --upgrade {upgrade}" in message
    assert "\n" not in message
