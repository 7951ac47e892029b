"""Ancestry: first parents, merges, forgotten parents, metadata, and speed on long histories."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import delete, insert

from deltastore.errors import InvalidInputError, RevisionNotFoundError
from deltastore.index import tables


def id_of(number):
    return f"{number:064x}"


def numbers(records):
    return [int(record.id, 16) for record in records]


@pytest.fixture
def merged(index, commit):
    """1 ← 2 ← 4 (merge of 3) ← 5, and 1 ← 3 on a branch of its own; heights are those of the first parents."""
    commit(1, None)
    commit(2, 1)
    commit(3, 1, ref="side", expected_head=None, height=2)
    commit(4, 2, parents=(id_of(2), id_of(3)), height=3)
    commit(5, 4, height=4)
    return index


def test_first_parents(merged):
    assert numbers(merged.first_parents(id_of(5))) == [5, 4, 2, 1]
    assert numbers(merged.first_parents(id_of(5), limit=2)) == [5, 4]
    assert numbers(merged.first_parents(id_of(5), limit=0)) == []
    assert merged.first_parents(id_of(5))[1] == merged.commit(id_of(4))
    assert merged.commit(id_of(4)).parents == (id_of(2), id_of(3))
    assert merged.first_parents(id_of(99)) == []


def test_ancestors(merged):
    assert numbers(merged.ancestors(id_of(5))) == [5, 4, 3, 2, 1]
    assert numbers(merged.ancestors(id_of(5), limit=3)) == [5, 4, 3]
    assert numbers(merged.ancestors(id_of(3))) == [3, 1]


def test_history_of_several_commits(merged, commit):
    commit(6, 2, ref="other", expected_head=None, height=3)
    assert numbers(merged.history([id_of(5), id_of(6)])) == [6, 5, 4, 3, 2, 1]
    assert numbers(merged.history([id_of(6), id_of(3)])) == [6, 3, 2, 1]
    assert numbers(merged.history([id_of(6), id_of(5)], limit=2)) == [6, 5]
    assert numbers(merged.history([id_of(5)])) == [5, 4, 3, 2, 1]
    assert merged.history([]) == merged.history([id_of(99)]) == merged.history([id_of(5)], limit=0) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [(1, 5, True), (3, 5, True), (5, 5, True), (5, 1, False), (2, 3, False), (9, 5, False), (1, 9, False)],
)
def test_is_ancestor(merged, old, new, expected):
    assert merged.is_ancestor(id_of(old), id_of(new)) is expected


def test_first_parent_at(merged):
    assert [merged.first_parent_at(id_of(5), steps) for steps in range(5)] == [*map(id_of, (5, 4, 2, 1)), None]
    assert merged.first_parent_at(id_of(5), 10**30) is None
    with pytest.raises(InvalidInputError, match="-1"):
        merged.first_parent_at(id_of(5), -1)


def test_history_ends_at_a_forgotten_commit(merged):
    with merged._database.write() as connection:
        connection.execute(delete(tables.commit_).where(tables.commit_.c.id == id_of(2)))
    assert numbers(merged.first_parents(id_of(5))) == [5, 4]
    assert merged.first_parent_at(id_of(5), 2) == id_of(2)
    assert merged.commit(id_of(2)) is None
    assert merged.first_parent_at(id_of(5), 3) is None
    assert numbers(merged.ancestors(id_of(5))) == [5, 4, 3, 1]


def test_finds_by_prefix(index, commit):
    ids = ["abc" + "0" * 61, "abc" + "f" * 61, "abd" + "0" * 61, "ab" + "0" * 62]
    for number, commit_id in enumerate(ids):
        commit(number, None, commit_id=commit_id, ref=f"branch-{number}")
    assert index.find_commits("abc") == ids[:2]
    assert index.find_commits("abc", limit=1) == ids[:1]
    assert index.find_commits("ab") == [ids[3], ids[0], ids[1], ids[2]]
    assert index.find_commits(ids[0]) == ids[:1]
    assert index.find_commits("abcd") == []
    assert index.find_commits("%") == index.find_commits("a_c") == index.find_commits("ABC") == []


def test_bulk_reads(merged):
    assert set(merged.commits([id_of(1), id_of(3), id_of(9)])) == {id_of(1), id_of(3)}
    assert numbers(merged.commits_since(3)) == [4, 5]
    assert numbers(merged.commits_since(5)) == []
    with pytest.raises(RevisionNotFoundError, match=id_of(9)):
        merged.objects_of_commit(id_of(9))


def test_ref_snapshot_is_of_one_moment(merged):
    state = merged.ref_snapshot(3)
    assert (state.epoch, state.seq) == (1, 5)
    assert [(ref.name, ref.commit_id) for ref in state.refs] == [("main", id_of(5)), ("side", id_of(3))]
    assert numbers(state.commits) == [4, 5]


class TestMetadata:
    @pytest.fixture
    def steps(self, index, commit):
        values = ['{"i":"1"}', '{"f":"4000000000000000"}', "true", '"2"', '{"i":"2"}', '{"i":"7"}']
        for number, value in enumerate(values, start=1):
            commit(number, number - 1 or None, metadata={"step": value})
        return index

    @pytest.mark.parametrize(
        ("value", "number", "found"),
        [
            ('{"i":"2"}', 2.0, 5),  # the nearest
            ('"2"', None, 4),
            ('"2"', 2.0, 5),
            ('{"i":"1"}', 1.0, 1),  # not the bool of commit 3
            ("true", None, 3),
            ('{"i":"3"}', 3.0, None),
            ('{"i":"3"}', float("nan"), None),
        ],
    )
    def test_nearest_first_parent(self, steps, value, number, found):
        assert steps.find_first_parent_with(id_of(6), "step", value, number) == (found and id_of(found))

    def test_an_int_and_an_equal_float_match(self, steps):
        assert steps.find_first_parent_with(id_of(3), "step", '{"i":"2"}', 2.0) == id_of(2)

    def test_only_ancestors_and_only_the_key(self, steps):
        assert steps.find_first_parent_with(id_of(1), "step", '{"i":"2"}', 2.0) is None
        assert steps.find_first_parent_with(id_of(6), "other", '{"i":"2"}', 2.0) is None


def test_long_histories_are_quick(index, commit):
    commit(1, None)
    count = 10_000
    with index._database.write() as connection:
        rows = [
            {"id": id_of(number), "object_id": 1, "tree": "ab" * 32, "height": number, "message": "m", "author": "a"}
            | {"created_at": "2026", "write_id": f"bulk-{number}", "seq": number, "epoch": 1}
            for number in range(2, count + 1)
        ]
        connection.execute(insert(tables.commit_), rows)
        parents = [{"commit_id": row["id"], "position": 0, "parent_id": id_of(row["height"] - 1)} for row in rows]
        connection.execute(insert(tables.commit_parent), parents)
        metadata = [{"commit_id": row["id"], "key": "step", "value": f'"{row["height"]}"'} for row in rows]
        connection.execute(insert(tables.commit_metadata), metadata)
    index.first_parents(id_of(count), limit=1)
    started = time.process_time()
    assert numbers(index.first_parents(id_of(count))) == list(range(count, 0, -1))
    whole = time.process_time() - started
    started = time.process_time()
    assert len(index.first_parents(id_of(count), limit=50)) == 50
    part = time.process_time() - started
    assert index.find_first_parent_with(id_of(count), "step", '"5"') == id_of(5)
    assert index.is_ancestor(id_of(1), id_of(count))
    assert whole < 2.0  # some 0.2 s on a quiet machine
    assert part < whole / 5
