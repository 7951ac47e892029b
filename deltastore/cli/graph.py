"""The history as a drawing in ASCII: one lane for each line of commits, newest at the top.

A lane waits for the commit that comes next on it. A commit takes the leftmost lane that waits for it, hands it on to its first
parent and opens one to its right for each other parent; lanes that wait for the same commit run together.

    *      a merge
    |\\
    | *
    * |
    |/
    *
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Row = tuple[str, bool]  # a line of the drawing, and whether the next commit stands on it


def draw(commits: Iterable[tuple[str, Sequence[str]]]) -> Iterator[Row]:
    """The lines for commits given as (id, ids of its parents), children before their parents."""
    lanes: list[str] = []
    ended = -1  # the lane that the commit before was the last of
    for commit_id, parents in commits:
        if commit_id not in lanes:
            if len(lanes) == ended:  # a gap, because the two have nothing to do with each other
                yield _row(len(lanes), {}), False
            lanes.append(commit_id)
        ended = -1
        at = lanes.index(commit_id)
        yield _row(len(lanes), {2 * at: "*"}), True
        if not parents:
            yield from _close(lanes, at)
            ended = at
            continue
        lanes[at] = parents[0]
        for parent in reversed(parents[1:]):
            lanes.insert(at + 1, parent)
            moved = {2 * lane + 1: "\\" for lane in range(at, len(lanes) - 1)}
            yield _row(at + 1, moved), False
        yield from _join(lanes)


def _join(lanes: list[str]) -> Iterator[Row]:
    """Let lanes that wait for the same commit run together, to the left."""
    at = 1
    while at < len(lanes):
        left = lanes.index(lanes[at])
        if left == at:
            at += 1
            continue
        way = {2 * lane + 1: "_" for lane in range(left, at - 1)}
        shifted = {2 * lane - 1: "/" for lane in range(at, len(lanes))}
        del lanes[at]
        yield _row(at, way | shifted), False


def _close(lanes: list[str], at: int) -> Iterator[Row]:
    """End a lane; those to its right move up."""
    del lanes[at]
    if at < len(lanes):
        yield _row(at, {2 * lane + 1: "/" for lane in range(at, len(lanes))}), False


def _row(bars: int, signs: dict[int, str]) -> str:
    """A line with bars in the first lanes, and other signs at some places."""
    places = dict.fromkeys(range(0, 2 * bars, 2), "|") | signs
    return "".join(places.get(at, " ") for at in range(max(places) + 1)) if places else ""
