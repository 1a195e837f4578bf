"""Products with few rows on a CPU: the same numbers whichever way round, and which way is taken."""

from unittest.mock import patch

import pytest
import torch

from specplug.layers import FusedLinear, Linear, linear

SHAPES = [(512, 576), (576, 1536), (2048, 64), (8192, 17)]
"""(out, in): wide enough to be turned."""


def layer(outer: int, inner: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> Linear:
    made = Linear(inner, outer, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(outer + inner)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def rows(count: int, inner: int) -> torch.Tensor:
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outer", "inner"), SHAPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 24, 25])
def test_products_are_as_exact_as_float32_is(count: int, outer: int, inner: int, bias: bool) -> None:
    made, x = layer(outer, inner, bias=bias), rows(count, inner)
    exact = x.double() @ made.weight.double().T + (0 if made.bias is None else made.bias.double())
    found = made(x)
    assert found.is_contiguous()
    assert found.dtype == torch.float32
    # sqrt(in) roundings of values of size 1, with room.
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6 * inner**0.5)


def test_parts_of_a_fused_product_stay_side_by_side() -> None:
    made = FusedLinear(64, {"a": 1024, "b": 2048}, dtype=torch.float32)
    made.weight.data.copy_(rows(3072, 64))
    x = rows(3, 64)
    a, b = made(x).split([1024, 2048], -1)
    torch.testing.assert_close(a, x @ made.weight[:1024].T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(b, x @ made.weight[1024:].T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("count", "inner", "outer", "turned"),
    [
        (1, 576, 3072, True),
        (1, 576, 960, False),  # one thread has it read sooner than two have met
        (1, 2048, 8192, False),
        (2, 576, 960, True),
        (8, 576, 576, True),
        (9, 576, 576, False),
        (3, 1536, 576, True),
        (4, 1536, 576, False),  # the rows no longer fit beside the weights
        (24, 576, 49152, True),
        (25, 576, 49152, False),
        (3, 32, 64, False),  # next to nothing to read
    ],
)
def test_which_products_are_turned(count: int, inner: int, outer: int, turned: bool) -> None:
    made = Linear(inner, outer, dtype=torch.float32)
    with patch.object(linear, "_turned", wraps=linear._turned) as seen:
        made(torch.zeros(count, inner))
    assert seen.called == turned


def test_half_precision_is_left_to_the_library() -> None:
    """Its products with few rows are as fast as their weights can be read."""
    made = layer(2048, 64, dtype=torch.bfloat16)
    with patch.object(linear, "_turned") as seen:
        made(rows(2, 64).bfloat16())
    assert not seen.called
