"""The page of what each mutant fails, `docs/reference/kit-mutants.md`.

python core/tests/kit/kit_table.py [MUTANT ...]    # runs every check on these (default: on all) and writes their rows

A row takes up to ten seconds, all of them three minutes on two cores. `test_kit_table` holds the page to what the code
says, and, where tests marked `slow` are run, each row to what its mutant really fails.
"""

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kit_mutants import CUDA_MUTANTS, MUTANTS, Mutant, checks, opened, run_check

from specplug.runtime.engine import Engine

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "kit-mutants.md"
STEPS = 4000
"""Steps of one engine, several times those of any check on a sound core: a faulty core may never come to an end."""

HEAD = """\
# What each mutant fails

The [conformance kit](kit.md) is itself tested by mutants: a drafter, a package or a core with one fault each. The
checks that were made for a fault must notice it; others may. The sound drafters that the mutants were made from pass
them all. If a drafter of yours fails the checks of one row, look for that row's fault first.

A check behind whose name a colon stands runs for several values. The names of the core's mutants say what is
replaced. `python core/tests/kit/kit_table.py` writes this page; the tests of the core hold it to the code, and those
marked `slow` run every row anew, those marked `gpu` what needs CUDA.
"""
TITLES = ("| mutant | what is wrong | must be noticed by | is noticed by, too |", "|---|---|---|---|")


def failing(mutant: Mutant) -> list[str]:
    """Return the checks that notice `mutant`, of all that are tried."""
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), ending():
        warnings.simplefilter("ignore")
        with opened(mutant, Path(folder)) as (subject, bench):
            for check in checks():
                try:
                    run_check(check, subject, bench)
                except pytest.skip.Exception:
                    continue
                except (Exception, pytest.fail.Exception):
                    found.append(check)
    return found


@contextmanager
def ending() -> Iterator[None]:
    """Inside, an engine that steps for ever raises."""
    step: Callable[[Engine], Any] = Engine.step

    def counted(self: Engine) -> Any:
        self.steps_taken = getattr(self, "steps_taken", 0) + 1  # type: ignore[attr-defined]
        assert self.steps_taken < STEPS, "the engine comes to no end"  # type: ignore[attr-defined]
        return step(self)

    with patch.object(Engine, "step", counted):
        yield


def also(mutant: Mutant, found: Sequence[str]) -> str:
    """Return the cell of the checks that notice a mutant and need not; one that must and does not is a bug."""
    missed = [check for check in mutant.must if check not in found]
    assert not missed, f"{mutant.name} is not noticed by {missed}"
    return codes(check for check in found if check not in mutant.must)


def page(cells: Mapping[str, str]) -> str:
    """Return the page; `cells`: mutant -> its last cell."""
    on_cuda = "".join(
        f"On CUDA {codes(mutant.must)} must notice {mutant.name}: {mutant.fault}\n" for mutant in CUDA_MUTANTS
    )
    rows = [
        f"| {mutant.name} | {mutant.fault} | {codes(mutant.must)} | {cells[mutant.name]} |".replace("  |", " |")
        for mutant in MUTANTS
    ]
    return "\n".join([HEAD + on_cuda, *TITLES, *rows, ""])


def codes(names: Iterable[str]) -> str:
    """Return names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def written() -> dict[str, str]:
    """Return mutant -> last cell, of the page as it is."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    rows = [re.split(r" ?\| ?", line) for line in lines if line.startswith("| ")]
    return {row[1]: row[4] for row in rows[1:]}


def row(name: str) -> tuple[str, str]:
    """Run a mutant's row; returns its name and its last cell."""
    logging.disable()
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    return name, also(mutant, failing(mutant))


def main(names: Sequence[str]) -> int:
    """Run the rows of `names`, all if there are none, and write the page."""
    known = [mutant.name for mutant in MUTANTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.stderr.write(f"no mutant is called {unknown[0]!r}; there are {', '.join(known)}\n")
        return 2
    cells = {name: "" for name in known} | {name: cell for name, cell in written().items() if name in known}
    with ProcessPoolExecutor(cpu_count(), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, cell in pool.map(row, names or known):
            cells[name] = cell
            sys.stdout.write(f"{name}: {cell}\n")
            sys.stdout.flush()
    PAGE.write_text(page(cells), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
