"""What is printed: JSON, tab-separated lines, ids, tables; and what stands in for what does not print."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from command_line import Run, run_command, run_process, start, write_checkpoint
from safetensors.numpy import save_file

from deltastore import DeltaStore
from deltastore.cli.main import COMMANDS
from deltastore.cli.output import Column, Output, escape, human_bytes, json_text

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def test_help_lists_every_command_with_one_line() -> None:
    text = run_command("--help").out
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE), name
        own = run_command(name, "--help")
        assert own.code == 0
        assert "--json" in own.out
    for group in ("branch", "tag", "index", "cache"):
        assert re.search(r"^Commands:\n(  \w+ +[A-Z].*\n?)+", run_command(group, "-h").out, re.MULTILINE), group


def test_nothing_to_do_shows_the_help_as_an_error() -> None:
    result = run_command()
    assert (result.code, result.out) == (2, "")
    assert "Usage: deltastore" in result.err


def test_version() -> None:
    assert re.fullmatch(r"deltastore [\d.]+ \(kernel (native|numpy), Python 3\.\d+\.\d+\)\n", run_command("--version").out)
    for line in (["--version", "--json"], ["--json", "--version"]):
        document = run_command(*line).json
        assert document["kernel"] in ("native", "numpy")


def test_log(run: Run, ids: list[str]) -> None:
    commits = run("log", "--json").json
    assert [commit["id"] for commit in commits] == ids[::-1]
    assert commits[0]["parents"] == [ids[1]]
    assert commits[0]["message"] == "step 2\n\nmore"
    assert commits[0]["author"] == "ada@lab"
    assert commits[0]["metadata"] == {"step": 2, "loss": 0.5}
    assert all(TIME.fullmatch(commit["created_at"]) for commit in commits)
    rows = run("log").rows
    assert [row[0] for row in rows] == ids[::-1]
    assert TIME.fullmatch(rows[0][1])
    assert rows[0][2:4] == ["ada@lab", r"step 2\n\nmore"]
    assert json.loads(rows[0][4]) == {"step": 2, "loss": 0.5}
    assert run("log", "main~1", "-q").out.split() == [ids[1], ids[0]]
    assert run("log", "-n", "1", "-q").out.split() == [ids[2]]
    assert run("log", "-n0", "--json").out == "[]\n"
    assert run("log", "--oneline").out.splitlines() == [
        f"{ids[2][:12]} (main) step 2",
        f"{ids[1][:12]} (tag: v1) step 1",
        f"{ids[0][:12]} step 0",
    ]
    verbose = run("log", "-v", "-n1").out
    assert f"commit {ids[2]} (main)\n" in verbose
    assert "\n    step 2\n" in verbose


def test_global_options_before_and_after_the_command(folder: Path, ids: list[str]) -> None:
    expected = ids[2] + "\n"
    for line in (
        ["-q", "-s", folder, "log", "-n1"],
        ["log", "-n1", "-q", "-s", folder],
        ["-q", "log", "--store", folder, "-n1"],
        ["-s", "nowhere", "log", "-n1", "-q", "-s", folder],  # what stands later wins
    ):
        assert run_command(*line).out == expected
    listed = run_command("-s", folder, "branch", "list", "--json").json
    assert listed == [{"name": "main", "kind": "branch", "commit": ids[2]}]
    assert run_command("branch", "--json", "-s", folder).json == listed
    assert run_command("branch", "--json", "-s", folder, "list").json == listed


def test_show(run: Run, ids: list[str]) -> None:
    document = run("show", "v1", "--json").json
    assert document["id"] == ids[1]
    assert document["bytes"] == 300 * 100 * 4 + 80 + 2
    assert {each["name"]: each["shape"] for each in document["tensors"]} == {
        "embed.weight": [300, 100],
        "head.bias": [10],
        "scale": [],
    }
    assert {each["name"]: each["bytes"] for each in document["files"]} == {"config.json": 11, "tokenizer/vocab.txt": 12000}
    rows = run("show", "v1").rows
    assert ["commit", ids[1]] in rows
    assert ["tensor", "embed.weight", "float32", "[300,100]", "120000"] in rows
    assert ["tensor", "scale", "float16", "[]", "2"] in rows
    assert ["file", "config.json", "11"] in rows
    assert ["metadata", "step", "1"] in rows
    assert run("show", "v1", "-q").out == ids[1] + "\n"


def test_show_lists_tensors_whose_names_are_the_same_and_ties(folder: Path, run: Run) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3)
    with DeltaStore(folder) as store:
        store.commit({"a": {"b": tensor}, "a.b": torch.ones(2), "tied": tensor}, branch="odd")
    tensors = run("show", "odd", "--json").json["tensors"]
    assert [(each["name"], each["shape"], each["tied_to"]) for each in tensors] == [
        ("a.b", [3], None),
        ("a.b", [2], None),
        ("tied", [3], "a.b"),
    ]


def test_diff(run: Run, ids: list[str], tmp_path: Path) -> None:
    document = run("diff", "main~1", "main", "--json").json
    assert (document["before"], document["after"]) == (ids[1], ids[2])
    assert document["tensors"] == [
        {
            "name": "embed.weight",
            "status": "changed",
            "before": {"dtype": "float32", "shape": [300, 100]},
            "after": {"dtype": "float32", "shape": [300, 100]},
            "elements": 30000,
            "changed_elements": 5,
            "changed_bytes": 120000,
            "shared_rows": None,
            "changed_rows": None,
        }
    ]
    assert document["files"] == [{"name": "config.json", "status": "changed"}]
    assert document["totals"]["changed_elements"] == 5
    rows = run("diff", "main~1", "main").rows
    side = "float32[300,100]"
    assert rows[0] == ["changed", "embed.weight", side, side, "5", "30000", "120000"]
    assert rows[1][:2] == ["file changed", "config.json"]
    assert run("diff", "main", "main", "--stat").out == "no differences\n"
    assert run("diff", "main~1", "main", "--stat").rows == [["embed", "5", "30000", "120000", "1"]]
    assert run("diff", "main~1", "main", "-q").out.split() == ["embed.weight", "config.json"]
    assert run("checkout", "main", tmp_path / "bare").code == 0
    assert run("commit", tmp_path / "bare/model.safetensors", "-b", "main").code == 0
    assert run("diff", "main~1", "main", "--stat").out == "2 files added, removed or changed\n"
    run("branch", "reset", "main", "main~1", "--yes")
    save_file({"embed.weight": np.zeros(3, np.float32), "new": np.zeros(1)}, tmp_path / "other.safetensors")
    run("commit", tmp_path / "other.safetensors")
    totals = run("diff", "main~1", "main", "--json", "--stat").json["totals"]
    assert {key: totals[key] for key in ("added", "removed", "reshaped", "changed", "files")} == {
        "added": 1,
        "removed": 2,
        "reshaped": 1,
        "changed": 0,
        "files": 2,
    }


def test_diff_counts_rows_of_resized_tensors(run: Run, tmp_path: Path) -> None:
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    save_file({"embed": table}, tmp_path / "small.safetensors")
    assert run("commit", tmp_path / "small.safetensors", "-b", "vocabulary").code == 0
    larger = np.concatenate([table, table[:2]])
    larger[3] += 1
    save_file({"embed": larger}, tmp_path / "large.safetensors")
    assert run("commit", tmp_path / "large.safetensors", "-b", "vocabulary").code == 0
    (tensor,) = run("diff", "vocabulary~1", "vocabulary", "--json").json["tensors"]
    assert (tensor["status"], tensor["shared_rows"], tensor["changed_rows"]) == ("reshaped", 5, 1)
    assert tensor["after"] == {"dtype": "float32", "shape": [7, 4]}
    rows = run("diff", "vocabulary~1", "vocabulary").rows
    assert rows == [["reshaped", "embed", "float32[5,4]", "float32[7,4]", "", "28", "112"]]


def test_an_adapter_names_its_base(run: Run, ids: list[str], tmp_path: Path) -> None:
    save_file({"lora": np.ones(3, np.float32)}, tmp_path / "adapter.safetensors")
    document = run("commit", tmp_path / "adapter.safetensors", "-b", "adapter", "--base", "v1", "--json").json
    assert document["metadata"] == {"base": ids[1]}
    assert run("show", "adapter", "--json").json["metadata"] == {"base": ids[1]}
    assert run("commit", tmp_path / "adapter.safetensors", "-b", "adapter", "--base", "nothing").code == 10
    refused = run("commit", tmp_path / "adapter.safetensors", "-b", "adapter", "--base", "v1", "--meta", "base=llama")
    assert refused.code == 2
    assert "metadata has the base 'llama'" in refused.err


def test_verify_and_stats(run: Run) -> None:
    report = run("verify", "--read-data", "--json").json
    assert report["ok"] is True
    assert report["commits"] == 3
    assert report["bytes_read"] > 120000
    assert "all is well" in run("verify", "v1").out
    stats = run("stats", "--json").json
    assert (stats["commits"], stats["branches"], stats["tags"]) == (3, 1, 1)
    assert isinstance(stats["stored_bytes"], int)
    assert {each["kind"] for each in stats["objects"]} == {"commit", "manifest", "pack", "structure"}
    assert ["commits", "3"] in run("stats").rows
    assert run("stats", "-q").out == ""


def test_index_status_and_upgrade(folder: Path, run: Run) -> None:
    status = run("index", "status", "--json").json
    assert status["path"] == str(folder / "index.sqlite")
    assert status["schema"] == status["expected_schema"]
    assert status["store"] == json.loads((folder / "store.json").read_text())["uuid"]
    assert (status["epoch"], status["seq"]) == (1, 4)
    assert ["seq", "4"] in run("index", "status").rows
    upgrade = run("index", "upgrade", "--json").json
    assert upgrade == {
        "path": status["path"],
        "from": status["schema"],
        "to": status["schema"],
        "backup": None,
        "dry_run": False,
    }


def test_tables_on_a_terminal(folder: Path, terminal: tuple[int, int], ids: list[str]) -> None:
    ours, theirs = terminal
    with start("-s", folder, "log", stdout=theirs, env={"COLUMNS": "", "LINES": ""}) as process:
        process.wait(timeout=60)
    lines = os.read(ours, 1 << 16).decode().splitlines()
    assert re.match(r"COMMIT +TIME +AUTHOR +MESSAGE +METADATA", lines[0])
    assert re.match(rf"{ids[2][:12]}  \d{{4}}-\d\d-\d\d .* ada@lab +\(main\) step 2 +loss=0.5 step=2", lines[1])
    assert all(len(line) <= 100 for line in lines)


def test_narrow_terminals_cut_what_gives_way(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns: list[Column[tuple[str, str]]] = [
        Column("ID", lambda each: each[0]),
        Column("MESSAGE", lambda each: each[1], shrink=True),
    ]
    items = [("abc", "x" * 100), ("d", "深" * 30)]
    Output(terminal=True).table(columns, items)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "abc  " + "x" * 34 + "…"
    assert lines[2] == "d    " + "深" * 17 + "…"
    Output(terminal=False).table(columns, items)
    assert capsys.readouterr().out.splitlines()[0] == "abc\t" + "x" * 100


# -- hostile names ----------------------------------------------------------------------------------------------------

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n\t\u202egnp\x9b31m\u2028" + "é深"


@pytest.fixture
def hostile(tmp_path: Path, folder: Path) -> Path:
    source = tmp_path / "hostile.safetensors"
    save_file({HOSTILE: np.zeros(4, np.float32)}, source)
    with DeltaStore(folder) as store:
        config = {f"a{HOSTILE}": b"x"}
        store.commit(source, HOSTILE, metadata={"k": HOSTILE}, author=HOSTILE, files=config, branch="bad")
    return source


@pytest.mark.parametrize(
    "line",
    [
        ["log", "bad"],
        ["log", "bad", "-v"],
        ["log", "bad", "--oneline"],
        ["show", "bad"],
        ["diff", "main", "bad"],
        ["diff", "main", "bad", "-q"],
        ["branch", "list", "-v"],
        ["log", f"no{HOSTILE}"],
        ["diff", "main", HOSTILE],
        [f"no{HOSTILE}"],
        ["commit", f"/no/{HOSTILE}"],
        ["tag", "create", HOSTILE],
        ["tag", "delete", HOSTILE, "--yes"],
        ["show", "bad", "--store", f"/no/{HOSTILE}"],
    ],
)
@pytest.mark.usefixtures("hostile")
def test_nothing_steers_the_terminal(run: Run, line: list[str]) -> None:
    result = run(*line)
    for text in (result.out, result.err):
        assert not [char for char in text if not char.isprintable() and char not in "\n\t"]
    assert result.out + result.err


@pytest.mark.usefixtures("hostile")
def test_lines_and_cells_stay_whole(run: Run) -> None:
    rows = run("log", "bad").rows
    assert len(rows) == 1
    assert len(rows[0]) == 5
    assert rows[0][3] == escape(HOSTILE)
    assert [len(row) for row in run("show", "bad").rows if row[0] == "tensor"] == [5]


@pytest.mark.usefixtures("hostile")
def test_json_is_exact(run: Run) -> None:
    result = run("show", "bad", "--json")
    assert result.out.isascii()
    assert result.json["message"] == HOSTILE
    assert result.json["metadata"] == {"k": HOSTILE}
    assert result.json["tensors"][0]["name"] == HOSTILE
    assert result.json["files"][0]["name"] == f"a{HOSTILE}"
    assert run("log", f"x{HOSTILE}", "--json").err.isascii()


def test_terminal_tables_escape_too(capsys: pytest.CaptureFixture[str]) -> None:
    Output(terminal=True).table([Column("NAME", lambda each: each)], [HOSTILE])
    assert [char for char in capsys.readouterr().out if not char.isprintable()] == ["\n", "\n"]


@pytest.mark.usefixtures("hostile")
def test_streams_that_take_ascii_only(folder: Path) -> None:
    result = run_process("-s", folder, "log", "bad", env={"PYTHONIOENCODING": "ascii"})
    assert result.code == 0
    assert r"\xe9\u6df1" in result.out


def test_escape() -> None:
    assert escape("plain é深") == "plain é深"
    assert escape("a\tb\n\x1b\x7f\u202e\udc80") == r"a\tb\n\x1b\x7f\u202e\udc80"


def test_json_values() -> None:
    moment = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    value = {"a": float("nan"), "b": [float("-inf"), 1.5], "c": b"\x00\xff", "d": (True, None), "e": {1: "x"}, "t": moment}
    assert json.loads(json_text(value)) == {
        "a": "NaN",
        "b": ["-Infinity", 1.5],
        "c": {"b": "AP8="},
        "d": [True, None],
        "e": [[1, "x"]],
        "t": "2024-01-02T03:04:05.000000Z",
    }
    assert " " not in json_text({"a": [1, 2]})


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12345, "12.3 kB"), (999_999, "1.00 MB"), (6_020_000_000, "6.02 GB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_warnings_of_the_library_are_one_line(folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with DeltaStore(folder) as store:
        store.commit({"w": torch.zeros(2), "step": 3}, branch="values")
    result = run_command("-s", folder, "checkout", "values", tmp_path / "out")
    assert result.code == 0
    assert re.fullmatch(r"warning: the plain values .*\n", result.err)
    as_json = run_command("-s", folder, "checkout", "values", tmp_path / "out2", "--json")
    assert json.loads(as_json.err)["type"] == "warning"
    assert write_checkpoint(tmp_path / "c").is_dir()
