"""Reading stored tensors, and filling modules with them."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from specplug.errors import UserError
from specplug.facts import PICKLED, StoredTensor, stored_tensors
from specplug.layers import FusedLinear

_log = logging.getLogger(__name__)
_LISTED = 8
_DUMMY_STD = 0.02
"""Spread of dummy weights, as models are initialised: activations neither vanish nor overflow."""


def iterate_weights(
    folder: Path | str,
    prefix: str = "",
    *,
    wanted: Callable[[str], bool] | None = None,
    further: Sequence[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on the CPU) of each stored tensor whose name starts with `prefix` and is `wanted`.

    `further`: as for `specplug.facts.stored_tensors`. Tensors are views of the mapped file: copy what must outlive the
    iteration. Nothing else is read.
    """
    by_file: dict[Path, list[str]] = {}
    for name, stored in stored_tensors(Path(folder), further).items():
        if name.startswith(prefix) and (wanted is None or wanted(name)):
            by_file.setdefault(stored.file, []).append(name)
    for file, names in by_file.items():
        yield from _read(file, names)


def destinations(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor for all that a checkpoint can fill: parameters and persistent buffers.

    The parts of a `FusedLinear` appear under its parent, as checkpoints store them: a fused map
    ``mlp.gate_up`` of ``gate_proj`` and ``up_proj`` gives ``mlp.gate_proj.weight`` and ``mlp.up_proj.weight``.
    """
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        if isinstance(part, FusedLinear):
            path = path.rpartition(".")[0]
            own = dict(part.part_tensors())
        else:
            own = dict(part.named_parameters(recurse=False))
            skipped = part._non_persistent_buffers_set
            own |= {name: buffer for name, buffer in part.named_buffers(recurse=False) if name not in skipped}
        found.update({f"{path}.{name}" if path else name: tensor for name, tensor in own.items()})
    return found


def fill_module(
    module: nn.Module,
    folder: Path | str,
    rename: Callable[[str], str | None] = lambda name: name,
    prefix: str = "",
    *,
    strict: bool = False,
    further: Sequence[str] = (),
) -> dict[str, int]:
    """Fill `module` from the checkpoint in `folder`; return what was left unread, prefix -> count.

    `further`: as for `specplug.facts.stored_tensors`. `rename` turns a stored name (those that start with `prefix` are
    asked for) into a name of `destinations`, or None: skip it. A tensor under no module of `module` (further layers,
    other heads) is left unread and reported once, or unexpected if `strict`. A tensor missing, of another shape or
    kind, or unexpected is a `UserError` with the list. Of names that share storage one suffices.
    """
    slots = destinations(module)
    goal: dict[str, str] = {}
    unread: Counter[str] = Counter()
    unexpected: list[str] = []
    every = stored_tensors(Path(folder), further)
    headers = {name: stored for name, stored in every.items() if name.startswith(prefix)}
    for name in headers:
        renamed = rename(name)
        if renamed is None:
            continue
        foreign = _foreign(module, slots, renamed)
        if renamed in slots:
            goal[name] = renamed
        elif foreign is None or strict:
            unexpected.append(name)
        else:
            # Told in stored names where renaming only took something off the front.
            head = name.removesuffix(renamed) if name.endswith(renamed) else ""
            unread[head + foreign] += 1
    _refuse_mismatch(folder, headers, slots, goal, unexpected)
    with torch.no_grad():
        for name, tensor in iterate_weights(folder, prefix, wanted=goal.__contains__, further=further):
            slots[goal[name]].copy_(tensor)
    for start, count in sorted(unread.items()):
        _log.warning("%s: %d tensors under %s* left unread, no module of the model owns them", folder, count, start)
    return dict(unread)


def fill_dummy(module: nn.Module, seed: int) -> None:
    """Fill every destination of `module` with seeded values on its own device; no file is read.

    Tensors of one dimension scale by 1 (norms) or, called ``bias``, are 0; any other floating tensor is normal with
    standard deviation 0.02; whole numbers (vocabulary maps) and flags are 0. The same seed gives the same values on
    the same kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, tensor in destinations(module).items():
            if not tensor.is_floating_point() or name.rpartition(".")[2] == "bias":
                tensor.zero_()
            elif tensor.dim() < 2:
                tensor.fill_(1.0)
            else:
                if tensor.device not in generators:
                    generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
                tensor.normal_(0.0, _DUMMY_STD, generator=generators[tensor.device])


def _read(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    if file.suffix in PICKLED:
        stored = torch.load(file, map_location="cpu", weights_only=True)
        for name in names:
            yield name, stored[name]
        return
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        for name in names:
            yield name, opened.get_tensor(name)


def _foreign(module: nn.Module, slots: Mapping[str, Tensor], name: str) -> str | None:
    """Return the shortest start of `name` that leaves `module`, or None if a module that computes owns it.

    The root and lists of layers only hold modules: what they lack belongs to somebody else.
    """
    here, path = module, ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        child = here._modules.get(part)
        if child is None:
            holds = here is module or isinstance(here, nn.ModuleList)
            is_fused_part = any(slot.startswith(f"{path}.") for slot in slots)
            return path if holds and not is_fused_part else None
        here = child
    return None


def _refuse_mismatch(
    folder: Path | str,
    headers: dict[str, StoredTensor],
    slots: dict[str, Tensor],
    goal: dict[str, str],
    unexpected: list[str],
) -> None:
    def storage(tensor: Tensor) -> tuple[int, torch.Size]:
        return tensor.data_ptr(), tensor.shape

    filled = {storage(slots[name]) for name in goal.values()}
    missing = [name for name, slot in slots.items() if storage(slot) not in filled]
    twice = [name for name, count in Counter(goal.values()).items() if count > 1]
    shapes, kinds = [], []
    for name, renamed in goal.items():
        info, slot = headers[name].info, slots[renamed]
        if info.shape != tuple(slot.shape):
            shapes.append(f"{name} {list(info.shape)} for {list(slot.shape)}")
        elif info.dtype.startswith(("float", "bfloat")) != slot.dtype.is_floating_point:
            kinds.append(f"{name} {info.dtype} for {str(slot.dtype).removeprefix('torch.')}")
    faults = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("stored twice", twice),
        ("of another shape", shapes),
        ("of another kind", kinds),
    )
    told = [f"{len(names)} {fault}: {_listed(names)}" for fault, names in faults if names]
    if told:
        raise UserError(f"the weights in {folder} do not fit its config.json: {'; '.join(told)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(sorted(names)[:_LISTED]) + more
