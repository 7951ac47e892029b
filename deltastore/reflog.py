"""The ref log in the bucket: one dense, append-only entry per movement, so that the index can be rebuilt from it.

Entries are written after the SQL transaction that made them. When that fails the movement stands, a warning says so, and the
next writer fills the hole first. Which entries are in the bucket is recorded in the index with the next transaction.
"""

from __future__ import annotations

import contextlib
import json
import warnings

from deltastore import layout
from deltastore.buckets.base import Bucket, ObjectInfo, Upload
from deltastore.errors import StoreFencedError
from deltastore.formats import SnapshotCommit, SnapshotDocument, SnapshotRef, to_bytes
from deltastore.index.index import Index
from deltastore.index.records import OplogRecord
from deltastore.options import SNAPSHOT_INTERVAL


class RefLog:
    """Writes the log of one store."""

    def __init__(self, bucket: Bucket, index: Index) -> None:
        self._bucket = bucket
        self._index = index
        self._written: set[tuple[int, int]] = set()  # in the bucket, not yet recorded in the index

    @property
    def fence_key(self) -> str:
        """What a machine writes that takes over from this index."""
        return layout.epoch_key(self._index.meta().epoch + 1)

    def refuse_fenced(self, fence: ObjectInfo | None) -> None:
        """Raise StoreFencedError when `fence`, the object under `fence_key`, is there."""
        if fence is not None:
            raise StoreFencedError(
                f"another machine has taken over this store ({fence.key} exists), so this index may not write any more; "
                "nothing was changed; open the store anew"
            )

    def pending_marks(self) -> tuple[tuple[int, int], ...]:
        """(epoch, seq) of entries that are in the bucket; hand them to the next transaction, which records them."""
        return tuple(self._written)

    def fill_holes(self) -> None:
        """Write every entry that the index has and the bucket may lack, oldest first, and a snapshot that is due.

        Raises:
            StorageError: the bucket does not take them.
        """
        waiting = self._index.unmirrored()
        self._written &= {(record.epoch, record.seq) for record in waiting}
        for record in waiting:
            if (record.epoch, record.seq) not in self._written:
                self._write(record)
        meta = self._index.meta()
        if meta.seq // SNAPSHOT_INTERVAL > meta.snapshot_seq // SNAPSHOT_INTERVAL:
            self._write_snapshot(meta.snapshot_seq)

    def moved(self) -> None:
        """Call after each transaction that made log entries. A failure, of whatever kind, is a warning: the movement stands."""
        try:
            self.fill_holes()
        except Exception as error:
            with contextlib.suppress(Warning):  # not even where warnings are errors
                warnings.warn(
                    f"the change is committed, but its log entry could not be written ({error}); the next writer will write it",
                    stacklevel=2,
                )

    def _write(self, record: OplogRecord) -> None:
        key = layout.log_key(record.epoch, record.seq)
        if record.commit_key is not None:
            self._bucket.copy(record.commit_key, key)
        else:
            self._bucket.put([Upload(key, [record.body])])
        self._written.add((record.epoch, record.seq))

    def _write_snapshot(self, before: int) -> None:
        state = self._index.ref_snapshot(before)
        document = SnapshotDocument(
            epoch=state.epoch,
            seq=state.seq,
            previous=self._snapshot_key(before) if before else None,
            refs=tuple(SnapshotRef(name=ref.name, kind=ref.kind, commit=ref.commit_id) for ref in state.refs),
            commits=tuple(
                SnapshotCommit(
                    id=commit.id,
                    parents=commit.parents,
                    message=commit.message,
                    metadata={key: json.loads(value) for key, value in commit.metadata.items()},
                    key=commit.object_key,
                    height=commit.height,
                    author=commit.author,
                    time=commit.created_at,
                    tree=commit.tree,
                )
                for commit in state.commits
            ),
        )
        self._bucket.put([Upload(layout.snapshot_key(state.epoch, state.seq), [to_bytes(document)])])
        self._index.set_snapshot_seq(state.seq)

    def _snapshot_key(self, seq: int) -> str:
        """The key of an earlier snapshot, which may be of an earlier epoch."""
        return layout.snapshot_key(self._index.oplog(seq - 1, limit=1)[0].epoch, seq)
