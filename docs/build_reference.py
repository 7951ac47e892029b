"""Writes docs/reference/ from docstrings (the Python API) and from click (the command line). `make docs` runs it.

    python docs/build_reference.py [--check]

The pages are plain Markdown in the repository: they can be read wherever the sources can, without a site to host, and reviews
show what changes in them. Generators such as sphinx, pdoc and mkdocs make sites, whose output is no text to review; what they
would parse for us is a signature, a docstring of our own style and a help text. A test runs --check.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import deltastore
from deltastore import errors
from deltastore.cli.main import cli

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Made by docs/build_reference.py (`make docs`): change the docstrings or the help texts instead. -->\n\n"
WIDTH = 100
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
SPECIAL = ("__getitem__", "__iter__", "__len__", "__contains__", "__enter__", "__bool__")


def main() -> int:
    """Write the pages, or with --check name those that are not up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write docs/reference/ from docstrings and help texts.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when something is out of date")
    check = parser.parse_args().check
    stale = []
    for path, text in pages().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(FOLDER.parents[1])} {'is out of date; run `make docs`' if check else 'written'}")
    return 1 if check and stale else 0


def pages() -> dict[Path, str]:
    """Path and text of each page."""
    return {FOLDER / "python.md": python_page(), FOLDER / "command-line.md": command_line_page()}


# -- Python -----------------------------------------------------------------------------------------------------------


def python_page() -> str:
    """Every name that `deltastore` exports, then the errors."""
    names = sorted(
        (name for name in deltastore.__all__ if not name.startswith("__")), key=lambda name: (name != "DeltaStore", name)
    )
    parts = ["# Python reference\n\nAll of this is imported from `deltastore`; the errors also from `deltastore.errors`.\n"]
    for name in names:
        value = getattr(deltastore, name)
        if not (inspect.isclass(value) and issubclass(value, errors.DeltaStoreError)):
            parts.append("\n".join(class_section(value) if inspect.isclass(value) else function_section(name, value, "##")))
    parts.append("\n".join(error_section()))
    return NOTE + "\n".join(parts)


def class_section(cls: type) -> list[str]:
    """A class: how it is made, its fields, properties and methods."""
    lines = [f"## `{cls.__name__}`", ""]
    if cls is deltastore.DeltaStore:  # of all others, deltastore makes the objects
        lines += code(signature(cls.__init__, cls.__name__))
    lines += docstring(cls)
    if dataclasses.is_dataclass(cls):
        lines += ["Fields:", ""]
        lines += [f"- `{each.name}: {each.type}`" for each in dataclasses.fields(cls) if not each.name.startswith("_")]
        lines.append("")
    for name, member in members(cls):
        if isinstance(member, property):
            assert member.fget is not None
            lines += [f"### `{cls.__name__}.{name}`", "", *docstring(member.fget)]
        else:
            lines += function_section(f"{cls.__name__}.{name}", member, "###")
    return lines


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public properties and methods with a docstring, in the order of the source."""
    for name, value in vars(cls).items():
        if name.startswith("_") and name not in SPECIAL:
            continue
        member = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(member, property) or (inspect.isfunction(member) and inspect.getdoc(member) and member.__doc__):
            yield name, member


def function_section(title: str, function: Callable[..., Any], heading: str) -> list[str]:
    """A heading, the signature and the docstring."""
    return [f"{heading} `{title}`", "", *code(signature(function, title)), *docstring(function)]


def signature(function: Callable[..., Any], title: str) -> str:
    """The call as it is written in the source, without `self`; on one line if it fits."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    arguments = tree.args
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [parameter(each, default) for each, default in zip(positional, defaults, strict=True)]
    if positional and positional[0].arg in ("self", "cls"):
        parts = parts[1:]
    if arguments.vararg:
        parts.append("*" + parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [parameter(each, default) for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        parts.append("**" + parameter(arguments.kwarg, None))
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns is not None and tree.name != "__init__" else ""
    line = f"{title}({', '.join(parts)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{title}(", *(f"    {part}," if part != "*" else "    *," for part in parts), f"){returns}"])


def parameter(argument: ast.arg, default: ast.expr | None) -> str:
    """`name: type = default`."""
    annotation = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    if default is None:
        return argument.arg + annotation
    return f"{argument.arg}{annotation}{' = ' if annotation else '='}{ast.unparse(default)}"


def code(text: str) -> list[str]:
    """A block of Python that is shown, not run."""
    return ["```python fragment", text, "```", ""]


def docstring(thing: Any) -> list[str]:
    """A docstring as Markdown: sections become a heading in bold and a list."""
    text = inspect.getdoc(thing) or ""
    lines: list[str] = []
    section = False
    item = 0  # the indentation of a section's items
    for line in text.splitlines():
        if SECTION.fullmatch(line):
            lines += [f"**{line[:-1]}**", ""]
            section, item = line not in ("Returns:", "Yields:"), 0
        elif line.startswith("    ") and section:
            body = line.strip()
            indent = len(line) - len(line.lstrip())
            item = item or indent
            name, colon, rest = body.partition(": ")
            lines.append(f"- `{name}`: {rest}" if colon and indent == item else f"  {body}" if indent > item else f"- {body}")
        elif line.startswith("    ") and not line.startswith("     ") and lines and lines[-1] == "":
            lines.append(line.strip())
        else:
            section = section and not line.strip()
            lines.append(line.strip() if line.strip() else "")
    return [*lines, ""]


def error_section() -> list[str]:
    """The tree of errors and each of them."""
    tree = inspect.getdoc(errors) or ""
    lines = ["## Errors", "", *tree.split("\n", 1)[0:1], "", "```text", *diagram(tree), "```", ""]
    lines += [paragraph for paragraph in tree.split("\n\n")[2:] if paragraph]
    lines += ["", "| error | exit code | meaning |", "| --- | ---: | --- |"]
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.DeltaStoreError):
            meaning = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            lines.append(f"| `{name}` | {value.exit_code} | {meaning} |")
    return [*lines, ""]


def diagram(text: str) -> list[str]:
    """The indented part of a docstring."""
    return textwrap.dedent("\n".join(line for line in text.splitlines() if line.startswith("    "))).splitlines()


# -- command line -----------------------------------------------------------------------------------------------------


def command_line_page() -> str:
    """What `--help` says, of every command and subcommand."""
    codes = (inspect.getdoc(sys.modules["deltastore.cli.main"]) or "").split("\n\n", 1)[1]
    parts = [f"# Command line reference\n\n{codes}\n"]
    parts += [f"## `{name}`\n\n```text\n{text}\n```\n" for name, text in help_texts(cli, "deltastore")]
    return NOTE + "\n".join(parts)


def help_texts(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Name and help of a command and all below it."""
    widths = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings | widths)
    yield context.command_path, command.get_help(context).rstrip()
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            child = command.get_command(context, each)
            assert child is not None
            yield from help_texts(child, each, context)


if __name__ == "__main__":
    sys.exit(main())
