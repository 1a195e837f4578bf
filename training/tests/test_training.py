"""The trainer on a tiny target, with an EAGLE-3 head: its loss falls, it can go on from where it was, and the engine
drafts as it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chats
import eagle3
import evaluate
import numpy as np
import pytest
import target
import torch
import train
from safetensors.torch import load_file

from specplug import Engine
from specplug.models.decoder import Decoder
from specplug.models.weights import fill_dummy
from specplug.testing import targets
from specplug.testing.tokenizer import SIZE

VOCAB, LAYERS, STEPS = SIZE, 5, 3
ROWS = 42
"""Of the draft's vocabulary: most of what the target says, not all."""


def run(model: Path, data: Path, out: Path, *more: str) -> dict[str, Any]:
    words = f"--rows {ROWS} --at 1 2 4 --steps {STEPS} --tokens 1600 --lr 4e-3 --warm 4 --seconds 60 --test-one-in 8"
    words += f" --model {model} --out {out} --device cpu --chats {data}"
    return train.train(train.arguments([*words.split(), *more]))


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft")
    run(model, data, out, "--most-steps", "200")
    return out


def test_chats_of_one_prompt_stand_on_one_side() -> None:
    found = [chats.Chat(np.arange(length) % 7 + start, 4, True) for start in range(200) for length in (8, 9)]
    known, tests = chats.split(found)
    sides = [{tuple(chat.tokens[:4]) for chat in side} for side in (known, tests)]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_rows_are_those_that_draft_the_answer() -> None:
    found = [chats.Chat(np.arange(10, 16), 2, True), chats.Chat(np.arange(20, 24), 2, True)]
    batch = chats.together(found)
    width = batch.tokens.shape[1]
    assert batch.rows.tolist() == [1, 2, 3, width + 1]
    assert batch.left.tolist() == [2, 1, 0, 0]


def test_every_chat_is_in_one_batch_of_an_epoch() -> None:
    random = np.random.default_rng(0)
    found = [chats.Chat(np.full(random.integers(5, 90), n), 2, True) for n in range(60)]
    for seed in (None, 1):
        made = list(chats.batches(found, 400, seed))
        seen = [int(row[0]) for batch in made for row in batch.tokens]
        assert sorted(seen) == list(range(60))
        assert max(batch.tokens.numel() for batch in made) <= 400 + 16 * 60


def test_packed_reading_is_a_dense_forward(model: Path, data: Path) -> None:
    decoder = target.load(str(model), dtype=torch.float32, device=torch.device("cpu"))
    found = chats.read([data])[:3]
    batch = chats.together(found)
    ids = torch.arange(0, VOCAB, 3)
    reading = target.read(decoder, batch, (1, 4))
    p, best = target.says(decoder, reading.final, ids)
    start = 0
    for number, chat in enumerate(found):
        taps = tuple(target.TapRequest(at=at) for at in (1, 4))
        hidden, dense = targets.dense_forward(decoder, chat.tokens.tolist(), taps)
        for ours, theirs in zip(reading.taps, dense, strict=True):
            torch.testing.assert_close(ours[number, : len(chat.tokens)], theirs)
        dense_p = decoder.logits(hidden).softmax(-1)[chat.prompt : -1]
        rows = slice(start, start + len(dense_p))
        torch.testing.assert_close(p[rows], dense_p[:, ids])
        assert best[rows].tolist() == chat.tokens[chat.prompt + 1 :].tolist()  # the answers are greedy
        start += len(dense_p)
    assert start == len(best)


def test_loss_falls_and_the_draft_learns(trained: Path) -> None:
    figures = json.loads((trained / "figures.json").read_text())
    assert figures["step"] > 0, "the draft of before training was kept as the best"
    assert figures["accepted"][0] > 0.4, figures
    assert figures["loss"][0] < 2.6, figures


def test_engine_drafts_exactly_as_the_trainer(model: Path, data: Path, trained: Path) -> None:
    config = {"num_steps": STEPS, "eagle_topk": 1, "num_draft_tokens": STEPS + 1}
    found = [chat for chat in chats.read([data])[:24]]
    prompts = [chat.tokens[: chat.prompt].tolist() for chat in found]
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "speculative_draft_model_path": str(trained)}
    with Engine(str(model), algorithm="eagle3", config=config, **options) as engine:
        results = engine.generate(prompts, {"temperature": 0, "max_tokens": 24, "ignore_eos": True})
        decoder = engine.target.model
        assert isinstance(decoder, Decoder)
        draft = evaluate.loaded(trained, decoder, torch.device("cpu"))
        for result, chat in zip(results, found, strict=True):
            assert list(result.ids) == chat.tokens[chat.prompt :].tolist()
            drafted = evaluate.drafts(draft, decoder, chat, STEPS, torch.device("cpu"))
            compared, right = evaluate.rounds(drafted, chat, 24)
            assert pad(result.ledger["accepted_at"]) == right
            assert pad(result.ledger["reached"]) == compared
        accepted = engine.report()["accepted_at"]
    assert min(accepted) > 20, "too few drafts accepted at some depth for this to show anything"


def pad(counts: list[int]) -> list[int]:
    return [*counts, *[0] * (STEPS - len(counts))]


def test_a_resumed_run_goes_on_where_the_other_ended(model: Path, data: Path, tmp_path: Path) -> None:
    run(model, data, tmp_path, "--most-steps", "3")
    before = torch.load(tmp_path / "state.pt", weights_only=True)
    run(model, data, tmp_path, "--most-steps", "3", "--resume")  # nothing left to do
    same = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same["step"] == before["step"] == 3
    assert all(torch.equal(same["draft"][name], before["draft"][name]) for name in before["draft"])
    run(model, data, tmp_path, "--most-steps", "5", "--resume")
    after = torch.load(tmp_path / "state.pt", weights_only=True)
    assert after["step"] == 5
    assert float(after["optimizer"]["state"][0]["step"]) == 5


def test_saved_vocabulary_maps_agree(trained: Path) -> None:
    tensors = load_file(trained / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(ROWS)
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert all(t.dtype == torch.bfloat16 for name, t in tensors.items() if name not in ("d2t", "t2d"))


def test_later_steps_see_the_first_and_their_own_row_only() -> None:
    torch.manual_seed(0)
    decoder = Decoder({**targets.decoder_config(VOCAB), "num_hidden_layers": LAYERS})
    fill_dummy(decoder, 0)
    draft = eagle3.Eagle3(decoder, torch.arange(VOCAB), (1, 2, 4))
    chat = chats.Chat(np.arange(12) % VOCAB, 2, True)
    batch = chats.together([chat])
    reading, rows = target.read(decoder, batch, draft.reads), torch.arange(len(batch.rows))
    base = torch.stack(draft.states(batch, reading, rows, STEPS))
    moved = tuple(tap.clone() for tap in reading.taps)
    for tap in moved:
        tap[:, 6] += 1.0
    other = torch.stack(draft.states(batch, reading._replace(taps=moved), rows, STEPS))
    first = batch.rows.tolist().index(6)
    assert torch.equal(base[:, :first], other[:, :first])
    assert ((base - other).abs().amax(-1)[:, first:] > 0).all()
