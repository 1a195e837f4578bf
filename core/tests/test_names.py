"""One spelling for every name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from specplug import fold


@pytest.mark.parametrize(
    ("typed", "folded"),
    [
        ("FROZEN_KV_MTP", "frozen-kv-mtp"),
        ("frozen.kv--mtp", "frozen-kv-mtp"),
        ("Ngram ", "ngram"),
        ("\teagle\n", "eagle"),
        ("frozen kv mtp", "frozen-kv-mtp"),
        ("EAGLE-3", "eagle-3"),
        ("EAGLE3", "eagle3"),
        ("  ", ""),
    ],
)
def test_every_spelling_folds_to_one(typed: str, folded: str) -> None:
    assert fold(typed) == folded


def test_the_hyphen_is_never_dropped() -> None:
    assert fold("eagle-3") != fold("eagle3")


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.text())
def test_folding_twice_changes_nothing(name: str) -> None:
    assert fold(fold(name)) == fold(name)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", fullmatch=True))
def test_package_names_fold_as_pep_503_does(name: str) -> None:
    assert fold(name) == canonicalize_name(name)
