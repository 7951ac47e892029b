"""Sizes and times as people write them: "5GB", "500MiB", "7d"."""

from __future__ import annotations

import re

import click

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>I?)B?", re.IGNORECASE)
_TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Bytes from "5GB" (decimal), "5GiB" (binary) or a plain number; at least one."""
    size = size_of(text)
    if size is None:
        raise click.BadParameter(f"{text!r} is not a size; write 5GB, 500MiB or a number of bytes", context, parameter)
    if size < 1:
        raise click.BadParameter(f"{text!r} is less than a byte", context, parameter)
    return size


def size_of(text: str) -> int | None:
    """Bytes; None when the text is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["binary"] and not match["unit"]):
        return None
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * base ** " KMGT".index(match["unit"].upper() or " "))


def parse_age(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """Seconds from "30s", "15m", "24h", "7d" or "2w"."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time; write 30s, 15m, 24h, 7d or 2w", context, parameter)
    return float(match["number"]) * _SECONDS[match["unit"]]
