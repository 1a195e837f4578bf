"""``specplug estimate``: the published figures, the break-even point, the curve and bad input."""

import math

import pytest

from specplug.cli import main
from specplug.cli.estimate import HEIGHT, WIDTH, Estimate, curve, report


def run(alpha: float, num_steps: int = 5, target_ms: float = 20.0, draft_ms: float = 2.0) -> Estimate:
    return Estimate(alpha=alpha, num_steps=num_steps, target_ms=target_ms, draft_ms=draft_ms)


@pytest.mark.parametrize(
    ("alpha", "tokens", "tpot", "speedup"),
    [(0.8, 3.69, 8.13, 2.46), (0.5, 1.97, 15.24, 1.31), (0.3, 1.43, 21.02, 0.95)],
)
def test_published_figures(alpha, tokens, tpot, speedup):
    found = run(alpha)
    assert (round(found.tokens, 2), round(found.tpot_ms, 2), round(found.speedup, 2)) == (tokens, tpot, speedup)
    assert found.verify_ms == 30.0


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.9, 0.999999])
def test_sum_equals_the_closed_form(alpha):
    assert run(alpha).tokens == pytest.approx((1 - alpha**6) / (1 - alpha), rel=1e-9)


def test_every_draft_accepted_gives_all_drafts_and_one_more():
    assert run(1.0, num_steps=7).tokens == 8.0


def test_break_even_is_where_speed_up_is_one():
    even = run(0.8).break_even()
    assert even is not None
    assert run(even).speedup == pytest.approx(1.0, abs=1e-9)
    assert run(even - 0.01).speedup < 1.0 < run(even + 0.01).speedup


def test_a_draft_slower_than_the_target_never_breaks_even():
    assert run(0.9, draft_ms=20.1).break_even() is None
    assert run(0.9, draft_ms=0.0).break_even() == pytest.approx(0.0, abs=1e-12)


def test_best_steps_beats_its_neighbours():
    found = run(0.8)
    best = found.best_steps()
    assert found.of(best).speedup >= max(found.of(best - 1).speedup, found.of(best + 1).speedup)
    assert run(0.05, draft_ms=10).best_steps() == 0


def test_advice_only_when_it_does_not_pay():
    assert not any("advice" in line for line in report(run(0.8)))
    assert any("do not speculate" in line and "--num-steps 1" in line for line in report(run(0.3)))
    assert any(line.endswith("slower than plain decoding here") for line in report(run(0.05, draft_ms=10)))


def test_curve_marks_the_run_and_the_line_of_no_gain():
    lines = curve(run(0.5)).splitlines()
    rows = lines[1 : 1 + HEIGHT]
    assert sum(row.count("o") for row in rows) == 1
    assert next(row for row in rows if "o" in row).index("o") == 9 + (WIDTH - 1) // 2
    assert next(row for row in rows if row.lstrip().startswith("1.00x")).count("-") > WIDTH // 2
    assert rows[0].lstrip().startswith("4.00x")
    assert all(len(line) <= 9 + WIDTH for line in lines)


def test_command_prints_the_figures(capsys):
    args = ["estimate", "--alpha", "0.3", "--num-steps", "5", "--target-ms", "20", "--draft-ms", "2"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "1.43" in out
    assert "0.95x" in out
    assert "do not speculate" in out
    assert "*" not in out
    assert main([*args, "--plot"]) == 0
    assert "*" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--alpha", "1.5", "from 0 to 1"),
        ("--alpha", "nan", "from 0 to 1"),
        ("--alpha", "most", "from 0 to 1"),
        ("--num-steps", "-1", "from 0 to 1024"),
        ("--num-steps", "2.5", "whole number"),
        ("--target-ms", "0", "above 0"),
        ("--target-ms", "inf", "above 0"),
        ("--draft-ms", "-0.1", "at least 0"),
    ],
)
def test_bad_input_is_one_line_with_option_value_and_range(capsys, option, value, says):
    given = {"--alpha": "0.5", "--num-steps": "3", "--target-ms": "20", "--draft-ms": "2"} | {option: value}
    assert main(["estimate", *(f"{name}={text}" for name, text in given.items())]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{option} {value}" in err
    assert says in err


def test_all_bad_options_are_told_at_once(capsys):
    assert main(["estimate", "--alpha=2", "--num-steps=x", "--target-ms=1", "--draft-ms=1"]) == 2
    err = capsys.readouterr().err
    assert "--alpha" in err
    assert "--num-steps" in err
    assert "--target-ms" not in err


def test_tokens_never_leave_their_bounds():
    for alpha in (0.0, 0.25, 0.5, 1.0):
        for steps in (0, 1, 5, 64):
            assert 1.0 <= run(alpha, steps).tokens <= steps + 1 + 1e-9
            assert math.isfinite(run(alpha, steps).speedup)
