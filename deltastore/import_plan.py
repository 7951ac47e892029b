"""What an import would commit, and in which order: looks at names, headers and `trainer_state.json`, and writes nothing."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltastore.buckets import open_bucket
from deltastore.buckets.folder import FolderBucket
from deltastore.errors import DeltaStoreError, FormatError, InvalidInputError, NotFoundError
from deltastore.files import Checkpoint, open_checkpoint
from deltastore.options import MAX_FILE_BYTES
from deltastore.originals import Original, look_at

TRAINER_STATE = "trainer_state.json"
LOGGED = ("loss", "eval_loss", "learning_rate", "epoch")  # of the trainer's log, what becomes metadata
_GENERIC = frozenset({"model", "adapter_model", "pytorch_model", "diffusion_pytorch_model"})  # say nothing about a file
_NUMBER = re.compile(r"[0-9]+")
_MAX_STEP = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ImportItem:
    """A checkpoint to import.

    Attributes:
        path: its folder or weight file, absolute.
        name: of the folder; becomes the message.
        step: None when neither the trainer nor the name says.
        metadata: of the commit; holds the step, if there is one.
        tensor_bytes_by_dtype: raw bytes of the tensors by dtype name.
        file_bytes: bytes of all other files.
        original: the files, to tell whether they change.
    """

    path: Path
    name: str
    step: int | None
    metadata: dict[str, int | float]
    tensor_bytes_by_dtype: dict[str, int]
    file_bytes: int
    original: Original

    @property
    def nbytes(self) -> int:
        """Raw bytes of tensors and files."""
        return sum(self.tensor_bytes_by_dtype.values()) + self.file_bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """A checkpoint that can't be imported, and why."""

    path: Path
    error: DeltaStoreError | OSError


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Checkpoints in the order in which they are committed, and those that can't be."""

    items: tuple[ImportItem, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def nbytes(self) -> int:
        """Raw bytes of all items."""
        return sum(item.nbytes for item in self.items)


def plan_import(paths: Iterable[str | os.PathLike[str]]) -> ImportPlan:
    """Look at checkpoints and put them in order; reads headers only.

    The order is that of steps: `global_step` of `trainer_state.json`, else the last number in the name. What has no step comes
    after whatever was written before it.

    Args:
        paths: checkpoint folders, or weight files.

    Raises:
        InvalidInputError: no path, one that is given twice or lies inside another, or two with the same step.
    """
    places = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100 - a symbolic link stays one
    if not places:
        raise InvalidInputError("nothing to import; name checkpoint folders, such as runs/checkpoint-*")
    _refuse_overlaps(places)
    items, failures = [], []
    for place in places:
        try:
            items.append(_item(place))
        except (DeltaStoreError, OSError) as error:
            failures.append(Failure(place, error))
    return ImportPlan(tuple(_in_order(items)), tuple(failures))


def outside_of(plan: ImportPlan, address: str | os.PathLike[str]) -> ImportPlan:
    """The plan without what lies in the store at `address` or around it: these are failures."""
    bucket = open_bucket(address)
    if not isinstance(bucket, FolderBucket):
        return plan
    kept, failures = [], list(plan.failures)
    for item in plan.items:
        where = Path(os.path.realpath(item.path))
        if where.is_relative_to(bucket.root):
            failures.append(Failure(item.path, InvalidInputError(f"{item.path} lies inside the store {bucket.root}")))
        elif bucket.root.is_relative_to(where):
            problem = f"{item.path} holds the store {bucket.root}; choose a store outside of it"
            failures.append(Failure(item.path, InvalidInputError(problem)))
        else:
            kept.append(item)
    return replace(plan, items=tuple(kept), failures=tuple(failures))


def _refuse_overlaps(places: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for place in places:
        real = Path(os.path.realpath(place))
        if real in seen:
            raise InvalidInputError(f"{place} is given twice, as {seen[real]} before; name each checkpoint once")
        seen[real] = place
    for real, place in seen.items():
        around = next((seen[parent] for parent in real.parents if parent in seen), None)
        if around is not None:
            raise InvalidInputError(f"{place} lies inside {around}, which is given, too; name only one of them")


def _item(path: Path) -> ImportItem:
    try:
        checkpoint = open_checkpoint(path)
    except NotFoundError as error:
        raise _with_hint(path, error) from error
    original = look_at(path, _committed(path, checkpoint))
    if original.obstacle is None:
        original = replace(original, obstacle=_kept_nowhere(checkpoint))
    sizes: defaultdict[str, int] = defaultdict(int)
    for source in checkpoint.tensors.values():
        sizes[source.dtype] += source.nbytes
    for pickled in _pickled_files(checkpoint):  # what is in them is not known before they are loaded
        sizes["float32"] += pickled.stat().st_size
    state = _trainer_state(checkpoint)
    name = path.parent.name if path.is_file() and path.stem in _GENERIC else path.name if path.is_dir() else path.stem
    step = _step(state.get("global_step"), path, name)
    metadata = _logged(state.get("log_history"))
    if step is not None:
        metadata = {"step": step, **metadata}
    file_bytes = sum(file.stat().st_size for file in checkpoint.files.values())
    return ImportItem(path, name, step, metadata, dict(sizes), file_bytes, original)


def _with_hint(path: Path, error: NotFoundError) -> NotFoundError:
    """Say so when a folder holds checkpoint folders instead of being one."""
    if not path.is_dir():
        return NotFoundError(f"there is no checkpoint {path}") if not path.exists() else error
    inner = sorted(each.name for each in path.iterdir() if each.is_dir() and any(each.glob("*.safetensors")))
    if not inner:
        return error
    return NotFoundError(f"{path} holds no weights itself; its folders do: name them, as in {path / inner[0]}")


def _committed(path: Path, checkpoint: Checkpoint) -> set[Path]:
    """The files whose whole content is in the commit."""
    found = {*checkpoint.files.values(), *(source.path for source in checkpoint.tensors.values()), *_pickled_files(checkpoint)}
    if path.is_dir():  # an index that is not among the files is the one that names the shards
        found.update(path.glob("*.safetensors.index.json"))
    return found


def _pickled_files(checkpoint: Checkpoint) -> list[Path]:
    pickled = checkpoint.pickled
    return [] if pickled is None else [pickled.folder / name for name in sorted(pickled.names)]


def _kept_nowhere(checkpoint: Checkpoint) -> str | None:
    """What a weight file holds beside tensors, which no commit keeps."""
    if checkpoint.pickled is not None or any(source.path.suffix != ".safetensors" for source in checkpoint.tensors.values()):
        return "its weights are in no safetensors file, which may hold more than tensors"
    texts = sorted(key for key in checkpoint.metadata if key != "format")
    return f"the texts {', '.join(texts)[:200]} in the header of its weights are no part of the commit" if texts else None


def _trainer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.files.get(TRAINER_STATE)
    if path is None:
        return {}
    if path.stat().st_size > MAX_FILE_BYTES:
        raise FormatError(f"{path} has {path.stat().st_size} bytes; expected at most {MAX_FILE_BYTES}")
    try:
        state = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no JSON: {str(error)[:200]}; was it cut short? Mend or remove it") from None
    if not isinstance(state, dict):
        raise FormatError(f"{path} is no JSON object; mend or remove it")
    return state


def _step(global_step: Any, path: Path, name: str) -> int | None:
    if global_step is not None:
        if type(global_step) is not int or not 0 <= global_step <= _MAX_STEP:
            raise FormatError(f"{path / TRAINER_STATE}: global_step is {str(global_step)[:80]!r}, expected a number of steps")
        return global_step
    numbers = _NUMBER.findall(name)
    if not numbers or len(numbers[-1]) > len(str(_MAX_STEP)) - 1:
        return None
    return int(numbers[-1])


def _logged(history: Any) -> dict[str, int | float]:
    """The last value of each of LOGGED."""
    found: dict[str, int | float] = {}
    for entry in reversed(history if isinstance(history, list) else []):
        for key in LOGGED:
            if key not in found and isinstance(entry, dict) and type(entry.get(key)) in (int, float):
                found[key] = entry[key]
    return {key: found[key] for key in LOGGED if key in found}


def _in_order(items: Sequence[ImportItem]) -> list[ImportItem]:
    known: dict[int, ImportItem] = {}
    for item in items:
        if item.step is None:
            continue
        if item.step in known:
            raise InvalidInputError(f"{known[item.step].path} and {item.path} are both of step {item.step}; import one of them")
        known[item.step] = item
    ordered = [known[step] for step in sorted(known)]
    for item in sorted((item for item in items if item.step is None), key=_modified):
        earlier = [at for at, other in enumerate(ordered, start=1) if _modified(other) <= _modified(item)]
        ordered.insert(max(earlier, default=0), item)
    return ordered


def _modified(item: ImportItem) -> int:
    """Nanoseconds: when the last of its files was written."""
    return max((mark.modified_ns for mark in item.original.files), default=0)
