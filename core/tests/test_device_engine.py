"""The device path, run on a CPU, against the host path: the same requests, token for token and delta for delta."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specplug import SamplingParams
from specplug.errors import UserError
from specplug.models.target import Target
from specplug.registry import Registry
from specplug.runtime.device.executor import DeviceExecutor
from specplug.runtime.device.step import DeviceStep
from specplug.runtime.engine import Engine
from specplug.runtime.request import Request
from specplug.runtime.scheduler import UNKNOWN, Row
from specplug.testing.bench import LETTERS, PROMPTS
from specplug.testing.paper import paper_registry
from specplug.testing.paths import device_path
from specplug.testing.targets import decoder_target, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

TARGET = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)  # notices a wrong page or mask
TEXTS = tuple(tuple(LETTERS[token] for token in prompt) for prompt in PROMPTS)
A, B, C, D = LETTERS[:4]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def steer(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """A caller's processor: forbids the newest token, and prefers what the length says."""
    logits[tokens[-1]] = float("-inf")
    logits[LETTERS[len(tokens) % len(LETTERS)]] += 1.0
    return logits


def fails(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Raises when the text is 10 tokens long."""
    if len(tokens) >= 10:
        raise ValueError("ten is enough")
    return logits


class Ask(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    more: Mapping[str, Any] = {}


def _asks() -> list[Ask]:
    def ask(prompt: int, more: Mapping[str, Any] | None = None, **options: Any) -> Ask:
        return Ask(TEXTS[prompt], SamplingParams(**{"max_tokens": 12, **options}), more or {})

    return [
        ask(0, temperature=0.0),
        ask(1, temperature=0.8, seed=4),
        ask(2, temperature=1.2, seed=5, top_k=3, max_tokens=9),
        ask(3, temperature=0.7, seed=6, top_p=0.9, frequency_penalty=0.8),
        ask(4, temperature=0.0, repetition_penalty=1.4, logit_bias={D: 1.5}, logprobs=True),
        ask(1, temperature=1.0, seed=7, min_p=0.2, presence_penalty=-1.0, logprobs=True, top_logprobs=3),
        ask(0, temperature=0.9, seed=8, n=3, max_tokens=7),
        ask(2, temperature=0.0, min_tokens=8, stop_token_ids=(A, B, C)),
        ask(3, temperature=1.1, seed=9, min_tokens=5, stop_token_ids=(C, D), presence_penalty=0.5),
        ask(4, temperature=1.0, seed=10, stop=("ab", "ca", "d"), max_tokens=20),
        ask(0, {"max_drafted": 2}, temperature=0.0, stop=("fe",)),
        ask(1, {"max_drafted": 0}, temperature=0.8, seed=11, min_p=1.0),
        ask(2, {"logits_processor": steer}, temperature=0.0, frequency_penalty=0.4),
        ask(3, {"logits_processor": steer, "max_drafted": 3}, temperature=0.9, seed=12, top_k=6, logprobs=True),
        ask(4, {"logits_processor": fails}, temperature=0.9, seed=13),
    ]


ASKS = _asks()
DRAFTERS = {
    "none": ("none", ""),
    "right": ("scripted", "right"),
    "right on the device": ("scripted-device", "right"),
    "wrong": ("scripted-device", "wrong"),
    "right, then wrong": ("scripted", "right_then_wrong"),
    "ragged": ("scripted-device", "ragged"),
    "empty": ("scripted-device", "empty"),
    "too long": ("scripted-device", "too_long"),
    "no id": ("scripted-device", "negative_id"),
    "a huge id": ("scripted", "huge_id"),
    "bad parents": ("scripted-device", "bad_parents"),
    "duplicates": ("scripted-device", "duplicates"),
    "tree": ("scripted", "random_tree"),
    "tree on the device": ("scripted-device", "random_tree"),
    "hostile": ("scripted", "hostile"),
    "hostile on the device": ("scripted-device", "hostile"),
    "dense": ("scripted-dense", ""),
}


class Told(NamedTuple):
    """All that a caller learns of one answer."""

    deltas: list[Any]
    ids: list[int]
    text: str
    reason: str | None
    error: str
    ledger: dict[str, Any]


Event = Callable[[Engine, list[Request]], None]


def play(engine: Engine, asks: Sequence[Ask] = ASKS, events: Mapping[int, Event] | None = None) -> list[Told]:
    """Submit `asks`, step until all have ended and return what was told; `events`: done after so many steps."""
    requests = [one for ask in asks for one in engine.submit_choices(ask.prompt, ask.sampling, **ask.more)]
    deltas: dict[tuple[str, int], list[Any]] = {(one.id, one.choice): [] for one in requests}
    steps = 0
    while any(one.output.finish_reason is None for one in requests):
        for delta in engine.step():
            told = (delta.ids, delta.text, delta.finish_reason, delta.logprobs)
            deltas.setdefault((delta.request, delta.choice), []).append(told)
        steps += 1
        assert steps < 600, "a request does not end"
        if events and steps in events:
            events[steps](engine, requests)
    if not engine._scheduler.running:
        assert engine.free_pages == engine.pages, "pages are missing at idle"
    return [
        Told(
            deltas[one.id, one.choice],
            one.output.ids,
            one.output.text,
            one.output.finish_reason,
            one.error,
            one.settled_ledger().report(),
        )
        for one in requests
    ]


def answers(told: Sequence[Told]) -> list[tuple[list[int], str, str | None, str]]:
    """Return what was answered, without the steps it came in."""
    return [(one.ids, one.text, one.reason, one.error) for one in told]


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return paper_registry(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return decoder_target(2, 8, folder=tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(registry: Registry) -> list[Told]:
    """What the host answers without drafts."""
    with Engine(TARGET, registry=registry, page_size=4, context_length=48, max_running_requests=4) as engine:
        return play(engine)


@pytest.fixture
def make(registry: Registry, plain: list[Told]) -> Make:
    """Engines on either path; scripted drafters know the plain answers."""

    def engine(where: str, drafter: str = "none", width: int = 5, target: Target = TARGET, **options: Any) -> Engine:
        algorithm, behaviour = DRAFTERS[drafter]
        more = options.pop("config", {})
        config: dict[str, Any] = {} if algorithm == "none" else {"num_draft_tokens": width + 1}
        if behaviour:
            every = [(*ask.prompt, *told.ids) for ask, told in zip(_each_choice(), plain, strict=True)]
            config |= {"scripted_behaviour": behaviour, "scripted_texts": every, "scripted_n": 2}
        return built(where, target, algorithm, config | more, **options)

    def built(where: str, target: Target, algorithm: str, config: Mapping[str, Any], **options: Any) -> Engine:
        options = {"page_size": 4, "context_length": 48, "max_running_requests": 4, "max_cuda_graphs": 8, **options}
        with device_path() if where == "device" else nullcontext():
            made = Engine(target, algorithm=algorithm, config=config, registry=registry, **options)
        assert isinstance(made._executor, DeviceExecutor) == (where == "device")
        if where == "device":
            assert bool(made.eager) == made.options.disable_cuda_graph, made.eager
        return made

    engine.built = built  # type: ignore[attr-defined]
    return engine


def _each_choice() -> list[Ask]:
    return [ask for ask in ASKS for _ in range(ask.sampling.n)]


def on_both(make: Make, *args: Any, asks: Sequence[Ask] = ASKS, **options: Any) -> list[Told]:
    """Play `asks` on both paths, compare all of it, and return it."""
    with make("host", *args, **options) as engine:
        wanted = play(engine, asks)
        status = engine.speculation
    with make("device", *args, **options) as engine:
        found = play(engine, asks)
        assert engine.speculation == status
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one == other, f"request {at}"
    return found


# --- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("rule", "eager"),
    [("coupled", False), ("coupled", True), ("rejection", False)],
    ids=["coupled", "coupled, eager", "rejection"],
)
def test_the_device_says_what_the_host_says(
    make: Make, plain: list[Told], drafter: str, rule: str, eager: bool
) -> None:
    """Every option, in batches that requests join and leave; deltas, log-probabilities, ledgers and errors too."""
    # Breaks with: a stale row of any static buffer, a pad that counts, a draft of a slot's last owner, wrong ancestors.
    told = on_both(make, drafter, speculative_acceptance=rule, disable_cuda_graph=eager)
    if rule == "coupled":
        assert answers(told) == answers(plain)
    if drafter in ("right", "right on the device", "tree", "tree on the device"):
        assert sum(one.ledger["accepted"] for one in told) > 5


@pytest.mark.parametrize("drafter", ["none", "right on the device", "tree on the device", "tree", "dense"])
@pytest.mark.parametrize(("chunk", "page", "batch"), [(3, 1, 4), (5, 16, 3), (1, 4, 1)])
def test_prompts_in_chunks_and_batches_that_are_no_bucket(
    make: Make, drafter: str, chunk: int, page: int, batch: int
) -> None:
    # Breaks with: an unfinished chunk that is decided, a prompt's following tokens not handed on, page 0 for all.
    asks = [Ask((*TEXTS[0], *TEXTS[4], *TEXTS[0])[: 9 + at], ask.sampling) for at, ask in enumerate(ASKS[:5])]
    on_both(make, drafter, asks=asks, chunked_prefill_size=chunk, page_size=page, max_running_requests=batch)


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("graphs", [1, 3, 5, 8, 64])
def test_few_graphs_pad_more_and_change_nothing(make: Make, width: int, graphs: int) -> None:
    # Breaks with: buffers as long as the first bucket, which has the most rows and not the most tokens.
    on_both(make, "tree on the device", width, asks=ASKS[:6], max_cuda_graphs=graphs, max_running_requests=3)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_drafts_that_were_drawn_are_the_hosts(make: Make, rule: str) -> None:
    """On a small vocabulary, where such drafts are accepted now and then."""
    # Breaks with: q of another slot or node, the draft's noise at the target's index, coins by row.
    asks = [
        Ask(prompt, SamplingParams(temperature=temperature, seed=5, top_p=top_p, max_tokens=14))
        for prompt, temperature, top_p in zip(
            PROMPTS, (0.0, 0.9, 1.2, 0.7, 1.5), (1.0, 1.0, 0.9, 1.0, 0.8), strict=True
        )
    ]
    target = table_target(8, 2, 3)
    told = on_both(make, "dense", target=target, asks=asks, speculative_acceptance=rule)
    assert sum(one.ledger["accepted"] for one in told) > 5


@pytest.mark.parametrize("mean", ["1", "2.5", "4"])
@pytest.mark.parametrize("drafter", ["right on the device", "tree", "dense"])
def test_synthetic_acceptance_tosses_the_same_coins(make: Make, drafter: str, mean: str) -> None:
    asks = [ask._replace(sampling=ask.sampling.model_copy(update={"seed": at})) for at, ask in enumerate(ASKS[:12])]
    on_both(make, drafter, asks=asks, speculative_acceptance=f"synthetic:{mean}")


@pytest.mark.parametrize("drafter", ["right on the device", "ragged", "tree on the device", "dense"])
def test_a_plan_that_reads_back_verifies_what_is_valid(make: Make, plain: list[Told], drafter: str) -> None:
    """The core learns `num_valid` before the verify, so no row is wider than its drafts."""
    with make("device", drafter) as engine:
        drafting: Any = engine._built.drafting
        executor: Any = engine._executor
        drafting.plan = drafting.plan.model_copy(update={"reads_back": True})
        widths: list[tuple[int, int]] = []
        launch = executor.launch

        def spy(rows: Sequence[Row]) -> Any:
            step = launch(rows)
            valid = [line.valid for line in step._report.read()]
            widths.extend((row.drafted, valid[at]) for at, row in enumerate(step.rows))
            return step

        executor.launch = spy
        told = play(engine)
    assert answers(told) == answers(plain)
    assert any(drafted for drafted, _ in widths)
    assert all(drafted == valid for drafted, valid in widths)


PAPER: Mapping[str, Mapping[str, Any]] = {
    "paper-shifted": {"num_draft_tokens": 4},
    "paper-tree": {"num_draft_tokens": 9, "num_steps": 3, "paper_topk": 3},
    "paper-chained": {"num_draft_tokens": 3},
    "paper-reader": {"num_draft_tokens": 4},
    "paper-block": {"num_draft_tokens": 5},
    "paper-self": {"num_draft_tokens": 4},
    "paper-combined": {"paper_parts": ("paper-tree", "paper-chained"), "num_draft_tokens": 6},
    "paper-shifted to 15": {"num_draft_tokens": 4, "paper_max_position": 15},
}


@pytest.mark.parametrize("algorithm", PAPER)
def test_drafters_with_taps_and_kv_of_their_own(make: Make, decoder: Target, algorithm: str) -> None:
    """Their drafts, too, are the host's: each delta and each count is the same."""
    # Breaks with: taps in the wrong order after a branch, draft KV of rejected rows, a view bound to another step.
    asks = [
        Ask(prompt, SamplingParams(temperature=temperature, seed=3, max_tokens=9))
        for prompt, temperature in zip(PROMPTS, (0.0, 0.9, 0.0, 1.1, 0.0), strict=True)
    ]
    told = []
    for where in ("host", "device"):
        name = algorithm.split()[0]
        with make.built(where, decoder, name, PAPER[algorithm], max_running_requests=3) as engine:  # type: ignore[attr-defined]
            told.append(play(engine, asks))
            assert engine.ledger.accepted > 0
    assert told[0] == told[1]


# --- scarcity, aborts, failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "right", "right on the device", "tree on the device", "dense"])
def test_requests_that_lose_their_pages_say_the_same(make: Make, plain: list[Told], drafter: str) -> None:
    """A device drafter's pages are reserved for the longest outcome, so who is preempted may differ; answers do not."""
    with make("device", drafter, context_length=32, max_total_tokens=40) as engine:
        told = play(engine)
        assert engine.preemptions > 0
    assert [one.ids for one in told] == [one.ids for one in plain]
    assert [one.reason for one in told] == [one.reason for one in plain]


@pytest.mark.parametrize("drafter", ["none", "right", "right on the device", "tree on the device", "hostile"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_aborts_between_steps_touch_nobody_else(make: Make, plain: list[Told], drafter: str, tight: bool) -> None:
    """Aborted while a step of theirs is on its way, mid-prompt, waiting, twice: a prefix of the answer, pages back."""
    # Breaks with: an aborted row that is committed, its pages given away while drafts for it are still taken over.
    scarce = {"context_length": 32, "max_total_tokens": 40} if tight else {}
    for seed in range(4):
        rng = random.Random(seed)
        aborted: set[int] = set()

        def event(engine: Engine, requests: list[Request], rng: Any = rng, aborted: set[int] = aborted) -> None:
            alive = [at for at, one in enumerate(requests) if one.output.finish_reason is None]
            for at in rng.sample(alive, min(len(alive), rng.randrange(3))):
                aborted.add(at)
                engine.abort(requests[at])
                engine.abort(requests[at])

        with make("device", drafter, chunked_prefill_size=6, **scarce) as engine:
            told = play(engine, events=dict.fromkeys(range(1, 40, 2), event))
        assert len(aborted) > 3
        for at, (one, right) in enumerate(zip(told, plain, strict=True)):
            if at in aborted:
                assert one.reason == "abort"
                said = [token for ids, *_ in one.deltas for token in ids]
                assert said == right.ids[: len(said)]
            else:
                assert answers([one]) == answers([right])


@pytest.mark.parametrize("method", ["ingest", "propose"])
@pytest.mark.parametrize("algorithm", ["scripted", "scripted-device"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_drafter_that_raises_ends_its_step_and_the_rest_is_plain(
    make: Make, plain: list[Told], method: str, algorithm: str, calls: int
) -> None:
    # Breaks with: a failure at launch that is taken for one that was told already, so that nobody hears of it.
    config = {"scripted_behaviour": f"raise_{method}", "scripted_n": calls, "num_draft_tokens": 3}
    with make.built("device", TARGET, algorithm, config, max_running_requests=2) as engine:  # type: ignore[attr-defined]
        told = play(engine, ASKS[:5])
        assert engine.speculation.startswith("failed: specplug-scripted")
        ended = [one for one in told if one.reason == "error"]
        assert len(ended) == 2
        for one, right in zip(told, plain, strict=False):
            if one.reason == "error":
                assert one.error == engine.speculation.removeprefix("failed: ")
                assert one.ids == right.ids[: len(one.ids)]
            else:
                assert answers([one]) == answers([right])
        assert answers(play(engine, ASKS[:5])) == answers(plain[:5])


def test_a_failure_that_nobody_is_left_to_hear_of_does_not_reach_later_requests(make: Make) -> None:
    """The step in which the drafter raised was launched, then its only request was aborted."""
    config = {"scripted_behaviour": "raise_ingest", "scripted_n": 1, "num_draft_tokens": 3}
    with make.built("device", TARGET, "scripted-device", config) as engine:  # type: ignore[attr-defined]
        request = engine.submit(TEXTS[0], GREEDY)
        engine.step()  # ends the first step and launches the second, in which the drafter raises
        assert engine.speculation.startswith("failed")
        engine.abort(request)
        (told,) = play(engine, [Ask(TEXTS[1], GREEDY)])
        assert (told.reason, told.error) == ("length", "")


# --- launched ahead --------------------------------------------------------------------------------------------------


class Log:
    """Launches and waits of an engine, in order: the rows of each launch, None for each wait."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[list[Row] | None] = []
        launch, outcomes = engine._executor.launch, DeviceStep.outcomes

        def spy_launch(rows: Sequence[Row]) -> Any:
            self.events.append(list(rows))
            return launch(rows)

        def spy_outcomes(step: DeviceStep) -> Any:
            self.events.append(None)
            return outcomes(step)

        engine._executor.launch = spy_launch  # type: ignore[method-assign]
        monkeypatch.setattr(DeviceStep, "outcomes", spy_outcomes)

    @property
    def launches(self) -> list[list[Row]]:
        return [event for event in self.events if event is not None]

    @property
    def blind(self) -> int:
        """Rows that were launched before the host knew their token."""
        return sum(row.tokens == [UNKNOWN] for rows in self.launches for row in rows)


def test_plain_steps_are_launched_before_the_last_one_is_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Breaks with: a wait before the launch, a row beyond max_tokens.
    with make("device") as engine:
        log = Log(engine, monkeypatch)
        play(engine, [Ask(TEXTS[0], GREEDY), Ask(TEXTS[1], GREEDY)])
        kinds = ["wait" if event is None else "launch" for event in log.events]
        assert kinds == ["launch", *["launch", "wait"] * 11, "wait"]
        assert log.blind == 2 * 11


@pytest.mark.parametrize(
    ("drafter", "options", "more"),
    [
        ("none", {"logprobs": True}, {}),
        ("none", {}, {"logits_processor": steer}),
        ("right", {}, {}),
        ("right on the device", {"temperature": 0.9, "seed": 1}, {}),
    ],
    ids=["logprobs", "custom processor", "host drafter", "device drafter"],
)
def test_what_the_host_must_know_first_is_not_launched_blind(
    make: Make, drafter: str, options: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make("device", drafter) as engine:
        log = Log(engine, monkeypatch)
        play(engine, [Ask(TEXTS[0], GREEDY.model_copy(update=options), more)])
        assert log.launches
        assert log.blind == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stop_that_nobody_foresaw_wastes_one_row_and_nothing_else(
    make: Make, plain: list[Told], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Breaks with: a token after the end, a wasted row that is counted, its page kept, its penalty counts passed on.
    sampling = SamplingParams(temperature=temperature, seed=4, max_tokens=12, frequency_penalty=0.5)
    neighbour = Ask(TEXTS[1], SamplingParams(temperature=0.8, seed=4, max_tokens=12))
    with make("host") as engine:
        (whole,) = play(engine, [Ask(TEXTS[3], sampling)])
    ends = sampling.model_copy(update={"stop_token_ids": (whole.ids[4],)})
    stop = whole.ids.index(whole.ids[4]) + 1
    asks = [Ask(TEXTS[3], ends), neighbour, Ask(TEXTS[3], sampling), Ask(TEXTS[3], ends)]
    with make("host", max_running_requests=2) as engine:
        wanted = play(engine, asks)
        counts = engine.ledger.report()
    with make("device", max_running_requests=2) as engine:
        log = Log(engine, monkeypatch)
        found = play(engine, asks)
        assert engine.ledger.report() == counts
    assert found == wanted
    assert found[0].ids == whole.ids[:stop]
    rows = sum(len(rows) for rows in log.launches)
    forwards = sum(one.ledger["rounds"] + one.ledger["prefill_forwards"] for one in found)
    assert forwards < rows <= forwards + 4


def test_an_abort_while_a_step_is_on_its_way_and_an_admission_after_it(make: Make, plain: list[Told]) -> None:
    """The slot and the pages of the aborted one are the next one's, who notices nothing."""
    with make("device", max_running_requests=1) as engine:
        for at in (0, 1, 3):
            first = engine.submit(ASKS[at].prompt, ASKS[at].sampling)
            for _ in range(3):
                engine.step()
            assert engine._next is not None, "a step is on its way"
            engine.abort(first)
            assert engine.free_pages == engine.pages
            told = play(engine, [ASKS[2], ASKS[3]])
            assert first.output.ids == plain[at].ids[: len(first.output.ids)]
            assert answers(told) == answers(plain[2:4])
        assert len(engine._scheduler._free_slots) == 1


def test_who_is_submitted_while_a_step_is_on_its_way_is_served(make: Make, plain: list[Told]) -> None:
    late: list[Request] = []

    def event(engine: Engine, _: list[Request]) -> None:
        late.append(engine.submit(ASKS[3].prompt, ASKS[3].sampling))

    with make("device") as engine:
        told = play(engine, ASKS[:2], {3: event, 6: event})
        while any(one.output.finish_reason is None for one in late):
            engine.step()
        assert engine.free_pages == engine.pages
    assert answers(told) == answers(plain[:2])
    assert [one.output.ids for one in late] == [plain[3].ids] * 2


def test_closing_with_a_step_on_its_way_ends_everything(make: Make) -> None:
    for drafter in ("none", "right on the device", "right"):
        engine = make("device", drafter)
        requests = [engine.submit(ask.prompt, ask.sampling) for ask in ASKS[:3]]
        engine.step()
        engine.close()
        assert [one.output.finish_reason for one in requests] == ["abort"] * 3
        assert engine.free_pages == engine.pages
        assert engine.step() == []
        with pytest.raises(UserError, match="closed"):
            engine.submit(TEXTS[0], GREEDY)


def test_streams_that_are_left_early_give_everything_back(make: Make) -> None:
    with make("device", "tree on the device") as engine:
        stream = engine.stream([ask.prompt for ask in ASKS[:3]], GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert engine.free_pages == engine.pages
        assert len(engine._scheduler._free_slots) == 4


# --- I5: many short requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "right", "right on the device", "tree on the device", "dense"])
def test_hundreds_of_mixed_requests_with_aborts_leave_no_page_behind(
    make: Make, plain: list[Told], drafter: str
) -> None:
    """A seeded stream of arrivals, steps and aborts on a tight pool; finished answers are the plain ones."""
    rng = random.Random(11)
    right = {id(ask): told for ask, told in zip(_each_choice(), plain, strict=True) if ask.sampling.n == 1}
    with make("device", drafter, context_length=32, max_total_tokens=64, chunked_prefill_size=7) as engine:
        open_ones: list[tuple[Ask, Request]] = []
        ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        submitted = 0
        while submitted < 150 or open_ones:
            if submitted < 150 and len(open_ones) < 9 and rng.random() < 0.6:
                ask = rng.choice([ask for ask in ASKS if ask.sampling.n == 1])
                open_ones.append((ask, engine.submit(ask.prompt, ask.sampling, **ask.more)))
                submitted += 1
            elif open_ones and rng.random() < 0.12:
                engine.abort(rng.choice(open_ones)[1])
            else:
                engine.step()
            for ask, one in [pair for pair in open_ones if pair[1].output.finish_reason]:
                reason = one.output.finish_reason
                assert reason is not None
                ended[reason] += 1
                told = right[id(ask)]
                if reason == "abort":  # what a stop string might still have taken back was never said
                    said = one.output.ids[: one.output.taken]
                    assert said == told.ids[: len(said)]
                else:
                    assert (one.output.ids, reason, one.error) == (told.ids, told.reason, told.error)
            open_ones = [pair for pair in open_ones if pair[1].output.finish_reason is None]
            if not engine._scheduler.running:
                assert engine.free_pages == engine.pages
        assert engine.free_pages == engine.pages
        assert sorted(engine._scheduler._free_slots) == [0, 1, 2, 3]
        assert not torch.is_inference_mode_enabled()
        assert min(ended.values()) > 0, ended
