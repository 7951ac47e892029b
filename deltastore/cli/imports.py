"""`import` and `estimate`: folders full of checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from deltastore.cli.output import Column, Output, counted, human_bytes, print_error, print_notice
from deltastore.cli.settings import Settings, global_options
from deltastore.errors import InvalidInputError

if TYPE_CHECKING:
    from deltastore.estimate import CheckpointEstimate, Estimate
    from deltastore.importing import Deletion, Failure, ImportItem, ImportPlan, ImportReport

PARTIAL = 3


# -- import -----------------------------------------------------------------------------------------------------------


@click.command("import")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option("--to", "target", metavar="STORE", help="The store, made when it is not there; another way to say --store.")
@click.option("-b", "--branch", default="main", show_default=True, help="Moves to the new commits; made when it is new.")
@click.option("--author", help="By default user@host.")
@click.option("--delete", is_flag=True, help="Afterwards delete what was imported and read back; asks first.")
@global_options(writes=True)
@click.pass_obj
def import_command(
    settings: Settings, paths: tuple[Path, ...], target: str | None, branch: str, author: str | None, delete: bool
) -> int:
    """Commit checkpoint folders or weight files, in the order of their steps.

    The step is that of trainer_state.json, else the last number in the name; without any, the time of writing decides. The
    name becomes the message; step, loss, eval_loss, learning_rate and epoch become metadata. Every version is read back and
    compared with the disk. What is in the store already is skipped, so an import that was interrupted is simply repeated.

    Exits with 3 when only some could be imported, or deleted. Into a pipe: commit, step, bytes, "new" or "there", path.
    """
    settings.check_index()
    if target is not None and settings.store not in (None, target):
        raise click.UsageError(f"--to {target} and --store {settings.store}: give one of them")
    settings.store = target or settings.store
    address = settings.address()
    if delete and not (settings.yes or settings.dry_run or sys.stdin.isatty()):
        raise InvalidInputError("--delete asks before it deletes, and nobody is at a terminal; add --yes, or leave out --delete")
    from deltastore.history import check_ref_name
    from deltastore.importing import outside_of, plan_import, run_import
    from deltastore.store import DeltaStore

    check_ref_name(branch)
    plan = outside_of(plan_import(paths), address)
    if not plan.items:
        _fail(settings, plan.failures)
    if settings.dry_run:
        return _print_plan(settings, plan, address, branch, delete)
    created = _is_new(address)
    with settings.progress(), DeltaStore.create(address, exist_ok=True) as store:
        if created:
            print_notice(settings.json, "note", f"made a store at {address}")
        report = run_import(store, plan, branch=branch, author=author)
    if not report.imported:
        _fail(settings, report.failures)
    deletion = _delete(settings, report) if delete else None
    _print_report(settings, report, deletion, {"store": address, "branch": branch, "created": created})
    return PARTIAL if report.failures or (deletion is not None and deletion.kept) else 0


def _is_new(address: str) -> bool:
    from deltastore.buckets import open_bucket
    from deltastore.layout import STORE_KEY

    return open_bucket(address).stat([STORE_KEY])[STORE_KEY] is None


def _fail(settings: Settings, failures: tuple[Failure, ...]) -> NoReturn:
    """Name all failures, and end with the code of the first."""
    for failure in failures[1:]:
        print_notice(settings.json, "error", f"{failure.path}: {failure.error}")
    raise failures[0].error


def _failed(failure: Failure) -> dict[str, Any]:
    from deltastore.cli.main import exit_code

    code, kind = exit_code(failure.error), type(failure.error).__name__
    return {"path": str(failure.path), "error": kind, "code": code, "message": str(failure.error)}


def _print_failures(failures: tuple[Failure, ...], what: str = "imported") -> None:
    for failure in failures:
        print_error(f"error: {failure.path} was not {what}: {failure.error}")


def _delete(settings: Settings, report: ImportReport) -> Deletion:
    from deltastore.importing import Deletion, delete_originals

    kept = tuple((each.item.path, obstacle) for each in report.imported if (obstacle := each.item.original.obstacle) is not None)
    found = report.deletable
    if not found:
        return Deletion((), kept, 0)
    size = human_bytes(sum(each.item.original.nbytes for each in found))
    lines = [f"about to delete {counted(len(found), 'original')}, {size}, each read back from the store and equal to the disk:"]
    lines += [f"  {each.item.path}  {human_bytes(each.item.original.nbytes)}" for each in found]
    try:
        settings.confirm("\n".join(lines))
    except click.Abort:
        return Deletion((), kept + tuple((each.item.path, "not confirmed") for each in found), 0)
    return delete_originals(report)


def _print_report(settings: Settings, report: ImportReport, deletion: Deletion | None, facts: dict[str, Any]) -> None:
    output = settings.output()
    if output.as_json:
        imported = [
            _item(each.item) | {"commit": each.commit.id, "already": each.already, "obstacle": each.item.original.obstacle}
            for each in report.imported
        ]
        document = facts | {"dry_run": False, "imported": imported, "failed": [_failed(each) for each in report.failures]}
        if deletion is not None:
            kept = [{"path": str(path), "reason": reason} for path, reason in deletion.kept]
            deleted = [str(path) for path in deletion.deleted]
            document |= {"deleted": deleted, "kept": kept, "freed_bytes": deletion.freed_bytes}
        output.document(document)
        return
    for each in report.imported:
        if output.quiet:
            output.line(each.commit.id)
        elif output.terminal:
            what = "is there already" if each.already else human_bytes(each.item.nbytes)
            output.line(f"{each.commit.short_id} {each.item.name}  {what}")
        else:
            step = "" if each.item.step is None else str(each.item.step)
            state = "there" if each.already else "new"
            output.fields(each.commit.id, step, str(each.item.nbytes), state, str(each.item.path))
    _print_failures(report.failures)
    if output.quiet:
        return
    if deletion is None:
        found = report.deletable
        if found:
            size = human_bytes(sum(each.item.original.nbytes for each in found))
            print_error(f"nothing was deleted; to delete {counted(len(found), 'original')}, {size}, repeat this with --delete")
        return
    print_error(f"deleted {counted(len(deletion.deleted), 'original')}, {human_bytes(deletion.freed_bytes)}")
    for path, reason in deletion.kept:
        print_error(f"kept {path}: {reason}")


def _item(item: ImportItem) -> dict[str, Any]:
    size = {"bytes": item.nbytes, "bytes_on_disk": item.original.nbytes}
    return {"path": str(item.path), "message": item.name, "metadata": item.metadata, **size}


def _print_plan(settings: Settings, plan: ImportPlan, address: str, branch: str, delete: bool) -> int:
    output = settings.output()
    if output.as_json:
        items = [_item(item) | {"obstacle": item.original.obstacle} for item in plan.items]
        facts = {"store": address, "branch": branch, "created": _is_new(address), "dry_run": True, "delete": delete}
        output.document(facts | {"would_import": items, "failed": [_failed(each) for each in plan.failures]})
    else:
        output.table(_PLAN_COLUMNS, plan.items)
        _print_failures(plan.failures)
        if not output.quiet:
            made = "a new store at " if _is_new(address) else ""
            count = counted(len(plan.items), "checkpoint")
            print_error(f"would import {count}, {human_bytes(plan.nbytes)}, to {branch} of {made}{address}")
            for item in plan.items if delete else ():
                obstacle = item.original.obstacle
                verb = "would delete" if obstacle is None else "would keep"
                print_error(f"{verb} {item.path}" + ("" if obstacle is None else f": {obstacle}"))
    return PARTIAL if plan.failures else 0


_PLAN_COLUMNS: list[Column[ImportItem]] = [
    Column("STEP", lambda item: "" if item.step is None else str(item.step), right=True),
    Column("BYTES", lambda item: str(item.nbytes), lambda item: human_bytes(item.nbytes), right=True),
    Column("MESSAGE", lambda item: item.name, shrink=True),
    Column("PATH", lambda item: str(item.path), shrink=True),
]


# -- estimate ---------------------------------------------------------------------------------------------------------


@click.command("estimate")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option("--cast", metavar="DTYPE", help="Convert floating tensors first, as in --cast bfloat16 (needs torch).")
@click.option("--sample", type=click.IntRange(min=1), default=1, metavar="N", help="Look at one of N blocks of each tensor.")
@click.option(
    "--work",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where the throw-away store is made; it takes as much as the result [the system's temporary folder].",
)
@global_options()
@click.pass_obj
def estimate_command(settings: Settings, paths: tuple[Path, ...], cast: str | None, sample: int, work: Path | None) -> int:
    """Say what a store of checkpoint folders or weight files would take; writes to no store.

    They are committed, in the order of their steps, to a throw-away store that is deleted afterwards. Into a pipe: step, raw
    bytes, added bytes, path; then the totals.
    """
    from deltastore.estimate import run_estimate

    with settings.progress():
        estimate = run_estimate(paths, cast=cast, sample=sample, work=work)
    output = settings.output()
    if output.as_json:
        output.document(_estimate_document(estimate))
    else:
        _print_estimate(output, estimate)
        _print_failures(estimate.failures, "estimated")
    return PARTIAL if estimate.failures else 0


def _estimate_document(estimate: Estimate) -> dict[str, Any]:
    checkpoints = [
        {"path": str(each.path), "step": each.step, "raw_bytes": each.raw_bytes, "added_bytes": each.added_bytes}
        for each in estimate.checkpoints
    ]
    totals = {"raw_bytes": estimate.raw_bytes, "stored_bytes": estimate.stored_bytes, "index_bytes": estimate.index_bytes}
    failed = [_failed(each) for each in estimate.failures]
    return {
        "checkpoints": checkpoints,
        **totals,
        "ratio": estimate.ratio,
        "sampled_share": estimate.sampled_share,
        "failed": failed,
    }


def _print_estimate(output: Output, estimate: Estimate) -> None:
    if output.quiet:
        output.line(str(estimate.stored_bytes))
        return
    output.table(_ESTIMATE_COLUMNS, estimate.checkpoints)
    if not output.terminal:
        output.fields("total", str(estimate.raw_bytes), str(estimate.stored_bytes), f"{estimate.sampled_share:.6g}")
        return
    raw, stored = human_bytes(estimate.raw_bytes), human_bytes(estimate.stored_bytes)
    output.line(
        f"{raw} would take about {stored}, {estimate.ratio:.1f} times less; {human_bytes(estimate.index_bytes)} are the index"
    )
    if estimate.sampled_share < 1:
        output.line(f"estimated from {100 * estimate.sampled_share:.1f} % of the tensors' bytes")


_ESTIMATE_COLUMNS: list[Column[CheckpointEstimate]] = [
    Column("STEP", lambda each: "" if each.step is None else str(each.step), right=True),
    Column("RAW", lambda each: str(each.raw_bytes), lambda each: human_bytes(each.raw_bytes), right=True),
    Column("ADDED", lambda each: str(each.added_bytes), lambda each: human_bytes(each.added_bytes), right=True),
    Column("PATH", lambda each: str(each.path), shrink=True),
]
