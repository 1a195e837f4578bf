"""Against the authors' code, where it is installed: PyPI's ``dflash`` (z-lab) and ``speculators``."""

from pathlib import Path
from typing import Any

import dflash_tiny as tiny
import pytest
import torch

from specplug import TapRequest
from specplug.testing import Move
from specplug.testing.targets import dense_forward
from specplug_dflash.formats import Markov
from specplug_dflash.heads import MarkovHead

TEXT = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(21)).tolist()


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
@pytest.mark.parametrize("causal", [None, True, False])
def test_blocks_are_those_of_the_authors_model(lab: Any, kinds: list[str], causal: bool | None, tmp_path: Path) -> None:
    theirs = pytest.importorskip("dflash.model", reason="the package dflash is not installed", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    said = {} if causal is None else {"is_causal": causal}
    config = tiny.zlab_config(layer_types=kinds, sliding_window=6, use_sliding_window=True, **said)
    weights = tiny.body()
    draft = tiny.write(tmp_path, config, weights)
    known = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = theirs.DFlashDraftModel(transformers.Qwen3Config(**known)).eval()
    model.load_state_dict(weights)
    harness = lab.harness("dflash", draft)
    harness.admit(0, TEXT, 4)
    done = 0
    for count in (4, *(1, 3, 2, 1, 2) * 9):
        step = harness.ingest([Move(0, count, (5,) * (4 - count) if done else ())])
        done += count
        with torch.inference_mode():
            states = dense_forward(lab.model, TEXT[:done], (TapRequest(at=0), TapRequest(at=2)))[1]
            block = [TEXT[done], *[tiny.MASK] * (tiny.BLOCK - 1)]
            hidden = model(
                position_ids=torch.arange(done + tiny.BLOCK)[None],
                noise_embedding=lab.ends["embed_tokens.weight"][block][None],
                target_hidden=torch.cat(states, -1)[None],
            )
            wanted = (hidden[0, 1:] @ lab.ends["lm_head.weight"].T).argmax(-1).tolist()
        assert list(harness.propose(step)[0][0]) == wanted, f"after {done} tokens"


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_are_those_of_speculators(kind: Any) -> None:
    theirs = pytest.importorskip(
        "speculators.models.dspark.model_definitions", reason="speculators is not installed", exc_type=ImportError
    )
    torch.manual_seed(3)
    reference = theirs.MarkovHead(
        verifier_vocab_size=20, draft_vocab_size=12, markov_rank=6, hidden_size=16, head_type=kind
    )
    torch.nn.init.normal_(reference.markov_w1.weight)
    ours = MarkovHead(Markov(kind, 6), 16, 20, 12, dtype=torch.float32, device=torch.device("cpu"))
    ours.load_state_dict(reference.state_dict())
    tokens, hidden = torch.randint(0, 20, (3, 5)), torch.randn(3, 5, 16)
    state = ours.start(3)
    with torch.inference_mode():
        wanted = reference.block_bias(prev_token_ids=tokens, hidden_states=hidden)
        for slot in range(5):
            bias, state = ours(ours.markov_w1(tokens[:, slot]), hidden[:, slot], state)
            torch.testing.assert_close(bias, wanted[:, slot])
