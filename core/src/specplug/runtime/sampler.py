"""From processed logits to the distribution a request asked for: temperature, top_k, top_p, min_p, in this order.

What comes before is in `specplug.runtime.processors`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specplug.drafter import SamplingView
from specplug.sampling import SamplingParams


def processed_logits(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order, to float32 logits [V] of a row that is not greedy.

    Returns logits [V] whose softmax is the request's distribution; what was filtered out is -inf. Where
    a filter cuts between equal values the lowest ids stay.
    """
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = _keep_first(scaled, sampling.top_k)
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(scaled, descending=True, stable=True)
        probs = torch.softmax(ordered, 0)
        outside = (probs.cumsum(0) - probs) >= sampling.top_p
        outside[0] = False
        scaled = scaled.index_fill(0, order[outside], float("-inf"))
    if sampling.min_p > 0.0:
        floor = scaled.max() + torch.log(torch.tensor(sampling.min_p))
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    return scaled


def _keep_first(values: Tensor, count: int) -> Tensor:
    """Keep the `count` largest values, equal ones by lowest index; the rest becomes -inf."""
    edge = torch.topk(values, count).values[-1]
    above = values > edge
    equal = torch.nonzero(values == edge).flatten()[: count - int(above.sum())]
    kept = torch.full_like(values, float("-inf"))
    kept[above] = values[above]
    kept[equal] = edge
    return kept


def sampling_view(options: Sequence[SamplingParams], seeds: Sequence[int], choices: Sequence[int]) -> SamplingView:
    """Return the options of a step's rows as drafters see them, [R] each; a greedy row's temperature is 0."""
    return SamplingView(
        temperature=torch.tensor([0.0 if option.greedy else option.temperature for option in options]),
        top_k=torch.tensor([option.top_k for option in options]),
        top_p=torch.tensor([option.top_p for option in options]),
        min_p=torch.tensor([option.min_p for option in options]),
        seed=torch.tensor(seeds),
        choice=torch.tensor(choices),
    )
