"""stats and du of a store: against the files in the bucket, for branches, tags and commits; the forecast; exports and space."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from store_states import bucket_objects
from store_traffic import Traffic

from deltastore import DeltaStore, space
from deltastore.buckets.folder import FolderBucket
from deltastore.errors import RevisionNotFoundError, StoreFullError

torch = pytest.importorskip("torch")

RAW = 40_000 * 4 + 3 * 2


def state(step: int) -> dict[str, torch.Tensor]:
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal(40_000).astype(np.float32))
    weights[: 10 * step] += step
    return {"w": weights, "b": torch.arange(3, dtype=torch.bfloat16)}


def commit(store: DeltaStore, step: int, **options: object) -> str:
    return store.commit(state(step), f"step {step}", metadata={"step": step}, **options).id


@pytest.fixture
def grown(store: DeltaStore) -> DeltaStore:
    """1 ← 2 ← 3 on main; 2 ← 4 on side; 5 unrelated, its branch deleted."""
    commit(store, 1)
    commit(store, 2, tag="v2")
    commit(store, 3)
    store.create_branch("side", revision="main~1")
    commit(store, 4, branch="side")
    other = {name: tensor + 1 for name, tensor in state(50).items()}
    store.commit(other, branch="gone", files={"large": os.urandom(50_000)})
    store.delete_branch("gone")
    return store


def test_refs(grown: DeltaStore, folder: Path) -> None:
    usage = grown.du()
    found = {(each.kind, each.name): each for each in usage.parts}
    assert list(found) == [("branch", "main"), ("branch", "side"), ("tag", "v2"), ("unreachable", "")]
    main, side, tag, gone = usage.parts
    assert [each.commits for each in usage.parts] == [3, 3, 2, 1]
    assert [each.logical_bytes for each in usage.parts] == [3 * RAW, 3 * RAW, 2 * RAW, RAW + 50_000]
    files = {
        key: size
        for key, size in bucket_objects(folder).items()
        if key.startswith(("packs", "manifests", "structures", "commits"))
    }
    assert usage.total_bytes == sum(files.values()) == grown.stats().stored_bytes
    assert tag.unique_bytes == 0  # main holds all of it
    assert gone.unique_bytes == gone.stored_bytes  # it began anew, and no chunk is known
    assert main.stored_bytes == tag.stored_bytes + main.unique_bytes
    assert side.stored_bytes == tag.stored_bytes + side.unique_bytes
    assert usage.total_bytes == tag.stored_bytes + main.unique_bytes + side.unique_bytes + gone.unique_bytes
    assert 0 < main.unique_bytes < tag.stored_bytes / 10
    grown.delete_branch("side")
    main, tag, gone = grown.du().parts
    assert gone.commits == 2
    assert gone.unique_bytes == usage.parts[1].unique_bytes + usage.parts[3].unique_bytes  # what is freed with it


def test_commits(grown: DeltaStore, traffic: Traffic) -> None:
    usage = grown.du("main")
    ids = [each.id for each in grown.list_commits("main")]
    assert [each.name for each in usage.parts] == ids
    assert {(each.kind, each.commits, each.logical_bytes) for each in usage.parts} == {("commit", 1, RAW)}
    third, second, first = usage.parts
    assert first.added_bytes == first.stored_bytes > RAW * 0.7  # the first one is whole
    assert 0 < third.unique_bytes <= third.added_bytes < RAW / 10
    assert second.unique_bytes < second.added_bytes  # its pack is the base of others
    assert third.stored_bytes > third.added_bytes + second.added_bytes  # and all its bases
    assert grown.du("main", limit=1).parts == (third,)
    assert grown.du("main", "side", limit=2).parts[:2] == (third, second)
    assert len({each.name for each in grown.du("main", "side").parts}) == len(grown.du("main", "side").parts) == 4
    assert not traffic.read_keys("packs/")
    assert not traffic.read_keys("manifests/")
    with pytest.raises(RevisionNotFoundError):
        grown.du("nowhere")


def test_an_empty_store(store: DeltaStore) -> None:
    usage = store.du()
    assert (usage.parts, usage.total_bytes) == ((), 0)
    assert usage.forecast.commits_left is None
    assert usage.forecast.free_bytes is not None


def test_forecast(grown: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {each.name: each.added_bytes for each in grown.du("main", "side").parts}
    later = [added[grown.get_commit(name).id] for name in ("main~1", "main", "side")]  # first commits don't count
    monkeypatch.setattr(FolderBucket, "free_bytes", lambda self: space.MIN_FREE + 10 * max(later))
    forecast = grown.stats().forecast
    assert forecast.sampled_commits == 3
    assert forecast.commit_bytes == -(-sum(later) // 3)
    assert forecast.commits_left == 10 * max(later) // forecast.commit_bytes
    assert forecast == grown.du().forecast == grown.du("main").forecast
    monkeypatch.setattr(FolderBucket, "free_bytes", lambda self: 5)
    assert grown.stats().forecast.commits_left == 0
    monkeypatch.setattr(FolderBucket, "free_bytes", lambda self: None)
    assert grown.stats().forecast.commits_left is None


def test_the_forecast_goes_by_the_last_commits(store: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltastore.stats.FORECAST_COMMITS", 2)
    for step in (1, 2000, 2001, 2002):
        commit(store, step)
    newest, before, *_ = store.du("main").parts
    assert store.stats().forecast.commit_bytes == -(-(newest.added_bytes + before.added_bytes) // 2)


def test_results_are_frozen(grown: DeltaStore) -> None:
    usage = grown.du()
    for value in (usage, usage.parts[0], usage.forecast, grown.stats()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, "x")


def test_an_export_that_does_not_fit(grown: DeltaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = grown.checkout()
    target = tmp_path / "a" / "b"
    monkeypatch.setattr(space, "free_bytes", lambda path: RAW // 2)
    with pytest.raises(StoreFullError, match=rf"writing a checkpoint to {target} needs about [\d,]+ bytes, .* free; nothing"):
        snapshot.save(target)
    assert not (tmp_path / "a").exists()
    monkeypatch.undo()
    written = snapshot.save(target)
    before = {path: path.read_bytes() for path in written}
    monkeypatch.setattr(space, "free_bytes", lambda path: 1000)
    with pytest.raises(StoreFullError):
        snapshot.save(target, overwrite=True)
    assert {path: path.read_bytes() for path in target.iterdir()} == before


def test_the_size_of_an_export_is_known_exactly(store: DeltaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit(state(1), files={"large": os.urandom(70_000), "small": b"x"})
    asked = []
    monkeypatch.setattr("deltastore.checkpoint_writer.require_space", lambda path, needed, what: asked.append(needed))
    for options in ({}, {"max_shard_bytes": 100_000}):
        written = store.checkout().save(tmp_path / str(len(asked)), **options)
        assert asked[-1] == sum(path.stat().st_size for path in written)
