"""`cache`: what deltastore keeps on this machine beside the stores."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltastore.cli.output import Column, counted, human_bytes, human_time, print_notice, timestamp
from deltastore.cli.quantities import parse_age, size_of
from deltastore.cli.settings import Settings, global_options

if TYPE_CHECKING:
    from deltastore.cache import CacheEntry, CachePlan

NO_LOCKS = "the file system of {} has no locks, so nobody can tell what is in use; delete by hand what you don't need"
MAX_BYTES = "DELTASTORE_CACHE_MAX_BYTES"

_cache_dir = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="The cache folder [DELTASTORE_CACHE; $HF_HOME/deltastore].",
)


@click.group("cache", invoke_without_command=True)
@_cache_dir
@global_options(writes=True)
@click.pass_context
def cache_command(context: click.Context, cache_dir: Path | None) -> None:
    """List, cap and prune what is kept on this machine beside the stores."""
    if context.invoked_subcommand is None:
        _list(context.ensure_object(Settings), cache_dir)
    elif cache_dir is not None:
        raise click.UsageError("--cache-dir stands after the name of the subcommand", context)


@cache_command.command("list")
@_cache_dir
@global_options()
@click.pass_obj
def cache_list(settings: Settings, cache_dir: Path | None) -> None:
    """List the entries: store, kind, name, size, last use, and whether a process uses it now."""
    _list(settings, cache_dir)


@cache_command.command("prune")
@click.option("--older-than", callback=parse_age, default="7d", show_default=True, metavar="TIME", help="Not used for so long.")
@click.option("--all", "everything", is_flag=True, help="However lately it was used.")
@_cache_dir
@global_options(writes=True)
@click.pass_obj
def cache_prune(settings: Settings, older_than: float, everything: bool, cache_dir: Path | None) -> None:
    """Delete entries that nobody uses. They are made again when they are needed."""
    from deltastore.cache import plan_prune

    _clean(settings, plan_prune(_root(cache_dir), 0 if everything else older_than))


@cache_command.command("cap")
@click.argument("size", required=False)
@_cache_dir
@global_options(writes=True)
@click.pass_obj
def cache_cap(settings: Settings, size: str | None, cache_dir: Path | None) -> None:
    """Delete what was used longest ago, until all takes at most SIZE, such as 20GB [DELTASTORE_CACHE_MAX_BYTES]."""
    from deltastore.cache import plan_cap

    text = size or os.environ.get(MAX_BYTES)
    if not text:
        raise click.UsageError(f"how much may the cache take? Say `deltastore cache cap 20GB`, or set {MAX_BYTES}")
    limit = size_of(text)
    if limit is None:
        source = "SIZE" if size else MAX_BYTES
        raise click.UsageError(f"{source} is {text!r}, which is not a size; write 5GB, 500MiB or a number of bytes")
    _clean(settings, plan_cap(_root(cache_dir), limit))


def _root(cache_dir: Path | None) -> Path:
    from deltastore.cache_folder import cache_root

    return cache_root(cache_dir)


def _list(settings: Settings, cache_dir: Path | None) -> None:
    from deltastore.cache import list_entries
    from deltastore.cache_folder import locks_work

    root = _root(cache_dir)
    entries = list_entries(root)
    output = settings.output()
    locks = not entries or locks_work(root)
    if output.as_json:
        total = sum(entry.bytes for entry in entries)
        document = {"folder": str(root), "bytes": total, "locks": locks, "entries": list(map(_document, entries))}
        output.document(document)
        return
    if output.quiet:
        output.lines(str(entry.folder) for entry in entries)
        return
    output.table(_COLUMNS, entries)
    if output.terminal:
        output.line(f"{root}: {_summary(entries)}")
    if not locks:
        print_notice(False, "warning", NO_LOCKS.format(root))


def _clean(settings: Settings, plan: CachePlan) -> None:
    from deltastore.cache import CacheReport, run_cleaning
    from deltastore.cache_folder import locks_work

    report = CacheReport((), ())
    if plan.delete and not settings.dry_run:
        settings.confirm("\n".join([f"delete {_summary(plan.delete)}:", *(f"  {_described(entry)}" for entry in plan.delete)]))
    if not settings.dry_run:
        report = run_cleaning(plan)
    if plan.kept_in_use and not locks_work(plan.root):
        print_notice(settings.json, "warning", NO_LOCKS.format(plan.root))
    output = settings.output()
    kept = [*plan.kept_in_use, *report.skipped]
    if output.as_json:
        done = plan.delete if settings.dry_run else report.deleted
        document: dict[str, Any] = {"dry_run": settings.dry_run, "deleted": list(map(_document, done))}
        freed, after = sum(entry.bytes for entry in done), plan.bytes_before - sum(entry.bytes for entry in done)
        output.document(document | {"kept_in_use": list(map(_document, kept)), "bytes_freed": freed, "bytes_left": after})
    elif output.quiet:
        output.lines(str(entry.folder) for entry in (plan.delete if settings.dry_run else report.deleted))
    else:
        if settings.dry_run:
            output.lines(f"would delete {_described(entry)}" for entry in plan.delete)
        what = f"would delete {_summary(plan.delete)}" if settings.dry_run else f"deleted {_summary(report.deleted)}"
        output.line(what + (f"; kept {counted(len(kept), 'entry', 'entries')} in use" if kept else ""))


def _summary(entries: list[CacheEntry] | tuple[CacheEntry, ...]) -> str:
    return f"{counted(len(entries), 'entry', 'entries')}, {human_bytes(sum(entry.bytes for entry in entries))}"


def _described(entry: CacheEntry) -> str:
    return f"{entry.store}/{entry.kind}/{entry.name}, {human_bytes(entry.bytes)}, used {human_time(_moment(entry))}"


def _moment(entry: CacheEntry) -> datetime:
    return datetime.fromtimestamp(entry.last_used, UTC)


def _document(entry: CacheEntry) -> dict[str, Any]:
    return {
        "store": entry.store,
        "kind": entry.kind,
        "name": entry.name,
        "folder": str(entry.folder),
        "bytes": entry.bytes,
        "last_used": _moment(entry),
        "in_use": entry.in_use,
    }


_COLUMNS: list[Column[CacheEntry]] = [
    Column("STORE", lambda entry: entry.store, shrink=True),
    Column("KIND", lambda entry: entry.kind),
    Column("NAME", lambda entry: entry.name, shrink=True),
    Column("SIZE", lambda entry: str(entry.bytes), lambda entry: human_bytes(entry.bytes), right=True),
    Column("LAST USE", lambda entry: timestamp(_moment(entry)), lambda entry: human_time(_moment(entry))),
    Column("IN USE", lambda entry: "yes" if entry.in_use else "no"),
]
