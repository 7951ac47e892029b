"""`init`, `verify` and `stats`: the store as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deltastore.cli.output import Column, counted, human_bytes
from deltastore.cli.settings import Settings, global_options
from deltastore.errors import AlreadyExistsError

if TYPE_CHECKING:
    from deltastore.stats import ObjectStats
    from deltastore.verify import Problem

DAMAGED = 13


@click.command("init")
@click.argument("address", required=False)
@click.option("--exist-ok", is_flag=True, help="Leave a store that is there as it is, and succeed.")
@global_options(writes=True)
@click.pass_obj
def init_command(settings: Settings, address: str | None, exist_ok: bool) -> None:
    """Make a store at ADDRESS, a folder."""
    settings.check_index()
    place = address or settings.store
    if place is None:
        raise click.UsageError("where? Give the folder of the new store, as in `deltastore init ./runs`")
    from deltastore.buckets import open_bucket
    from deltastore.layout import STORE_KEY
    from deltastore.store import DeltaStore

    exists = open_bucket(place).stat([STORE_KEY])[STORE_KEY] is not None
    if exists and not exist_ok:
        raise AlreadyExistsError(f"{place} is a deltastore already; use it, or repeat this with --exist-ok")
    if not settings.dry_run:
        DeltaStore.create(place, exist_ok=exist_ok).close()
    output = settings.output()
    if output.as_json:
        output.document({"address": place, "created": not exists, "dry_run": settings.dry_run})
    elif output.quiet:
        output.line(place)
    elif exists:
        output.line(f"{place} is a store already")
    else:
        output.line(f"{'would make' if settings.dry_run else 'made'} a store at {place}")


@click.command("verify")
@click.argument("revision", metavar="[REV]", required=False)
@click.option("--read-data", is_flag=True, help="Decode every stored chunk, too, and compare its digests.")
@global_options()
@click.pass_obj
def verify_command(settings: Settings, revision: str | None, read_data: bool) -> int:
    """Check every object that REV needs (all branches and tags). Changes nothing.

    Exits with 13 when something is broken. Into a pipe: object, what is wrong, ids of the commits that need it. With -q: the
    ids of all broken commits.
    """
    output = settings.output()
    with settings.open_store() as store:
        report = store.verify(revision, read_data=read_data)
    broken = sorted({commit for problem in report.problems for commit in problem.commits})
    if output.as_json:
        output.document(
            {
                "ok": bool(report),
                "commits": report.commits,
                "objects": report.objects,
                "chunks": report.chunks,
                "bytes_read": report.bytes_read,
                "problems": [
                    {"key": problem.key, "message": problem.message, "commits": problem.commits} for problem in report.problems
                ],
            }
        )
    elif output.quiet:
        output.lines(broken)
    else:
        if output.terminal:
            for problem in report.problems:
                output.line(f"{problem.key}: {problem.message}")
                output.line(f"    breaks {counted(len(problem.commits), 'commit')}: {_some_ids(problem, output.verbose)}")
        else:
            output.table(_PROBLEM_COLUMNS, report.problems)
        checked = f"{counted(report.commits, 'commit')}, {counted(report.objects, 'object')}"
        if read_data:
            checked += f", {counted(report.chunks, 'chunk')} of {human_bytes(report.bytes_read)}"
        found = f"{counted(len(report.problems), 'problem')} in {counted(len(broken), 'commit')}" if broken else "all is well"
        if output.terminal or report:
            output.line(f"checked {checked}: {found}")
    return 0 if report else DAMAGED


def _some_ids(problem: Problem, all_of_them: bool) -> str:
    ids = problem.commits if all_of_them else problem.commits[:5]
    return ", ".join(each[:12] for each in ids) + (" …" if len(ids) < len(problem.commits) else "")


_PROBLEM_COLUMNS: list[Column[Problem]] = [
    Column("OBJECT", lambda problem: problem.key),
    Column("PROBLEM", lambda problem: problem.message),
    Column("COMMITS", lambda problem: " ".join(problem.commits)),
]


@click.command("stats")
@global_options()
@click.pass_obj
def stats_command(settings: Settings) -> None:
    """Count commits, objects and bytes.

    Into a pipe: name and figure, then `objects`, kind, count and bytes for each kind of object.
    """
    output = settings.output()
    with settings.open_store() as store:
        stats = store.stats()
    figures = {
        "commits": stats.commits,
        "branches": stats.branches,
        "tags": stats.tags,
        "logical_bytes": stats.logical_bytes,
        "stored_bytes": stats.stored_bytes,
        "pending_bytes": stats.pending_bytes,
    }
    if output.as_json:
        kinds = [{"kind": each.kind, "count": each.count, "bytes": each.bytes} for each in stats.objects]
        output.document(figures | {"ratio": stats.ratio, "objects": kinds})
    elif output.quiet:
        return  # nothing here has an id
    elif output.terminal:
        counts = [counted(stats.commits, "commit"), counted(stats.branches, "branch", "branches"), counted(stats.tags, "tag")]
        output.line(", ".join(counts))
        output.line(f"all versions as full copies  {human_bytes(stats.logical_bytes)}")
        output.line(f"stored                       {human_bytes(stats.stored_bytes)}, {stats.ratio:.3g} times less")
        if stats.pending_bytes:
            output.line(f"under way or given up        {human_bytes(stats.pending_bytes)}")
        output.table(_OBJECT_COLUMNS, stats.objects, indent="  ")
    else:
        for name, figure in figures.items():
            output.fields(name, str(figure))
        for each in stats.objects:
            output.fields("objects", each.kind, str(each.count), str(each.bytes))


_OBJECT_COLUMNS: list[Column[ObjectStats]] = [
    Column("OBJECTS", lambda each: each.kind),
    Column("COUNT", lambda each: str(each.count), right=True),
    Column("SIZE", lambda each: str(each.bytes), lambda each: human_bytes(each.bytes), right=True),
]
