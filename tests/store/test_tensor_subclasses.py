"""Tensor subclasses that are several tensors: stored as inner tensors and a recipe, as one unit (case C16)."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from store_states import raw, same

from deltastore import DeltaStore, subclasses
from deltastore.errors import FormatError, IncompatibleStateError, InvalidInputError
from deltastore.state import RECIPE, TensorParts
from deltastore.training import register_subclass


class Quantised(torch.Tensor):
    """int8 data and fp32 scales, as quantisation libraries make them."""

    @staticmethod
    def __new__(cls, qdata: Any, scale: Any, note: Any = None) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.bfloat16)
        made.qdata, made.scale, made.note = qdata, scale, note
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], self.note

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
        assert type(size) is torch.Size
        assert size == inner["qdata"].shape
        assert isinstance(stride, tuple)
        return cls(inner["qdata"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale, args[0].note)
        raise NotImplementedError(str(func))


class Twice(Quantised):
    """A subclass whose scales are quantised, too."""


NOTE = (None, True, -3, 0.5, "affine", b"\xff", [torch.int8, {"block": torch.Size([1, 4]), 2: ()}], torch.Size([]))


def quantised(rows: int = 6, note: Any = NOTE, kind: type[Quantised] = Quantised, seed: int = 0) -> Quantised:
    torch.manual_seed(seed)
    return kind(torch.randint(-128, 127, (rows, 4), dtype=torch.int8), torch.rand(rows, 1), note)


def nested(seed: int = 0) -> Twice:
    torch.manual_seed(seed)
    return Twice(torch.randint(-128, 127, (6, 4), dtype=torch.int8), quantised(6, {"inner": 1}, seed=seed + 1), ("outer",))


def equal(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Quantised):
        return raw(found) == raw(wanted)
    return (
        type(found) is type(wanted)
        and same(list_of(found.note), list_of(wanted.note))
        and equal(found.qdata, wanted.qdata)
        and equal(found.scale, wanted.scale)
    )


def list_of(note: Any) -> str:
    return repr(note)


def test_they_come_back_with_class_and_context(store: DeltaStore) -> None:
    state = {"plain": torch.arange(3), "q": quantised(), "deep": [{"two": nested()}]}
    store.commit(state)
    snapshot = store.checkout()
    assert list(snapshot) == [
        "plain",
        "q.qdata",
        "q.scale",
        "deep.0.two.qdata",
        "deep.0.two.scale.qdata",
        "deep.0.two.scale.scale",
    ]
    assert raw(snapshot["q.scale"].load()) == raw(state["q"].scale)
    found = snapshot.state()
    assert equal(found["q"], state["q"])
    assert equal(found["deep"][0]["two"], state["deep"][0]["two"])
    assert store.commit(found).tree == snapshot.commit.tree  # C17
    assert not store.diff("main~1", "main")


def test_loading_gives_units_and_their_parts(store: DeltaStore) -> None:
    state = {"plain": torch.randn(3), "q": quantised(), "two": nested()}
    store.commit(state)
    loaded = store.checkout().load(dtype=torch.float64)
    assert list(loaded) == ["plain", "q", "two"]
    assert loaded["plain"].dtype == torch.float64
    assert equal(loaded["q"], state["q"])
    assert equal(loaded["two"], state["two"])
    part = store.checkout().load(["two.scale.scale", "q"], dtype=torch.float64)
    assert part["two.scale.scale"].dtype == torch.float32
    assert raw(part["two.scale.scale"]) == raw(state["two"].scale.scale)
    assert equal(part["q"], state["q"])


def test_a_module_is_filled_in_place(store: DeltaStore) -> None:
    def model(seed: int, note: Any = NOTE) -> torch.nn.Module:
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(quantised(seed=seed, note=note), requires_grad=False)
        made.bias = torch.nn.Parameter(torch.full((4,), float(seed)))
        return made

    source, target = model(1), model(2)
    store.commit(source)
    pointer = target.weight.qdata.data_ptr()
    restored = store.checkout().load_into(target)
    assert restored.names == ("weight.qdata", "weight.scale", "bias")
    assert target.weight.qdata.data_ptr() == pointer
    assert equal(target.weight.detach(), source.weight.detach())
    assert equal(store.checkout().load()["weight"], source.weight.detach())
    other = model(3, note="another context")
    with pytest.raises(IncompatibleStateError, match=r"'weight' is made as .*another context.*, the commit has"):
        store.checkout().load_into(other)
    assert raw(other.weight.qdata) == raw(model(3).weight.qdata)
    with pytest.raises(IncompatibleStateError, match=r"'weight' .*commit's tensors are not in the target: 'weight\.qdata'"):
        store.checkout().load_into({"weight": torch.zeros(6, 4), "bias": torch.zeros(4)})


def test_frozen_ones_need_no_copy_in_the_baseline(store: DeltaStore) -> None:
    store.commit({"q": torch.nn.Parameter(nested(), requires_grad=False), "free": nested(5)})
    kept = {path: each.data for path, each in store._open_committer()._baseline._tensors.items()}
    assert {path[0] for path, data in kept.items() if data is None} == {"q"}
    assert {path[0] for path, data in kept.items() if data is not None} == {"free"}


def test_an_optimizer_with_such_state(store: DeltaStore) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(6, 4))], lr=0.1)

    first, second = optimizer(), optimizer()
    wanted = quantised()
    first.state[first.param_groups[0]["params"][0]] = {"momentum": wanted, "count": 3}
    store.commit(first)
    restored = store.checkout().load_into(second)
    assert len(restored.created) == 2
    (entry,) = second.state.values()
    assert equal(entry["momentum"], wanted)
    assert entry["count"] == 3
    entry["momentum"].qdata.zero_()
    assert not store.checkout().load_into(second).created
    (again,) = second.state.values()
    assert again["momentum"] is entry["momentum"]
    assert equal(again["momentum"], wanted)


def test_an_unknown_class_is_named_and_never_imported(store: DeltaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("quantisers_of_ours")
    kind = type("Local", (Quantised,), {"__module__": "quantisers_of_ours", "__qualname__": "Local"})
    module.Local = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quantisers_of_ours", module)
    monkeypatch.setattr(subclasses, "_registered", {})
    wanted = quantised(kind=kind)
    store.commit({"w": wanted, "plain": torch.ones(2)})
    assert equal(store.checkout().load()["w"], wanted)
    monkeypatch.delitem(sys.modules, "quantisers_of_ours")
    (tmp_path / "quantisers_of_ours.py").write_text("raise SystemExit('a stored document imported this')")
    monkeypatch.syspath_prepend(str(tmp_path))
    snapshot = store.checkout()
    message = r"tensor 'w' is a quantisers_of_ours\.Local, which is not known here.*register_subclass.*'w\.qdata', 'w\.scale'"
    for call in (snapshot.state, snapshot.load, lambda: snapshot.load(["w"])):
        with pytest.raises(IncompatibleStateError, match=message):
            call()
    assert raw(snapshot["w.qdata"].load()) == raw(wanted.qdata)
    assert list(snapshot.load(["w.scale", "plain"])) == ["w.scale", "plain"]
    assert register_subclass(kind) is kind
    assert equal(snapshot.state()["w"], wanted)


@pytest.mark.parametrize("name", ["torch.Tensor", "torch.load", "os.system", "deltastore.subclasses.nothing", "no.such"])
def test_a_name_leads_to_tensor_classes_only(store: DeltaStore, name: str) -> None:
    module, _, qualname = name.rpartition(".")
    recipe = {"module": module, "qualname": qualname, "size": (1,), "stride": (1,), "context": "true"}
    with pytest.raises(IncompatibleStateError, match="not known here"):
        subclasses.rebuild(TensorParts({RECIPE: recipe, "x": torch.ones(1)}), ("w",))
    with pytest.raises(FormatError, match=r"state\['w'\] is no recipe"):
        subclasses.rebuild(TensorParts({RECIPE: {**recipe, "size": (-1,)}, "x": torch.ones(1)}), ("w",))
    with pytest.raises(FormatError, match=r"state\['w'\] is no recipe"):
        subclasses.rebuild(TensorParts({RECIPE: [name], "x": torch.ones(1)}), ("w",))


def test_only_flattening_classes_are_registered() -> None:
    for kind in (int, torch.Tensor, torch.nn.Parameter, "Quantised"):
        with pytest.raises(InvalidInputError, match="no tensor subclass"):
            register_subclass(kind)  # type: ignore[type-var]


def test_a_class_that_refuses_its_parts_is_named(store: DeltaStore) -> None:
    class Picky(Quantised):
        @classmethod
        def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
            raise KeyError("zero_point")

    register_subclass(Picky)
    store.commit({"w": quantised(kind=Picky)})
    with pytest.raises(IncompatibleStateError, match=r"Picky does not take its stored parts: 'zero_point'.*'w\.qdata'"):
        store.checkout().state()


@pytest.mark.parametrize(
    ("context", "found"),
    [
        (object(), "context is <object"),
        ((1, torch.device("cpu")), r"context\[1\] is device"),
        ({"a": {1: {2}}}, r"context\['a'\]\[1\] is \{2\}"),
        (torch.ones(1), "context is tensor"),
        ({"__torch_size__": 1}, "__torch_size__"),
    ],
)
def test_contexts_that_are_not_plain_are_refused(store: DeltaStore, context: Any, found: str) -> None:
    with pytest.raises(IncompatibleStateError, match=rf"state\['w'\].*can't be stored: .*{found}"):
        store.commit({"w": quantised(note=context)})
    assert not store.list_refs()


def test_the_reserved_key_is_refused_in_a_state_and_a_stream(store: DeltaStore) -> None:
    with pytest.raises(IncompatibleStateError, match=r"state\['a'\] has the key '__tensor_subclass__'.*rename it"):
        store.commit({"a": {RECIPE: 1, "t": torch.ones(1)}})
    with pytest.raises(IncompatibleStateError, match=r"'w' is a .*Quantised, which is stored as its parts; commit it as a part"):
        store.commit(iter([("w", quantised())]))


def test_tied_ones_are_stored_once(store: DeltaStore) -> None:
    shared = quantised(600)
    store.commit({"a": shared, "b": shared})
    assert store.checkout().nbytes == 600 * 4 + 600 * 4
    found = store.checkout().state()
    assert found["a"].qdata.data_ptr() == found["b"].qdata.data_ptr()


@pytest.mark.filterwarnings("ignore:the plain values of this state")
def test_a_unit_stays_in_one_shard(store: DeltaStore, tmp_path: Path) -> None:
    state: dict[str, Any] = {f"w{i}": quantised(100, seed=i) for i in range(4)}  # 800 bytes each
    state["large"] = quantised(400)  # 3200 bytes
    store.commit(state)
    store.checkout().save(tmp_path / "out", max_shard_bytes=1300)
    places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for i in range(4):
        assert places[f"w{i}.qdata"] == places[f"w{i}.scale"]
    assert len({places[f"w{i}.qdata"] for i in range(4)}) == 4
    assert places["large.qdata"] != places["large.scale"]  # larger than a shard
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values()), reverse=True):  # in any order
        found.update(safetensors.torch.load_file(tmp_path / "out" / name))
    assert raw(found["w2.scale"]) == raw(state["w2"].scale)
    assert raw(found["large.qdata"]) == raw(state["large"].qdata)


def test_a_reader_that_knows_no_subclasses_sees_a_dict(store: DeltaStore) -> None:
    """The tree is that of a dict: what docs/FORMAT.md says of other readers."""
    store.commit({"w": quantised(note=(torch.int8,))})
    tree = store.checkout()._version.structure.tree
    ((key, node),) = tree["d"]
    assert key == "w"
    assert [pair[0] for pair in node["d"]] == [RECIPE, "qdata", "scale"]
    assert [pair[0] for pair in node["d"][0][1]["d"]] == ["module", "qualname", "size", "stride", "context"]
    assert store.checkout().save
