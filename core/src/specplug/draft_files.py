"""Weight files of a draft under names that an algorithm's manifest gives. Torch-free; reading a ``.pt`` is not."""

from collections.abc import Iterator
from pathlib import Path

from specplug.facts import PICKLED, stored_tensors
from specplug.spec import AlgorithmSpec, Checkpoint

SUFFIXES = (".safetensors", *PICKLED)


def name_faults(spec: AlgorithmSpec) -> Iterator[str]:
    """Yield what is wrong with the names in `spec.draft_files`, one line each."""
    for name in spec.draft_files:
        if Path(name).name != name or "\\" in name or any(mark in name for mark in "*?["):
            yield f"{spec.name!r} names the draft file {name!r}: a file name without folder or wildcard is needed"
        elif Path(name).suffix not in SUFFIXES:
            yield f"{spec.name!r} names the draft file {name!r}: one that ends in {', '.join(SUFFIXES)} is needed"
        elif Path(name).stem.startswith(("model", "pytorch_model")):
            yield f"{spec.name!r} names the draft file {name!r}: model* and pytorch_model* are read anyway"


def own_draft(draft: Checkpoint, spec: AlgorithmSpec) -> Checkpoint:
    """Return `draft` as `spec`'s algorithm reads it: with its own further files, and without those of others.

    Headers of its files are read. Raises UserError where one cannot be, or holds a tensor that another holds too.
    """
    if draft.tensors is None or not draft.files:
        return draft
    chosen: dict[str, str] = {}
    for name in spec.draft_files:
        if name in draft.files:
            chosen.setdefault(Path(name).stem, name)
    files = tuple(chosen.values())
    if not files:
        return draft.model_copy(update={"files": ()})
    tensors = {name: stored.info for name, stored in stored_tensors(Path(draft.path), files).items()}
    return draft.model_copy(update={"files": files, "tensors": tensors})
