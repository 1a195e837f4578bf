"""What a `StepView` says of the tokens of a step."""

from typing import Any, cast

import torch

from specplug import StepView


def test_shifted_is_the_first_that_follows() -> None:
    """Rows of a chunk, of a verify that kept two of four, of a decode; then a pad row that begins at T, or before."""
    tokens = torch.arange(10, 19)
    for pads in (0, 2):
        total = 9 - pads
        step = StepView(
            slots=torch.tensor([2, 0, 1, 4, 4]),
            tokens=tokens,
            positions=tokens,
            row_start=torch.tensor([0, 2, 6, total, total, total]),
            num_kept=torch.tensor([2, 2, 1, 0, 0]),
            kv_len=torch.tensor([2, 7, 9, 0, 0]),
            root=torch.tensor([50, 51, 52, -1, 0]),
            next_tokens=torch.tensor([[50], [51], [52], [-1], [0]]),
            final=torch.tensor([False, True, True, False, False]),
            taps=(),
            sampling=cast(Any, None),
            depth=1,
            host=None,
        )
        known = step.following()[:, 0]
        assert known.tolist() == [11, 50, 13, 51, -1, -1, 52, -1, -1]
        found = step.shifted()
        assert found.shape == known.shape
        assert torch.equal(torch.where(known < 0, known, found), known)
        assert int(found.min()) >= 0
        kept = step.last_kept().tolist()
        assert kept[:3] == [1, 3, 6]
        assert all(0 <= at < 9 for at in kept)
