"""Bytes of a version into buffers: whole tensors, ranges and regions, in bounded memory.

`plan_tensor` and `plan_range` say which chunks are read and where their bytes go; `run` reads them on several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from deltastore.chunk_reader import Array, ChunkReader, ReadJob
from deltastore.manifests import PackRef
from deltastore.options import CHUNK_ELEMENTS
from deltastore.regions import Region
from deltastore.state import TensorSink
from deltastore.versions import Version


def plan_tensor(version: Version, tensor: int, sink: TensorSink, label: str | None = None) -> Iterator[ReadJob]:
    """One job per chunk of a whole tensor: straight into the sink's memory where that is contiguous."""
    info = version.tensors[tensor]
    label = label or version.label(tensor)
    for index, row in enumerate(version.rows(tensor)):
        start = index * CHUNK_ELEMENTS
        stop = min(start + CHUNK_ELEMENTS, info.elements)
        out = sink.view(start, stop)
        deliver = None if out is not None else _writer(sink, start, stop)
        yield ReadJob(row, info.chunk_length(index), f"{label}, chunk {index}", out, deliver)


def _writer(sink: TensorSink, start: int, stop: int) -> Callable[[Array], None]:
    return lambda data: sink.write(start, stop, data)


def plan_range(version: Version, tensor: int, start: int, stop: int, out: Array) -> Iterator[ReadJob]:
    """Jobs for the storage elements [start, stop) of a tensor into `out`; touches only the chunks they lie in."""
    if stop <= start:
        return
    info = version.tensors[tensor]
    label = version.label(tensor)
    itemsize = info.dtype.itemsize
    rows = version.rows(tensor)
    for index in range(start // CHUNK_ELEMENTS, -(-stop // CHUNK_ELEMENTS)):
        first = index * CHUNK_ELEMENTS
        last = min(first + CHUNK_ELEMENTS, info.elements)
        begin, end = max(start, first), min(stop, last)
        target = out[(begin - start) * itemsize : (end - start) * itemsize]
        whole = begin == first and end == last
        part = slice((begin - first) * itemsize, (end - first) * itemsize)
        yield ReadJob(
            rows[index],
            info.chunk_length(index),
            f"{label}, chunk {index}",
            target if whole else None,
            None if whole else _copier(target, part),
        )


def _copier(target: Array, part: slice) -> Callable[[Array], None]:
    def deliver(data: Array) -> None:
        target[:] = data[part]

    return deliver


def run(
    reader: ChunkReader,
    jobs: Iterable[ReadJob],
    done: Callable[[int], None] | None = None,
    total: int | None = None,
    packs: Iterable[PackRef] = (),
) -> None:
    """Read what was planned. See `ChunkReader.read_many`."""
    reader.read_many(jobs, done, total, packs)


def mostly_wanted(version: Version, total: int) -> Sequence[PackRef]:
    """The packs of a version, when `total` of its raw bytes are about to be read and that is most of them; else none."""
    return version.packs() if 2 * total > sum(info.nbytes for info in version.tensors) else ()


def read_region(version: Version, reader: ChunkReader, tensor: int, region: Region, out: Array) -> None:
    """Read a region of a tensor into `out`, the bytes of its elements in row-major order."""
    flat = region.flat_range()
    if flat is not None:
        run(reader, plan_range(version, tensor, *flat, out))
        return
    itemsize = version.tensors[tensor].dtype.itemsize
    filled = 0
    for block in region.blocks():
        start, stop, shape, index = block.surroundings()
        around = np.empty((stop - start) * itemsize, np.uint8)
        run(reader, plan_range(version, tensor, start, stop, around))
        chosen = around.reshape(*shape, itemsize)[index]
        size = chosen.size
        out[filled : filled + size] = chosen.reshape(-1)
        filled += size


def read_bytes(version: Version, reader: ChunkReader, tensor: int) -> bytes:
    """All bytes of a stored byte tensor, such as a large file."""
    info = version.tensors[tensor]
    out = np.empty(info.nbytes, np.uint8)
    run(reader, plan_range(version, tensor, 0, info.elements, out))
    return out.tobytes()
