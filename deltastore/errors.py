"""Every error that deltastore raises, grouped by what a handler would do about it.

    DeltaStoreError                          exit  1
    ├── InvalidInputError (ValueError)             2    a wrong argument
    ├── NotFoundError (LookupError)               10
    │   ├── StoreNotFoundError
    │   ├── RevisionNotFoundError
    │   │   └── RevisionForgottenError
    │   └── TensorNotFoundError
    ├── AlreadyExistsError                         2
    ├── RefConflictError                          11    retry may succeed
    ├── StoreFencedError                          11
    ├── AuthenticationError                       12
    ├── IntegrityError                            13    bytes are not what they should be
    │   └── FormatError                           13
    │       └── UnsupportedFormatError             1    upgrade deltastore
    ├── StoreFullError                            14
    ├── StorageError                              15
    ├── IncompatibleStateError (ValueError)       16
    ├── IndexSchemaError                           1
    ├── ReadOnlyError                              1
    └── MissingDependencyError (ImportError)       1

Messages say what happened, to which tensor, ref or object, expected against found, and what to do next. All fields are
positional arguments of the constructor, so that errors survive pickling between processes.
"""

from __future__ import annotations

from typing import Self


def short_name(name: str, limit: int = 120) -> str:
    """A name for a message: very long ones lose their middle."""
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[-limit // 3 :]}"


class DeltaStoreError(Exception):
    """Base of all errors of this library."""

    exit_code = 1

    def __str__(self) -> str:  # KeyError and friends would print a repr
        return str(self.args[0]) if self.args else ""


class InvalidInputError(DeltaStoreError, ValueError):
    """An argument that can't be used as given."""

    exit_code = 2


class AlreadyExistsError(DeltaStoreError):
    """A store, branch, tag or file is there already."""

    exit_code = 2


class NotFoundError(DeltaStoreError, LookupError):
    """Something that was asked for by name does not exist."""

    exit_code = 10


class StoreNotFoundError(NotFoundError):
    """No store at this address."""


class RevisionNotFoundError(NotFoundError):
    """No branch, tag or commit answers to this revision."""


class RevisionForgottenError(RevisionNotFoundError):
    """The commit is known, but its content was given up by a retention policy."""


class TensorNotFoundError(NotFoundError):
    """The commit holds no tensor of this name."""


class RefConflictError(DeltaStoreError):
    """A branch moved while it was being written to.

    Attributes: `name` of the ref, `expected` and `actual` commit ids (None: the ref did not exist).
    """

    exit_code = 11

    def __init__(self, name: str, expected: str | None, actual: str | None) -> None:
        super().__init__(name, expected, actual)
        self.name, self.expected, self.actual = name, expected, actual

    def __str__(self) -> str:
        return (
            f"{self.name!r} moved: expected {self.expected or 'no such ref'}, found {self.actual or 'no such ref'}; "
            f"look at `deltastore log {self.name}` and try again"
        )


class StoreFencedError(DeltaStoreError):
    """Another index has taken over writing to this store."""

    exit_code = 11


class AuthenticationError(DeltaStoreError):
    """The token is missing, expired or lacks a right."""

    exit_code = 12


class IntegrityError(DeltaStoreError):
    """Stored bytes are not what their digests, lengths or documents say.

    Attributes: `key` of the object that is damaged, where one is known.
    """

    exit_code = 13

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message, key)
        self.key = key

    def within(self, what: str) -> Self:
        """The same error, said of something larger: a tensor, a batch."""
        return type(self)(f"{what}: {self}", self.key)


class FormatError(IntegrityError):
    """Bytes that can't be parsed as what they should be."""


class UnsupportedFormatError(FormatError):
    """A format, feature or codec that this version of deltastore does not know."""

    exit_code = 1


class StoreFullError(DeltaStoreError):
    """No space or quota left; everything is as it was before."""

    exit_code = 14


class StorageError(DeltaStoreError):
    """A bucket operation failed.

    Attributes: `kind` ("missing", "timeout", "denied", "io" …), `retryable`, and the `key` of the object.
    """

    exit_code = 15

    def __init__(self, message: str, kind: str = "io", retryable: bool = False, key: str | None = None) -> None:
        super().__init__(message, kind, retryable, key)
        self.kind, self.retryable, self.key = kind, retryable, key


class IncompatibleStateError(DeltaStoreError, ValueError):
    """A state that can't be committed as it is, or a target that does not fit the commit."""

    exit_code = 16


class IndexSchemaError(DeltaStoreError):
    """The index has another schema than this version of deltastore, or belongs to another store."""


class ReadOnlyError(DeltaStoreError):
    """A write was asked of a store that was opened read-only."""


class MissingDependencyError(DeltaStoreError, ImportError):
    """An optional package is needed; the message names the extra to install."""
