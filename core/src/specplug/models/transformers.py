"""Any other causal language model: transformers' modules over our paged KV, or, with recurrent state, their own cache.

What a model asks of its attention is learned by running it twice on two tokens at load; what paged
attention would compute differently is refused there, so that a wrong answer cannot come from it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specplug.errors import UserError
from specplug.models.anatomy import (
    MISFITS,
    base_name,
    check_head,
    close,
    head_logits,
    head_of,
    lent_part,
    most_positions,
    refusal,
)
from specplug.models.attention_hook import (
    PAGED,
    PROBED,
    STEP,
    Call,
    LayerStep,
    PagedStep,
    Probe,
    StepLostError,
)
from specplug.models.base import ForwardBatch, TargetModel
from specplug.models.family import FAMILIES, refuse_quantized
from specplug.models.recurrent import NO_LIMIT, RecurrentTarget, check_recurrent, keeps_state
from specplug.models.shape import grouped
from specplug.models.store import reason
from specplug.spec import ModelShape, TapRequest

_log = logging.getLogger(__name__)
_LISTED = 4
_FITS = 4 * 2**30
"""Bytes of a model that is filled with zeros on the host for a look at its layers, where the meta device fails."""


@dataclass(slots=True)
class _Parts:
    """Modules of a model, by what they do. Kept in one object, so that none is registered twice."""

    base: Callable[..., Any]  # embedding to final norm
    head: nn.Module  # what the causal-LM class does on top
    layers: nn.ModuleList


class TransformersTarget(TargetModel):
    """A `PreTrainedModel` with attention `PAGED`, as a target."""

    def __init__(self, model: PreTrainedModel, config: Mapping[str, Any], *, max_position: int | None = None) -> None:
        """`config`: the checkpoint's. A model that cannot be run right over paged KV is a `UserError` that says why."""
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.config = dict(config)
        longest = most_positions(model.config)
        self.max_position = longest if max_position is None else min(max_position, longest)
        with torch.inference_mode():
            self._learn()

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states after the final norm [T, H] and ``batch.taps`` in their order, [T, H] each.

        A tap of a boundary that the model does not have is a ValueError.
        """
        step = PagedStep(batch.attention, self._uses)
        if not batch.taps:
            return self._run(batch.tokens, batch.positions, step), ()
        with self._tapped(batch.taps) as at:
            at["final_norm"] = final = self._run(batch.tokens, batch.positions, step)
        return final, tuple(at[tap.at] for tap in batch.taps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 [*, V] for `hidden` [*, H], in `out` where given: all that the model's head does."""
        return head_logits(self._parts.head, hidden, out)

    def part(self, name: str) -> nn.Module:
        """Return ``embed_tokens`` (scaled, where the model scales) or ``lm_head`` (the linear map alone), shared."""
        return lent_part(self.model, name)

    # --- one forward -------------------------------------------------------------------------------------------

    def _run(self, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        out = self._parts.base(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **{STEP: step})
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _tapped(self, taps: tuple[TapRequest, ...]) -> Iterator[dict[int | str, Tensor]]:
        """Hook the layers for one forward, which fills the dict it yields with boundary -> [T, H]."""
        layers = self._parts.layers
        last = len(layers)
        wanted: set[Any] = {tap.at for tap in taps} - {"final_norm"}
        unknown = sorted(map(str, wanted - set(range(last + 1))))
        if unknown:
            raise ValueError(f"taps {unknown}: this model has the boundaries 0 to {last} and 'final_norm'")
        at: dict[int | str, Tensor] = {}

        def keep(boundary: int, state: Tensor) -> None:
            if state.dim() != 3:
                raise ValueError(f"tap {boundary}: this model's layers pass on {list(state.shape)}, not [1, T, H]")
            at[boundary] = state[0]

        def before(boundary: int, _: nn.Module, args: Any, kwargs: Any) -> None:
            keep(boundary, args[0] if args else kwargs["hidden_states"])

        def after(_: nn.Module, args: Any, out: Any) -> None:
            keep(last, out[0] if isinstance(out, tuple) else out)

        hooks = [
            layers[boundary].register_forward_pre_hook(partial(before, boundary), with_kwargs=True)
            for boundary in wanted - {last}
        ]
        if last in wanted:
            hooks.append(layers[-1].register_forward_hook(after))
        try:
            yield at
        finally:
            for hook in hooks:
                hook.remove()

    # --- what is learned at load -------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Find layers, KV and sizes, and check that nothing but attention carries anything between tokens."""
        who, model = type(self.model).__name__, self.model
        self._parts = _Parts(model.get_submodule(base_name(model)), head_of(model), nn.ModuleList())
        model.set_attn_implementation(PROBED)
        calls, hidden = self._probe(who, (0, 1), (0, 1))
        model.set_attn_implementation(PAGED)
        self._parts.layers = _decoder_layers(model, who, [call.module for call in calls])
        probe = Probe(who)
        probe.calls = calls
        self.kv_layers, self._uses = probe.uses()
        self.hidden_size = hidden.shape[-1]

        _, other = self._probe(who, (2, 1), (0, 1))
        if not close(hidden[1], other[1]):
            raise refusal(who, "its layers carry state from token to token beside attention, which is not kept here")
        repeated, twice = self._probe(who, (1, 1), (3, 3))
        same = [(part[:, :, 0], part[:, :, 1]) for call in repeated for part in (call.q, call.k, call.v)]
        if not all(close(*pair) for pair in [*same, (twice[0], twice[1])]):
            raise refusal(who, "it does not take its positions from position_ids")

        asked = self._inputs((0, 1), (0, 1), Probe(who, masks=False))
        self.vocab_size = check_head(who, self._parts.head, hidden, lambda: model(**asked).logits[0])

    def _probe(self, who: str, tokens: tuple[int, ...], positions: tuple[int, ...]) -> tuple[list[Call], Tensor]:
        probe = Probe(who, masks=self.model.config._attn_implementation == PROBED)
        try:
            out = self._parts.base(**self._inputs(tokens, positions, probe))
        except StepLostError:
            raise _step_lost(who) from None
        except MISFITS as error:
            raise refusal(who, f"its forward does not take what is passed to it: {reason(error)}") from error
        return probe.calls, out.last_hidden_state[0]

    def _inputs(self, tokens: tuple[int, ...], positions: tuple[int, ...], step: LayerStep) -> dict[str, Any]:
        device = self.model.device
        ids, at = (torch.tensor([row], device=device) for row in (tokens, positions))
        return {"input_ids": ids, "position_ids": at, "use_cache": False, STEP: step}


class Runnable(NamedTuple):
    """What is known of a model that will run, before its weights are there."""

    most_positions: int
    recurrent: bool
    """It keeps recurrent state: runs as a `RecurrentTarget`, without drafts."""


def check_config(folder: Path | str, *, trust_remote_code: bool = False) -> Runnable:
    """Return how the model in `folder` will run, or refuse it by name; no weight is read.

    What only shows in numbers (masks, state beside attention) is refused once the weights are there.
    """
    return _probed(folder, trust_remote_code).runnable


def shape_of(folder: Path | str, *, trust_remote_code: bool = False) -> ModelShape:
    """Return the shape of the model in `folder`, or refuse it by name; no weight is read.

    Windows are not known before the weights are there, and given as none.
    """
    found = _probed(folder, trust_remote_code)
    who, text = type(found.model).__name__, found.model.config.get_text_config()
    if found.runnable.recurrent:
        raise refusal(who, "as a draft: its recurrent state cannot be taken back")
    probe, hidden = found.probe, found.hidden
    if hidden is None and sum(part.nbytes for part in found.model.state_dict().values()) <= _FITS:
        model = found.model.to_empty(device="cpu")
        for part in (*model.parameters(), *model.buffers()):
            part.detach().zero_()
        probe, hidden = _run_over_zeros(model, who)
    if probe is None or hidden is None:
        raise refusal(who, "as a draft: what KV its layers keep does not show without its weights")
    layers, _ = probe.uses()
    return ModelShape(
        hidden_size=hidden.shape[-1],
        vocab_size=text.vocab_size,
        max_position=found.runnable.most_positions,
        kv=grouped(layers),
    )


class _Probed(NamedTuple):
    """A model on the meta device, and what a run of it over two tokens showed."""

    model: PreTrainedModel
    runnable: Runnable
    probe: Probe | None
    hidden: Tensor | None
    """Of the last layer; None where the model stopped on its way, because it looks at numbers."""


def _probed(folder: Path | str, trust_remote_code: bool) -> _Probed:
    config, who = _config(folder, trust_remote_code)
    refuse_quantized(config.to_dict())
    try:
        with torch.device("meta"), _quiet():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except MISFITS as error:
        raise _unknown(who, reason(error)) from error
    if type(model).__name__ != who:
        raise _unknown(who, f"as a causal language model transformers knows {type(model).__name__}")
    if keeps_state(model):
        check_recurrent(model)
        return _Probed(model, Runnable(most_positions(config, NO_LIMIT), recurrent=True), None, None)
    if not model._supports_attention_backend:
        raise refusal(who, "transformers does not let it run with another attention function")
    model.set_attn_implementation(PAGED)
    probe, hidden = _run_over_zeros(model, who)
    return _Probed(model, Runnable(most_positions(config), recurrent=False), probe, hidden)


def _run_over_zeros(model: PreTrainedModel, who: str) -> tuple[Probe, Tensor | None]:
    """Run two tokens; returns what the layers asked for, and the last one's states.

    Models that look at the numbers on their way stop on the meta device, and their states are None; the attention
    layers before have been asked by then.
    """
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    probe, hidden = Probe(who, masks=False), None
    try:
        with torch.inference_mode(), contextlib.suppress(*MISFITS):
            out = model.get_submodule(base_name(model))(
                input_ids=ids, position_ids=ids, use_cache=False, **{STEP: probe}
            )
            hidden = out.last_hidden_state
    except StepLostError:
        raise _step_lost(who) from None
    return probe, hidden


def load_transformers(
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_position: int | None = None,
    trust_remote_code: bool = False,
    dummy_seed: int | None = None,
) -> TransformersTarget | RecurrentTarget:
    """Load the model in `folder`, whose ``config.json`` is `config`. With `dummy_seed` no weight is read.

    A tensor missing or of another shape, and a model that cannot be run right either way, is a `UserError`.
    """
    if dummy_seed is None:
        # To the host first, then over tensor by tensor: loading to a device at once takes a package more.
        model = _stored(folder, dtype, trust_remote_code).to(device)
    else:
        model = _made_up(folder, dtype, torch.device(device), trust_remote_code, dummy_seed)
    way = RecurrentTarget if keeps_state(model) else TransformersTarget
    return way(model, config, max_position=max_position)


def _stored(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model with the weights in `folder`, on the CPU."""
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"MODEL {str(folder)!r} cannot be loaded by transformers: {reason(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise UserError(
            f"the weights in {folder} do not fit its config.json: {len(missing)} missing: "
            f"{', '.join(missing[:_LISTED])}{more}"
        )
    _tell_unread(folder, report["unexpected_keys"])
    return model


def _made_up(
    folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, seed: int
) -> PreTrainedModel:
    """Return the model on `device` with weights as its own class initialises them: it knows what keeps them finite."""
    config, who = _config(folder, trust_remote_code)
    forked = [device] if device.type == "cuda" else []
    try:
        # Initialisers draw from the global generators, which the fork puts back.
        with torch.random.fork_rng(forked), torch.device(device), _quiet():
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except torch.OutOfMemoryError:  # a RuntimeError, and no misfit
        raise
    except MISFITS as error:
        raise _unknown(who, reason(error)) from error


def _decoder_layers(model: nn.Module, who: str, attending: list[nn.Module]) -> nn.ModuleList:
    """Return the list whose members hold one of the `attending` modules each, in order."""
    for found in model.modules():
        if (
            isinstance(found, nn.ModuleList)
            and len(found) == len(attending) > 0
            and all(
                any(module is inner for inner in layer.modules())
                for layer, module in zip(found, attending, strict=True)
            )
        ):
            return found
    raise refusal(who, "not every layer of it attends once through transformers' attention interface")


def _config(folder: Path | str, trust_remote_code: bool) -> tuple[Any, str]:
    """Return transformers' config of the model in `folder`, and the architecture it names."""
    named, _ = PretrainedConfig.get_config_dict(str(folder))
    who = (named.get("architectures") or ["none named"])[0]
    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code), who
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        raise _unknown(who, reason(error)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and reports to itself: what matters of them is told by us."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _tell_unread(folder: Path, names: Iterable[str]) -> None:
    """Report tensors of the checkpoint that the model has no place for, by the first parts of their names."""
    for start, count in sorted(Counter(".".join(name.split(".")[:3]) for name in names).items()):
        _log.warning("%s: %d tensors under %s* left unread, no module of the model owns them", folder, count, start)


def _step_lost(who: str) -> UserError:
    return refusal(who, "it does not hand keyword arguments down to its attention layers")


def _unknown(who: str, why: str) -> UserError:
    return UserError(
        f"MODEL has architecture {who}, which neither the built-in decoder runs (supported: {', '.join(FAMILIES)}) "
        f"nor transformers: {why}"
    )
