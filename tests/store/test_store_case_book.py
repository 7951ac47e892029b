"""Failures that users of neighbouring tools met, one test for each: bytes (C01 to C20), names and shapes (C22 to C28)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from store_states import bucket_objects, objects, raw, same
from store_traffic import Traffic

from deltastore import DeltaStore
from deltastore.dtypes import DTYPES
from deltastore.errors import IncompatibleStateError, IntegrityError


class Head(torch.nn.Module):
    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Linear(64, 50, bias=False)
        self.b = torch.nn.Linear(64, 50, bias=False)
        if reverse:
            self.a.weight = self.b.weight
        else:
            self.b.weight = self.a.weight


def test_c01_tied_weights_are_stored_once_and_stay_tied(store: DeltaStore, folder: Path) -> None:
    model = Head()
    store.commit(model)
    assert sum(objects(folder, "packs").values()) < 1.3 * 64 * 50 * 4
    found = store.checkout().load()
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()
    assert raw(found["b.weight"]) == raw(model.b.weight)
    assert store.checkout().nbytes == 64 * 50 * 4


def test_c02_every_name_of_a_tie_is_there_after_a_reload(store: DeltaStore, tmp_path: Path) -> None:
    model, other = Head(), Head(reverse=True)
    store.commit(model)
    assert store.checkout().load_into(other).names == ("a.weight", "b.weight")
    assert other.a.weight is other.b.weight
    assert raw(other.b.weight) == raw(model.a.weight)
    store.checkout().save(tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert raw(found["a.weight"]) == raw(found["b.weight"]) == raw(model.a.weight)
    half = Head()  # a checkpoint that kept one of the names fills a tied model
    store.commit({"b.weight": model.b.weight.detach().clone()}, branch="half")
    store.checkout("half").load_into(half)
    assert raw(half.a.weight) == raw(model.a.weight)


def test_c03_layouts_of_the_same_values_are_one_version(store: DeltaStore, folder: Path) -> None:
    torch.manual_seed(0)
    image = torch.randn(8, 3, 5, 5)
    first = store.commit({"w": torch.arange(6.0).reshape(3, 2).t(), "conv": image, "wide": torch.ones(4, 3)})
    before = bucket_objects(folder)
    again = store.commit(
        {
            "w": torch.arange(6.0).reshape(3, 2).t().contiguous(),
            "conv": image.contiguous(memory_format=torch.channels_last),
            "wide": torch.ones(1, 3).expand(4, 3),
        }
    )
    assert again.tree == first.tree
    new = set(bucket_objects(folder)) - set(before)
    assert sorted(key.split("/")[0] for key in new) == ["commits", "refs"]
    assert store.checkout()["w"].load().tolist() == [[0, 2, 4], [1, 3, 5]]


def test_c04_a_slice_costs_its_own_bytes_only(folder: Path) -> None:
    """In a process of its own: a slice of 8 GB of memory that nobody has touched."""
    program = """
import resource, sys, torch
from deltastore import DeltaStore
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
with DeltaStore.create(sys.argv[1]) as store:
    store.commit({"warm": torch.ones(10)}, branch="warm")
    store.checkout("warm").load()
    big = torch.empty(2_000_000_000)
    big[7:17] = torch.arange(10.0)
    before = peak()
    store.commit({"w": big[7:17], "strided": big[0:2_000_000_000:200_000_000]})
    assert store.checkout().load()["w"].tolist() == list(range(10))
    print(peak() - before, store._open_committer()._baseline.nbytes())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, kept = map(int, done.stdout.split())
    assert grown < 64  # MiB
    assert kept == 80
    assert sum(size for key, size in bucket_objects(folder).items() if key.startswith("packs/")) < 3000


def test_c08_deltas_do_not_drift(store: DeltaStore) -> None:
    torch.manual_seed(0)
    weight = torch.randn(100_000).bfloat16()
    kept = []
    for _ in range(20):  # a fold at every eighth step
        store.commit({"w": weight})
        kept.append(raw(weight))
        weight += (torch.randn(100_000) * 1e-3).bfloat16()
    with DeltaStore(store.address) as again:
        assert [raw(again.checkout(f"main~{back}").load()["w"]) for back in range(19, -1, -1)] == kept


def test_c09_complex_buffers_are_stored_and_named_where_a_file_can_not_hold_them(store: DeltaStore, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("freqs_cis", torch.randn(4, 3, dtype=torch.complex64))
    model.register_buffer("wide", torch.randn(4, dtype=torch.complex128))
    model.register_buffer("narrow", torch.arange(4, dtype=torch.int32).view(torch.complex32))
    store.commit(model)
    assert same(store.checkout().state(), model.state_dict())
    with pytest.raises(IncompatibleStateError, match=r"'wide' is complex128|'narrow' is complex32"):
        store.checkout().save(tmp_path / "out")
    lazy = {"conj": model.freqs_cis.conj(), "imaginary": model.freqs_cis.conj().imag}
    assert lazy["conj"].is_conj()
    assert lazy["imaginary"].is_neg()
    store.commit(lazy)
    found = store.checkout().load()
    assert raw(found["conj"]) == raw(lazy["conj"].resolve_conj())
    assert raw(found["imaginary"]) == raw(lazy["imaginary"].resolve_neg())
    assert not found["conj"].is_conj()


QUANTISED = [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4]


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_c10_every_dtype_of_the_installed_torch(store: DeltaStore) -> None:
    names = sorted({str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)})
    known = {each.name: each.itemsize for each in DTYPES}
    state = {}
    for name in names:
        dtype = getattr(torch, name)
        if dtype in QUANTISED:
            channels = {"scales": torch.tensor([0.1]), "zero_points": torch.tensor([0.0]), "axis": 0, "dtype": dtype}
            tensor = torch._empty_per_channel_affine_quantized([1, 4], **channels)
            with pytest.raises(IncompatibleStateError, match=f"'{name}'.*quantised"):
                store.commit({name: tensor})
        else:
            assert known[name] == dtype.itemsize
            state[name] = torch.arange(8 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    assert len(state) == len(names) - len(QUANTISED) > 30
    store.commit(state)
    assert same(store.checkout().load(), state)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bfloat16]
)
def test_c11_floats_that_numpy_does_not_know(store: DeltaStore, tmp_path: Path, dtype: torch.dtype) -> None:
    everything = torch.arange(256, dtype=torch.uint8).repeat(2).view(dtype)
    store.commit({"w": everything})
    assert raw(store.checkout()["w"][3:200].load()) == raw(everything[3:200])
    store.checkout().save(tmp_path / "out")
    assert raw(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["w"]) == raw(everything)


@pytest.mark.slow
@pytest.mark.parametrize("elements", [(1 << 31) + 8, (1 << 32) + 8], ids=["2^31 + 8", "2^32 + 8"])
def test_c13_changes_beyond_32_bits(folder: Path, elements: int) -> None:
    """Memory is made of untouched pages, so the tensor takes hardly any."""
    tensor = torch.from_numpy(np.zeros(elements, np.uint8))
    with DeltaStore.create(folder, baseline="none") as store:
        store.commit({"w": tensor})
        first = sum(objects(folder, "packs").values())
        assert first < 1_000_000  # all chunks but the last are one
        tensor[(1 << 31) - 1 : (1 << 31) + 1] = 7
        tensor[-8:] = torch.arange(8)
        store.commit({"w": tensor})
        assert sum(objects(folder, "packs").values()) - first < 10_000
    with DeltaStore(folder, trust="none") as store:
        lazy = store.checkout()["w"]
        assert lazy.shape == (elements,)
        assert lazy.nbytes == elements
        assert lazy[-8:].load().tolist() == list(range(8))
        assert lazy[elements - 10].load() == 0
        around = [0, 7, 7, 0] if elements > 1 << 32 else [0, 7, 0, 1]
        assert lazy[(1 << 31) - 2 : (1 << 31) + 2].load().tolist() == around
        assert not any(store.checkout("main~1")["w"][-8:].load())
        assert store.diff("main~1", "main").changed_elements == (9 if elements > 1 << 32 else 8)


def test_c17_a_checkout_commits_to_the_same_version(store: DeltaStore) -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(64, 32).bfloat16(), "q": torch.randint(0, 255, (40,), dtype=torch.uint8), "n": 3}
    store.commit(state)
    again = store.commit(store.checkout().state(), branch="again")
    assert again.tree == store.get_commit("main").tree
    assert not store.diff("main", "again")
    store.commit({**state, "w": state["w"].t().contiguous().view(64, 32)}, branch="repacked")  # another layout at run time
    (changed,) = store.diff("main", "repacked").tensors
    assert changed.name == "w"
    assert changed.changed_elements == int((state["w"].t().contiguous().view(64, 32) != state["w"]).sum())


def test_c20_a_flipped_bit_never_loads(store: DeltaStore, folder: Path) -> None:
    torch.manual_seed(0)
    store.commit({"w": torch.randn(1000)})
    store.close()
    (key,) = objects(folder, "packs")
    sound = (folder / key).read_bytes()
    head = 8 + int.from_bytes(sound[:8], "little")
    for offset in (head + (len(sound) - head) // 2, len(sound) - 1):
        damaged = bytearray(sound)
        damaged[offset] ^= 1
        (folder / key).write_bytes(damaged)
        with DeltaStore(folder) as again:
            with pytest.raises(IntegrityError, match="'w', chunk 0"):
                again.checkout().load()
            assert not again.verify(read_data=True)
            assert IntegrityError.exit_code == 13


NAMES = [
    "", "/", "..", "../../etc/passwd", "a/b", "/abs", ".", "a\0b", "\0", "ü" * 300, "x" * 100_000, "\u4f60\u597d", "e\u0301",
    "\u00e9", "\U0001f600", " ", "\n", "__metadata__", "a.b", "a..b", ".a.", "'; DROP TABLE object; --", "%s", "{0}", "\\",
    "C:\\x", "~", "-rf", "con", "\u202e", "\ufeff",
]  # fmt: skip


def test_c22_names_are_not_file_names(store: DeltaStore, folder: Path, tmp_path: Path) -> None:
    state = {name: torch.tensor(number) for number, name in enumerate(NAMES)}
    assert len(state) == len(NAMES)
    before = set(tmp_path.rglob("*"))
    store.commit(state, "names", metadata={"x" * 1000: "y" * 1000})
    assert same(store.checkout().state(), state)
    assert list(store.checkout().load()) == NAMES
    assert [int(store.checkout()[name].load()) for name in NAMES] == list(range(len(NAMES)))
    target = {name: torch.tensor(-1) for name in NAMES}
    store.checkout().load_into(target)
    assert same(target, state)
    assert all(path.is_relative_to(folder) for path in set(tmp_path.rglob("*")) - before)
    for name in ("\ud800", "a\udfffb"):
        with pytest.raises(IncompatibleStateError, match="surrogate"):
            store.commit({name: torch.ones(1)})
    with pytest.raises(IncompatibleStateError, match="__metadata__"):
        store.checkout().save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    del state["__metadata__"]
    store.commit(state)
    store.checkout().save(tmp_path / "out")
    store.commit(tmp_path / "out", branch="again")
    assert not store.diff("main", "again").tensors


def test_c22_many_very_long_names(store: DeltaStore) -> None:
    state = {f"{number}:" + "x" * 100_000: torch.tensor(number) for number in range(100)}
    store.commit(state)
    found = store.checkout().load()
    assert list(found) == list(state)
    assert [int(tensor) for tensor in found.values()] == list(range(100))


def test_c23_dotted_and_nested_keys_do_not_collide(store: DeltaStore) -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "c": 3}, "a.c": 4, 0: torch.tensor(5), "0": torch.tensor(6)}
    store.commit(state)
    assert same(store.checkout().state(), state)
    with pytest.raises(IncompatibleStateError, match=r"\['a\.b'\].*\['a'\]\['b'\]"):
        store.checkout().load()
    state["a"]["b"] += 10
    store.commit(state)
    (changed,) = store.diff("main~1", "main").tensors
    assert changed.changed_elements == 1


def test_c25_wrapper_prefixes_do_not_make_a_load_a_no_op(store: DeltaStore) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    weights = plain.state_dict()
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."):
        store.commit({prefix + name: tensor for name, tensor in weights.items()})
        target = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        assert store.checkout().load_into(target).tensors == 4
        assert [raw(t) for t in target.state_dict().values()] == [raw(t) for t in weights.values()]
        names = {"module." + name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        store.checkout().load_into(names)
        assert [raw(t) for t in names.values()] == [raw(t) for t in weights.values()]
        assert list(store.checkout()) == [prefix + name for name in weights]  # stored as given
    store.commit({f"model.{name}": tensor for name, tensor in weights.items()})
    with pytest.raises(IncompatibleStateError, match=r"'0\.weight' \(nearest in the commit: 'model\.0\.weight'\)"):
        store.checkout().load_into(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))


def test_c26_gamma_and_beta_keep_their_names(store: DeltaStore) -> None:
    state = {
        "gamma": torch.ones(2),
        "LayerNorm.gamma": torch.zeros(2),
        "LayerNorm.beta": torch.ones(1),
        "weight_g": torch.ones(1),
        "module": torch.ones(3),
    }
    store.commit(state)
    assert same(store.checkout().load(), state)
    target = {name: torch.full_like(tensor, 9) for name, tensor in state.items()}
    assert store.checkout().load_into(target).names == tuple(state)
    assert same(target, state)


def test_c28_no_object_and_no_read_holds_a_whole_model(store: DeltaStore, folder: Path, traffic: Traffic) -> None:
    tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 150_000_000, np.uint8))
    store.commit({"w": tensor})
    packs = objects(folder, "packs")
    assert len(packs) == 3
    assert max(packs.values()) < (64 << 20) + (2 << 20)
    traffic.clear()
    target = {"w": torch.empty_like(tensor)}
    store.checkout().load_into(target)
    assert torch.equal(target["w"], tensor)
    assert max(length for *_, length in traffic.reads) <= 8 << 20
    assert traffic.read_bytes("packs/") <= sum(packs.values())
