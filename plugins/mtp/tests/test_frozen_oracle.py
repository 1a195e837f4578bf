"""Against transformers' assisted generation with Gemma 4 assistants, on tiny random models."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frozen_checkpoints as gemma
import pytest
import torch
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from specplug import SamplingParams
from specplug.testing import Harness, Move
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path

STEPS, TOKENS = 3, 20
SAID = tuple(range(8))
"""What the targets say, so that a random assistant is right now and then."""
TARGETS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "shared": gemma.SHARED,
    "k_eq_v": gemma.K_EQ_V,
    "windows": {"sliding_window": 6, "final_logit_softcapping": 4.0},
}
ASSISTANTS: Mapping[str, Mapping[str, Any]] = {"k_eq_v": {"num_attention_heads": 8}, "windows": {"sliding_window": 5}}
"""What the targets' assistants have otherwise: a window of their own, for one."""
Proposed = dict[int, list[int]]
"""Tokens of text so far, the root included -> what is proposed to follow."""


class Pairs:
    """Targets and their assistants, written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def target(self, name: str) -> Path:
        place = self._folder / name
        return place if place.exists() else gemma.write_target(place, 3, alphabet=SAID, **TARGETS[name])

    def assistant(self, name: str, ordered: bool = False) -> Path:
        place = self._folder / f"{name}-{ordered}"
        if not place.exists():
            gemma.write_assistant(place, self.target(name), 5, ordered=ordered, said=SAID, **ASSISTANTS.get(name, {}))
        return place


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("gemma"))


def assisted(
    target: Path, draft: Path, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, position: str, window: int
) -> tuple[list[int], Proposed]:
    """Return transformers' greedy answer, and what the assistant proposed in each round.

    Two things that the candidate generator leaves to chance are settled: the assistant sees the committed tokens
    only (as it is, also the KV of the first rejected draft, which lies where the root's will), and of those its window.
    """
    model, assistant = gemma.theirs(target), gemma.theirs(draft)
    assistant.generation_config.num_assistant_tokens = STEPS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    proposed: Proposed = {}
    ask, run = SinglePositionMultiTokenCandidateGenerator.get_candidates, type(assistant).forward

    def noted(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        outputs = rest["model_outputs"]
        if outputs is not None:
            most = {gemma.FULL: input_ids.shape[1] - 1, gemma.SLIDING: window}
            kept = outputs.shared_kv_states[gemma.FULL][0].shape[2] - (input_ids.shape[1] - 1)  # rejected rows
            cut = {
                kind: tuple(part[:, :, : part.shape[2] - kept][:, :, -most[kind] :] for part in parts)
                for kind, parts in outputs.shared_kv_states.items()
            }
            rest["model_outputs"] = SimpleNamespace(hidden_states=outputs.hidden_states, shared_kv_states=cut)
        found = ask(self, input_ids, **rest)
        proposed[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    def placed(self: Any, *args: Any, position_ids: torch.Tensor, **rest: Any) -> Any:
        return run(self, *args, position_ids=position_ids - int(position == "committed"), **rest)

    with monkeypatch.context() as patch:
        patch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", noted)
        patch.setattr(type(assistant), "forward", placed)
        text = answer(model, prompt, assistant_model=assistant)
    return text, proposed


def answer(model: Any, prompt: tuple[int, ...], **options: Any) -> list[int]:
    """Return transformers' greedy answer. The mask is given, or it would take token 0 for padding."""
    ids = torch.tensor([prompt])
    options |= {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def compared(harness: Harness, text: tuple[int, ...], proposed: Proposed) -> int:
    """Hold every round of `proposed` against ours over the same text; returns how many tokens were."""
    harness.admit(0, text, 1)
    done, count = 0, 0
    for length, theirs in sorted(proposed.items()):
        if not theirs or length >= len(text):
            continue
        drafts, _ = harness.propose(harness.ingest([Move(0, length - 1 - done, (60, 61))]))[0]
        assert list(drafts[: len(theirs)]) == theirs, f"after {length} tokens of {text}"
        done, count = length - 1, count + len(theirs)
    return count


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "ordered", "position"),
    [
        (name, ordered, "root" if (at + ordered) % 2 else "committed")
        for at, name in enumerate(TARGETS)
        for ordered in (False, True)
    ],
)
def test_text_and_proposals_are_those_of_assisted_generation(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, name: str, ordered: bool, position: str
) -> None:
    target, draft = pairs.target(name), pairs.assistant(name, ordered)
    window = ASSISTANTS.get(name, {}).get("sliding_window", gemma.TEXT["sliding_window"])
    config = {"num_steps": STEPS, "frozen_position": position}
    model = gemma.loaded(target)
    accepted = 0
    with gemma.engine(model, draft, config) as engine:
        for prompt in PROMPTS[::3]:
            text, proposed = assisted(target, draft, prompt, monkeypatch, position, window)
            (result,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=TOKENS))
            assert result.ids == text
            assert compared(Harness(engine.run, model), (*prompt, *text), proposed) >= TOKENS
            # Our rounds are theirs, so that as many drafts were accepted.
            assert result.ledger["rounds"] == sum(length > len(prompt) for length in proposed)
            accepted += result.ledger["accepted"]
    assert accepted > 0, "nothing is accepted, so that no round begins behind an accepted draft"


@pytest.mark.filterwarnings("ignore")
def test_text_is_plain_generation(pairs: Pairs) -> None:
    model = gemma.theirs(pairs.target("shared"))
    with gemma.engine(gemma.loaded(pairs.target("shared")), pairs.assistant("shared")) as engine:
        for prompt, result in zip(
            PROMPTS, engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=TOKENS)), strict=True
        ):
            assert result.ids == answer(model, prompt)


@pytest.mark.parametrize("ordered", [False, True])
def test_device_path_is_the_host_path(pairs: Pairs, ordered: bool) -> None:
    """The same requests on either path: equal answers, and equally many drafts accepted."""
    target, draft, draws = gemma.loaded(pairs.target("windows")), pairs.assistant("windows", ordered), ordered
    options: dict[str, Any] = {"chunked_prefill_size": 8, "max_running_requests": 3}
    sampling = SamplingParams(temperature=0.8 if draws else 0.0, seed=4, max_tokens=TOKENS)
    with gemma.engine(target, draft, {"draft_sampling": draws}, **options) as engine:
        wanted = engine.generate(PROMPTS, sampling)
    with device_path():
        engine = gemma.engine(target, draft, {"draft_sampling": draws}, **options)
    with engine:
        found = engine.generate(PROMPTS, sampling)
    for one, other in zip(wanted, found, strict=True):
        assert (one.ids, one.ledger["drafted"], one.ledger["accepted"]) == (
            *(other.ids, other.ledger["drafted"]),
            other.ledger["accepted"],
        )
    assert any(0 < result.ledger["accepted"] < result.ledger["drafted"] for result in found)


def test_a_published_target_of_text_and_pictures(tmp_path: Path) -> None:
    target = gemma.write_multimodal_target(tmp_path / "target")
    draft = gemma.write_assistant(tmp_path / "draft", target)
    model = gemma.loaded(target)
    with gemma.engine(model, draft) as engine, gemma.engine(model, None) as plain:
        greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
        found, wanted = engine.generate(PROMPTS, greedy), plain.generate(PROMPTS, greedy)
        assert [result.ids for result in found] == [result.ids for result in wanted]
        assert engine.ledger.report()["drafted"] > 80


def test_drawing_accepts_more_than_guessing(pairs: Pairs) -> None:
    """Of models that agree on little, drafts drawn with the target's noise are right more often than the likeliest."""
    target, draft = gemma.loaded(pairs.target("plain")), pairs.assistant("plain")
    found = []
    for draws in (False, True):
        with gemma.engine(target, draft, {"draft_sampling": draws, "num_steps": 1}) as engine:
            engine.generate(PROMPTS, SamplingParams(temperature=1.5, seed=1, max_tokens=30))
            found.append(engine.ledger.report()["accept_rate"])
    assert found[1] > found[0]
