"""What a store would take for some checkpoints: they are committed to a throw-away store, all of them or a sample.

A sample is every N-th block of 65 536 elements, counted through all tensors in the order of a hash of their names, so it is
the same blocks at each step; what its packs take is scaled by the bytes. Files beside the weights are never sampled.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from deltastore import files
from deltastore.canonical import show
from deltastore.dtypes import dtype_of
from deltastore.errors import DeltaStoreError, IncompatibleStateError, InvalidInputError
from deltastore.files import CheckpointWriter, FileSource
from deltastore.import_plan import Failure, ImportItem, ImportPlan, plan_import
from deltastore.progress import progress_bar
from deltastore.space import estimate_commit_bytes, require_space
from deltastore.store import DeltaStore

BLOCK_ELEMENTS = 1 << 16  # of a sample: large enough for a reader of files, small against the tensors of any model


@dataclass(frozen=True, slots=True)
class CheckpointEstimate:
    """One checkpoint.

    Attributes:
        raw_bytes: of its tensors, as they are on disk, and its files.
        added_bytes: what its commit adds to the bucket, everything counted but the SQL index.
    """

    path: Path
    step: int | None
    raw_bytes: int
    added_bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a store would take.

    Attributes:
        checkpoints: in the order in which they are committed.
        failures: checkpoints that can't be read.
        store_bytes: of an empty store.
        index_bytes: of the SQL index in the end.
        sampled_share: of the tensors' bytes; 1.0 when all were committed.
    """

    checkpoints: tuple[CheckpointEstimate, ...]
    failures: tuple[Failure, ...]
    store_bytes: int
    index_bytes: int
    sampled_share: float

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of all checkpoints."""
        return sum(each.raw_bytes for each in self.checkpoints)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole store."""
        return self.store_bytes + self.index_bytes + sum(each.added_bytes for each in self.checkpoints)

    @property
    def ratio(self) -> float:
        """How many times smaller the store is."""
        return self.raw_bytes / self.stored_bytes


def run_estimate(
    paths: Iterable[str | os.PathLike[str]],
    *,
    cast: str | None = None,
    sample: int = 1,
    work: str | os.PathLike[str] | None = None,
) -> Estimate:
    """Commit checkpoints to a store that is deleted afterwards, and say what it took.

    Takes as much space in `work` as the result, and for a sample its share of that and of one checkpoint.

    Args:
        paths: checkpoint folders or weight files; ordered as for `plan_import`.
        cast: a torch dtype, such as "bfloat16", that all floating tensors are converted to first (imports torch).
        sample: look at one of so many blocks only.
        work: the folder for the throw-away store; by default the system's folder for temporary files.

    Raises:
        InvalidInputError: nothing to estimate, a sample below 1, no such dtype, or what `plan_import` raises.
        StoreFullError: too little space in `work`.
        DeltaStoreError: what was wrong with the first checkpoint, when none could be read.
    """
    if type(sample) is not int or sample < 1:
        raise InvalidInputError(f"sample={show(sample)}; expected a whole number from 1: one of how many blocks is looked at")
    if cast is not None:
        _check_dtype(cast)
    plan = plan_import(paths)
    if not plan.items:
        raise plan.failures[0].error
    place = Path(tempfile.gettempdir() if work is None else work)
    if not place.is_dir():
        raise InvalidInputError(f"{place} is no folder; choose one with space for a throw-away store")
    first = estimate_commit_bytes(plan.items[0].tensor_bytes_by_dtype)
    largest = max(item.nbytes for item in plan.items) if sample > 1 else 0
    require_space(place, (first + largest) // sample, "an estimate")
    folder = Path(tempfile.mkdtemp(prefix="deltastore-estimate-", dir=place))
    try:
        return _run(plan, folder, {} if cast is None else {"*": cast}, sample)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_dtype(name: str) -> None:
    try:
        dtype_of(name)
    except IncompatibleStateError:
        raise InvalidInputError(f"cast={show(name)}; expected a floating dtype, such as 'bfloat16'") from None


def _run(plan: ImportPlan, folder: Path, cast: dict[str, str], sample: int) -> Estimate:
    measured, failures, sizes = [], list(plan.failures), _Sizes(0, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the private copy", UserWarning)  # of no interest for a store that goes away
        with DeltaStore.create(folder / "store", cache_dir=folder / "cache") as store:
            empty = _packs_and_others(folder / "store")
            before = empty
            with progress_bar("estimate", len(plan.items), unit="checkpoint") as done:
                for item in plan.items:
                    try:
                        part = _commit(store, item, folder / "sample", cast, sample)
                    except (DeltaStoreError, OSError) as error:
                        failures.append(Failure(item.path, error))
                        continue
                    sizes = _Sizes(sizes.sampled + part.sampled, sizes.whole + part.whole)
                    now = _packs_and_others(folder / "store")
                    packs, others = now[0] - before[0], now[1] - before[1]
                    measured.append((item, packs, others, part))
                    before = now
                    done(1)
    if not measured:
        raise failures[0].error
    own = _file_costs(folder / "files", [item for item, *_ in measured]) if sample > 1 else [0] * len(measured)
    checkpoints = [
        CheckpointEstimate(item.path, item.step, item.nbytes, round(packs * part.scale) + others + of_files)
        for (item, packs, others, part), of_files in zip(measured, own, strict=True)
    ]
    index_bytes = sum(path.stat().st_size for path in (folder / "store").glob("index.sqlite*"))
    return Estimate(tuple(checkpoints), tuple(failures), sum(empty), index_bytes, sizes.share)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Raw bytes of tensors in a sample, and of all."""

    sampled: int
    whole: int

    @property
    def share(self) -> float:
        return self.sampled / self.whole if self.whole else 1.0

    @property
    def scale(self) -> float:
        return 1 / self.share if self.share else 1.0


def _commit(store: DeltaStore, item: ImportItem, folder: Path, cast: dict[str, str], sample: int) -> _Sizes:
    whole = sum(item.tensor_bytes_by_dtype.values())
    source, sampled = item.path, whole
    if sample > 1:
        source, sampled = folder, _write_sample(item.path, folder, sample)
    store.commit(source, item.name, metadata=item.metadata, cast=cast or None)
    return _Sizes(sampled, whole)


def _packs_and_others(folder: Path) -> tuple[int, int]:
    """Bytes of the packs of a store, and of all its other objects."""
    packs = others = 0
    for place, _, names in os.walk(folder):
        size = sum((Path(place) / name).stat().st_size for name in names if not name.startswith("index.sqlite"))
        if Path(place).is_relative_to(folder / "packs"):
            packs += size
        else:
            others += size
    return packs, others


def _file_costs(folder: Path, items: list[ImportItem]) -> list[int]:
    """What the packs take of the files beside the weights, which no sample holds."""
    costs = []
    with DeltaStore.create(folder, cache_dir=folder.with_name("cache")) as store:
        before = 0
        for item in items:
            beside = files.open_checkpoint(item.path).files if item.path.is_dir() else {}
            store.commit(_only_files(folder.with_name("beside"), beside), item.name)
            now = _packs_and_others(folder)[0]
            costs.append(now - before)
            before = now
    return costs


def _only_files(folder: Path, beside: Mapping[str, Path]) -> Path:
    """A checkpoint of no weights, with links to these files: a folder may hold files of any size."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with CheckpointWriter(folder, [("none", "uint8", (0,))]) as writer:
        writer.finish()
    for name, path in beside.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(path.absolute())
    return folder


# -- samples ----------------------------------------------------------------------------------------------------------


def _write_sample(path: Path, folder: Path, sample: int) -> int:
    """Write every `sample`-th block of a checkpoint as a checkpoint of its own; returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    chosen = [(name, source, blocks) for name, source, blocks in _sampled(path, sample) if blocks]
    entries = [(name, source.dtype, (sum(stop - start for start, stop in blocks),)) for name, source, blocks in chosen]
    with CheckpointWriter(folder, entries) as writer:
        for name, source, blocks in chosen:
            sink, filled = writer.sink(name), 0
            for start, stop in blocks:
                sink.write(filled, filled + stop - start, source.read(start, stop))
                filled += stop - start
        writer.finish()
    return sum(math.prod(shape) * dtype_of(dtype).itemsize for _, dtype, shape in entries)


def _sampled(path: Path, sample: int) -> Iterator[tuple[str, FileSource, list[tuple[int, int]]]]:
    """Every tensor with the blocks of elements [start, stop) that are in the sample; dtypes are counted apart."""
    checkpoint = files.open_checkpoint(path)
    if checkpoint.pickled is not None:
        raise InvalidInputError(f"{path} holds weights of torch.save, of which no sample can be taken; estimate all of it")
    tensors = checkpoint.tensors
    seen: defaultdict[str, int] = defaultdict(int)  # blocks, by dtype
    for name in sorted(tensors, key=lambda name: xxhash.xxh3_64_intdigest(name.encode())):
        source = tensors[name]
        elements = math.prod(source.shape)
        starts = range(0, elements, BLOCK_ELEMENTS)
        chosen = [start for number, start in enumerate(starts, seen[source.dtype]) if number % sample == 0]
        seen[source.dtype] += len(starts)
        yield name, source, [(start, min(start + BLOCK_ELEMENTS, elements)) for start in chosen]
