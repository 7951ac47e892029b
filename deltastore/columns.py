"""Columns in a safetensors file: the framing that packs and manifests share.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian length of a JSON header, the header, then the
tensors back to back). Here the columns come first, in a fixed order, and at most one byte tensor named `payload` closes
the file. What stands before the payload is the *head*.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from deltastore.buffers import as_memory
from deltastore.errors import FormatError, UnsupportedFormatError
from deltastore.layout import shorten

if TYPE_CHECKING:
    from deltastore.buffers import Bytes

MAX_HEADER_BYTES = 32 << 10  # of JSON; known before anything is parsed
PAYLOAD = "payload"

_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8")}

Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column: its safetensors dtype code, and its width (1: shape [rows], else [rows, width])."""

    name: str
    dtype: str
    width: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A parsed head. `columns` are views of the bytes given to `parse_head`; `length` counts the head's bytes."""

    metadata: dict[str, str]
    columns: dict[str, Column]
    length: int
    payload: int  # bytes of the payload tensor, 0 when the file has none


def build_head(
    metadata: Mapping[str, str],
    specs: Sequence[ColumnSpec],
    columns: Mapping[str, Column],
    payload: int | None = None,
) -> bytes:
    """The bytes before the payload; equal input gives equal bytes.

    Args:
        specs: the columns in file order.
        columns: their values, converted to the dtype of the spec.
        payload: length in bytes of the payload tensor; None for a file without one.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    bodies = []
    position = 0
    for spec in specs:
        array = np.ascontiguousarray(columns[spec.name], _DTYPES[spec.dtype])
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        bodies.append(array.tobytes())
        position += array.nbytes
    if payload is not None:
        header[PAYLOAD] = {"dtype": "U8", "shape": [payload], "data_offsets": [position, position + payload]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # keeps the columns aligned in memory
    return b"".join([len(text).to_bytes(8, "little"), text, *bodies])


def head_length(first_bytes: Bytes) -> int:
    """How many bytes make the head, as far as the first bytes of the file show.

    When the result is larger than what was given, the head may be longer still: read that many bytes and ask again.
    64 KiB always give the final answer.

    Raises:
        FormatError: this is no file of this kind.
    """
    data = as_memory(first_bytes)
    start = _header_end(data, "this file")
    if start > len(data):
        return start
    header = _parse_header(data[8:start], "this file")
    ends = [start]
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = _offsets(entry, name, "this file")
            ends.append(start + (begin if name == PAYLOAD else end))
    return max(ends)


def parse_head(data: Bytes, specs: Sequence[ColumnSpec], kind: str, what: str, payload: bool) -> Head:
    """Parse and validate exactly the bytes of a head.

    Args:
        kind: what `__metadata__.format` must say, without its number ("deltastore pack").
        what: names the object in messages.
        payload: whether the file has a payload tensor.

    Raises:
        UnsupportedFormatError: the kind is right, its number is not 1.
        FormatError: anything else that is not as it should be.
    """
    memory = as_memory(data)
    start = _header_end(memory, what)
    if start > len(memory):
        _refuse(what, f"{len(memory)} bytes, expected at least {start}")
    header = _parse_header(memory[8:start], what)
    metadata = _metadata(header.pop("__metadata__", None), kind, what)
    names = [spec.name for spec in specs] + [PAYLOAD] * payload
    if sorted(header) != sorted(names):
        _refuse(what, f"tensors {shorten(', '.join(sorted(header)))}, expected {', '.join(sorted(names))}")

    body = np.frombuffer(memory, np.uint8)[start:]
    columns: dict[str, Column] = {}
    position = 0
    for spec in specs:
        dtype = _DTYPES[spec.dtype]
        rows, nbytes = _shape(header[spec.name], spec, what)
        if _offsets(header[spec.name], spec.name, what) != (position, position + nbytes):
            _refuse(what, f"column {spec.name!r} does not stand at bytes {position} to {position + nbytes}")
        if position + nbytes > len(body):
            _refuse(what, f"{len(memory)} bytes end within column {spec.name!r}")
        column = body[position : position + nbytes].view(dtype)
        columns[spec.name] = column if spec.width == 1 else column.reshape(rows, spec.width)
        position += nbytes
    if position != len(body):
        _refuse(what, f"{len(memory)} bytes, expected {start + position}")
    payload_bytes = 0
    if payload:
        _, payload_bytes = _shape(header[PAYLOAD], ColumnSpec(PAYLOAD, "U8"), what)
        if _offsets(header[PAYLOAD], PAYLOAD, what) != (position, position + payload_bytes):
            _refuse(what, "its payload does not follow its columns")
    return Head(metadata, columns, start + position, payload_bytes)


def _header_end(data: memoryview, what: str) -> int:
    if data.ndim != 1 or data.itemsize != 1:
        _refuse(what, "not given as one-dimensional bytes")
    if len(data) < 8:
        return 8
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        _refuse(what, f"a safetensors header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
    return 8 + length


def _parse_header(text: memoryview, what: str) -> dict[str, Any]:
    try:
        header = json.loads(str(text, "utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: its safetensors header is not JSON ({error}); run `deltastore verify`") from error
    if not isinstance(header, dict):
        _refuse(what, "its safetensors header is not a JSON object")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _metadata(value: object, kind: str, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        _refuse(what, "no __metadata__ of texts")
    found = value.get("format", "")
    if found != f"{kind} 1":
        if found.startswith(f"{kind} "):
            raise UnsupportedFormatError(f"{what}: format {shorten(found)}, this version reads '{kind} 1'; upgrade deltastore")
        _refuse(what, f"format {shorten(found)}, expected '{kind} 1'")
    return value


def _shape(entry: object, spec: ColumnSpec, what: str) -> tuple[int, int]:
    """Rows and bytes of a column."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(what, f"tensor {spec.name!r} has not exactly the keys dtype, shape and data_offsets")
    shape = entry["shape"]
    well_formed = isinstance(shape, list) and len(shape) == (1 if spec.width == 1 else 2) and _is_size(shape[0])
    if entry["dtype"] != spec.dtype or not well_formed or shape[1:] not in ([], [spec.width]):
        expected = "[rows]" if spec.width == 1 else f"[rows, {spec.width}]"
        _refuse(what, f"tensor {spec.name!r} is not {spec.dtype} of shape {expected}")
    return shape[0], shape[0] * spec.width * _DTYPES[spec.dtype].itemsize


def _offsets(entry: object, name: str, what: str) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        _refuse(what, f"tensor {shorten(name)} has no data_offsets")
    return offsets[0], offsets[1]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _refuse(what: str, found: str) -> NoReturn:
    raise FormatError(f"{what} is malformed: {found}; run `deltastore verify` to see what it breaks")
