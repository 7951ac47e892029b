"""Selections of lazy tensors against torch, over many small chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from store_states import raw, same

import deltastore.checkout
import deltastore.options
import deltastore.regions
import deltastore.scanner
import deltastore.versions
from deltastore import DeltaStore
from deltastore.errors import InvalidInputError, TensorNotFoundError

SHAPES = {
    "4d": (7, 5, 6, 11),
    "3d": (3, 129, 2),
    "2d": (40, 50),
    "1d": (1000,),
    "ones": (1, 1, 70, 1),
    "0d": (),
    "empty": (4, 0, 3),
}


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeltaStore, dict[str, torch.Tensor]]]:
    """Tensors in a store whose chunks have 64 elements, so that small selections run through many chunks."""
    patch = pytest.MonkeyPatch()
    modules = deltastore.checkout, deltastore.versions, deltastore.options, deltastore.regions, deltastore.scanner
    for module in modules:
        patch.setattr(module, "CHUNK_ELEMENTS", 64)
    tensors = {
        "4d": torch.arange(7 * 5 * 6 * 11, dtype=torch.int32).view(7, 5, 6, 11),
        "3d": torch.arange(3 * 129 * 2, dtype=torch.int16).view(3, 129, 2),
        "2d": torch.randn(40, 50, dtype=torch.complex128),
        "1d": torch.arange(1000, dtype=torch.uint8),
        "ones": torch.arange(70).view(1, 1, 70, 1),
        "0d": torch.tensor(3.5),
        "empty": torch.empty(4, 0, 3),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    with DeltaStore.create(tmp_path_factory.mktemp("grids") / "store") as store:
        store.commit(tensors)
        version = store._versions.get(store.get_commit().id)
        assert version.tensors[0].chunks == -(-7 * 5 * 6 * 11 // 64)
        yield store, tensors
    patch.undo()


def indices(size: int) -> st.SearchStrategy[Any]:
    bound = st.none() | st.integers(-size - 2, size + 2)
    slices = st.builds(slice, bound, bound, st.none() | st.integers(1, size + 2))
    return slices if size == 0 else slices | st.integers(-size, size - 1)


@st.composite
def selections(draw: st.DrawFn) -> tuple[str, list[Any]]:
    """The name of a tensor, and some indices to apply one after another."""
    shapes = {
        "4d": (7, 5, 6, 11),
        "3d": (3, 129, 2),
        "2d": (40, 50),
        "1d": (1000,),
        "ones": (1, 1, 70, 1),
        "0d": (),
        "empty": (4, 0, 3),
    }
    name = draw(st.sampled_from(sorted(shapes)))
    probe = torch.empty(shapes[name], dtype=torch.uint8)
    chosen: list[Any] = []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(0, probe.dim()))
        front = [draw(indices(size)) for size in probe.shape[:count]]
        if draw(st.booleans()):
            back = draw(st.integers(0, probe.dim() - count))
            front += [..., *(draw(indices(size)) for size in probe.shape[probe.dim() - back :])] if back else [...]
        index = front[0] if len(front) == 1 and draw(st.booleans()) else tuple(front)
        chosen.append(index)
        probe = probe[index]
    return name, chosen


@settings(max_examples=150, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(selection=selections())
@example(selection=("4d", [(slice(1, 6, 2), slice(None, None, 3), 2, slice(3, 9, 4))]))
@example(selection=("4d", [(..., 10)]))
@example(selection=("3d", [(slice(None), slice(5, 120, 7)), (1, slice(2, 9, 3))]))
@example(selection=("0d", [()]))
@example(selection=("0d", [...]))
def test_selections_are_those_of_torch(
    grids: tuple[DeltaStore, dict[str, torch.Tensor]], selection: tuple[str, list[Any]]
) -> None:
    store, tensors = grids
    name, chosen = selection
    lazy, expected = store.checkout()[name], tensors[name]
    for index in chosen:
        lazy, expected = lazy[index], expected[index]
    assert lazy.shape == tuple(expected.shape)
    assert lazy.nbytes == expected.numel() * expected.element_size()
    assert same(lazy.load(), expected.clone())
    assert lazy.tobytes() == raw(expected)


@pytest.mark.parametrize(
    "index",
    [
        7, -8, (0, 5), (0, 0, 0, 0, 0), (..., ...), None, True, [0], "0", 1.0, slice(0, 3, -1), slice(0, 3, 0), slice(0, 2.5),
        slice("a"), torch.tensor([0, 1]), torch.tensor(1.5), np.array([True, False]), np.float64(1), (0, None), {},
        torch.ones(7, dtype=torch.bool),
    ],
    ids=repr,
)  # fmt: skip
def test_indices_that_are_none(grids: tuple[DeltaStore, dict[str, torch.Tensor]], index: Any) -> None:
    with pytest.raises(InvalidInputError):
        grids[0].checkout()["4d"][index]


@pytest.mark.parametrize("index", [torch.tensor(3), np.int64(3), np.uint8(3)], ids=repr)
def test_integers_of_other_libraries(grids: tuple[DeltaStore, dict[str, torch.Tensor]], index: Any) -> None:
    assert same(grids[0].checkout()["1d"][index].load(), torch.tensor(3, dtype=torch.uint8))


def test_lengths_and_names_of_lazy_tensors(grids: tuple[DeltaStore, dict[str, torch.Tensor]]) -> None:
    snapshot = grids[0].checkout()
    with pytest.raises(TypeError, match="0-dim"):
        len(snapshot["0d"])
    assert len(snapshot["4d"][2:5]) == 3
    assert snapshot["4d"][1].name == "4d"
    for name in ("5d", "", 3, None):
        with pytest.raises(TensorNotFoundError):
            snapshot[name]
        assert name not in snapshot
