"""Every storable dtype in every layout, through many versions, bit for bit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from store_states import STORABLE, Memory, numpy_codecs, pack_contents, raw, same

from deltastore import DeltaStore

DENSITIES = [0.0, 0.01, 0.5, 1.0]
VERSIONS = 12

# name: (shape of the memory, the view of it that is committed)
LAYOUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "contiguous": ((12, 17), lambda t: t),
    "transposed": ((12, 17), lambda t: t.t()),
    "channels_last": ((2, 5, 6, 3), lambda t: t.permute(0, 3, 1, 2)),
    "expanded": ((1, 9), lambda t: t.expand(7, 9)),
    "strided": ((20, 20), lambda t: t[::3, 1::2]),
    "sliced": ((500,), lambda t: t[123:200]),
    "0-dim": ((5,), lambda t: t[3]),
    "empty": ((5, 4), lambda t: t[:, 2:2]),
}


class Series:
    """A state of all dtypes and layouts that is changed in place; the density of a tensor goes round all of DENSITIES."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.memories: list[Memory] = []
        self.state: dict[str, torch.Tensor] = {}
        for dtype in STORABLE:
            for name, (shape, view) in LAYOUTS.items():
                self.memories.append(Memory(rng, dtype, shape))
                self.state[f"{dtype.name} {name}"] = view(self.memories[-1].tensor)
        self.version = 0

    def change(self) -> None:
        self.version += 1
        for number, memory in enumerate(self.memories):
            memory.change(DENSITIES[(number + self.version) % len(DENSITIES)])

    def bits(self) -> dict[str, bytes]:
        return {name: raw(tensor) for name, tensor in self.state.items()}


def commit_series(folder: Path) -> list[dict[str, bytes]]:
    """VERSIONS commits of a series; returns the bits of each."""
    series, bits = Series(seed=3), []
    with DeltaStore.create(folder) as store:
        for version in range(VERSIONS):
            bits.append(series.bits())
            store.commit(series.state, f"version {version}", metadata={"version": version})
            series.change()
    return bits


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, bytes]]]:
    folder = tmp_path_factory.mktemp("series") / "store"
    return folder, commit_series(folder)


def test_every_dtype_layout_and_density_comes_back_bit_for_bit(series: tuple[Path, list[dict[str, bytes]]]) -> None:
    folder, bits = series
    assert len({len(each) for each in bits}) == 1
    assert len(bits[0]) == len(STORABLE) * len(LAYOUTS)
    with DeltaStore(folder, trust="none") as store:
        for version, expected in enumerate(bits):
            snapshot = store.checkout(f"main@{{version={version}}}")
            found = snapshot.load()
            assert {name: raw(tensor) for name, tensor in found.items()} == expected, f"version {version}"
            assert all(str(found[name].dtype) == f"torch.{name.split()[0]}" for name in found)
        lazy = store.checkout("main~1")
        assert {name: lazy[name].tobytes() for name in lazy} == bits[-2]
        assert [info.span for info in store._reader.chain(*_row(store, "main", "bfloat16 strided"))][-1] == 0
        assert store.verify(read_data=True)


def _row(store: DeltaStore, revision: str, name: str) -> tuple[str, int]:
    version = store._versions.get(store.get_commit(revision).id)
    row = version.rows(dict(zip(version.names, [number for _, number in version.leaves], strict=True))[name])[0]
    return row.pack_id, row.row


def test_the_shapes_of_all_layouts_survive(series: tuple[Path, list[dict[str, bytes]]]) -> None:
    expected = {name: tuple(view(torch.zeros(shape)).shape) for name, (shape, view) in LAYOUTS.items()}
    with DeltaStore(series[0]) as store:
        snapshot = store.checkout()
        assert all(snapshot[name].shape == expected[name.split()[1]] for name in snapshot)
        assert all(tuple(t.shape) == expected[name.split()[1]] for name, t in snapshot.load().items())


@pytest.mark.parametrize("version", [0, 5, VERSIONS - 1])
def test_committing_what_was_checked_out_changes_nothing(series: tuple[Path, list[dict[str, bytes]]], version: int) -> None:
    revision, branch = f"main@{{version={version}}}", f"again/{version}"
    with DeltaStore(series[0]) as store:
        state = store.checkout(revision).state()
        again = store.commit(state, "the same once more", branch=branch)
        assert again.tree == store.get_commit(revision).tree
        assert not store.diff(revision, branch)
        assert same(store.checkout(branch).state(), state)


def test_both_kernels_write_equal_payloads(series: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> None:
    other = tmp_path / "store"
    with numpy_codecs():
        bits = commit_series(other)
    assert bits == series[1]
    mine, theirs = pack_contents(series[0]), pack_contents(other)
    assert len(theirs) > VERSIONS
    assert all(pack["payload"] for pack in theirs)
    assert mine[: len(theirs)] == theirs  # other tests of this module may have added commits
    with numpy_codecs(), DeltaStore(series[0]) as store:  # and each reads what the other wrote
        assert {name: raw(t) for name, t in store.checkout(f"main@{{version={VERSIONS - 2}}}").load().items()} == bits[-2]
    with DeltaStore(other) as store:
        assert {name: raw(t) for name, t in store.checkout("main~1").load().items()} == bits[-2]


def test_the_environment_variable_chooses_the_numpy_kernel(folder: Path) -> None:
    program = """
import sys, torch
from deltastore import DeltaStore
from deltastore.codecs import kernel
words = torch.arange(40_000, dtype=torch.int16)
with DeltaStore.create(sys.argv[1]) as store:
    for step in range(10):
        store.commit({"w": words.view(torch.bfloat16)}, f"step {step}")
        words[step::97] += step
print(kernel.NAME)
"""
    environment = {**os.environ, "DELTASTORE_KERNEL": "numpy", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "numpy", done.stderr
    words = torch.arange(40_000, dtype=torch.int16)
    with DeltaStore(folder) as store:
        for step in range(10):
            assert same(store.checkout(f"main~{9 - step}").load()["w"], words.view(torch.bfloat16))
            words[step::97] += step


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [("uint8", "in use"), ("bfloat16", "in use"), ("float32", "in use"), ("complex128", "in use"), ("bfloat16", "numpy")],
)
def test_tensors_of_several_chunks(store: DeltaStore, dtype: str, kernels: str) -> None:
    spec = next(each for each in STORABLE if each.name == dtype)
    rng = np.random.default_rng(7)
    memory = Memory(rng, spec, (1500, 1000))  # one whole chunk and a part of one
    state = {"whole": memory.tensor, "turned": memory.tensor.t(), "same again": memory.tensor}
    bits = []

    def run() -> None:
        for version, density in enumerate([1.0, 0.001, 0.0, 0.3, 1.0, 0.0]):
            memory.change(density)
            if version == 2:
                memory.bytes[:1000] ^= 1  # the first chunk only
            store.commit(state, f"version {version}")
            bits.append({name: raw(tensor) for name, tensor in state.items()})

    with numpy_codecs() if kernels == "numpy" else contextlib.nullcontext():
        run()
    with DeltaStore(store.address, trust="none") as again:
        for back, expected in enumerate(reversed(bits)):
            assert {name: raw(t) for name, t in again.checkout(f"main~{back}").load().items()} == expected


@settings(max_examples=12, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_series_of_small_states(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Tensors come, go, change dtype or shape, and are poked anywhere; every version comes back."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    names = st.sampled_from(["a", "b", "c.d", "e/f"])
    state: dict[str, Memory] = {}
    kept: list[dict[str, bytes]] = []
    with DeltaStore.create(tmp_path_factory.mktemp("random") / "store") as store:
        for _ in range(data.draw(st.integers(2, 10))):
            for name in data.draw(st.lists(names, max_size=3)):
                action = data.draw(st.sampled_from(["new", "change", "change", "remove"]))
                if action == "remove":
                    state.pop(name, None)
                elif action == "new" or name not in state:
                    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
                    state[name] = Memory(rng, data.draw(st.sampled_from(STORABLE)), shape)
                else:
                    state[name].change(data.draw(st.sampled_from(DENSITIES)))
            tensors = {name: memory.tensor for name, memory in state.items()}
            store.commit(tensors, "step")
            kept.append({name: raw(tensor) for name, tensor in tensors.items()})
        for back, expected in enumerate(reversed(kept)):
            found = store.checkout(f"main~{back}").load()
            assert list(found) == list(expected)
            assert {name: raw(tensor) for name, tensor in found.items()} == expected
