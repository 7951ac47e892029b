"""`--plot`: what the pictures of `show` and `stats` are made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.cli.output import first_line
from deltastore.layers import choose_depth, layer_changes, layer_sizes, named_bytes, named_elements
from deltastore.plots import CommitBar, HeatMap, LayerBar, plot_history, plot_version

if TYPE_CHECKING:
    from deltastore.history import Commit
    from deltastore.snapshot import Snapshot
    from deltastore.store import DeltaStore


def plot_commit(store: DeltaStore, snapshot: Snapshot, path: Path) -> None:
    """Changed share against the first parent, and size, of every layer of a commit."""
    commit, version = snapshot.commit, snapshot._version
    tensors = named_elements(version)
    depth = choose_depth(name for name, _ in tensors)
    shares: dict[str, float] | None = None
    if commit.parents:
        diff = store.diff(commit.parents[0], commit.id)
        shares = {each.name: each.share for each in layer_changes(diff, tensors, depth)}
    sizes = layer_sizes(named_bytes(version), depth)
    layers = [LayerBar(name, None if shares is None else shares.get(name, 0.0), size) for name, size in sizes.items()]
    plot_version(path, f"{commit.short_id} {first_line(commit.message)}", layers)


def plot_stats(store: DeltaStore, revision: str, limit: int, path: Path) -> None:
    """Bytes of each of the last commits of a history, and changed share by layer and commit."""
    commits = store.list_commits(revision, limit)[::-1]
    usage = {each.name: each for each in store.du(revision, limit=limit).parts}
    unit, labels = _labels(commits)
    commits = [commit for commit in commits if commit.id in usage]  # the branch may have moved meanwhile
    bars = [CommitBar(labels[each.id], usage[each.id].added_bytes or 0, usage[each.id].logical_bytes) for each in commits]
    history = store.layer_history(revision, limit=limit)
    column = {commit.id: at for at, commit in enumerate(history.commits)}
    places = [column.get(commit.id) for commit in commits]
    shares = [[None if at is None else row[at] for at in places] for row in history.shares]
    heat = HeatMap(history.layers, [labels[commit.id] for commit in commits], shares)
    note = "" if history.complete else f"the last {len(history.commits)} only: comparing took too long"
    plot_history(path, f"{revision}: {len(bars)} commits", bars, heat, unit, note)


def _labels(commits: Sequence[Commit]) -> tuple[str, dict[str, str]]:
    """What stands below each commit: its step when all have one, else its short id."""
    steps = {commit.id: commit.metadata.get("step") for commit in commits}
    if all(isinstance(step, int) for step in steps.values()):
        return "step", {id_: str(step) for id_, step in steps.items()}
    return "commit", {commit.id: commit.short_id for commit in commits}
