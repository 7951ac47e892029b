"""The command `deltastore`: finds the command's module when it is needed, and turns errors into messages and exit codes.

Exit codes: 0 ok · 1 failure · 2 usage · 3 partial · 10 not found · 11 ref moved or locked · 12 auth · 13 integrity ·
14 disk or quota · 15 network · 16 incompatible · 20 differences (`diff --exit-code`) · 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import click

from deltastore.cli.output import flush, print_error, print_error_document, print_notice
from deltastore.cli.settings import Settings, global_options
from deltastore.errors import DeltaStoreError, StorageError

FAILURE, USAGE, NOT_FOUND, LOCKED, DENIED, FULL, NETWORK, INTERRUPTED = 1, 2, 10, 11, 12, 14, 15, 130

# Where the commands are, in the order of `--help`. A module is imported when its command is used.
COMMANDS = {
    "init": "stores",
    "commit": "checkpoints",
    "checkout": "checkpoints",
    "import": "imports",
    "estimate": "imports",
    "log": "history",
    "show": "history",
    "diff": "history",
    "branch": "refs",
    "tag": "refs",
    "verify": "stores",
    "stats": "stores",
    "du": "stores",
    "cache": "cache",
    "index": "index",
    "doctor": "doctor",
}


class LazyGroup(click.Group):
    """A group whose commands are imported on demand, and whose `main` reports every expected error in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of this name; its module is imported now."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"deltastore.cli.{COMMANDS[cmd_name]}"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and exit with the code of the outcome."""
        arguments = list(sys.argv[1:] if args is None else args)
        if not standalone_mode:
            return super().main(arguments, prog_name, complete_var, False, **extra)
        as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
        with _warnings_on_stderr(as_json):
            sys.exit(self._run(arguments, as_json, complete_var, extra))

    def _run(self, arguments: list[str], as_json: bool, complete_var: str | None, extra: dict[str, Any]) -> int:
        try:
            code = super().main(arguments, "deltastore", complete_var, False, **extra)
            flush()
        except (click.exceptions.Abort, KeyboardInterrupt) as error:
            interrupted = isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)
            if interrupted:
                return _report(as_json, INTERRUPTED, "KeyboardInterrupt", "interrupted")
            return _report(as_json, FAILURE, "Abort", "not confirmed; nothing was changed")
        except click.ClickException as error:
            return _report(as_json, error.exit_code, type(error).__name__, _usage_message(error))
        except (DeltaStoreError, OSError) as error:
            with contextlib.suppress(OSError):
                flush()
            return _report(as_json, exit_code(error), type(error).__name__, str(error))
        except Exception as error:
            if not as_json:
                raise
            return _report(as_json, FAILURE, type(error).__name__, str(error))
        return code if isinstance(code, int) else 0


def exit_code(error: DeltaStoreError | OSError) -> int:
    """The exit code for an error."""
    if isinstance(error, StorageError):
        return {"locked": LOCKED, "denied": DENIED}.get(error.kind, error.exit_code)
    if isinstance(error, DeltaStoreError):
        return error.exit_code
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FULL
    if isinstance(error, FileNotFoundError):
        return NOT_FOUND
    return NETWORK if isinstance(error, (ConnectionError, TimeoutError)) else FAILURE


def _report(as_json: bool, code: int, kind: str, message: str) -> int:
    if as_json:
        print_error_document({"type": "error", "code": code, "error": kind, "message": message})
    else:
        print_error(f"error: {message}")
    return code


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    return message if context is None else f"{message.rstrip('.')}; see `{context.command_path} --help`"


@contextlib.contextmanager
def _warnings_on_stderr(as_json: bool) -> Iterator[None]:
    """Our own warnings as one line each; what `python -W` says goes before."""
    with warnings.catch_warnings():

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            print_notice(as_json, "warning", str(message))

        warnings.showwarning = show
        if not sys.warnoptions:
            warnings.filterwarnings("always", category=UserWarning, module=r"deltastore\b")
        yield


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@global_options(writes=True)
@click.option("--version", is_flag=True, help="Print the versions of deltastore, its kernel and Python.")
@click.pass_context
def cli(context: click.Context, version: bool) -> None:
    """git for model weights: stores only what changed, bit for bit."""
    if version:
        _print_version(context.ensure_object(Settings))
        context.exit()
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(USAGE)


def _print_version(settings: Settings) -> None:
    from deltastore import __version__
    from deltastore.codecs.kernel import NAME

    python = ".".join(map(str, sys.version_info[:3]))
    output = settings.output()
    if settings.json:
        output.document({"version": __version__, "kernel": NAME, "python": python})
    else:
        output.line(f"deltastore {__version__} (kernel {NAME}, Python {python})")


def main() -> NoReturn:
    """Run the command line of this process."""
    cli()
    raise AssertionError("unreachable")
