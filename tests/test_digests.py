"""Digests against their definitions, recomputed here with the hash functions alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import blake3
import numpy as np
import pytest

from deltastore import digests
from deltastore.errors import InvalidInputError

EXAMPLES = json.loads((Path(__file__).parents[1] / "schemas/examples/digests.json").read_text(encoding="utf-8"))


def content(nbytes: int) -> bytes:
    """The bytes that the examples are about: byte i is i modulo 251."""
    return bytes(i % 251 for i in range(nbytes))


@pytest.mark.parametrize("example", EXAMPLES["chunks"], ids=lambda example: str(example["nbytes"]))
def test_chunk_examples(example: dict) -> None:
    data = content(example["nbytes"])
    assert blake3.blake3(data).hexdigest() == example["blake3"]
    assert digests.chunk_digest(data).hex() == example["blake3"]
    assert digests.fast_digest(data).hex() == example["xxh3_128"]
    array = np.frombuffer(data, np.uint8)
    assert digests.chunk_digest(array).hex() == example["blake3"]
    assert digests.fast_digest(memoryview(data)).hex() == example["xxh3_128"]


def test_xxh3_known_answer() -> None:
    # of the empty input with seed 0, from the xxHash specification; canonical form is big-endian
    assert digests.fast_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("example", EXAMPLES["tensors"], ids=lambda example: example["dtype"])
def test_tensor_examples(example: dict) -> None:
    rows = b"".join(bytes.fromhex(text) for text in example["chunk_digests"])
    shape = ",".join(map(str, example["shape"]))
    text = f'deltastore tensor 1\n{{"dtype":"{example["dtype"]}","shape":[{shape}]}}\n'
    assert hashlib.sha256(text.encode() + rows).hexdigest() == example["digest"]
    assert digests.tensor_digest(example["dtype"], example["shape"], rows).hex() == example["digest"]


def test_tree_example() -> None:
    example = EXAMPLES["tree"]
    text = json.dumps(example["document"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(b"deltastore tree 1\n" + text.encode()).hexdigest() == example["digest"]
    assert digests.tree_digest(example["document"]) == example["digest"]


def test_commit_example() -> None:
    example = EXAMPLES["commit"]
    text = json.dumps(example["identity"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(b"deltastore commit 1\n" + text.encode()).hexdigest() == example["id"]
    assert digests.commit_id(example["identity"]) == example["id"]
    assert digests.commit_id(dict(reversed(example["identity"].items()))) == example["id"]
    assert digests.commit_id({**example["identity"], "message": "other"}) != example["id"]


def test_shape_and_dtype_are_part_of_a_tensor_digest() -> None:
    row = bytes(32)
    found = {
        digests.tensor_digest("float32", (4,), row),
        digests.tensor_digest("int32", (4,), row),
        digests.tensor_digest("float32", (2, 2), row),
        digests.tensor_digest("float32", (), row),
        digests.tensor_digest("float32", (4,), row * 2),
    }
    assert len(found) == 5


def test_documents_must_be_canonical() -> None:
    with pytest.raises(InvalidInputError, match="float"):
        digests.commit_id({"time": 1.5})
