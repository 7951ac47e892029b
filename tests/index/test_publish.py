"""The commit transaction and the movements of refs: all or nothing, whoever else is writing."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import delete, select

from deltastore.errors import (
    AlreadyExistsError,
    IntegrityError,
    InvalidInputError,
    RefConflictError,
    RevisionNotFoundError,
    StorageError,
)
from deltastore.index import tables
from deltastore.index.publish import number_of
from deltastore.index.records import OplogRecord, RefMovement


def movement(action, name="side", kind="branch", expected=None, new=None, **more):
    return RefMovement(name, kind, action, expected, new, body=b"moved", **more)


def id_of(number):
    return f"{number:064x}"


class TestPublish:
    def test_makes_everything_visible_at_once(self, index, commit):
        objects = (("packs/a", "pack", 7), ("manifests/a", "manifest", 5), ("structures/a", "structure", 3))
        edges = (
            ("commits/1", "structures/a"),
            ("commits/1", "manifests/a"),
            ("commits/1", "packs/a"),
            ("manifests/a", "packs/a"),
        )
        digest = bytes(range(32))
        published = commit(1, None, objects, edges=edges, dedup=((digest, "packs/a", 4),), metadata={"a": "true"})
        assert (published.commit_id, published.seq, published.epoch, published.already) == (id_of(1), 1, 1, False)
        record = index.commit(id_of(1))
        assert (record.parents, record.height, record.message, record.author) == ((), 1, "commit 1", "someone")
        assert (record.metadata, record.object_key, record.seq) == ({"a": "true"}, "commits/1", 1)
        states = index.object_states(["packs/a", "manifests/a", "structures/a", "commits/1", "packs/none"])
        assert {(key, each.state, each.session_id) for key, each in states.items()} == {
            (key, "live", None) for key in ("packs/a", "manifests/a", "structures/a", "commits/1")
        }
        assert set(index.objects_of_commit(id_of(1))) == {"packs/a", "manifests/a", "structures/a"}
        assert index.dedup([digest, bytes(32)]) == {digest: ("packs/a", 4)}
        ref = index.ref("main")
        assert (ref.kind, ref.commit_id, ref.version) == ("branch", id_of(1), 1)
        assert index.unmirrored() == index.oplog()
        (entry,) = index.oplog()
        assert entry == OplogRecord(1, 1, "commit", b"entry 1", id_of(1), "commits/1", False, entry.created_at)
        assert index.meta().seq == 1

    def test_a_manifest_brings_the_packs_of_its_table(self, index, commit):
        commit(1, None, (("packs/a", "pack", 1),))
        edges = (("commits/2", "manifests/b"), ("manifests/b", "packs/a"))
        commit(2, 1, (("manifests/b", "manifest", 1),), edges=edges)
        assert set(index.objects_of_commit(id_of(2))) == {"manifests/b", "packs/a"}

    def test_a_retry_with_the_same_write_id_gives_the_commit_that_landed(self, index, commit, publication, dump):
        first = commit(1, None)
        commit(2, 1)
        before = dump(index)
        again = index.publish(publication(commit.session_id, 1, None))
        assert (again.commit_id, again.seq, again.already) == (first.commit_id, first.seq, True)
        assert dump(index) == before

    def test_a_stale_head_is_refused_with_both_ids(self, index, commit, publication, dump):
        commit(1, None)
        commit(2, 1)
        index.register(commit.session_id, [("commits/3", "commit", 1)])
        before = dump(index)
        with pytest.raises(RefConflictError) as caught:
            index.publish(publication(commit.session_id, 3, 1))
        assert (caught.value.name, caught.value.expected, caught.value.actual) == ("main", id_of(1), id_of(2))
        assert dump(index) == before
        index.publish(publication(commit.session_id, 3, 2))  # the same objects serve the next try
        assert index.ref("main").commit_id == id_of(3)

    @pytest.mark.parametrize(("parent", "expected"), [(None, id_of(9)), (1, None)])
    def test_the_branch_must_be_as_expected_also_when_there_is_none(self, index, commit, parent, expected):
        if parent is not None:
            commit(1, None)
        with pytest.raises(RefConflictError):
            commit(2, parent, expected_head=expected)
        assert index.commit(id_of(2)) is None

    def test_a_tag_is_no_branch(self, index, commit):
        commit(1, None)
        index.move_ref(movement("create", "v1", "tag", new=id_of(1)))
        with pytest.raises(InvalidInputError, match="'v1' is a tag"):
            commit(2, 1, ref="v1")

    def test_the_same_commit_twice_is_refused(self, index, commit, dump):
        commit(1, None)
        before = dump(index)["commit"]
        index.register(commit.session_id, [("commits/again", "commit", 1)])
        with pytest.raises(AlreadyExistsError, match="log entry 1"):
            commit(2, 1, commit_id=id_of(1))
        assert dump(index)["commit"] == before

    @pytest.mark.parametrize("how", ["never registered", "pending elsewhere", "tombstoned"])
    @pytest.mark.parametrize("named", ["reused_keys", "edges", "dedup"])
    def test_a_reused_object_that_is_not_live_refuses_the_commit(self, index, commit, dump, publication, how, named):
        commit(1, None, (("packs/keep", "pack", 1),))
        if how == "pending elsewhere":
            index.register(index.open_session("writer", "other", 60), [("packs/lost", "pack", 1)])
        if how == "tombstoned":
            index.register(commit.session_id, [("packs/lost", "pack", 1)])
            with index._database.write() as connection:
                connection.execute(delete(tables.object_).where(tables.object_.c.key == "packs/lost"))
        changes = {
            "reused_keys": {"reused_keys": ("packs/keep", "packs/lost")},
            "edges": {"edges": (("commits/2", "packs/keep"), ("commits/2", "packs/lost"))},
            "dedup": {"dedup": ((bytes(32), "packs/lost", 0),)},
        }[named]
        index.register(commit.session_id, [("commits/2", "commit", 1)])
        before = dump(index)
        with pytest.raises(IntegrityError, match="packs/lost") as caught:
            index.publish(publication(commit.session_id, 2, 1, **changes))
        assert "packs/keep" not in str(caught.value)
        assert dump(index) == before

    @pytest.mark.parametrize("how", ["never registered", "of another session", "live already"])
    def test_own_objects_must_be_pending_in_the_session(self, index, commit, dump, publication, how):
        commit(1, None, (("packs/a", "pack", 1),))
        key = "packs/a" if how == "live already" else "packs/b"
        if how == "of another session":
            index.register(index.open_session("writer", "other", 60), [("packs/b", "pack", 1)])
        index.register(commit.session_id, [("commits/2", "commit", 1)])
        before = dump(index)
        with pytest.raises(IntegrityError, match=key):
            index.publish(publication(commit.session_id, 2, 1, own_keys=("commits/2", key)))
        assert dump(index) == before

    def test_the_first_full_copy_of_a_chunk_stays_its_hint(self, index, commit):
        digest = b"d" * 32
        commit(1, None, (("packs/a", "pack", 1),), dedup=((digest, "packs/a", 0),))
        commit(2, 1, (("packs/b", "pack", 1),), dedup=((digest, "packs/b", 9), (b"e" * 32, "packs/b", 1)))
        assert index.dedup([digest, b"e" * 32]) == {digest: ("packs/a", 0), b"e" * 32: ("packs/b", 1)}

    def test_a_tag_lands_with_the_commit_or_not_at_all(self, index, commit, publication, dump):
        commit(1, None, tag=movement("create", "v1", "tag", new=id_of(1)))
        assert (index.ref("v1").kind, index.ref("v1").commit_id) == ("tag", id_of(1))
        assert [(entry.seq, entry.kind) for entry in index.oplog()] == [(1, "commit"), (2, "ref")]
        index.register(commit.session_id, [("commits/2", "commit", 1)])
        before = dump(index)
        with pytest.raises(AlreadyExistsError, match="'v1'"):
            index.publish(publication(commit.session_id, 2, 1, tag=movement("create", "v1", "tag", new=id_of(2))))
        assert dump(index) == before

    def test_records_what_is_in_the_bucket_by_now(self, index, commit):
        commit(1, None)
        commit(2, 1)
        commit(3, 2, mirrored=((1, 1), (1, 2)), snapshot_seq=2)
        assert [entry.seq for entry in index.unmirrored()] == [3]
        assert index.meta().snapshot_seq == 2
        index.mark_mirrored([(1, 3)])
        assert index.unmirrored() == []
        assert [entry.mirrored for entry in index.oplog()] == [True, True, True]

    def test_any_text_survives(self, index, commit):
        message = "nul \0 in it, 𝛼β̈ 漢字 ‮, '; DROP TABLE ref; --" + "x" * 100_000
        metadata = {"a\0b": '"\\u0000"', "": '""', "ключ": '{"i":"1"}'}
        commit(1, None, message=message, author="\0", metadata=metadata, ref="weird \0 'name'")
        record = index.commit(id_of(1))
        assert (record.message, record.author, record.metadata) == (message, "\0", metadata)
        assert index.ref("weird \0 'name'").commit_id == id_of(1)
        assert index.ref("weird ") is None
        assert index.find_first_parent_with(id_of(1), "a\0b", '"\\u0000"') == id_of(1)
        assert index.find_first_parent_with(id_of(1), "a", '"\\u0000"') is None

    def test_text_that_is_no_unicode_is_refused(self, index, commit, dump):
        before = dump(index)["commit"]
        with pytest.raises(InvalidInputError, match="can't be stored"):
            commit(1, None, message="lone \ud800")
        assert dump(index)["commit"] == before

    def test_more_keys_than_one_statement_takes(self, index, commit):
        packs = tuple((f"packs/{number}", "pack", 1) for number in range(2500))
        commit(1, None, packs)
        commit(2, 1, reused_keys=tuple(key for key, _, _ in packs))
        assert len(index.objects_of_commit(id_of(1))) == 2500
        assert index.object_states(key for key, _, _ in packs).keys() == {key for key, _, _ in packs}

    def test_threads_get_dense_log_numbers(self, index, commit):
        def work(branch):
            for step in range(4):
                number = 100 * (branch + 1) + step
                parent = number - 1 if step else None
                numbers.append(commit(number, parent, ref=f"branch-{branch}").seq)

        numbers = []
        threads = [threading.Thread(target=work, args=(branch,)) for branch in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(numbers) == list(range(1, 25))
        assert [entry.seq for entry in index.oplog()] == list(range(1, 25))
        assert len(index.refs("branch")) == 6

    def test_what_a_commit_needs_can_not_be_deleted(self, index, commit):
        objects = (("packs/a", "pack", 1), ("manifests/a", "manifest", 1))
        commit(1, None, objects, edges=(("commits/1", "manifests/a"), ("manifests/a", "packs/a")))
        for key in ("packs/a", "manifests/a", "commits/1"):
            with pytest.raises(IntegrityError, match="references"), index._database.write() as connection:
                connection.execute(delete(tables.object_).where(tables.object_.c.key == key))
        with pytest.raises(IntegrityError, match="references"), index._database.write() as connection:
            connection.execute(delete(tables.commit_))
        assert len(index.objects_of_commit(id_of(1))) == 2

    def test_edges_and_hints_go_with_their_source(self, index, commit):
        commit(1, None, (("packs/a", "pack", 1),), dedup=((bytes(32), "packs/a", 0),))
        with index._database.write() as connection:
            for table in (tables.ref, tables.commit_):
                connection.execute(delete(table))
            for key in ("commits/1", "packs/a"):
                connection.execute(delete(tables.object_).where(tables.object_.c.key == key))
        with index._database.read() as connection:
            for table in (tables.edge, tables.dedup, tables.commit_parent, tables.commit_metadata):
                assert connection.execute(select(table)).all() == []


class TestRefs:
    def test_create_move_delete(self, index, commit):
        commit(1, None)
        commit(2, 1)
        assert index.move_ref(movement("create", new=id_of(1))) == 3
        assert index.move_ref(movement("move", expected=id_of(1), new=id_of(2))) == 4
        ref = index.ref("side")
        assert (ref.commit_id, ref.version) == (id_of(2), 2)
        assert index.move_ref(movement("delete", expected=id_of(2))) == 5
        assert index.ref("side") is None
        entries = index.oplog(since_seq=2)
        assert [(entry.seq, entry.kind, entry.commit_key) for entry in entries] == [
            (3, "ref", None),
            (4, "ref", None),
            (5, "ref", None),
        ]
        assert index.oplog(limit=1)[0].seq == 1

    def test_the_body_may_depend_on_the_log_number(self, index, commit):
        commit(1, None)
        index.move_ref(RefMovement("side", "branch", "create", None, id_of(1), lambda seq: b"number %d" % seq))
        assert index.oplog(since_seq=1)[0].body == b"number 2"

    def test_lists_by_kind_and_name(self, index, commit):
        commit(1, None)
        for name, kind in (("zeta", "tag"), ("alpha", "tag"), ("beta", "branch")):
            index.move_ref(movement("create", name, kind, new=id_of(1)))
        assert [ref.name for ref in index.refs()] == ["alpha", "beta", "main", "zeta"]
        assert [ref.name for ref in index.refs("tag")] == ["alpha", "zeta"]

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (movement("create", "main", new=id_of(1)), AlreadyExistsError),
            (movement("create", "main", "tag", new=id_of(1)), AlreadyExistsError),
            (movement("create", new=id_of(9)), RevisionNotFoundError),
            (movement("create", new=None), RevisionNotFoundError),
            (movement("move", new=id_of(1)), RevisionNotFoundError),
            (movement("move", "main", new=id_of(9)), RevisionNotFoundError),
            (movement("move", "main", expected=id_of(9), new=id_of(1)), RefConflictError),
            (movement("move", "main", "tag", new=id_of(1)), RevisionNotFoundError),
            (movement("delete"), RevisionNotFoundError),
            (movement("delete", "main", "tag"), RevisionNotFoundError),
            (movement("delete", "main", expected=id_of(9)), RefConflictError),
        ],
    )
    def test_a_refused_movement_changes_nothing(self, index, commit, dump, change, error):
        commit(1, None)
        before = dump(index)
        with pytest.raises(error, match=change.name):
            index.move_ref(change)
        assert dump(index) == before


class TestSessions:
    def test_expired_or_closed_sessions_take_no_objects(self, index, dump):
        session_id = index.open_session("writer", "host:1", 60, ref="main")
        index.renew_session(session_id, 3600)
        index.close_session(session_id)
        index.close_session(session_id)
        before = dump(index)
        with pytest.raises(StorageError) as caught:
            index.register(session_id, [("packs/a", "pack", 1)])
        assert caught.value.kind == "expired"
        with pytest.raises(StorageError, match=session_id):
            index.renew_session(session_id, 60)
        assert dump(index) == before

    def test_renewing_moves_the_end(self, index, dump):
        session_id = index.open_session("reader", "host:1", 60, pinned_commit=id_of(1))
        (before,) = dump(index)["lease"]
        index.renew_session(session_id, 7200)
        (after,) = dump(index)["lease"]
        assert before[:-1] == after[:-1] == (session_id, "reader", "host:1", None, id_of(1), before[5])
        assert before[5] < before[6] < after[6]  # created, first end, second end

    def test_names_are_never_used_twice(self, index, commit, dump):
        index.register(commit.session_id, [("packs/a", "pack", 1)])
        before = dump(index)
        with pytest.raises(AlreadyExistsError, match="packs/a"):
            index.register(commit.session_id, [("packs/b", "pack", 1), ("packs/a", "pack", 1)])
        assert dump(index) == before

    def test_totals_by_kind_and_state(self, index, commit):
        commit(1, None, (("packs/a", "pack", 10), ("packs/b", "pack", 5)))
        index.register(commit.session_id, [("packs/c", "pack", 3 << 40)])
        totals = {(each.kind, each.state): (each.count, each.size) for each in index.object_totals()}
        assert totals == {("commit", "live"): (1, 100), ("pack", "live"): (2, 15), ("pack", "pending"): (1, 3 << 40)}

    def test_hints_into_packs_that_are_not_live_are_not_given(self, index, commit):
        commit(1, None, (("packs/a", "pack", 1),), dedup=((bytes(32), "packs/a", 0),))
        with index._database.write() as connection:
            connection.execute(tables.object_.update().values(state="pending"))
        assert index.dedup([bytes(32)]) == {}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ('{"i":"5"}', 5.0),
        ('{"i":"-9007199254740992"}', -9007199254740992.0),
        ('{"i":"9007199254740993"}', None),  # no float equals it
        ('{"i":"' + "9" * 5000 + '"}', None),
        ('{"i":"' + "9" * 309 + '"}', None),
        ('{"f":"4014000000000000"}', 5.0),
        ('{"f":"8000000000000000"}', 0.0),
        ('{"f":"7ff0000000000000"}', float("inf")),
        ('{"f":"7ff8000000000000"}', None),  # NaN equals nothing
        ("true", None),
        ('"5"', None),
        ("null", None),
        ('{"d":[["i","5"]]}', None),
        ("[5]", None),
    ],
)
def test_number_of(value, number):
    assert number_of(value) == number
