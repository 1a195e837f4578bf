"""What the engine's process says of itself when it is ready."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from specplug.generation import sampling_defaults
from specplug.serve.protocol import EngineArgs, EngineInfo

if TYPE_CHECKING:
    from specplug.runtime.engine import Engine


def info_of(engine: Engine, args: EngineArgs) -> EngineInfo:
    """Return what is true of an engine for its whole life."""
    run, options = engine.run, engine.options
    plan, facts = run.plan, run.facts
    return EngineInfo(
        model=args.model,
        algorithm=run.algorithm,
        distribution=run.installed.label if run.installed else "",
        vocab=engine.target.model.vocab_size,
        max_tokens=engine.max_tokens,
        eos_ids=engine.target.eos_ids,
        nodes=plan.nodes if plan else 0,
        depth=plan.depth if plan else 0,
        pages=engine.pages,
        page_size=options.page_size,
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        acceptance=options.speculative_acceptance,
        lossy=options.lossy,
        device=facts.device,
        dtype=facts.dtype,
        settings={
            setting.field: {"value": _json(setting.value), "source": setting.source, "because": setting.because}
            for setting in run.settings
        },
        warnings=tuple(warning.message for warning in run.warnings),
        memory=engine.memory.to_dict(),
        sampling_defaults=sampling_defaults(facts.target.generation),
    )


def _json(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return [_json(item) for item in value] if isinstance(value, list | tuple) else str(value)


def pickled(tokenizer: Any | None) -> bytes | None:
    """Return a fast tokenizer that can be read where a model folder's own code cannot."""
    if tokenizer is None:
        return None
    if type(tokenizer).__module__.startswith("transformers."):
        return pickle.dumps(tokenizer)
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )
    return pickle.dumps(plain)
