"""Importing checkpoints in Python: their order, what is committed, resuming, comparing and deleting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltastore import DeltaStore, importing
from deltastore.errors import FormatError, IntegrityError, InvalidInputError, NotFoundError, StoreFullError
from deltastore.importing import delete_originals, plan_import, run_import
from deltastore.originals import delete

ROOT = Path(__file__).parents[1]


def write(folder: Path, value: int = 0, state: object = None, **files: str) -> Path:
    """A checkpoint folder whose weights depend on `value`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    weights = {"a.weight": rng.standard_normal((50, 40), np.float32), "b": np.arange(7), "empty": np.empty((0, 3), np.float16)}
    weights["a.weight"].reshape(-1)[:value] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if state is not None:
        (folder / "trainer_state.json").write_text(json.dumps(state))
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASTORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DeltaStore]:
    with DeltaStore.create(tmp_path / "store") as opened:
        yield opened


# -- plans ------------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_the_trainer_then_of_the_name_then_of_time(tmp_path: Path) -> None:
    trainer = write(tmp_path / "checkpoint-900", state={"global_step": 5})
    ten, nine = write(tmp_path / "run2-checkpoint-10"), write(tmp_path / "run3 9")
    last, first = write(tmp_path / "last"), write(tmp_path / "first")
    for at, folder in enumerate((first, trainer, nine, ten, last)):
        for file in folder.iterdir():
            os.utime(file, (1000 + at, 1000 + at))
    plan = plan_import([last, ten, first, nine, trainer])
    assert [item.path for item in plan.items] == [first, trainer, nine, ten, last]
    assert [item.step for item in plan.items] == [None, 5, 9, 10, None]
    assert [item.name for item in plan.items] == ["first", "checkpoint-900", "run3 9", "run2-checkpoint-10", "last"]
    assert "step" not in plan.items[0].metadata


def test_names_of_weight_files(tmp_path: Path) -> None:
    first, second = write(tmp_path / "step-3") / "model.safetensors", write(tmp_path / "x") / "model.safetensors"
    second = second.rename(tmp_path / "x" / "policy_0007.safetensors")
    assert [(item.name, item.step) for item in plan_import([second, first]).items] == [("step-3", 3), ("policy_0007", 7)]


def test_metadata_are_the_last_logged_values(tmp_path: Path) -> None:
    log = [{"loss": 2.0, "epoch": 0.1}, {"loss": 1.5, "epoch": 0.2, "learning_rate": 1e-5}, {"eval_loss": 3, "epoch": 0.25}, 7]
    plan = plan_import(
        [write(tmp_path / "a", state={"global_step": 4, "log_history": [*log, {"loss": "bad", "grad_norm": 1.0}]})]
    )
    expected = {"step": 4, "loss": 1.5, "eval_loss": 3, "learning_rate": 1e-5, "epoch": 0.25}
    assert plan.items[0].metadata == expected
    assert plan_import([write(tmp_path / "b", state={"global_step": 4, "log_history": None})]).items[0].metadata == {"step": 4}


def test_refused_plans(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a-1"), write(tmp_path / "b-1")
    (tmp_path / "link").symlink_to(a)
    with pytest.raises(InvalidInputError, match=r"a-1 and .*b-1 are both of step 1"):
        plan_import([a, b])
    for twice in (a, f"{a}/../a-1", tmp_path / "link"):
        with pytest.raises(InvalidInputError, match="given twice"):
            plan_import([a, twice])
    with pytest.raises(InvalidInputError, match="lies inside"):
        plan_import([a / "model.safetensors", a])
    with pytest.raises(InvalidInputError, match="nothing to import"):
        plan_import([])


def test_what_cannot_be_imported_is_named_and_stops_no_other(tmp_path: Path, store: DeltaStore) -> None:
    good = write(tmp_path / "good-1")
    cut = write(tmp_path / "cut-2")
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    (tmp_path / "none").mkdir()
    state = write(tmp_path / "state-3", state={"global_step": -1})
    broken = write(tmp_path / "broken-4")
    (broken / "trainer_state.json").write_text('{"global_step": 4')
    inside = write(tmp_path / "store" / "inside-5")
    around = write(tmp_path / "around")
    DeltaStore.create(around / "sub").close()
    paths = [good, cut, tmp_path / "none", tmp_path / "missing", state, broken, inside]
    report = run_import(store, plan_import(paths))
    assert [each.item.path for each in report.imported] == [good]
    found = {failure.path: (type(failure.error), str(failure.error)) for failure in report.failures}
    expected = {
        cut: (FormatError, "no safetensors header"),
        tmp_path / "none": (NotFoundError, "no .safetensors file"),
        tmp_path / "missing": (NotFoundError, "no checkpoint"),
        state: (FormatError, "global_step"),
        broken: (FormatError, "cut short"),
        inside: (InvalidInputError, "inside the store"),
    }
    assert found.keys() == expected.keys()
    for path, (kind, text) in expected.items():
        assert found[path][0] is kind
        assert text in found[path][1]
    with DeltaStore(around / "sub") as inner:
        report = run_import(inner, plan_import([around]))
        assert "holds the store" in str(report.failures[0].error)
    with pytest.raises(NotFoundError, match=r"its folders do: .*good-1"):
        (tmp_path / "runs").mkdir()
        good.rename(tmp_path / "runs" / "good-1")
        raise plan_import([tmp_path / "runs"]).failures[0].error


# -- importing --------------------------------------------------------------------------------------------------------


def test_import_and_repeat(tmp_path: Path, store: DeltaStore) -> None:
    big = "x" * 10_000
    folders = [write(tmp_path / f"checkpoint-{step}", step, **{"config.json": "{}", "vocab.txt": big}) for step in (1, 2, 10)]
    report = run_import(store, plan_import(folders), branch="runs/a", author="ada")
    assert [each.already for each in report.imported] == [False] * 3
    log = store.list_commits("runs/a")[::-1]
    assert [commit.id for commit in log] == [each.commit.id for each in report.imported]
    assert [(commit.message, commit.metadata, commit.author) for commit in log] == [
        (f"checkpoint-{step}", {"step": step}, "ada") for step in (1, 2, 10)
    ]
    snapshot = store.checkout("runs/a")
    assert snapshot.files == {"config.json": 2, "vocab.txt": 10_000}
    assert snapshot["a.weight"].dtype_name == "float32"
    later = write(tmp_path / "checkpoint-11", 11)
    again = run_import(store, plan_import([later, *folders]), branch="runs/a")
    assert [each.already for each in again.imported] == [True, True, True, False]
    assert len(store.list_commits("runs/a")) == 4
    assert len(run_import(store, plan_import(folders)).imported) == 3  # another branch
    assert len(store.list_commits("main")) == 3


@pytest.mark.parametrize("what", ["tensor", "file", "small file", "more files", "shape"])
def test_the_same_name_with_other_content_is_imported_again(tmp_path: Path, store: DeltaStore, what: str) -> None:
    folder = write(tmp_path / "checkpoint-1", 1, **{"small": "a", "vocab.txt": "a" * 10_000})
    run_import(store, plan_import([folder]))
    if what == "tensor":
        write(tmp_path / "other", 2)
        (tmp_path / "other" / "model.safetensors").replace(folder / "model.safetensors")
    elif what == "shape":
        save_file({"a.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    elif what == "file":
        (folder / "vocab.txt").write_text("b" * 10_000)
    elif what == "small file":
        (folder / "small").write_text("b")
    else:
        (folder / "new").write_text("b")
    report = run_import(store, plan_import([folder]))
    assert [each.already for each in report.imported] == [False]
    assert len(store.list_commits()) == 2


def test_names_of_branches_are_checked_first(tmp_path: Path, store: DeltaStore) -> None:
    plan = plan_import([write(tmp_path / "checkpoint-1")])
    with pytest.raises(InvalidInputError, match="branch"):
        run_import(store, plan, branch="main~1")
    store.commit({}, "x", tag="v1")
    assert "v1" in str(run_import(store, plan, branch="v1").failures[0].error)


def test_a_full_store_ends_the_import(tmp_path: Path, store: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write(tmp_path / f"checkpoint-{step}", step) for step in range(3)]
    commit = DeltaStore.commit

    def full(self: DeltaStore, source: Path, *arguments: object, **options: object) -> object:
        if source == folders[1]:
            raise StoreFullError("full")
        return commit(self, source, *arguments, **options)

    monkeypatch.setattr(DeltaStore, "commit", full)
    report = run_import(store, plan_import(folders))
    assert len(report.imported) == 1
    assert [(failure.path, str(failure.error)) for failure in report.failures] == [(folders[1], "full"), (folders[2], "full")]


def test_what_the_store_gives_back_is_compared_with_the_disk(
    tmp_path: Path, store: DeltaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = write(tmp_path / "checkpoint-1", 1), write(tmp_path / "other", 2)
    commit = DeltaStore.commit
    monkeypatch.setattr(DeltaStore, "commit", lambda self, _, *more, **options: commit(self, other, *more, **options))
    report = run_import(store, plan_import([folder]))
    assert not report.imported
    assert isinstance(report.failures[0].error, IntegrityError)
    assert "'a.weight' differs in the elements 0 to 1999" in str(report.failures[0].error)
    assert delete_originals(report) == importing.Deletion((), (), 0)
    assert folder.is_dir()


def test_one_that_differs_among_many(tmp_path: Path, store: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write(tmp_path / f"checkpoint-{step}", 3 * step, **{"vocab.txt": str(step) * 9000}) for step in range(11)]
    other = write(tmp_path / "other", 5)
    commit = DeltaStore.commit

    def wrong(self: DeltaStore, source: Path, *more: object, **options: object) -> object:
        return commit(self, other if source == folders[4] else source, *more, **options)

    monkeypatch.setattr(DeltaStore, "commit", wrong)
    report = run_import(store, plan_import(folders))
    assert [each.item.path for each in report.imported] == folders[:4] + folders[5:]
    assert [failure.path for failure in report.failures] == [folders[4]]
    monkeypatch.undo()
    monkeypatch.setenv("DELTASTORE_CACHE", str(tmp_path / "cache"))
    again = run_import(store, plan_import(folders))
    assert [each.already for each in again.imported] == [True] * 4 + [False] + [True] * 6
    (tmp_path / "grown").mkdir()
    grown = [write(tmp_path / "grown" / f"checkpoint-{step}", 50 * step) for step in range(20, 23)]
    save_file({"a.weight": np.zeros((9, 9), np.float32)}, grown[1] / "model.safetensors")  # another structure
    assert len(run_import(store, plan_import(grown)).imported) == 3


def test_versions_are_read_in_one_go(tmp_path: Path, store: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write(tmp_path / f"checkpoint-{step}", 3 * step) for step in range(10)]
    monkeypatch.setattr(importing, "_problem", lambda *_: pytest.fail("one at a time"))
    assert len(run_import(store, plan_import(folders[:8])).imported) == 8
    report = run_import(store, plan_import(folders[1:]))  # and across a fold of the ladder
    assert [each.already for each in report.imported] == [True] * 7 + [False] * 2


def test_a_checkpoint_that_changes_meanwhile_fails(tmp_path: Path, store: DeltaStore) -> None:
    folder = write(tmp_path / "checkpoint-1", 1)
    plan = plan_import([folder])
    (folder / "new.txt").write_text("x")
    report = run_import(store, plan)
    assert "new.txt is new while it was imported" in str(report.failures[0].error)


@pytest.mark.parametrize("after", [0.0, 0.05])
def test_a_killed_import_is_repeated(tmp_path: Path, after: float) -> None:
    folders = [write(tmp_path / f"checkpoint-{step}", step) for step in range(6)]
    line = [sys.executable, "-m", "deltastore", "import", *map(str, folders), "--to", str(tmp_path / "killed")]
    with subprocess.Popen(
        line, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as run:
        until = time.monotonic() + 60
        while not list((tmp_path / "killed").glob("commits/*/*")) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(after)
        run.send_signal(signal.SIGKILL)
    with DeltaStore(tmp_path / "killed") as store:
        before = [commit.id for commit in store.list_commits()] if store.list_refs() else []
        report = run_import(store, plan_import(folders))
        assert not report.failures
        assert [each.already for each in report.imported] == [True] * len(before) + [False] * (6 - len(before))
        assert [commit.metadata["step"] for commit in store.list_commits()] == list(range(5, -1, -1))
        assert store.verify(read_data=True)


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_originals_are_deleted_with_their_folders(tmp_path: Path, store: DeltaStore) -> None:
    folder = write(tmp_path / "checkpoint-1", 1, **{"a.txt": "a"})
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "deep" / "b.txt").write_text("b")
    single = write(tmp_path / "checkpoint-2", 2, **{"beside.txt": "a"})
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    report = run_import(store, plan_import([folder, single / "model.safetensors"]))
    deletion = delete_originals(report)
    assert deletion.deleted == (folder, single / "model.safetensors")
    assert deletion.freed_bytes > size
    assert not folder.exists()
    assert [file.name for file in single.iterdir()] == ["beside.txt"]


@pytest.mark.parametrize(
    "obstacle", ["link", "link to a folder", "store", "git", "texts", "pipe", "linked checkpoint", "unused shard"]
)
def test_what_is_never_deleted(tmp_path: Path, store: DeltaStore, obstacle: str) -> None:
    folder = path = write(tmp_path / "checkpoint-1", 1)
    reason = "symbolic link"
    if obstacle == "link":
        (tmp_path / "target").write_text("x")
        (folder / "link").symlink_to(tmp_path / "target")
    elif obstacle == "link to a folder":
        (folder / ".git").mkdir()
        (folder / ".git" / "hooks").symlink_to(tmp_path)
    elif obstacle == "store":
        DeltaStore.create(folder / "inner").close()
        reason = "looks like a store"
    elif obstacle == "git":
        (folder / ".git").mkdir()
        (folder / ".git" / "HEAD").write_text("x")
        reason = "HEAD is no part of the commit"
    elif obstacle == "texts":
        save_file({"a": np.zeros(3)}, folder / "model.safetensors", {"format": "pt", "license": "x"})
        reason = "the texts license"
    elif obstacle == "pipe":
        (folder / ".cache").mkdir()
        os.mkfifo(folder / ".cache" / "pipe")
        reason = "no plain file"
    elif obstacle == "linked checkpoint":
        path = tmp_path / "link-7"
        path.symlink_to(folder)
    else:
        save_file({}, folder / "m-00002.safetensors")
        (folder / "model.safetensors").rename(folder / "m-00001.safetensors")
        names = dict.fromkeys(("a.weight", "b", "empty"), "m-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        reason = ""
    before = sorted(folder.rglob("*"))
    report = run_import(store, plan_import([path]))
    assert not report.failures
    if obstacle == "unused shard":  # is a file like any other, and in the commit
        assert delete_originals(report).deleted == (path,)
        return
    assert report.deletable == ()
    deletion = delete_originals(report)
    assert deletion.deleted == ()
    assert deletion.kept[0][0] == path
    assert reason in deletion.kept[0][1]
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(InvalidInputError, match="stays"):
        delete(report.imported[0].item.original)


@pytest.mark.parametrize("change", ["touched", "new", "replaced", "gone", "linked"])
def test_what_changed_since_is_not_deleted(tmp_path: Path, store: DeltaStore, change: str) -> None:
    folder = write(tmp_path / "checkpoint-1", 1, **{"a.txt": "a"})
    report = run_import(store, plan_import([folder]))
    file = folder / "a.txt"
    if change == "touched":
        os.utime(file, (1, 1))
    elif change == "new":
        (folder / "b.txt").write_text("b")
    elif change == "gone":
        file.unlink()
    elif change == "linked":
        (folder / "sub").symlink_to(tmp_path)
    else:
        info = file.stat()
        (tmp_path / "other").write_text("b")
        os.utime(tmp_path / "other", ns=(info.st_atime_ns, info.st_mtime_ns))
        (tmp_path / "other").replace(file)
    deletion = delete_originals(report)
    assert deletion.deleted == ()
    reasons = {"touched": "changed", "new": "is new", "gone": "is gone", "replaced": "changed", "linked": "symbolic link"}
    assert reasons[change] in deletion.kept[0][1]
    assert (folder / "model.safetensors").exists()
