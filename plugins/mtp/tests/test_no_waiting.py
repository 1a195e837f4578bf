"""What the kit's check leaves out: no way of drafting asks a tensor for a number on the device's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mtp_checkpoints import mimo

from specplug import Engine, SamplingParams
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.setup import stored_target
from specplug.testing.waiting import Watch, watching
from specplug_mtp.builtin import BuiltinMtpDrafter


@pytest.mark.parametrize(
    "config", [{"mtp_multi_layer": False, "draft_sampling": True}, {}, {"mtp_depth_input": "target"}]
)
def test_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    watch = Watch()

    def watched(method: Any) -> Any:
        def call(*args: Any) -> None:
            with watching(watch):
                method(*args)

        return call

    for name in ("ingest", "propose"):
        monkeypatch.setattr(BuiltinMtpDrafter, name, watched(getattr(BuiltinMtpDrafter, name)))
    target = stored_target(mimo(tmp_path / "target", heads=3))
    with device_path():
        engine = Engine(target, algorithm="builtin-mtp", config=config, page_size=4, context_length=128)
    with engine:
        engine.generate(PROMPTS[:2], SamplingParams(temperature=0.8, seed=1, max_tokens=12))
    assert watch.seen > 500
    assert not watch.found
