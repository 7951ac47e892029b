"""`log`, `show` and `diff`: what is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltastore.cli.output import (
    Column,
    Output,
    bar,
    counted,
    cut,
    escape,
    first_line,
    human_bytes,
    human_time,
    json_text,
    percent,
    print_notice,
    terminal_width,
    timestamp,
)
from deltastore.cli.settings import Settings, global_options, plot_option

if TYPE_CHECKING:
    from deltastore.diff import Diff
    from deltastore.history import Commit
    from deltastore.layers import LayerChange
    from deltastore.snapshot import Snapshot

DIFFERENCES = 20
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 8, 50


def commit_document(commit: Commit) -> dict[str, Any]:
    """A commit for JSON."""
    return {
        "id": commit.id,
        "parents": commit.parents,
        "tree": commit.tree,
        "message": commit.message,
        "author": commit.author,
        "created_at": commit.created_at,
        "metadata": commit.metadata,
    }


def metadata_text(metadata: dict[str, Any]) -> str:
    """Metadata for people: "step=100 loss=1.7"."""
    return " ".join(f"{key}={value if isinstance(value, str) else json_text(value)}" for key, value in metadata.items())


# -- log --------------------------------------------------------------------------------------------------------------


@click.command("log")
@click.argument("revisions", metavar="[REV]...", nargs=-1)
@click.option("-n", "--limit", type=click.IntRange(min=0), metavar="N", help="At most so many commits.")
@click.option("--oneline", is_flag=True, help="Short id and subject only.")
@click.option("--graph", is_flag=True, help="Draw the history of all REVs (all branches and tags), merges and all.")
@global_options()
@click.pass_obj
def log_command(settings: Settings, revisions: tuple[str, ...], limit: int | None, oneline: bool, graph: bool) -> None:
    """List the history of REV (main), newest commit first.

    Into a pipe: id, time, author, message and metadata as JSON, separated by tabs; with --graph the drawing before them.
    """
    if len(revisions) > 1 and not graph:
        raise click.UsageError("several revisions need --graph; without it the history of one is listed")
    output = settings.output()
    with settings.open_store() as store:
        one = revisions[0] if revisions else "main"
        commits = store.list_history(*revisions, limit=limit) if graph else store.list_commits(one, limit)
        refs: dict[str, list[str]] = {}
        for ref in store.list_refs():
            refs.setdefault(ref.commit_id, []).append(ref.name if ref.kind == "branch" else f"tag: {ref.name}")
    if output.as_json:
        output.document([commit_document(commit) for commit in commits])
    elif output.quiet:
        output.lines(commit.id for commit in commits)
    elif graph:
        _print_graph(output, commits, refs, oneline)
    elif oneline:
        for commit in commits:
            output.line(_oneline(commit, refs))
    elif output.verbose:
        for commit in commits:
            _print_commit(output, commit, refs.get(commit.id, []))
            output.line()
    else:
        output.table(_log_columns(refs), commits)


def _oneline(commit: Commit, refs: dict[str, list[str]]) -> str:
    names = f"({', '.join(refs[commit.id])}) " if commit.id in refs else ""
    return f"{commit.short_id} {names}{first_line(commit.message)}".rstrip()


def _print_graph(output: Output, commits: Sequence[Commit], refs: dict[str, list[str]], oneline: bool) -> None:
    from deltastore.cli.graph import draw

    width = terminal_width() if output.terminal else None
    columns = _log_columns(refs)
    following = iter(commits)
    for drawing, is_commit in draw((commit.id, commit.parents) for commit in commits):
        if not is_commit:
            output.line(drawing)
            continue
        commit = next(following)
        if width is None and not oneline:
            output.fields(drawing, *(column.plain(commit) for column in columns))
            continue
        output.line(cut(escape(f"{drawing} {_oneline(commit, refs)}"), width))


def _log_columns(refs: dict[str, list[str]]) -> list[Column[Commit]]:
    def subject(commit: Commit) -> str:
        names = f"({', '.join(refs[commit.id])}) " if commit.id in refs else ""
        return names + first_line(commit.message)

    return [
        Column("COMMIT", lambda commit: commit.id, lambda commit: commit.short_id),
        Column("TIME", lambda commit: timestamp(commit.created_at), lambda commit: human_time(commit.created_at)),
        Column("AUTHOR", lambda commit: commit.author, shrink=True),
        Column("MESSAGE", lambda commit: commit.message, subject, shrink=True),
        Column("METADATA", lambda commit: json_text(commit.metadata), lambda commit: metadata_text(commit.metadata), shrink=True),
    ]


def _print_commit(output: Output, commit: Commit, refs: Sequence[str] = ()) -> None:
    output.line(f"commit {commit.id}" + (f" ({', '.join(refs)})" if refs else ""))
    for parent in commit.parents:
        output.line(f"Parent:   {parent}")
    output.line(f"Author:   {commit.author}")
    output.line(f"Date:     {human_time(commit.created_at)}")
    if commit.metadata:
        output.line(f"Metadata: {metadata_text(commit.metadata)}")
    if commit.message:
        output.line()
        output.lines(f"    {line}" for line in commit.message.split("\n"))


# -- show -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A named tensor of a version; `tied_to` is the name before it that has the same storage."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied_to: str | None


@click.command("show")
@click.argument("revision", metavar="[REV]", default="main")
@plot_option("Draw the changed share and the size of each layer: a .png, .svg or .pdf file.")
@global_options()
@click.pass_obj
def show_command(settings: Settings, revision: str, plot: Path | None) -> None:
    """Show the commit REV (main): its message, tensors and files.

    Into a pipe, each line begins with what it is, and then has, separated by tabs: `commit` id, `parent` id, `author`,
    `time`, `message`, `metadata` key and value, `tensor` name, dtype, shape and bytes, `file` name and bytes.
    """
    output = settings.output()
    with settings.open_store() as store:
        snapshot = store.checkout(revision)
        tensors = _tensors(snapshot)
        if plot is not None:
            from deltastore.cli.pictures import plot_commit

            plot_commit(store, snapshot, plot)
            print_notice(settings.json, "plot", f"wrote {plot}")
    commit, files = snapshot.commit, snapshot.files
    if output.as_json:
        rows = [
            {"name": each.name, "dtype": each.dtype, "shape": each.shape, "bytes": each.nbytes, "tied_to": each.tied_to}
            for each in tensors
        ]
        listed = [{"name": name, "bytes": size} for name, size in files.items()]
        output.document(commit_document(commit) | {"bytes": snapshot.nbytes, "tensors": rows, "files": listed})
    elif output.quiet:
        output.line(commit.id)
    elif output.terminal:
        _print_commit(output, commit)
        output.line()
        output.line(f"{counted(len(tensors), 'tensor')}, {human_bytes(snapshot.nbytes)}")
        output.table(_TENSOR_COLUMNS, tensors, indent="  ")
        if files:
            output.line()
            output.line(f"{counted(len(files), 'file')}, {human_bytes(sum(files.values()))}")
            output.table(_FILE_COLUMNS, files.items(), indent="  ")
    else:
        _print_fields(output, commit, tensors, files)


def _tensors(snapshot: Snapshot) -> list[_Tensor]:
    version = snapshot._version  # by position, because names may be ambiguous
    first: dict[int, str] = {}
    tensors = []
    for name, (_, number) in zip(version.names, version.leaves, strict=True):
        info = version.tensors[number]
        tensors.append(_Tensor(name, info.dtype.name, info.shape, info.nbytes, first.get(number)))
        first.setdefault(number, name)
    return tensors


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


_TENSOR_COLUMNS: list[Column[_Tensor]] = [
    Column("NAME", lambda each: each.name, shrink=True),
    Column("DTYPE", lambda each: each.dtype),
    Column("SHAPE", lambda each: _shape_text(each.shape)),
    Column(
        "SIZE",
        lambda each: str(each.nbytes),
        lambda each: human_bytes(each.nbytes) if each.tied_to is None else f"= {each.tied_to}",
        right=True,
        shrink=True,
    ),
]
_FILE_COLUMNS: list[Column[tuple[str, int]]] = [
    Column("NAME", lambda each: each[0], shrink=True),
    Column("SIZE", lambda each: str(each[1]), lambda each: human_bytes(each[1]), right=True),
]


def _print_fields(output: Output, commit: Commit, tensors: list[_Tensor], files: dict[str, int]) -> None:
    output.fields("commit", commit.id)
    for parent in commit.parents:
        output.fields("parent", parent)
    output.fields("author", commit.author)
    output.fields("time", timestamp(commit.created_at))
    output.fields("message", commit.message)
    for key, value in commit.metadata.items():
        output.fields("metadata", key, json_text(value))
    for each in tensors:
        output.fields("tensor", each.name, each.dtype, _shape_text(each.shape), str(each.nbytes))
    for name, size in files.items():
        output.fields("file", name, str(size))


# -- diff -------------------------------------------------------------------------------------------------------------


@click.command("diff")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--stat", is_flag=True, help="A line with a bar for each layer, and the totals.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="With --stat: a layer is the first N parts of a name.")
@click.option("--exit-code", is_flag=True, help=f"Exit with {DIFFERENCES} when there are differences.")
@global_options()
@click.pass_obj
def diff_command(settings: Settings, before: str, after: str, stat: bool, depth: int | None, exit_code: bool) -> int:
    """Show what changed from revision A to revision B, per tensor and file.

    Into a pipe: what happened, name, before, after, changed elements, all elements, bytes of changed chunks. With --stat:
    layer, changed elements, all elements, bytes of changed chunks, and how many of its tensors differ.
    """
    if depth is not None and not stat:
        raise click.UsageError("--depth belongs to --stat")
    output = settings.output()
    layers: list[LayerChange] = []
    with settings.open_store() as store:
        diff = store.diff(before, after)
        if stat:
            from deltastore.layers import layer_changes, named_elements

            layers = layer_changes(diff, named_elements(store.checkout(diff.after.id)._version), depth)
    if output.as_json:
        output.document(_diff_document(diff, layers if stat else None))
    elif output.quiet:
        output.lines((layer.name for layer in layers) if stat else (change.name for change in _changes(diff)))
    else:
        output.table(_layer_columns(layers, output), layers) if stat else output.table(_DIFF_COLUMNS, _changes(diff))
        if output.terminal or (stat and not layers):
            output.line(_diff_summary(diff))
    return DIFFERENCES if exit_code and diff else 0


@dataclass(frozen=True, slots=True)
class _Change:
    """A line of the listing; figures are None where there is nothing to count."""

    status: str
    name: str
    before: str = ""
    after: str = ""
    changed: int | None = None
    elements: int | None = None
    nbytes: int | None = None
    rows: tuple[int, int] | None = None  # changed, shared: of a reshaped tensor


def _changes(diff: Diff) -> list[_Change]:
    tensors = [
        _Change(
            each.status,
            each.name,
            _side_text(each.before),
            _side_text(each.after),
            each.changed_elements,
            each.elements,
            each.changed_bytes,
            None if each.shared_rows is None or each.changed_rows is None else (each.changed_rows, each.shared_rows),
        )
        for each in diff.tensors
    ]
    return tensors + [_Change(f"file {each.status}", each.name) for each in diff.files]


def _side_text(side: tuple[str, tuple[int, ...]] | None) -> str:
    return "" if side is None else f"{side[0]}{_shape_text(side[1])}"


def _changed_text(change: _Change) -> str:
    if change.rows is not None:
        return f"{change.rows[0]} of {counted(change.rows[1], 'shared row')}"
    if change.changed is None or change.elements is None:
        return ""
    return f"{change.changed} ({percent(change.changed, change.elements)})"


def _figure(value: int | None) -> str:
    return "" if value is None else str(value)


_DIFF_COLUMNS: list[Column[_Change]] = [
    Column("STATUS", lambda each: each.status),
    Column("NAME", lambda each: each.name, shrink=True),
    Column("BEFORE", lambda each: each.before),
    Column("AFTER", lambda each: each.after),
    Column("CHANGED", lambda each: _figure(each.changed), _changed_text, right=True),
    Column("ELEMENTS", lambda each: _figure(each.elements), right=True),
    Column(
        "IN CHUNKS OF",
        lambda each: _figure(each.nbytes),
        lambda each: "" if each.nbytes is None else human_bytes(each.nbytes),
        right=True,
    ),
]


def _totals(diff: Diff) -> dict[str, Any]:
    statuses = [each.status for each in diff.tensors]
    return {
        **{status: statuses.count(status) for status in ("added", "removed", "reshaped", "changed")},
        "files": len(diff.files),
        "changed_elements": diff.changed_elements,
        "elements": diff.elements,
        "changed_bytes": sum(each.changed_bytes for each in diff.tensors),
    }


def _diff_document(diff: Diff, layers: Sequence[LayerChange] | None) -> dict[str, Any]:
    document: dict[str, Any] = {"before": diff.before.id, "after": diff.after.id, "totals": _totals(diff)}
    if layers is not None:
        return document | {"layers": [{field: getattr(layer, field) for field in _LAYER_FIELDS} for layer in layers]}
    tensors = [
        {
            "name": each.name,
            "status": each.status,
            "before": _side_document(each.before),
            "after": _side_document(each.after),
            "elements": each.elements,
            "changed_elements": each.changed_elements,
            "changed_bytes": each.changed_bytes,
            "shared_rows": each.shared_rows,
            "changed_rows": each.changed_rows,
        }
        for each in diff.tensors
    ]
    return document | {"tensors": tensors, "files": [{"name": each.name, "status": each.status} for each in diff.files]}


_LAYER_FIELDS = ("name", "changed_elements", "elements", "changed_bytes", "tensors")


def _layer_columns(layers: Sequence[LayerChange], output: Output) -> list[Column[LayerChange]]:
    """The bars take what the other columns leave of the line; the longest is that of the largest share."""
    columns: list[Column[LayerChange]] = [
        Column("LAYER", lambda each: each.name, shrink=True),
        Column("CHANGED", lambda each: str(each.changed_elements), lambda each: f"{100 * each.share:.3g} %", right=True),
        Column("ELEMENTS", lambda each: str(each.elements), right=True),
        Column("IN CHUNKS OF", lambda each: str(each.changed_bytes), lambda each: human_bytes(each.changed_bytes), right=True),
    ]
    if not output.terminal:
        return [*columns, Column("TENSORS", lambda each: str(each.tensors))]
    largest = max((layer.share for layer in layers), default=0.0)
    width = max(MIN_BAR_WIDTH, min(MAX_BAR_WIDTH, terminal_width() - 42 - max((len(layer.name) for layer in layers), default=0)))
    return [*columns, Column("", lambda each: bar(each.share / largest if largest else 0.0, width))]


def _side_document(side: tuple[str, tuple[int, ...]] | None) -> dict[str, Any] | None:
    return None if side is None else {"dtype": side[0], "shape": side[1]}


def _diff_summary(diff: Diff) -> str:
    if not diff:
        return "no differences"
    totals = _totals(diff)
    parts = [f"{counted(totals['changed'], 'tensor')} changed"] if diff.tensors else []
    parts += [f"{totals[status]} {status}" for status in ("added", "removed", "reshaped") if totals[status]]
    if diff.files:
        parts.append(f"{counted(len(diff.files), 'file')} added, removed or changed")
    if not diff.tensors:
        return parts[0]
    changed, elements = totals["changed_elements"], totals["elements"]
    return (
        f"{', '.join(parts)}; {counted(changed, 'element')} of {elements} ({percent(changed, elements)}), "
        f"in chunks of {human_bytes(totals['changed_bytes'])}"
    )
