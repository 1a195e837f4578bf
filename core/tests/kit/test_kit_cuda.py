"""The check that needs CUDA fails there for what is wrong, and passes for what is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit_mutants import CUDA_MUTANTS, ON_CUDA, Mutant, opened, run_check, sound, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHECKS = [f"{name}:{value}" for name in ON_CUDA for value in values(name)]
SAYS = {"OnTheHost": "propose", "Capturer.record once": "expected .* got"}


def run_fully(mutant: Mutant, check: str, folder: Path) -> None:
    """Run a check on a mutant; one that is skipped has noticed nothing, and shall not pass for it."""
    with opened(mutant, folder) as (subject, bench):
        try:
            run_check(check, subject, bench)
        except pytest.skip.Exception as skipped:
            raise ValueError(f"{check} was not run: {skipped}") from skipped


def passing() -> list[Any]:
    """Return each sound drafter, and each mutant that only some values of a check can notice, with the others."""
    found = {sound(mutant).name: (sound(mutant), CHECKS) for mutant in CUDA_MUTANTS}
    found |= {mutant.name: (mutant, [check for check in CHECKS if check not in mutant.must]) for mutant in CUDA_MUTANTS}
    return [
        pytest.param(mutant, check, id=f"{name}-{check}") for name, (mutant, them) in found.items() for check in them
    ]


@pytest.mark.parametrize(
    ("mutant", "check"),
    [pytest.param(mutant, check, id=f"{mutant.name}-{check}") for mutant in CUDA_MUTANTS for check in mutant.must],
)
def test_a_fault_is_noticed(mutant: Mutant, check: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=SAYS[mutant.name]):
        run_fully(mutant, check, tmp_path)


@pytest.mark.parametrize(("mutant", "check"), passing())
def test_what_is_not_concerned_passes(mutant: Mutant, check: str, tmp_path: Path) -> None:
    run_fully(mutant, check, tmp_path)
