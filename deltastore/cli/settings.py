"""Options that every command knows, wherever they stand on the line, and what follows from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deltastore.cli.output import Output, print_notice
from deltastore.errors import InvalidInputError, StoreNotFoundError

if TYPE_CHECKING:
    from deltastore.store import DeltaStore

F = TypeVar("F", bound=Callable[..., Any])

BARS_DISABLED = "HF_HUB_DISABLE_PROGRESS_BARS"


@dataclass(slots=True)
class Settings:
    """The global options of one run. What stands later on the line wins."""

    store: str | None = None
    index: str | None = None
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    yes: bool = False
    dry_run: bool = False

    def output(self) -> Output:
        """Standard output in the form that was asked for."""
        return Output(as_json=self.json, quiet=self.quiet, verbose=self.verbose)

    def check_index(self) -> None:
        """Raises InvalidInputError for an index elsewhere than in the store."""
        index = self.index or os.environ.get("DELTASTORE_INDEX_URL", "")
        if index not in ("", "embedded"):
            raise InvalidInputError(
                f"index {index!r}: this version keeps the index inside the store only; leave out --index and unset "
                "DELTASTORE_INDEX_URL, or say --index embedded"
            )

    def address(self) -> str:
        """The store: --store, DELTASTORE_URL, or the current folder when it is one."""
        found = self.store or os.environ.get("DELTASTORE_URL")
        if found:
            return found
        if Path("store.json").is_file():
            return "."
        raise StoreNotFoundError(
            f"which store? {Path.cwd()} is none; give one with --store, set DELTASTORE_URL, or make one with `deltastore init`"
        )

    @contextmanager
    def open_store(self, *, write: bool = False) -> Iterator[DeltaStore]:
        """The store, open for the time of the context. A command runs once, so nothing is kept for a next commit."""
        self.check_index()
        from deltastore.store import DeltaStore

        with self.progress(), DeltaStore(self.address(), read_only=not write, baseline="none") as store:
            yield store

    @contextmanager
    def progress(self) -> Iterator[None]:
        """No progress bars with -q."""
        before = os.environ.get(BARS_DISABLED)
        if not self.quiet or before is not None:
            yield
            return
        os.environ[BARS_DISABLED] = "1"
        try:
            yield
        finally:
            del os.environ[BARS_DISABLED]

    def confirm(self, plan: str) -> None:
        """Show what is about to be destroyed, and ask.

        Raises:
            InvalidInputError: there is nobody to ask, and no --yes.
            click.Abort: the answer is no.
        """
        print_notice(self.json, "plan", plan)
        if self.yes:
            return
        if not sys.stdin.isatty():
            raise InvalidInputError("nobody is at a terminal to confirm this, so nothing was changed; repeat it with --yes")
        click.confirm("Go on?", abort=True, err=True)


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    settings = context.ensure_object(Settings)
    if value is not None and parameter.name is not None:
        setattr(settings, parameter.name, value)


def _option(*names: str, flag: bool, help: str, metavar: str | None = None) -> Callable[[F], F]:
    return click.option(*names, is_flag=flag, default=None, expose_value=False, callback=_remember, help=help, metavar=metavar)


_EVERYWHERE = (
    _option("-s", "--store", flag=False, metavar="ADDRESS", help="The store [DELTASTORE_URL; else this folder, if it is one]."),
    _option("--index", flag=False, metavar="ADDRESS", help="Its index [DELTASTORE_INDEX_URL; only 'embedded' so far]."),
    _option("--json", flag=True, help="Print one JSON value; errors too, on stderr."),
    _option("-q", "--quiet", flag=True, help="Print ids only, one per line, and no progress."),
    _option("-v", "--verbose", flag=True, help="Print more."),
)
_WRITING = (
    _option("--yes", flag=True, help="Don't ask."),
    _option("--dry-run", flag=True, help="Only say what would be done."),
)


def global_options(*, writes: bool = False) -> Callable[[F], F]:
    """Let a command take the global options; those about changes only when it `writes`."""

    def decorate(function: F) -> F:
        for option in reversed(_EVERYWHERE + _WRITING if writes else _EVERYWHERE):
            function = option(function)
        return function

    return decorate


def plot_option(help: str) -> Callable[[F], F]:
    """`--plot FILE`; a file that can't be a picture is refused before any work."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:  # noqa: ARG001
        if path is not None:
            from deltastore.plots import check_plot_path

            check_plot_path(path)
        return path

    return click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", callback=check, help=help)
