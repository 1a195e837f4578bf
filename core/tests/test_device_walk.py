"""The walk over ragged, padded and malformed proposals, in plain torch, against `specplug.tree`."""

import random

import torch

from specplug import tree
from specplug.runtime.device.walk import Drafts, lineage, sound, walk

VOCAB, NODES = 5, 6


def proposal(rng: random.Random, slots: int) -> Drafts:
    tokens = [[rng.randrange(-1, VOCAB + 1) if rng.random() < 0.1 else rng.randrange(VOCAB) for _ in range(NODES)]
              for _ in range(slots + 1)]  # fmt: skip
    parents = [[rng.randrange(-1, node) if rng.random() < 0.9 else rng.randrange(-3, NODES) for node in range(NODES)]
               for _ in range(slots + 1)]  # fmt: skip
    valid = [rng.randrange(NODES + 1) for _ in range(slots + 1)]
    return Drafts(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid), VOCAB, NODES)


def existing(drafts: Drafts, slot: int, drafted: int) -> tuple[list[int], list[int]]:
    count = min(drafted, int(drafts.num_valid[slot]))
    tokens, parents = drafts.tokens[slot, :count].tolist(), drafts.parents[slot, :count].tolist()
    count = tree.valid_prefix(tokens, parents, VOCAB)
    return tokens[:count], parents[:count]


def test_sound_is_the_valid_prefix() -> None:
    rng = random.Random(0)
    for _ in range(200):
        drafts = proposal(rng, 3)
        slots = torch.tensor([rng.randrange(4) for _ in range(5)])
        drafted = torch.tensor([rng.randrange(NODES + 1) for _ in range(5)])
        wanted = [len(existing(drafts, int(slot), int(n))[0]) for slot, n in zip(slots, drafted, strict=True)]
        assert sound(drafted, slots, drafts).tolist() == wanted


def test_walk_follows_the_first_child_that_was_chosen() -> None:
    # Breaks with: the last equal sibling taken; a node beyond the valid ones met; a pad row walked.
    rng = random.Random(1)
    longest = 0
    for _ in range(300):
        drafts = proposal(rng, 3)
        start = [rng.choice([-1, 0, 3, 8]) for _ in range(5)]
        slots = [rng.randrange(4) for _ in range(5)]
        drafted = [rng.randrange(NODES + 1) for _ in range(5)]
        choice = [rng.randrange(-1, VOCAB) for _ in range(16)]
        made = walk(*(torch.tensor(part) for part in (choice, start, drafted, slots)), drafts)
        for row in range(5):
            path, token = [], -1
            if start[row] >= 0:
                tokens, parents = existing(drafts, slots[row], drafted[row])
                below, node = tree.children(parents), -1
                while True:
                    token = choice[start[row] + 1 + node]
                    child = next((at for at in below[node + 1] if tokens[at] == token), None)
                    if child is None:
                        break
                    path.append(child)
                    node = child
            assert made.path[row].tolist() == path + [-1] * (NODES - len(path))
            assert int(made.accepted[row]) == len(path)
            assert int(made.token[row]) == token
            longest = max(longest, len(path))
    assert longest >= 3


def test_a_path_ends_at_the_depth_that_has_room() -> None:
    drafts = Drafts(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 1]]), torch.tensor([3]), VOCAB, 2)
    made = walk(torch.tensor([1, 2, 3, 4]), *(torch.tensor([value]) for value in (0, 3, 0)), drafts)
    assert made.path.tolist() == [[0, 1]]
    assert made.token.tolist() == [3], "the target's own token follows what was accepted"


def test_a_lead_takes_first_children_whatever_they_are() -> None:
    drafts = Drafts(
        torch.tensor([[1, 2, 3, 4]] * 4), torch.tensor([[-1, -1, 0, 2]] * 4), torch.tensor([4] * 4), VOCAB, 4
    )
    choice, start, slots = torch.zeros(5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), torch.arange(4)
    made = walk(choice, start, torch.tensor([4, 4, 4, 3]), slots, drafts, torch.tensor([0, 2, 9, 9]))
    assert made.accepted.tolist() == [0, 2, 3, 2]
    assert made.path.tolist() == [[-1] * 4, [0, 2, -1, -1], [0, 2, 3, -1], [0, 2, -1, -1]]


def test_lineage_names_the_tokens_above() -> None:
    rng = random.Random(2)
    for _ in range(100):
        drafts = proposal(rng, 3)
        slots, nodes = [], []
        for slot in range(4):
            tokens, _ = existing(drafts, slot, NODES)
            for node in range(-1, len(tokens)):
                slots.append(slot)
                nodes.append(node)
        depth, above = lineage(torch.tensor(nodes), torch.tensor(slots), drafts)
        for row, (slot, node) in enumerate(zip(slots, nodes, strict=True)):
            tokens, parents = existing(drafts, slot, NODES)
            seen, here = [], node
            while here >= 0:
                seen.append(tokens[here])
                here = parents[here]
            assert int(depth[row]) == len(seen)
            assert above[row].tolist() == seen + [-1] * (NODES - len(seen))


def test_lineage_of_what_does_not_exist_stays_in_range() -> None:
    drafts = Drafts(torch.tensor([[99, -7, 2]]), torch.tensor([[5, 1, -9]]), torch.tensor([3]), VOCAB, 3)
    depth, above = lineage(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), drafts)
    assert depth.max() <= 3
    assert ((above >= -1) & (above < VOCAB)).all()
