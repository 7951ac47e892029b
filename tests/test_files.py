"""Safetensors files and checkpoint folders, against the real safetensors and transformers libraries."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from deltastore.checkpoint_writer import CheckpointWriter, plan_shards
from deltastore.dtypes import DTYPES, dtype_of
from deltastore.errors import (
    AlreadyExistsError,
    FormatError,
    IncompatibleStateError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from deltastore.files import open_checkpoint, open_safetensors
from deltastore.sources import checkpoint_state
from deltastore.tensors import cast_state, flatten_state, tensor_from_bytes

ROOT = Path(__file__).parents[1]
FILE_DTYPES = [dtype.name for dtype in DTYPES if dtype.safetensors is not None]


def random_tensor(dtype: str, *shape: int) -> torch.Tensor:
    count = math.prod(shape) * dtype_of(dtype).itemsize
    data = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    return tensor_from_bytes(dtype, shape, data & 1 if dtype == "bool" else data)


def whole(source: Any) -> bytes:
    return bytes(source.read(0, math.prod(source.shape)))


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> list[Path]:
    flat = flatten_state(tensors)
    entries = [(path[0], flat.tensors[i].dtype, flat.tensors[i].shape) for path, i in flat.leaves]
    with CheckpointWriter(folder, entries, **options) as writer:
        for path, i in flat.leaves:
            writer.sink(path[0]).write(0, math.prod(flat.tensors[i].shape), np.frombuffer(whole(flat.tensors[i]), np.uint8))
        return writer.finish()


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_tree_and_bytes_of_the_same_torch_dict(tmp_path: Path) -> None:
    tensors = {f"layer.{name}": random_tensor(name, 3, 4) for name in FILE_DTYPES}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "größe/..": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "note": "é"})
    loaded = load_file(tmp_path / "model.safetensors")
    opened = open_safetensors(tmp_path / "model.safetensors")
    assert opened.metadata == {"format": "pt", "note": "é"}
    expected = flatten_state(loaded)
    for checkpoint in (open_checkpoint(tmp_path), open_checkpoint(tmp_path / "model.safetensors")):
        assert checkpoint.metadata == opened.metadata
        assert checkpoint.files == {}
        found = checkpoint_state(checkpoint)
        assert (found.tree, found.leaves, found.values) == (expected.tree, expected.leaves, expected.values)
        for file_source, torch_source in zip(found.tensors, expected.tensors, strict=True):
            assert (file_source.dtype, file_source.shape) == (torch_source.dtype, torch_source.shape)
            assert file_source.nbytes == torch_source.nbytes
            assert whole(file_source) == whole(torch_source)
            assert not file_source.frozen
    part = found.tensors[found.leaves[0][1]]
    size = dtype_of(part.dtype).itemsize
    assert bytes(part.read(2, 7)) == whole(part)[2 * size : 7 * size]
    with pytest.raises(InvalidInputError, match="12 elements"):
        opened.tensors["layer.bool"].read(0, 13)


def test_tensors_of_a_file_can_be_cast(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5, 7), "n": torch.arange(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = cast_state(checkpoint_state(open_checkpoint(tmp_path)), {"*": torch.bfloat16})
    sources = {path[0]: found.tensors[i] for path, i in found.leaves}
    assert sources["n"].dtype == "int64"
    expected = tensors["w"].bfloat16().view(torch.uint8).numpy().tobytes()
    assert whole(sources["w"]) == expected


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header"),
        (b"\0" * 7, "header"),
        (struct.pack("<Q", 0), "no JSON object"),
        (struct.pack("<Q", 2**63) + b"{}", "header"),
        (struct.pack("<Q", 100_000_001) + b"{}", "header"),
        (struct.pack("<Q", 3) + b"{}", "header"),
        (safetensors_bytes(b"{"), "no JSON"),
        (safetensors_bytes(b"[]"), "no JSON object"),
        (safetensors_bytes(b' {"a": 1}'), "no JSON object"),
        (safetensors_bytes(b'{"\xff": 1}'), "no JSON"),
        (safetensors_bytes(b'{"a":' + b"[" * 100_000), "no JSON"),
        (safetensors_bytes(b'{"a":' + b"9" * 5000 + b"}"), "no JSON"),
        (safetensors_bytes({"a": 1}), "'a': expected dtype"),
        (safetensors_bytes({"a": {**ENTRY, "dtype": 5}}, b"x" * 8), "'a': expected dtype"),
        (safetensors_bytes({"a": {**ENTRY, "shape": [True, 2]}}, b"x" * 8), "'a': shape"),
        (safetensors_bytes({"a": {**ENTRY, "shape": [-1, -2]}}, b"x" * 8), "'a': shape"),
        (safetensors_bytes({"a": {**ENTRY, "shape": [2.0]}}, b"x" * 8), "'a': shape"),
        (safetensors_bytes({"a": {**ENTRY, "shape": [1 << 63, 0]}}, b"x" * 8), "'a': shape"),
        (safetensors_bytes({"a": {**ENTRY, "shape": [1 << 62, 1 << 62]}}, b"x" * 8), "'a': expected"),
        (safetensors_bytes({"a": {**ENTRY, "data_offsets": [0]}}, b"x" * 8), "data_offsets"),
        (safetensors_bytes({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"x" * 8), "expected 8 bytes"),
        (safetensors_bytes({"a": {**ENTRY, "data_offsets": [0, 4]}}, b"x" * 8), "expected 8 bytes, the header gives it 4"),
        (safetensors_bytes({"a": ENTRY}, b"x" * 7), "'a' ends at byte 8 of 7: the file was cut short"),
        (safetensors_bytes({"a": ENTRY}, b"x" * 9), "end at byte 8, but there are 9"),
        (safetensors_bytes({"a": {**ENTRY, "data_offsets": [4, 12]}}, b"x" * 12), "gap"),
        (safetensors_bytes({"a": ENTRY, "b": ENTRY}, b"x" * 8), "overlap"),
        (safetensors_bytes({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"x"), "whole bytes"),
        (safetensors_bytes(b'{"a":{},"a":{}}'), "'a' comes twice"),
        (safetensors_bytes({"\ud800": ENTRY}, b"x" * 8), "no valid text"),
        (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
        (safetensors_bytes({"__metadata__": []}), "__metadata__"),
    ],
    ids=range(31),
)
def test_malformed_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=f"broken.safetensors: .*{message}"):
        open_safetensors(path)
    with pytest.raises(FormatError, match=r"broken\.safetensors"):
        open_checkpoint(tmp_path)


def test_dtypes_that_torch_lacks_are_named(tmp_path: Path) -> None:
    path = tmp_path / "six.safetensors"
    path.write_bytes(safetensors_bytes({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"xyz"))
    with pytest.raises(UnsupportedFormatError, match=r"six.safetensors: .*F6_E2M3"):
        open_safetensors(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(save({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int8)}, metadata={"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        opened = open_safetensors(path)
    except FormatError:
        return
    for source in opened.tensors.values():
        assert len(whole(source)) == source.nbytes


def test_a_file_that_is_cut_while_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    source = open_safetensors(path).tensors["a"]
    os.truncate(path, path.stat().st_size - 4)
    assert len(source.read(0, 999)) == 3996
    with pytest.raises(FormatError, match="cut short"):
        source.read(500, 1000)


def test_sources_read_from_several_threads(tmp_path: Path) -> None:
    tensor = torch.arange(100_000, dtype=torch.int32)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path).tensors["a"]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda i: bytes(source.read(i, i + 1000)), range(0, 100_000, 1000)))
    assert b"".join(parts) == tensor.numpy().tobytes()


def test_missing_and_empty_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"holds no \.safetensors file"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(NotFoundError, match="pipe"):  # and does not wait for a writer
        open_safetensors(tmp_path / "pipe.safetensors")


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_saved_by_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == list(index["weight_map"])
    assert sorted(checkpoint.files) == ["config.json", "generation_config.json"]
    state = model.state_dict()
    for name, source in checkpoint.tensors.items():
        assert whole(source) == state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    # and back: what our writer makes of it is a checkpoint for transformers
    tensors = {name: state[name] for name in checkpoint.tensors}
    write_checkpoint(tmp_path / "again", tensors, max_shard_bytes=8000)
    (tmp_path / "again/config.json").write_bytes((tmp_path / "config.json").read_bytes())
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "again")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    write_checkpoint(tmp_path, {"a": torch.ones(4), "b": torch.zeros(4)}, max_shard_bytes=16)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    return tmp_path


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors.*not there"):
        open_checkpoint(sharded)


def test_index_and_shards_must_agree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    for weight_map, message in [
        ({**good, "c": good["a"]}, "has no tensor 'c'"),
        ({"b": good["b"], "a": good["b"]}, "has no tensor 'a'"),
        ({"a": good["a"], "d": good["b"]}, "has no tensor 'd'"),
        ({**good, "a": "../a.safetensors"}, "'../a.safetensors' is no name"),
        ({**good, "a": "/etc/passwd"}, "'/etc/passwd' is no name"),
        ({**good, "a": "a\0.safetensors"}, "is no name"),
        ({**good, "a": 5}, "weight_map"),
        ([], "weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FormatError, match=message):
            open_checkpoint(sharded)
    save_file({"b": torch.zeros(4), "extra": torch.zeros(1)}, sharded / good["b"])
    index.write_text(json.dumps({"weight_map": good}))
    with pytest.raises(FormatError, match=r"has a tensor 'extra', which model\.safetensors\.index\.json does not name"):
        open_checkpoint(sharded)
    index.write_text("{")
    with pytest.raises(FormatError, match=r"index\.json"):
        open_checkpoint(sharded)


def test_ambiguous_folders_are_refused(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    save_file({"a": torch.ones(1)}, sharded / "model.safetensors")
    with pytest.raises(InvalidInputError, match="remove the stale one"):
        open_checkpoint(sharded)
    other = tmp_path_factory.mktemp("other")
    save_file({"a": torch.ones(1)}, other / "first.safetensors")
    assert list(open_checkpoint(other).tensors) == ["a"]
    save_file({"a": torch.ones(1)}, other / "second.safetensors")
    with pytest.raises(InvalidInputError, match=r"2 \.safetensors files and no model\.safetensors\.index\.json"):
        open_checkpoint(other)


def test_all_other_files_of_a_folder_are_listed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    for name in ("config.json", "sub/deep/vocab.txt", ".gitattributes", ".git/HEAD", ".cache/huggingface/x", "größe"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    save_file({"b": torch.ones(1)}, tmp_path / "adapter.safetensors")
    (tmp_path / "linked.json").symlink_to(tmp_path / "config.json")
    files = open_checkpoint(tmp_path).files
    assert sorted(files) == [
        ".gitattributes",
        "adapter.safetensors",
        "config.json",
        "größe",
        "linked.json",
        "sub/deep/vocab.txt",
    ]
    assert files["sub/deep/vocab.txt"].read_text() == "sub/deep/vocab.txt"


@pytest.mark.parametrize("kind", ["dangling", "folder link", "pipe", "name"])
def test_files_that_can_not_be_kept_are_named(tmp_path: Path, kind: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    odd = tmp_path / "odd.bin"
    if kind == "dangling":
        odd.symlink_to(tmp_path / "nowhere")
    elif kind == "folder link":
        odd.symlink_to(tmp_path)
    elif kind == "pipe":
        os.mkfifo(odd)
    else:
        (tmp_path / os.fsdecode(b"odd.bin\xff")).write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"odd\.bin"):
        open_checkpoint(tmp_path)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_written_files_load_in_the_real_library(tmp_path: Path) -> None:
    tensors = {f"{name}.odd": random_tensor(name, 3, 1) for name in FILE_DTYPES}
    tensors |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(2.5), 'q"\n\\é😀': torch.ones(2)}
    written = write_checkpoint(tmp_path / "out", tensors)
    assert written == [tmp_path / "out/model.safetensors"]
    loaded = load_file(written[0])
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(loaded[name].untyped_storage())[-tensor.nbytes or None :] == bytes(tensor.untyped_storage())
        assert loaded[name].data_ptr() % tensor.itemsize == 0
    opened = open_safetensors(written[0])
    assert opened.metadata == {"format": "pt"}
    assert list(opened.tensors) == list(tensors)  # in the order of the state
    assert checkpoint_state(open_checkpoint(tmp_path / "out")).tree == flatten_state(tensors).tree
    content = written[0].read_bytes()
    header_length = int.from_bytes(content[:8], "little")
    assert header_length % 8 == 0
    for place in plan_shards((n, str(t.dtype)[6:], tuple(t.shape)) for n, t in tensors.items()).shards[0].places.values():
        assert place.offset % dtype_of(place.dtype).itemsize == 0


def test_shards_keep_order_and_limits(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(10)}
    written = write_checkpoint(tmp_path, tensors, max_shard_bytes=40)
    assert written[-1].name == "model.safetensors.index.json"
    for path in written[:-1]:
        held = load_file(path)
        assert sum(tensor.nbytes for tensor in held.values()) <= 40 or len(held) == 1
    index = json.loads(written[-1].read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == list(tensors)
    assert [whole(source) for source in checkpoint.tensors.values()] == [t.numpy().tobytes() for t in tensors.values()]


def test_nothing_to_write_is_an_empty_file(tmp_path: Path) -> None:
    assert load_file(write_checkpoint(tmp_path, {})[0]) == {}


@pytest.mark.slow
def test_headers_are_split_at_the_limit_of_the_library() -> None:
    entries = [(str(i) + "x" * 10_000_000, "float32", (1,)) for i in range(11)]
    plan = plan_shards(entries)
    assert len(plan.shards) == 2
    assert all(len(shard.head) <= 100_000_008 for shard in plan.shards)
    with pytest.raises(IncompatibleStateError, match="too long"):
        plan_shards([("x" * 100_000_000, "float32", (1,))])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("a", "float32", (1,)), ("b", "int8", (1,)), ("a", "int8", (2,))], "tensors 0 and 2 both have the name 'a'"),
        ([("__metadata__", "float32", (1,))], "__metadata__"),
        ([("a", "complex128", (1,))], "tensor 'a' is complex128"),
        ([("a", "float4_e2m1fn_x2", ())], "tensor 'a' is float4_e2m1fn_x2 of shape"),
        ([("a", "bits8", (1,))], "tensor 'a' is bits8"),
        ([("a", "nothing", (1,))], "nothing"),
    ],
)
def test_what_safetensors_can_not_hold_is_refused_before_writing(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(IncompatibleStateError, match=message), CheckpointWriter(tmp_path / "out", entries):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInputError, match="max_shard_bytes"):
        plan_shards([], 0)


ONE = [("a", "float32", (4,))]
DATA = np.arange(4, dtype=np.float32).view(np.uint8)


def test_nothing_is_in_place_before_finish(tmp_path: Path) -> None:
    out = tmp_path / "new/out"
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(out, ONE) as writer:
        writer.sink("a").write(0, 4, DATA)
        writer.add_file("config.json", b"{}")
        raise KeyboardInterrupt
    assert not out.exists()
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(StorageError):  # a late thread reaches no other file
        writer.sink("a").write(0, 4, DATA)
    with CheckpointWriter(out, ONE) as writer:
        sink = writer.sink("a")
        assert sink.view(0, 4) is None
        for i in (3, 1, 0, 2):
            sink.write(i, i + 1, DATA[4 * i : 4 * i + 4])
        writer.add_file("sub/config.json", b"{}")
        assert [path.name for path in writer.finish()] == ["model.safetensors", "config.json"]
    assert load_file(out / "model.safetensors")["a"].tolist() == [0, 1, 2, 3]
    assert (out / "sub/config.json").read_bytes() == b"{}"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_existing_files_are_kept_unless_overwrite_is_given(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": torch.ones(4), "b": torch.zeros(4)}, max_shard_bytes=16)
    (tmp_path / "other.safetensors").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(AlreadyExistsError, match=r"model\.safetensors\.index\.json"):
        write_checkpoint(tmp_path, {"a": torch.ones(4)})
    with pytest.raises(AlreadyExistsError, match=r"notes\.txt"), CheckpointWriter(tmp_path / "notes.txt", ONE):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    write_checkpoint(tmp_path, {"c": torch.ones(4)}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt", "other.safetensors"]
    assert list(load_file(tmp_path / "model.safetensors")) == ["c"]
    write_checkpoint(tmp_path, {"a": torch.ones(4), "b": torch.zeros(4)}, max_shard_bytes=16, overwrite=True)
    assert "model.safetensors" not in [path.name for path in tmp_path.iterdir()]
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]
    with CheckpointWriter(tmp_path / "fresh", ONE) as writer:
        (tmp_path / "fresh").mkdir()
        (tmp_path / "fresh/config.json").write_text("mine")
        writer.add_file("config.json", b"{}")
        with pytest.raises(AlreadyExistsError, match=r"config\.json"):
            writer.finish()
    assert (tmp_path / "fresh/config.json").read_text() == "mine"


def test_an_old_index_can_not_name_files_elsewhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim.safetensors"
    victim.write_bytes(b"mine")
    out = tmp_path / "out"
    out.mkdir()
    for weight_map in ({"a": "../victim.safetensors", "b": str(victim), "c": 5}, {"a": "../victim.safetensors"}, 3):
        (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        write_checkpoint(out, {"a": torch.ones(1)}, overwrite=True)
        assert victim.read_bytes() == b"mine"
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name",
    ["", "/etc/x", "../x", "a/../x", "a//x", "./x", "a\\x", "C:x", "nul\0", ".git/hooks/x", "model.safetensors", "a/"],
)
def test_hostile_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with CheckpointWriter(tmp_path / "out", ONE) as writer, pytest.raises(InvalidInputError):
        writer.add_file(name, b"x")
    assert list(tmp_path.iterdir()) == []


def test_file_names_that_get_in_each_others_way_are_typed_errors(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", ONE) as writer:
        writer.add_file("a", b"x")
        with pytest.raises(StorageError):
            writer.add_file("a/b", b"x")
        with pytest.raises(StorageError):
            writer.add_file("x" * 300, b"x")


def test_sinks_check_ranges(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", ONE) as writer:
        with pytest.raises(InvalidInputError, match="4 elements"):
            writer.sink("a").write(2, 5, DATA[:12])
        with pytest.raises(InvalidInputError, match="takes 8 bytes, got 12"):
            writer.sink("a").write(0, 2, DATA[:12])


def test_a_full_disk_is_a_typed_error(tmp_path: Path) -> None:
    code = (
        "import resource, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from deltastore.errors import StoreFullError\n"
        "from deltastore.files import CheckpointWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"  # the kernel refuses larger files with EFBIG
        "try:\n"
        "    with CheckpointWriter(Path(sys.argv[1]) / 'out', [('a', 'uint8', (8000,))]) as writer:\n"
        "        writer.sink('a').write(0, 8000, np.zeros(8000, np.uint8))\n"
        "except StoreFullError as error:\n    assert 'out' in str(error) or 'model.safetensors' in str(error)\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60, cwd=ROOT)
    assert run.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_several_threads_fill_one_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8)
    with CheckpointWriter(tmp_path / "out", [("a", "float32", (100_000,))]) as writer:
        sink = writer.sink("a")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: sink.write(i, i + 1000, data[4 * i : 4 * i + 4000]), range(0, 100_000, 1000)))
        writer.finish()
    assert load_file(tmp_path / "out/model.safetensors")["a"].numpy().tobytes() == data.tobytes()
