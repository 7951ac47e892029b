"""The fold rule against an independent simulation."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from deltastore.ladder import FULL_SPAN, STEP_SPAN, Depth, DepthBook, folds, level_of_span

SPANS = [8**level for level in range(5)]


class Counted:
    """The rule as design and module docstring word it, on counts per span alone."""

    def __init__(self) -> None:
        self.counts = [0] * 6

    def step(self, height: int, kind: str) -> list[int]:
        """The spans that a commit at this height folds."""
        if kind == "full":
            self.counts = [0] * 6
            return []
        self.counts[0] += kind == "changed"
        made = []
        level = 1
        while (height > 0 and height % 8**level == 0) or self.counts[level - 1] > 7:
            if any(self.counts[:level]):
                self.counts[:level] = [0] * level
                self.counts[level] += 1
                made.append(8**level)
            level += 1
        return made


class Chain:
    """A chunk as the encoder keeps it: a chain of (span, amount) on a full value; amounts stand for summed steps."""

    def __init__(self, value: int) -> None:
        self.entries = [(FULL_SPAN, value)]

    def value(self) -> int:
        return sum(amount for _, amount in self.entries)

    def spans(self) -> list[int]:
        return [span for span, _ in self.entries]

    def step(self, height: int, kind: str, value: int) -> list[int]:
        if kind == "full":
            self.entries = [(FULL_SPAN, value)]
            return []
        if kind == "changed":
            self.entries.insert(0, (STEP_SPAN, value - self.value()))
        due = list(folds(self.spans(), height))
        original = list(self.entries)
        for fold in due:
            summed = sum(amount for _, amount in original[: fold.entries])
            self.entries = [(fold.span, summed), *original[fold.entries :]]
        return [fold.span for fold in due]


kinds = st.sampled_from(["changed"] * 6 + ["unchanged"] * 3 + ["full"])


@settings(max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    steps=st.one_of(
        st.lists(kinds, min_size=1, max_size=600),
        st.integers(1, 600).map(lambda count: ["changed"] * count),
        st.lists(st.sampled_from(["changed", "unchanged"]), min_size=520, max_size=600),
    ),
    jumps=st.sets(st.integers(1, 600), max_size=8),
)
@example(steps=["changed"] * 600, jumps=set())
@example(steps=["changed"] * 600, jumps={1, 9, 17, 63, 64, 511})
def test_chains_stay_short_ordered_and_exact(steps: list[str], jumps: set[int]) -> None:
    """A rebased commit lands at another height than it was encoded for: `jumps` are such places."""
    chain, counted, height = Chain(0), Counted(), 0
    book = DepthBook()
    for number, kind in enumerate(steps, start=1):
        height += 1 + (5 if number in jumps else 0)
        depth = depth_of(book, chain.spans())
        due = chain.step(height, kind, value=number * 7 + 1 if kind != "unchanged" else chain.value())
        assert due == counted.step(height, kind), f"height {height}"
        if kind != "full":
            assert depth.fold_due(height, changed=kind == "changed") == bool(due), f"height {height}"
        if kind != "unchanged":
            assert chain.value() == number * 7 + 1
        spans = chain.spans()
        assert spans[-1] == FULL_SPAN
        assert FULL_SPAN not in spans[:-1]
        assert spans[:-1] == sorted(spans[:-1])  # narrow ones on top, every span one run
        assert all(span in SPANS for span in spans[:-1])
        assert max(Counter(spans[:-1]).values(), default=0) <= 7, f"height {height}: {spans}"


def depth_of(book: DepthBook, spans: list[int]) -> Depth:
    depth = book.full("p0", 100)
    for number, span in enumerate(reversed(spans[:-1])):
        depth = book.on(depth, span, f"p{number + 1}")
    return depth


def test_folds_at_heights_of_the_ladder() -> None:
    chain = Chain(0)
    made = {height: chain.step(height, "changed", height) for height in range(1, 521)}
    assert {height: spans for height, spans in made.items() if spans} == {
        height: [span for span in (8, 64, 512) if height % span == 0] for height in range(8, 521, 8)
    }
    assert chain.spans() == [8, 512, 0]  # 520 = 512 + 8


@pytest.mark.parametrize("height", [1, 7, 9, 4095, 0])
def test_nothing_is_due_between_the_rungs(height: int) -> None:
    assert list(folds([1, 1, 8, 0], height)) == []
    assert list(folds([0], height)) == []


def test_a_fold_never_reaches_past_a_full_or_a_wider_entry() -> None:
    assert [(fold.span, fold.entries) for fold in folds([1, 1, 0], 64)] == [(8, 2), (64, 2)]
    assert [(fold.span, fold.entries) for fold in folds([1, 8, 8, 64, 0], 64)] == [(8, 1), (64, 3)]
    assert list(folds([0], 64)) == []
    assert [(fold.span, fold.entries) for fold in folds([64, 512, 0], 4096)] == [(512, 1), (4096, 2)]


def test_depths_count_spans_and_share_sets_of_packs() -> None:
    book = DepthBook()
    full = book.full("a", 10)
    assert full.deltas == 0
    assert full.packs == {"a"}
    first, second = book.on(full, 1, "b"), book.on(full, 1, "b")
    assert first.packs is second.packs
    deep = book.on(book.on(first, 8, "c"), 8, "c")
    assert deep.counts == (1, 2)
    assert deep.deltas == 3
    assert deep.packs == {"a", "b", "c"}
    assert deep.root_stored == 10
    assert [level_of_span(span) for span in (1, 8, 64, 512)] == [0, 1, 2, 3]


def test_many_sets_of_packs_do_not_confuse_the_book() -> None:
    book = DepthBook()
    depths = [book.full(f"p{number}", 1) for number in range(5000)]
    for number, depth in enumerate(depths):
        assert book.on(depth, 1, "q").packs == {f"p{number}", "q"}
