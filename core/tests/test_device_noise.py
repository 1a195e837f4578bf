"""Noise and filters for many rows, in plain torch: row by row what the CPU engine uses."""

import pytest
import torch

from specplug import noise
from specplug.runtime.device.noise import gumbel_argmax, gumbel_rows, uniform_rows
from specplug.runtime.device.sampling import Filters, filtered
from specplug.runtime.sampler import processed_logits
from specplug.sampling import SamplingParams

SEEDS = torch.tensor([3, 2**63 - 1, 0])
CHOICES = torch.tensor([0, 7, 1])
INDICES = torch.tensor([12, 0, 5])


@pytest.mark.parametrize("stream", ["target", "draft", "residual"])
def test_gumbel_rows_are_the_engines(stream: str) -> None:
    made = gumbel_rows(SEEDS, CHOICES, INDICES, stream, 33)
    for row in range(3):
        key = int(SEEDS[row]), int(CHOICES[row]), int(INDICES[row])
        assert torch.equal(made[row], noise.gumbel(*key, stream, 33))
    some = gumbel_rows(SEEDS, CHOICES, INDICES, stream, 33, torch.tensor([True, False, True]))
    assert torch.equal(some, made * torch.tensor([[1.0], [0.0], [1.0]]))


def test_uniform_rows_are_the_engines() -> None:
    ranks = torch.tensor([0, 2, 5])
    made = uniform_rows(SEEDS, CHOICES, INDICES, "coin", 2, ranks)
    for row in range(3):
        key = int(SEEDS[row]), int(CHOICES[row]), int(INDICES[row])
        assert made[row].tolist() == noise.uniform(*key, "coin", 2, int(ranks[row])).tolist()
    assert torch.equal(uniform_rows(SEEDS, CHOICES, INDICES, "coin", 2)[0], made[0])
    assert uniform_rows(SEEDS[:0], CHOICES[:0], INDICES[:0], "coin", 2).shape == (0, 2)


def test_argmax_takes_the_rows_and_the_temperatures_it_is_told() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    rows, heat = torch.tensor([4, 1, 4]), torch.tensor([0.5, 1.0, 2.0])
    got = gumbel_argmax(logits, SEEDS, CHOICES, INDICES, "target", rows=rows, temperature=heat)
    wanted = logits[rows] / heat[:, None] + gumbel_rows(SEEDS, CHOICES, INDICES, "target", 40)
    assert torch.equal(got, wanted.argmax(1))
    forbidden = torch.full((1, 40), float("-inf"))
    forbidden[0, 31] = -50.0
    assert gumbel_argmax(forbidden, SEEDS[:1], CHOICES[:1], INDICES[:1], "target").tolist() == [31]


@pytest.mark.parametrize("vocab", [1, 6, 301])
@pytest.mark.parametrize("coarse", [False, True])
def test_filters_equal_the_engines_row_by_row(vocab: int, coarse: bool) -> None:
    # Breaks with: ties cut at other ids; top_p before top_k; a filter applied to rows that do not use it.
    given = [
        {"temperature": heat, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for heat in (0.7, 1.0, 1.9)
        for top_k in (0, 1, 3, vocab, vocab + 9)
        for top_p in (1.0, 0.95, 0.4, 1e-6)
        for min_p in (0.0, 0.2, 0.999)
    ]
    logits = torch.randn(len(given) + 1, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    if coarse:
        logits = logits.round()
        logits[::7, : vocab // 2] = float("-inf")
    rows = torch.arange(len(given), 0, -1)
    heat, top_k, top_p, min_p = (
        torch.tensor([options[name] for options in given]) for name in ("temperature", "top_k", "top_p", "min_p")
    )
    made = filtered(logits, heat, top_k, top_p, min_p, Filters(True, True, True), rows)
    for row, options in enumerate(given):
        assert torch.equal(made[row], processed_logits(logits[rows[row]], SamplingParams(**options))), options


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_filter_alone(name: str) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    values = {"top_k": (0, 4), "top_p": (1.0, 0.6), "min_p": (0.0, 0.3)}
    used = {key: torch.tensor(pair if key == name else pair[:1] * 2) for key, pair in values.items()}
    made = filtered(logits, torch.ones(2), **used, use=Filters(**{name: True}))
    assert torch.equal(made[0], logits[0])
    assert torch.equal(made[1], processed_logits(logits[1], SamplingParams(**{name: values[name][1]})))
