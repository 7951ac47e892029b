"""Models whose values are elsewhere: a resolver gives them when they are read (case C15)."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import raw, same

from deltastore import DeltaStore
from deltastore.errors import IncompatibleStateError, InvalidInputError


def offloaded(folder: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model on the meta device and one parameter in memory, its other values in one memory-mapped file each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20), torch.nn.Linear(30, 20, bias=False))
    model[2].weight = model[1].weight
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    folder.mkdir()
    for name, value in values.items():
        if name != "0.bias":
            mapped = np.memmap(folder / name, np.float32, "w+", shape=tuple(value.shape))
            mapped[:] = value.numpy()
            mapped.flush()
    bias = model[0].bias
    model.to("meta")
    model[2].weight = model[1].weight
    model[0].bias = torch.nn.Parameter(bias.detach().clone())
    return model, values


def test_an_offloaded_model_is_committed_from_disk(store: DeltaStore, tmp_path: Path) -> None:
    model, values = offloaded(tmp_path / "offload")
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    asked: list[str] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def resolve(name: str) -> torch.Tensor:
        gc.collect()
        assert not [reference for reference in alive if reference() is not None]  # one is resident at a time
        asked.append(name)
        found = torch.from_numpy(np.memmap(tmp_path / "offload" / name, np.float32, "c", shape=shapes[name]))
        alive.append(weakref.ref(found))
        return found

    store.commit(model, resolver=resolve)
    assert sorted(set(asked)) == ["0.weight", "1.bias", "1.weight"]  # neither the one in memory nor the second name of a tie
    assert same(store.checkout().load(), values)
    assert store.checkout().nbytes == sum(value.nbytes for name, value in values.items() if name != "2.weight")
    asked.clear()
    store.commit({"model": model}, resolver=lambda name: resolve(name.removeprefix("model.")), branch="nested")
    assert same(dict(store.checkout("nested").state()["model"]), values)
    store.commit(model, resolver=resolve)
    assert not store.diff("main~1", "main")


def test_without_a_resolver_nothing_is_written(store: DeltaStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    message = r"(?s)2 of 4 tensors can't be committed.*\['1\.weight'\] is on the meta device.*resolver=.*\['1\.bias'\]"
    with pytest.raises(IncompatibleStateError, match=message):
        store.commit(model)
    assert not store.list_refs()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(4), IncompatibleStateError, r"float32\[4\] for 'w', which is float32\[3\]"),
        (torch.ones(3).half(), IncompatibleStateError, r"float16\[3\] for 'w', which is float32\[3\]"),
        (torch.ones(3, device="meta"), IncompatibleStateError, "gave for 'w' is on the meta device"),
        (np.ones(3, np.float32), InvalidInputError, "gave a ndarray for 'w'"),
        (None, InvalidInputError, "gave a NoneType for 'w'"),
    ],
)
def test_what_a_resolver_gives_is_checked(store: DeltaStore, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        store.commit({"w": torch.ones(3, device="meta")}, resolver=lambda name: given)
    assert not store.list_refs()
    with pytest.raises(InvalidInputError, match="resolver is a dict"):
        store.commit({"w": torch.ones(3, device="meta")}, resolver={})  # type: ignore[arg-type]


def test_a_resolver_may_give_a_source_and_values_are_cast(store: DeltaStore) -> None:
    class Ramp:
        dtype, shape, frozen = "float32", (2_500_000,), False

        def read(self, start: int, stop: int) -> np.ndarray:
            return np.arange(start, stop, dtype=np.float32).view(np.uint8)

    state = {"w": torch.empty(2_500_000, device="meta"), "b": torch.ones(2)}
    store.commit(state, resolver=lambda name: Ramp(), cast={"w": torch.float64})
    assert raw(store.checkout()["w"].load()) == raw(torch.arange(2_500_000, dtype=torch.float64))


def test_errors_of_a_resolver_come_through(store: DeltaStore) -> None:
    def failing(name: str) -> Any:
        raise FileNotFoundError(f"{name}.dat")

    with pytest.raises(FileNotFoundError, match=r"w\.dat"):
        store.commit({"w": torch.ones(3, device="meta")}, resolver=failing)
    store.commit({"w": torch.ones(3, device="meta")}, resolver=lambda name: torch.zeros(3))
    assert store.checkout()["w"].load().tolist() == [0, 0, 0]
