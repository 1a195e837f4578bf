"""`specplug bench --gate`: every way in which a run can be worse than its baseline."""

import math
from dataclasses import replace
from typing import Any

import pytest
from bench_gated import X, changed, gate, made

from specplug.bench.gate import Parting, TextChanges, judge, text_changes
from specplug.bench.report import Answer


def changes(report: dict[str, Any]) -> TextChanges:
    was, now = ([Answer.model_validate(row) for row in each["batches"][0]["answers"]] for each in (made(), report))
    return text_changes(1, ["none", "x"], was, now)


def worse(report: dict[str, Any], tie: float | None = None, **options: Any) -> list[str]:
    return list(judge(gate(**options), report, [changes(report)], tie).worse)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (made(), []),
        (changed(f"{X}/ledger/tokens_per_target_step", 1.96), []),
        (
            changed(f"{X}/ledger/tokens_per_target_step", 1.95),
            [
                "batch 1, x: 1.950 tokens per target step, was 2.000 "
                "(accept length 3.000, was 3.000; coverage 0.500, was 0.500)"
            ],
        ),
        # A drafter may trade one for the other: what they come to is judged.
        (changed(f"{X}/ledger/accept_length", 2.0), []),
        (changed(f"{X}/ledger/draft_coverage", 0.1), []),
        (changed(f"{X}/speed_up/decode/median", 0.9), []),
        (changed(f"{X}/speed_up/decode/median", 0.899), ["batch 1, x: speed-up 0.899, at least 0.9 is wanted"]),
        (
            changed(f"{X}/speed_up/decode", None),
            ["batch 1, x: speed-up unknown, as nothing was decoded, at least 0.9 is wanted"],
        ),
        # The first column is what it is measured against.
        (changed("batches/0/columns/none/speed_up/decode/median", 0.1), []),
        (
            changed("batches/0/answers/1/ids", "1 2 4"),
            ["batch 1, none, prompt 2, token 3: 4, was 3", "batch 1, x, prompt 2, token 3: 4, was 3"],
        ),
        (changed("batches/0/answers/1/other", {"x": "7 2 3"}), ["batch 1, x, prompt 2, token 1: 7, was 1"]),
        (changed("batches/0/answers/0/other", {"x": "1 2"}), ["batch 1, x, prompt 1, token 3: the end, was 3"]),
        (changed("batches/0/answers/0/other", {"x": "1 2 3 4"}), ["batch 1, x, prompt 1, token 4: 4, was the end"]),
        (changed("batches/0/answers/0/other", {"x": ""}), ["batch 1, x, prompt 1, token 1: the end, was 1"]),
        (
            changed("batches/0/answers/0/asked", "other"),
            ["batch 1, prompt 1: other tokens were asked: the tokenizer or the chat template is another"],
        ),
        (changed("batches/0/answers/1", ...), ["batch 1, prompt 2: is in the baseline only"]),
        (changed("batches/0/answers/1/turn", 1), [
            "batch 1, prompt 2: is in the baseline only",
        ]),
    ],
)  # fmt: skip
def test_what_is_worse_is_one_line_each(report: dict[str, Any], said: list[str]) -> None:
    assert worse(report) == said


def test_slack_and_floor_are_what_was_asked_for() -> None:
    slower = changed(f"{X}/ledger/tokens_per_target_step", 1.01)
    assert len(worse(slower, slack=0.49)) == 1
    assert worse(slower, slack=0.5) == []
    assert len(worse(changed(f"{X}/ledger/tokens_per_target_step", 1.999), slack=0.0)) == 1
    assert worse(made(), slack=0.0, floor=1.5) == []
    assert worse(made(), floor=1.6) == ["batch 1, x: speed-up 1.500, at least 1.6 is wanted"]
    for unknown in (None, {"median": 0.001}):
        assert worse(changed(f"{X}/speed_up/decode", unknown), floor=0.0) == []


def test_better_is_not_worse() -> None:
    report = changed(f"{X}/ledger/tokens_per_target_step", 4.0)
    report["batches"][0]["columns"]["x"]["speed_up"]["decode"]["median"] = 9.0
    assert worse(report) == []


def test_a_tie_passes_in_half_precision_only() -> None:
    at = [Parting(1, "x", 0, 0, 4, 5, 6, gap) for gap in (0.0, 0.25, 0.3, math.inf)]
    found = TextChanges(answers=4, partings=at)
    half = judge(gate(), made(), [found], 0.25)
    assert half.worse == (
        "batch 1, x, prompt 1, token 5: 6, was 5 (gap 3.0e-01)",
        "batch 1, x, prompt 1, token 5: 6, was 5",
    )
    assert (half.ties, half.largest_tie) == (2, 0.25)
    exact = judge(gate(), made(), [found], None)
    assert (len(exact.worse), exact.ties) == (4, 0)
    assert exact.worse[0].endswith("(gap 0.0e+00)")


def rows(*answers: tuple[int, int, str, str]) -> list[Answer]:
    return [Answer(prompt=prompt, turn=turn, asked=asked, ids=ids) for prompt, turn, asked, ids in answers]


def test_turns_after_another_answer_are_not_compared_but_counted() -> None:
    was = rows((0, 0, "a", "1 2"), (0, 1, "b", "3"), (0, 2, "c", "4"), (1, 0, "d", "5"))
    now = rows((0, 0, "a", "1 9"), (0, 1, "other", "8"), (1, 0, "d", "5"))
    found = text_changes(4, ["none", "x"], was, now)
    assert [parting.line() for parting in found.partings] == [
        "batch 4, none, prompt 1, token 2: 9, was 2",
        "batch 4, x, prompt 1, token 2: 9, was 2",
    ]
    assert (found.answers, found.following, found.lines) == (4, 4, [])
    # Another column's answer is not what the next turn follows.
    aside = [now[0].model_copy(update={"ids": (1, 2), "other": {"x": (1, 9)}}), *was[1:]]
    found = text_changes(4, ["none", "x"], was, aside)
    assert (len(found.partings), found.answers, found.following) == (1, 8, 0)
    late = [was[0], was[1].model_copy(update={"ids": (7,)}), *was[2:]]
    assert (
        text_changes(4, ["none"], was, late).partings[0].line() == "batch 4, none, prompt 1, turn 2, token 1: 7, was 3"
    )


def test_the_summary_says_how_much_was_compared() -> None:
    verdict = judge(gate(), made(), [changes(made())], None)
    assert verdict.summary(gate()) == "gate: as good as b.json: 4 answers compared"
    ties = replace(verdict, worse=("a", "b"), ties=2, largest_tie=0.125, following=3)
    assert ties.summary(gate()) == (
        "gate: 2 worse than b.json: 4 answers compared, 2 part at a tie (largest gap 1.2e-01), "
        "3 of later turns not compared, as an earlier turn parted"
    )
    assert ties.report(gate(slack=0.5))["worse"] == ["a", "b"]
