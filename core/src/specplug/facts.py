"""What can be known of models and host before any weight is loaded: `Checkpoint` and `Facts`.

Importing this module does not import torch. A checkpoint in ``.bin`` files makes it do so, and gathering facts
on a host with NVIDIA's driver.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specplug.errors import UserError
from specplug.models.family import decoder_config, is_covered
from specplug.models.store import TOKENIZER_FILES, local_model, reason
from specplug.options import EngineOptions
from specplug.placement import settle
from specplug.spec import (
    Checkpoint,
    Facts,
    Limits,
    TensorInfo,
)

_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

PICKLED = (".bin", ".pt")
"""Suffixes of files that ``torch.load`` reads, tensors alone (``weights_only``)."""

LoadFormat = Literal["auto", "dummy"]
"""Where weights come from: the checkpoint's files, or (``dummy``) a seeded generator, no file read."""

_STATELESS_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_RECURRENT_WORDS = ("mamba", "rwkv", "ssm", "linear_attn", "linear_attention", "recurrent", "xlstm", "hybrid_override")


class StoredTensor(NamedTuple):
    """Where a tensor lies, and its header."""

    file: Path
    info: TensorInfo


def stored_tensors(folder: Path, further: Iterable[str] = ()) -> dict[str, StoredTensor]:
    """Return the header of every tensor stored in `folder`, by name, no data read.

    Looks, in this order, for ``model.safetensors``, its index of shards, ``pytorch_model.bin`` and its
    index; where both kinds exist, safetensors win. `further` files are read as well. A shard that is missing
    or unreadable, a tensor that the index promises and no shard holds, or one that two files hold is a `UserError`.
    """
    found = _standard_tensors(folder)
    for name in further:
        for tensor, stored in _headers(folder / name).items():
            if tensor in found:
                raise UserError(
                    f"{folder}: the tensor {tensor} is stored in {found[tensor].file.name} and in {name}; "
                    "keep one of these files"
                )
            found[tensor] = stored
    if not found:
        raise UserError(f"{folder} holds no weights: model*.safetensors or pytorch_model*.bin is needed")
    return found


def _standard_tensors(folder: Path) -> dict[str, StoredTensor]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        single = folder / f"{stem}.{suffix}"
        index = folder / f"{stem}.{suffix}.index.json"
        if single.is_file():
            return _headers(single)
        if index.is_file():
            return _sharded(folder, index)
    return {}


def read_checkpoint(
    path: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    load_format: LoadFormat = "auto",
    draft_files: Iterable[str] = (),
) -> Checkpoint:
    """Read the facts of the Hugging Face folder `path`; tensors as headers only, under ``dummy`` None.

    `draft_files`: names that may stand beside or for the standard ones (`Checkpoint.files`); their tensors are not read
    here, but by `specplug.draft_files.own_draft`.

    A folder without tokenizer (a draft head, often) has None for its size and fingerprint.
    `trust_remote_code` is used only where the tokenizer has no ``tokenizer.json``. A folder without
    ``config.json``, without weights (unless ``dummy``) or with a file that cannot be read is a `UserError`.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(f"{path} holds no config.json; a Hugging Face model folder is needed")
    ids = vocabulary(folder, trust_remote_code=trust_remote_code)
    tensors: dict[str, TensorInfo] | None = None
    files: tuple[str, ...] = ()
    if load_format != "dummy":
        files = tuple(name for name in draft_files if (folder / name).is_file())
        stored = _standard_tensors(folder) if files else stored_tensors(folder)
        tensors = {name: each.info for name, each in stored.items()}
    return Checkpoint(
        path=str(folder),
        revision=revision,
        config=_json(folder / "config.json"),
        tensors=tensors,
        files=files,
        tokenizer_size=None if ids is None else len(ids),
        tokenizer_fingerprint=None if ids is None else _fingerprint(ids),
        generation=_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {},
    )


def vocabulary(folder: Path, *, trust_remote_code: bool = False) -> dict[int, str] | None:
    """Return id -> token, added tokens included, of the tokenizer in `folder`; None if it has none."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            table = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{folder / 'tokenizer.json'} cannot be read: {reason(error)}") from error
    elif any((folder / name).is_file() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer

        try:
            table = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code).get_vocab()
        except (ImportError, KeyError, OSError, ValueError) as error:
            raise UserError(f"the tokenizer in {folder} cannot be read: {reason(error)}") from error
    else:
        return None
    return {number: token for token, number in table.items()}


def first_vocab_difference(target_path: str, draft_path: str) -> tuple[int, str, str] | None:
    """Return the first id whose tokens differ, as (id, target's token, draft's token), or None.

    A token that one side lacks is ``""``. None also where a side has no tokenizer: nothing is known then.
    """
    target, draft = vocabulary(Path(target_path)), vocabulary(Path(draft_path))
    if target is None or draft is None:
        return None
    for number in sorted(target.keys() | draft.keys()):
        pair = target.get(number, ""), draft.get(number, "")
        if pair[0] != pair[1]:
            return number, *pair
    return None


def has_recurrent_state(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config carries state that cannot be cut back to a length."""
    if not set(config.get("layer_types") or ()) <= _STATELESS_LAYERS:
        return True
    named = [str(config.get("model_type", "")), *(config.get("architectures") or ()), *map(str, config)]
    if any(word in name.lower() for name in named for word in _RECURRENT_WORDS):
        return True
    return any(has_recurrent_state(inner) for inner in config.values() if isinstance(inner, Mapping))


def target_features(config: Mapping[str, Any], *, recurrent: bool | None = None) -> frozenset[str]:
    """Return what the engine can do with a target of this config (the words of `Facts.features`).

    Every module is lent by the built-in decoder, embedding and output head by transformers' models; a model of
    one's own, which names no architecture, lends none. `recurrent`: whether the target keeps recurrent state, where
    that is known better than from `config`; it then runs row by row over a cache that is not paged.
    """
    features = {"own_kv"}
    if not (has_recurrent_state(config) if recurrent is None else recurrent):
        features |= {"rollback", "tree_verify", "read_kv"}
        if not _stacks_states(config):
            features.add("taps")
    if config.get("architectures"):
        features |= {"borrow:embed_tokens", "borrow:lm_head"}
        if _in_decoder(config):
            features.add("borrow:rope")
    return frozenset(features)


def build_facts(
    model_path: str, options: EngineOptions, *, draft_files: Iterable[str] = (), elsewhere: bool = False
) -> Facts:
    """Gather the facts for MODEL, as the user wrote it, and the draft that `options` name.

    `draft_files`: `Registry.draft_files`.

    MODEL becomes a local folder first (`local_model`): read it from ``.target.path``. A model that the
    engine cannot run, or an option it cannot honour, is a `UserError`; no weight is read. `elsewhere`: for
    another machine, as `specplug.placement.settle` takes it.
    """
    dummy = options.load_format == "dummy"
    target = read_checkpoint(
        str(local_model(model_path, options.revision, needs_tokenizer=not dummy, needs_weights=not dummy)),
        options.revision,
        trust_remote_code=options.trust_remote_code,
        load_format=options.load_format,
    )
    longest, recurrent = _runnable(target, options.trust_remote_code)
    if options.context_length is not None and options.context_length > longest:
        raise UserError(f"--context-length {options.context_length}: MODEL allows 2 to {longest}; give a smaller one")
    return facts_of(target, options, draft_files=draft_files, recurrent=recurrent, elsewhere=elsewhere)


def _in_decoder(config: Mapping[str, Any]) -> bool:
    try:
        return is_covered(config)
    except UserError:
        return False


def _runnable(target: Checkpoint, trust_remote_code: bool) -> tuple[int, bool]:
    """Return the most positions of a model that can be run, and whether it keeps recurrent state; or refuse it.

    Imports torch beyond the decoder's models.
    """
    if is_covered(target.config):
        return decoder_config(target.config).max_position, False
    from specplug.models.transformers import check_config

    return check_config(target.path, trust_remote_code=trust_remote_code)


def _stacks_states(config: Mapping[str, Any]) -> bool:
    """Whether several hidden states travel through the layers side by side, so that none of them is *the* tap."""
    inner = (value for value in config.values() if isinstance(value, Mapping))
    return (config.get("altup_num_inputs") or 1) > 1 or any(_stacks_states(each) for each in inner)


def facts_of(
    target: Checkpoint,
    options: EngineOptions,
    *,
    draft_files: Iterable[str] = (),
    recurrent: bool | None = None,
    at_hand: tuple[str, str] | None = None,
    elsewhere: bool = False,
) -> Facts:
    """Gather the facts for a target whose checkpoint is read. Device, dtype and backend become concrete words.

    `draft_files`, `elsewhere`: as for `build_facts`. `recurrent`: as for `target_features`. `at_hand`: device and dtype
    of a model that is loaded already, which ``auto`` then means.
    """
    draft, difference = None, None
    draft_path, draft_revision = options.speculative_draft_model_path, options.speculative_draft_model_revision
    if draft_path is not None:
        draft = _read_draft(draft_path, options, tuple(draft_files))
        if target.path and draft.tokenizer_fingerprint not in (None, target.tokenizer_fingerprint):
            difference = first_vocab_difference(target.path, draft.path)
    elif draft_revision is not None:
        raise UserError(
            f"--speculative-draft-model-revision {draft_revision} needs --speculative-draft-model-path; "
            "give both or neither"
        )
    where = settle(_as_loaded(options, at_hand), target.config, elsewhere=elsewhere)
    return Facts(
        target=target,
        draft=draft,
        device=where.device,
        dtype=where.dtype,
        attention_backend=where.attention_backend,
        page_size=options.page_size,
        limits=Limits(max_running_requests=options.max_running_requests, context_length=options.context_length),
        features=target_features(target.config, recurrent=recurrent),
        first_vocab_difference=difference,
    )


def _read_draft(path: str, options: EngineOptions, draft_files: tuple[str, ...]) -> Checkpoint:
    revision, load_format = options.speculative_draft_model_revision, options.speculative_draft_load_format
    folder = local_model(
        path,
        revision,
        option="--speculative-draft-model-path",
        needs_tokenizer=False,  # a draft head often comes without: it speaks the target's vocabulary
        needs_weights=load_format != "dummy",
        further=draft_files,
    )
    return read_checkpoint(
        str(folder),
        revision,
        trust_remote_code=options.trust_remote_code,
        load_format=load_format,
        draft_files=draft_files,
    )


def _as_loaded(options: EngineOptions, at_hand: tuple[str, str] | None) -> EngineOptions:
    """Return `options` with device and dtype of a model that is loaded already; another device is a `UserError`."""
    if at_hand is None:
        return options
    device, dtype = at_hand
    if options.device not in ("auto", device):
        raise UserError(
            f"--device {options.device}: the model given is loaded on {device}; load it on {options.device}, or leave "
            "the option out"
        )
    settled = {"device": device, "dtype": dtype if options.dtype == "auto" else options.dtype}
    return options.model_copy(update=settled)


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {reason(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a JSON {type(data).__name__}; an object is needed")
    return data


def _fingerprint(ids: Mapping[int, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()


def _sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    promised = _json(index).get("weight_map")
    if not isinstance(promised, dict):
        raise UserError(f"{index} has no weight_map; the index of a sharded checkpoint is needed")
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(promised.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise UserError(f"{index} names the shard {shard!r}, which is not in {folder}; download it again")
        found.update(_headers(folder / shard))
    lost = sorted(promised.keys() - found.keys())
    if lost:
        raise UserError(f"{index} promises {len(lost)} tensors that no shard holds, {lost[0]} first; download it again")
    return {name: found[name] for name in promised}


def _headers(file: Path) -> dict[str, StoredTensor]:
    infos = _bin_headers(file) if file.suffix in PICKLED else _safetensors_headers(file)
    return {name: StoredTensor(file, info) for name, info in infos.items()}


def _safetensors_headers(file: Path) -> dict[str, TensorInfo]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            return {
                name: TensorInfo(
                    _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype().lower()), tuple(part.get_shape())
                )
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {reason(error)}") from error


def _bin_headers(file: Path) -> dict[str, TensorInfo]:
    import torch

    try:
        stored = torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # whatever unpickling a damaged or refused file raises
        raise UserError(f"{file} cannot be read as PyTorch weights: {reason(error)}") from error
    entries = stored.items() if isinstance(stored, dict) else ()
    tensors = {name: value for name, value in entries if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(f"{file} holds no tensors at its top level; a state dict is needed")
    return {
        name: TensorInfo(str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in tensors.items()
    }
