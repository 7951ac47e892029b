"""Torch tensors in and out: every dtype and layout, ties, refusals, casts, targets."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.dtypes import DTYPES, dtype_of
from deltastore.errors import IncompatibleStateError, InvalidInputError
from deltastore.state import unflatten
from deltastore.targets import survey
from deltastore.tensors import (
    TorchSink,
    TorchSource,
    cast_state,
    empty_tensor,
    flatten_state,
    iterable_sources,
    module_files,
    tensor_from_bytes,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state):UserWarning", "ignore:.*deprecated:UserWarning")
NAMES = [dtype.name for dtype in DTYPES]


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def raw(tensor: torch.Tensor) -> bytes:
    """Bytes of a contiguous CPU tensor, by another way than the code under test: its storage."""
    assert tensor.is_contiguous()
    start = tensor.storage_offset() * tensor.itemsize
    return bytes(tensor.untyped_storage())[start : start + tensor.nbytes]


# -- dtypes and layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_round_trips_random_bits(name: str) -> None:
    itemsize = dtype_of(name).itemsize
    data = random_bytes(60 * itemsize)
    tensor = tensor_from_bytes(name, (3, 4, 5), data)
    assert str(tensor.dtype) == f"torch.{name}"
    assert raw(tensor) == data.tobytes()
    source = TorchSource(tensor)
    assert (source.dtype, source.shape, source.nbytes) == (name, (3, 4, 5), 60 * itemsize)
    assert source.read(0, 60).tobytes() == data.tobytes()
    assert source.read(7, 23).tobytes() == data[7 * itemsize : 23 * itemsize].tobytes()

    # the same through strides: element (i, j, k) of the permuted view is element (k, i, j) of the tensor
    elements = data.reshape(3, 4, 5, itemsize).transpose(1, 2, 0, 3).reshape(-1)
    permuted = TorchSource(tensor.permute(1, 2, 0))
    assert permuted.read(0, 60).tobytes() == elements.tobytes()
    assert permuted.read(11, 49).tobytes() == elements[11 * itemsize : 49 * itemsize].tobytes()
    target = empty_tensor(name, (3, 4, 5))
    sink = TorchSink(target.permute(1, 2, 0))
    assert sink.view(0, 60) is None
    for start, stop in [(0, 11), (49, 60), (11, 49)]:
        sink.write(start, stop, elements[start * itemsize : stop * itemsize])
    assert raw(target) == data.tobytes()


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Views of many kinds, over bits that include NaN payloads and negative zeros."""
    itemsize = dtype.itemsize
    base = tensor_from_bytes(str(dtype).removeprefix("torch."), (4, 3, 6, 5), random_bytes(360 * itemsize, 1))
    views = {
        "contiguous": base,
        "transposed": base.transpose(0, 3),
        "sliced": base[1:, :, ::2, 1:4],
        "expanded": base[:, :1].expand(4, 7, 6, 5),
        "expanded twice": base[0, 0, 0, 0].expand(3, 4),
        "channels last": base.to(memory_format=torch.channels_last),
        "narrow": base.view(-1)[17:93],
        "column": base[..., 2],
        "0-dim": base[1, 2, 3, 4],
        "one": base[2:3, 1:2, :1, 3:4],
        "empty": base[2:2],
        "empty strided": base.transpose(0, 3)[:, :, 3:3],
        "overlapping": base.view(-1).as_strided((10, 4), (2, 1), 3),
    }
    if dtype.is_complex:
        views["conjugated"] = base.conj()
        views["conjugated transposed"] = base.transpose(1, 2).conj()
        views["imaginary of conjugated"] = base.conj().imag
        views["imaginary transposed"] = base.conj().imag.transpose(0, 1)
    return views


CASES = [
    (dtype, name)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128)
    for name in layouts(dtype)
]


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_layouts_read_as_their_contiguous_copy(dtype: torch.dtype, name: str) -> None:
    view = layouts(dtype)[name]
    expected = raw(view.resolve_conj().resolve_neg().contiguous())
    source = TorchSource(view)
    count, size = view.numel(), view.itemsize
    assert source.read(0, count).tobytes() == expected
    bounds = sorted({0, 1, count // 3, count // 2, count - 1, count} & set(range(count + 1)))
    for start in bounds:
        for stop in bounds:
            if start <= stop:
                assert source.read(start, stop).tobytes() == expected[start * size : stop * size]
    assert unflatten(flatten_state([view]).tree, [0], []) == [0]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_strided_view_any_range(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    view = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    for _ in range(data.draw(st.integers(0, 3))):
        axis = data.draw(st.integers(0, view.dim() - 1))
        kind = data.draw(st.sampled_from(["transpose", "slice", "expand"]))
        if kind == "transpose":
            view = view.transpose(axis, data.draw(st.integers(0, view.dim() - 1)))
        elif kind == "slice":
            begin = data.draw(st.integers(0, view.shape[axis]))
            view = view[(slice(None),) * axis + (slice(begin, None, data.draw(st.integers(1, 3))),)]
        else:
            view = view.unsqueeze(axis).expand(*view.shape[:axis], 2, *view.shape[axis:])
    start = data.draw(st.integers(0, view.numel()))
    stop = data.draw(st.integers(start, view.numel()))
    expected = view.contiguous().view(-1)[start:stop]
    found = TorchSource(view).read(start, stop)
    assert found.tobytes() == raw(expected)
    if kind_can_be_written(view):
        view.zero_()
        TorchSink(view).write(start, stop, found)
        written = view.contiguous().view(-1)
        assert torch.equal(written[start:stop], expected)
        assert not written[:start].any()
        assert not written[stop:].any()


def kind_can_be_written(view: torch.Tensor) -> bool:
    addresses = torch.arange(0, 1).new_zeros(view.shape)
    for axis, step in enumerate(view.stride()):
        addresses += (torch.arange(view.shape[axis]) * step).view([-1 if i == axis else 1 for i in range(view.dim())])
    writable = addresses.unique().numel() == view.numel()
    if not writable:
        with pytest.raises(IncompatibleStateError, match="share one place"):
            TorchSink(view)
    return writable


def test_floats_keep_every_bit() -> None:
    words = torch.tensor([0x7F800001, 0x7FC12345, -0x80000000, 0x00000001, -0x00800000, 0x7F800000], dtype=torch.int32)
    floats = words.view(torch.float32)  # signalling and quiet NaN with payloads, -0.0, denormal, infinities
    assert TorchSource(floats).read(0, 6).tobytes() == words.numpy().tobytes()
    strided = torch.stack([floats, floats], dim=1)[:, 0]
    assert TorchSource(strided).read(0, 6).tobytes() == words.numpy().tobytes()
    target = torch.zeros(6, 2)
    TorchSink(target[:, 1]).write(0, 6, words.numpy().view(np.uint8))
    assert target[:, 1].contiguous().view(torch.int32).tolist() == words.tolist()


def test_contiguous_memory_is_shared_not_copied() -> None:
    tensor = torch.nn.Parameter(torch.zeros(4, 8))
    view = TorchSource(tensor).read(8, 16)
    tensor.data[1] = 1.0
    assert view.view(np.float32).tolist() == [1.0] * 8
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    writable = TorchSink(tensor).view(0, 4)
    assert writable is not None
    writable.view(np.float32)[:] = 7
    assert tensor[0, :4].tolist() == [7.0] * 4
    del tensor
    gc.collect()
    assert view.view(np.float32)[0] == 1.0  # the view keeps the memory


def test_reading_leaves_the_storage_resizable() -> None:
    tensor = torch.zeros(8)
    TorchSource(tensor).read(0, 8)
    tensor.untyped_storage().resize_(64)
    assert tensor.untyped_storage().nbytes() == 64


def test_freed_memory_is_an_error_not_a_read() -> None:
    tensor = torch.ones(8)
    source = TorchSource(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(IncompatibleStateError, match="freed"):
        source.read(0, 8)
    with pytest.raises(IncompatibleStateError, match=r"state\['w'\] has no memory"):
        flatten_state({"w": tensor})


def test_ranges_outside_the_tensor_are_refused() -> None:
    tensor = torch.ones(2, 3)
    for start, stop in [(-1, 2), (4, 3), (0, 7)]:
        with pytest.raises(InvalidInputError, match="6 elements of state"):
            flatten_state(tensor).tensors[0].read(start, stop)
        with pytest.raises(InvalidInputError, match="6 elements"):
            TorchSink(tensor).view(start, stop)
        with pytest.raises(InvalidInputError, match="6 elements"):
            TorchSink(tensor.t()).write(start, stop, np.zeros(8, np.uint8))
    with pytest.raises(InvalidInputError, match="12 bytes, got 8"):
        TorchSink(tensor, name="w").write(0, 3, np.zeros(8, np.uint8))
    with pytest.raises(InvalidInputError, match="got 5"):
        tensor_from_bytes("float32", (2,), b"12345")


def test_a_slice_of_a_large_storage_costs_the_slice() -> None:
    big = torch.empty(4 << 30, dtype=torch.uint8)  # pages are made when they are touched
    big[3_000_000_000:3_000_000_010] = torch.arange(10, dtype=torch.uint8)
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    for view in (big[3_000_000_000:3_000_000_010], big.view(2, -1).t()[852_516_352:852_516_362, 1]):
        flat = flatten_state({"w": view})
        assert flat.tensors[0].nbytes == 10
        assert flat.tensors[0].read(0, 10).tolist() == list(range(10))
    strided = TorchSource(big.view(2, -1).t())
    assert strided.read(2 * 852_516_352, 2 * 852_516_352 + 8)[1::2].tolist() == [0, 1, 2, 3]
    assert process.memory_info().rss - before < 32 << 20


def test_elements_beyond_two_to_the_31() -> None:
    count = (1 << 31) + 8
    tensor = torch.empty(count, dtype=torch.uint8)
    TorchSink(tensor).write(count - 8, count, np.arange(8, dtype=np.uint8))
    assert tensor[-8:].tolist() == list(range(8))
    assert TorchSource(tensor).read(count - 8, count).tolist() == list(range(8))
    pairs = tensor.view(2, -1).t()  # strided: element 2i + 1 lies at 2^30 + 4 + i
    assert TorchSource(pairs).read(count - 8, count)[1::2].tolist() == [4, 5, 6, 7]


# -- states and ties --------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("none", torch.zeros(0, 3))
        self.norm.weight.requires_grad_(False)


def test_a_module_and_its_state_dict_give_the_same_tree() -> None:
    module = Tied()
    flat, again = flatten_state(module), flatten_state(module.state_dict())
    assert (flat.tree, flat.values, flat.leaves) == (again.tree, again.values, again.leaves)
    assert flat.tree["m"] == again.tree["m"]
    names = [path[0] for path, _ in flat.leaves]
    assert names == list(module.state_dict())
    assert dict(flat.leaves)[("wte.weight",)] == dict(flat.leaves)[("head.weight",)] == 1
    assert [source.frozen for source in flat.tensors].count(True) == 1
    assert flat.tensors[dict(flat.leaves)[("norm.weight",)]].frozen
    assert not any(source.frozen for source in again.tensors)
    back = unflatten(flat.tree, list(range(len(flat.tensors))), flat.values)
    assert type(back) is OrderedDict
    assert back._metadata == module.state_dict()._metadata


def test_what_is_tied_and_what_is_not() -> None:
    base = torch.zeros(4, 4)
    empty = torch.zeros(0)
    state = {
        "base": base,
        "same object": base,
        "same view": base.view(4, 4),
        "detached": base.detach(),
        "transposed": base.t(),
        "reshaped": base.view(16),
        "overlapping": base[:2],
        "other bits": base.view(torch.int32),
        "equal": torch.zeros(4, 4),
        "empty": empty,
        "same empty": empty,
    }
    flat = flatten_state(state)
    tied = [path[0] for path, index in flat.leaves if index == 0]
    assert tied == ["base", "same object", "same view", "detached"]
    assert len(flat.tensors) == len(state) - 3
    lazy = torch.zeros(3, dtype=torch.complex64)
    assert len(flatten_state([lazy, lazy.conj(), lazy.conj()]).tensors) == 2


def test_a_tie_is_frozen_only_under_all_its_names() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    assert flatten_state([parameter, parameter]).tensors[0].frozen
    assert not flatten_state([parameter, parameter.data]).tensors[0].frozen
    assert not flatten_state([parameter.data]).tensors[0].frozen


def test_optimizer_and_scheduler_states_round_trip() -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(module.parameters(), 0.5), lambda step: 0.5)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    flat = flatten_state(state)
    tensors = [tensor_from_bytes(s.dtype, s.shape, s.read(0, math.prod(s.shape))) for s in flat.tensors]
    back = unflatten(flat.tree, tensors, flat.values)
    assert back["scheduler"] == state["scheduler"]
    assert list(back["optimizer"]["state"]) == [0, 1]
    assert back["optimizer"]["state"][0]["step"].shape == ()
    torch.testing.assert_close(back["optimizer"], state["optimizer"], rtol=0, atol=0)
    assert back["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    torch.optim.AdamW(module.parameters()).load_state_dict(back["optimizer"])


def test_sources_share_the_memory_of_the_model() -> None:
    module = torch.nn.Linear(2, 2)
    flat = flatten_state(module)
    module.weight.data.fill_(3)
    assert flat.tensors[0].read(0, 4).view(np.float32).tolist() == [3.0] * 4


# -- refusals ---------------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def fake_tensor() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(2)


def distributed_tensor() -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return torch.Tensor._make_wrapper_subclass(DTensor, (2,))  # its type is what counts


REFUSED: dict[str, tuple[Any, str]] = {
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"quantised .*int_repr\(\)"),
    "sparse coo": (lambda: torch.eye(3).to_sparse(), r"sparse_coo; .*to_dense\(\)"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), r"sparse_csr; .*to_dense\(\)"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), r"_mkldnn; .*to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"nested tensor; .*unbind\(\)"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"nested tensor; .*unbind\(\)",
    ),
    "meta": (lambda: torch.zeros(3, device="meta"), r"meta device.*to_empty"),
    "fake": (fake_tensor, "fake tensor"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(2)), "functional tensor.*_from_functional_tensor"),
    "dtensor": (distributed_tensor, r"DTensor; .*full_tensor\(\)"),
    "subclass": (lambda: torch.ones(2).as_subclass(Subclass), r"\.Subclass, an unknown tensor subclass"),
    "uninitialised": (lambda: torch.nn.LazyLinear(3).weight, "not initialised; run the model once"),
    "freed": (lambda: [t := torch.ones(2), t.untyped_storage().resize_(0)][0], "no memory behind it"),
    "negated integers": (lambda: torch._neg_view(torch.ones(2, dtype=torch.int32)), r"resolve_neg\(\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_plain_memory_are_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    tensor = make()
    with pytest.raises(IncompatibleStateError, match=r"^state\['layers'\]\[1\] .*" + message):
        flatten_state({"layers": [torch.ones(1), tensor]})
    with pytest.raises(IncompatibleStateError, match=r"^'w' .*" + message):
        list(iterable_sources([("w", tensor)]))
    with pytest.raises(IncompatibleStateError, match=message):
        survey([tensor])


def test_all_refused_tensors_are_listed() -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1, device="meta") for _ in range(6)])
    with pytest.raises(IncompatibleStateError, match=r"(?s)^12 of 12 tensors can't be committed.*0.weight.*and 2 more$"):
        flatten_state(module)


def test_tensors_inside_a_transform_are_refused() -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(IncompatibleStateError, match=r"torch\.func"):
            flatten_state([tensor])
        return tensor

    assert torch.func.vmap(inside)(torch.ones(2)).shape == (2,)


# -- casts ------------------------------------------------------------------------------------------------------------


def test_cast_changes_floating_tensors_only() -> None:
    wide = torch.randn(40, 50, dtype=torch.float64)
    state = {
        "a.weight": wide.float(),
        "a.bias": wide[0].bfloat16(),
        "b.strided": wide.t(),
        "count": torch.arange(3),
        "phase": torch.ones(2, dtype=torch.complex64),
        "packed": empty_tensor("float4_e2m1fn_x2", (2,)),
    }
    flat = flatten_state(state, cast={"a.bias": torch.float32, "*": torch.bfloat16})
    found = {path[0]: flat.tensors[index] for path, index in flat.leaves}
    assert {name: source.dtype for name, source in found.items()} == {
        "a.weight": "bfloat16",
        "a.bias": "float32",
        "b.strided": "bfloat16",
        "count": "int64",
        "phase": "complex64",
        "packed": "float4_e2m1fn_x2",
    }
    for name, target in (("a.weight", torch.bfloat16), ("a.bias", torch.float32), ("b.strided", torch.bfloat16)):
        expected = raw(state[name].to(target).contiguous())
        count = state[name].numel()
        assert found[name].nbytes == len(expected)
        assert found[name].read(0, count).tobytes() == expected
        assert found[name].read(3, 17).tobytes() == expected[3 * target.itemsize : 17 * target.itemsize]
    assert flatten_state(state, cast={"*": "bfloat16"}).tensors[0].dtype == "bfloat16"
    unchanged = flatten_state(state, cast={"A.*": torch.bfloat16})  # case matters
    assert unchanged.tensors[0].dtype == "float32"


@pytest.mark.parametrize("target", [torch.int8, torch.complex64, torch.float4_e2m1fn_x2, "int8", None, 16], ids=str)
def test_cast_targets_must_be_floating(target: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"cast\['\*'\]"):
        flatten_state({"w": torch.ones(2)}, cast={"*": target})


def test_a_cast_may_not_break_a_tie() -> None:
    shared = torch.ones(2)
    state = {"in": shared, "out": shared}
    with pytest.raises(InvalidInputError, match=r"state\['in'\] and state\['out'\] are one tied tensor"):
        flatten_state(state, cast={"in": torch.bfloat16})
    assert len(cast_state(flatten_state(state), {"*": torch.float16}).tensors) == 1


# -- iterables --------------------------------------------------------------------------------------------------------


def test_iterables_keep_one_tensor_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            gc.collect()
            assert not any(ref() is not None for ref in alive)
            tensor = torch.full((2,), float(i))
            alive.append(weakref.ref(tensor))
            pair = (f"layer.{i}", tensor)
            del tensor
            yield pair
            del pair

    names = []
    for name, source in iterable_sources(produce(), {"layer.3": torch.bfloat16}):
        names.append((name, source.dtype, bytes(source.read(0, 2))))
        del source
    assert len(alive) == 5
    assert [name for name, _, _ in names] == [f"layer.{i}" for i in range(5)]
    assert [dtype for _, dtype, _ in names] == ["float32"] * 3 + ["bfloat16", "float32"]
    assert names[2][2] == np.full(2, 2, np.float32).tobytes()


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], IncompatibleStateError, "'a' comes twice"),
        ([("a", 5)], IncompatibleStateError, "'a' is no tensor"),
        ([("a", np.ones(1))], IncompatibleStateError, "from_numpy"),
        ([("\ud800", torch.ones(1))], IncompatibleStateError, "lone surrogate"),
        ([None], InvalidInputError, "NoneType"),
        ([(0, torch.ones(1))], InvalidInputError, "pairs"),
        ([torch.ones(2)], InvalidInputError, "found a Tensor"),
    ],
    ids=["duplicate", "plain", "array", "surrogate", "none", "key", "tensor"],
)
def test_other_iterables_are_refused(pairs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(iterable_sources(pairs))


# -- targets ----------------------------------------------------------------------------------------------------------


def test_targets_are_the_live_tensors() -> None:
    module = Tied()
    targets = survey(module).tensors
    assert [target.name for target in targets] == list(module.state_dict())
    by_name = {target.name: target for target in targets}
    assert by_name["wte.weight"].tie == by_name["head.weight"].tie
    assert by_name["wte.weight"].tensor is module.wte.weight
    version = module.wte.weight._version
    TorchSink(by_name["head.weight"].tensor).write(0, 28, np.zeros(112, np.uint8))
    assert not module.wte.weight.any()
    assert module.wte.weight._version > version  # autograd notices
    nested = survey({"optimizer": {"state": {0: {"exp": torch.ones(2)}}, "lr": 0.1}}).tensors
    assert [(target.path, target.name) for target in nested] == [(("optimizer", "state", 0, "exp"), "optimizer.state.0.exp")]


def test_copies_made_by_a_module_are_no_targets() -> None:
    class Copying(torch.nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "doubled"] = 2 * self.weight.detach()

    assert len(flatten_state(Copying(2, 2)).tensors) == 3
    for target in (Copying(2, 2), {"model": torch.nn.Sequential(Copying(2, 2))}):
        with pytest.raises(IncompatibleStateError, match=r"doubled'\] is a copy .*load_state_dict"):
            survey(target)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.ones(1, 3).expand(4, 3), "expanded view"),
        (torch.ones(9).as_strided((3, 3), (2, 1)), "overlapping"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "negated"),
    ],
)
def test_targets_that_share_places_are_refused_by_name(target: torch.Tensor, message: str) -> None:
    with pytest.raises(IncompatibleStateError, match=r"state\['w'\] is .*" + message):
        survey({"w": target})
    with pytest.raises(IncompatibleStateError, match="w is .*" + message):
        TorchSink(target, name="w")


def test_sinks_take_parameters_inference_tensors_and_scalars() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    TorchSink(parameter.t()).write(1, 4, np.ones(3, np.float32).view(np.uint8))
    assert parameter.tolist() == [[0, 1], [1, 0], [1, 0]]
    with torch.inference_mode():
        frozen = torch.zeros(2, 3)
    TorchSink(frozen.t()).write(0, 6, np.ones(6, np.float32).view(np.uint8))
    TorchSink(frozen).write(0, 1, np.full(1, 5, np.float32).view(np.uint8))
    assert frozen.tolist() == [[5, 1, 1], [1, 1, 1]]
    scalar = torch.zeros((), dtype=torch.bfloat16)
    TorchSink(scalar).write(0, 1, np.array([0x3F80], np.uint16).view(np.uint8))
    assert scalar.item() == 1.0
    TorchSink(torch.zeros(0, 3)).write(0, 0, np.empty(0, np.uint8))


# -- transformers -----------------------------------------------------------------------------------------------------


def test_a_pretrained_model_brings_its_config(tmp_path: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    assert model.config.architectures is None
    found = module_files(model)
    assert model.config.architectures is None  # the live model is not changed
    assert module_files(torch.nn.Linear(1, 1)) == {}
    assert module_files(torch.nn.DataParallel(model)) == found
    model.save_pretrained(tmp_path)
    assert sorted(found) == ["config.json", "generation_config.json"]
    for name, data in found.items():
        assert json.loads(data) == json.loads((tmp_path / name).read_text())
    flat = flatten_state(model)
    leaves = {path[0]: index for path, index in flat.leaves}
    assert leaves["lm_head.weight"] == leaves["transformer.wte.weight"]
