"""Merging options: precedence, provenance, conflicts, and one clear line for each bad value."""

from collections.abc import Mapping
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

from specplug.distributions import ALGORITHMS, POLICIES
from specplug.errors import RefusedError
from specplug.options import EngineOptions
from specplug.registry import Answer, Installed
from specplug.settings import explain, is_reserved, kind_of, option_of, plain, settle
from specplug.spec import (
    AlgorithmSpec,
    Capabilities,
    Defaults,
    Facts,
    SpecConfig,
)


class Config(SpecConfig):
    num_steps: int = Field(3, ge=1, le=16, description="depth")
    temperature: float = Field(1.0, gt=0, description="of drafts")
    order: Literal["recent", "frequent"] = Field("recent", description="order")
    shared: bool = Field(False, description="shared store")
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2), description="lengths")
    table: Mapping[str, int] = Field(default_factory=dict, description="table")
    corpus: str | None = Field(None, description="file")


class OtherConfig(SpecConfig):
    eagle_topk: int = Field(1, description="branches")


def spec(name="stub", model=Config, **more):
    return AlgorithmSpec(
        name=name,
        api=(1, 0),
        summary="a stub",
        capabilities=Capabilities(),
        config_model=model,
        plan=lambda config, facts, depth: None,
        drafter="nowhere:Nothing",
        **more,
    )


class FakeRegistry:
    """The two members of `Registry` that merging uses."""

    def __init__(self, *answers, model=Config, **more):
        self.answers = answers
        self.algorithms = {
            "stub": Installed(spec(model=model, **more), "specplug-stub", "1.0"),
            "other": Installed(spec("other", OtherConfig), "specplug-other", "2.0"),
        }
        self.asked = None

    def each(self, hook, *, selected=None, **kwargs):
        assert (hook, selected) == ("specplug_defaults", "stub")
        self.asked = kwargs
        yield from self.answers


def own(values, because="tested", source="algorithm"):
    return Answer("specplug-stub", "1.0", ALGORITHMS, Defaults(values=values, because=because, source=source))


def policy(values, name="site-a", because="house rule"):
    return Answer(name, "0.1", POLICIES, Defaults(values=values, because=because))


def settled(given, *answers, **more):
    registry = FakeRegistry(*answers, **more)
    return settle(registry, registry.algorithms["stub"], given, Facts.empty())


def refused(given, *answers, **more):
    with pytest.raises(RefusedError) as error:
        settled(given, *answers, **more)
    return str(error.value)


# --- precedence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("levels", "value", "source"),
    [
        (0, 3, "default"),
        (1, 4, "algorithm"),
        (2, 5, "checkpoint"),
        (3, 6, "policy"),
        (4, 7, "user"),
    ],
)
def test_precedence_in_any_order_of_answers(levels, value, source, backwards):
    answers = [own({"num_steps": 4}), own({"num_steps": 5}, source="checkpoint"), policy({"num_steps": 6})]
    answers = answers[:levels]
    found = settled({"num_steps": "7"} if levels == 4 else {}, *(reversed(answers) if backwards else answers))
    setting = next(s for s in found.settings if s.field == "num_steps")
    assert found.config.num_steps == setting.value == value
    assert setting.source == source


def test_every_field_has_a_setting_and_a_line_of_trace():
    found = settled({"shared": True}, own({"num_steps": 4}, because="trained so"))
    assert [s.field for s in found.settings] == list(Config.model_fields)
    assert len(found.trace) == len(found.settings)
    assert "--speculative-num-steps = 4 (algorithm: specplug-stub 1.0, trained so)" in found.trace
    assert "--speculative-shared = True (user)" in found.trace


def test_an_explicit_null_is_the_users_value():
    found = settled({"corpus": None}, own({"corpus": "a.txt"}))
    assert found.config.corpus is None
    assert found.settings[-1].source == "user"


def test_one_answer_may_hold_several_defaults():
    answer = own({})
    both = [
        Defaults(values={"num_steps": 4}, because="a"),
        Defaults(values={"num_steps": 5}, because="b", source="checkpoint"),
    ]
    found = settled({}, Answer(answer.distribution, answer.version, answer.group, both))
    assert found.config.num_steps == 5


def test_hooks_see_the_users_values_in_their_own_types():
    registry = FakeRegistry()
    settle(registry, registry.algorithms["stub"], {"num_steps": "7", "lengths": "3, 4", "shared": "yes"}, Facts.empty())
    assert registry.asked["given"] == {"num_steps": 7, "lengths": (3, 4), "shared": True}
    assert registry.asked["algorithm"] == "stub"


# --- packages that contradict ----------------------------------------------------------------------------------------


def test_two_policies_that_differ_are_named_both():
    line = refused({}, policy({"num_steps": 4}), policy({"num_steps": 5}, "site-b"))
    for part in ("--speculative-num-steps", "site-a 0.1", "site-b 0.1", "4", "5", "house rule"):
        assert part in line


def test_two_policies_that_agree_or_are_overruled_do_not_clash():
    assert settled({}, policy({"num_steps": 4}), policy({"num_steps": 4}, "site-b")).config.num_steps == 4
    clash = (policy({"num_steps": 4}), policy({"num_steps": 5}, "site-b"))
    assert settled({"num_steps": 9}, *clash).config.num_steps == 9


def test_a_package_answers_only_for_its_own_algorithms():
    stranger = Answer("specplug-other", "2.0", ALGORITHMS, Defaults(values={"num_steps": 9}, because="mine"))
    found = settled({}, stranger)
    assert found.config.num_steps == 3
    assert [problem.severity for problem in found.warnings] == ["warning"]
    assert "specplug-other 2.0" in found.warnings[0].message


@pytest.mark.parametrize("answer", [policy({"num_step": 4}), own({"num_step": 4})])
def test_a_proposal_for_a_field_that_is_not_there_names_the_package(answer):
    line = refused({}, answer)
    assert f"{answer.distribution} {answer.version}" in line
    assert "the nearest is --speculative-num-steps" in line


def test_a_bad_proposal_is_blamed_on_its_package():
    line = refused({}, policy({"num_steps": 99}))
    assert "--speculative-num-steps 99 (from site-a 0.1: house rule): must be a whole number from 1 to 16" in line


# --- bad values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"num_steps": "0"}, "--speculative-num-steps 0: must be a whole number from 1 to 16"),
        ({"num_steps": "many"}, "--speculative-num-steps many: must be a whole number from 1 to 16"),
        ({"num_steps": ""}, "--speculative-num-steps '': must be a whole number from 1 to 16"),
        ({"num_draft_tokens": "0"}, "--speculative-num-draft-tokens 0: must be a whole number, at least 1"),
        ({"temperature": "0"}, "--speculative-temperature 0: must be a number, above 0"),
        ({"order": "random"}, "--speculative-order random: must be one of recent, frequent"),
        ({"shared": "perhaps"}, "--speculative-shared perhaps: must be true or false"),
        (
            {"lengths": "1,x"},
            "--speculative-lengths x: must be a list separated by commas (each a whole number, at least 1)",
        ),
        ({"table": [1]}, "--speculative-table [1]: must be a JSON object"),
    ],
)
def test_a_bad_value_is_one_line_with_what_is_allowed(given, line):
    assert refused(given) == line


def test_all_bad_values_are_told_one_line_each():
    lines = refused({"num_steps": "0", "order": "random", "shared": "yes"}).splitlines()
    assert [line.split()[0] for line in lines] == ["--speculative-num-steps", "--speculative-order"]


def test_a_field_has_one_line_however_much_is_wrong_with_it():
    assert refused({"lengths": "x,1,y"}).startswith("--speculative-lengths x: ")


def test_hooks_are_not_asked_about_bad_values():
    registry = FakeRegistry(own({}))
    with pytest.raises(RefusedError):
        settle(registry, registry.algorithms["stub"], {"num_steps": "0"}, Facts.empty())
    assert registry.asked is None


def test_a_list_may_also_be_json():
    assert settled({"lengths": "[5, 6]"}).config.lengths == (5, 6)
    assert "--speculative-lengths" in refused({"lengths": "[5, 6"})


class Pair(SpecConfig):
    low: int = Field(1, description="low")
    high: int = Field(2, description="high")
    size: int = Field(0, description="size, k allowed")
    name: str = Field(description="no default")

    @field_validator("size", mode="before")
    @classmethod
    def _suffix(cls, value):
        return int(value[:-1]) * 1000 if isinstance(value, str) and value.endswith("k") else value

    @model_validator(mode="after")
    def _ordered(self):
        if self.low > self.high:
            raise ValueError(f"--speculative-low {self.low} is above --speculative-high {self.high}")
        return self


def test_rules_over_several_fields_are_applied_after_the_merge():
    values = {"high": 9, "name": "x"}
    assert settled({"low": "5", "size": "4k"}, own(values), model=Pair).config.size == 4000
    assert refused({"low": "5"}, own({"name": "x"}), model=Pair) == "--speculative-low 5 is above --speculative-high 2"


def test_a_required_field_nobody_gave_is_named():
    assert refused({}, model=Pair).startswith("--speculative-name is required")


# --- unknown fields --------------------------------------------------------------------------------------------------


def test_unknown_field_names_those_that_have_it_or_the_nearest():
    assert "; other has it" in refused({"eagle_topk": "4"})
    assert "the nearest is --speculative-num-steps" in refused({"num_step": "4"})
    assert "it has --speculative-num-draft-tokens" in refused({"zzz": "4"})


def test_unknown_field_of_another_engine_gets_its_own_text():
    for key in ("capacity", "speculative_capacity", "--speculative-capacity", "speculative-capacity"):
        assert refused({"capacity": "1"}, foreign_options={key: "write --speculative-num-steps"}).endswith(
            ": write --speculative-num-steps"
        )


def test_misspelt_prefix_and_core_options_are_explained():
    assert "is written num_steps" in refused({"speculative_num_steps": 4})
    assert "is written num_steps" in refused({"num-steps": 4})
    assert "option of the core" in refused({"draft_model_path": "x"})


def test_reserved_names():
    assert is_reserved("draft_model_quantization")
    assert is_reserved("adaptive_policy")
    assert not is_reserved("draft_sampling")
    assert not is_reserved("config_file")


# --- kinds and other models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (bool, "switch"),
        (bool | None, "switch"),
        (int | None, "text"),
        (int | bool, "text"),
        (str, "text"),
        (Literal["a"], "text"),
        (tuple[int, ...] | None, "list"),
        (frozenset[str], "list"),
        (Annotated[list[int], Field(min_length=1)], "list"),
        (dict[str, int], "mapping"),
        (Mapping[str, int] | None, "mapping"),
        (Config, "mapping"),
    ],
)
def test_kind_of(annotation, kind):
    assert kind_of(annotation) == kind


def test_plain_takes_any_spelling():
    assert {plain("--speculative-num-steps"), plain("speculative_num_steps"), plain("num-steps")} == {"num_steps"}


def test_explain_serves_any_model():
    with pytest.raises(ValidationError) as error:
        EngineOptions.model_validate({"page_size": 512, "dtype": "float8", "pages": 1, "context_length": 1})
    assert sorted(explain(error.value, EngineOptions, option_of)) == [
        "--context-length 1: must be a whole number, at least 2",
        "--dtype float8: must be one of auto, float32, bfloat16, float16",
        "--page-size 512: must be a whole number from 1 to 256",
        "--pages is not an option here; the nearest is --page-size",
    ]
