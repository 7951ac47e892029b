"""Plain values as JSON that has exactly one spelling, so that digests of documents can be compared across machines.

    None, bool, str     null, true, "text"          bytes          {"b": "<base64>"}
    int                 {"i": "<decimal>"}          dict           {"d": [[key, value], ...]} in order
    float               {"f": "<16 hex digits>"}    OrderedDict    {"o": [[key, value], ...]}
    list                [...]                       tuple          {"t": [...]}

A float is its IEEE-754 binary64 pattern, big-endian, so NaN payloads and -0.0 survive. Text is not normalised. A
document is written by `dumps`: UTF-8, object keys sorted by code point, no white space.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any

from deltastore.errors import FormatError, InvalidInputError

MAX_DEPTH = 64  # levels of plain containers; each takes three levels of JSON, and common parsers stop at about 200
_MAX_JSON_DEPTH = 3 * MAX_DEPTH + 16
_DECIMAL = re.compile(r"0|-?[1-9][0-9]*")
_HEX = re.compile(r"[0-9a-f]{16}")


def encode(value: Any, name: str = "value") -> bytes:
    """The canonical bytes of a plain value. See `pack` for what is allowed and what is raised."""
    return dumps(pack(value, name))


def pack(value: Any, name: str = "value") -> Any:
    """A plain value as a JSON value.

    Only exact builtin types and OrderedDict are taken; dict keys are scalars. `name` is how messages call the value.
    Raises InvalidInputError, with the path, for other types, lone surrogates, cycles and more than 64 levels.
    """
    return _pack(value, name, 0)


def _pack(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if kind not in (dict, OrderedDict, list, tuple):
        return pack_scalar(value, path)
    if depth >= MAX_DEPTH:
        raise InvalidInputError(f"{path} is nested deeper than {MAX_DEPTH} levels, or contains itself; flatten it")
    if kind is list:
        return [_pack(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"t": [_pack(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]}
    pairs = []
    for key, item in value.items():
        where = f"{path}[{show(key)}]"
        pairs.append([pack_scalar(key, f"the key of {where}"), _pack(item, where, depth + 1)])
    return {"d" if kind is dict else "o": pairs}


def pack_scalar(value: Any, path: str) -> Any:
    """None, bool, int, float, str or bytes as a JSON value. Raises InvalidInputError for anything else."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        _check_text(value, path)
        return value
    if kind is int:
        try:
            return {"i": str(value)}
        except ValueError:  # Python's limit for decimal conversion
            raise InvalidInputError(f"{path} is an integer of {value.bit_length()} bits; store it with `int.to_bytes`") from None
    if kind is float:
        return {"f": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"b": base64.b64encode(value).decode("ascii")}
    raise InvalidInputError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}; expected None, bool, int, float, str, bytes, or a plain "
        "dict, OrderedDict, list or tuple of them"
    )


def unpack(node: Any) -> Any:
    """The plain value behind a JSON value made by `pack`. Raises FormatError for every other JSON value."""
    return _unpack(node, 0)


def _unpack(node: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise FormatError(f"a packed value is nested deeper than {MAX_DEPTH} levels")
    if type(node) is list:
        return [_unpack(item, depth + 1) for item in node]
    if type(node) is dict and len(node) == 1:
        ((tag, content),) = node.items()
        if tag == "t" and type(content) is list:
            return tuple(_unpack(item, depth + 1) for item in content)
        if tag in ("d", "o") and type(content) is list:
            mapping: dict[Any, Any] = {} if tag == "d" else OrderedDict()
            for pair in content:
                if type(pair) is not list or len(pair) != 2:
                    raise FormatError(f"expected a [key, value] pair in a packed dict, found {show(pair)}")
                key = unpack_scalar(pair[0])
                if key in mapping:
                    raise FormatError(f"a packed dict has the key {show(key)} twice")
                mapping[key] = _unpack(pair[1], depth + 1)
            return mapping
    return unpack_scalar(node)


def unpack_scalar(node: Any) -> Any:
    """The scalar behind a JSON value made by `pack_scalar`. Raises FormatError."""
    if node is None or type(node) is bool:
        return node
    if type(node) is str:
        try:
            _check_text(node, "packed text")
        except InvalidInputError as error:
            raise FormatError(str(error)) from None
        return node
    if type(node) is dict and len(node) == 1:
        ((tag, text),) = node.items()
        if type(text) is str:
            if tag == "i" and _DECIMAL.fullmatch(text):
                try:
                    return int(text)
                except ValueError:
                    raise FormatError(f"a packed integer has {len(text)} digits, more than can be read") from None
            if tag == "f" and _HEX.fullmatch(text):
                return struct.unpack(">d", bytes.fromhex(text))[0]
            if tag == "b":
                return _unpack_bytes(text)
    raise FormatError(f"expected a packed plain value, found {show(node)}")


def _unpack_bytes(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = None
    if data is None or base64.b64encode(data).decode("ascii") != text:  # stray bits in the last letter are a second spelling
        raise FormatError(f"packed bytes are not canonical base64: {show(text)}")
    return data


def utc_now() -> str:
    """The time of this machine as documents have it: UTC, microseconds, `Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def dumps(document: Any) -> bytes:
    """The canonical JSON bytes of a document of None, bool, int, str, lists and dicts with text keys.

    Raises InvalidInputError, with the path, for floats (pack them), other types, lone surrogates and very deep nesting.
    """
    _check_json(document, "document", 0)
    return json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _check_json(value: Any, path: str, depth: int) -> None:
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return
    if kind is str:
        _check_text(value, path)
        return
    if depth >= _MAX_JSON_DEPTH:
        raise InvalidInputError(f"a document is nested deeper than {_MAX_JSON_DEPTH} levels at {path[:80]}...")
    if kind is list:
        for i, item in enumerate(value):
            _check_json(item, f"{path}[{i}]", depth + 1)
    elif kind is dict:
        for key, item in value.items():
            where = f"{path}[{show(key)}]"
            if type(key) is not str:
                raise InvalidInputError(f"{where}: JSON object keys must be text")
            _check_text(key, f"the key of {where}")
            _check_json(item, where, depth + 1)
    else:
        raise InvalidInputError(f"{path} is a {kind.__qualname__}; canonical JSON takes null, bool, int, str, list and dict")


def _check_text(text: str, path: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{path} has a lone surrogate at position {error.start}: {show(text)}; store it as bytes with "
            "`text.encode('utf-8', 'surrogatepass')`"
        ) from None


def show(value: Any, limit: int = 80) -> str:
    """A value for a message, cut to `limit` characters."""
    if type(value) in (str, bytes) and len(value) > limit:
        value = value[:limit]
        return f"{value!r}..."
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
