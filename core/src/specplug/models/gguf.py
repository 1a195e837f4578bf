"""One-time conversion of a GGUF file to a plain Hugging Face folder in float32. Torch-free at import."""

import contextlib
import hashlib
import importlib.util
import io
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specplug.errors import UserError
from specplug.models.store import reason

_VERSION = "1"
"""Part of the cache key: raise it when the written folder changes."""

_BYTES_PER_WEIGHT = 4
_LISTED = 4
_SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
"""Metadata without which the model's shape is unknown."""


def converted(source: Path, cache: Path) -> Path:
    """Return the folder under `cache` that holds `source` in float32, converting it the first time.

    The folder appears by one rename after everything in it reached the disk, so an interrupted
    conversion leaves nothing that would be used. Two processes at once: the second waits and reuses.
    Unreadable file, missing packages, no space: `UserError`.
    """
    with source.open("rb") as file:
        # Content, not date: a reinstalled package is the same model.
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = f"{source.stem}-{hashlib.sha256((_VERSION + digest).encode()).hexdigest()[:12]}"
    target = cache / name
    if target.is_dir():
        return target
    size = _float32_bytes(source)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{name}.lock"):
            if not target.is_dir():
                _refuse_full_disk(cache, size)
                _convert(source, target, size)
    except OSError as error:
        raise UserError(
            f"cannot write the converted model to {cache}: {error.strerror or error}; "
            "free the disk or set SPECPLUG_CACHE to another folder"
        ) from error
    return target


def _float32_bytes(source: Path) -> int:
    """Return the size of the weights in float32; opens the file, so that a bad one is refused first."""
    lacking = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if lacking:
        raise UserError(f'reading {source.name} needs {" and ".join(lacking)}; run: pip install "specplug[gguf]"')
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(source))
        named = reader.fields.get("general.architecture")
        needed = ["general.architecture"]
        if named is not None:
            # transformers would fill a gap with the sizes of some 7B model.
            needed = [f"{named.contents()}.{key}" for key in _SIZES]
        absent = [key for key in needed if key not in reader.fields]
        weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # a damaged file makes the reader raise almost anything
        raise UserError(f"{source} cannot be read as GGUF: {reason(error)}; get the file again") from error
    if absent:
        raise UserError(f"{source} is no complete GGUF model: {', '.join(absent)} missing; get the file again")
    return weights * _BYTES_PER_WEIGHT


def _refuse_full_disk(cache: Path, size: int) -> None:
    free = shutil.disk_usage(cache).free
    # The tokenizer and the configuration take a few megabytes more.
    needed = size + 64_000_000
    if free < needed:
        raise UserError(
            f"converting needs {needed / 1e9:.1f} GB in {cache}, {free / 1e9:.1f} GB are free; "
            "free the disk or set SPECPLUG_CACHE to another folder"
        )


def _lock(path: Path) -> Any:
    from filelock import FileLock

    return FileLock(path)


def _convert(source: Path, target: Path, size: int) -> None:
    prefix = f".{target.name}.partial-"
    # We hold the lock: whatever lies here was left by a process that died.
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        with _progress(f"Converting {source.name} once to float32: {size / 1e9:.1f} GB in {target}") as step:
            _write(source, partial, step)
            step("Flushing to disk")
            _flush(partial)
        partial.rename(target)
        _flush_entry(target.parent)
    finally:
        # After the rename there is nothing left to remove.
        shutil.rmtree(partial, ignore_errors=True)


def _write(source: Path, folder: Path, step: Any) -> None:
    import torch
    import transformers
    from safetensors import SafetensorError

    # Releases without this class unpack every weight anyway.
    dequantize = getattr(transformers, "GgufConfig", None)
    extra = {} if dequantize is None else {"quantization_config": dequantize(dequantize=True)}
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        step("Unpacking the weights")
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, output_loading_info=True, **extra
        )
        # transformers would leave these at random values.
        if loading["missing_keys"]:
            raise ValueError(f"it lacks {', '.join(sorted(loading['missing_keys'])[:_LISTED])}")
        step("Reading the tokenizer")
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        # The template belongs into tokenizer_config.json: one file, read by every release.
        tokenizer.save_pretrained(folder, save_jinja_files=False)
    except Exception as error:  # an unknown architecture or block type raises one of many
        raise UserError(f"{source} cannot be converted: {reason(error)}") from error
    step("Writing")
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(reason(error)) from error


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Any]:
    """Announce `title` and show a bar on stderr; yields a function that names the next of four steps."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    console = Console(file=sys.stderr)
    console.print(title, highlight=False, soft_wrap=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    # transformers draws several bars of its own in between; ours speaks for all.
    with (
        Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bar,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        task = bar.add_task("Starting", total=4)
        done = itertools.count()

        def step(name: str) -> None:
            bar.update(task, completed=next(done), description=name)

        try:
            yield step
            step("Done")
        finally:
            logging.set_verbosity(level)


def _flush(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    _flush_entry(folder)


def _flush_entry(folder: Path) -> None:
    """Flush the folder's own entries, where the system allows to open a folder."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
