"""The page of what each mutant fails is true: quickly as to what must fail, and, marked `slow`, row by row."""

import pytest
from kit_mutants import MUTANTS, Mutant, checks
from kit_table import PAGE, also, failing, page, written

from specplug.testing.conformance import check_names

RUN = "run python core/tests/kit/kit_table.py"


def test_the_page_says_what_the_code_says() -> None:
    """Mutants, their order, their faults and what must notice them; a mutant without a row has to be run first."""
    cells = written()
    assert cells.keys() == {mutant.name for mutant in MUTANTS}, RUN
    assert PAGE.read_text(encoding="utf-8") == page(cells), RUN


def test_the_page_names_checks_that_there_are() -> None:
    known = {f"`{check}`" for check in checks()}
    for name, cell in written().items():
        named = [part for part in cell.split(", ") if part]
        assert set(named) <= known, f"{name}: {RUN}"
        assert len(named) == len(set(named)), name
    assert all(f"`{check}" in PAGE.read_text(encoding="utf-8") for check in check_names()), RUN


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_row_is_true(mutant: Mutant) -> None:
    assert written()[mutant.name] == also(mutant, failing(mutant)), f"{RUN} {mutant.name!r}"
