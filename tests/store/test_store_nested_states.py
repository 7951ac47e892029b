"""Nested states: structure, key types, plain values and ties come back as they were."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from store_states import objects, raw, same

from deltastore import DeltaStore
from deltastore.errors import IncompatibleStateError, TensorNotFoundError


def trained_model(steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": dict(scheduler.state_dict()),
        "random": {"torch": torch.get_rng_state()},
        "step": 3,
    }


def test_training_state_comes_back_with_types_and_order(store: DeltaStore) -> None:
    state = training_state(*trained_model())
    assert type(next(iter(state["optimizer"]["state"]))) is int
    store.commit(state)
    found = store.checkout().state()
    assert same(found, state)
    assert found["model"]._metadata == state["model"]._metadata
    assert found["optimizer"]["state"][0]["step"].shape == ()
    assert found["optimizer"]["state"][0]["step"].dtype == torch.float32


def test_a_resumed_run_goes_on_like_one_that_was_not_interrupted(store: DeltaStore) -> None:
    model, optimizer, scheduler = trained_model(5)
    store.commit(training_state(model, optimizer, scheduler))
    other, fresh, plan = trained_model(0)
    state = store.checkout().state()
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    plan.load_state_dict(state["scheduler"])
    batch = torch.randn(4, 6)
    for each, stepper in ((model, optimizer), (other, fresh)):
        each(batch).square().sum().backward()
        stepper.step()
    assert all(raw(a) == raw(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


ODD_STATE = {
    "none": None,
    "flags": [True, False, 1, 0, 1.0, 0.0],
    "floats": (math.nan, -0.0, math.inf, -math.inf, 5e-324, 0.1),
    "bytes": b"\x00\xff\x80",
    "texts": ["", "\u00fc", "u\u0308", "\u4f60\u597d", "\U0001f600", "\x00", "a\nb"],
    "integers": [2**200, -(2**63), 0, -1],
    "empty": [{}, [], (), OrderedDict()],
    "mixed keys": {0: torch.ones(1), "0": torch.zeros(1), True: 1, None: 2, b"0": 3, 0.5: 4},
    "ordered": OrderedDict([("z", 1), ("a", torch.tensor(2))]),
    "deep": ({"a": [({"b": torch.tensor([1.5])},)]},),
    "no elements": torch.empty(0, 3, dtype=torch.int8),
}


def test_odd_values_and_containers(store: DeltaStore) -> None:
    store.commit(ODD_STATE)
    found = store.checkout().state()
    assert same(found, ODD_STATE)
    payload_nan = torch.tensor([0x7FF8_0000_0000_1234], dtype=torch.int64).view(torch.float64).item()
    store.commit({"value": payload_nan})
    assert same(store.checkout().state(), {"value": payload_nan})


def test_plain_values_are_part_of_the_version(store: DeltaStore) -> None:
    trees = [store.commit({"t": torch.ones(2), "value": value}).tree for value in (1, 1.0, True, "1", b"1", None, -0.0, 0.0)]
    assert len(set(trees)) == len(trees)
    assert store.commit({"value": 1, "t": torch.ones(2)}).tree not in trees  # another order is another version
    assert store.commit({"t": torch.ones(2), "value": 1}).tree == trees[0]


@pytest.mark.parametrize("size", [65_000, 66_000, 3_000_000])
def test_large_plain_values(store: DeltaStore, folder: Path, size: int) -> None:
    state = {"text": "ü" * (size // 2), "t": torch.arange(3), "list": list(range(50))}
    store.commit(state)
    assert same(store.checkout().state(), state)
    assert max(objects(folder, "commits").values()) < 80_000
    before = sum(objects(folder).values())
    state["list"][7] = -1  # a value beside it moves: the large ones are not stored anew
    store.commit(state)
    assert same(store.checkout().state(), state)
    assert same(store.checkout("main~1").state()["list"], list(range(50)))
    if size > 1_000_000:
        assert sum(objects(folder).values()) - before < size // 10
    assert list(store.checkout()) == ["t"]  # they are no tensors of the state


def test_a_bare_tensor_and_an_empty_state(store: DeltaStore) -> None:
    store.commit({})
    assert store.checkout().state() == {}
    assert store.checkout().load() == {}
    assert len(store.checkout()) == 0
    store.commit(torch.arange(4))
    assert same(store.checkout().state(), torch.arange(4))
    assert same(store.checkout()[()].load(), torch.arange(4))
    store.commit([])
    assert store.checkout().state() == []


# -- names and paths --------------------------------------------------------------------------------------------------


def test_leaves_are_found_by_name_and_by_typed_path(store: DeltaStore) -> None:
    state = {
        "optimizer": {"state": {0: {"m": torch.tensor([1])}}},
        "list": [torch.tensor([2]), (torch.tensor([3]),)],
        "a.b": torch.tensor(4),
    }
    store.commit(state)
    snapshot = store.checkout()
    assert list(snapshot) == ["optimizer.state.0.m", "list.0", "list.1.0", "a.b"]
    assert snapshot["optimizer.state.0.m"].load().item() == 1
    assert snapshot["optimizer", "state", 0, "m"].load().item() == 1
    assert snapshot["list", 1, 0].load().item() == 3
    assert snapshot[("a.b",)].load().item() == 4
    with pytest.raises(TensorNotFoundError):
        snapshot["optimizer", "state", "0", "m"]
    with pytest.raises(TensorNotFoundError):
        snapshot["optimizer", "state", False, "m"]
    with pytest.raises(TensorNotFoundError):
        snapshot["optimizer", "state"]
    with pytest.raises(TensorNotFoundError, match=r"did you mean optimizer\.state\.0\.m"):
        snapshot["optimizer.state.0.n"]
    assert "list.0" in snapshot
    assert "list.2" not in snapshot
    assert len(snapshot) == 4


# -- ties -------------------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        first, second = ("head", "embed") if reverse else ("embed", "head")
        setattr(self, first, torch.nn.Linear(300, 200, bias=False))
        setattr(self, second, torch.nn.Linear(300, 200, bias=False))
        getattr(self, second).weight = getattr(self, first).weight
        self.other = torch.nn.Parameter(torch.randn(5))


def test_ties_are_stored_once_and_come_back_as_one_storage(store: DeltaStore, folder: Path) -> None:
    model = Tied()
    store.commit(model)
    assert store.checkout().nbytes == 300 * 200 * 4 + 5 * 4
    assert sum(objects(folder, "packs").values()) < 1.05 * 300 * 200 * 4
    for found in (store.checkout().load(), store.checkout().state()):
        assert list(found) == ["other", "embed.weight", "head.weight"]
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
        assert raw(found["head.weight"]) == raw(model.head.weight)
    part = store.checkout().load(["head.weight"])
    assert raw(part["head.weight"]) == raw(model.head.weight)


def test_ties_declared_the_other_way_round_are_filled(store: DeltaStore) -> None:
    model = Tied()
    store.commit(model)
    target = Tied(reverse=True)
    pointer = target.head.weight.data_ptr()
    store.checkout().load_into(target)
    assert target.head.weight is target.embed.weight
    assert target.head.weight.data_ptr() == pointer
    assert raw(target.head.weight) == raw(model.embed.weight)
    assert raw(target.other) == raw(model.other)


def test_ties_into_separate_tensors_fill_both(store: DeltaStore) -> None:
    shared = torch.randn(4)
    store.commit({"a": shared, "b": shared})
    target = {"a": torch.zeros(4), "b": torch.zeros(4)}
    store.checkout().load_into(target)
    assert raw(target["a"]) == raw(target["b"]) == raw(shared)


def test_separate_values_do_not_go_into_tied_tensors(store: DeltaStore) -> None:
    store.commit({"a": torch.ones(4), "b": torch.zeros(4)})
    shared = torch.full((4,), 7.0)
    with pytest.raises(IncompatibleStateError, match=r"'a' and 'b' are one tensor"):
        store.checkout().load_into({"a": shared, "b": shared})
    assert raw(shared) == raw(torch.full((4,), 7.0))
    store.commit({"a": torch.ones(4), "b": torch.ones(4)})  # equal values fit
    store.checkout().load_into({"a": shared, "b": shared})
    assert raw(shared) == raw(torch.ones(4))


def test_what_is_a_tie_and_what_is_none(store: DeltaStore) -> None:
    base = torch.arange(12)
    state = {
        "all": base,
        "view": base.view(12),
        "shape": base.view(3, 4),
        "part": base[:6],
        "turned": base.view(3, 4).t(),
        "none": base[:0],
        "none too": base[:0],
        "copy": base.clone(),
    }
    store.commit(state)
    found = store.checkout().state()
    assert same(found, state)
    pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items() if tensor.numel()}
    assert pointers["all"] == pointers["view"]
    assert len(set(pointers.values())) == len(pointers) - 1


def test_a_module_and_its_state_dict_give_the_same_tree(store: DeltaStore) -> None:
    model = Tied()
    trees = {
        store.commit(model).tree,
        store.commit(model.state_dict()).tree,
        store.commit(store.checkout().state()).tree,
    }
    assert len(trees) == 1
    untied = OrderedDict((name, tensor.clone()) for name, tensor in model.state_dict().items())
    untied._metadata = model.state_dict()._metadata
    assert store.commit(untied).tree not in trees


# -- anything ---------------------------------------------------------------------------------------------------------

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
keys = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=3)
)
tensors = st.builds(
    lambda data, dtype: torch.frombuffer(bytearray(data * 8 or b"\0" * 8), dtype=torch.uint8).view(dtype).clone(),
    st.binary(max_size=4),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.uint8]),
)
states = st.recursive(
    st.one_of(scalars, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(state=states.filter(lambda state: not isinstance(state, str)))  # a text is the path of a checkpoint
def test_any_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    with any_store(tmp_path_factory) as store:
        commit = store.commit(state)
        found = store.checkout(commit.id).state()
        assert same(found, state)
        assert store.commit(found).tree == commit.tree


_folders: list[Path] = []


def any_store(factory: pytest.TempPathFactory) -> DeltaStore:
    """One store for all examples."""
    if not _folders:
        _folders.append(factory.mktemp("any") / "store")
    return DeltaStore.create(_folders[0], exist_ok=True)
