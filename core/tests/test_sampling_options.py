"""Request options that cannot be honoured are refused by name, in one line, with and without a tokenizer."""

import pytest

from specplug.errors import UserError
from specplug.runtime.engine import Engine
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.targets import table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

VOCAB = 8


@pytest.fixture(scope="module")
def target():
    return table_target(VOCAB, 2, 5, eos=(6, 7))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty 0: must be a number, above 0"),
        ({"repetition_penalty": -1.5}, "repetition_penalty -1.5"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty inf"),
        ({"frequency_penalty": 2.1}, "frequency_penalty 2.1: must be a number from -2 to 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias names token {VOCAB}: this model's ids are 0..7"),
        ({"logit_bias": {"x": 1.0}}, "'x' is no token id"),
        ({"logit_bias": {-1: 1.0}}, "-1 is no token id"),
        ({"logit_bias": {1: 100.5}}, "the bias of token 1 must be a number from -100 to 100, not 100.5"),
        ({"logit_bias": {1: float("nan")}}, "from -100 to 100, not nan"),
        ({"logit_bias": {1: 2, "1": 3}}, "token 1 is named twice"),
        ({"logit_bias": [1]}, "must map token ids to numbers"),
        ({"stop_token_ids": [3, 99]}, "stop_token_ids names token 99"),
        ({"stop_token_ids": [-1]}, "stop_token_ids -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5: must be at most max_tokens, which is 4"),
        ({"min_tokens": 60}, "min_tokens 60 does not fit: the context leaves 53 tokens"),
        ({"min_tokens": 1, "stop_token_ids": range(VOCAB)}, "every token id ends the answer"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"n": 0}, "n 0: must be a whole number from 1 to 128"),
        ({"top_logprobs": 2}, "top_logprobs 2: needs logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs 21: must be a whole number from 0 to 20"),
        ({"logprobs": 5}, "logprobs 5: must be true or false"),
        ({"temperature": 1e-9}, "temperature 1e-09: must be 0 (greedy) or from 1e-6"),
        ({"best_of": 2}, "best_of is not an option here"),
        ({"length_penalty": 2}, "length_penalty is not an option here"),
        ({"stop": ["x"]}, "stop strings need a tokenizer"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(target, given, says):
    with Engine(target, context_length=64) as engine:
        with pytest.raises(UserError) as refused:
            engine.generate([PROMPTS[0]], given)
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)
        assert engine.free_pages == engine.pages
        assert len(engine.generate([PROMPTS[0]], {"max_tokens": 3, "ignore_eos": True})[0].ids) == 3


def test_only_stop_strings_need_the_tokenizer():
    target = table_target(SIZE, 1, 0, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    with Engine(target, context_length=64) as engine:
        (result,) = engine.generate(["ab"], {"stop": "e", "stop_token_ids": [256], "min_tokens": 2, "max_tokens": 9})
        assert len(result.ids) >= 2
        with pytest.raises(UserError, match="logits_processor 'x': must be a function"):
            engine.submit("ab", logits_processor="x")
