"""``specplug estimate``: is speculation worth it, from four numbers, before anything is installed."""

import math
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field, ValidationError

from specplug.adaptive.config import read_adaptive
from specplug.adaptive.watching import chance, length
from specplug.errors import UserError
from specplug.frozen import Frozen
from specplug.settings import explain, option_of

if TYPE_CHECKING:
    from specplug.registry import Registry

WIDTH, HEIGHT = 61, 15
"""Columns and rows of the drawn curve."""
FROM = "--from"


class Estimate(Frozen):
    """Expected cost of decoding with a chain of drafts."""

    alpha: float = Field(ge=0, le=1, allow_inf_nan=False)
    """Chance that a draft is accepted, given that the one before it was."""
    num_steps: int = Field(ge=0, le=1024)
    """Drafts per verify."""
    target_ms: float = Field(gt=0, allow_inf_nan=False)
    """Milliseconds of one target step."""
    draft_ms: float = Field(ge=0, allow_inf_nan=False)
    """Milliseconds of one draft step."""

    @property
    def tokens(self) -> float:
        """Expected tokens per verify: accepted drafts and the one token that the target adds."""
        return math.fsum(self.alpha**depth for depth in range(self.num_steps + 1))

    @property
    def verify_ms(self) -> float:
        """Time of one round: `num_steps` drafts, then one target step."""
        return self.num_steps * self.draft_ms + self.target_ms

    @property
    def tpot_ms(self) -> float:
        """Time per output token."""
        return self.verify_ms / self.tokens

    @property
    def speedup(self) -> float:
        """Plain time per token over `tpot_ms`."""
        return self.target_ms / self.tpot_ms

    def at(self, alpha: float) -> "Estimate":
        """Return the same run at another acceptance."""
        return self.model_copy(update={"alpha": alpha})

    def of(self, num_steps: int) -> "Estimate":
        """Return the same run with another chain length."""
        return self.model_copy(update={"num_steps": num_steps})

    def break_even(self) -> float | None:
        """Return the acceptance at which speculation costs nothing and gains nothing; None if it never pays."""
        if self.at(1.0).speedup < 1.0:
            return None
        low, high = 0.0, 1.0  # speed-up never falls as acceptance rises
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self.at(middle).speedup >= 1.0 else (middle, high)
        return high

    def best_steps(self, most: int = 32) -> int:
        """Return the number of steps, 0 to `most`, with the highest speed-up; 0 is not to speculate."""
        return max(range(most + 1), key=lambda steps: self.of(steps).speedup)


def curve(run: Estimate) -> str:
    """Draw speed-up over acceptance as text: ``*`` the curve, ``o`` the run asked for, ``-`` no gain."""
    alphas = [column / (WIDTH - 1) for column in range(WIDTH)]
    values = [run.at(alpha).speedup for alpha in alphas]
    top = max(*values, 1.0)

    def row_of(value: float) -> int:
        return min(HEIGHT - 1, round(value / top * (HEIGHT - 1)))

    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    grid[row_of(1.0)] = ["-"] * WIDTH
    for column, value in enumerate(values):
        grid[row_of(value)][column] = "*"
    grid[row_of(run.speedup)][round(run.alpha * (WIDTH - 1))] = "o"
    marks = {row_of(top): f"{top:.2f}x", row_of(1.0): "1.00x", 0: "0.00x"}
    lines = [f"{marks.get(row, ''):>7} |{''.join(grid[row]).rstrip()}" for row in reversed(range(HEIGHT))]
    axis = " " * 8 + "+" + "-" * WIDTH
    labels = " " * 9 + "0".ljust((WIDTH - 1) // 2) + "0.5".ljust((WIDTH - 1) // 2) + "1"
    title = f"speed-up over acceptance, {run.num_steps} steps (o: {run.alpha:g})"
    return "\n".join([title, *lines, axis, labels])


def report(run: Estimate) -> list[str]:
    """Return the lines that the command prints."""
    even, best = run.break_even(), run.best_steps()
    lines = [
        f"tokens per verify  {run.tokens:.2f}",
        f"time per verify    {run.verify_ms:.2f} ms",
        f"time per token     {run.tpot_ms:.2f} ms  (plain {run.target_ms:.2f} ms)",
        f"speed-up           {run.speedup:.2f}x",
        f"break-even alpha   {'none: ' + _never(run) if even is None else f'{even:.3f}'}",
    ]
    if best == 0:
        lines.append("best num-steps     0: no chain length gains at this acceptance")
    else:
        lines.append(f"best num-steps     {best} ({run.of(best).speedup:.2f}x, searched up to 32)")
    if run.speedup < 1.0:
        less = f", or use --num-steps {best}" if best else ""
        lines.append(f"advice: do not speculate: it is slower than plain decoding here{less}")
    elif run.speedup < 1.05:
        lines.append("advice: hardly worth it: the gain is within what the runtime around it costs")
    return lines


def from_file(path: str, batch: int, num_steps: int | None) -> dict[str, float]:
    """Return the four numbers as ``specplug tune`` has measured them, at the nearest batch size that it has.

    Acceptance is the constant chance that makes a chain as long as the measured one. Raises UserError where
    the file holds no measurements.
    """
    measured = read_adaptive(path, FROM).measured
    sizes = sorted({rows for rows, depth in measured.draft if depth > 0 and (rows, 0) in measured.draft})
    sizes = [rows for rows in sizes if (rows, rows) in measured.verify and rows in measured.acceptance]
    if not sizes:
        raise UserError(f"{FROM} {path}: it holds no measurements: give a file that specplug tune --output wrote")
    rows = min(sizes, key=lambda size: (abs(size - batch), size))
    depths = [depth for at, depth in measured.draft if at == rows and depth > 0]
    steps = max(depths) if num_steps is None else num_steps
    nearest = min(depths, key=lambda depth: (abs(depth - steps), depth))
    drafting = measured.draft[rows, nearest] - measured.draft[rows, 0]
    return {
        "alpha": chance(length(measured.acceptance[rows], steps), steps) if steps else 0.0,
        "num_steps": steps,
        "target_ms": 1e3 * (measured.verify[rows, rows] + measured.draft[rows, 0]),
        "draft_ms": 1e3 * max(0.0, drafting) / nearest,
    }


def _never(run: Estimate) -> str:
    return f"even with every draft accepted it is {run.at(1.0).speedup:.2f}x"


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @app.command("estimate")
    def estimate(
        alpha: Annotated[str | None, typer.Option(help="chance that a draft is accepted, from 0 to 1")] = None,
        num_steps: Annotated[str | None, typer.Option(help="drafts per verify")] = None,
        target_ms: Annotated[str | None, typer.Option(help="milliseconds of one target step")] = None,
        draft_ms: Annotated[str | None, typer.Option(help="milliseconds of one draft step")] = None,
        source: Annotated[
            str | None, typer.Option(FROM, metavar="FILE", help="take what is not given from what tune has measured")
        ] = None,
        batch_size: Annotated[int, typer.Option(min=1, help="with --from: requests at once")] = 1,
        plot: Annotated[bool, typer.Option("--plot", help="draw speed-up over acceptance")] = False,
    ) -> None:
        """Estimate the speed-up from four numbers, or from what ``specplug tune`` has measured."""
        typed = {"alpha": alpha, "num_steps": num_steps, "target_ms": target_ms, "draft_ms": draft_ms}
        given: dict[str, object] = {name: value for name, value in typed.items() if value is not None}
        missing = [option_of(name) for name in typed if name not in given]
        if source is not None:
            steps = int(num_steps) if num_steps is not None and num_steps.isdecimal() else None
            given = {**from_file(source, batch_size, steps), **given}
        elif missing:
            raise UserError(f"{missing[0]} is missing: give it, or {FROM} a file that specplug tune wrote")
        try:
            run = Estimate.model_validate(given)
        except ValidationError as error:
            raise UserError("\n".join(explain(error, Estimate, option_of))) from None
        for line in report(run):
            typer.echo(line)
        if plot:
            typer.echo("\n" + curve(run))
