"""Speculative decoding on one page: the oracle of the engine, of `accept.py` and of every kernel.

`target(tokens)` returns float32 logits [len(tokens), V], row i being what follows tokens[: i + 1].
`draft(tokens)` returns (drafts, parents, q): a parents-first list of nodes below the last token (parent
-1 = child of that token) and, for drafts that were sampled, the distribution [n, V] each was drawn from.
No cache, no batch, no paging, no running counts: one token list that grows.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specplug.noise import Stream, gumbel, uniform
from specplug.sampling import SamplingParams

Target = Callable[[Sequence[int]], Tensor]
Processor = Callable[[Sequence[int], Tensor], Tensor]
Draft = Callable[[Sequence[int]], tuple[Sequence[int], Sequence[int], Tensor | None]]


@dataclass(frozen=True)
class Around:
    """What a request's options refer to."""

    prompt_len: int = 0
    eos: Collection[int] = ()
    choice: int = 0
    processor: Processor | None = None

    def ends(self, sampling: SamplingParams) -> set[int]:
        """Return the token ids that end the answer."""
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos)}


def processed(logits: Tensor, tokens: Sequence[int], sampling: SamplingParams, around: Around) -> Tensor:
    """Apply to the logits [V] after `tokens`: custom processor, penalties, bias, min_tokens, in this order."""
    logits = logits.clone()
    if around.processor:
        logits = around.processor(tokens, logits).clone()
    output = tokens[around.prompt_len :]
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits))
    seen = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits)) > 0
    penalty = sampling.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if len(output) < sampling.min_tokens:
        logits[sorted(around.ends(sampling))] = float("-inf")
    return logits


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return p [V] of processed logits: temperature, then top-k, top-p and min-p; a greedy request's is one-hot."""
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    p, order = torch.sort(torch.softmax(logits / sampling.temperature, 0), descending=True, stable=True)
    if sampling.top_k > 0:
        p[sampling.top_k :] = 0
        p = p / p.sum()
    p[1:][p.cumsum(0)[:-1] >= sampling.top_p] = 0
    p[p < sampling.min_p * p[0]] = 0
    return torch.zeros_like(p).index_copy(0, order, p / p.sum())


def following(target: Target, tokens: Sequence[int], sampling: SamplingParams, around: Around) -> Tensor:
    """Return p [V] of the token after `tokens`: the distribution after all of the request's options."""
    return distribution(processed(target(tokens)[-1], tokens, sampling, around), sampling)


def draw(p: Tensor, sampling: SamplingParams, index: int, stream: Stream = "target", choice: int = 0) -> int:
    """Draw the token at `index` of the sequence from p: the Gumbel-max trick on keyed noise."""
    if sampling.greedy:
        return int(p.argmax())
    return int((p.log() + gumbel(sampling.seed or 0, choice, index, stream, len(p))).argmax())


def decode(
    target: Target,
    prompt: Sequence[int],
    sampling: SamplingParams,
    eos: Collection[int] = (),
    *,
    choice: int = 0,
    processor: Processor | None = None,
) -> list[int]:
    """Plain decoding, one token at a time: what every drafter must reproduce."""
    around = Around(len(prompt), eos, choice, processor)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < (sampling.max_tokens or 1):
        p = following(target, tokens, sampling, around)
        tokens.append(draw(p, sampling, len(tokens), choice=choice))
        if tokens[-1] in around.ends(sampling):
            break
    return tokens[len(prompt) :]


def logprobs(target: Target, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Return [len(output), V]: the model's own log-probabilities at each output token, no option applied."""
    return torch.log_softmax(target([*prompt, *output])[len(prompt) - 1 : -1], 1)


def accept(
    target: Target,
    tokens: Sequence[int],
    drafts: Sequence[int],
    parents: Sequence[int],
    q: Tensor | None,
    sampling: SamplingParams,
    rule: str,
    around: Around = Around(),
) -> list[int]:
    """Return the tokens one verify emits after `tokens`: the accepted path, and one more."""
    node, out = -1, list[int]()
    while True:
        p = following(target, [*tokens, *out], sampling, around)
        index = len(tokens) + len(out)
        below = [child for child, parent in enumerate(parents) if parent == node]
        if rule == "coupled" or sampling.greedy:
            token = draw(p, sampling, index, choice=around.choice)
            node = next((child for child in below if drafts[child] == token), -2)
        else:
            node, stream = -2, "target"
            for rank, child in enumerate(below):
                token = drafts[child]
                q_here = torch.eye(len(p))[token] if q is None else q[child]
                if uniform(sampling.seed or 0, around.choice, index, "coin", 1, rank)[0] < p[token] / q_here[token]:
                    node = child
                    break
                p, stream = (p - q_here).clamp_min(0) / (p - q_here).clamp_min(0).sum(), "residual"
            if node == -2:
                token = draw(p, sampling, index, "residual" if stream == "residual" else "target", around.choice)
        out.append(token)
        if node == -2:
            return out


def speculate(
    target: Target,
    draft: Draft,
    prompt: Sequence[int],
    sampling: SamplingParams,
    eos: Collection[int] = (),
    rule: str = "coupled",
    *,
    choice: int = 0,
    processor: Processor | None = None,
) -> list[int]:
    """Speculative decoding: draft below the last token, verify, keep what is accepted and one token more."""
    around = Around(len(prompt), eos, choice, processor)
    first = following(target, prompt, sampling, around)
    tokens = [*prompt, draw(first, sampling, len(prompt), choice=choice)]
    most = sampling.max_tokens or 1
    while True:
        output = tokens[len(prompt) :]
        ends = [at + 1 for at, token in enumerate(output) if token in around.ends(sampling)] + [most]
        if len(output) >= min(ends):
            return output[: min(ends)]
        tokens += accept(target, tokens, *draft(tokens), sampling, rule, around)
