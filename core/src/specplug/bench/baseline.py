"""transformers' own `generate` as columns: plain, drafts looked up in the prompt, and a draft model.

Honest means: the same weights and token ids, greedy, its KV cache on, no timing of what it does once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specplug.bench.measure import Answer, BatchRun, Sampling
from specplug.bench.workload import Item
from specplug.errors import UserError
from specplug.models.store import local_model, reason
from specplug.models.target import Target
from specplug.options import EngineOptions

LOOKUP_TOKENS = 10
"""Drafts that its lookup takes from the prompt."""


class TransformersColumn:
    """A loaded transformers model under a label."""

    def __init__(
        self,
        label: str,
        model: Any,
        eos: Sequence[int],
        *,
        lookup: int | None = None,
        assistant: Any = None,
        device: str = "cpu",
    ) -> None:
        """`lookup`: drafts taken from the prompt; `assistant`: a draft model. Either limits it to batches of one.

        `device`: where `model` is.
        """
        self.label = label
        self._model = model
        self._eos = list(eos)
        self._lookup = lookup
        self._assistant = assistant
        self._device = device

    def cannot(self, size: int) -> str:
        """See `specplug.bench.measure.Column`."""
        drafts = self._lookup is not None or self._assistant is not None
        return "transformers drafts for a batch of one only" if drafts and size > 1 else ""

    @torch.inference_mode()
    def run(self, items: Sequence[Item], sampling: Sampling) -> BatchRun:
        """Answer the items with one call; shorter prompts are padded on the left."""
        from transformers import GenerationConfig

        width = max(len(item.ids) for item in items)
        padding = self._eos[0] if self._eos else 0
        ids = [[padding] * (width - len(item.ids)) + list(item.ids) for item in items]
        mask = [[0] * (width - len(item.ids)) + [1] * len(item.ids) for item in items]
        ends = [] if sampling.get("ignore_eos") else self._eos
        config = GenerationConfig(
            max_new_tokens=sampling["max_tokens"],
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=padding,
            prompt_lookup_num_tokens=self._lookup,
        )
        clock = _Clock()
        begin = perf_counter()
        out = self._model.generate(
            torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=config,
            stopping_criteria=[clock],
            assistant_model=self._assistant,
        )
        answers = [
            _answer(item, row[width:].tolist(), ends, clock, width, begin) for item, row in zip(items, out, strict=True)
        ]
        first, last = clock.marks[0], clock.marks[-1]
        return BatchRun(
            answers=answers,
            prompt_tokens=sum(len(item.ids) for item in items),
            prefill_seconds=first[0] - begin,
            decode_tokens=sum(len(answer.ids) - answer.head for answer in answers),
            decode_seconds=last[0] - first[0],
            steps=len(clock.marks) - 1,
            rows=(len(clock.marks) - 1) * len(items),
        )


class _Clock:
    """A stopping criterion that stops nothing: called after every forward, it notes time and length."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.marks.append((perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _answer(item: Item, ids: list[int], ends: Sequence[int], clock: _Clock, width: int, begin: float) -> Answer:
    end = next((at + 1 for at, token in enumerate(ids) if token in ends), len(ids))
    ids = ids[:end]
    head = min(clock.marks[0][1] - width, len(ids))
    last = next((time for time, length in clock.marks if length - width >= len(ids)), clock.marks[-1][0])
    return Answer(item, ids, head, clock.marks[0][0] - begin, last - begin, None)


def transformers_columns(
    target: Target, options: EngineOptions, dtype: str, device: str = "cpu"
) -> tuple[list[TransformersColumn], list[str]]:
    """Load `target`'s checkpoint a second time, in transformers; returns the columns, and what was left out.

    A draft model makes a third column if it is a causal language model of the same vocabulary.
    """
    if not target.checkpoint.path:
        raise UserError("--transformers needs the model's folder, and this model has none: leave it out")
    model = _load(target.checkpoint.path, dtype, options.trust_remote_code, device)
    eos = target.eos_ids
    columns = [
        TransformersColumn("transformers", model, eos, device=device),
        TransformersColumn("transformers-lookup", model, eos, lookup=LOOKUP_TOKENS, device=device),
    ]
    draft, why = options.speculative_draft_model_path, ""
    if draft is None:
        return columns, ["transformers-assisted is left out: it needs --speculative-draft-model-path"]
    option, revision = "--speculative-draft-model-path", options.speculative_draft_model_revision
    folder = local_model(draft, revision, option=option, needs_tokenizer=False)
    try:
        assistant = _load(str(folder), dtype, options.trust_remote_code, device)
    except UserError as error:
        return columns, [f"transformers-assisted is left out: {error}"]
    if assistant.config.vocab_size != model.config.vocab_size:
        why = f"its vocabulary has {assistant.config.vocab_size} ids, the target's {model.config.vocab_size}"
        return columns, [f"transformers-assisted is left out: {Path(draft).name}: {why}"]
    columns.append(TransformersColumn("transformers-assisted", model, eos, assistant=assistant, device=device))
    return columns, []


def _load(folder: str, dtype: str, trust_remote_code: bool, device: str) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        model, about = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"transformers cannot load {Path(folder).name}: {reason(error)}") from error
    if about["missing_keys"]:  # it would go on with random values
        lacking = sorted(about["missing_keys"])
        raise UserError(
            f"transformers cannot load {Path(folder).name}: it lacks {lacking[0]} and {len(lacking) - 1} more"
        )
    # Nothing of the checkpoint's own defaults (penalties, sampling) may mix into a greedy comparison.
    model.generation_config = GenerationConfig()
    return model.eval().to(device)
