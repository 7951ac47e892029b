"""Layers: grouping, order, shares between versions and along a history, and the quick way to count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltastore import DeltaStore, layers
from deltastore.delta_counts import quick_diff
from deltastore.diff import Diff, run_diff
from deltastore.layers import LayerChange, choose_depth, layer_changes, layer_of, layer_sizes, named_elements

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("name", "depth", "layer"),
    [
        ("model.layers.3.mlp.weight", 3, "model.layers.3"),
        ("a.b.c", 9, "a.b"),
        ("a.b.c", 1, "a"),
        ("weight", 5, "weight"),
        ("", 1, ""),
    ],
)
def test_layer_of(name: str, depth: int, layer: str) -> None:
    assert layer_of(name, depth) == layer


def test_depth() -> None:
    names = [f"model.layers.{i}.{part}.weight" for i in range(32) for part in ("attention", "mlp")]
    assert choose_depth([*names, "head"]) == 3
    assert choose_depth(names, limit=64) == 4
    assert choose_depth(names, limit=31) == 2
    assert choose_depth([f"a{i}.w" for i in range(100)]) == 1
    assert choose_depth([]) == 1


def test_layers_come_by_number() -> None:
    names = ["embed.w", *(f"layers.{i}.w" for i in (0, 1, 10, 11, 2)), "layers.10.b", "norm.w"]
    sizes = layer_sizes([(name, 1) for name in names], 2)
    assert list(sizes) == ["embed", "layers.0", "layers.1", "layers.2", "layers.10", "layers.11", "norm"]
    assert sizes["layers.10"] == 2
    assert list(layer_sizes([(f"x.{'9' * 5000}.w", 1)], 2))  # no limit of digits


def state(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    names = {"embed.weight": (300, 40), **{f"layers.{i}.weight": (50, 40) for i in range(12)}}
    found = {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for name, shape in names.items()}
    return found | {"layers.0.half": found["layers.0.weight"].bfloat16(), "count": torch.arange(30)}


def change(tensors: dict[str, torch.Tensor], rng: np.random.Generator, layer: int) -> None:
    for name, share in (("embed.weight", 0.01), (f"layers.{layer}.weight", 0.2), ("layers.0.half", 0.05)):
        flat = tensors[name].view(-1)
        flat[torch.from_numpy(rng.random(len(flat)) < share)] *= -1.25
    tensors["count"] += 1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DeltaStore:
    """19 commits, with folds at 8 and 16, one of them with nothing new and one with another shape."""
    rng = np.random.default_rng(1)
    tensors = state(rng)
    opened = DeltaStore.create(tmp_path_factory.mktemp("layers") / "store")
    for step in range(19):
        if step == 5:
            opened.commit(tensors, f"step {step}", metadata={"step": step})
            continue
        change(tensors, rng, step % 12)
        if step == 17:
            tensors["layers.3.weight"] = torch.cat([tensors["layers.3.weight"]] * 2)
        opened.commit(tensors, f"step {step}", metadata={"step": step})
    return opened


def sides(store: DeltaStore, number: int) -> tuple[Diff | None, Diff]:
    after, before = store.list_commits(f"main~{number}", 2)
    pair = (before, store._versions.get(before.id)), (after, store._versions.get(after.id))
    return quick_diff(store._reader, *pair), run_diff(store._reader, *pair)


def test_the_quick_count_is_exact(store: DeltaStore) -> None:
    """At every commit with a parent of the same shape, those with folds among them."""
    pairs = [sides(store, number) for number in range(18)]
    assert [at for at, (quick, _) in enumerate(pairs) if quick is None] == [1]  # the one with another shape
    for quick, exact in pairs:
        if quick is not None:
            assert quick == exact
    assert pairs[13][0] is not None
    assert pairs[13][0].tensors == ()


def test_what_deltas_do_not_tell(tmp_path: Path) -> None:
    with DeltaStore.create(tmp_path / "store") as store:
        tensors = {"complex": torch.ones(100, dtype=torch.complex64), "w": torch.randn(5000)}
        store.commit(tensors)
        tensors["complex"][3] = 1 + 2j
        store.commit(tensors)
        assert sides(store, 0)[0] is None
        tensors["w"] = torch.randn(5000)  # stored whole or as a dense delta: counted either way
        store.commit(tensors)
        quick, exact = sides(store, 0)
        assert quick in (None, exact)


def test_changes(store: DeltaStore) -> None:
    diff = store.diff("main~4", "main~3")
    after = named_elements(store._versions.get(diff.after.id))
    found = {each.name: each for each in layer_changes(diff, after)}
    assert list(found) == ["embed", "layers.0", "layers.3", "count"]
    assert found["layers.0"].elements == 4000
    assert found["layers.3"].share == pytest.approx(0.2, abs=0.05)
    assert found["count"] == LayerChange("count", 30, 30, 240, 1)
    assert [each.name for each in layer_changes(diff, after, depth=1)] == ["embed", "layers", "count"]
    reshaped = store.diff("main~2", "main~1")
    grown = next(
        each
        for each in layer_changes(reshaped, named_elements(store._versions.get(reshaped.after.id)))
        if each.name == "layers.3"
    )
    assert (grown.changed_elements, grown.elements) == (4000, 4000)
    assert layer_changes(store.diff("main", "main"), after) == []
    assert LayerChange("x", 0, 0, 0, 0).share == 0


def test_tensors_that_are_gone(tmp_path: Path) -> None:
    with DeltaStore.create(tmp_path / "store") as store:
        store.commit({"a.w": torch.ones(3), "b.w": torch.ones(5)})
        store.commit({"a.w": torch.ones(3), "c.w": torch.ones(7)})
        diff = store.diff("main~1", "main")
        changes = layer_changes(diff, [("a.w", 3), ("c.w", 7)])
        assert [(each.name, each.changed_elements, each.elements) for each in changes] == [("c", 7, 7), ("b", 5, 5)]


def test_history(store: DeltaStore) -> None:
    history = store.layer_history()
    assert [commit.metadata["step"] for commit in history.commits] == list(range(1, 19))
    assert history.complete
    assert len(history.shares) == len(history.layers) == 14
    at = history.layers.index("layers.7")
    assert history.shares[at][6] == pytest.approx(0.2, abs=0.05)
    assert {share for step, share in enumerate(history.shares[at], 1) if step != 7} == {0.0}
    assert {row[4] for row in history.shares} == {0.0}  # nothing new
    assert len(store.layer_history("main~3", limit=4).commits) == 4


def test_bounded_time(store: DeltaStore) -> None:
    history = store.layer_history(seconds=0)
    assert [commit.metadata["step"] for commit in history.commits] == [18]  # the newest, at least
    assert not history.complete


def test_a_first_commit_alone(store: DeltaStore) -> None:
    history = store.layer_history("main~18")
    assert (history.layers, history.commits, history.shares, history.complete) == ((), (), (), True)
    assert layers.MAX_LAYERS == 40
