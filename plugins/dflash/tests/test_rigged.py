"""Drafts rigged to be right in one layout only: which row fills which slot shows in what is accepted."""

from pathlib import Path
from typing import Any

import dflash_tiny as tiny
import pytest

from specplug import SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.targets import decoder_target

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target whose next token follows from its last one alone."""
    return tiny.softened(decoder_target(5, 64, folder=tmp_path_factory.mktemp("chain") / "target"), 0.0)


def silent(weights: dict[str, Any]) -> dict[str, Any]:
    """Layers that add nothing: a row's state is the embedding that went in."""
    return {
        name: tensor * (not name.endswith(("o_proj.weight", "down_proj.weight"))) for name, tensor in weights.items()
    }


@pytest.mark.parametrize("layout", ["next slot", "same slot"])
def test_a_row_that_continues_its_own_token_is_right_in_one_layout(
    lab: Any, chain: Any, layout: str, tmp_path: Path
) -> None:
    """The anchor's row says what the target says after the anchor: the first draft, where row k fills slot k + 1."""
    weights = silent(tiny.body())
    weights["norm.weight"] = weights["norm.weight"] * 0 + 1
    draft = tiny.write(tmp_path, tiny.zlab_config(sample_from_anchor=layout == "next slot"), weights)
    with lab.engine("dflash", draft, model=chain) as engine:
        engine.generate(PROMPTS, GREEDY)
        first = engine.ledger.report()["acceptance_by_depth"][0]["conditional"]
    assert first == 1.0 if layout == "next slot" else first < 0.4


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chain_that_knows_the_target_is_right_throughout(
    lab: Any, chain: Any, temperature: float, anchored: bool, path: str, tmp_path: Path
) -> None:
    """A Markov head that holds the target's own table: every draft is accepted in either layout, also after preemption
    and in chunks, also drawn."""
    weights = silent(tiny.body()) | tiny.bigram_ends(chain.model, 64)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 0
    draft = tiny.write(tmp_path, tiny.dspark_config("vanilla", 64, sample_from_anchor=anchored), weights)
    options = {"max_total_tokens": 64, "context_length": 64, "chunked_prefill_size": 4, "max_running_requests": 4}

    def made() -> Any:
        return lab.engine("dspark", draft, model=chain, **options)

    if path == "device":
        with device_path():
            engine = made()
    else:
        engine = made()
    with engine:
        assert engine.run.plan.nodes == 4 + anchored
        engine.generate(PROMPTS, GREEDY.model_copy(update={"temperature": temperature, "seed": 3}))
        ledger = engine.ledger.report()
        assert ledger["accepted"] == ledger["drafted"] > 80
        assert engine.free_pages == engine.pages
