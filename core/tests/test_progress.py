"""Stages of a start: silent by themselves, one line each with its seconds where they are printed."""

import logging
import sys

import pytest

from specplug.runtime import progress
from specplug.runtime.progress import printed, ready, stage


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is 1.5 s later than the one before."""
    at = [0.0]

    def tick():
        at[0] += 1.5
        return at[0]

    monkeypatch.setattr(progress, "perf_counter", tick)


def start():
    with stage("load weights", "15.0 GiB"):
        pass
    with stage("capture graphs") as running:
        for done in (1, 2, 3):
            running.at(done, 3)
        running.detail = "largest 64 rows"
    ready(12.34, ["memory 140.0 GiB", "  weights 15.0 GiB"])


def test_the_api_says_nothing(capsys):
    start()
    assert capsys.readouterr() == ("", "")


def test_printed_is_one_line_per_stage_on_standard_error(capsys, clock):
    with printed():
        start()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "load weights: 1.5 s (15.0 GiB)",
        "capture graphs 3/3: 1.5 s (largest 64 rows)",
        "memory 140.0 GiB",
        "  weights 15.0 GiB",
        "ready: 12.3 s",
    ]


def test_a_terminal_shows_what_is_running_and_keeps_the_lines_alone(capsys, clock, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with printed():
        start()
    err = capsys.readouterr().err
    assert "load weights ..." in err
    assert "capture graphs 2/3 ..." in err
    kept = [line.split("\r")[-1] for line in err.split("\n")]
    assert kept[:2] == ["load weights: 1.5 s (15.0 GiB)", "capture graphs 3/3: 1.5 s (largest 64 rows)"]
    assert kept[-2:] == ["ready: 12.3 s", ""]


def test_a_stage_that_fails_leaves_no_half_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(ValueError, match="why"), printed(), stage("load weights"):
        raise ValueError("why")
    err = capsys.readouterr().err
    assert "s (" not in err
    assert err.split("\r")[-1] == ""


def test_printing_ends_with_its_block(capsys):
    with printed():
        pass
    start()
    assert capsys.readouterr().err == ""
    assert progress.LOGGER.handlers == []
    assert progress.LOGGER.propagate


def test_an_application_may_listen(caplog):
    with caplog.at_level(logging.INFO, logger="specplug.start"):
        start()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "load weights", "capture graphs 3/3", "memory 140.0 GiB", "  weights 15.0 GiB", "ready",
    ]  # fmt: skip
