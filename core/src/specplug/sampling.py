"""One request's options. Torch-free."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from specplug.frozen import Frozen
from specplug.grammar.format import checked


class SamplingParams(Frozen):
    """One request's options, by their OpenAI names. An unknown one is refused by name.

    The order in which they act on a position's logits is that of `specplug.runtime.processors`.
    """

    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate; unset: what the context leaves")
    min_tokens: int = Field(0, ge=0, description="fewest tokens; what would end the answer is banned before")
    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the smallest set with this probability")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="drop tokens below this share of the likeliest; 1 is greedy")
    frequency_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="taken off a token's logit for each time the output holds it"
    )
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="taken off a token's logit once the output holds it"
    )
    repetition_penalty: float = Field(
        1.0, gt=0.0, allow_inf_nan=False, description="divides logits above 0, multiplies those below, of tokens seen"
    )
    logit_bias: Mapping[int, float] = Field(
        default_factory=dict, description="token id to what is added to its logit, -100 to 100"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="unset: drawn at admission and reported")
    n: int = Field(1, ge=1, le=128, description="answers to the same prompt; the seed and their index tell them apart")
    stop: tuple[str, ...] = Field((), description="strings that end the answer and are not part of it")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="token ids that end the answer, besides the model's own"
    )
    ignore_eos: bool = Field(False, description="the model's own end-of-sequence ids are ordinary tokens")
    logprobs: bool = Field(False, description="report each token's log-probability before any of these options")
    top_logprobs: int = Field(0, ge=0, le=20, description="report that many of the likeliest tokens too")
    response_format: Mapping[str, Any] | None = Field(
        None, description="what the answer must be: text, a JSON object, or JSON that keeps to a schema"
    )
    detokenize: bool = Field(True, description="make text of the ids; off: none, unless stop strings need it")

    @property
    def greedy(self) -> bool:
        """The likeliest token is taken, of equal ones the lowest id: at temperature 0, or at min_p 1."""
        return self.temperature == 0.0 or self.min_p == 1.0

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: object) -> object:
        if isinstance(stop, str):
            stop = (stop,)
        if isinstance(stop, list | tuple) and "" in stop:
            raise ValueError("a stop string must not be empty")
        return stop

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float) -> float:
        if 0.0 < temperature < 1e-6:
            raise ValueError("must be 0 (greedy) or from 1e-6 to 100: below, logits overflow float32")
        return temperature

    @field_validator("min_tokens")
    @classmethod
    def _leaves_room(cls, least: int, info: ValidationInfo) -> int:
        most = info.data.get("max_tokens")
        if most is not None and least > most:
            raise ValueError(f"must be at most max_tokens, which is {most}; lower it or raise max_tokens")
        return least

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            raise ValueError('must map token ids to numbers, such as {"42": -100}')
        bias: dict[int, float] = {}
        for token, value in given.items():
            if not re.fullmatch(r"\d+", str(token)):
                raise ValueError(f"{token!r} is no token id: write whole numbers from 0")
            if isinstance(value, bool) or not isinstance(value, int | float) or not -100.0 <= value <= 100.0:
                raise ValueError(f"the bias of token {token} must be a number from -100 to 100, not {value!r}")
            if int(token) in bias:
                raise ValueError(f"token {int(token)} is named twice: give one bias for it")
            bias[int(token)] = float(value)
        return bias

    @field_validator("response_format", mode="before")
    @classmethod
    def _known_format(cls, given: object) -> object:
        return checked(given)

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, count: int, info: ValidationInfo) -> int:
        if count and info.data.get("logprobs") is False:
            raise ValueError("needs logprobs: switch logprobs on, or leave it out")
        return count
