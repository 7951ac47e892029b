"""Training state: live objects go in, and come back so that a resumed run equals one that was not interrupted."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import raw, same

from deltastore import DeltaStore
from deltastore.errors import IncompatibleStateError
from deltastore.training import gather_rng, restore_rng, trainable_state

# A small run with a frozen layer, dropout, AdamW in two groups (one of them empty of decay) and a schedule. The child
# process of the test of case C29 imports it, too.
SCRIPT = """
import random, sys
import numpy as np, torch
from deltastore import DeltaStore
from deltastore.training import gather_rng, restore_rng

def make_run():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)).bfloat16()
    model[0].bias.requires_grad_(False)
    decayed, plain = [model[0].weight, model[2].weight], [model[2].bias]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-2), foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, optimizer, scheduler

def widen(optimizer):
    # moments in fp32 beside bf16 parameters, as many trainers keep them
    for parameter, entry in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = entry[key].float()

def step(model, optimizer, scheduler):
    batch = torch.randn(5, 6).bfloat16() * random.random() * float(np.random.standard_normal())
    optimizer.zero_grad()
    model(batch).float().square().sum().backward()
    if not optimizer.state:
        optimizer.step()
        widen(optimizer)
    for parameter, entry in optimizer.state.items():  # arithmetic of our own, which wants the wide moments
        entry["exp_avg"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
        entry["exp_avg_sq"].mul_(0.99).addcmul_(parameter.grad.float(), parameter.grad.float(), value=0.01)
        entry["step"] += 1
        group = next(g for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
        update = entry["exp_avg"] / (entry["exp_avg_sq"].sqrt() + group["eps"]) * float(group["lr"])
        parameter.data.copy_((parameter.float() - update).bfloat16())
    scheduler.step()

def whole(model, optimizer, scheduler, number):
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": gather_rng(), "step": number}

if __name__ == "__main__":
    parts = make_run()
    with DeltaStore(sys.argv[1]) as store:
        live = whole(*parts, 0)
        store.checkout("main").load_into(live)
        restore_rng(live["rng"])
        assert live["step"] == 5, live["step"]
        for _ in range(3):
            step(*parts)
        store.commit(whole(*parts, 8), branch="resumed")
"""


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    """Gives the generators of the process back as they were."""
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])


def trained(
    steps: int, *, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **options})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for _ in range(steps):
        train(model, optimizer, scheduler)
    return model, optimizer, scheduler


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    loss = model(torch.randn(4, 6)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step(lambda: loss) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    scheduler.step()


def whole(parts: tuple[Any, Any, Any], step: int) -> dict[str, Any]:
    model, optimizer, scheduler = parts
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": gather_rng(), "step": step}


def plain(parts: tuple[Any, Any, Any]) -> list[Any]:
    return [copy.deepcopy(part.state_dict()) for part in parts]


# -- committing live objects ------------------------------------------------------------------------------------------


def test_live_objects_stand_for_their_state_dicts(store: DeltaStore) -> None:
    parts = trained(2)
    live = whole(parts, 2)
    named = {key: part.state_dict() if hasattr(part, "state_dict") else part for key, part in live.items()}
    assert store.commit(live).tree == store.commit(named).tree
    assert same(store.checkout().state(), named)
    assert store.commit(parts[1]).tree == store.commit(parts[1].state_dict()).tree


def test_frozen_and_tied_parameters_of_a_nested_module_are_known(store: DeltaStore) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 3, bias=False), "head": torch.nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    model.requires_grad_(False)
    state = {"model": model, "again": [model["embed"].weight], "average": {"w": model["head"].weight.detach()}}
    store.commit(state)
    assert store.checkout().nbytes == 36
    found = store.checkout().state()
    assert found["again"][0].data_ptr() == found["model"]["head.weight"].data_ptr() == found["average"]["w"].data_ptr()


def test_what_a_state_dict_holds_that_can_not_be_stored_is_named(store: DeltaStore) -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"position": 3, "seen": {1, 2}}

    with pytest.raises(IncompatibleStateError, match=r"state\['data'\]\['seen'\] is a builtins\.set.*sorted\(value\)"):
        store.commit({"data": Loader()})
    with pytest.raises(IncompatibleStateError, match=r"state\['kind'\] is a builtins\.type"):
        store.commit({"kind": torch.nn.Linear})
    assert not store.list_refs()


def test_a_grad_scaler_and_a_loader_come_back(store: DeltaStore) -> None:
    class Loader:
        def __init__(self, position: int) -> None:
            self.state: Any = {"position": position, "order": torch.arange(position)}

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    store.commit({"scaler": scaler, "loader": Loader(5), "history": [1, (2.5, "x")]})
    target = {"scaler": torch.amp.GradScaler("cpu"), "loader": Loader(0), "history": [0, (0.0, "")]}
    restored = store.checkout().load_into(target)
    assert target["scaler"].state_dict() == scaler.state_dict()
    assert same(target["loader"].state, {"position": 5, "order": torch.arange(5)})
    assert target["history"] == [1, (2.5, "x")]
    assert restored.objects == ("scaler", "loader")
    assert restored.names == restored.created == ("loader.order",)


# -- C29: resuming ----------------------------------------------------------------------------------------------------


def test_a_new_process_goes_on_bit_for_bit(store: DeltaStore, folder: Path, tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": "run"}
    exec(SCRIPT, scope)
    random.seed(3)
    np.random.seed(4)
    parts = scope["make_run"]()
    for _ in range(5):
        scope["step"](*parts)
    np.random.standard_normal()  # leaves half a pair of normal values behind
    random.gauss(0, 1)
    store.commit(scope["whole"](*parts, 5))
    for _ in range(3):
        scope["step"](*parts)
    store.commit(scope["whole"](*parts, 8), branch="uninterrupted")
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not store.diff("uninterrupted", "resumed")
    assert store.get_commit("resumed").tree == store.get_commit("uninterrupted").tree


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.LBFGS, {"max_iter": 2, "history_size": 3}),
    ],
)
def test_every_optimizer_gets_its_state_back(store: DeltaStore, kind: Any, options: Any) -> None:
    parts = trained(4, kind=kind, **options)
    store.commit(whole(parts, 4))
    fresh = trained(0, kind=kind, **options)
    live = whole(fresh, 0)
    pointers = [parameter.data_ptr() for parameter in fresh[0].parameters()]
    restored = store.checkout().load_into(live)
    restore_rng(live["rng"])
    assert same(plain(fresh), plain(parts))
    assert [parameter.data_ptr() for parameter in fresh[0].parameters()] == pointers
    assert restored.tensors == len(store.checkout())
    assert live["step"] == 4
    uninterrupted = torch.get_rng_state()
    train(*parts)
    torch.set_rng_state(uninterrupted)
    train(*fresh)
    assert same(plain(fresh), plain(parts))


def test_existing_state_is_filled_in_place_and_counted(store: DeltaStore) -> None:
    parts = trained(3)
    store.commit(whole(parts, 3))
    before = plain(parts)
    for _ in range(2):
        train(*parts)
    live = whole(parts, 5)
    moments = {key: value.data_ptr() for entry in parts[1].state.values() for key, value in entry.items()}
    restored = store.checkout().load_into(live)
    assert same(plain(parts), before)
    assert {key: value.data_ptr() for entry in parts[1].state.values() for key, value in entry.items()} == moments
    assert not restored.created
    assert restored.objects == ("optimizer", "scheduler")
    assert len(set(restored.names)) == restored.tensors == len(store.checkout())
    assert "optimizer.state.0.exp_avg" in restored.names
    fresh = trained(0)
    created = store.checkout().load_into(whole(fresh, 0)).created
    assert len(created) == 6 * 3
    assert store.checkout().load_into(whole(fresh, 0)).created == ()


def test_an_optimizer_that_was_fresh_is_fresh_again(store: DeltaStore) -> None:
    store.commit(whole(trained(0), 0))
    parts = trained(3)
    store.checkout().load_into(whole(parts, 3))
    assert not parts[1].state
    train(*parts)


# -- C30: kinds and dtypes --------------------------------------------------------------------------------------------


def test_kinds_and_dtypes_of_the_optimizer_state_are_kept(store: DeltaStore) -> None:
    def make() -> torch.optim.Optimizer:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [], "lr": 0.5}]
        return torch.optim.AdamW(groups, lr=torch.tensor(0.25, dtype=torch.float64), foreach=False)

    optimizer = make()
    weight = optimizer.param_groups[0]["params"][0]
    weight.square().sum().backward()
    optimizer.step()
    entry = optimizer.state[weight]
    entry["exp_avg"] = entry["exp_avg"].float()  # wider than its parameter
    store.commit({"optimizer": optimizer})
    fresh = make()
    store.checkout().load_into({"optimizer": fresh})
    found = fresh.state[fresh.param_groups[0]["params"][0]]
    assert (found["step"].dtype, found["step"].shape) == (torch.float32, ())
    assert found["exp_avg"].dtype == torch.float32
    assert found["exp_avg_sq"].dtype == torch.bfloat16
    lr = fresh.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    assert (lr.dtype, lr.item(), lr.shape) == (torch.float64, 0.25, ())
    assert (fresh.param_groups[1]["params"], fresh.param_groups[1]["lr"]) == ([], 0.5)
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_number_and_a_tensor_replace_each_other(store: DeltaStore) -> None:
    with_tensor = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    with_number = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.125)
    store.commit(with_tensor, branch="tensor")
    store.commit(with_number, branch="number")
    restored = store.checkout("tensor").load_into(with_number)
    assert same(with_number.param_groups[0]["lr"], torch.tensor(0.5))
    assert restored.created == ("param_groups.0.lr",)
    assert with_number.param_groups[0]["lr"] is not with_tensor.param_groups[0]["lr"]
    store.checkout("number").load_into(with_tensor)
    assert with_tensor.param_groups[0]["lr"] == 0.125


def test_groups_that_share_a_tensor_here_and_not_in_the_commit(store: DeltaStore) -> None:
    def make() -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(3)]
        return torch.optim.SGD(groups, lr=torch.tensor(0.5))

    optimizer = make()
    optimizer.param_groups[2]["lr"] = torch.tensor(0.25)
    store.commit(optimizer)
    fresh = make()
    assert fresh.param_groups[0]["lr"] is fresh.param_groups[2]["lr"]
    store.checkout().load_into(fresh)
    assert [group["lr"].item() for group in fresh.param_groups] == [0.5, 0.5, 0.25]
    assert fresh.param_groups[0]["lr"] is fresh.param_groups[1]["lr"]


def test_new_moments_have_the_strides_of_their_parameter(store: DeltaStore) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = make()
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    store.commit({"model": model, "optimizer": optimizer})
    other, fresh = make()
    store.checkout().load_into({"model": other, "optimizer": fresh})
    assert fresh.state[other.weight]["exp_avg"].stride() == optimizer.state[model.weight]["exp_avg"].stride()
    other(torch.randn(1, 3, 5, 5)).sum().backward()
    fresh.step()


def test_optimizers_of_another_build_are_refused(store: DeltaStore) -> None:
    model, optimizer, _ = trained(2)
    store.commit({"optimizer": optimizer})
    before = copy.deepcopy(model.state_dict())
    first, *rest = model.parameters()
    split = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    with pytest.raises(IncompatibleStateError, match=r"\['optimizer'\] has 2 parameter groups, the commit has 1"):
        store.checkout().load_into({"optimizer": split})
    with pytest.raises(IncompatibleStateError, match=r"group 0 has 5 parameters, the commit has 6.*Nothing was written"):
        store.checkout().load_into({"optimizer": torch.optim.AdamW(rest)})
    narrow = torch.optim.AdamW(model.bfloat16().parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    narrow.step()
    with pytest.raises(IncompatibleStateError, match=r"state\.0\.exp_avg' is bfloat16\[5, 6\], the commit has float32"):
        store.checkout().load_into({"optimizer": narrow})
    store.commit({"optimizer": {"w": torch.ones(2)}}, branch="other")
    with pytest.raises(IncompatibleStateError, match="is an optimizer, but the commit has something else there"):
        store.checkout("other").load_into({"optimizer": optimizer})
    named = torch.optim.SGD([("a", torch.nn.Parameter(torch.ones(1))), ("b", torch.nn.Parameter(torch.ones(1)))])
    turned = torch.optim.SGD([("b", torch.nn.Parameter(torch.ones(1))), ("a", torch.nn.Parameter(torch.ones(1)))])
    if "param_names" in named.param_groups[0]:
        store.commit(named, branch="named")
        with pytest.raises(IncompatibleStateError, match="parameter 'b' where the commit has 'a'"):
            store.checkout("named").load_into(turned)
    assert before.keys() == model.state_dict().keys()


def test_an_optimizer_of_another_kind_is_refused(store: DeltaStore) -> None:
    _, adam, _ = trained(2)
    store.commit(adam)
    target, _, _ = trained(0)
    sgd = torch.optim.SGD(target.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(IncompatibleStateError, match=r"another kind.*'momentum'.*the commit.*'betas'.*Nothing was written"):
        store.checkout().load_into(sgd)
    assert sgd.param_groups[0]["lr"] == 0.5
    assert not sgd.state
    del adam.param_groups[0]["fused"]  # as an older torch saves it
    store.commit(adam, branch="older")
    again = torch.optim.AdamW(target.parameters(), lr=0.5)
    store.checkout("older").load_into(again)
    assert again.param_groups[0]["lr"] == adam.param_groups[0]["lr"]


# -- C31: random numbers ----------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    values = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal(), torch.rand(2).tolist()]
    return [*values, torch.randperm(5).tolist(), random.sample(range(100), 3)]


def test_random_numbers_go_on_where_they_were(store: DeltaStore) -> None:
    draws()
    random.gauss(0, 1)  # both keep the second of a pair
    np.random.standard_normal()
    store.commit({"rng": gather_rng()})
    wanted = draws()
    draws()
    restore_rng(store.checkout().state()["rng"], strict=True)
    assert draws() == wanted
    live = {"rng": gather_rng()}
    store.checkout().load_into(live)
    restore_rng(live["rng"], strict=True)
    assert draws() == wanted


def test_missing_generators_are_named(store: DeltaStore) -> None:
    store.commit({"rng": {rank: gather_rng() for rank in range(2)}})
    ranks = store.checkout().state()["rng"]
    restore_rng(ranks, rank=1, strict=True)
    before = draws()
    restore_rng(ranks, rank=1)
    assert draws() == before
    with pytest.warns(UserWarning, match=r"rank 3: not in the saved state: python, numpy, torch"):
        restore_rng(ranks, rank=3)
    with pytest.raises(IncompatibleStateError, match=r"rank 3: not in the saved state.*Nothing was set"):
        restore_rng(ranks, rank=3, strict=True)
    part = gather_rng()
    del part["numpy"]
    position = random.getstate()
    random.random()
    with pytest.warns(UserWarning, match="not in the saved state: numpy;"):
        restore_rng(part)
    assert random.getstate() == position  # the others are set
    elsewhere = {**gather_rng(), "cuda": {99: torch.get_rng_state()}}
    with pytest.warns(UserWarning, match="saved, but not here: cuda:99"):
        restore_rng(elsewhere)
    with pytest.raises(IncompatibleStateError, match="cuda:99"):
        restore_rng(elsewhere, strict=True)


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_malformed_generators_set_nothing(part: str) -> None:
    state: Any = gather_rng()
    state[part] = {"words": torch.ones(3)} if part != "torch" else torch.ones(3, dtype=torch.uint8)
    for changed in ("python", "numpy", "torch"):
        if changed != part:
            draws()
    before = gather_rng()
    with pytest.raises(IncompatibleStateError, match=f"saved state of {part} can't be used"):
        restore_rng(state)
    assert same(gather_rng(), before)


def test_another_global_generator_is_refused() -> None:
    saved = np.random.mtrand._rand
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(IncompatibleStateError, match="PCG64, expected MT19937"):
            gather_rng()
    finally:
        np.random.set_bit_generator(original)
    assert np.random.mtrand._rand is saved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_a_gpu(store: DeltaStore) -> None:
    torch.rand(1, device="cuda")
    store.commit({"rng": gather_rng()})
    wanted = torch.rand(3, device="cuda").tolist()
    restore_rng(store.checkout().state()["rng"], strict=True)
    assert torch.rand(3, device="cuda").tolist() == wanted


# -- C32: what is kept ------------------------------------------------------------------------------------------------


def test_the_next_commit_holds_the_live_values(store: DeltaStore) -> None:
    parts = trained(2)
    store.commit(whole(parts, 2))
    live = whole(parts, 2)
    store.checkout().load_into(live)
    train(*parts)
    store.commit(whole(parts, 3))
    found = store.checkout().state()
    assert same([found["model"], found["optimizer"], found["scheduler"]], plain(parts))
    watched = [weakref.ref(value) for entry in parts[1].state.values() for value in entry.values()]
    del parts, live
    gc.collect()
    assert not [reference for reference in watched if reference() is not None]


# -- C33, C29: strict by default ----------------------------------------------------------------------------------------


def test_a_partial_restore_is_refused_by_name(store: DeltaStore) -> None:
    parts = trained(2)
    store.commit(whole(parts, 2))
    fresh = trained(0)
    before = plain(fresh)
    snapshot = store.checkout()
    with pytest.raises(IncompatibleStateError, match=r"commit's tensors are not in the target: 'optimizer\.state\.0\.step'"):
        snapshot.load_into({"model": fresh[0], "scheduler": fresh[2], "rng": gather_rng(), "step": 0})
    with pytest.raises(IncompatibleStateError, match=r"1 of the commit's values are not in the target: 'step'"):
        snapshot.load_into({name: part for name, part in whole(fresh, 0).items() if name != "step"})
    with pytest.raises(IncompatibleStateError, match=r"1 of the target's objects are not in the commit: 'shedule'"):
        snapshot.load_into({**whole(fresh, 0), "shedule": fresh[2]})
    with pytest.raises(IncompatibleStateError, match=r"target's values are not in the commit: 'stop' \(nearest.*: 'step'\)"):
        snapshot.load_into({**whole(fresh, 0), "stop": 1})
    assert same(plain(fresh), before)
    restored = snapshot.load_into({"model": fresh[0], "stop": 1}, strict=False)
    assert (restored.objects, restored.values, restored.tensors) == ((), 0, 9)
    assert same(fresh[0].state_dict(), parts[0].state_dict())
    assert not fresh[1].state


def test_another_dtype_is_refused_unless_a_cast_is_asked_for(store: DeltaStore) -> None:
    wide = {"w": torch.randn(3_000, 500), "count": torch.arange(3), "turned": torch.randn(4, 6)}
    store.commit(wide)
    target = {
        "w": torch.zeros(3_000, 500, dtype=torch.bfloat16),
        "count": torch.zeros(3, dtype=torch.int64),
        "turned": torch.zeros(6, 4, dtype=torch.float64).t(),
    }
    with pytest.raises(IncompatibleStateError, match=r"'w' is bfloat16.* the commit has float32.*Use cast=True to convert"):
        store.checkout().load_into(target)
    assert not target["w"].any()
    store.checkout().load_into(target, cast=True)
    assert raw(target["w"]) == raw(wide["w"].bfloat16())
    assert raw(target["turned"]) == raw(wide["turned"].double())
    integers = {**wide, "count": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(IncompatibleStateError, match=r"'count' is int32\[3\], the commit has int64"):
        store.checkout().load_into(integers, cast=True)


def test_values_that_nobody_can_replace(store: DeltaStore) -> None:
    store.commit((1, torch.ones(1)))
    with pytest.raises(IncompatibleStateError, match="can't be replaced, the commit has 1"):
        store.checkout().load_into((2, torch.zeros(1)))
    target = (1, torch.zeros(1))
    assert store.checkout().load_into(target).values == 1
    assert target[1] == 1


def test_extra_state_of_a_module_comes_back(store: DeltaStore) -> None:
    class Counting(torch.nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    model = torch.nn.Sequential(Counting(2, 2))
    model[0].seen = {"tokens": 12, "scale": torch.tensor(2.5)}
    store.commit({"model": model})
    for wrap in (lambda module: module, torch.nn.DataParallel):
        other = torch.nn.Sequential(Counting(2, 2))
        store.checkout().load_into({"model": wrap(other)})
        assert same(other[0].seen, model[0].seen)
        assert raw(other[0].weight) == raw(model[0].weight)


# -- C17, adapters ----------------------------------------------------------------------------------------------------


def test_committing_what_was_checked_out_changes_nothing(store: DeltaStore) -> None:
    first = store.commit(whole(trained(3), 3))
    second = store.commit(store.checkout().state())
    assert not store.diff("main~1", "main")
    assert first.tree == second.tree
    fresh = trained(0)
    live = whole(fresh, 0)
    store.checkout().load_into(live)
    assert store.commit({**live}).tree == first.tree
    assert not store.diff("main~1", "main")


def test_an_adapter_pins_its_base(store: DeltaStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    base = store.commit(model)
    store.commit({"later": torch.ones(1)})
    adapter = trainable_state(model)
    assert list(adapter) == ["1.weight", "1.bias"]
    store.commit(adapter, base="main~1", branch="adapter", metadata={"step": 3})
    snapshot = store.checkout("adapter")
    assert snapshot.base == base.id
    assert snapshot.commit.metadata == {"step": 3, "base": base.id}
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    store.checkout(snapshot.base).load_into(other)
    snapshot.load_into(trainable_state(other), strict=False)
    assert same(other.state_dict(), model.state_dict())
    assert store.checkout("main").base is None
    store.commit(adapter, metadata={"base": "llama"}, branch="else")
    assert store.checkout("else").base is None
    store.commit(adapter, metadata={"base": base.id}, base=base.id[:12], branch="twice")


def test_a_base_must_exist_and_be_the_only_one(store: DeltaStore) -> None:
    from deltastore.errors import InvalidInputError, RevisionNotFoundError

    store.commit({"w": torch.ones(1)})
    with pytest.raises(RevisionNotFoundError):
        store.commit({"a": torch.ones(1)}, base="nowhere", branch="adapter")
    with pytest.raises(InvalidInputError, match="metadata has the base 'llama'"):
        store.commit({"a": torch.ones(1)}, base="main", metadata={"base": "llama"}, branch="adapter")
    assert [ref.name for ref in store.list_refs()] == ["main"]


def test_a_scheduler_with_milestones(store: DeltaStore) -> None:
    """MultiStepLR keeps them in a Counter, which is a dict in the store and a Counter again in the scheduler."""

    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.MultiStepLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.5)

    optimizer, scheduler = make()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    live = store.commit({"optimizer": optimizer, "scheduler": scheduler})
    plain = store.commit({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    assert live.tree == plain.tree
    dicts = {"optimizer": make()[0].state_dict(), "scheduler": make()[1].state_dict()}
    store.checkout().load_into(dicts, strict=False)
    assert dicts["scheduler"] == scheduler.state_dict()
    again, resumed = make()
    store.checkout().load_into({"optimizer": again, "scheduler": resumed})
    assert type(resumed.milestones) is type(scheduler.milestones)
    assert resumed.milestones == scheduler.milestones
    for each in (scheduler, resumed):
        each.optimizer.step()
        each.step()
    assert resumed.get_last_lr() == scheduler.get_last_lr() == [0.125]
