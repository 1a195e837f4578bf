"""The confidence head cuts what is verified: by the product of its values so far, and by nothing that a slot drew."""

from pathlib import Path
from typing import Any

import dflash_tiny as tiny
import pytest
import torch
from dflash_dense import Case, block_drafts

from specplug import SamplingParams
from specplug.testing import Move
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path

WEIGHTS = tiny.body() | tiny.ends() | tiny.markov("gated")
TEXT = torch.randint(0, 64, (60,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.6])
def test_drafts_end_where_survival_falls_below(lab: Any, threshold: float, with_markov: bool, tmp_path: Path) -> None:
    weights = dict(WEIGHTS)
    if not with_markov:
        weights["confidence_head.proj.weight"] = weights["confidence_head.proj.weight"][:, : tiny.HIDDEN]
    draft = tiny.write(tmp_path, tiny.dspark_config("gated", confidence_head_with_markov=with_markov), weights)
    harness = lab.harness("dspark", draft, {"dspark_confidence_threshold": threshold, "draft_sampling": False})
    case = Case(weights, kind="gated", next_slot=True)
    harness.admit(0, TEXT, 5)
    step = harness.ingest([Move(0, 5)])
    lengths = set()
    for done in range(5, 45):
        drafts, sure = block_drafts(case, lab.model, TEXT[: done + 1])
        survival = torch.tensor(sure).cumprod(0)
        wanted = drafts[: int((survival >= threshold).sum())]
        assert list(harness.propose(step)[0][0]) == wanted
        lengths.add(len(wanted))
        step = harness.ingest([Move(0, 1)])
    assert lengths == {5} if threshold == 0 else len(lengths) > 2


def test_the_limit_holds_where_it_is_shorter(lab: Any, tmp_path: Path) -> None:
    draft = tiny.write(tmp_path, tiny.dspark_config("gated"), WEIGHTS)
    harness = lab.harness("dspark", draft, {"dspark_confidence_threshold": 0.01})
    step = harness.play(0, TEXT, 20, [20])
    most = len(harness.propose(step)[0][0])
    assert most > 2
    for limit in (0, 1, 2):
        harness.propose(step, {0: limit})
        assert int(harness.proposal.num_valid[0]) == limit


def test_what_exists_does_not_depend_on_what_was_drawn(lab: Any, tmp_path: Path) -> None:
    """Rows that differ in their seed alone: where slot 0's drafts differ, slot 0 still exists in all or in none."""
    draft = tiny.write(tmp_path, tiny.dspark_config("gated"), WEIGHTS)
    harness = lab.harness("dspark", draft, {"dspark_confidence_threshold": 0.6}, slots=32)
    mixed = 0
    for done in range(5, 25):
        for slot in range(32):
            harness.admit(slot, TEXT, done, SamplingParams(temperature=2.0, seed=slot))
        found = harness.propose(harness.ingest([Move(slot, done) for slot in range(32)]))
        firsts = [tokens[:1] for tokens, _ in found.values()]
        assert len({len(first) for first in firsts}) == 1
        mixed += len(set(firsts)) > 1
        for slot in range(32):
            harness.release(slot)
    assert mixed > 3


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_device_path_is_the_host_path(lab: Any, threshold: float, tmp_path: Path) -> None:
    """Equal answers, equally many drafts verified and accepted; a threshold verifies fewer."""
    weights = tiny.body() | tiny.bigram_ends(lab.soft.model, 64)
    draft = tiny.write(tmp_path, tiny.dspark_config("vanilla", 64), weights)
    config = {"dspark_confidence_threshold": threshold}
    options: dict[str, Any] = {"model": lab.soft, "chunked_prefill_size": 8, "max_running_requests": 3}
    sampling = SamplingParams(temperature=0.7, seed=4, max_tokens=16)
    seen = []
    for path in ("host", "device"):
        if path == "device":
            with device_path():
                engine = lab.engine("dspark", draft, config, **options)
        else:
            engine = lab.engine("dspark", draft, config, **options)
        with engine:
            assert engine.run.plan.reads_back is (threshold > 0)
            found = engine.generate(PROMPTS, sampling)
            seen.append([(one.ids, one.ledger["accepted"], one.ledger["drafted"]) for one in found])
    assert [row[:2] for row in seen[0]] == [row[:2] for row in seen[1]]
    drafted, accepted = (sum(row[at] for row in seen[0]) for at in (2, 1))
    assert 0.1 * drafted < accepted < drafted, "the drafts are meant to be right often, and wrong often"
    if threshold:
        assert seen[0] == seen[1]
