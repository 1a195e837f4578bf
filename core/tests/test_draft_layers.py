"""What drafters with weights are built from: draft vocabularies, sizes from a config, the bound on positions."""

import pytest
import torch

from specplug import Checkpoint, Facts, Limits, UserError, decoder_sizes, last_draft_position
from specplug.layers import draft_vocabulary
from specplug.testing.targets import decoder_config

VOCAB = 10
IDS = torch.tensor([1, 2, 6, 9])
OFFSETS = IDS - torch.arange(4)
MARKS = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)


@pytest.mark.parametrize(("d2t", "t2d"), [(OFFSETS, MARKS), (OFFSETS, None), (None, MARKS), (OFFSETS.int(), MARKS)])
def test_either_map_gives_the_target_ids(d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> None:
    found = draft_vocabulary(d2t, t2d, 4, VOCAB)
    assert found is not None
    assert found.tolist() == IDS.tolist()
    assert found.dtype == torch.int64


def test_offsets_need_not_rise() -> None:
    """A map that is no sorted list of ids is still a map, if no id stands twice."""
    found = draft_vocabulary(torch.tensor([3, 0, 0]), None, 3, VOCAB)
    assert found is not None
    assert found.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "maps", [(None, None), (torch.zeros(VOCAB, dtype=torch.int64), None), (None, torch.ones(VOCAB, dtype=torch.bool))]
)
def test_the_same_vocabulary_needs_no_map(maps: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
    assert draft_vocabulary(*maps, VOCAB, VOCAB) is None


@pytest.mark.parametrize(
    ("d2t", "t2d", "rows", "told"),
    [
        (IDS, None, 4, "leads to id 12, outside the vocabulary of 10; it stores offsets"),
        (torch.tensor([1, 0]), None, 2, "two draft ids to one target id"),
        (OFFSETS, None, 5, "d2t has 4 entries for a head of 5 rows"),
        (None, MARKS, 5, "t2d marks 4 target ids for a head of 5 rows"),
        (None, None, 4, "neither d2t nor t2d"),
        (OFFSETS + torch.tensor([0, 0, 1, 0]), MARKS, 4, "draft id 2 is target id 7 or 6"),
    ],
)
def test_contradictions_are_told(d2t: torch.Tensor | None, t2d: torch.Tensor | None, rows: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        draft_vocabulary(d2t, t2d, rows, VOCAB)


def test_sizes_follow_the_family_that_is_named() -> None:
    """A head's config may name an architecture of its own; the rules are those of the layers it is made of."""
    config = decoder_config() | {"architectures": ["MyHead"]}
    assert not decoder_sizes(config, "LlamaForCausalLM").qk_norm
    assert decoder_sizes(config, "Qwen3ForCausalLM").qk_norm
    with pytest.raises(UserError, match="the head has architecture MyHead"):
        decoder_sizes(config, name="the head")
    del config["hidden_size"]
    with pytest.raises(UserError, match=r"the head: config\.json has hidden_size = None"):
        decoder_sizes(config, "LlamaForCausalLM", "the head")


@pytest.mark.parametrize(
    ("window", "context", "last"),
    [(512, None, 255), (512, 300, 255), (512, 256, None), (256, None, None), (None, None, 255)],
)
def test_drafting_ends_where_the_draft_does(window: int | None, context: int | None, last: int | None) -> None:
    target = Checkpoint(config={"max_position_embeddings": window})
    facts = Facts(target=target, limits=Limits(context_length=context))
    assert last_draft_position(facts, 256) == last
