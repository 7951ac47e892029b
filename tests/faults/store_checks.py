"""What must hold for every store, whatever happened to its writers."""

from __future__ import annotations

from tiny_model import bits_at

from deltastore import DeltaStore
from deltastore.layout import STORE_KEY, epoch_key, log_key, parse_log_key


def assert_exact(store: DeltaStore, revision: str) -> int:
    """The tensors of a version are, bit for bit, those of the step that its metadata names; returns the step."""
    snapshot = store.checkout(revision)
    step = int(snapshot.commit.metadata["step"])
    found = {name: (lazy.dtype_name, tuple(lazy.shape), lazy.tobytes()) for name, lazy in snapshot.items()}
    expected = bits_at(step)
    differing = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
    assert not differing, f"{revision}: {differing} are not those of step {step}"
    return step


def assert_all_exact(store: DeltaStore) -> None:
    """Every version that a ref reaches is exact, and the store verifies down to the last chunk."""
    seen = set()
    for ref in store.list_refs():
        for commit in store.list_commits(ref.name):
            if commit.id not in seen:
                seen.add(commit.id)
                assert_exact(store, commit.id)
    report = store.verify(read_data=True)
    assert report, report.problems


def assert_log_dense(store: DeltaStore) -> int:
    """The bucket has every log entry from 1 on, and they are those of the index; returns how many there are."""
    bucket, index = store._bucket, store._index
    entries, meta = index.oplog(), index.meta()
    assert meta.seq == len(entries)
    assert None not in bucket.stat([STORE_KEY, epoch_key(meta.epoch)]).values(), "the documents of the store itself are missing"
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1)), "the numbers of the index have gaps"
    for entry in entries:
        assert bucket.get(log_key(entry.epoch, entry.seq)) == entry.body, f"log entry {entry.seq} is not that of the index"
        if entry.commit_key is not None:
            assert bucket.get(entry.commit_key) == entry.body
    keys = [info.key for info in bucket.list("refs/log")]
    assert [parse_log_key(key) for key in keys] == [(entry.epoch, entry.seq) for entry in entries]
    return len(entries)
