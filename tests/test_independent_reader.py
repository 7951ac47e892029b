"""A reader that knows docs/FORMAT.md alone sees in a store, bit for bit, what was committed and what the library gives."""

from __future__ import annotations

import ast
import shutil
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from independent_reader import Store
from independent_values import check_snapshots, files_of, state_of, tensors_of, unpack, values_of
from safetensors import safe_open

from deltastore import DeltaStore, reflog
from deltastore.dtypes import DTYPES

STORABLE = [getattr(torch, dtype.name) for dtype in DTYPES if hasattr(torch, dtype.name)]
READER = Path(__file__).with_name("independent_reader.py")
PLACES = ["pack_size", "pack_head", "pack", "row", "digest", "pack_id"]
ENTRIES = ["raw_length", "stored_length", "span", "base_pack", "base_row", "digest", "fast_digest", "codec", "bases", "payload"]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """dtype, shape and row-major bytes, by torch alone."""
    words = torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor
    data = words.detach().contiguous().view(INTEGERS[words.element_size()]).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def recorded(state: Any) -> Any:
    """The same state with the contents of its tensors in their places."""
    if isinstance(state, torch.Tensor):
        return content(state)
    if isinstance(state, (list, tuple)):
        return type(state)([recorded(each) for each in state])
    if not isinstance(state, dict):
        return state
    copied = type(state)([(key, recorded(each)) for key, each in state.items()])
    if isinstance(state, OrderedDict):
        vars(copied).update(vars(state))
    return copied


def assert_same(found: Any, expected: Any) -> None:
    """Equal types, order, keys and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert_same(list(found), list(expected))
        assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert struct.pack(">d", found) == struct.pack(">d", expected)
    else:
        assert found == expected


@dataclass
class Committed:
    """A store, and what was put into it: commit id -> state and files."""

    folder: Path
    library: DeltaStore
    states: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, state: Any, message: str, files: dict[str, bytes] | None = None, **options: Any) -> None:
        commit = self.library.commit(state, message, files=files, **options)
        self.states[commit.id] = recorded(state)
        self.files[commit.id] = files or {}


class Policy(torch.nn.Module):  # type: ignore[misc]
    """A small model with tied weights, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(200, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.head = torch.nn.Linear(24, 200, bias=False)
        self.head.weight = self.embed.weight
        self.to(torch.bfloat16)


def poke(rng: np.random.Generator, tensors: list[torch.Tensor], share: float) -> None:
    """Move a share of the words by a few steps, and now and then one by any step."""
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
        where = torch.from_numpy(np.flatnonzero(rng.random(len(words)) < share))
        words[where] += torch.from_numpy(rng.integers(-3, 4, len(where))).to(words.dtype)
        words[int(rng.integers(len(words)))] ^= 0x55


def fill(made: Committed) -> None:
    rng = np.random.default_rng(5)
    torch.manual_seed(5)
    library, model = made.library, Policy()
    masks = torch.zeros((1 << 20) + 5, dtype=torch.int8)
    state: dict[str, Any] = {"policy": model.state_dict(keep_vars=True), "masks": masks, "counts": torch.arange(900), "step": 0}
    for step in range(75):  # heights 0 to 74: deltas over 1, 8 and 64 versions
        made.commit(state, f"step {step}", metadata={"step": step, "loss": 1 / (step + 1)})
        dense = step % 20 == 7
        poke(rng, [*model.parameters(), state["counts"]], 0.99 if dense else 0.02)
        state["step"] += 1
        if step % 30 == 3:
            masks[rng.integers(0, len(masks), 500)] += 1
    library.create_tag("first", revision="main~74")

    library.create_branch("exp/adam", revision="main~9")
    trained = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.LayerNorm(7))
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
    scheduler = {"last": float("nan"), "lrs": [1e-3, -0.0], "span": (1, None, True, b"\xff\0"), "big": -(10**30)}
    for step in range(10):
        trained(torch.randn(3, 9)).square().sum().backward()
        optimizer.step()
        nested = {"model": trained.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler}
        files = {"config.json": b"{}", "empty": b"", "tokenizer.bin": rng.bytes(5000 + step // 5)}
        made.commit(nested, f"adam {step}", files, branch="exp/adam", author="Ada <ada@example.org>")
    library.create_tag("trained", revision="exp/adam")

    patterns = {dtype: rng.integers(0, 256, 15 * dtype.itemsize, np.uint8) for dtype in STORABLE}
    every: OrderedDict[Any, Any] = OrderedDict((str(dtype), seen_as(dtype, data)) for dtype, data in patterns.items())
    every.update(
        {b"\x01": torch.empty(3, 0, 2), 0: torch.tensor(2.5), "0": torch.tensor(True), None: [], "notes": "naïve " * 20_000}
    )
    for _ in range(3):
        made.commit(every, "every dtype", branch="dtypes")
        for data in patterns.values():
            data[rng.integers(0, len(data), 2)] ^= 0x81

    made.commit([], "nothing", branch="odd", tag="nothing")
    made.commit(torch.arange(3), "a tensor alone", branch="odd")
    library.create_branch("gone", revision="odd")
    library.delete_branch("gone")
    library.delete_tag("nothing")
    library.reset_branch("dtypes", revision="dtypes~1")
    made.commit(every, "again", branch="dtypes")


def seen_as(dtype: torch.dtype, data: np.ndarray[Any, Any]) -> torch.Tensor:
    """The same memory as a tensor [3, 5]."""
    flat = torch.from_numpy(data)
    flat = torch.view_as_complex(flat.view(torch.float64).reshape(-1, 2)) if dtype == torch.complex128 else flat.view(dtype)
    return flat.reshape(3, 5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Committed]:
    folder = tmp_path_factory.mktemp("independent") / "store"
    with DeltaStore.create(folder) as library:
        committed = Committed(folder, library)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reflog, "SNAPSHOT_INTERVAL", 32)  # readers take snapshots as they come
            fill(committed)
        yield committed


@pytest.fixture(scope="module")
def seen(made: Committed) -> Store:
    return Store(made.folder)


def test_refs_are_those_of_the_library(made: Committed, seen: Store) -> None:
    assert seen.refs == {ref.name: (ref.kind, ref.commit_id) for ref in made.library.list_refs()}
    assert {"main", "exp/adam", "first", "trained", "dtypes", "odd"} == seen.refs.keys()
    assert check_snapshots(seen) > 2


def test_commits_are_those_of_the_library(made: Committed, seen: Store) -> None:
    assert list(seen.commits) == list(made.states)
    for commit_id, version in seen.commits.items():
        commit, identity = made.library.get_commit(commit_id), version.identity
        assert (commit.id, list(commit.parents), commit.tree) == (version.id, identity["parents"], identity["tree"])
        assert (commit.message, commit.author) == (identity["message"], identity["author"])
        assert commit.created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ") == identity["time"]
        assert commit.metadata == {name: unpack(value) for name, value in identity["metadata"].items()}
    for ref, (_, commit_id) in seen.refs.items():
        first_parents = [commit_id]
        while parents := seen.commits[first_parents[-1]].identity["parents"]:
            first_parents.append(parents[0])
        assert [commit.id for commit in made.library.list_commits(ref)] == first_parents
        assert seen.commits[commit_id].placement["height"] == len(first_parents) - 1


def test_states_are_those_committed(made: Committed, seen: Store) -> None:
    for commit_id, state in made.states.items():
        assert_same(state_of(seen.commits[commit_id]), state)


def test_tensors_and_files_are_those_of_the_library(made: Committed, seen: Store) -> None:
    for commit_id, version in seen.commits.items():
        snapshot = made.library.checkout(commit_id)
        lazy = {name: snapshot[name] for name in snapshot if name != "0"}  # two leaves are called so: 0 and "0"
        tensors = {name: found for name, found in tensors_of(version).items() if name != "0"}
        assert tensors == {name: (one.dtype_name, one.shape, one.tobytes()) for name, one in lazy.items()}
        assert files_of(version) == {name: snapshot.read_file(name) for name in snapshot.files} == made.files[commit_id]


def test_names_of_leaves(seen: Store) -> None:
    trained = seen.commits[seen.refs["trained"][1]]
    assert values_of(trained)["scheduler.lrs.1"] == 0.0
    assert values_of(trained)["scheduler.span.3"] == b"\xff\0"
    assert tensors_of(trained)["optimizer.state.0.exp_avg"][:2] == ("float32", (7, 9))
    numbers = seen.commits[seen.refs["main"][1]].names
    assert numbers["policy.head.weight"] == numbers["policy.embed.weight"] != numbers["policy.norm.weight"]


def test_what_the_format_says_of_packs_and_manifests(made: Committed, seen: Store) -> None:
    """Tables are closed, sizes are right, spans never fall along bases, at most seven are alike; all codecs and spans occur."""

    def ids(rows: Any) -> list[str]:
        return [str(UUID(bytes=bytes(each))) for each in rows]

    def names(key: str) -> list[str]:
        with safe_open(made.folder / key, "numpy") as file:
            return list(file.offset_keys())

    codecs: set[str] = set()
    spans: set[int] = set()

    def chain(pack_id: str, row: int) -> list[tuple[str, int, str]]:
        pack = seen.pack(pack_id)
        link = pack_id, int(pack["span"][row]), pack["codecs"].split(" ")[pack["codec"][row]]
        return [link, *chain(ids(pack["bases"])[pack["base_pack"][row]], int(pack["base_row"][row]))] if link[1] else [link]

    def size_and_head(pack_id: str) -> tuple[int, int]:
        size = (made.folder / "packs" / pack_id[-2:] / pack_id).stat().st_size
        return size, size - int(seen.pack(pack_id)["stored_length"].sum())

    for version in seen.commits.values():
        structure = version.placement["structure"]
        assert (made.folder / structure["key"]).stat().st_size == structure["size"]
        for place in version.placement["manifests"]:
            manifest = seen.columns(place["key"], "manifest")
            manifest["pack_id"] = ids(manifest["pack_id"])
            assert names(place["key"]) == PLACES
            assert (made.folder / place["key"]).stat().st_size == place["size"]
            assert len(manifest["row"]) == place["rows"]
            assert [*zip(manifest["pack_size"], manifest["pack_head"], strict=True)] == [*map(size_and_head, manifest["pack_id"])]
            if place["packs"] is not None:
                assert [version.placement["pack_table"][at] for at in place["packs"]] == manifest["pack_id"]
            chains = [chain(pack_id, row) for pack_id, row, _ in seen.manifest(place["key"])]
            assert {pack_id for links in chains for pack_id, _, _ in links} == set(manifest["pack_id"])
            for links in chains:
                steps = [span for _, span, _ in links]
                assert steps == [*sorted(steps[:-1]), 0]
                assert all(steps.count(span) <= 7 for span in steps)
                spans.update(steps)
                codecs.update(codec for _, _, codec in links)
        for place in version.placement["packs"]:
            pack_id = place["key"].rsplit("/", 1)[1]
            assert names(place["key"]) == ENTRIES
            assert size_and_head(pack_id) == (place["size"], place["head"])
            assert len(seen.pack(pack_id)["span"]) == place["rows"]
            assert set(seen.pack(pack_id)["span"]) == {place["span"]}
    assert spans == {0, 1, 8, 64}
    assert codecs == {"raw@1", "planes@1", "sparse-ulp@1", "dense-ulp@1"}


@pytest.mark.parametrize("kind", ["commits", "structures", "manifests", "packs", "refs/log"])
def test_a_flipped_bit_is_seen(made: Committed, tmp_path: Path, kind: str) -> None:
    """So agreement above is no accident: the reader does look at what it reads."""
    folder = shutil.copytree(made.folder, tmp_path / "store")
    flip(sorted(path for path in (folder / kind).rglob("*") if path.is_file())[0])
    with pytest.raises((AssertionError, ValueError, KeyError, OSError)):
        for version in Store(folder).commits.values():
            assert tensors_of(version)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, READER, folder], capture_output=True, text=True, check=False)


def test_it_runs_as_a_script(tmp_path: Path) -> None:
    with DeltaStore.create(tmp_path / "store") as library:
        state = {"weight": torch.zeros(3, 5), "bias": torch.arange(7, dtype=torch.int16)}
        first = library.commit(state, "first", files={"tokenizer.bin": bytes(range(256)) * 20})
        state["weight"][1, 2] = 1.5
        second = library.commit(state, "second", files={"tokenizer.bin": bytes(range(256)) * 20})
    found = run(tmp_path / "store")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "".join(f"{commit.id[:12]} 2 tensors {15 * 4 + 7 * 2} bytes\n" for commit in (first, second))
    lines = found.stdout
    flip(max((tmp_path / "store" / "packs").rglob("*-*"), key=lambda path: path.stat().st_size))
    found = run(tmp_path / "store")
    assert found.returncode == 1
    assert "Error" in found.stderr.splitlines()[-1]
    assert len(found.stdout) < len(lines)


def test_it_is_short_and_shares_nothing_with_the_library() -> None:
    source = READER.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 200
    assert max(map(len, source.splitlines())) <= 130
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    readers = {"json", "safetensors", "numpy", "zstandard", "hashlib", "xxhash", "blake3"}
    plain = {"__future__", "base64", "collections", "functools", "math", "pathlib", "sys", "typing", "uuid"}
    assert readers <= imported <= readers | plain
    assert "__import__" not in source
    assert "importlib" not in source
