"""`doctor`: whether this installation, this machine and a store are fit for use, and what to do where they are not."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import sqlite3
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import click

from deltastore.cli.output import human_bytes, human_time
from deltastore.cli.settings import Settings, global_options
from deltastore.errors import DeltaStoreError, StoreNotFoundError

BROKEN = 1
EXTRAS = {"torch": "torch", "plot": "matplotlib"}  # extra -> the package it is for
LIBRARIES = ("numpy", "safetensors", "huggingface_hub", "sqlalchemy", "zstandard")
LOW_SPACE = 1 << 30  # bytes; below this a warning
NO_SPACE = 1 << 20  # not even the index can grow
CLOCK_TOLERANCE = timedelta(minutes=2)
REBUILD = (
    "install a C compiler and the headers of Python (`apt install gcc python3-dev`), then "
    "`pip install --force-reinstall --no-deps --no-binary deltastore deltastore`, in a checkout `make clean install`"
)


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        facts: a JSON document per subject.
        lines: (subject, text for people).
        findings: (kind, one line that says what is wrong and what to do about it).
    """

    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    findings: list[tuple[Literal["problem", "warning"], str]] = field(default_factory=list)

    def fact(self, name: str, value: Any, text: str) -> None:
        """Remember a fact, exactly and for people."""
        self.facts[name] = value
        self.lines.append((name, text))

    def problem(self, text: str) -> None:
        """Something that does not work."""
        self.findings.append(("problem", text))

    def warning(self, text: str) -> None:
        """Something that works, but worse than it could."""
        self.findings.append(("warning", text))

    def messages(self, kind: Literal["problem", "warning"]) -> list[str]:
        """All findings of a kind."""
        return [text for found, text in self.findings if found == kind]


@click.command("doctor")
@global_options()
@click.pass_obj
def doctor_command(settings: Settings) -> int:
    """Check this installation, this machine, and the store if there is one. Changes nothing.

    Exits with 1 when something is broken; each problem says what to do about it. Into a pipe: subject and state.
    """
    report = Report()
    _check_versions(report)
    _check_kernel(report)
    _check_extras(report)
    _check_machine(report)
    _check_cache(report)
    _check_store(report, settings)
    problems = report.messages("problem")
    output = settings.output()
    if output.as_json:
        output.document({"ok": not problems, **report.facts, "problems": problems, "warnings": report.messages("warning")})
        return BROKEN if problems else 0
    if not output.quiet:
        for name, text in report.lines:
            if output.terminal:
                output.line(f"{name:10}  {text}")
            else:
                output.fields(name, text)
    for kind, text in report.findings:
        output.line(f"{kind}: {text}")
    if output.terminal and not problems:
        output.line("all is well")
    return BROKEN if problems else 0


# -- the installation -------------------------------------------------------------------------------------------------


def _check_versions(report: Report) -> None:
    from deltastore import __version__

    python = ".".join(map(str, sys.version_info[:3]))
    libraries = {name: _version(name) for name in LIBRARIES}
    system = f"{platform.system()} {platform.machine()}"
    versions = {"version": __version__, "python": python, "system": system, "sqlite": sqlite3.sqlite_version}
    shown = ", ".join(f"{name} {version}" for name, version in libraries.items())
    report.fact("deltastore", versions | {"libraries": libraries}, f"{__version__}, Python {python}, {system}")
    report.lines.append(("libraries", f"{shown}, SQLite {sqlite3.sqlite_version}"))


def _version(package: str) -> str | None:
    """The installed version of a package, which is not imported for it; None when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_kernel(report: Report) -> None:
    """Which kernel runs, and why it is the slower one."""
    try:
        from deltastore.codecs.kernel import NAME
    except (DeltaStoreError, ImportError) as error:  # DELTASTORE_KERNEL asks for what there is not
        report.fact("kernel", {"name": None, "reason": str(error)}, "none")
        asked_for = isinstance(error, ImportError)
        report.problem(f"{error}; DELTASTORE_KERNEL=native can't be had: unset it, or {REBUILD}" if asked_for else str(error))
        return
    if NAME == "native":
        report.fact("kernel", {"name": NAME, "reason": None}, NAME)
        return
    if os.environ.get("DELTASTORE_KERNEL") == "numpy":
        reason, remedy = "DELTASTORE_KERNEL=numpy asks for it", "unset DELTASTORE_KERNEL"
    elif importlib.util.find_spec("deltastore.codecs._kernel") is None:
        reason, remedy = "this installation was built without a C compiler", REBUILD
    else:
        reason, remedy = _import_error("deltastore.codecs._kernel"), REBUILD
    report.fact("kernel", {"name": NAME, "reason": reason}, f"{NAME}: {reason}")
    report.warning(f"the NumPy kernel is in use, which gives the same bytes several times slower, because {reason}; {remedy}")


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"the native one can't be loaded ({error})"
    return "the native one could not be loaded when this process started"


def _check_extras(report: Report) -> None:
    extras: dict[str, Any] = {}
    texts = []
    for extra, package in EXTRAS.items():
        version, install = _version(package), f"pip install 'deltastore[{extra}]'"
        extras[extra] = {"package": package, "version": version, "install": install}
        texts.append(f"{package} {version}" if version else f"{package} is missing: {install}")
    report.fact("extras", extras, ", ".join(texts))


# -- the machine ------------------------------------------------------------------------------------------------------


def _check_machine(report: Report) -> None:
    from deltastore.options import available_memory, worker_count

    cores, memory = worker_count(), available_memory()
    shown = "" if memory is None else f", {human_bytes(memory)} of memory available"
    report.fact("machine", {"cores": cores, "memory_available": memory}, f"{cores} cores{shown}")


def _check_cache(report: Report) -> None:
    from deltastore.cache_folder import cache_root
    from deltastore.space import free_bytes

    folder = cache_root()
    size, free = _size(folder), free_bytes(folder) or 0
    writable = os.access(_nearest(folder), os.W_OK)
    fact = {"folder": str(folder), "bytes": size, "free_bytes": free, "writable": writable}
    report.fact("cache", fact, f"{folder}, {human_bytes(size)}, {human_bytes(free)} free")
    if not writable:
        report.warning(
            f"the cache folder {folder} can't be written to, so baselines stay in memory; "
            "set DELTASTORE_CACHE to a folder that can"
        )
    elif free < LOW_SPACE:
        report.warning(f"{folder} has {human_bytes(free)} free; set DELTASTORE_CACHE to a folder on a larger disk")


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _size(folder: Path) -> int:
    """Bytes of all files below a folder; other processes may be deleting some of them."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total


# -- the store --------------------------------------------------------------------------------------------------------


def _check_store(report: Report, settings: Settings) -> None:
    """All about the store of the command line; without one there is nothing to check."""
    try:
        address = settings.address()
    except StoreNotFoundError:
        report.fact("store", None, "none given: name one with --store or DELTASTORE_URL")
        return
    fact: dict[str, Any] = {"address": address}
    texts = [address]
    try:
        _check_place(report, settings, fact, texts)
        _check_history(report, address, fact, texts)
    except (DeltaStoreError, OSError) as error:  # their messages say what to do
        report.problem(f"{address}: {error}" if isinstance(error, OSError) else str(error))
        texts.append("broken")
    report.fact("store", fact, ", ".join(texts))


def _check_place(report: Report, settings: Settings, fact: dict[str, Any], texts: list[str]) -> None:
    """The folder, its file system and the schema of its index. Raises what opening the store would raise."""
    from deltastore.cli.index import index_revision, locate_index
    from deltastore.index import filesystems
    from deltastore.index.database import SCHEMA
    from deltastore.space import free_bytes

    path, document = locate_index(settings)
    folder = path.parent
    fact |= {"uuid": document.uuid, "schema": index_revision(path), "expected_schema": SCHEMA}
    kind = filesystems.filesystem_type_of(folder)
    read_only = not (os.access(folder, os.W_OK) and os.access(path, os.W_OK))
    free = free_bytes(folder) or 0
    fact |= {"filesystem": kind, "read_only": read_only, "free_bytes": free}
    texts += [f"schema {fact['schema']}", f"on {kind or 'an unknown file system'}", "read-only" if read_only else "writable"]
    texts.append(f"{human_bytes(free)} free")
    if filesystems.is_network(kind) and os.environ.get(filesystems.OVERRIDE) == "1":
        report.warning(
            f"{folder} is on a network file system ({kind}), where the index is damaged as soon as two machines use it; "
            "open this store on one machine only, or move it to a local disk"
        )
    if read_only:
        report.warning(f"{folder} can't be written to, so nothing can be committed; check who owns it, and how it is mounted")
    if free < NO_SPACE:
        report.problem(f"{folder} has {human_bytes(free)} free, too little for a commit; free some space")
    elif free < LOW_SPACE:
        report.warning(f"{folder} has {human_bytes(free)} free; free some space before large commits")


def _check_history(report: Report, address: str, fact: dict[str, Any], texts: list[str]) -> None:
    """Whether the store opens, and its newest commit is not of the future."""
    from deltastore.store import DeltaStore

    with DeltaStore(address, read_only=True, baseline="none") as store:
        heads = [store.get_commit(commit_id) for commit_id in sorted({ref.commit_id for ref in store.list_refs()})]
    fact["newest_commit"] = None
    if not heads:
        texts.append("no commits")
        return
    newest = max(heads, key=lambda commit: commit.created_at)
    fact["newest_commit"] = {"id": newest.id, "created_at": newest.created_at}
    texts.append(f"newest commit {newest.short_id} of {human_time(newest.created_at)}")
    now = datetime.now(UTC)
    if newest.created_at > now + CLOCK_TOLERANCE:
        report.warning(
            f"commit {newest.short_id} is from {human_time(newest.created_at)}, but the clock says {human_time(now)}: this clock "
            "was set back, or that of the committer was ahead; set the clock, or new commits look older than their parents"
        )
