"""What can't be committed is refused by name before a byte is read, and nothing is written."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import bucket_objects, sql

from deltastore import DeltaStore
from deltastore.errors import DeltaStoreError, IncompatibleStateError, InvalidInputError, RefConflictError
from deltastore.tensors import TorchSource


@pytest.fixture(scope="module")
def one_commit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeltaStore]:
    with DeltaStore.create(tmp_path_factory.mktemp("refusals") / "store") as opened:
        opened.commit({"good": torch.ones(3)}, "the good one")
        opened.create_tag("a-tag")
        yield opened


@pytest.fixture
def unchanged(one_commit: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeltaStore]:
    """A store of one commit; fails the test when anything was read from a tensor, written, or noted in the index."""
    folder = Path(one_commit.address)
    before = bucket_objects(folder), sql(folder, "SELECT * FROM object"), sql(folder, "SELECT * FROM ref")
    assert before[0]
    read: list[tuple[int, int]] = []
    original = TorchSource.read

    def recorded(self: TorchSource, start: int, stop: int) -> Any:
        read.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(TorchSource, "read", recorded)
    yield one_commit
    assert not read
    assert (bucket_objects(folder), sql(folder, "SELECT * FROM object"), sql(folder, "SELECT * FROM ref")) == before
    assert sql(folder, "SELECT count(*) FROM object WHERE state = 'pending'") == [(0,)]


class Subclass(torch.Tensor):
    pass


class Packed(torch.Tensor):
    """A wrapper that is two tensors, as quantisation libraries make them."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Packed:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        wrapper.data_, wrapper.scale = data, scale
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(3))


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


TENSORS = {
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "int_repr|dequantize"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "to_dense"),
    "nested": (nested, "unbind"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "fake": (fake, "FakeTensorMode"),
    "functional": (functional, "functional"),
    "freed": (freed, "no memory"),
    "unknown subclass": (lambda: torch.ones(3).as_subclass(Subclass), "Subclass"),
    "wrapper subclass": (lambda: Packed(torch.ones(3, dtype=torch.int8), torch.ones(1)), "Packed"),
    "uninitialised": (lambda: torch.nn.LazyLinear(3).weight, "not initialised"),
}


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_without_plain_memory(unchanged: DeltaStore, kind: str) -> None:
    make, hint = TENSORS[kind]
    state = {"fine": torch.ones(2), "layers": [{"bad.one": make()}]}
    with pytest.raises(IncompatibleStateError, match=r"\['layers'\]\[0\]\['bad\.one'\]") as caught:
        unchanged.commit(state)
    assert any(word in str(caught.value) for word in hint.split("|"))


def test_all_bad_tensors_are_named_at_once(unchanged: DeltaStore) -> None:
    state = {"a": torch.ones(2, device="meta"), "b": torch.ones(2), "c": torch.eye(2).to_sparse()}
    with pytest.raises(IncompatibleStateError, match=r"2 of 3 tensors") as caught:
        unchanged.commit(state)
    assert "'a'" in str(caught.value)
    assert "'c'" in str(caught.value)
    assert "'b'" not in str(caught.value)


def test_a_module_with_one_meta_parameter(unchanged: DeltaStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(IncompatibleStateError, match=r"'1\.weight'"):
        unchanged.commit(model)


def test_a_distributed_tensor(unchanged: DeltaStore, tmp_path: Path) -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(IncompatibleStateError, match=r"'w'.*DTensor.*full_tensor"):
            unchanged.commit({"w": tensor})
    finally:
        distributed.destroy_process_group()


class Pair(tuple):
    __slots__ = ()


class Loader:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


VALUES: dict[str, tuple[Any, str]] = {
    "numpy array": (np.ones(3), "from_numpy"),
    "numpy scalar": (np.float32(1), r"item\(\)"),
    "set": ({1, 2}, "sorted"),
    "complex": (1j, r"value\.real"),
    "size": (torch.Size([1, 2]), "tuple"),
    "dtype": (torch.float32, "str"),
    "device": (torch.device("cpu"), "str"),
    "named tuple": (collections.namedtuple("Point", "x y")(1, 2), "tuple"),
    "default dict": (collections.defaultdict(int), "dict"),
    "tuple subclass": (Pair([1]), "tuple"),
    "object": (object(), "plain values"),
    "function": (len, "plain values"),
    "live object": (Loader(), r"\[1\]\['seen'\] is a builtins\.set"),
    "bytearray": (bytearray(b"a"), "bytes"),
    "surrogate": ("\ud800", "surrogate"),
    "surrogate key": ({"\udfff": 1}, "surrogate"),
    "tuple key": ({(1, 2): 1}, "key"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_a_state_can_not_hold(unchanged: DeltaStore, kind: str) -> None:
    value, hint = VALUES[kind]
    with pytest.raises(IncompatibleStateError, match=hint) as caught:
        unchanged.commit({"t": torch.ones(1), "extra": [0, value]})
    assert "'extra'" in str(caught.value)


def test_cycles_and_towers(unchanged: DeltaStore) -> None:
    cycle: dict[str, Any] = {"t": torch.ones(1)}
    cycle["self"] = [cycle]
    with pytest.raises(IncompatibleStateError, match="itself"):
        unchanged.commit(cycle)
    tower: Any = torch.ones(1)
    for _ in range(100_000):
        tower = [tower]
    with pytest.raises(IncompatibleStateError, match="deep"):
        unchanged.commit(tower)
    while isinstance(tower, list):  # taken apart by hand: a very deep list would overflow the stack when it dies
        tower = tower.pop()


ARGUMENTS: dict[str, tuple[dict[str, Any], type[DeltaStoreError], str]] = {
    "branch": ({"branch": "no spaces"}, InvalidInputError, "no spaces"),
    "branch as text": ({"branch": 3}, InvalidInputError, "3"),
    "message": ({"message": 7}, InvalidInputError, "message"),
    "message surrogate": ({"message": "\ud800"}, InvalidInputError, "surrogate"),
    "author": ({"author": 7}, InvalidInputError, "author"),
    "metadata key": ({"metadata": {1: 2}}, InvalidInputError, "metadata"),
    "metadata key surrogate": ({"metadata": {"\ud800": 2}}, InvalidInputError, "surrogate"),
    "metadata value": ({"metadata": {"loss": [object()]}}, InvalidInputError, r"metadata\['loss'\]\[0\] is a builtins\.object"),
    "large metadata": ({"metadata": {"a": "x" * 70_000}}, InvalidInputError, "65536"),
    "tag": ({"tag": "..", "branch": "main"}, InvalidInputError, "'..'"),
    "tag that is there": ({"tag": "main"}, DeltaStoreError, "exists"),
    "tag named like the new branch": ({"tag": "fresh", "branch": "fresh"}, DeltaStoreError, "fresh"),
    "branch that is a tag": ({"branch": "a-tag"}, InvalidInputError, "tag"),
    "head": ({"expected_head": "0" * 64}, RefConflictError, "moved"),
    "file name": ({"files": {"../x": b""}}, InvalidInputError, r"\.\./x"),
    "absolute file name": ({"files": {"/x": b""}}, InvalidInputError, "/x"),
    "empty file name": ({"files": {"": b""}}, InvalidInputError, "''"),
    "NUL in a file name": ({"files": {"a\0": b""}}, InvalidInputError, "name of a file"),
    "backslash in a file name": ({"files": {"a\\b": b""}}, InvalidInputError, "name of a file"),
    "surrogate in a file name": ({"files": {"\ud800": b""}}, InvalidInputError, "name of a file"),
    "file that is missing": ({"files": {"x": "/no/such/file"}}, InvalidInputError, "/no/such/file"),
    "file that is a folder": ({"files": {"x": "/"}}, InvalidInputError, "'x'"),
    "file of another type": ({"files": {"x": 3}}, InvalidInputError, "'x'"),
    "cast": ({"cast": {"*": torch.int32}}, InvalidInputError, "floating"),
    "cast to nonsense": ({"cast": {"*": 7}}, InvalidInputError, "dtype"),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_that_make_no_sense(unchanged: DeltaStore, kind: str) -> None:
    arguments, error, text = ARGUMENTS[kind]
    with pytest.raises(error, match=text):
        unchanged.commit({"t": torch.ones(1)}, **arguments)


def test_files_that_are_too_large(unchanged: DeltaStore, tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(InvalidInputError, match=r"'big\.bin'.*67108865"):
        unchanged.commit({"t": torch.ones(1)}, files={"big.bin": large})
    with large.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take for ever
    with pytest.raises(InvalidInputError, match=r"'big\.bin'"):
        unchanged.commit({"t": torch.ones(1)}, files={"big.bin": large})


@pytest.mark.parametrize("source", ["no/such/place", object(), [("a", torch.ones(1))].__iter__, {"a": 1}.items(), {1, 2}])
def test_sources_that_are_none(unchanged: DeltaStore, source: Any) -> None:
    with pytest.raises(DeltaStoreError):
        unchanged.commit(source)
