"""Stop rules, and what may leave the engine when."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specplug.runtime.stop import Output

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, so that a character can be split over several."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<eos>": EOS}
    built = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>")


def run(tokenizer: PreTrainedTokenizerFast, text: str, stop: tuple[str, ...] = (), most: int = 100, tail=()):
    """Feed `text` byte by byte; returns (output, everything `take` gave, in order)."""
    output, taken = Output(tokenizer, {EOS}, stop, most), []
    for token in [*text.encode(), *tail]:
        alive = output.commit(token)
        taken.append(output.take())
        if not alive:
            break
    return output, taken


def joined(taken) -> tuple[list[int], str]:
    return [token for ids, _ in taken for token in ids], "".join(text for _, text in taken)


def test_a_split_character_appears_whole(tokenizer) -> None:
    output, taken = run(tokenizer, "aé€z", most=7)
    assert joined(taken) == (list("aé€z".encode()), "aé€z")
    assert [text for _, text in taken] == ["a", "", "é", "", "", "€", "z"]
    assert output.finish_reason == "length"


def test_eos_is_an_id_and_no_text(tokenizer) -> None:
    output, taken = run(tokenizer, "hi", tail=[EOS])
    assert joined(taken) == ([*b"hi", EOS], "hi")
    assert output.finish_reason == "stop"


def test_an_unfinished_character_is_flushed_at_the_end(tokenizer) -> None:
    output, taken = run(tokenizer, "a", most=2, tail=["€".encode()[0]])
    assert output.finish_reason == "length"
    assert joined(taken) == ([97, 0xE2], "a\ufffd")


@pytest.mark.parametrize(
    ("stop", "ids", "text"),
    [
        (("cde",), "ab", "ab"),
        (("b",), "a", "a"),
        (("a",), "", ""),
        (("zz", "de"), "abc", "abc"),
        (("e", "cd"), "ab", "ab"),
    ],
)
def test_stop_strings_cut_ids_and_text(tokenizer, stop, ids, text) -> None:
    output, taken = run(tokenizer, "abcdef", stop)
    assert output.finish_reason == "stop"
    assert joined(taken) == (list(ids.encode()), text)


def test_what_could_become_a_stop_string_is_held_and_released(tokenizer) -> None:
    output, taken = run(tokenizer, "xab", ("abc",), most=4, tail=[ord("d")])
    assert [text for _, text in taken] == ["x", "", "", "abd"]
    assert [len(ids) for ids, _ in taken] == [1, 0, 0, 3]
    assert output.finish_reason == "length"


def test_a_stop_string_keeps_the_token_it_begins_inside(tokenizer) -> None:
    # One token with the text "abc": it begins before "bc" does, so it stays, with its text cut.
    built = Tokenizer(models.WordLevel({"abc": 0, "d": 1}, unk_token="d"))
    built.decoder = decoders.Fuse()
    output = Output(PreTrainedTokenizerFast(tokenizer_object=built), (), ("bc",), 10)
    assert output.commit(1)
    assert not output.commit(0)
    assert (output.ids, output.text, output.finish_reason) == ([1, 0], "da", "stop")


def test_stop_wins_a_tie_with_length(tokenizer) -> None:
    assert run(tokenizer, "ab", ("b",), most=2)[0].finish_reason == "stop"
    assert run(tokenizer, "a", most=2, tail=[EOS])[0].finish_reason == "stop"
    assert run(tokenizer, "ab", ("c",), most=2)[0].finish_reason == "length"


def test_without_a_tokenizer_only_ids_count() -> None:
    output = Output(None, {3}, (), 10)
    assert output.commit(1)
    assert not output.commit(3)
    assert output.take() == ([1, 3], "")


@pytest.mark.parametrize("stop", [(), ("bc",), ("zz",)])
@pytest.mark.parametrize("text", ["abcd", "ab", "€xbc", "aaaaaaaa"])
@pytest.mark.parametrize("split", [1, 2, 3, 8])
def test_many_tokens_at_once_are_the_same_as_one_by_one(tokenizer, stop, text, split) -> None:
    # Breaks with: an end token, a stop string or the limit that is not looked for among tokens that come together.
    tokens = [*text.encode(), EOS, *b"more"]
    alone, together = (Output(tokenizer, {EOS}, stop, 6) for _ in range(2))
    for token in tokens:
        if not alone.commit(token):
            break
    while together.finish_reason is None:
        some, tokens = tokens[:split], tokens[split:]
        count = together.extend(some)
        assert count == len(some) or together.finish_reason
    for name in ("ids", "text", "finish_reason"):
        assert getattr(together, name) == getattr(alone, name)
    assert together.take() == alone.take()


def test_text_is_made_when_it_is_asked_for(tokenizer) -> None:
    # Breaks with: a token that is read twice, or not at all, when text is read between commits.
    seldom, often = (Output(tokenizer, {EOS}, (), 100) for _ in range(2))
    for token in "aé€z".encode():
        assert seldom.commit(token)
        assert often.commit(token)
        assert "aé€z".startswith(often.text)
    assert seldom.text == often.text == "aé€z"
