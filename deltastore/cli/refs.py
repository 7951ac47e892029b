"""`branch` and `tag`: the names of commits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from deltastore.cli.output import Column, first_line
from deltastore.cli.settings import Settings, global_options
from deltastore.errors import AlreadyExistsError, RefConflictError, RevisionNotFoundError

if TYPE_CHECKING:
    from deltastore.history import Commit
    from deltastore.store import Ref

Kind = Literal["branch", "tag"]


def _list(settings: Settings, kind: Kind) -> None:
    output = settings.output()
    with settings.open_store() as store:
        refs = [ref for ref in store.list_refs() if ref.kind == kind]
        subjects = {}
        if output.terminal and not output.as_json and not output.quiet:
            subjects = {ref.name: first_line(store.get_commit(ref.commit_id).message) for ref in refs}
    if output.as_json:
        output.document([{"name": ref.name, "kind": ref.kind, "commit": ref.commit_id} for ref in refs])
    elif output.quiet:
        output.lines(ref.name for ref in refs)
    else:
        columns: list[Column[Ref]] = [
            Column("NAME", lambda ref: ref.name),
            Column("COMMIT", lambda ref: ref.commit_id, lambda ref: ref.commit_id if output.verbose else ref.commit_id[:12]),
        ]
        if subjects:
            columns.append(Column("MESSAGE", lambda ref: subjects[ref.name], shrink=True))
        output.table(columns, refs)


def _create(settings: Settings, kind: Kind, name: str, revision: str) -> None:
    from deltastore.history import check_ref_name

    with settings.open_store(write=not settings.dry_run) as store:
        commit = store.get_commit(revision)
        if settings.dry_run:
            check_ref_name(name)
            _refuse_existing(store.list_refs(), name)
        else:
            (store.create_branch if kind == "branch" else store.create_tag)(name, revision=commit.id)
    _print_movement(settings, "create", kind, name, None, commit.id)


def _delete(settings: Settings, kind: Kind, name: str) -> None:
    with settings.open_store(write=not settings.dry_run) as store:
        commit = store.get_commit(_existing(store.list_refs(), kind, name).commit_id)
        if not settings.dry_run:
            settings.confirm(
                f"delete {kind} {name}, now at {_described(commit)}\n"
                f"the commit stays; to undo: deltastore {kind} create {name} {commit.short_id}"
            )
            (store.delete_branch if kind == "branch" else store.delete_tag)(name)
    _print_movement(settings, "delete", kind, name, commit.id, None)


def _existing(refs: list[Ref], kind: Kind, name: str) -> Ref:
    """The ref of this name and kind; raises RevisionNotFoundError."""
    for ref in refs:
        if ref.name == name and ref.kind == kind:
            return ref
        if ref.name == name:
            raise RevisionNotFoundError(f"no {kind} {name!r}: it is a {ref.kind}; see `deltastore {ref.kind}`")
    raise RevisionNotFoundError(f"no {kind} {name!r}; see `deltastore {kind}`")


def _refuse_existing(refs: list[Ref], name: str) -> None:
    for ref in refs:
        if ref.name == name:
            raise AlreadyExistsError(f"{ref.kind} {name!r} exists already, at {ref.commit_id[:12]}; choose another name")


def _described(commit: Commit) -> str:
    return f"{commit.short_id} {first_line(commit.message)}".rstrip()


def _print_movement(settings: Settings, action: str, kind: Kind, name: str, was: str | None, commit: str | None) -> None:
    """What was done to a ref, or would be."""
    output = settings.output()
    if output.as_json:
        movement = {"action": action, "dry_run": settings.dry_run, "kind": kind, "name": name, "was": was, "commit": commit}
        output.document(movement)
    elif output.quiet:
        output.line(commit or was or "")
    else:
        places = [f"from {was[:12]}"] if was else []
        places += [f"{'to' if was else 'at'} {commit[:12]}"] if commit else []
        output.line(f"{'would ' if settings.dry_run else ''}{action} {kind} {name} {' '.join(places)}")


# -- branch -----------------------------------------------------------------------------------------------------------


@click.group("branch", invoke_without_command=True)
@global_options(writes=True)
@click.pass_context
def branch_command(context: click.Context) -> None:
    """List, create, delete and reset branches."""
    if context.invoked_subcommand is None:
        _list(context.ensure_object(Settings), "branch")


@branch_command.command("list")
@global_options()
@click.pass_obj
def branch_list(settings: Settings) -> None:
    """List all branches."""
    _list(settings, "branch")


@branch_command.command("create")
@click.argument("name")
@click.argument("revision", metavar="[REV]", default="main")
@global_options(writes=True)
@click.pass_obj
def branch_create(settings: Settings, name: str, revision: str) -> None:
    """Make the branch NAME at REV (main)."""
    _create(settings, "branch", name, revision)


@branch_command.command("delete")
@click.argument("name")
@global_options(writes=True)
@click.pass_obj
def branch_delete(settings: Settings, name: str) -> None:
    """Delete the branch NAME; its commits stay reachable by id."""
    _delete(settings, "branch", name)


@branch_command.command("reset")
@click.argument("name")
@click.argument("revision", metavar="REV")
@click.option("--expect", metavar="REV", help="Refuse when the branch is not here now.")
@global_options(writes=True)
@click.pass_obj
def branch_reset(settings: Settings, name: str, revision: str, expect: str | None) -> None:
    """Move the branch NAME to REV."""
    with settings.open_store(write=not settings.dry_run) as store:
        before = store.get_commit(_existing(store.list_refs(), "branch", name).commit_id)
        after = store.get_commit(revision)
        if expect is not None and (expected := store.get_commit(expect).id) != before.id:
            raise RefConflictError(name, expected, before.id)
        if not settings.dry_run:
            settings.confirm(
                f"reset branch {name}\n  from {_described(before)}\n    to {_described(after)}\n"
                f"to undo: deltastore branch reset {name} {before.short_id}"
            )
            store.reset_branch(name, revision=after.id, expected=before.id)
    _print_movement(settings, "reset", "branch", name, before.id, after.id)


# -- tag --------------------------------------------------------------------------------------------------------------


@click.group("tag", invoke_without_command=True)
@global_options(writes=True)
@click.pass_context
def tag_command(context: click.Context) -> None:
    """List, create and delete tags."""
    if context.invoked_subcommand is None:
        _list(context.ensure_object(Settings), "tag")


@tag_command.command("list")
@global_options()
@click.pass_obj
def tag_list(settings: Settings) -> None:
    """List all tags."""
    _list(settings, "tag")


@tag_command.command("create")
@click.argument("name")
@click.argument("revision", metavar="[REV]", default="main")
@global_options(writes=True)
@click.pass_obj
def tag_create(settings: Settings, name: str, revision: str) -> None:
    """Make the tag NAME at REV (main); a tag never moves."""
    _create(settings, "tag", name, revision)


@tag_command.command("delete")
@click.argument("name")
@global_options(writes=True)
@click.pass_obj
def tag_delete(settings: Settings, name: str) -> None:
    """Delete the tag NAME; its commit stays reachable by id."""
    _delete(settings, "tag", name)
