"""Chats that a tiny target writes: their form, their seeds, and what is not kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chats
import generate
import numpy as np
import pytest
import train
from openings import Opening
from safetensors.torch import load_file, save_file

from specplug import Engine, UserError
from specplug.testing.tokenizer import EOS, byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
HEAD, TAIL = list(b"<user>"), [EOS, *b"<bot>"]
LONGEST, ANSWER = 20, 16
OPENINGS = ("Say this", "12:", "say it")


@pytest.fixture(scope="module")
def speaker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random target with a chat template, and an end of turn that it says now and then."""
    folder = tmp_path_factory.mktemp("speaker")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 0.5
    tensors["lm_head.weight"][EOS] = 2.0 * tensors["lm_head.weight"][40]
    save_file(tensors, folder / "model.safetensors")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "LONGEST_TURN", LONGEST)


def run(speaker: Path, out: Path, *more: str) -> generate.Writer:
    words = (
        f"--model {speaker} --out {out} --batch 6 --most-chats 30 --max-tokens {ANSWER} --device cpu --dtype float32"
    )
    return generate.make(generate.arguments([*words.split(), *more]))


def arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as data:
        return dict(data)


@pytest.fixture(scope="module")
def made(speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, generate.Writer]:
    path = tmp_path_factory.mktemp("made") / "sub" / "chats.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "LONGEST_TURN", LONGEST)
        return path, run(speaker, path, "--seed", "3")


def test_file_has_the_form_of_the_others(made: tuple[Path, generate.Writer]) -> None:
    data = arrays(made[0])
    assert {name: (part.dtype, part.ndim) for name, part in data.items()} == {
        "tokens": (np.uint16, 1),
        "offsets": (np.int64, 1),
        "prompt_len": (np.uint16, 1),
        "greedy": (bool, 1),
    }
    assert len(data["offsets"]) == 31
    assert len(data["prompt_len"]) == len(data["greedy"]) == 30
    assert data["offsets"][-1] == len(data["tokens"])
    assert 12 <= data["greedy"].sum() <= 28  # two of three, but for those that were dropped
    assert [path.name for path in made[0].parent.iterdir()] == ["chats.npz"], "something partial was left"


def test_chats_follow_the_template_and_end_as_they_ended(made: tuple[Path, generate.Writer]) -> None:
    read = chats.read([made[0]])
    turns = set()
    for chat in read:
        tokens = chat.tokens.tolist()
        assert tokens[: len(HEAD)] == HEAD
        assert tokens[chat.prompt - len(TAIL) : chat.prompt] == TAIL
        turn, answer = tokens[len(HEAD) : chat.prompt - len(TAIL)], tokens[chat.prompt :]
        assert 0 < len(turn) < LONGEST
        assert EOS not in turn
        assert EOS not in answer[:-1]
        assert answer[-1] == EOS or len(answer) == ANSWER
        turns.add(tuple(turn))
    ends = {chat.tokens[-1] == EOS for chat in read}
    assert ends == {True, False}, "the target is to end some answers, and not all"
    assert len(turns) == len(read), "a turn was used twice"


def test_what_is_of_no_use_is_counted(made: tuple[Path, generate.Writer]) -> None:
    dropped = made[1].dropped
    assert dropped["cut off"] > 0
    assert dropped["failed"] == 0
    assert made[1].unfinished > 0


def test_greedy_answers_are_what_the_engine_gives(speaker: Path, made: tuple[Path, generate.Writer]) -> None:
    read = chats.read([made[0]])
    with Engine(str(speaker), device="cpu", dtype="float32") as engine:
        prompts = [chat.tokens[: chat.prompt].tolist() for chat in read]
        results = engine.generate(prompts, {"temperature": 0, "max_tokens": ANSWER})
    same = [list(result.ids) == chat.tokens[chat.prompt :].tolist() for result, chat in zip(results, read, strict=True)]
    assert all(equal for equal, chat in zip(same, read, strict=True) if chat.greedy)
    assert not all(equal for equal, chat in zip(same, read, strict=True) if not chat.greedy)


def test_a_seed_makes_the_same_file_and_another_other_chats(
    speaker: Path, made: tuple[Path, generate.Writer], tmp_path: Path
) -> None:
    run(speaker, tmp_path / "again.npz", "--seed", "3")
    run(speaker, tmp_path / "other.npz", "--seed", "4")
    first, again, other = (arrays(path) for path in (made[0], tmp_path / "again.npz", tmp_path / "other.npz"))
    assert all(np.array_equal(part, again[name]) for name, part in first.items())
    prompts = [
        {tuple(chat.tokens[: chat.prompt]) for chat in chats.read([path])} for path in (made[0], tmp_path / "other.npz")
    ]
    assert len(prompts[0] & prompts[1]) <= 3, "short turns may meet by chance, most do not"
    assert not np.array_equal(first["tokens"], other["tokens"])


@pytest.fixture(scope="module")
def begun(speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, generate.Writer]:
    """Chats, half of them opened, with the seed of `made`."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "openings.txt").write_text("\n".join(OPENINGS), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "LONGEST_TURN", LONGEST)
        words = ["--seed", "3", "--openings", str(folder / "openings.txt")]
        return folder / "chats.npz", run(speaker, folder / "chats.npz", *words)


def turns_of(path: Path) -> list[str]:
    read = chats.read([path])
    return [bytes(chat.tokens[len(HEAD) : chat.prompt - len(TAIL)].tolist()).decode("latin-1") for chat in read]


def test_half_of_the_turns_go_on_from_an_opening(made: tuple[Path, Any], begun: tuple[Path, generate.Writer]) -> None:
    turns = turns_of(begun[0])
    opened = [turn.startswith(OPENINGS) for turn in turns]
    assert opened == begun[1].opened
    assert 8 <= sum(opened) <= 22
    assert {opening for opening in OPENINGS for turn in turns if turn.startswith(opening)} == set(OPENINGS)
    assert any(turn not in OPENINGS for turn, begins in zip(turns, opened, strict=True) if begins), "none goes on"
    assert max(map(len, turns)) < LONGEST, "an opening counts as part of the turn"
    alone = {turn for turn, begins in zip(turns, opened, strict=True) if not begins}
    assert len(alone & set(turns_of(made[0]))) >= len(alone) // 2, "the others are as they were without openings"


def test_opened_chats_are_as_the_others(speaker: Path, begun: tuple[Path, generate.Writer], tmp_path: Path) -> None:
    read = chats.read([begun[0]])
    for chat in read:
        tokens = chat.tokens.tolist()
        assert tokens[: len(HEAD)] == HEAD
        assert tokens[chat.prompt - len(TAIL) : chat.prompt] == TAIL
    assert len({tuple(chat.tokens[: chat.prompt]) for chat in read}) == len(read), "a turn was used twice"
    run(speaker, tmp_path / "again.npz", "--seed", "3", "--openings", str(begun[0].with_name("openings.txt")))
    again = arrays(tmp_path / "again.npz")
    assert all(np.array_equal(part, again[name]) for name, part in arrays(begun[0]).items())


def test_a_share_of_all_opens_all_and_is_told(
    speaker: Path, begun: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--openings", str(begun[0].with_name("openings.txt")), "--most-chats", "7"]
    run(speaker, tmp_path / "all.npz", *words, "--opened", "1")
    assert all(turn.startswith(OPENINGS) for turn in turns_of(tmp_path / "all.npz"))
    assert ", 7 of them opened; user turns dropped: " in capsys.readouterr().out.splitlines()[-1]
    run(speaker, tmp_path / "none.npz", *words, "--opened", "0")
    run(speaker, tmp_path / "plain.npz", "--most-chats", "7")
    assert "opened" not in capsys.readouterr().out.splitlines()[-1]
    assert turns_of(tmp_path / "none.npz") == turns_of(tmp_path / "plain.npz")


def test_an_opening_is_part_of_its_turn(speaker: Path) -> None:
    with Engine(str(speaker), device="cpu", dtype="float32") as engine:
        opening = Opening([*HEAD, *b"Say"], len(HEAD))
        writer = generate.Writer(engine, generate.template_of(engine.target.tokenizer), 0, 2, 4, [opening], 1.0)
        for turn in (b"Say", b"Say it", b"Say"):
            request = SimpleNamespace(tokens=[*HEAD, *turn, EOS], output=SimpleNamespace(finish_reason="stop"))
            writer._ended(generate.Written(0, request, opening))
        assert [tokens for _, tokens in writer._answers] == [[*HEAD, *b"Say", *TAIL], [*HEAD, *b"Say it", *TAIL]]
        assert writer.dropped == {"seen before": 1, "empty": 0, "cut off": 0, "with special tokens": 0, "failed": 0}
        for _ in range(2):
            writer._ended(generate.Written(0, request, opening, prompt=9))
        writer.cut(1)
        assert (len(writer.chats), writer.opened) == (1, [True])


def test_an_opening_leaves_room_for_the_end_of_its_turn(speaker: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * LONGEST, encoding="utf-8")
    with pytest.raises(UserError, match=f"line 1 has {LONGEST} tokens; give openings of 1 to {LONGEST - 1}"):
        run(speaker, tmp_path / "chats.npz", "--openings", str(tmp_path / "long.txt"))


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "half"])
def test_a_share_is_a_number_from_0_to_1(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate.arguments(["--out", "chats.npz", f"--opened={value}"])
    assert f"argument --opened: '{value}' is no number from 0 to 1" in capsys.readouterr().err


def test_turns_are_dropped_for_what_they_are(speaker: Path) -> None:
    with Engine(str(speaker), device="cpu", dtype="float32") as engine:
        writer = generate.Writer(engine, generate.template_of(engine.target.tokenizer), 0, 2, 4)
        assert writer._fault([EOS]) == "empty"
        assert writer._fault([*b" \n", EOS]) == "empty"
        assert writer._fault([*b"hello"]) == "cut off"
        assert writer._fault([*b"hello", EOS]) == ""
        assert writer._fault([*b"hello", EOS]) == "seen before"
        writer.template = writer.template._replace(special=frozenset({EOS, 65}))
        assert writer._fault([*b"hello A", EOS]) == "with special tokens"


def test_a_fault_late_in_a_run_keeps_what_is_finished(
    speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = generate.Writer.step

    def fails(writer: generate.Writer) -> None:
        if len(writer.chats) >= 5:
            raise RuntimeError("late")
        step(writer)

    monkeypatch.setattr(generate.Writer, "step", fails)
    with pytest.raises(RuntimeError, match="late"):
        run(speaker, tmp_path / "chats.npz")
    assert len(arrays(tmp_path / "chats.npz")["greedy"]) >= 5


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--out", "chats.txt"], "--out chats.txt: .* ends so"),
        (["--batch", "5000"], "--batch 5000: give 1 to 2048"),
        (["--max-tokens", "100000"], "--max-tokens 100000: .* 1 to"),
        (["--openings", "none.txt"], "--openings none.txt: cannot be read"),
        (["--opened", "0.5"], "--opened 0.5: there is nothing to open chats with; give --openings FILE"),
        (["--seconds", "1e-9"], "--seconds 1e-09: no chat was finished"),
    ],
)
def test_faults_of_the_caller_are_one_line(speaker: Path, tmp_path: Path, more: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        run(speaker, tmp_path / "chats.npz", *more)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_template_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model: its tokenizer has no chat template"):
        run(model, tmp_path / "chats.npz")


def test_tests_are_capped_by_prompt_not_by_place() -> None:
    found = [chats.Chat(np.arange(start, start + 8), 4, True) for start in range(300)]
    few, turned, cut = (
        {int(chat.tokens[0]) for chat in chats.capped(some, 100)} for some in (found, found[::-1], found[50:])
    )
    assert len(few) == 100
    assert few == turned
    assert few - set(range(50)) < cut, "other chats change which ones are tested on"
    assert few != set(range(100))
    assert chats.capped(found[:7], 100) == found[:7]


def test_a_run_tests_on_no_more_than_that(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chats.capped, "__defaults__", (3,))
    words = f"--model {model} --chats {data} --out {tmp_path} --device cpu --rows 42 --at 1 2 4 --test-one-in 8"
    train.train(train.arguments([*words.split(), "--most-steps", "1"]))
    assert "3 to test on" in capsys.readouterr().out
