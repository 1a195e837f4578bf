"""One run, settled or refused: the core's own checks, who is blamed, and what `plan_of` may do."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from specplug.combine import combined_plan
from specplug.errors import RefusedError, UserError
from specplug.planning import Run, load_drafter_class, plan_run, run_of
from specplug.plans import features_needed
from specplug.spec import (
    Capabilities,
    Checkpoint,
    DraftPlan,
    Facts,
    KVLayers,
    Refusal,
    SpecConfig,
    TapRequest,
)
from specplug.testing.stubs import Stub, stub_registry

ALL = frozenset(
    {"rollback", "tree_verify", "taps", "own_kv", "read_kv", "borrow:embed_tokens", "borrow:lm_head", "borrow:rope"}
)
FACTS = Facts(target=Checkpoint(path="target", config={"model_type": "llama"}, tensors={}), features=ALL)

ANYTHING = """
from specplug import KVLayers, TapRequest
_sound = [specplug_algorithms]  # bare, it would look like a hook of that name

@hookimpl
def specplug_algorithms():
    most = Capabilities(
        shapes={"chain", "tree", "block"}, proposal_probs="dense", runs_on={"device", "host"},
        taps=[TapRequest(at="any")], draft_kv={"own_layers", "reads_target"},
        borrows={"embed_tokens", "lm_head", "rope"}, vocab="mapped", variable_depth=True, graph_safe=True,
    )
    return [spec.model_copy(update={"capabilities": most}) for spec in _sound[0]()]
"""


def planning(body: str) -> str:
    """Return source that replaces the stub's `plan`."""
    return f"\ndef plan(config, facts, depth):\n    {body}\n"


@pytest.fixture
def installed(tmp_path):
    """Return a function that makes a registry of stubs; the path is cleaned up afterwards."""
    with ExitStack() as opened:
        yield lambda *stubs: opened.enter_context(stub_registry(tmp_path, *stubs))


def stub(extra="", name="acme-lookup", algorithm="lookup", **more):
    return Stub(name, version="1.2", algorithms=[algorithm], extra=extra, **more)


def refused(registry, word="lookup", given=None, facts=FACTS):
    with pytest.raises(RefusedError) as error:
        plan_run(registry, word, given or {}, facts)
    return error.value


# --- a settled run ---------------------------------------------------------------------------------------------------


def test_a_run_holds_what_was_settled(installed):
    registry = installed(stub(aliases={"lookup": ["find"]}))
    run = plan_run(registry, "Find", {"num_draft_tokens": "5"}, FACTS)
    assert (run.word, run.algorithm) == ("Find", "lookup")
    assert run.installed is not None
    assert run.installed.distribution == "acme-lookup"
    assert run.config == SpecConfig(num_draft_tokens=5)
    assert run.plan is not None
    assert run.plan.nodes == 4
    assert [(s.field, s.value, s.source) for s in run.settings] == [("num_draft_tokens", 5, "user")]
    assert any("find" in line for line in run.trace)
    assert "--speculative-num-draft-tokens = 5 (user)" in run.trace
    assert run.trace[-1].startswith("plan: 4 drafts of depth 4, chain")
    assert run.warnings == ()


def test_observers_are_told_of_the_settled_run(installed):
    info = plan_run(installed(stub()), "lookup", {}, FACTS).info
    assert info is not None
    assert (info.algorithm, info.distribution, info.version, info.plan.nodes) == ("lookup", "acme-lookup", "1.2", 1)


def test_none_plans_nothing(installed):
    run = plan_run(installed(stub()), "NONE", {}, FACTS)
    assert (run.algorithm, run.installed, run.config, run.plan, run.info.plan) == ("none", None, None, None, None)


def test_none_drops_nothing_silently(installed):
    registry = installed(stub())
    assert "--speculative-num-draft-tokens has no effect" in str(refused(registry, "none", {"num_draft_tokens": 4}))
    drafted = FACTS.model_copy(update={"draft": Checkpoint(path="draft-folder")})
    warnings = plan_run(registry, "none", {}, drafted).warnings
    assert [w.severity for w in warnings] == ["warning"]
    assert "draft-folder" in warnings[0].message


def test_the_facts_of_the_caller_are_left_alone(installed):
    run = plan_run(installed(stub()), "lookup", {}, FACTS)
    assert FACTS._planner is None
    assert run.facts._planner is not None
    assert run.facts.target is FACTS.target


def test_a_refusal_has_the_trace_that_led_there(installed):
    registry = installed(stub(planning('return Refusal(reason="no", try_instead="more memory")')))
    error = refused(registry, given={"num_draft_tokens": 3})
    assert str(error) == "'lookup' cannot run here: no: try more memory"
    assert any("acme-lookup 1.2" in line for line in error.trace)
    assert error.trace[-1] == "--speculative-num-draft-tokens = 3 (user)"


def test_a_bad_option_has_the_trace_of_the_resolution(installed):
    error = refused(installed(stub()), given={"num_draft_tokens": "0"})
    assert str(error) == "--speculative-num-draft-tokens 0: must be a whole number, at least 1"
    assert any("acme-lookup 1.2" in line for line in error.trace)


# --- faults of a package ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('raise KeyError("boom")', "plan raised KeyError: 'boom'"),
        ("return None", "plan returned None"),
        ('return DraftPlan(needs=Capabilities(shapes={"tree"}), nodes=1, depth=1)', "more shapes than its manifest"),
        ('return DraftPlan(needs=Capabilities(proposal_probs="dense"), nodes=1, depth=1)', "more proposal_probs"),
        ("return DraftPlan(needs=Capabilities(), nodes=2, depth=3)", "2 tokens with a longest path of 3"),
        ("return DraftPlan(needs=Capabilities(), nodes=2, depth=0)", "2 tokens with a longest path of 0"),
        ("return DraftPlan(needs=Capabilities(), nodes=4, depth=4)", "drafts 4 tokens where num_draft_tokens 4"),
    ],
)
def test_a_fault_of_the_package_names_it(installed, body, says):
    line = str(refused(installed(stub(planning(body))), given={"num_draft_tokens": "4"}))
    assert says in line
    assert "acme-lookup 1.2" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('needs=Capabilities(taps=[TapRequest(at="any")])', "a tap without saying which"),
        ('needs=Capabilities(taps=[TapRequest(at=1)]), catch_up="tokens"', "still needs taps"),
    ],
)
def test_taps_must_be_resolved_and_fed(installed, more, says):
    registry = installed(stub(ANYTHING + planning(f"return DraftPlan(nodes=1, depth=1, {more})")))
    assert says in str(refused(registry))


def test_a_plan_that_uses_all_its_budget_is_no_fault(installed):
    registry = installed(stub(planning("return DraftPlan(needs=Capabilities(), nodes=3, depth=3)")))
    assert plan_run(registry, "lookup", {"num_draft_tokens": 4}, FACTS).plan is not None


def test_reserved_option_names_are_a_fault(installed):
    model = "class Own(SpecConfig):\n    draft_model_size: int = 1\nSpecConfig = Own\n"
    line = str(refused(installed(stub(model))))
    assert "draft_model_size" in line
    assert "acme-lookup 1.2" in line


# --- needs against features ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "more", "feature"),
    [
        ({}, {"nodes": 1, "depth": 1}, ("rollback",)),
        ({"shapes": {"tree"}}, {}, ("tree_verify",)),
        ({"taps": [TapRequest(at="final_norm")]}, {}, ("taps",)),
        ({"draft_kv": {"own_layers"}}, {}, ("own_kv",)),
        ({}, {"kv": (KVLayers(layers=1, kv_heads=1, k_dim=8, v_dim=8),)}, ("own_kv",)),
        ({"draft_kv": {"reads_target"}}, {}, ("read_kv",)),
        ({"borrows": {"rope", "lm_head"}}, {}, ("borrow:lm_head", "borrow:rope")),
        ({"shapes": {"chain", "block"}}, {}, ()),
    ],
)
def test_features_needed(needs, more, feature):
    plan = DraftPlan(**({"needs": Capabilities(**needs), "nodes": 0, "depth": 0} | more))
    assert features_needed(plan) == feature


def test_all_missing_features_are_told_in_one_refusal(installed):
    needs = 'Capabilities(shapes={"tree"}, taps=[TapRequest(at=2)], borrows={"rope"})'
    registry = installed(stub(ANYTHING + planning(f"return DraftPlan(needs={needs}, nodes=2, depth=1)")))
    facts = FACTS.model_copy(update={"features": frozenset({"taps", "own_kv"})})
    line = str(refused(registry, facts=facts))
    for part in ("rollback (", "recurrent", "tree_verify (", "borrow:rope (", "they offer own_kv, taps"):
        assert part in line
    assert "taps (" not in line
    assert plan_run(registry, "lookup", {}, FACTS).plan is not None


# --- objections ------------------------------------------------------------------------------------------------------

CHECK = """
@hookimpl
def specplug_check(algorithm, config, plan, facts):
    return [
        Problem(severity="warning", field="", message="slow on this host"),
        Problem(severity="error", field="num_draft_tokens", message="too many", try_instead="2"),
        Problem(severity="error", field="", message="wrong weather"),
    ]
"""


def test_all_objections_are_shown_together(installed):
    error = refused(installed(stub(CHECK)))
    assert "--speculative-num-draft-tokens: too many: try 2 (acme-lookup 1.2)" in str(error)
    assert "wrong weather (acme-lookup 1.2)" in str(error)
    assert "slow" not in str(error)
    assert "warning: slow on this host (acme-lookup 1.2)" in error.trace


def test_warnings_are_kept_and_a_policy_may_object(installed):
    source = (
        '@hookimpl\ndef specplug_check(algorithm):\n    return Problem(severity="{}", field="", message="house rule")\n'
    )
    warns = Stub("site-a", policies=["house"], policy_source=source.format("warning"))
    run = plan_run(installed(stub(), warns), "lookup", {}, FACTS)
    assert [w.message for w in run.warnings] == ["house rule"]


def test_a_policy_that_raises_stops_the_run_by_name(installed):
    source = "@hookimpl\ndef specplug_check(algorithm):\n    raise KeyError('weather')\n"
    error = refused(installed(stub(), Stub("site-a", policies=["house"], policy_source=source)))
    assert "site-a 1.0" in str(error)
    assert error.trace


def test_policy_values_reach_the_plan(installed):
    source = (
        "@hookimpl\ndef specplug_defaults(algorithm, given, facts):\n"
        "    return Defaults(values={'num_draft_tokens': 7}, because='house rule')\n"
    )
    run = plan_run(installed(stub(), Stub("site-a", policies=["house"], policy_source=source)), "lookup", {}, FACTS)
    assert run.plan is not None
    assert run.plan.nodes == 6
    assert run.settings[0].source == "policy"


# --- plan_of ---------------------------------------------------------------------------------------------------------


def combining(call):
    return planning(f"found = facts.plan_of({call})\n    return found")


def test_plan_of_plans_another_installed_algorithm(installed):
    other = stub(combining('"LOOKUP", {"num_draft_tokens": "6"}'), name="acme-both", algorithm="both")
    run = plan_run(installed(stub(), other), "both", {}, FACTS)
    assert run.plan is not None
    assert run.plan.nodes == 5


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('"nothing", {}', "no algorithm 'nothing' is installed (installed: both, lookup)"),
        ('"lookup", {"num_draft_tokens": 0}', "--speculative-num-draft-tokens 0"),
        ('"lookup", {"depth": 1}', "has no option --speculative-depth"),
        ('"both", {}', "both -> both: an algorithm cannot be part of itself"),
    ],
)
def test_plan_of_refuses_and_never_raises(installed, call, says):
    other = stub(combining(call), name="acme-both", algorithm="both")
    assert says in str(refused(installed(stub(), other), "both"))


def test_plan_of_a_package_at_fault_is_a_refusal_that_names_it(installed):
    bad = stub(planning("raise KeyError('boom')"), name="acme-bad", algorithm="bad")
    other = stub(combining('"bad", {}'), name="acme-both", algorithm="both")
    assert "acme-bad 1.2" in str(refused(installed(bad, other), "both"))


def test_plan_of_takes_a_config_as_it_is(installed):
    run = plan_run(installed(stub()), "lookup", {}, FACTS)
    found = run.facts.plan_of("lookup", SpecConfig(num_draft_tokens=3))
    assert isinstance(found, Refusal)  # the run's own facts belong to `lookup`
    other = plan_run(installed(stub(name="acme-b", algorithm="b")), "b", {}, FACTS)
    plan = other.facts.plan_of("lookup", SpecConfig(num_draft_tokens=3))
    assert isinstance(plan, DraftPlan)
    assert plan.nodes == 2


DRAFTED = FACTS.model_copy(
    update={"draft": Checkpoint(path="draft", tensors={}), "first_vocab_difference": (3, "a", "b")}
)
PICKY = planning(
    "assert (facts.draft is None) == (facts.first_vocab_difference is None)\n"
    "    if facts.draft is not None:\n        return Refusal(reason='it reads no draft')\n"
    "    return DraftPlan(needs=Capabilities(), nodes=1, depth=1)"
)


def test_a_part_can_be_planned_without_the_draft(installed):
    """As if there were none; the parts of that part have none either."""
    call = '"picky", {}, draft=False'
    outer = stub(combining('"inner", {}, draft=False'), name="acme-outer", algorithm="outer")
    inner = stub(combining('"picky", {}'), name="acme-inner", algorithm="inner")
    both = stub(combining(call), name="acme-both", algorithm="both")
    registry = installed(stub(PICKY, name="acme-picky", algorithm="picky"), both, outer, inner)
    for word in ("both", "outer"):
        run = plan_run(registry, word, {}, DRAFTED)
        assert run.plan is not None
        assert run.facts.draft is DRAFTED.draft, "the whole keeps it"
    assert str(refused(registry, "inner", facts=DRAFTED)).endswith("its part 'picky': it reads no draft")


def test_a_part_is_built_as_it_was_planned(installed):
    other = stub(combining('"lookup", {}, depth, draft=False'), name="acme-both", algorithm="both")
    run = plan_run(installed(stub(), other), "both", {}, DRAFTED)
    assert run_of(run.facts, "LookUp", {}, draft=False).facts.draft is None
    with pytest.raises(RefusedError, match=r"acme-both 1\.2: its part 'lookup' was planned without the draft model"):
        run_of(run.facts, "lookup", {})
    assert isinstance(run.facts.plan_of("lookup", {}), DraftPlan)
    assert run_of(run.facts, "lookup", {}).facts.draft is not None, "asked both ways, it may be built either way"


def test_the_first_refusal_is_that_of_a_combined_plan():
    plan = DraftPlan(needs=Capabilities(), nodes=1, depth=1)
    refusals = Refusal(reason="first"), Refusal(reason="second")
    assert combined_plan(plan, *refusals, plan) is refusals[0]
    assert isinstance(combined_plan(plan, plan), DraftPlan)


# --- the drafter's class ---------------------------------------------------------------------------------------------


def run_with(run: Run, drafter: str) -> Run:
    assert run.installed is not None
    spec = run.installed.spec.model_copy(update={"drafter": drafter})
    return replace(run, installed=replace(run.installed, spec=spec))


def test_the_drafter_is_imported_only_on_demand(installed):
    run = plan_run(installed(stub()), "lookup", {}, FACTS)
    found = load_drafter_class(run)
    assert found.__name__ == "StubDrafter"


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        ("acme_nowhere:Drafter", "ModuleNotFoundError"),
        ("acme_lookup.drafter:Missing", "AttributeError"),
        ("acme_lookup.drafter", "AttributeError"),
        ("acme_lookup.plugin:plan", "not a subclass of specplug.Drafter"),
        ("pathlib:Path", "not a subclass of specplug.Drafter"),
    ],
)
def test_a_drafter_that_cannot_be_had_names_the_package(installed, drafter, says):
    run = run_with(plan_run(installed(stub()), "lookup", {}, FACTS), drafter)
    with pytest.raises(UserError) as error:
        load_drafter_class(run)
    for part in (says, drafter, "acme-lookup 1.2"):
        assert part in str(error.value)


def test_plain_decoding_has_no_drafter(installed):
    with pytest.raises(ValueError, match="plain decoding"):
        load_drafter_class(plan_run(installed(), "none", {}, FACTS))
