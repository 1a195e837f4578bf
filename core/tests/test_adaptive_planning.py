"""Which depths a run may choose from: the package is asked for a plan of each, and the deepest sizes the run."""

from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from specplug.adaptive.config import AdaptiveFile, Measured
from specplug.adaptive.depths import Request
from specplug.adaptive.tiers import DEFAULTS, Tier
from specplug.errors import RefusedError, UserError
from specplug.planning import Run, plan_run
from specplug.spec import Checkpoint, Facts
from specplug.testing.stubs import Stub, stub_registry

FACTS = Facts(
    target=Checkpoint(path="target", config={"model_type": "llama"}, tensors={}),
    features=frozenset({"rollback", "tree_verify"}),
)

STEPS = """
from pydantic import Field
from specplug import Refusal

class Config(SpecConfig):
    num_steps: int = Field(3, ge=1, le=16, description="drafts of a path")

_sound = [specplug_algorithms]

@hookimpl
def specplug_algorithms():
    most = Capabilities(shapes={"chain", "tree"}, variable_depth=VARIABLE)
    update = {"capabilities": most, "config_model": Config, "plan": plan}
    return [spec.model_copy(update=update) for spec in _sound[0]()]

def plan(config, facts, depth):
    nodes = config.num_steps if config.num_draft_tokens is None else min(config.num_steps, config.num_draft_tokens - 1)
    if depth is not None:
        nodes = max(0, min(nodes, depth))
    needs = Capabilities(variable_depth=VARIABLE)
    BODY
    return DraftPlan(needs=needs, nodes=nodes, depth=nodes)
"""


@pytest.fixture
def planned(tmp_path: Any) -> Any:
    """Return a function that plans an algorithm whose `plan` has `body` before its end."""
    number = count()
    with ExitStack() as opened:

        def run(request: Request | None, given: Any = None, body: str = "pass", variable: bool = True) -> Run:
            extra = STEPS.replace("BODY", body).replace("VARIABLE", str(variable))
            stub = Stub("acme-lookup", version="1.2", algorithms=["lookup"], extra=extra)
            registry = opened.enter_context(stub_registry(tmp_path / f"site {next(number)}", stub))
            return plan_run(registry, "lookup", given or {}, FACTS, request)

        yield run


def file(*tiers: Tier, measured: Measured | None = None, policy: Any = "ema") -> Request:
    return Request(policy, AdaptiveFile(tiers, measured or Measured()))


def test_ema_offers_sglangs_candidates_and_sizes_the_run_for_the_deepest(planned: Any) -> None:
    """Though the algorithm's own default is 3."""
    # Breaks with: buffers sized by the start.
    run = planned(Request("ema"))
    assert run.depths.nodes == {0: 0, 1: 1, 3: 3, 5: 5, 7: 7}
    assert run.depths.tiers == DEFAULTS
    assert run.depths.start == 3
    assert run.plan.nodes == 7
    assert run.config.num_steps == 7
    setting = next(each for each in run.settings if each.field == "num_steps")
    assert (setting.source, setting.because) == ("policy", "--speculative-adaptive, its deepest candidate")
    assert any(line.startswith("adaptive: policy ema, depths 0, 1, 3, 5, 7, from 3") for line in run.trace)


def test_num_steps_is_where_it_starts_and_has_to_be_a_candidate(planned: Any) -> None:
    run = planned(Request("ema"), {"num_steps": "5"})
    assert (run.depths.start, run.plan.nodes) == (5, 7)
    with pytest.raises(UserError, match=r"num-steps 4 is no candidate of --speculative-adaptive \(0, 1, 3, 5, 7\)"):
        planned(Request("ema"), {"num_steps": "4"})


def test_num_draft_tokens_bounds_the_candidates(planned: Any) -> None:
    run = planned(Request("ema"), {"num_draft_tokens": 5})
    assert run.depths.nodes == {0: 0, 1: 1, 3: 3, 4: 4}
    assert run.depths.tiers[0].candidates == (1, 3, 4)
    assert run.plan.nodes == 4


def test_cost_offers_every_depth_up_to_the_configured_one(planned: Any) -> None:
    run = planned(Request("cost"), {"num_steps": 5})
    assert list(run.depths.nodes) == [0, 1, 2, 3, 4, 5]
    assert run.depths.tiers == (Tier(1, (0, 1, 2, 3, 4, 5)),)
    assert (run.depths.start, run.plan.nodes) == (5, 5)


def test_cost_may_choose_what_was_measured_where_the_file_has_that(planned: Any) -> None:
    measured = Measured({(1, 1): 1.0}, {(1, 0): 0.1, (1, 2): 0.2, (1, 4): 0.3})
    tiers = Tier(1, (0,)), Tier(8, (0, 2))
    assert [tier.candidates for tier in planned(file(*tiers, measured=measured, policy="cost")).depths.tiers] == [
        (0, 2, 4)
    ] * 2
    assert [tier.candidates for tier in planned(file(*tiers, measured=measured)).depths.tiers] == [(0,), (0, 2)]


def test_an_algorithm_of_one_depth_offers_it_and_0(planned: Any) -> None:
    run = planned(Request("ema"), variable=False)
    assert run.depths.nodes == {0: 0, 3: 3}
    assert [tier.candidates for tier in run.depths.tiers] == [(3,), (0, 3), (0, 3), (0,)]
    assert run.config.num_steps == 3
    (warning,) = run.warnings
    assert "the choice is 3 or 0" in warning.message


def test_a_depth_that_is_refused_is_left_out_with_the_reason(planned: Any) -> None:
    body = "if depth == 5: return Refusal(reason='five is unlucky')"
    run = planned(Request("ema"), body=body)
    assert list(run.depths.nodes) == [0, 1, 3, 7]
    assert run.depths.tiers[0].candidates == (1, 3, 7)
    assert "adaptive: depth 5 is left out: five is unlucky" in run.trace


def test_no_depth_at_all_is_refused(planned: Any) -> None:
    with pytest.raises(RefusedError, match="finds no depth to choose: depth 1 is left out: never: leave it out"):
        planned(Request("ema"), body="if depth is not None: return Refusal(reason='never')")
    with pytest.raises(RefusedError, match="no depth of 0 drafts anything"):
        planned(file(Tier(1, (0,))))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("if depth == 1: needs = Capabilities(variable_depth=True, shapes={'tree'})", "shapes"),
        ("if depth == 1: return DraftPlan(needs=needs, nodes=1, depth=1, lookahead=2)", "lookahead"),
        ("if depth == 1: return DraftPlan(needs=needs, nodes=1, depth=1, bytes_fixed=9)", "bytes_fixed"),
        ("if depth == 1: return DraftPlan(needs=needs, nodes=9, depth=1)", "nodes"),
    ],
)
def test_a_depth_that_needs_more_than_the_deepest_is_the_packages_fault(planned: Any, body: str, what: str) -> None:
    # Breaks with: buffers that hold the deepest plan only.
    with pytest.raises(RefusedError, match=f"fault of acme-lookup 1.2: its plan for depth 1 has other or more {what}"):
        planned(Request("ema"), body=body)


def test_nothing_to_draft_stays_as_it_is_with_a_warning(planned: Any) -> None:
    run = planned(Request("ema"), {"num_draft_tokens": 1})
    assert run.depths is None
    assert run.plan.nodes == 0
    (warning,) = run.warnings
    assert "nothing is drafted" in warning.message


def test_plain_decoding_warns(planned: Any, tmp_path: Any) -> None:
    with stub_registry(tmp_path / "none") as registry:
        run = plan_run(registry, "none", {}, FACTS, Request("ema"))
    (warning,) = run.warnings
    assert warning.message == "--speculative-adaptive has no effect: --speculative-algorithm is none"


def test_without_it_nothing_changes(planned: Any) -> None:
    run = planned(None)
    assert run.depths is None
    assert run.plan.nodes == 3
