"""Files beside the tensors, checkpoints on disk as sources and as targets, and a transformers model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from store_states import bucket_objects, objects, raw, same

import deltastore.files
import deltastore.sources
from deltastore import DeltaStore
from deltastore.errors import (
    AlreadyExistsError,
    FormatError,
    IncompatibleStateError,
    InvalidInputError,
    NotFoundError,
    TensorNotFoundError,
)

STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.arange(3).bfloat16()}


def test_files_come_back(store: DeltaStore, folder: Path, tmp_path: Path) -> None:
    large = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8).tobytes()
    path = tmp_path / "on disk"
    path.write_bytes(b"on disk")
    files = {
        "config.json": b"{}",
        "empty": b"",
        "at the limit": b"x" * 4096,
        "beyond it": b"x" * 4097,
        "large.bin": large,
        "sub/folder/ü.txt": "ü".encode(),
        "a path": path,
        "a path as text": str(path),
    }
    store.commit(STATE, files=files)
    snapshot = store.checkout()
    expected = {name: value if isinstance(value, bytes) else b"on disk" for name, value in files.items()}
    assert {name: snapshot.read_file(name) for name in snapshot.files} == expected
    assert snapshot.files == {name: len(value) for name, value in expected.items()}
    assert list(snapshot) == ["w", "b"]  # files are no tensors
    assert same(snapshot.load(), STATE)
    with pytest.raises(TensorNotFoundError, match=r"'nothing'.*config\.json"):
        snapshot.read_file("nothing")
    before = bucket_objects(folder)
    changed = large[:1_000_000] + b"!" + large[1_000_001:]
    store.commit(STATE, files={**files, "large.bin": changed})
    assert store.checkout().read_file("large.bin") == changed
    assert sum(bucket_objects(folder).values()) - sum(before.values()) < 20_000  # stored as a delta
    store.commit(STATE)
    assert store.checkout().files == {}
    assert store.checkout("main~2").read_file("large.bin") == large
    assert store.verify(read_data=True)


def test_a_file_is_part_of_the_version_whatever_its_order(store: DeltaStore) -> None:
    trees = [
        store.commit(STATE, files=files).tree
        for files in (
            {},
            {"a": b"1"},
            {"b": b"1"},
            {"a": b"2"},
            {"a": b"1" * 5000},
            {"a": b"1", "b": b"1"},
            {"b": b"1", "a": b"1"},
        )
    ]
    assert len(set(trees)) == 6
    assert trees[5] == trees[6]


@pytest.mark.parametrize("extra", [0, 1])
def test_the_largest_file(store: DeltaStore, tmp_path: Path, extra: int) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate((64 << 20) + extra)
    if extra:
        for value in (path, path.read_bytes()):
            with pytest.raises(InvalidInputError, match="67108865"):
                store.commit(STATE, files={"f": value})
        return
    store.commit(STATE, files={"f": path})
    assert store.checkout().read_file("f") == bytes(64 << 20)
    assert sum(objects(Path(store.address), "packs").values()) < 1_000_000


# -- out to a checkpoint, and in again --------------------------------------------------------------------------------


def test_save_and_commit_again(store: DeltaStore, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shared = torch.randn(30, 20)
    state = {
        "bf16": torch.randn(1_100_000).bfloat16(),
        "fp32": torch.randn(7, 3),
        "fp8": torch.randn(9).to(torch.float8_e5m2),
        "packed": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "mask": torch.tensor([True, False]),
        "phase": torch.randn(2, dtype=torch.complex64),
        "one": shared,
        "two": shared,
    }
    files = {"config.json": b'{"a": 1}', "sub/tokens.txt": b"t" * 5000}
    store.commit(state, files=files)
    written = store.checkout().save(tmp_path / "out")
    assert sorted(path.relative_to(tmp_path / "out").as_posix() for path in written) == [
        "config.json", "model.safetensors", "sub/tokens.txt",
    ]  # fmt: skip
    comparable = {name: tensor for name, tensor in state.items() if name != "packed"}
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == sorted(state)
    assert {name: raw(found[name]) for name in comparable} == {name: raw(tensor) for name, tensor in comparable.items()}
    assert (tmp_path / "out" / "config.json").read_bytes() == files["config.json"]
    for source in (tmp_path / "out", str(tmp_path / "out")):
        store.commit(source, branch="again")
        again = store.checkout("again")
        assert {name: raw(tensor) for name, tensor in again.load().items()} == {
            name: raw(tensor) for name, tensor in state.items()
        }
        assert {name: again.read_file(name) for name in again.files} == files
        assert not store.diff("main", "again")
    store.commit(tmp_path / "out" / "model.safetensors", branch="file")
    assert store.checkout("file").files == {}
    assert not store.diff("main", "file").tensors


def test_shards(store: DeltaStore, tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.full((100,), float(number)) for number in range(10)}
    store.commit(state)
    store.checkout().save(tmp_path / "out", max_shard_bytes=1000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 5
    assert list(index["weight_map"]) == list(state)
    store.commit(tmp_path / "out", branch="again")
    assert not store.diff("main", "again").tensors
    assert same(store.checkout("again").load(), state)


def test_saving_over_something(store: DeltaStore, tmp_path: Path) -> None:
    store.commit(STATE, files={"config.json": b"1"})
    store.commit({"w": STATE["w"] + 1}, files={"config.json": b"2"})
    out = tmp_path / "out"
    store.checkout("main~1").save(out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExistsError, match=r"config\.json|model\.safetensors"):
        store.checkout().save(out)
    assert sorted(safetensors.torch.load_file(out / "model.safetensors")) == ["b", "w"]
    store.checkout().save(out, overwrite=True)
    assert list(safetensors.torch.load_file(out / "model.safetensors")) == ["w"]
    assert (out / "config.json").read_bytes() == b"2"
    assert (out / "notes.txt").read_text() == "mine"


def test_what_has_no_place_in_safetensors_is_named(store: DeltaStore, tmp_path: Path) -> None:
    for name, tensor in {
        "complex128": torch.ones(2, dtype=torch.complex128),
        "complex32": torch.arange(2, dtype=torch.int32).view(torch.complex32),
        "int4": torch.arange(2, dtype=torch.uint8).view(torch.int4),
    }.items():
        store.commit({"fine": torch.ones(1), f"bad {name}": tensor})
        with pytest.raises(IncompatibleStateError, match=f"'bad {name}'.*{name}"):
            store.checkout().save(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    store.commit({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(IncompatibleStateError, match=r"a\.b"):
        store.checkout().save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_plain_values_are_missed_aloud(store: DeltaStore, tmp_path: Path) -> None:
    store.commit({"w": torch.ones(1), "step": 3})
    with pytest.warns(UserWarning, match="plain values"):
        store.checkout().save(tmp_path / "out")


def test_sources_on_disk_that_are_none(store: DeltaStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(NotFoundError):
            store.commit(source)
    assert store.list_refs() == []


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_transformers_model_brings_its_config(store: DeltaStore, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    store.commit(model, "as it is", files={"notes.md": b"n"})
    snapshot = store.checkout()
    assert sorted(snapshot.files) == ["config.json", "generation_config.json", "notes.md"]
    assert json.loads(snapshot.read_file("config.json"))["architectures"] == ["LlamaForCausalLM"]
    assert store.commit(model, files={"config.json": b"mine"})
    assert store.checkout().read_file("config.json") == b"mine"
    snapshot.save(tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {name: raw(t) for name, t in found.state_dict().items()} == {name: raw(t) for name, t in model.state_dict().items()}
    assert found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
    inputs = torch.tensor([[1, 2, 3]])
    assert raw(found(inputs).logits) == raw(model(inputs).logits)
    other = transformers.LlamaForCausalLM(config).bfloat16()
    snapshot.load_into(other)
    assert raw(other(inputs).logits) == raw(model(inputs).logits)


# -- large files of a folder ------------------------------------------------------------------------------------------


def test_large_files_of_a_folder_come_back_byte_for_byte(store: DeltaStore, tmp_path: Path) -> None:
    """An optimizer's file is larger than what `files=` takes; it is read in ranges and written in ranges."""
    source, size = tmp_path / "checkpoint", (64 << 20) + 12_345
    source.mkdir()
    save_file({"w": torch.randn(1000)}, source / "model.safetensors")
    content = np.random.default_rng(3).integers(0, 3, size, np.uint8)
    content.tofile(source / "optimizer.pt")
    (source / "medium.bin").write_bytes(content[: 2 << 20].tobytes())
    store.commit(source)
    content[5::9_999_999] ^= 1
    content.tofile(source / "optimizer.pt")
    before = sum(objects(Path(store.address), "packs").values())
    store.commit(source)
    assert sum(objects(Path(store.address), "packs").values()) - before < 10_000  # a delta
    snapshot = store.checkout()
    assert snapshot.files == {"medium.bin": 2 << 20, "optimizer.pt": size}
    snapshot.save(tmp_path / "out")
    assert (tmp_path / "out" / "optimizer.pt").read_bytes() == content.tobytes()
    assert (tmp_path / "out" / "medium.bin").read_bytes() == (source / "medium.bin").read_bytes()
    assert not store.diff("main", store.commit(tmp_path / "out").id)
    assert store.verify(read_data=True)


def test_a_file_of_a_folder_is_committed_alike_however_it_is_read(
    store: DeltaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.randn(10)}, tmp_path / "model.safetensors")
    for size in (0, 1, 5000, 1_100_000):
        (tmp_path / f"file{size}").write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    held = store.commit(tmp_path)
    monkeypatch.setattr(deltastore.sources, "HELD_FILE_BYTES", 4096)
    assert store.commit(tmp_path).tree == held.tree
    assert len(store.checkout().files) == 4  # not those of the store, which lies in this folder


def test_a_file_that_shrinks_while_it_is_committed(store: DeltaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.randn(10)}, tmp_path / "model.safetensors")
    path = tmp_path / "optimizer.pt"
    path.write_bytes(bytes(3 << 20))
    opened = deltastore.files.open_file_bytes

    def open_and_cut(path: Path) -> Any:
        source = opened(path)
        os.truncate(path, 1 << 20)
        return source

    monkeypatch.setattr(deltastore.files, "open_file_bytes", open_and_cut)
    with pytest.raises(FormatError, match=r"optimizer\.pt ends .* too early"):
        store.commit(tmp_path)
    assert store.list_refs() == []
