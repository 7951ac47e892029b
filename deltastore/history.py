"""What is committed: revisions and commits. Knows the index only, so that looking at the history starts fast."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from deltastore import canonical, display
from deltastore.errors import InvalidInputError, RevisionNotFoundError, short_name
from deltastore.index.index import Index
from deltastore.index.records import CommitRecord

if TYPE_CHECKING:
    from deltastore.formats import Identity

_REVISION = re.compile(r"(?P<name>.+?)(?:@\{(?P<key>[^={}]+)=(?P<value>[^{}]*)\})?(?P<steps>(?:~[0-9]{0,9})*)", re.DOTALL)
_REF_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_HEX = re.compile(r"[0-9a-f]{8,64}")
_ONLY_HEX = re.compile(r"[0-9A-Fa-f]{8,}")


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit.

    Attributes:
        id: 64 hex digits; equal ids mean equal content, history, message, author, time and metadata.
        tree: digest of the content alone; equal trees mean equal bits.
        created_at: in UTC.
    """

    id: str
    parents: tuple[str, ...]
    tree: str
    message: str
    author: str
    created_at: datetime
    metadata: dict[str, Any] = field(hash=False)

    @classmethod
    def from_record(cls, record: CommitRecord) -> Commit:
        """The public face of an index row."""
        metadata = {key: canonical.unpack(json.loads(value)) for key, value in record.metadata.items()}
        created_at = datetime.fromisoformat(record.created_at)
        return cls(record.id, record.parents, record.tree, record.message, record.author, created_at, metadata)

    @classmethod
    def from_identity(cls, commit_id: str, identity: Identity) -> Commit:
        """The public face of a commit document."""
        return cls(
            commit_id,
            tuple(identity["parents"]),
            identity["tree"],
            identity["message"],
            identity["author"],
            datetime.fromisoformat(identity["time"]),
            {name: canonical.unpack(value) for name, value in identity["metadata"].items()},
        )

    @property
    def short_id(self) -> str:
        """The first 12 hex digits."""
        return self.id[:12]

    def __repr__(self) -> str:
        return f"Commit({self.short_id} {short_name(self.message, 60)!r}, {display.moment(self.created_at)})"

    def _repr_html_(self) -> str:
        return display.card(f"commit {self.short_id}", self.facts())

    def facts(self) -> list[tuple[str, str]]:
        """Name and value of what people want to see of a commit."""
        metadata = [(f"metadata {key}", str(value)) for key, value in list(self.metadata.items())[: display.ROWS]]
        subject = self.message.split("\n", 1)[0]
        parents = ", ".join(parent[:12] for parent in self.parents)
        when = display.moment(self.created_at)
        return [("message", subject), ("author", self.author), ("time", when), ("parents", parents), *metadata]


def check_ref_name(name: str) -> None:
    """Raises InvalidInputError unless `name` may be that of a branch or tag."""
    if not isinstance(name, str) or not _REF_NAME.fullmatch(name) or ".." in name or _ONLY_HEX.fullmatch(name):
        raise InvalidInputError(
            f"{short_name(str(name))!r} can't be the name of a branch or tag: it must match {_REF_NAME.pattern}, hold no '..', "
            "and not be 8 or more hex digits only"
        )


class History:
    """Resolves revisions and lists commits of one store. Thread-safe."""

    def __init__(self, index: Index) -> None:
        self._index = index

    # -- revisions ----------------------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> str:
        """The commit id that a revision names: branch, tag, id prefix of ≥ 8 hex digits, `x~3`, `x@{key=value}`.

        Raises:
            RevisionNotFoundError: nothing answers to it; the message names near misses.
        """
        if not isinstance(revision, str) or not (match := _REVISION.fullmatch(revision)):
            raise InvalidInputError(
                f"not a revision: {revision!r}; use a branch, a tag, main~3, main@{{step=100}} or a commit id"
            )
        commit_id = self._resolve_name(match["name"], revision)
        if match["key"] is not None:
            commit_id = self._find_metadata(commit_id, match["key"], match["value"], revision)
        steps = sum(1 if part == "" else int(part) for part in match["steps"].split("~")[1:])
        if steps == 0:
            return commit_id
        found = self._index.first_parent_at(commit_id, steps)
        if found is None:
            raise RevisionNotFoundError(
                f"{revision!r}: the history ends before {steps} steps back; see `deltastore log {match['name']}`"
            )
        return found

    def _resolve_name(self, name: str, revision: str) -> str:
        ref = self._index.ref(name)
        if ref is not None:
            return ref.commit_id
        lowered = name.lower()
        if _HEX.fullmatch(lowered):
            found = self._index.find_commits(lowered, limit=3)
            if len(found) == 1:
                return found[0]
            if found:
                raise RevisionNotFoundError(f"{name!r} is ambiguous: {', '.join(each[:16] for each in found)}; give more digits")
        names = [ref.name for ref in self._index.refs()]
        near = difflib.get_close_matches(name[:255], names, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "see `deltastore branch` and `deltastore tag`"
        if not names:
            hint = "the store has no commits yet"
        raise RevisionNotFoundError(f"no branch, tag or commit {short_name(revision)!r}; {hint}")

    def _find_metadata(self, commit_id: str, key: str, text: str, revision: str) -> str:
        value: Any = {"true": True, "false": False}.get(text, text)
        try:
            number: float | None = float(text)
        except ValueError:
            number = None
        packed = canonical.dumps(canonical.pack(value)).decode()
        found = self._index.find_first_parent_with(commit_id, key, packed, number)
        if found is None:
            raise RevisionNotFoundError(
                f"{short_name(revision)!r}: no ancestor has metadata {key}={text}; see `deltastore log --json`"
            )
        return found

    # -- commits ------------------------------------------------------------------------------------------------------------

    def record(self, commit_id: str) -> CommitRecord:
        """The index row of a commit that must exist."""
        record = self._index.commit(commit_id)
        if record is None:
            raise RevisionNotFoundError(f"commit {commit_id} is not in the index")
        return record

    def commit(self, revision: str) -> Commit:
        """The commit that a revision names."""
        return Commit.from_record(self.record(self.resolve(revision)))

    def graph(self, revisions: Sequence[str], limit: int | None) -> list[Commit]:
        """All ancestors of some revisions, or without any of all refs, each once, newest first: children before parents."""
        heads = [self.resolve(revision) for revision in revisions] or [ref.commit_id for ref in self._index.refs()]
        return [Commit.from_record(record) for record in self._index.history(heads, limit)]

    def log(self, revision: str, limit: int | None) -> list[Commit]:
        """First-parent history, newest first."""
        return [Commit.from_record(record) for record in self._index.first_parents(self.resolve(revision), limit)]
