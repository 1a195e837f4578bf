"""The file of ``--speculative-adaptive-config``: what is taken, with which defaults, and one line for every fault."""

import json
from pathlib import Path

import pytest

from specplug.adaptive.config import MEASURED, Measured, read_adaptive
from specplug.adaptive.depths import Request, adaptive_request
from specplug.adaptive.tiers import DEFAULTS, Tier, all_candidates, as_json, ladder, one_tier, tier_at
from specplug.errors import UserError
from specplug.options import EngineOptions


def write(folder: Path, text: str) -> str:
    path = folder / "adaptive.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_tier_has_sglangs_defaults_and_its_own_keys_win(tmp_path: Path) -> None:
    """What stands outside the tiers holds for all of them."""
    # Breaks with: a wrong default, shared settings that override a tier's own.
    text = """{"8": {"candidate_steps": [3, 0], "ema_alpha": 0.5}, "update_interval": 2, "ema_alpha": 1,
               "1": {"candidate_steps": [1]}}"""
    first, second = read_adaptive(write(tmp_path, text)).tiers
    assert first == Tier(1, (1,), ema_alpha=1.0, warmup_batches=10, update_interval=2)
    assert (first.up_hysteresis, first.down_hysteresis, first.ceiling_coeff) == (0.0, -0.25, 0.0)
    assert second == Tier(8, (0, 3), ema_alpha=0.5, update_interval=2)


def test_tiers_survive_writing_and_reading(tmp_path: Path) -> None:
    # Breaks with: a field that is written and not read, or under another name.
    measured = Measured({(1, 1): 0.01, (8, 32): 0.5}, {(8, 3): 0.25}, {8: [0.5, 0.25]})
    found = read_adaptive(write(tmp_path, json.dumps({**as_json(DEFAULTS), MEASURED: measured.as_json()})))
    assert found.tiers == DEFAULTS
    assert found.measured == measured


FAULTS = {
    "1: an array": ("[]", "line 1: it is []"),
    "bad JSON": ('{\n "1": {,}\n}', "line 2: not valid JSON"),
    "no tier": ('{"ema_alpha": 0.2}', "names no batch size"),
    "old form": ('{\n"candidate_steps": [1]\n}', "line 2: candidate_steps is no setting here"),
    "unknown": ('{"1": {"candidate_steps": [1]},\n"warmup": 3}', "line 2: warmup is no setting here"),
    "unknown in a tier": ('{"1": {"candidate_steps": [1],\n\n"alpha": 3}}', "line 3: 1 alpha is no setting here"),
    "no candidates": ('{"1": {"candidate_steps": [1]},\n"8": {}}', "line 2: 8 has no candidate_steps"),
    "empty": ('{\n\n"1": {\n"candidate_steps": []}}', "line 4: 1 candidate_steps is []"),
    "negative": ('{"1": {"candidate_steps": [1, -1]}}', "candidate_steps is [1, -1]"),
    "a truth value": ('{"1": {"candidate_steps": [true]}}', "candidate_steps is [True]"),
    "text": ('{"1": {"candidate_steps": "1,3"}}', "candidate_steps is 1,3"),
    "twice the same": ('{"1": {"candidate_steps": [1, 1]}}', "give each depth once"),
    "twice a name": ('{"1": {"candidate_steps": [1]},\n"1": {"candidate_steps": [1]}}', "1 stands there twice"),
    "twice a size": ('{"1": {"candidate_steps": [1]},"01": {"candidate_steps": [1]}}', "names a batch size twice"),
    "batch 0": ('{"0": {"candidate_steps": [1]}}', "batch size 0: give a whole number of at least 1"),
    "alpha": ('{"1": {"candidate_steps": [1]},\n"ema_alpha": 0}', "line 2: ema_alpha is 0: give a number above 0"),
    "interval": ('{"1": {"candidate_steps": [1], "update_interval": 0}}', "whole number of at least 1"),
    "not a number": ('{"1": {"candidate_steps": [1], "up_hysteresis": NaN}}', "up_hysteresis is nan: give a number"),
    "measured": (
        '{"1": {"candidate_steps": [1]},\n"measured": {\n"verify_ms": [[1, 1]]}}',
        "line 3: measured verify_ms has the entry [1, 1]: write [rows, tokens, ms]",
    ),
    "acceptance": (
        '{"1": {"candidate_steps": [1]}, "measured": {"acceptance": [[1, [1.5]]]}}',
        "measured acceptance has the entry",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_says_where(tmp_path: Path, fault: str) -> None:
    text, said = FAULTS[fault]
    with pytest.raises(UserError) as error:
        read_adaptive(write(tmp_path, text))
    assert said in str(error.value)
    assert str(error.value).startswith(f"--speculative-adaptive-config {tmp_path / 'adaptive.json'}, line ")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read it"):
        read_adaptive(str(tmp_path / "none.json"))


def test_options_without_the_switch_are_refused() -> None:
    # Breaks with: an option that is silently ignored.
    assert adaptive_request(EngineOptions()) is None
    for option in ("policy", "config"):
        with pytest.raises(UserError, match=f"adaptive-{option} cost has no effect without --speculative-adaptive:"):
            adaptive_request(EngineOptions(**{f"speculative_adaptive_{option}": "cost"}))
    assert adaptive_request(EngineOptions(speculative_adaptive=True)) == Request("ema")


def test_batch_sizes_belong_to_the_last_tier_that_begins_at_or_below() -> None:
    assert [tier_at(DEFAULTS, size) for size in (1, 4, 8, 31, 32, 63, 64, 500)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert tier_at(DEFAULTS[1:], 1) == 0, "below all of them the first counts"
    assert all_candidates(DEFAULTS) == [0, 1, 3, 5, 7]


@pytest.mark.parametrize(
    ("candidates", "offered", "kept"),
    [
        ((1, 3, 5, 7), (0, 1, 2, 3), (1, 3)),
        ((0, 1), (0, 4), (0, 4)),
        ((5, 7), (0, 3), (3,)),
        ((0,), (0, 3), (0,)),
    ],
)
def test_candidates_become_what_is_offered(candidates: tuple[int, ...], offered: tuple[int, ...], kept: object) -> None:
    """The deepest that is no deeper, and what is above 0 stays above."""
    assert Tier(1, candidates).with_candidates(offered).candidates == kept


def test_the_ladder_ends_at_the_deepest() -> None:
    assert ladder(3) == [0, 1, 2, 3]
    for deepest in range(1, 65):
        found = ladder(deepest)
        assert found[0] == 0
        assert found[-1] == deepest
        assert found == sorted(set(found))
        assert len(found) <= 16
    assert one_tier([3, 0])[0].candidates == (0, 3)
