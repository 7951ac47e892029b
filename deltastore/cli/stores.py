"""`init`, `verify`, `stats` and `du`: the store as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltastore.cli.output import Column, Output, counted, first_line, human_bytes, print_notice
from deltastore.cli.settings import Settings, global_options, plot_option
from deltastore.errors import AlreadyExistsError

if TYPE_CHECKING:
    from deltastore.stats import Forecast, ObjectStats, Usage
    from deltastore.verify import Problem

DAMAGED = 13
PLOTTED_COMMITS = 50


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


# -- stats and du -----------------------------------------------------------------------------------------------------


@click.command("stats")
@click.argument("revision", metavar="[REV]", required=False)
@plot_option("Draw the bytes and the changed layers of the last commits of REV (main): a .png, .svg or .pdf file.")
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="Draw at most so many commits (50).")
@global_options()
@click.pass_obj
def stats_command(settings: Settings, revision: str | None, plot: Path | None, limit: int | None) -> None:
    """Count commits, objects and bytes, and tell for how many more commits there is room.

    Into a pipe: name and figure, then `objects`, kind, count and bytes for each kind of object.
    """
    if plot is None and (revision is not None or limit is not None):
        raise click.UsageError("REV and --limit say what --plot draws; for the bytes of commits see `deltastore du REV`")
    output = settings.output()
    with settings.open_store() as store:
        stats = store.stats()
        if plot is not None:
            from deltastore.cli.pictures import plot_stats

            plot_stats(store, revision or "main", limit or PLOTTED_COMMITS, plot)
            print_notice(settings.json, "plot", f"wrote {plot}")
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
        output.document(figures | {"ratio": stats.ratio, "objects": kinds, "forecast": _forecast_document(stats.forecast)})
    elif output.quiet:
        return  # nothing here has an id
    elif output.terminal:
        counts = [counted(stats.commits, "commit"), counted(stats.branches, "branch", "branches"), counted(stats.tags, "tag")]
        output.line(", ".join(counts))
        output.line(f"all versions as full copies  {human_bytes(stats.logical_bytes)}")
        output.line(f"stored                       {human_bytes(stats.stored_bytes)}, {stats.ratio:.3g} times less")
        if stats.pending_bytes:
            output.line(f"under way or given up        {human_bytes(stats.pending_bytes)}")
        _print_forecast(output, stats.forecast, "room                         ")
        output.table(_OBJECT_COLUMNS, stats.objects, indent="  ")
    else:
        for name, figure in figures.items():
            output.fields(name, str(figure))
        for name, value in _forecast_document(stats.forecast).items():
            output.fields(name, "" if value is None else str(value))
        for each in stats.objects:
            output.fields("objects", each.kind, str(each.count), str(each.bytes))


_OBJECT_COLUMNS: list[Column[ObjectStats]] = [
    Column("OBJECTS", lambda each: each.kind),
    Column("COUNT", lambda each: str(each.count), right=True),
    Column("SIZE", lambda each: str(each.bytes), lambda each: human_bytes(each.bytes), right=True),
]


def _forecast_document(forecast: Forecast) -> dict[str, int | None]:
    return {
        "free_bytes": forecast.free_bytes,
        "sampled_commits": forecast.sampled_commits,
        "commit_bytes": forecast.commit_bytes,
        "commits_left": forecast.commits_left,
    }


def _print_forecast(output: Output, forecast: Forecast, label: str = "") -> None:
    if forecast.free_bytes is None:
        return
    text = f"{label}{human_bytes(forecast.free_bytes)} free"
    if forecast.commits_left is not None and forecast.commit_bytes is not None:
        sample = "the last commit" if forecast.sampled_commits == 1 else f"the last {forecast.sampled_commits} commits"
        left = "more than a million commits" if forecast.commits_left > 10**6 else counted(forecast.commits_left, "commit")
        text += f": full in {left} of {human_bytes(forecast.commit_bytes)}, the mean of {sample}"
    output.line(text)


@click.command("du")
@click.argument("revisions", metavar="[REV]...", nargs=-1)
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="At most so many commits of each REV.")
@global_options()
@click.pass_obj
def du_command(settings: Settings, revisions: tuple[str, ...], limit: int | None) -> None:
    """Show what branches and tags take, each with its history; with REV, what each commit of its history takes.

    LOGICAL is the size as full copies; STORED all objects that are needed, shared ones in full; UNIQUE those that nothing
    else needs, so what forgetting would free; ADDED those that came with a commit. Into a pipe: kind, name or id, commits,
    then these in bytes.
    """
    if limit is not None and not revisions:
        raise click.UsageError("--limit counts commits of a revision; name one, as in `deltastore du main -n 5`")
    output = settings.output()
    with settings.open_store() as store:
        usage = store.du(*revisions, limit=limit)
        messages = {}
        if revisions and output.terminal and not output.as_json and not output.quiet:
            listed = (commit for revision in revisions for commit in store.list_commits(revision, limit))
            messages = {commit.id: first_line(commit.message) for commit in listed}
    if output.as_json:
        parts = [{field: getattr(each, field) for field in _USAGE_FIELDS} for each in usage.parts]
        output.document({"total_bytes": usage.total_bytes, "parts": parts, "forecast": _forecast_document(usage.forecast)})
    elif output.quiet:
        output.lines(each.name for each in usage.parts if each.name)
    else:
        output.table(_usage_columns(messages, bool(revisions), output.terminal), usage.parts)
        if output.terminal:
            output.line(f"the store takes {human_bytes(usage.total_bytes)}")
            _print_forecast(output, usage.forecast)


_USAGE_FIELDS = ("kind", "name", "commits", "logical_bytes", "stored_bytes", "unique_bytes", "added_bytes")


def _usage_columns(messages: dict[str, str], of_commits: bool, terminal: bool) -> list[Column[Usage]]:
    def size(title: str, field: str) -> Column[Usage]:
        def figure(each: Usage) -> int | None:
            value: int | None = getattr(each, field)
            return value

        return Column(
            title,
            lambda each: "" if figure(each) is None else str(figure(each)),
            lambda each: human_bytes(figure(each) or 0),
            right=True,
        )

    sizes = [size("LOGICAL", "logical_bytes"), size("STORED", "stored_bytes"), size("UNIQUE", "unique_bytes")]
    added = size("ADDED", "added_bytes")
    if not terminal:
        return [
            Column("KIND", lambda each: each.kind),
            Column("NAME", lambda each: each.name),
            Column("COMMITS", lambda each: str(each.commits)),
            *sizes,
            added,
        ]
    if of_commits:
        return [
            Column("COMMIT", lambda each: each.name, lambda each: each.name[:12]),
            *sizes,
            added,
            Column("MESSAGE", lambda each: messages.get(each.name, ""), shrink=True),
        ]
    return [
        Column("NAME", lambda each: each.name or "(no branch or tag)", shrink=True),
        Column("KIND", lambda each: "" if each.kind == "unreachable" else each.kind),
        Column("COMMITS", lambda each: str(each.commits), right=True),
        *sizes,
    ]
