"""`commit` and `checkout`: checkpoints on disk into the store and out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltastore.cli.history import commit_document
from deltastore.cli.output import counted, first_line, human_bytes
from deltastore.cli.quantities import parse_size
from deltastore.cli.settings import Settings, global_options
from deltastore.errors import AlreadyExistsError, RefConflictError

if TYPE_CHECKING:
    from deltastore.store import DeltaStore


def _parse_metadata(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not key or not separator:
            raise click.BadParameter(f"{pair!r} is not key=value", context, parameter)
        if key in metadata:
            raise click.BadParameter(f"{key!r} is given twice", context, parameter)
        metadata[key] = parse_value(text)
    return metadata


def parse_value(text: str) -> bool | int | float | str:
    """A metadata value: what JSON reads as a boolean, a number or a string in quotes is one, all else is text as it stands."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float, str)) else text


# -- commit -----------------------------------------------------------------------------------------------------------


@click.command("commit")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("-b", "--branch", default="main", show_default=True, help="Moves to the new commit; made when it is new.")
@click.option("-m", "--message", default="", help="What this version is.")
@click.option(
    "--meta",
    "metadata",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_parse_metadata,
    help="To find the commit by, as in --meta step=100. Numbers, true and false are understood; may be repeated.",
)
@click.option("--tag", metavar="NAME", help="A tag to make at the new commit.")
@click.option("--author", help="By default user@host.")
@click.option("--expect-head", metavar="ID", help="Refuse when the branch is not at this commit.")
@click.option("--base", metavar="REV", help="What this version is an adapter of; its id is kept in the metadata.")
@global_options(writes=True)
@click.pass_obj
def commit_command(
    settings: Settings,
    path: Path,
    branch: str,
    message: str,
    metadata: dict[str, Any],
    tag: str | None,
    author: str | None,
    expect_head: str | None,
    base: str | None,
) -> None:
    """Commit PATH: a .safetensors file, or a folder with one or with shards and their index.

    Without safetensors, .pt, .pth and .bin files of torch.save do as well, if they hold nothing but data. All other files of a
    folder are kept with it. Only what changed against the head of the branch is stored.
    """
    with settings.open_store(write=not settings.dry_run) as store:
        _check_names(store, branch, tag)
        head = None if expect_head is None else store.get_commit(expect_head).id
        base_id = None if base is None else store.get_commit(base).id
        if settings.dry_run:
            _print_commit_plan(settings, store, path, branch, tag, head)
            return
        commit = store.commit(
            path, message, branch=branch, metadata=metadata, tag=tag, author=author, expected_head=head, base=base_id
        )
    output = settings.output()
    if output.as_json:
        output.document(commit_document(commit) | {"branch": branch, "tag": tag})
    elif output.quiet:
        output.line(commit.id)
    else:
        output.line(f"{branch} {commit.short_id} {first_line(commit.message)}".rstrip())


def _check_names(store: DeltaStore, branch: str, tag: str | None) -> None:
    """Raise before anything is written when a name can't be used."""
    from deltastore.history import check_ref_name

    refs = {ref.name: ref for ref in store.list_refs()}
    check_ref_name(branch)
    if branch in refs and refs[branch].kind != "branch":
        raise AlreadyExistsError(f"{branch!r} is a tag, and tags never move; choose a branch with -b")
    if tag is not None:
        check_ref_name(tag)
        if tag in refs or tag == branch:
            kind = refs[tag].kind if tag in refs else "branch"
            raise AlreadyExistsError(f"{tag!r} is a {kind} already; delete it first or choose another tag")


def _print_commit_plan(
    settings: Settings, store: DeltaStore, path: Path, branch: str, tag: str | None, expected: str | None
) -> None:
    from deltastore.files import open_checkpoint
    from deltastore.sources import checkpoint_state

    head = next((ref.commit_id for ref in store.list_refs() if ref.name == branch), None)
    if expected is not None and expected != head:
        raise RefConflictError(branch, expected, head)
    checkpoint = open_checkpoint(path)
    state = checkpoint_state(checkpoint)
    count, size = len(state.leaves), sum(source.nbytes for source in state.tensors)
    output = settings.output()
    if output.as_json:
        files = [{"name": name, "bytes": file.stat().st_size} for name, file in checkpoint.files.items()]
        plan = {"dry_run": True, "branch": branch, "parent": head, "tag": tag}
        output.document(plan | {"tensors": count, "bytes": size, "files": files})
    elif not output.quiet:
        onto = f"onto {head[:12]}" if head else "as its first commit"
        output.line(f"would commit {counted(count, 'tensor')}, {human_bytes(size)}, to {branch} {onto}")
        output.lines(f"  with {name}" for name in checkpoint.files)


# -- checkout ---------------------------------------------------------------------------------------------------------


@click.command("checkout")
@click.argument("revision", metavar="REV")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace weight files and files of the same names; others are left.")
@click.option(
    "--max-shard-size", callback=parse_size, default="5GB", show_default=True, metavar="SIZE", help="Largest weight file."
)
@global_options(writes=True)
@click.pass_obj
def checkout_command(settings: Settings, revision: str, destination: Path, overwrite: bool, max_shard_size: int) -> None:
    """Write the version REV to the folder DEST: safetensors files, and the files committed with them."""
    output = settings.output()
    with settings.open_store() as store:
        snapshot = store.checkout(revision)
        paths: list[Path] = []
        if not settings.dry_run:
            paths = snapshot.save(destination, max_shard_bytes=max_shard_size, overwrite=overwrite)
    commit = snapshot.commit
    if output.as_json:
        document = {"commit": commit.id, "destination": str(destination), "tensors": len(snapshot), "bytes": snapshot.nbytes}
        output.document(document | {"files": [str(path) for path in paths], "dry_run": settings.dry_run})
    elif output.quiet:
        output.line(commit.id)
    else:
        content = (
            f"{counted(len(snapshot), 'tensor')}, {human_bytes(snapshot.nbytes)}, and {counted(len(snapshot.files), 'file')}"
        )
        what = "would check out" if settings.dry_run else "checked out"
        output.line(f"{what} {commit.short_id} to {destination}: {content}")
