"""A commit, opened: a lazy mapping of its tensors, and the ways to get them out.

Opening a snapshot reads no tensor bytes. Every read is verified, fetches only the chunks it needs, and keeps a bounded number
of bytes in flight.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deltastore import canonical, checkout, display, subclasses, tensors
from deltastore.chunk_reader import ChunkReader, ReadJob
from deltastore.errors import IncompatibleStateError, IntegrityError, InvalidInputError, TensorNotFoundError, short_name
from deltastore.files import CheckpointWriter
from deltastore.history import Commit
from deltastore.progress import progress_bar
from deltastore.regions import Region
from deltastore.restore import Restored, plan_restore
from deltastore.state import Path as StatePath
from deltastore.state import TensorSink, leaf_paths, path_name, tensor_units, unflatten, unique_leaf_names
from deltastore.versions import Version

_COMMIT_ID = re.compile(r"[0-9a-f]{64}")


class LazyTensor:
    """A stored tensor, or a selection of one. Indexing narrows it without reading; `load` reads what is selected."""

    def __init__(self, version: Version, reader: ChunkReader, name: str, number: int, region: Region) -> None:
        self._version = version
        self._reader = reader
        self._number = number
        self._region = region
        self.name = name

    @property
    def dtype_name(self) -> str:
        """The dtype's name in torch, such as "bfloat16"."""
        return self._version.tensors[self._number].dtype.name

    @property
    def dtype(self) -> Any:
        """The torch dtype (imports torch)."""
        return tensors.to_torch_dtype(self.dtype_name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the selection."""
        return self._region.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the selection when loaded."""
        return self._region.elements * self._version.tensors[self._number].dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-dim tensor has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> LazyTensor:
        return LazyTensor(self._version, self._reader, self.name, self._number, self._region.narrow(index))

    def __repr__(self) -> str:
        return f"LazyTensor({short_name(self.name)!r}, {self.dtype_name}, shape={list(self.shape)})"

    def tobytes(self) -> bytes:
        """The raw bytes of the selected elements, row-major, little-endian. Needs no torch."""
        out = np.empty(self.nbytes, np.uint8)
        checkout.read_region(self._version, self._reader, self._number, self._region, out)
        return out.tobytes()

    def load(self, device: Any = "cpu", dtype: Any = None) -> Any:
        """Read the selection into a new torch tensor.

        Args:
            dtype: convert to this torch dtype; by default the values stay as committed.

        Raises:
            IntegrityError: a chunk is damaged; names the tensor, the chunk and the object.
        """
        _is_cpu(device)
        result = tensors.empty_tensor(self.dtype_name, self.shape)
        if self._region.elements:
            view = tensors.TorchSink(result, name=self.name).view(0, self._region.elements)
            assert view is not None  # a new tensor is contiguous
            checkout.read_region(self._version, self._reader, self._number, self._region, view)
        return _moved(result, device, dtype)


class Snapshot(Mapping[str, LazyTensor]):
    """The tensors of one commit by name, read when they are asked for.

    Attributes:
        commit: what was committed when, by whom, with which message and metadata.
    """

    def __init__(self, commit: Commit, version: Version, reader: ChunkReader) -> None:
        self.commit = commit
        self._version = version
        self._reader = reader
        self._numbers: dict[str, int] = {}
        self._ambiguous: set[str] = set()
        for name, (_, number) in zip(version.names, version.leaves, strict=True):
            if name in self._numbers:
                self._ambiguous.add(name)
            self._numbers[name] = number

    # -- the mapping --------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str | tuple[Any, ...]) -> LazyTensor:
        """A tensor by its name, or by its path of typed keys given as a tuple."""
        if isinstance(name, tuple):
            number = self._number_at(name)
            if number is None:
                raise TensorNotFoundError(f"commit {self.commit.short_id} has no tensor at path {name!r}")
            return self._lazy(path_name(name), number)
        if name in self._ambiguous:
            raise IncompatibleStateError(
                f"two tensors are called {short_name(name)!r}; ask for one of them by its path, a tuple of keys"
            )
        if name not in self._numbers:
            near = difflib.get_close_matches(str(name)[:200], self._numbers, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"see `deltastore show {self.commit.short_id}`"
            raise TensorNotFoundError(f"commit {self.commit.short_id} has no tensor {short_name(str(name))!r}; {hint}")
        return self._lazy(name, self._numbers[name])

    def _number_at(self, path: tuple[Any, ...]) -> int | None:
        for found, number in self._version.leaves:
            if found == path and all(type(a) is type(b) for a, b in zip(found, path, strict=True)):
                return number
        return None

    def _lazy(self, name: str, number: int) -> LazyTensor:
        return LazyTensor(self._version, self._reader, name, number, Region.whole(self._version.tensors[number].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, tuple):
            return self._number_at(name) is not None
        return isinstance(name, str) and name in self._numbers

    def __repr__(self) -> str:
        return f"Snapshot({self.commit.short_id} {short_name(self.commit.message, 60)!r}, {len(self)} tensors)"

    def _repr_html_(self) -> str:
        leaves = zip(self._version.names, self._version.leaves, strict=True)  # names may be ambiguous
        found = (self._lazy(name, number) for name, (_, number) in leaves)
        rows = ((each.name, each.dtype_name, display.shape(each.shape), each.nbytes) for each in found)
        tensors = display.table(("tensor", "dtype", "shape", "bytes"), rows, len(self._version.names))
        files = display.table(("file", "bytes"), self.files.items(), len(self.files))
        size = f"{len(self._version.names)}, {display.human_bytes(self.nbytes)}"
        return display.card(f"snapshot {self.commit.short_id}", [*self.commit.facts(), ("tensors", size)], tensors, files)

    @property
    def nbytes(self) -> int:
        """Raw bytes of all tensors, tied ones counted once."""
        return sum(self._version.tensors[number].nbytes for number in {number for _, number in self._version.leaves})

    @property
    def base(self) -> str | None:
        """Id of the commit that this one is an adapter of: `commit(..., base=)`. None when it has none."""
        base = self.commit.metadata.get("base")
        return base if isinstance(base, str) and _COMMIT_ID.fullmatch(base) else None

    @property
    def files(self) -> dict[str, int]:
        """Names and sizes in bytes of the files that were committed with the tensors."""
        return {file.name: file.size for file in self._version.structure.files}

    def read_file(self, name: str) -> bytes:
        """The content of a committed file."""
        for file in self._version.structure.files:
            if file.name == name:
                if file.tensor is None:
                    return file.data or b""
                return checkout.read_bytes(self._version, self._reader, file.tensor)
        raise TensorNotFoundError(
            f"commit {self.commit.short_id} has no file {short_name(name)!r}; it has {', '.join(self.files) or 'none'}"
        )

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, names: Collection[str] | None = None, *, device: Any = "cpu", dtype: Any = None) -> dict[str, Any]:
        """Read tensors into new memory.

        Args:
            names: which; all by default. A tensor subclass that is stored as its parts has a name, and so has every part.
            device: where they go; the device of the committed tensors is never stored.
            dtype: a torch dtype to convert floating tensors to; by default they stay as committed. Subclasses and parts
                of them always stay.

        Returns:
            name -> torch tensor. Tied names share one storage.

        Raises:
            IncompatibleStateError: two tensors share a name, or a tensor subclass is not known: names what to register.
            IntegrityError: a chunk is damaged; names the tensor, the chunk and the object.
        """
        units = {path_name(path): (path, node) for path, node in self._units}
        if names is None:
            unique_leaf_names(self._version.structure.tree)
            names = list(dict.fromkeys(self._unit_names.get(name, name) for name in self))
        wanted = {name: self[name]._number for name in names if name not in units}
        parts = {name: {number for _, number in leaf_paths(units[name][1])} for name in names if name in units}
        values = self._values() if parts else []
        for name in parts:
            self._refuse_unknown(*units[name], values)
        inner = {self[name]._number for name in self._unit_names}
        kept = set().union(*parts.values(), inner & set(wanted.values()))
        loaded = self._load_numbers(set(wanted.values()) - kept, device, dtype) | self._load_numbers(kept, device, None)
        memory = self._by_number(loaded)
        return {name: self._rebuilt(*units[name], memory, values) if name in parts else loaded[wanted[name]] for name in names}

    @cached_property
    def _units(self) -> list[tuple[StatePath, Any]]:
        """Path and node of the tensor subclasses that are stored as their parts."""
        return tensor_units(self._version.structure.tree)

    @cached_property
    def _unit_names(self) -> dict[str, str]:
        """Name of a part -> name of what it is a part of."""
        return {path_name((*path, *below)): path_name(path) for path, node in self._units for below, _ in leaf_paths(node)}

    def _by_number(self, loaded: dict[int, Any]) -> list[Any]:
        return [loaded.get(number) for number in range(len(self._version.tensors))]

    def _rebuilt(self, path: StatePath, node: Any, memory: list[Any], values: list[Any]) -> Any:
        return unflatten(node, memory, values, subclasses.rebuild, path)

    def _refuse_unknown(self, path: StatePath, node: Any, values: list[Any]) -> None:
        """Raise, before anything is read, when a class is needed that is not known."""
        unflatten(node, self._version.tensors, values, subclasses.find_class, path)

    def _load_numbers(self, numbers: set[int], device: Any, dtype: Any) -> dict[int, Any]:
        loaded: dict[int, Any] = {}
        if _is_cpu(device) and dtype is None:
            self._read("load", numbers, self._jobs_into_new(sorted(numbers), loaded))
            return loaded
        with progress_bar("load", self._nbytes(numbers)) as done:
            for number in sorted(numbers):  # one tensor at a time in host memory
                part: dict[int, Any] = {}
                checkout.run(self._reader, self._jobs_into_new([number], part), done)
                tensor = part.pop(number)
                loaded[number] = _moved(tensor, device, dtype if tensor.is_floating_point() else None)
        return loaded

    def _nbytes(self, numbers: Iterable[int]) -> int:
        return sum(self._version.tensors[number].nbytes for number in numbers)

    def _read(self, what: str, numbers: Iterable[int], jobs: Iterable[ReadJob]) -> None:
        """Read jobs that make up these stored tensors, with a progress bar called `what`."""
        total = self._nbytes(numbers)
        packs = checkout.mostly_wanted(self._version, total)
        with progress_bar(what, total) as done:
            checkout.run(self._reader, jobs, done, total, packs)

    def _jobs_into_new(self, numbers: list[int], loaded: dict[int, Any]) -> Iterator[ReadJob]:
        for number in numbers:
            info = self._version.tensors[number]
            loaded[number], memory = tensors.empty_memory(info.dtype.name, info.shape)
            yield from checkout.plan_range(self._version, number, 0, info.elements, memory)

    def state(self, device: Any = "cpu") -> Any:
        """The nested structure as it was committed: order, key types, plain values, ties and tensor subclasses.

        Raises:
            IncompatibleStateError: a tensor subclass is not known; names the tensor and what to register.
            IntegrityError: a chunk is damaged; names the tensor, the chunk and the object.
        """
        tree, values = self._version.structure.tree, self._values()
        for path, node in self._units:
            self._refuse_unknown(path, node, values)
        loaded = self._load_numbers({number for _, number in self._version.leaves}, device, None)
        return self._rebuilt((), tree, self._by_number(loaded), values)

    def _values(self) -> list[Any]:
        packed = self._version.document.placement.values
        if isinstance(packed, dict):
            packed = json.loads(checkout.read_bytes(self._version, self._reader, packed["tensor"]))
        if not isinstance(packed, list):
            raise IntegrityError(f"the plain values of commit {self.commit.short_id} are not a list")
        return [canonical.unpack(value) for value in packed]

    def load_into(self, target: Any, *, strict: bool = True, cast: bool = False) -> Restored:
        """Bring the committed values into live objects, in place.

        Args:
            target: a module, an optimizer, any object with `load_state_dict`, or a nested state of these, tensors and plain
                values. Tensors keep their memory. An optimizer then holds exactly the stored state: what it has not yet is
                made with the stored dtypes on the device of its parameter. Schedulers and other objects get their whole
                state. Plain values are replaced in the dicts and lists that hold them.
            strict: refuse a target that has more than the commit, or less.
            cast: convert floating tensors to the dtypes of the target; by default another dtype is refused.

        Returns:
            Names and counts of what was restored.

        Raises:
            IncompatibleStateError: names are missing or left over, or a shape or dtype differs; nothing was written.
            IntegrityError: a chunk is damaged: the target then holds a mixture, as the message says.
        """
        plan = plan_restore(self._version, self._values(), target, strict=strict, cast=cast)
        jobs = (job for number, sink in plan.sinks for job in checkout.plan_tensor(self._version, number, sink))
        try:
            self._read("load", (number for number, _ in plan.sinks), jobs)
        except IntegrityError as error:
            mixed = "the target now holds old and new values mixed, load another revision into it"
            raise type(error)(f"{error}; {mixed}", error.key) from error
        plan.settle()
        return plan.restored

    def save(self, directory: str | Path, *, max_shard_bytes: int = 5 << 30, overwrite: bool = False) -> list[Path]:
        """Write the tensors as plain safetensors files, with the committed files beside them.

        Built beside the target, synced, then moved in. Every name of a tied tensor is written, so that tools find the one
        they want. A tensor subclass is written as its parts, `name.part`, all into one shard unless they are larger than
        one. Plain values of the state have no place in this format; `state()` gives them.

        Args:
            directory: made when it is missing.
            max_shard_bytes: larger models are cut into shards with a `model.safetensors.index.json`.
            overwrite: replace weight files of the old or new index and files of the same names; others are left.

        Returns:
            The paths that were written.

        Raises:
            AlreadyExistsError: a file of these names is there and `overwrite` is not given.
            IncompatibleStateError: a dtype or name has no place in safetensors; names the tensor.
            StoreFullError: there is too little space; nothing was written.
        """
        names = unique_leaf_names(self._version.structure.tree)
        entries = []
        for name, (_, number) in zip(names, self._version.leaves, strict=True):
            info = self._version.tensors[number]
            entries.append((name, info.dtype.name, info.shape))
        if any(True for _ in self._values()):
            warnings.warn(
                "the plain values of this state (numbers, texts) are not part of the safetensors files; use state() to get them",
                stacklevel=2,
            )
        options: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "overwrite": overwrite}
        options |= {"units": self._unit_names, "extra_bytes": sum(self.files.values())}
        with CheckpointWriter(Path(directory), entries, **options) as writer:
            self._read("save", (number for _, number in self._version.leaves), self._jobs_into_files(names, writer))
            for file in self._version.structure.files:
                if file.tensor is None:
                    writer.add_file(file.name, file.data or b"")
                else:
                    sink = writer.file_sink(file.name, file.size)
                    self._read("save", [file.tensor], checkout.plan_tensor(self._version, file.tensor, sink))
            return writer.finish()

    def _jobs_into_files(self, names: list[str], writer: CheckpointWriter) -> Iterator[ReadJob]:
        for name, (_, number) in zip(names, self._version.leaves, strict=True):
            target: TensorSink = writer.sink(name)
            yield from checkout.plan_tensor(self._version, number, target, f"tensor {short_name(name)!r}")


def _is_cpu(device: Any) -> bool:
    """Raises InvalidInputError, before anything is read, for a device that tensors with values can't go to."""
    try:
        kind = tensors.empty_tensor("uint8", (0,), device).device.type
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidInputError(f"device {device!r} can't be used: {str(error).splitlines()[0]}; give another one") from error
    if kind == "meta":
        raise InvalidInputError("tensors on the meta device hold no values; read dtype and shape of `snapshot[name]` instead")
    return bool(kind == "cpu")


def _moved(tensor: Any, device: Any, dtype: Any) -> Any:
    """On another device, in another dtype; the same tensor when neither is asked for."""
    try:
        return tensor.to(device=device, dtype=dtype)
    except (NotImplementedError, TypeError) as error:
        raise InvalidInputError(f"torch can't convert {tensor.dtype} to {dtype!r}: {str(error).splitlines()[0]}") from error
