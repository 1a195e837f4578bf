"""What `specplug bench` makes of its measurements."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specplug.bench import measure, table
from specplug.bench.figures import figures, spread
from specplug.bench.floor import Floor, weight_bytes
from specplug.bench.measure import Answer, BatchRun
from specplug.bench.workload import Item, Source
from specplug.spec import StepStats
from specplug.testing.targets import decoder_target, table_target


def made(speeds: Sequence[tuple[int, float]], category: str = "") -> list[BatchRun]:
    """Runs of one answer each: (tokens after the first, seconds)."""
    return [
        BatchRun(
            answers=[Answer(Item(Source(at, category), 0, (1,) * 10, 0), [1] * (n + 1), 1, 1.0, 1.0 + time, None)],
            prompt_tokens=10,
            prefill_seconds=1.0,
            decode_tokens=n,
            decode_seconds=time,
            steps=n,
            rows=n,
            width=n,
            stages={"forward": time},
        )
        for at, (n, time) in enumerate(speeds)
    ]


def test_speed_up_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    # The second batch met a busy machine on both sides; ratios are 2, 2 and 4.
    found = figures({"none": made([(10, 10), (10, 100), (10, 20)]), "x": made([(10, 5), (10, 50), (10, 5)])}, None)
    assert found["x"]["speed_up"]["decode"] == {"count": 3, "median": 2.0, "q1": 2.0, "q3": 3.0}
    assert found["x"]["speed_up"]["decode_total"] == pytest.approx(130 / 60)
    assert found["none"]["speed_up"]["decode"]["median"] == 1.0
    # A second of prefill on both sides: 11 / 6, 101 / 51 and 21 / 6.
    assert found["x"]["speed_up"]["with_prefill"]["median"] == pytest.approx(101 / 51)
    assert found["x"]["decode"]["tpot_ms"]["median"] == 500.0


def test_figures_over_nothing_are_none_and_json_can_hold_them() -> None:
    found = figures({"none": made([(0, 0.0)]), "x": made([(0, 0.0)])}, None)
    assert found["x"]["decode"]["tokens_per_second"] is None
    assert found["x"]["speed_up"]["decode"] is None
    assert found["none"]["ledger"] is None
    json.dumps(found, allow_nan=False)


def test_a_devices_idle_time_and_graphs_are_medians_and_shares_of_decode_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stats = StepStats(2, 2, 0, 0, 2, 0, 0, 0, {"forward": 0.001, "wait": 0.002})
    run = made([(2, 1.0)])[0]
    run.stages = {}
    for exposed, graph in ((0.0001, True), (None, True), (0.0005, False), (0.0002, True)):
        measure._add(run, replace(stats, exposed=exposed, graph=graph), 0.004)
    found = figures({"gpu": [run], "cpu": made([(2, 1.0)])}, None)
    steps = found["gpu"]["steps"]
    assert steps["exposed_ms"] == {"count": 3, "median": pytest.approx(0.2), "q1": pytest.approx(0.15), "q3": 0.35}
    assert steps["graph_share"] == 0.75
    assert (found["cpu"]["steps"]["exposed_ms"], found["cpu"]["steps"]["graph_share"]) == (None, None)
    # What the device was waited for is the verify's.
    assert steps["time_share"]["verify"] == pytest.approx(0.75)
    for column in found.values():
        column["pages"] = 1
    out = table.console(stderr=False)
    out.print(table._host({"gpu": found["gpu"]}))
    said = capsys.readouterr().out
    assert "exposed" in said
    assert "0.200" in said
    run.exposed, run.graphed = [], []
    quiet = figures({"cpu": [run]}, None)
    quiet["cpu"]["pages"] = 1
    table.console(stderr=False).print(table._host(quiet))
    assert "exposed" not in capsys.readouterr().out


def test_spread() -> None:
    assert spread([]) is None
    assert spread([None, 3.0]) == {"count": 1, "median": 3.0, "q1": 3.0, "q3": 3.0}
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"count": 5, "median": 3.0, "q1": 2.0, "q3": 4.0}


def test_categories_pair_requests() -> None:
    base = made([(10, 10)], "qa") + made([(10, 30)], "code")
    fast = made([(10, 5)], "qa") + made([(10, 10)], "code")
    found = figures({"none": base, "x": fast}, None)["x"]["categories"]
    assert {name: each["speed_up"]["median"] for name, each in found.items()} == {"qa": 2.0, "code": 3.0}
    assert figures({"none": made([(1, 1)])}, None)["none"]["categories"] == {}


def test_share_of_floor() -> None:
    # A step must read 100 + 15.5 * 2 bytes at 1000 a second, so 131 ms; it took 1 s.
    found = figures({"none": made([(10, 10)])}, Floor(weights=100, kv=2, bandwidth=1000.0))
    assert found["none"]["decode"]["share_of_floor"] == pytest.approx(0.131)


def test_an_embedding_with_a_head_of_its_own_is_not_read_whole() -> None:
    target = decoder_target(1, 64)
    every = sum(parameter.nbytes for parameter in target.model.parameters())
    assert weight_bytes(target) == every - 64 * 32 * 4
    assert weight_bytes(table_target(8)) == 0
