"""A logits processor of the caller's: once per decided position, and its failures stay its own."""

import pytest
import torch

from specplug import reference
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.registry import bench_registry
from specplug.testing.targets import reference_logits, table_target

WIDTHS = (0, 1, 2, 3, 5, 8)
VOCAB = 8
LENGTH = 20


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return bench_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="module")
def target():
    return table_target(VOCAB, 2, 5, eos=(6, 7))


def engine_for(target, registry, width, texts, behaviour="right"):
    config = {"num_draft_tokens": width + 1, "scripted_texts": texts, "scripted_behaviour": behaviour}
    more = {"max_running_requests": 5, "page_size": 4, "context_length": 64}
    return Engine(target, algorithm="scripted", config=config, registry=registry, **more)


def steer(tokens, logits):
    """Forbid the two newest tokens, and prefer what the length says."""
    logits[list(tokens[-2:])] = float("-inf")
    logits[len(tokens) % VOCAB] += 1.0
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("behaviour", ["right", "random_tree", "right_then_wrong"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_custom_processor_runs_once_at_each_position(target, registry, width, behaviour, temperature):
    # Breaks with: calls for nodes that the walk does not reach, a path without its drafts, logits of a neighbour.
    sampling = SamplingParams(temperature=temperature, seed=2, max_tokens=LENGTH, ignore_eos=True, logit_bias={1: 0.5})
    logits = reference_logits(target)
    wanted = [reference.decode(logits, prompt, sampling, processor=steer) for prompt in PROMPTS[:3]]
    texts = [(*prompt, *ids) for prompt, ids in zip(PROMPTS, wanted, strict=False)]
    calls = [[] for _ in wanted]

    def recorded(at):
        def processor(tokens, logits):
            calls[at].append(list(tokens))
            return steer(tokens, logits)

        return processor

    with engine_for(target, registry, width, texts, behaviour) as engine:
        requests = [
            engine.submit(prompt, sampling, logits_processor=recorded(at)) for at, prompt in enumerate(PROMPTS[:3])
        ]
        while any(request.output.finish_reason is None for request in requests):
            engine.step()
    for request, prompt, ids, seen in zip(requests, PROMPTS, wanted, calls, strict=False):
        assert request.output.ids == ids
        assert seen == [[*prompt, *ids[:at]] for at in range(len(ids))]


FAULTS = {
    "raises": (lambda logits: 1 // 0, "raised ZeroDivisionError"),
    "no tensor": (lambda logits: logits.tolist(), "returned list"),
    "shape": (lambda logits: logits[:3], r"shape [3]"),
    "nan": (lambda logits: logits * float("nan"), "NaN"),
    "inf": (lambda logits: logits.index_fill(0, torch.tensor(1), float("inf")), "+inf"),
    "bans all": (lambda logits: logits.fill_(float("-inf")), "-inf"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_failing_processor_ends_its_request_only(target, registry, width, fault):
    # Breaks with: an exception that leaves the step, accepted drafts lost before it, pages kept.
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    logits = reference_logits(target)
    wanted = [reference.decode(logits, prompt, sampling) for prompt in PROMPTS]
    texts = [(*prompt, *ids) for prompt, ids in zip(PROMPTS, wanted, strict=True)]
    make, says = FAULTS[fault]
    for after in (0, 1, 4, 7):
        size = len(PROMPTS[1]) + after

        def processor(tokens, logits, size=size):
            return make(logits) if len(tokens) >= size else logits

        with engine_for(target, registry, width, texts) as engine:
            requests = [
                engine.submit(prompt, sampling, logits_processor=processor if at == 1 else None)
                for at, prompt in enumerate(PROMPTS[:3])
            ]
            deltas = []
            while any(request.output.finish_reason is None for request in requests):
                deltas += engine.step()
            assert [request.output.finish_reason for request in requests] == ["length", "error", "length"]
            assert requests[1].output.ids == wanted[1][:after]
            assert says in requests[1].error
            assert [requests[at].output.ids for at in (0, 2)] == [wanted[0], wanted[2]]
            assert [delta.finish_reason for delta in deltas if delta.request == requests[1].id][-1] == "error"
            assert engine.free_pages == engine.pages
            assert engine.generate(PROMPTS[1:2], sampling)[0].ids == wanted[1]


def test_a_stop_before_the_failure_wins(target, registry):
    # Breaks with: an error at a position behind the answer's end.
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    ids = reference.decode(reference_logits(target), PROMPTS[0], sampling)
    at = next(at for at in range(2, 8) if ids[at] not in ids[:at])

    def processor(tokens, logits):
        return logits if len(tokens) <= len(PROMPTS[0]) + at else None

    with engine_for(target, registry, 8, [(*PROMPTS[0], *ids)]) as engine:
        asked = sampling.model_copy(update={"stop_token_ids": (ids[at],)})
        request = engine.submit(PROMPTS[0], asked, logits_processor=processor)
        while request.output.finish_reason is None:
            engine.step()
    assert (request.output.finish_reason, request.output.ids, request.error) == ("stop", ids[: at + 1], "")


def test_a_tensor_kept_by_the_processor_is_not_changed(target):
    # Breaks with: penalties and bans written into what the processor returned.
    own = torch.zeros(VOCAB)
    with Engine(target, context_length=64) as engine:
        options = {"temperature": 0, "max_tokens": 5, "min_tokens": 3, "frequency_penalty": 2.0, "logit_bias": {1: 1}}
        request = engine.submit(PROMPTS[0], options, logits_processor=lambda tokens, logits: own)
        while request.output.finish_reason is None:
            engine.step()
    assert not request.error
    assert torch.equal(own, torch.zeros(VOCAB))
