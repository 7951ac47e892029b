"""load, load_into and state: devices, dtypes, names, wrappers, strictness, and what is kept in hand."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import raw, same
from store_traffic import Traffic

from deltastore import DeltaStore
from deltastore.errors import IncompatibleStateError, InvalidInputError, TensorNotFoundError


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "fp32": torch.randn(4, 3),
        "bf16": torch.randn(5).bfloat16(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "int": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "packed": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


class Wrapped(torch.nn.Module):
    """As DistributedDataParallel wraps a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def bits(module: torch.nn.Module) -> list[bytes]:
    return [raw(tensor) for tensor in module.state_dict().values()]


# -- load -------------------------------------------------------------------------------------------------------------


def test_a_dtype_converts_floating_tensors_only(store: DeltaStore) -> None:
    state = {name: tensor for name, tensor in mixed().items() if name != "packed"}
    store.commit(state)
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        found = store.checkout().load(dtype=dtype)
        assert same(found, {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()})
    assert same(store.checkout().load(), state)


def test_a_lazy_tensor_is_converted_as_asked(store: DeltaStore) -> None:
    store.commit(mixed())
    snapshot = store.checkout()
    assert same(snapshot["int"].load(dtype=torch.float32), torch.arange(4.0))
    assert same(snapshot["fp32"][1:3, 0].load(dtype=torch.float64), mixed()["fp32"][1:3, 0].double())
    assert same(snapshot["bf16"].load(dtype=torch.float32), mixed()["bf16"].float())
    with pytest.raises(InvalidInputError, match="convert"):
        snapshot["packed"].load(dtype=torch.float32)
    with pytest.raises(InvalidInputError):
        snapshot["fp32"].load(dtype="nonsense")


def test_names_choose_what_is_read(store: DeltaStore, traffic: Traffic) -> None:
    big = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 400_000, np.uint8))
    store.commit({"small": torch.arange(3), "big": big, "other": torch.arange(4)})
    traffic.clear()
    found = store.checkout().load(["other", "small"])
    assert list(found) == ["other", "small"]
    assert traffic.read_bytes("packs/") < 10_000
    assert store.checkout().load([]) == {}
    with pytest.raises(TensorNotFoundError, match=r"'smal'.*small"):
        store.checkout().load(["smal"])
    assert store.checkout().load({"big"})["big"].shape == (400_000,)


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "nonsense", "cuda:99", 3.5])
def test_devices_that_hold_no_values(store: DeltaStore, traffic: Traffic, device: Any) -> None:
    store.commit(mixed())
    snapshot = store.checkout()
    traffic.clear()
    for call in (
        lambda: snapshot.load(device=device),
        lambda: snapshot.state(device=device),
        lambda: snapshot["int"].load(device=device),
    ):
        with pytest.raises(InvalidInputError, match="device"):
            call()
    assert not traffic.read_keys("packs/")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_every_spelling_of_the_cpu(store: DeltaStore, device: Any) -> None:
    store.commit(mixed())
    assert same(store.checkout().load(device=device), mixed())
    assert same(store.checkout().state(device=device), mixed())
    assert same(store.checkout()["int"].load(device=device), mixed()["int"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu(store: DeltaStore) -> None:
    state = {**mixed(), "large": torch.randn(3_000_000)}
    store.commit({name: tensor.cuda() for name, tensor in state.items()})
    assert same(store.checkout().load(), state)
    found = store.checkout().load(device="cuda")
    assert all(tensor.is_cuda for tensor in found.values())
    assert same({name: tensor.cpu() for name, tensor in found.items()}, state)
    target = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in state.items() if name != "packed"}
    store.checkout().load_into(target, strict=False)
    assert same({name: tensor.cpu() for name, tensor in target.items()}, {name: state[name] for name in target})


def test_two_leaves_of_one_name(store: DeltaStore) -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "c": torch.tensor(3)}
    store.commit(state)
    snapshot = store.checkout()
    for call in (snapshot.load, lambda: snapshot["a.b"], lambda: snapshot.load(["a.b"])):
        with pytest.raises(IncompatibleStateError, match=r"a\.b"):
            call()
    assert same(snapshot.state(), state)
    assert snapshot["a", "b"].load() == 2
    assert snapshot[("a.b",)].load() == 1
    assert ("a", "b") in snapshot
    assert ("a", "c") not in snapshot
    assert snapshot.load(["c"])["c"] == 3
    target = {"a.b": torch.tensor(0), "a": {"b": torch.tensor(0)}, "c": torch.tensor(0)}
    snapshot.load_into(target)
    assert same(target, state)


@pytest.mark.parametrize("trust", ["store", "none"])
def test_both_kinds_of_trust_read_the_same(folder: Path, trust: Any) -> None:
    with DeltaStore.create(folder, trust=trust) as store:
        store.commit(mixed())
        assert same(store.checkout().load(), mixed())


# -- load_into --------------------------------------------------------------------------------------------------------


def test_in_place_and_nothing_else(store: DeltaStore) -> None:
    torch.manual_seed(0)
    source, target = Small(), Small()
    store.commit(source)
    pointers = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    objects = [id(parameter) for parameter in target.parameters()]
    restored = store.checkout().load_into(target)
    assert restored.names == tuple(source.state_dict())
    assert bits(target) == bits(source)
    assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == pointers
    assert [id(parameter) for parameter in target.parameters()] == objects
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_into_tensors_of_any_layout(store: DeltaStore) -> None:
    wanted = torch.arange(24.0).view(4, 6)
    store.commit({"w": wanted, "image": torch.arange(120.0).view(2, 3, 4, 5)})
    backing = torch.full((10, 20), -1.0)
    target = {
        "w": backing[1:9:2, 3:15:2],
        "image": torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    store.checkout().load_into(target)
    assert raw(target["w"]) == raw(wanted)
    assert raw(target["image"]) == raw(torch.arange(120.0).view(2, 3, 4, 5))
    assert (backing == -1).sum() == 200 - 24
    turned = {"w": torch.zeros(6, 4).t(), "image": torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0)}
    store.checkout().load_into(turned)
    assert raw(turned["w"]) == raw(wanted)


def test_into_a_nested_state(store: DeltaStore) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    store.commit(saved)
    copies = store.checkout().state()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    live = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert not same(live, copies)
    store.checkout().load_into(live)
    assert same({"model": model.state_dict(), "optimizer": optimizer.state_dict()}["model"], copies["model"])
    assert same(optimizer.state_dict()["state"], copies["optimizer"]["state"])


def test_strict_and_not(store: DeltaStore) -> None:
    store.commit({"layer.weight": torch.ones(2), "left.over": torch.ones(3)})
    target = {"layer.weight": torch.zeros(2), "layer.wieght": torch.zeros(2), "far": torch.zeros(1)}
    with pytest.raises(IncompatibleStateError) as caught:
        store.checkout().load_into(target)
    text = str(caught.value)
    assert "2 of the target's tensors" in text
    assert "'layer.wieght' (nearest in the commit: 'layer.weight')" in text
    assert "'left.over'" in text
    assert "strict=False" in text
    assert not any(tensor.any() for tensor in target.values())
    assert store.checkout().load_into(target, strict=False).names == ("layer.weight",)
    assert target["layer.weight"].tolist() == [1, 1]
    assert target["far"].tolist() == [0]
    with pytest.raises(IncompatibleStateError, match=r"float32\[3\]"):  # common ones must fit all the same
        store.checkout().load_into({"left.over": torch.zeros(4)}, strict=False)
    assert store.checkout().load_into({"nothing": torch.zeros(4)}, strict=False).names == ()


def test_wrappers_on_either_side(store: DeltaStore) -> None:
    torch.manual_seed(0)
    plain = Small()
    shapes: dict[str, Any] = {
        "plain": lambda m: m,
        "ddp": Wrapped,
        "compiled": lambda m: torch.compile(m, backend="eager"),
        "ddp of compiled": lambda m: Wrapped(torch.compile(m, backend="eager")),
        "compiled ddp": lambda m: torch.compile(Wrapped(m), backend="eager"),
    }
    for number, wrap in enumerate(shapes.values()):
        store.commit(wrap(plain), branch=f"b{number}")
    assert any("_orig_mod" in name for name in store.checkout("b2"))
    for number in range(len(shapes)):
        for name, wrap in shapes.items():
            inner = Small()
            store.checkout(f"b{number}").load_into(wrap(inner))
            assert bits(inner) == bits(plain), (number, name)
        assert not store.diff("b0", f"b{number}")


def test_prefixes_that_mean_something_are_not_mixed_up(store: DeltaStore) -> None:
    """A model may hold both `w` and `module.w`."""
    state = {"module.w": torch.tensor([1.0]), "w": torch.tensor([2.0])}
    store.commit(state)
    target = {name: torch.zeros(1) for name in state}
    store.checkout().load_into(target)
    assert same(target, state)
    with pytest.raises(IncompatibleStateError):
        store.checkout().load_into({"_orig_mod.w": torch.zeros(1)})
    store.commit({"module.v": torch.tensor([1.0]), "_orig_mod.v": torch.tensor([2.0])}, branch="two")
    for strict in (True, False):  # which of the two is meant, nobody knows
        target = {"v": torch.zeros(1)}
        if strict:
            with pytest.raises(IncompatibleStateError):
                store.checkout("two").load_into(target)
        else:
            assert store.checkout("two").load_into(target, strict=False).names == ()
        assert target["v"] == 0
    other = {"w": torch.zeros(1)}
    assert store.checkout().load_into(other, strict=False).names == ("w",)
    assert other["w"] == 2


def test_an_optimizer_notices_new_values(store: DeltaStore) -> None:
    """A graph that saved the old values fails instead of giving wrong gradients."""
    weight = torch.nn.Parameter(torch.ones(3))
    store.commit({"w": torch.full((3,), 2.0)})
    loss = (weight * weight).sum()
    store.checkout().load_into({"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_loaded_and_committed_tensors_are_let_go(store: DeltaStore) -> None:
    model = Small()
    store.commit(model)
    loaded = store.checkout().load()
    state = store.checkout().state()
    target = Small()
    store.checkout().load_into(target)
    watched = [weakref.ref(t) for t in (*loaded.values(), *state.values(), *target.parameters(), *model.parameters())]
    assert all(reference() is not None for reference in watched)
    del loaded, state, target, model
    gc.collect()
    assert not [reference for reference in watched if reference() is not None]


def test_loading_twice_gives_separate_memory(store: DeltaStore) -> None:
    store.commit({"w": torch.zeros(3)})
    first, second = store.checkout().load(), store.checkout().load()
    first["w"] += 1
    assert second["w"].tolist() == [0, 0, 0]
    assert store.checkout().load()["w"].tolist() == [0, 0, 0]
    assert store.checkout()["w"].load().data_ptr() != store.checkout()["w"].load().data_ptr()


def test_a_commit_after_a_load_holds_the_live_values(store: DeltaStore) -> None:
    """Neither the loaded values nor the ones before, once training went on."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    store.commit(model)
    state = store.checkout().state()
    store.checkout().load_into(model)
    model.load_state_dict(state)
    for _ in range(3):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        store.commit(model)
        assert list(map(raw, store.checkout().load().values())) == bits(model)
    assert store.diff("main~3", "main").changed_elements >= 8


def test_what_is_committed_is_a_copy(store: DeltaStore) -> None:
    tensor = torch.zeros(1_100_000)
    store.commit({"w": tensor})
    tensor += 1
    assert not store.checkout().load()["w"].any()
    store.commit({"w": tensor})
    tensor += 1
    assert same(store.checkout().load()["w"], torch.ones(1_100_000))
