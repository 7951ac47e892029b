"""Refuses to keep a SQLite index on a network file system.

SQLite in WAL mode shares memory between its processes and relies on POSIX locks; over a network neither holds, and two
machines that write at once destroy the file (https://sqlite.org/wal.html: "All processes using a database must be on
the same host computer").
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from deltastore.errors import IndexSchemaError

OVERRIDE = "DELTASTORE_ALLOW_NETWORK_SQLITE"
MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = frozenset(("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre"))
_NETWORK |= {"ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "wekafs"}
_LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs",))  # the root of a rootless container


def filesystem_type(path: Path, mounts: str) -> str | None:
    """The type of the file system that holds `path`, by the text of /proc/self/mountinfo (proc(5)); None: unknown."""
    path = path.resolve()
    found, depth = None, -1
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5 or not after:
            continue
        place = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if path.is_relative_to(place) and len(place.parts) >= depth:  # later lines lie over earlier ones
            found, depth = after.split(" ")[0], len(place.parts)
    return found


def is_network(kind: str | None) -> bool:
    """Whether a file system type is one that several machines share."""
    return kind is not None and (kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE))


def filesystem_type_of(folder: Path) -> str | None:
    """The type of the file system that holds `folder` on this machine; None: unknown."""
    try:
        mounts = MOUNTS.read_text("utf-8", "replace")
    except OSError:  # not Linux: nothing to ask
        return None
    return filesystem_type(folder, mounts)


def refuse_network(folder: Path) -> None:
    """Raise IndexSchemaError when `folder` is on a network file system, unless DELTASTORE_ALLOW_NETWORK_SQLITE=1."""
    if os.environ.get(OVERRIDE) == "1":
        return
    kind = filesystem_type_of(folder)
    if is_network(kind):
        raise IndexSchemaError(
            f"{folder} is on a network file system ({kind}), where a SQLite index is damaged as soon as two machines "
            "use it; keep the index on a local disk (--index sqlite:///local/path). When only one machine ever opens it, "
            f"{OVERRIDE}=1 overrides this"
        )
