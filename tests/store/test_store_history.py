"""Branches, tags, revisions, diffs, and the life of an open store."""

from __future__ import annotations

import contextlib
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import bucket_objects, raw, same, sql

from deltastore import DeltaStore, Ref
from deltastore.errors import (
    AlreadyExistsError,
    DeltaStoreError,
    InvalidInputError,
    ReadOnlyError,
    RefConflictError,
    RevisionNotFoundError,
    StoreNotFoundError,
)


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(value)), "steady": torch.arange(5)}


def six_commits(store: DeltaStore) -> list[str]:
    """Ids of six commits on main, oldest first."""
    return [store.commit(state(number), f"number {number}", metadata={"step": number * 10}).id for number in range(6)]


@pytest.fixture
def line(store: DeltaStore) -> list[str]:
    return six_commits(store)


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeltaStore, list[str]]]:
    """A store whose main branch no test moves."""
    with DeltaStore.create(tmp_path_factory.mktemp("steady") / "store") as opened:
        yield opened, six_commits(opened)


# -- revisions --------------------------------------------------------------------------------------------------------


def test_every_way_to_name_a_commit(store: DeltaStore, line: list[str]) -> None:
    store.create_branch("exp/lr3", revision="main~2")
    store.create_tag("v1.0", revision=line[1])
    names = {
        "main": 5, "main~0": 5, "main~": 4, "main~1": 4, "main~~": 3, "main~2~1": 2, "main~5": 0,
        "exp/lr3": 3, "exp/lr3~1": 2, "v1.0": 1, "v1.0~1": 0,
        line[4]: 4, line[4][:8]: 4, line[4][:20].upper(): 4, f"{line[4][:9]}~2": 2,
        "main@{step=30}": 3, "main@{step=30}~1": 2, "exp/lr3@{step=20}": 2,
    }  # fmt: skip
    assert {name: line.index(store.get_commit(name).id) for name in names} == names
    assert store.checkout("main@{step=20}")["w"].load()[0] == 2


@pytest.mark.parametrize(
    "revision",
    [
        "nothing", "main~6", "main~999999999", "main~9999999999999999999999", "main~x", "v1@{step=10}", "main@{step=11}",
        "main@{}", "main@{step=}", "main@{stop=10}", "main@{step=10", "01234567", "0" * 64, "0" * 65, "abcdef", "Main", "main ",
        " main", "main~-1", "main@{step=nan}", "main@{step=inf}", "~1", "@{step=1}", "é", "main\n", "main\0", "x" * 10_000,
        "HEAD", "main^",
    ],
)  # fmt: skip
def test_revisions_that_name_nothing(steady: tuple[DeltaStore, list[str]], revision: str) -> None:
    with pytest.raises(RevisionNotFoundError):
        steady[0].checkout(revision)


@pytest.mark.parametrize("revision", ["", None, 3, b"main", "\ud800", "main@{step=\ud800}", "\ud800" * 9])
def test_revisions_that_are_none(steady: tuple[DeltaStore, list[str]], revision: Any) -> None:
    with pytest.raises((InvalidInputError, RevisionNotFoundError)):
        steady[0].checkout(revision)


def test_near_names_are_offered(store: DeltaStore, line: list[str]) -> None:
    store.create_branch("experiment/rate")
    with pytest.raises(RevisionNotFoundError, match="experiment/rate"):
        store.checkout("experimnet/rate")
    with pytest.raises(RevisionNotFoundError, match="deltastore branch"):
        store.checkout("qqqqqq")


def test_an_empty_store_says_so(store: DeltaStore) -> None:
    with pytest.raises(RevisionNotFoundError, match="no commits yet"):
        store.checkout()
    with pytest.raises(RevisionNotFoundError):
        store.list_commits()
    assert store.list_refs() == []
    assert store.verify(read_data=True)
    assert store.stats().commits == 0
    assert store.stats().ratio == 0


def test_short_and_ambiguous_prefixes(store: DeltaStore, folder: Path, line: list[str]) -> None:
    with pytest.raises(RevisionNotFoundError):
        store.get_commit(line[2][:7])
    twin = line[2][:12] + ("0" if line[2][12] != "0" else "1") * 52
    copied = "object_id, tree, height, message, author, created_at"
    sql(
        folder,
        f'INSERT INTO "commit" SELECT ?, {copied}, ?, seq + 1000, epoch FROM "commit" WHERE id = ?',
        twin,
        str(uuid.uuid4()),
        line[2],
    )
    for digits in (8, 12):
        with pytest.raises(RevisionNotFoundError, match="ambiguous") as caught:
            store.get_commit(line[2][:digits])
        assert twin[:16] in str(caught.value)
        assert line[2][:16] in str(caught.value)
    assert store.get_commit(line[2][:13]).id == line[2]
    assert store.get_commit(line[2]).id == line[2]


def test_metadata_is_found_by_number_text_and_flag(store: DeltaStore) -> None:
    for metadata in ({"v": 1}, {"v": 2.5}, {"v": True}, {"v": "text"}, {"v": 1200.0}, {"v": None}, {"v": "7"}, {"v": 2**60}):
        store.commit(state(0), repr(metadata["v"]), metadata=metadata)
    found = {
        text: store.get_commit(f"main@{{v={text}}}").message
        for text in ("1", "1.0", "1e0", "2.5", "true", "text", "1200", "1200.0", "7", str(2**60))
    }
    assert found == {
        "1": "1", "1.0": "1", "1e0": "1", "2.5": "2.5", "true": "True", "text": "'text'", "1200": "1200.0", "1200.0": "1200.0",
        "7": "'7'", str(2**60): str(2**60),
    }  # fmt: skip
    for text in ("false", "0", "True", "TEXT", "7.0", "None", "2"):
        with pytest.raises(RevisionNotFoundError, match="v="):
            store.get_commit(f"main@{{v={text}}}")


def test_the_newest_of_several_matches(store: DeltaStore) -> None:
    ids = [store.commit(state(number), metadata={"step": number // 2}).id for number in range(6)]
    assert store.get_commit("main@{step=1}").id == ids[3]
    assert store.get_commit("main@{step=1}~1").id == ids[2]


def test_metadata_and_texts_come_back_with_their_types(store: DeltaStore) -> None:
    metadata = {
        "int": 3, "float": 0.5, "flag": True, "text": "ü\0x", "none": None, "list": [1, {"a": (2, b"x")}], "": 0, "big": 2**70,
        "numpy": np.float32(0.25), "torch": torch.tensor(4), "count": np.int64(9),
    }  # fmt: skip
    expected = dict(sorted({**metadata, "numpy": 0.25, "torch": 4, "count": 9}.items()))
    message = "first line\n\nünï\0 \U0001f600" * 10
    made = store.commit(state(1), message, metadata=metadata, author="me <me@x>")
    for found in (made, store.get_commit(), store.list_commits()[0], store.checkout().commit):
        assert same(dict(sorted(found.metadata.items())), expected)
        assert (found.message, found.author, found.parents) == (message, "me <me@x>", ())
        assert found == made
        assert found.created_at.utcoffset().total_seconds() == 0
    assert hash(made) == hash(store.get_commit())


# -- logs -------------------------------------------------------------------------------------------------------------


def test_the_log_follows_first_parents(store: DeltaStore, line: list[str]) -> None:
    assert [commit.id for commit in store.list_commits()] == line[::-1]
    assert [commit.id for commit in store.list_commits("main", limit=2)] == line[:3:-1]
    assert [commit.id for commit in store.list_commits("main~3", limit=100)] == line[2::-1]
    assert [commit.parents for commit in store.list_commits("main~4")] == [(line[0],), ()]
    assert store.list_commits(limit=0) == []
    store.create_branch("side", revision="main~4")
    mine = store.commit(state(77), branch="side")
    assert [commit.id for commit in store.list_commits("side")] == [mine.id, line[1], line[0]]
    assert store._index.is_ancestor(line[1], mine.id)
    assert not store._index.is_ancestor(line[2], mine.id)


def test_commit_ids_are_functions_of_content_and_history(store: DeltaStore, line: list[str]) -> None:
    again = store.commit(state(5), "number 5", metadata={"step": 50})
    assert again.tree == store.get_commit("main~1").tree
    assert again.id != line[5]
    assert store.commit(state(4)).tree == store.get_commit(line[4]).tree


# -- refs -------------------------------------------------------------------------------------------------------------

GOOD = ["a", "A9", "exp/lr3", "v1.0.0", "a_b-c.d/e", "x" * 255, "release-2024.05", "abcdef0", "deadbee", "0", "a/"]
BAD = [
    "", " ", "a b", "-a", ".a", "/a", "_a", "a..b", "a~1", "a@{x=1}", "a@b", "ü", "a\n", "a\0", "x" * 256, "deadbeef", "0" * 8,
    "0" * 64, "DEADBEEF", "0" * 80, "a:b", "a\\b", "a*", "\ud800", None, 3, b"a",
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_names(steady: tuple[DeltaStore, list[str]], name: str) -> None:
    store, line = steady
    assert store.create_branch(name) == Ref(name, "branch", line[5])
    assert store.get_commit(name).id == line[5]
    store.delete_branch(name)
    store.create_tag(name, revision="main~1")
    branch = f"b-{name}"[:255]
    store.commit(state(9), branch=branch)
    assert store.get_commit(f"{name}~1").id == line[3]
    store.delete_branch(branch)
    store.delete_tag(name)


@pytest.mark.parametrize("name", BAD)
def test_bad_names(steady: tuple[DeltaStore, list[str]], name: Any) -> None:
    store, folder = steady[0], Path(steady[0].address)
    before = bucket_objects(folder)
    for make in (store.create_branch, store.create_tag):
        with pytest.raises(InvalidInputError):
            make(name)
    with pytest.raises(InvalidInputError):
        store.commit(state(1), branch=name)
    if name is not None:
        with pytest.raises(InvalidInputError):
            store.commit(state(1), tag=name)
    assert bucket_objects(folder) == before
    assert [ref.name for ref in store.list_refs()] == ["main"]


def test_branches_and_tags(store: DeltaStore, line: list[str]) -> None:
    store.create_branch("b", revision="main~1")
    store.create_tag("t", revision="main~2")
    assert store.list_refs() == [Ref("b", "branch", line[4]), Ref("main", "branch", line[5]), Ref("t", "tag", line[3])]
    for make in (store.create_branch, store.create_tag):
        for name in ("b", "t", "main"):
            with pytest.raises(AlreadyExistsError, match=f"'{name}' exists"):
                make(name)
    with pytest.raises(RevisionNotFoundError, match="'t' is a tag"):
        store.delete_branch("t")
    with pytest.raises(RevisionNotFoundError, match="'b' is a branch"):
        store.delete_tag("b")
    with pytest.raises(RevisionNotFoundError):
        store.delete_tag("nothing")
    with pytest.raises(InvalidInputError, match="tag"):
        store.commit(state(1), branch="t")
    with pytest.raises(RevisionNotFoundError):
        store.create_branch("c", revision="nothing")
    with pytest.raises(RevisionNotFoundError, match="tag"):
        store.reset_branch("t", revision="main")
    store.delete_branch("b")
    store.delete_tag("t")
    assert [ref.name for ref in store.list_refs()] == ["main"]


def test_a_commit_outlives_its_branch(store: DeltaStore, line: list[str]) -> None:
    store.delete_branch("main")
    assert store.list_refs() == []
    assert store.checkout(line[3])["w"].load()[0] == 3
    with pytest.raises(RevisionNotFoundError):
        store.checkout("main")
    root = store.commit(state(100))
    assert root.parents == ()
    store.create_branch("rescued", revision=line[5])
    assert store.get_commit("rescued~5").id == line[0]


def test_a_tag_with_a_commit(store: DeltaStore, line: list[str]) -> None:
    made = store.commit(state(9), tag="best")
    assert store.get_commit("best") == made
    with pytest.raises(AlreadyExistsError):
        store.commit(state(10), tag="best")
    assert store.get_commit("main") == made  # nothing landed


def test_reset(store: DeltaStore, line: list[str]) -> None:
    with pytest.raises(RefConflictError) as caught:
        store.reset_branch("main", revision="main~3", expected="main~1")
    assert (caught.value.name, caught.value.expected, caught.value.actual) == ("main", line[4], line[5])
    assert pickle.loads(pickle.dumps(caught.value)).actual == line[5]
    assert store.get_commit("main").id == line[5]
    assert store.reset_branch("main", revision="main~3", expected=line[5]) == Ref("main", "branch", line[2])
    made = store.commit(state(33), "on top of an old one")
    assert made.parents == (line[2],)
    assert store.checkout()["w"].load()[0] == 33
    store.reset_branch("main", revision=line[5])
    assert [commit.id for commit in store.list_commits()] == line[::-1]
    with pytest.raises(RevisionNotFoundError):
        store.reset_branch("nothing", revision="main")
    with pytest.raises(RevisionNotFoundError):
        store.reset_branch("main", revision="nothing")


def test_expected_head(store: DeltaStore, line: list[str]) -> None:
    made = store.commit(state(6), expected_head=line[5])
    with pytest.raises(RefConflictError):
        store.commit(state(7), expected_head=line[5])
    with pytest.raises(RefConflictError) as caught:
        store.commit(state(7), branch="fresh", expected_head=line[5])
    assert caught.value.actual is None
    assert store.get_commit() == made


def test_two_writers_on_one_branch(store: DeltaStore, folder: Path, line: list[str]) -> None:
    """Whoever comes second is put on top, with a warning; both versions are exact."""
    with DeltaStore(folder) as other:
        other.checkout()
        other.commit(state(50))
        store.commit(state(51))
        other.commit(state(52))
    assert [int(store.checkout(f"main~{back}")["w"].load()[0]) for back in (2, 1, 0)] == [50, 51, 52]


def racing(other: DeltaStore, act: Callable[[], Any], value: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A state that is being read while somebody else moves the branch."""
    yield "w", torch.full((4,), float(value))
    act()
    yield "steady", torch.arange(5)


def test_a_commit_that_was_overtaken_goes_on_top(store: DeltaStore, folder: Path, line: list[str]) -> None:
    with DeltaStore(folder) as other:
        for number in range(12):  # across ladder heights
            with pytest.warns(UserWarning, match="another writer") if number == 0 else contextlib.nullcontext():
                made = store.commit(racing(other, lambda number=number: other.commit(state(100 + number)), 200 + number))
            assert made.parents == (other.get_commit("main~1").id,)
            assert [int(store.checkout(f"main~{back}")["w"].load()[0]) for back in (1, 0)] == [100 + number, 200 + number]
    assert len(store.list_commits()) == 30
    report = store.verify(read_data=True)
    assert report, report.problems
    with DeltaStore(folder, trust="none") as again:
        values = [int(again.checkout(commit.id)["w"].load()[0]) for commit in reversed(again.list_commits())]
    assert values == [*range(6), *(base + number for number in range(12) for base in (100, 200))]


def test_a_commit_that_was_overtaken_is_refused_where_that_matters(store: DeltaStore, folder: Path, line: list[str]) -> None:
    with DeltaStore(folder) as other:
        with pytest.raises(RefConflictError) as caught:
            store.commit(racing(other, lambda: other.commit(state(100)), 200), expected_head=line[5])
        assert (caught.value.expected, caught.value.actual) == (line[5], other.get_commit().id)
        head = other.get_commit().id
        with pytest.raises(RefConflictError):  # reset: the new head knows nothing of the old one
            store.commit(racing(other, lambda: other.reset_branch("main", revision="main~2"), 200))
        with pytest.raises(RefConflictError):
            store.commit(racing(other, lambda: other.delete_branch("main"), 200))
        other.create_branch("main", revision=head)
        store.create_branch("late", revision=head)
        with pytest.raises(RefConflictError):
            store.commit(
                racing(other, lambda: other.commit(state(1), branch="late", expected_head=head), 2),
                branch="late",
                expected_head=head,
            )
    assert store.get_commit().id == head
    assert store.commit(state(300)).parents == (head,)
    assert store.checkout()["w"].load()[0] == 300
    assert store.verify(read_data=True)


@pytest.mark.filterwarnings("ignore:another writer:UserWarning")
def test_threads_share_a_store(store: DeltaStore) -> None:
    def work(number: int) -> None:
        try:
            for step in range(4):
                commit = store.commit({"w": torch.full((100,), number * 10 + step)}, branch=f"branch-{number % 2}")
                assert int(store.checkout(commit.id)["w"].load()[0]) == number * 10 + step
        except BaseException as error:
            failures.append(error)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.list_commits("branch-0")) == len(store.list_commits("branch-1")) == 8
    assert store.verify(read_data=True)


# -- diff -------------------------------------------------------------------------------------------------------------


def test_a_diff_counts_exactly(store: DeltaStore) -> None:
    rng = np.random.default_rng(2)
    before = {
        "bf16": torch.from_numpy(rng.integers(0, 2**15, 1_100_000, np.int16)).view(torch.bfloat16),
        "fp64": torch.randn(100, dtype=torch.float64),
        "complex": torch.randn(50, dtype=torch.complex128),
        "same": torch.arange(7),
        "gone": torch.ones(3, 2),
        "shape": torch.zeros(6),
        "dtype": torch.zeros(6),
        "zero": torch.tensor([0.0, 1.0]),
        "nan": torch.tensor([torch.nan, 1.0]),
        "none": torch.empty(0, 2),
    }
    after = {name: tensor.clone() for name, tensor in before.items() if name != "gone"}
    places = np.unique(rng.integers(0, 1_100_000, 5000))
    after["bf16"].view(torch.int16)[torch.from_numpy(places)] += 1
    after["fp64"][3:10] *= -1
    after["complex"][4] += 1j
    after["shape"] = torch.zeros(3, 2)
    after["dtype"] = torch.zeros(6, dtype=torch.float16)
    after["zero"][0] = -0.0
    after["new"] = torch.ones(4)
    first, second = store.commit(before), store.commit(after)
    diff = store.diff("main~1", "main")
    assert (diff.before, diff.after) == (first, second)
    found = {each.name: each for each in diff.tensors}
    assert {name: (each.status, each.changed_elements) for name, each in found.items()} == {
        "bf16": ("changed", len(places)),
        "fp64": ("changed", 7),
        "complex": ("changed", 1),
        "zero": ("changed", 1),
        "shape": ("reshaped", None),
        "dtype": ("reshaped", None),
        "new": ("added", None),
        "gone": ("removed", None),
    }
    assert diff.changed_elements == len(places) + 9
    assert found["bf16"].changed_bytes == 2_200_000
    assert found["bf16"].elements == 1_100_000
    assert found["shape"].before == ("float32", (6,))
    assert found["shape"].after == ("float32", (3, 2))
    assert found["shape"].changed_bytes == 0  # the same bytes in another shape
    assert found["gone"].after is None
    assert found["new"].before is None
    assert diff.elements == sum(tensor.numel() for tensor in after.values())
    backwards = {each.name: each.status for each in store.diff("main", "main~1").tensors}
    assert backwards["gone"] == "added"
    assert backwards["new"] == "removed"


def test_a_diff_of_equal_versions_is_empty(store: DeltaStore, line: list[str]) -> None:
    assert not store.diff("main", "main")
    store.commit(state(5), "once more")
    diff = store.diff("main~1", "main")
    assert not diff
    assert diff.tensors == ()
    assert bool(store.diff("main~2", "main"))
    with pytest.raises(RevisionNotFoundError):
        store.diff("main", "nothing")


def test_a_diff_of_files(store: DeltaStore) -> None:
    store.commit(state(1), files={"a": b"1", "b": b"2" * 10_000, "c": b"3", "d": b"4" * 10_000})
    store.commit(state(1), files={"a": b"1", "b": b"2" * 9_999 + b"x", "d": b"4" * 10_000, "e": b"5"})
    diff = store.diff("main~1", "main")
    assert [(each.name, each.status) for each in diff.files] == [("b", "changed"), ("c", "removed"), ("e", "added")]
    assert diff


def test_a_diff_sees_through_wrapper_prefixes_and_shared_names(store: DeltaStore) -> None:
    one, two = torch.ones(2), torch.zeros(2)
    store.commit({"module.layer.w": one, "_orig_mod.b": two})
    store.commit({"layer.w": one, "b": two})
    assert not store.diff("main~1", "main")
    store.commit({"module.w": one, "w": two, "a.b": one, "a": {"b": two}})
    store.commit({"module.w": one + 1, "w": two, "a.b": one, "a": {"b": two + 1}})
    diff = store.diff("main~1", "main")
    assert [(each.name, each.changed_elements) for each in diff.tensors] == [("module.w", 2), ("a.b", 2)]


# -- the life of a store ----------------------------------------------------------------------------------------------


def test_a_store_pickles_as_its_address(store: DeltaStore, folder: Path, line: list[str]) -> None:
    data = pickle.dumps(store)
    assert len(data) < 1000
    with pickle.loads(data) as other:
        assert other.get_commit().id == line[5]
        made = other.commit(state(9))
    assert store.get_commit() == made
    with (
        DeltaStore(folder, read_only=True, trust="none") as strict,
        pickle.loads(pickle.dumps(strict)) as other,
        pytest.raises(ReadOnlyError),
    ):
        other.commit(state(1))


def test_read_only(folder: Path, store: DeltaStore, line: list[str]) -> None:
    store.close()
    before = bucket_objects(folder)
    with DeltaStore(folder, read_only=True) as reader:
        assert reader.checkout("main~1")["w"].load()[0] == 4
        assert reader.verify(read_data=True)
        for write in (
            lambda: reader.commit(state(1)),
            lambda: reader.create_branch("b"),
            lambda: reader.create_tag("t"),
            lambda: reader.delete_branch("main"),
            lambda: reader.delete_tag("t"),
            lambda: reader.reset_branch("main", revision="main~1"),
        ):
            with pytest.raises(ReadOnlyError):
                write()
    assert bucket_objects(folder) == before
    with pytest.raises(ReadOnlyError):
        DeltaStore.create(folder / "other", read_only=True)


def test_a_closed_store(store: DeltaStore, line: list[str]) -> None:
    snapshot = store.checkout()
    store.close()
    store.close()
    for call in (
        lambda: store.commit(state(1)),
        lambda: store.checkout(),
        lambda: store.list_commits(),
        lambda: store.get_commit(),
        lambda: store.list_refs(),
        lambda: store.diff("main", "main"),
        lambda: store.verify(),
        lambda: store.stats(),
        lambda: store.create_branch("b"),
        lambda: store.create_tag("t"),
        lambda: store.delete_branch("main"),
        lambda: store.delete_tag("t"),
        lambda: store.reset_branch("main", revision="main"),
    ):
        with pytest.raises(InvalidInputError, match="closed"):
            call()
    assert raw(snapshot["w"].load()) == raw(state(5)["w"])  # a snapshot needs no connection
    with DeltaStore(store.address) as again:
        assert again.get_commit().id == line[5]


def test_creating_a_store(folder: Path, tmp_path: Path) -> None:
    with DeltaStore.create(folder) as store:
        store.commit(state(1))
    with pytest.raises(AlreadyExistsError, match="exist_ok"):
        DeltaStore.create(folder)
    with DeltaStore.create(folder, exist_ok=True) as store:
        assert len(store.list_commits()) == 1
    with DeltaStore.create(str(tmp_path / "new" / "deeper"), exist_ok=True) as store:
        assert store.list_refs() == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("not mine")
    with DeltaStore.create(tmp_path / "full") as store:
        store.commit(state(2))
    assert (tmp_path / "full" / "notes.txt").read_text() == "not mine"


def test_no_store_inside_or_around_another(folder: Path, tmp_path: Path) -> None:
    DeltaStore.create(folder / "a" / "b").close()
    for place in (folder / "a" / "b" / "c", folder / "a" / "b" / "packs" / "x", folder / "a", tmp_path):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InvalidInputError, match="store"):
            DeltaStore.create(place)
        assert sorted(tmp_path.rglob("*")) == before
    DeltaStore.create(folder / "a" / "sibling").close()
    link = tmp_path / "link"
    link.symlink_to(folder / "a" / "b", target_is_directory=True)
    with pytest.raises(InvalidInputError, match="store"):
        DeltaStore.create(link / "inner")


@pytest.mark.parametrize("option", [{"trust": "some"}, {"profile": "tiny"}, {"baseline": "disc"}])
def test_options_that_are_none(folder: Path, option: dict[str, Any]) -> None:
    DeltaStore.create(folder).close()
    with pytest.raises(InvalidInputError, match=f"{next(iter(option))}="):
        DeltaStore(folder, **option)


def test_places_that_can_not_be_stores(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for place in (file, file / "below"):
        with pytest.raises(DeltaStoreError):
            DeltaStore.create(place)
        with pytest.raises(StoreNotFoundError):
            DeltaStore(place)
    with pytest.raises(StoreNotFoundError, match="deltastore init"):
        DeltaStore(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    for address in ("", "a\0b", "hf://buckets/a/b", "s3://a", "ftp://x"):
        with pytest.raises(InvalidInputError):
            DeltaStore.create(address)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("deltastore")]
