"""The other kinds of drafts on a tiny target: each learns, is stored as its plugin reads it, and drafts in the engine
what the trainer's own forward says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chats
import evaluate
import kinds
import measure
import numpy as np
import pytest
import standalone
import target
import torch
import train
from safetensors.torch import load_file

from specplug import Engine, UserError
from specplug.models.decoder import Decoder

STEPS = 3
OWN = {
    "mtp": "--steps 3 --most-steps 40",
    "dflash": "--block 4 --layers 2 --at 1 3 5 --anchors 0.25 --most-steps 100",
    "standalone": "--steps 3 --layers 2 --most-steps 20",
}
CPU = torch.device("cpu")


def run(kind: str, model: Path, data: Path, out: Path, *more: str) -> dict[str, Any]:
    words = f"--kind {kind} --tokens 1600 --lr 1e-2 --warm 4 --seconds 60 --save-every 1000 --test-one-in 8"
    words += f" --model {model} --out {out} --device cpu --chats {data} {OWN[kind]}"
    return train.train(train.arguments([*words.split(), *more]))


@pytest.fixture(scope="module", params=tuple(OWN))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(kind: str, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(kind)
    run(kind, model, data, out)
    return out


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return target.load(str(model), dtype=torch.float32, device=CPU)


def test_the_draft_learns(kind: str, trained: Path) -> None:
    figures = json.loads((trained / "figures.json").read_text())
    assert figures["step"] > 0, "the draft of before training was kept as the best"
    # Of the target's 48 tokens one in 48 would be right by chance.
    assert figures["accepted"][0] > 0.4, figures
    assert len(figures["accepted"]) == STEPS


@pytest.mark.parametrize("stops", [False, True], ids=["whole", "stopped"])
def test_engine_drafts_exactly_as_the_trainer(
    stops: bool, model: Path, data: Path, trained: Path, decoder: Decoder
) -> None:
    found = chats.read([data])[:24]
    prompts = [chat.tokens[: chat.prompt].tolist() for chat in found]
    # A token that ends many answers early, often as a draft that was right.
    stop = int(np.bincount(np.concatenate([chat.tokens[chat.prompt + 8 :] for chat in found])).argmax())
    sampling = {"temperature": 0, "max_tokens": 24, "ignore_eos": True} | ({"stop_token_ids": [stop]} if stops else {})
    draft = evaluate.loaded(trained, decoder, CPU)
    options = draft.engine(STEPS) | {"dtype": "float32", "device": "cpu", "speculative_draft_model_path": str(trained)}
    with Engine(str(model), **options) as engine:
        results = engine.generate(prompts, sampling)
        accepted = engine.report()["accepted_at"]
    for result, chat in zip(results, found, strict=True):
        assert list(result.ids) == chat.tokens[chat.prompt :][: len(result.ids)].tolist()
        cut = chats.Chat(chat.tokens[: chat.prompt + len(result.ids)], chat.prompt, True)
        if len(result.ids) < 2:
            continue  # no round
        compared, right = evaluate.rounds(evaluate.drafts(draft, decoder, cut, STEPS, CPU), cut, 24)
        assert pad(result.ledger["accepted_at"]) == right
        assert pad(result.ledger["reached"]) == compared
    assert any(len(result.ids) < 24 for result in results) == stops
    told = f"{accepted}: too few drafts accepted for this to show anything"
    assert (sum(accepted) if stops else min(pad(accepted))) >= 10, told


def test_the_command_that_compares(
    kind: str, model: Path, data: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--model {model} --draft {trained} --chats {data} --test-one-in 8 --count 8 --max-tokens 24 --tolerance 0"
    assert evaluate.compare(evaluate.arguments([*words.split(), "--device", "cpu", "--steps", str(STEPS)]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " / " in line and "=" in line]
    assert len(lines) == STEPS
    assert int(lines[0][1]) > 0
    with pytest.raises(UserError, match=r"--steps 0: .* drafts 1 (to 3|or more)"):
        evaluate.compare(evaluate.arguments([*words.split(), "--device", "cpu", "--steps", "0"]))
    if kind == "dflash":
        with pytest.raises(UserError, match=r"--steps 4: .* drafts 1 to 3"):
            evaluate.compare(evaluate.arguments([*words.split(), "--device", "cpu", "--steps", "4"]))


def pad(counts: list[int]) -> list[int]:
    return [*counts, *[0] * (STEPS - len(counts))]


def test_rows_drafted_alone_are_those_drafted_together(trained: Path, data: Path, decoder: Decoder) -> None:
    draft = evaluate.loaded(trained, decoder, CPU)
    found = chats.read([data])[:3]
    batch = chats.together(found)
    picked = torch.tensor([0, 1, 5, 30, len(batch.rows) - 1])
    states = torch.stack(draft.states(batch, target.read(decoder, batch, draft.reads), picked, STEPS), 1)
    alone = []
    for chat in found:
        one = chats.together([chat])
        rows = torch.arange(len(one.rows))
        alone.append(torch.stack(draft.states(one, target.read(decoder, one, draft.reads), rows, STEPS), 1))
    whole = torch.cat(alone)[picked]
    inside = batch.left[picked, None] >= torch.arange(STEPS)
    torch.testing.assert_close(states[inside], whole[inside])


def test_no_draft_sees_what_it_is_to_say(trained: Path, data: Path, decoder: Decoder) -> None:
    draft = evaluate.loaded(trained, decoder, CPU)
    chat = chats.read([data])[0]
    row, other = 4, chat.tokens.copy()
    other[chat.prompt + row + 1 :] = other[chat.prompt]
    states = []
    for tokens in (chat.tokens, other):
        batch = chats.together([chats.Chat(tokens, chat.prompt, True)])
        reading = target.read(decoder, batch, draft.reads)
        states.append(draft.states(batch, reading, torch.arange(row + 2), STEPS)[0])
    torch.testing.assert_close(states[0][: row + 1], states[1][: row + 1])
    assert not torch.allclose(states[0][row + 1], states[1][row + 1], atol=1e-3)


def test_gradients_are_those_of_the_whole_loss(
    trained: Path, data: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = evaluate.loaded(trained, decoder, CPU)
    batch = chats.together(chats.read([data])[:3])
    reading, picked = target.read(decoder, batch, draft.reads), torch.arange(0, len(batch.rows), 2)
    total, weights = torch.zeros(()), draft.weights(STEPS)
    p, best = target.says(decoder, reading.final, None)
    right = torch.ones(len(picked), dtype=torch.bool)
    counted = []
    for step, state in enumerate(draft.states(batch, reading, picked, STEPS)):
        here = batch.left[picked] >= step
        rows = picked[here] + step
        log_q = draft.logits(state).log_softmax(-1)
        loss = -(p[rows] * log_q[here]).sum(-1)
        total = total + loss.mean() * weights[step] / sum(weights)
        right[~here] = False
        right[here] &= log_q[here].argmax(-1) == best[rows]
        counted.append((float(loss.detach().sum()), int(right.sum()), int(here.sum())))
    expected = torch.autograd.grad(total, list(draft.parameters()))
    monkeypatch.setattr(measure, "_ROOM", 7 * 4 * draft.target.vocab_size)
    sums = measure.measure(draft, batch, reading, picked, STEPS, learn=True)
    for parameter, gradient in zip(draft.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    assert sums.loss.tolist() == pytest.approx([loss for loss, _, _ in counted])
    assert sums.right.tolist() == [count for _, count, _ in counted]
    assert sums.rows.tolist() == [count for _, _, count in counted]


def test_a_resumed_run_goes_on_where_the_other_ended(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    run(kind, model, data, tmp_path, "--most-steps", "2")
    before = torch.load(tmp_path / "state.pt", weights_only=True)
    run(kind, model, data, tmp_path, "--most-steps", "2", "--resume")  # nothing left to do
    same = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same["step"] == before["step"] == 2
    assert all(torch.equal(same["draft"][name], before["draft"][name]) for name in before["draft"])
    run(kind, model, data, tmp_path, "--most-steps", "3", "--resume")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3


def test_weights_that_the_target_lends_are_not_stored(kind: str, model: Path, trained: Path) -> None:
    stored, lent = load_file(trained / "model.safetensors"), load_file(model / "model.safetensors")
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    if kind == "standalone":
        for name in ends:
            assert torch.equal(stored[name], lent[name].bfloat16()), name
        fresh = standalone.Standalone(target.load(str(model), dtype=torch.float32, device=CPU), 2)
        assert torch.equal(fresh.embedding, fresh.embedding.bfloat16().float()), "not what is stored is trained with"
        assert (trained / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    else:
        assert not [name for name in stored if "embed" in name or "head" in name]


def test_weights_of_steps_are_the_published_ones(trained: Path, kind: str, decoder: Decoder) -> None:
    draft = evaluate.loaded(trained, decoder, CPU)
    weights = np.array(draft.weights(3))
    published = {"mtp": [0.51, 0.31, 0.18], "standalone": [1 / 3] * 3}
    if kind == "dflash":
        draft.block = 8
        np.testing.assert_allclose(draft.weights(3), np.exp([0, -1 / 4, -2 / 4]))
    else:
        np.testing.assert_allclose(weights / weights.sum(), published[kind], atol=0.005)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--kind mtp --rows 5", "--rows: --kind mtp has no such option; it has --steps"),
        ("--kind eagle3 --block 5", "--block: --kind eagle3 has no such option"),
        ("--kind dflash --steps 5", "--steps: --kind dflash has no such option"),
        ("--kind dflash --anchors 1.5", "'1.5' is no number above 0 and up to 1"),
        ("--kind dflash --block 1", "'1' is no whole number of at least 2"),
        ("--kind medusa", "'eagle3', 'mtp', 'dflash', 'standalone'"),
    ],
)
def test_options_of_another_kind_are_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.arguments([*words.split(), "--chats", "a.npz", "--out", "o"])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err.replace("choose from eagle3, mtp, dflash, standalone", told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--kind dflash --at 1 9", "--at 9: the target has the boundaries 0 to 5"),
        ("--kind dflash --layers 9", "--layers 9: the target has 5"),
        ("--kind dflash --mask 999", "--mask 999: the target has the ids"),
        ("--kind standalone --layers 9", "--layers 9: the target has 5"),
        ("--kind mtp --resume", "--resume: there is no"),
        ("--kind mtp --chats nowhere.npz", "--chats nowhere.npz: there is no such file"),
    ],
)
def test_values_that_the_target_cannot_have_are_refused(
    words: str, told: str, model: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        train.train(train.arguments(f"--model {model} --chats {data} --out {tmp_path} --device cpu {words}".split()))


def test_a_state_of_another_kind_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    run("mtp", model, data, tmp_path, "--most-steps", "1")
    with pytest.raises(UserError, match="is of --kind mtp, and standalone is asked for"):
        run("standalone", model, data, tmp_path, "--resume")


def test_kinds_are_told_by_what_they_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no config"):
        kinds.kind_in(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UserError, match="GPT2LMHeadModel"):
        kinds.kind_in(tmp_path)
