"""Keys of all objects of a store, and the time-ordered ids in them (format 1, docs/FORMAT.md).

Physical names are never reused: packs, manifests, structures and commit documents carry a fresh uuid7 (RFC 9562,
section 5.7). They are spread over 256 folders by the last two digits of that id; the first ones are the same for years.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid

from deltastore.errors import InvalidInputError

STORE_KEY = "store.json"
FOLDERS = (
    "epochs",
    "packs",
    "manifests",
    "structures",
    "commits",
    "refs",
)  # nothing else in a bucket belongs to a store
LOG_SEQ_PER_FOLDER = 1000

ID_PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
COMMIT_ID_PATTERN = "[0-9a-f]{64}"
# Epochs have six digits, sequence numbers twelve, their thousands nine, so that names sort like numbers.
MAX_EPOCH = 10**6 - 1
MAX_SEQ = 10**12 - 1

_id = re.compile(ID_PATTERN)
_commit_id = re.compile(COMMIT_ID_PATTERN)
_named_object = re.compile(f"(packs|manifests|structures)/([0-9a-f]{{2}})/({ID_PATTERN})")
_commit = re.compile(rf"commits/([0-9a-f]{{2}})/({COMMIT_ID_PATTERN})\.({ID_PATTERN})\.json")
_log = re.compile(r"refs/log/([0-9]{6})/([0-9]{9})/([0-9]{12})\.json")
_snapshot = re.compile(r"refs/snapshot/([0-9]{6})/([0-9]{12})\.json")
_epoch = re.compile(r"epochs/([0-9]{6})\.json")

_id_lock = threading.Lock()
_last_tick = 0
if hasattr(os, "register_at_fork"):  # a lock that another thread holds during a fork would stay locked in the child
    os.register_at_fork(after_in_child=lambda: globals().update(_id_lock=threading.Lock()))


def new_id() -> str:
    """A fresh uuid7 as text. Ids of one process rise strictly; 62 bits are random, also after a fork."""
    global _last_tick
    with _id_lock:
        # 48 bits of milliseconds and 12 bits of counter are one number that never stands still
        _last_tick = tick = max((time.time_ns() // 1_000_000) << 12, _last_tick + 1)
    random = int.from_bytes(os.urandom(8), "big") >> 2
    return str(uuid.UUID(int=(tick >> 12) << 80 | 7 << 76 | (tick & 0xFFF) << 64 | 2 << 62 | random))


def is_id(text: str) -> bool:
    """Whether a text is a uuid7 in lower case."""
    return _id.fullmatch(text) is not None


def pack_key(pack_id: str) -> str:
    """`packs/<last two digits>/<id>`."""
    return _object_key("packs", pack_id)


def manifest_key(manifest_id: str) -> str:
    """`manifests/<last two digits>/<id>`."""
    return _object_key("manifests", manifest_id)


def structure_key(structure_id: str) -> str:
    """`structures/<last two digits>/<id>`."""
    return _object_key("structures", structure_id)


def pack_id(key: str) -> str:
    """The id in the key of a pack.

    Raises:
        InvalidInputError: the key is no pack's.
    """
    match = _named_object.fullmatch(key)
    if match is None or match[1] != "packs" or not match[3].endswith(match[2]):
        raise InvalidInputError(f"{shorten(key)} is not the key of a pack; expected packs/<2 hex>/<uuid7>")
    return match[3]


def commit_key(commit_id: str, document_id: str) -> str:
    """`commits/<first two digits>/<commit id>.<uuid7>.json`: a commit that is written again gets another document."""
    if _commit_id.fullmatch(commit_id) is None:
        raise InvalidInputError(f"{shorten(commit_id)} is not a commit id; expected 64 hex digits")
    if not is_id(document_id):
        raise InvalidInputError(f"{shorten(document_id)} is not a uuid7; make one with layout.new_id()")
    return f"commits/{commit_id[:2]}/{commit_id}.{document_id}.json"


def log_key(epoch: int, seq: int) -> str:
    """`refs/log/<epoch>/<seq div 1000>/<seq>.json` with 6, 9 and 12 digits."""
    _check_number("epoch", epoch, MAX_EPOCH)
    _check_number("seq", seq, MAX_SEQ)
    return f"refs/log/{epoch:06}/{seq // LOG_SEQ_PER_FOLDER:09}/{seq:012}.json"


def snapshot_key(epoch: int, seq: int) -> str:
    """`refs/snapshot/<epoch>/<seq>.json` with 6 and 12 digits."""
    _check_number("epoch", epoch, MAX_EPOCH)
    _check_number("seq", seq, MAX_SEQ)
    return f"refs/snapshot/{epoch:06}/{seq:012}.json"


def epoch_key(epoch: int) -> str:
    """`epochs/<n>.json` with 6 digits."""
    _check_number("epoch", epoch, MAX_EPOCH)
    return f"epochs/{epoch:06}.json"


def parse_commit_key(key: str) -> tuple[str, str] | None:
    """(commit id, document id) of a commit document's key, or None for another key."""
    match = _commit.fullmatch(key)
    return (match[2], match[3]) if match and match[2].startswith(match[1]) else None


def parse_log_key(key: str) -> tuple[int, int] | None:
    """(epoch, seq) of a log entry's key, or None for another key."""
    match = _log.fullmatch(key)
    return (int(match[1]), int(match[3])) if match and match[3].startswith(match[2]) else None


def parse_snapshot_key(key: str) -> tuple[int, int] | None:
    """(epoch, seq) of a ref snapshot's key, or None for another key."""
    match = _snapshot.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def parse_epoch_key(key: str) -> int | None:
    """The number of an epoch document's key, or None for another key."""
    match = _epoch.fullmatch(key)
    return int(match[1]) if match else None


def object_kind(key: str) -> str | None:
    """ "pack", "manifest", "structure", "commit", "log", "snapshot", "epoch" or "store"; None for a key of no store."""
    match = _named_object.fullmatch(key)
    if match is not None:
        return match[1].removesuffix("s") if match[3].endswith(match[2]) else None
    if parse_commit_key(key) is not None:
        return "commit"
    if parse_log_key(key) is not None:
        return "log"
    if parse_snapshot_key(key) is not None:
        return "snapshot"
    if parse_epoch_key(key) is not None:
        return "epoch"
    return "store" if key == STORE_KEY else None


def shorten(text: str) -> str:
    """A name from outside for a message: quoted, escaped, and at most about 120 characters long."""
    return repr(text if len(text) <= 120 else text[:100] + "…")


def _object_key(folder: str, object_id: str) -> str:
    if not is_id(object_id):
        raise InvalidInputError(f"{shorten(object_id)} is not a uuid7; make one with layout.new_id()")
    return f"{folder}/{object_id[-2:]}/{object_id}"


def _check_number(name: str, number: int, maximum: int) -> None:
    if not 0 <= number <= maximum:
        raise InvalidInputError(f"{name} {number} is outside 0..{maximum}; format 1 has no key for it")
