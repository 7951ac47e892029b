"""Torch tensors in and out, as ranges of bytes.

    state ──flatten_state──▶ FlatState of TorchSource ──read(start, stop)──▶ bytes
    bytes ──TorchSink.view / .write──▶ memory of the target

Bytes are never routed through arithmetic: memory is read as it lies, strided or remote tensors are copied as integers
of the same width, and a lazy conjugation or negation flips sign bits. No call copies elements that it was not asked for.
"""

from __future__ import annotations

import fnmatch
import json
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deltastore import subclasses
from deltastore.canonical import show
from deltastore.dtypes import PACKED_FLOAT4, DType, dtype_of
from deltastore.errors import IncompatibleStateError, InvalidInputError
from deltastore.live_objects import state_of
from deltastore.state import (
    Array,
    FlatState,
    Path,
    TensorSink,
    TensorSource,
    check_range,
    describe_path,
    flatten,
    leaf_names,
    path_name,
)
from deltastore.storable import has_memory, is_frozen, tie_key, why_not_stored, why_not_written
from deltastore.torch_import import import_torch

Tensor = Any  # torch.Tensor: this module is read by type checkers and programs that have no torch

Resolve = Callable[[str, Tensor, bool], TensorSource]

_END = object()
_NAMED_PROBLEMS = 10  # names listed in one message


# -- dtypes -----------------------------------------------------------------------------------------------------------


def to_torch_dtype(name: str) -> Any:
    """The torch dtype of this name. Raises IncompatibleStateError when the name or the installed torch lacks it."""
    found = getattr(import_torch(), dtype_of(name).name, None)
    if found is None:
        raise IncompatibleStateError(f"the installed torch {import_torch().__version__} has no dtype {name}; upgrade torch")
    return found


def from_torch_dtype(dtype: Any) -> str:
    """The name of a torch dtype, such as `"bfloat16"`. Raises IncompatibleStateError for those that can't be stored."""
    return dtype_of(str(dtype).removeprefix("torch.")).name


# -- out of torch -----------------------------------------------------------------------------------------------------


class TorchSource:
    """The logical bytes of a strided tensor on any device. See `TensorSource`.

    Shares the tensor's memory and holds a reference to it. `name` is used in messages only.
    """

    __slots__ = ("_name", "_tensor", "_words", "dtype", "frozen", "shape")

    def __init__(self, tensor: Tensor, *, name: str = "tensor", frozen: bool = False) -> None:
        self._tensor = tensor.detach()
        self._name = name
        self._words = dtype_of(from_torch_dtype(tensor.dtype))
        self.dtype = self._words.name
        self.shape = tuple(int(size) for size in tensor.shape)
        self.frozen = frozen

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self._words.itemsize

    def read(self, start: int, stop: int) -> Array:
        """Bytes of elements [start, stop): a read-only view of live memory where that is contiguous, else a fresh copy.

        Raises IncompatibleStateError when the tensor's memory was given up since the source was made.
        """
        tensor = self._tensor
        if check_range(start, stop, self.shape, self._name) == 0:
            return np.empty(0, np.uint8)
        if not has_memory(tensor):
            raise IncompatibleStateError(f"the memory of {self._name} was freed while it was read; commit it before that")
        lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy:
            size = self._words.itemsize
            return _memory(tensor, readonly=True)[start * size : stop * size]
        data = _gather(*_integers(tensor, self._words, start, stop))
        if lazy:
            self._resolve(data.view(f"<u{self._words.word}"))
        return data

    def _resolve(self, words: Any) -> None:
        sign = words.dtype.type(1 << (8 * words.itemsize - 1))
        if self._tensor.is_conj():
            words[1::2] ^= sign  # imaginary parts
        if self._tensor.is_neg():
            words ^= sign


class CastSource:
    """A floating tensor in another floating dtype, converted range by range. See `TensorSource`."""

    __slots__ = ("_source", "dtype", "frozen", "shape")

    def __init__(self, source: TensorSource, dtype: str) -> None:
        self._source = source
        self.dtype = dtype
        self.shape = source.shape
        self.frozen = source.frozen

    @property
    def nbytes(self) -> int:
        """Bytes of all elements after the cast."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def read(self, start: int, stop: int) -> Array:
        """Bytes of elements [start, stop) after the cast: a fresh copy."""
        raw = tensor_from_bytes(self._source.dtype, (stop - start,), self._source.read(start, stop))
        return _memory(raw.to(to_torch_dtype(self.dtype)), readonly=False)


def flatten_state(source: Any, cast: Mapping[str, Any] | None = None, resolve: Resolve | None = None) -> FlatState:
    """Take a module or a nested state apart; the tensors of the result are sources. Reads no tensor bytes.

    A part with a method `state_dict` stands for that; parameters with `requires_grad=False` are marked frozen. A tensor
    subclass that flattens becomes `TensorParts`. Leaves are tied when they have the same non-empty storage, offset, dtype, shape
    and strides.

    Args:
        cast: see `cast_state`.
        resolve: makes the source of a tensor on the meta device, from its name, the tensor, and whether it is frozen.

    Raises IncompatibleStateError naming what can't be committed and the conversion to use.
    """
    torch = sys.modules.get("torch")  # while torch is not loaded, nothing in a state can be one of its tensors
    if torch is None:
        return flatten(source, lambda _: False, expand=state_of)
    thawed: set[Hashable] = set()
    frozen_parts: dict[int, Any] = {}  # inner tensors of frozen ones, by id; held here so that ids stay theirs

    def expand(value: Any, path: Path) -> Any:
        if not isinstance(value, torch.Tensor):
            return state_of(value, path)
        if not subclasses.flattens(value):
            return value
        parts = subclasses.parts_of(value, path)
        if is_frozen(value) or id(value) in frozen_parts:
            frozen_parts.update((id(part), part) for part in parts.values())
        return parts

    def key_of(tensor: Tensor) -> Hashable | None:
        key = tie_key(tensor)
        if not is_frozen(tensor) and id(tensor) not in frozen_parts:
            thawed.add(key)
        return key

    flat = flatten_tensors(source, "committed", key_of, expand, resolved=resolve is not None)
    paths: dict[int, Path] = {}
    for path, index in flat.leaves:
        paths.setdefault(index, path)
    sources: list[TensorSource] = []
    for index, tensor in enumerate(flat.tensors):
        frozen = tie_key(tensor) not in thawed
        if tensor.is_meta and resolve is not None:
            sources.append(resolve(path_name(paths[index]), tensor, frozen))
        else:
            sources.append(TorchSource(tensor, name=describe_path(paths[index]), frozen=frozen))
    state = FlatState(flat.tree, sources, flat.values, flat.leaves)
    return state if cast is None else cast_state(state, cast)


def flatten_tensors(
    value: Any,
    use: str,
    key_of: Callable[[Tensor], Hashable | None],
    expand: Callable[[Any, Path], Any],
    *,
    resolved: bool = False,
) -> FlatState:
    """`state.flatten` for torch tensors, which refuses all that have no plain memory in one message: "can't be {use}"."""
    torch = import_torch()
    problems: dict[int, str] = {}

    def key_of_sound(tensor: Tensor) -> Hashable | None:
        problem = why_not_stored(tensor, resolved=resolved)
        if problem is None:
            return key_of(tensor)
        problems[id(tensor)] = problem
        return None

    flat = flatten(value, lambda leaf: isinstance(leaf, torch.Tensor), key_of_sound, expand)
    if problems:
        lines = [
            f"{describe_path(path)} {problems[id(flat.tensors[i])]}" for path, i in flat.leaves if id(flat.tensors[i]) in problems
        ]
        more = f"\n... and {len(lines) - _NAMED_PROBLEMS} more" if len(lines) > _NAMED_PROBLEMS else ""
        named = "\n".join(lines[:_NAMED_PROBLEMS])
        raise IncompatibleStateError(
            f"{len(lines)} of {len(flat.leaves)} tensors can't be {use}:\n{named}{more}" if len(lines) > 1 else named
        )
    return flat


def cast_state(state: FlatState, cast: Mapping[str, Any]) -> FlatState:
    """The same state with some floating tensors in another floating dtype.

    `cast` maps patterns of leaf names (`*`, `?`, `[…]`, case matters, first match wins) to a torch dtype or its name. Raises
    InvalidInputError for dtypes that are not floating, and when the names of one tied tensor are cast differently.
    """
    targets = _cast_targets(cast)
    first: dict[int, tuple[Path, str | None]] = {}
    for (path, index), name in zip(state.leaves, leaf_names(state.tree), strict=True):
        target = _cast_target(targets, name, state.tensors[index].dtype)
        before, chosen = first.setdefault(index, (path, target))
        if chosen != target:
            raise InvalidInputError(
                f"{describe_path(before)} and {describe_path(path)} are one tied tensor, but `cast` gives them "
                f"{chosen or 'no cast'} and {target or 'no cast'}; give both the same"
            )
    sources = [_cast_source(source, first[i][1]) for i, source in enumerate(state.tensors)]
    return FlatState(state.tree, sources, state.values, state.leaves)


def iterable_sources(
    iterable: Iterable[tuple[str, Tensor]], cast: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, TensorSource]]:
    """(name, source) for every (name, tensor) pair; holds no tensor while the next pair is produced.

    Raises IncompatibleStateError for duplicate names and tensors that can't be committed, InvalidInputError for what is no such
    pair.
    """
    targets = _cast_targets(cast or {})
    torch = import_torch()
    seen: set[str] = set()
    pairs = iter(iterable)
    while (pair := next(pairs, _END)) is not _END:
        if not isinstance(pair, tuple) or len(pair) != 2 or type(pair[0]) is not str:
            raise InvalidInputError(f"expected (name, tensor) pairs after {len(seen)} of them, found a {type(pair).__name__}")
        name, tensor = pair
        if name in seen:
            raise IncompatibleStateError(f"the name {show(name)} comes twice; give every tensor a name of its own")
        seen.add(name)
        flat = flatten({name: tensor}, lambda value: isinstance(value, torch.Tensor))  # refuses arrays and malformed names
        problem = _why_not_streamed(tensor) if flat.tensors else "is no tensor; commit plain values as parts of a state"
        if problem is not None:
            raise IncompatibleStateError(f"{show(name)} {problem}")
        source = TorchSource(tensor, name=show(name), frozen=is_frozen(tensor))
        item = (name, _cast_source(source, _cast_target(targets, name, source.dtype)))
        del pair, tensor, flat, source
        yield item
        del item


def _why_not_streamed(tensor: Tensor) -> str | None:
    if subclasses.flattens(tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"is a {kind}, which is stored as its parts; commit it as a part of a state, `{{name: tensor}}`"
    return why_not_stored(tensor)


def module_files(source: Any) -> dict[str, bytes]:
    """What a transformers model keeps beside its weights: config.json, and generation_config.json when it generates.

    The texts are those of `save_pretrained`. Empty for everything that is not such a model.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, torch.nn.Module):
        return {}
    while isinstance(inner := getattr(source, "_orig_mod", None) or _wrapped(source), torch.nn.Module):
        source = inner
    to_json = getattr(getattr(source, "config", None), "to_json_string", None)
    if to_json is None:
        return {}
    document = json.loads(to_json())
    document["architectures"] = [type(source).__name__.removeprefix("FSDP")]
    if isinstance(dtype := getattr(source, "dtype", None), torch.dtype):
        document["dtype"] = str(dtype).removeprefix("torch.")
    files = {"config.json": (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()}
    generation = getattr(source, "generation_config", None)
    if generation is not None and source.can_generate():
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def _wrapped(module: Any) -> Any:
    """The model inside DDP and similar wrappers, which have no config of their own."""
    return None if hasattr(module, "config") else getattr(module, "module", None)


# -- into torch -------------------------------------------------------------------------------------------------------


class TorchSink:
    """The memory of a tensor, to be written in ranges of bytes. See `TensorSink`.

    Raises IncompatibleStateError for tensors that can't be written element by element, such as expanded ones.
    """

    __slots__ = ("_name", "_tensor", "_words", "dtype", "shape")

    def __init__(self, tensor: Tensor, *, name: str = "tensor") -> None:
        problem = why_not_stored(tensor) or why_not_written(tensor)
        if problem is not None:
            raise IncompatibleStateError(f"{name} {problem}")
        self._tensor = tensor.detach()
        self._name = name
        self._words = dtype_of(from_torch_dtype(tensor.dtype))
        self.dtype = self._words.name
        self.shape = tuple(int(size) for size in tensor.shape)
        if not tensor.is_inference():  # a graph that saved the old values must notice
            import_torch().autograd.graph.increment_version(tensor)

    def view(self, start: int, stop: int) -> Array | None:
        """Writable uint8 view of elements [start, stop), None unless the tensor is contiguous and on the CPU."""
        check_range(start, stop, self.shape, self._name)
        if self._tensor.device.type != "cpu" or not self._tensor.is_contiguous():
            return None
        size = self._words.itemsize
        return _memory(self._tensor, readonly=False)[start * size : stop * size]

    def write(self, start: int, stop: int, data: Array) -> None:
        """Copy the bytes of elements [start, stop) into the tensor, whatever its strides or device."""
        count = check_range(start, stop, self.shape, self._name)
        if data.nbytes != count * self._words.itemsize:
            raise InvalidInputError(
                f"{self._name}: elements [{start}, {stop}) are {count * self._words.itemsize} bytes, got {data.nbytes}"
            )
        view = self.view(start, stop)
        if view is not None:
            view[:] = data
        elif count:
            integers, first, last = _integers(self._tensor, self._words, start, stop)
            filled = import_torch().empty(last - first, dtype=integers.dtype)
            _memory(filled, readonly=False)[:] = data
            offset = 0
            for block in _blocks(integers, first, last):
                block.copy_(filled[offset : offset + block.numel()].view(block.shape))
                offset += block.numel()


class CastSink:
    """Memory of one floating dtype that takes the bytes of another, converted range by range. See `TensorSink`."""

    __slots__ = ("_sink", "dtype", "shape")

    def __init__(self, sink: TensorSink, dtype: str) -> None:
        self._sink = sink
        self.dtype = dtype
        self.shape = sink.shape

    def view(self, start: int, stop: int) -> None:
        """None: what comes in is converted by `write`."""
        check_range(start, stop, self.shape)

    def write(self, start: int, stop: int, data: Array) -> None:
        """Convert the bytes of elements [start, stop) and put them into place."""
        raw = tensor_from_bytes(self.dtype, (stop - start,), data)
        self._sink.write(start, stop, _memory(raw.to(to_torch_dtype(self._sink.dtype)), readonly=True))


def empty_tensor(dtype: str, shape: Sequence[int], device: Any = "cpu") -> Tensor:
    """An uninitialised contiguous tensor of this dtype name and shape."""
    torch = import_torch()
    kind = to_torch_dtype(dtype)
    if dtype == "complex32":  # making one directly warns that most operators lack it
        return torch.empty(tuple(shape), dtype=torch.int32, device=device).view(kind)
    return torch.empty(tuple(shape), dtype=kind, device=device)


def empty_memory(dtype: str, shape: Sequence[int]) -> tuple[Tensor, Array]:
    """`empty_tensor` on the CPU, and all its bytes as writable 1-d uint8."""
    tensor = empty_tensor(dtype, shape)
    return tensor, _memory(tensor, readonly=False)


def tensor_from_bytes(dtype: str, shape: Sequence[int], data: bytes | Array, device: Any = "cpu") -> Tensor:
    """A tensor with memory of its own that holds these bytes. Raises InvalidInputError when their number is wrong."""
    tensor = empty_tensor(dtype, shape, device)
    TorchSink(tensor).write(0, math.prod(shape), np.frombuffer(data, np.uint8))
    return tensor


# -- casts ------------------------------------------------------------------------------------------------------------


def can_cast(name: str) -> bool:
    """Whether every element of this dtype is one real floating number."""
    return bool(to_torch_dtype(name).is_floating_point) and name != PACKED_FLOAT4


def _cast_targets(cast: Mapping[str, Any]) -> list[tuple[str, str]]:
    targets = []
    for pattern, dtype in cast.items():
        if not isinstance(dtype, (str, import_torch().dtype)):
            raise InvalidInputError(f"cast[{pattern!r}] is {dtype!r}; expected a torch dtype, such as torch.bfloat16")
        target = from_torch_dtype(dtype)
        if not can_cast(target):
            raise InvalidInputError(f"cast[{pattern!r}] is {target}; expected a floating dtype, such as torch.bfloat16")
        targets.append((pattern, target))
    return targets


def _cast_target(targets: list[tuple[str, str]], name: str, dtype: str) -> str | None:
    """The dtype that a leaf is cast to, None when it stays as it is."""
    target = next((target for pattern, target in targets if fnmatch.fnmatchcase(name, pattern)), None)
    return target if target != dtype and can_cast(dtype) else None


def _cast_source(source: TensorSource, target: str | None) -> TensorSource:
    return source if target is None else CastSource(source, target)


# -- memory -----------------------------------------------------------------------------------------------------------


class _Memory:
    """Lends the memory of a tensor to NumPy. `Tensor.numpy()` would pin the storage to its size for ever."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, tensor: Tensor, readonly: bool) -> None:
        self._owner = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.numel() * tensor.dtype.itemsize,),
            "data": (tensor.data_ptr(), readonly),
        }


def _memory(tensor: Tensor, *, readonly: bool) -> Array:
    """All bytes of a contiguous CPU tensor: 1-d uint8, sharing and keeping alive its memory."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(tensor, readonly))


def _integers(tensor: Tensor, dtype: DType, start: int, stop: int) -> tuple[Tensor, int, int]:
    """The same memory as integers of the same width, with lazy bits ignored, and the range [start, stop) in those."""
    torch = import_torch()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[dtype.itemsize]
    contiguous = tensor.is_contiguous()
    shape = (tensor.numel(),) if contiguous else tuple(tensor.shape)
    strides = (1,) if contiguous else tensor.stride()
    offset = tensor.storage_offset()
    if dtype.itemsize == 16:  # no integer is that wide: two of them
        shape, strides = (*shape, 2), (*(2 * step for step in strides), 1)
        offset, start, stop = 2 * offset, 2 * start, 2 * stop
    view = torch.empty(0, dtype=kind, device=tensor.device).set_(tensor.untyped_storage(), offset, shape, strides)
    return view, start, stop


def _blocks(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """The elements [start, stop) in flat order, as at most two rectangular views per dimension."""
    if start == 0 and stop == tensor.numel():
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        yield from _blocks(tensor[first], head, tail if first == last else row)
        first += 1
    if first < last:
        yield tensor[first:last]
    if tail and first <= last:
        yield from _blocks(tensor[last], 0, tail)


def _gather(tensor: Tensor, start: int, stop: int) -> Array:
    """A fresh copy of the elements [start, stop) in flat order, as bytes."""
    out = import_torch().empty(stop - start, dtype=tensor.dtype)
    offset = 0
    for block in _blocks(tensor, start, stop):
        out[offset : offset + block.numel()].view(block.shape).copy_(block)
        offset += block.numel()
    return _memory(out, readonly=False)
