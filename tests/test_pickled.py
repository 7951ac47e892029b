"""Files of `torch.save` as sources of a commit: what comes out is what was saved, and nothing in them is ever called."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deltastore import DeltaStore
from deltastore.errors import (
    FormatError,
    IncompatibleStateError,
    InvalidInputError,
    MissingDependencyError,
    NotFoundError,
)
from deltastore.pickled import load_pickled

ROOT = Path(__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with DeltaStore.create(tmp_path / "store") as store:
        yield store


def bits(value: Any) -> Any:
    """A state with every tensor as dtype, shape and bytes, to compare with."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return type(value), [(type(key), key, bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), value


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit patterns, not a number among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def weights() -> dict[str, torch.Tensor]:
    tied = random_bits(torch.bfloat16, 30, 40)
    return {
        "embed.weight": tied,
        "layer.weight": random_bits(torch.float8_e4m3fn, 70, 9).t(),
        "layer.bias": torch.nn.Parameter(torch.randn(9)),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "part": torch.arange(100.0)[10:20:3],
        "head.weight": tied,
    }


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)).state_dict()
    moments = {i: {"step": torch.tensor(2.0), "exp_avg": torch.randn(4, 6)} for i in range(2)}
    optimizer = {"state": moments, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": [0, 1]}]}
    return {"model": model, "optimizer": optimizer, "epoch": 3, 4: (None, True, 2.5, b"x", ["ä"])}


def committed(store: DeltaStore, path: Path, **options: Any) -> Any:
    store.commit(path, **options)
    return store.checkout("main").state()


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("make", [weights, training_state])
@pytest.mark.parametrize("name", ["a.pt", "a.pth", "pytorch_model.bin"])
def test_a_file_comes_back_bit_for_bit(
    store: DeltaStore, tmp_path: Path, name: str, make: Callable[[], Any], zipped: bool
) -> None:
    state = make()
    if make is weights and not zipped:
        del state["layer.weight"]  # that format is older than fp8
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zipped)
    found = committed(store, tmp_path / name)
    assert bits(found) == bits(state)
    if make is weights:
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    else:
        assert found["model"]._metadata == state["model"]._metadata
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
        model.load_state_dict(found["model"])


def test_a_file_and_the_state_in_memory_are_one_content(store: DeltaStore, tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "last.pt")
    store.commit(state)
    store.commit(tmp_path / "last.pt")
    before, after = store.list_commits()
    assert not store.diff(before.id, after.id)


def test_tensors_stay_in_the_file_until_they_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4000.0)}, tmp_path / "a.pt")
    loaded = load_pickled(tmp_path / "a.pt")
    if sys.platform == "linux":
        assert str(tmp_path / "a.pt") in Path("/proc/self/maps").read_text()
    assert torch.equal(loaded["a"], torch.arange(4000.0))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["unaligned", "compressed"])
def test_an_archive_that_another_tool_wrote_again(store: DeltaStore, tmp_path: Path, method: int) -> None:
    state = {"a": torch.arange(4000.0), "b": torch.ones(5000, dtype=torch.float64), "c": torch.randn(60, 70).t()}
    torch.save(state, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "again.pt", "w", method) as again:
        for entry in plain.infolist():
            again.writestr(entry.filename, plain.read(entry))
    assert bits(committed(store, tmp_path / "again.pt")) == bits(state)


def test_cast(store: DeltaStore, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.randn(50)}, "n": torch.arange(3)}, tmp_path / "a.pt")
    found = committed(store, tmp_path / "a.pt", cast={"model.*": torch.bfloat16})
    assert found["model"]["w"].dtype is torch.bfloat16
    assert found["n"].dtype is torch.int64


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "consolidated.00.pth", "best.pt"])
def test_the_weights_of_a_folder(store: DeltaStore, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    state = weights()
    torch.save(state, folder / name)
    for other in ("config.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "random_states_0.pt"):
        (folder / other).write_text(other)  # not opened
    assert bits(committed(store, folder)) == bits(state)
    files = store.checkout("main").files
    assert sorted(files) == sorted(entry.name for entry in folder.iterdir() if entry.name != name)
    assert store.checkout("main").read_file("training_args.bin") == b"training_args.bin"


def test_safetensors_are_the_weights_where_there_are_any(store: DeltaStore, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    others = ["optimizer.pt", "pytorch_model.bin", "rng_state.pth", "training_args.bin", "pytorch_model.bin.index.json"]
    for other in others:
        (folder / other).write_text(other)
    assert list(committed(store, folder)) == ["a"]
    assert sorted(store.checkout("main").files) == sorted(others)


def test_folders_without_clear_weights(store: DeltaStore, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save({}, folder / "optimizer.pt")
    with pytest.raises(
        NotFoundError, match=r"folder holds no \.safetensors file, and no \.pt or \.pth or \.bin file with weights"
    ):
        store.commit(folder)
    torch.save(weights(), folder / "one.pt")
    torch.save(weights(), folder / "two.pth")
    with pytest.raises(InvalidInputError, match=r"holds 2 .* name one of \['one\.pt', 'two\.pth'\]"):
        store.commit(folder)
    with pytest.raises(NotFoundError, match=r"there is no file .*absent\.pt"):
        store.commit(folder / "absent.pt")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    torch.save(OrderedDict(b=torch.ones(4), c=torch.randn(9)), folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"a": random_bits(torch.bfloat16, 5, 3)}, folder / "pytorch_model-00002-of-00002.bin")
    write_index(folder, {"a": 2, "b": 1, "c": 1})
    return folder


def write_index(folder: Path, numbers: dict[str, int]) -> None:
    weight_map = {name: f"pytorch_model-{number:05}-of-00002.bin" for name, number in numbers.items()}
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "pytorch_model.bin.index.json").write_text(text)


def test_shards_are_merged_in_the_order_of_the_index(store: DeltaStore, sharded: Path) -> None:
    (sharded / "config.json").write_text("{}")
    found = committed(store, sharded)
    assert list(found) == ["a", "b", "c"]
    first, second = (torch.load(sharded / f"pytorch_model-0000{i}-of-00002.bin") for i in (1, 2))
    assert bits(found) == bits({**second, **first})
    assert list(store.checkout("main").files) == ["config.json"]


def test_index_and_shards_must_agree(store: DeltaStore, sharded: Path) -> None:
    index = sharded / "pytorch_model.bin.index.json"
    for numbers, message in [
        ({"a": 2, "b": 1, "c": 1, "d": 1}, r"00001-of-00002\.bin has no tensor 'd', which pytorch_model\.bin\.index\.json says"),
        ({"a": 2, "b": 1}, r"00001-of-00002\.bin has a tensor 'c', which pytorch_model\.bin\.index\.json does not name"),
        ({"a": 2, "b": 1, "c": 3}, r"pytorch_model-00003-of-00002\.bin'\], which are not there"),
    ]:
        write_index(sharded, numbers)
        with pytest.raises(FormatError, match=message):
            store.commit(sharded)
    write_index(sharded, {"a": 2, "b": 1, "c": 1})
    second = sharded / "pytorch_model-00002-of-00002.bin"
    torch.save({"a": torch.ones(1), "b": torch.ones(4)}, second)
    with pytest.raises(FormatError, match=r"00002-of-00002\.bin has a tensor 'b', which .* says is in .*00001-of-00002\.bin"):
        store.commit(sharded)
    torch.save([torch.ones(1)], second)
    with pytest.raises(FormatError, match=r"00002-of-00002\.bin holds a list; expected a dict"):
        store.commit(sharded)
    index.write_text('{"weight_map": {"a": "x.bin", "a": "y.bin"}}')
    with pytest.raises(FormatError, match=r"index\.json: the name 'a' comes twice"):
        store.commit(sharded)
    index.write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(FormatError, match=r"'x\.safetensors' is no name of a \.pt or \.pth or \.bin file"):
        store.commit(sharded)
    torch.save({}, sharded / "pytorch_model.bin")
    write_index(sharded, {"a": 2, "b": 1, "c": 1})
    with pytest.raises(InvalidInputError, match="remove the stale one"):
        store.commit(sharded)


# -- what is refused --------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled by anything that calls what a pickle asks for, it makes a file."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_nothing_in_a_file_is_called(store: DeltaStore, tmp_path: Path, zipped: bool) -> None:
    made = tmp_path / "made"
    for bomb, name in [
        (Bomb(os.system, f"touch {made}"), rf"'{os.system.__module__}\.system'"),
        (Bomb(open, str(made), "w"), r"'(_?io\.)?open'"),
        (Bomb(eval, f"open({str(made)!r}, 'w')"), "'eval'"),
        (Bomb(shutil.copy, __file__, str(made)), r"'shutil\.copy'"),
    ]:
        path = tmp_path / "bomb.pt"
        torch.save({"a": torch.ones(2), "b": bomb}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(IncompatibleStateError, match=rf"bomb\.pt asks for {name}.*convert it") as caught:
            store.commit(path)
        assert "weights_only" not in str(caught.value)
        assert "safe_globals" not in str(caught.value)
        assert not made.exists()
    torch.load(path, weights_only=False)  # it would have gone off
    assert made.exists()
    assert store.list_refs() == []


def test_more_than_data_is_refused(store: DeltaStore, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(torch.nn.Linear(2, 2), path)  # a whole module
    with pytest.raises(IncompatibleStateError, match=r"model\.pt asks for 'torch\.nn\.modules\.linear\.Linear'"):
        store.commit(path)
    torch.save({"a": torch.arange(3).numpy()}, path)
    with pytest.raises(IncompatibleStateError, match=r"model\.pt asks for 'numpy\._?core\.multiarray\._reconstruct'"):
        store.commit(path)


def test_whole_files_of_other_kinds_are_not_called_damaged(store: DeltaStore, tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    torch.save({"a": torch.ones(4).to(torch.float8_e4m3fn)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(IncompatibleStateError, match=r"odd\.pt is in torch's old format.*these dtypes.*convert it"):
        store.commit(path)
    with zipfile.ZipFile(path, "w") as archive:  # as TorchScript is told apart
        for name in ("data.pkl", "constants.pkl", "version"):
            archive.writestr(f"odd/{name}", "3\n")
    with pytest.raises(IncompatibleStateError, match=r"odd\.pt is a TorchScript archive"):
        store.commit(path)


def test_what_a_state_cannot_hold_is_named_with_its_place(store: DeltaStore, tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    for value, message in [
        (torch.Size([2]), r"torch\.Size.*`tuple\(value\)`"),
        (torch.float16, r"torch\.dtype.*`str\(value\)`"),
        ({1, 2}, r"builtins\.set.*`sorted\(value\)`"),
        (1j, r"builtins\.complex"),
        (torch.eye(3).to_sparse(), r"has the layout torch\.sparse_coo"),
        (torch.empty(3, device="meta"), "meta device"),
    ]:
        torch.save({"model": {"w": torch.ones(1)}, "extra": [0, value]}, path)
        with pytest.raises(IncompatibleStateError, match=rf"odd\.pt: state\['extra'\]\[1\] .*{message}.*saved there"):
            store.commit(path)
    torch.save({"step": 3}, path)
    with pytest.raises(IncompatibleStateError, match=r"odd\.pt holds no tensors"):
        store.commit(path)


def test_damaged_and_foreign_files_are_named(store: DeltaStore, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(weights(), buffer)
    whole = buffer.getvalue()
    buffer = io.BytesIO()
    torch.save(training_state(), buffer, _use_new_zipfile_serialization=False)
    legacy = buffer.getvalue()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as other:
        other.writestr("hello.txt", "hello")
    path = tmp_path / "model.bin"
    contents = [
        b"",
        b"P",
        b"hello, this is text\n" * 50,
        b"\x80",
        b"\x80\x02}q\x00.",
        bytes(4000),
        bytes(range(256)) * 16,
        archive.getvalue(),
    ]
    contents += [whole[: len(whole) * share // 16] for share in range(1, 16)]
    contents += [whole[:-1], legacy[:-1], whole.replace(b"PK\x01\x02", b"PK\x00\x00")]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"model\.bin") as caught:
            store.commit(path)
        assert "weights_only" not in str(caught.value)
    for share in range(1, 32):
        path.write_bytes(legacy[: len(legacy) * share // 32])
        with pytest.raises((FormatError, IncompatibleStateError), match=r"model\.bin"):  # half a name is a name unknown to torch
            store.commit(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(FormatError, match=r"model\.bin is damaged or was not made by `torch\.save`"):
        store.commit(path)
    assert store.list_refs() == []


def test_an_old_torch_is_not_trusted(store: DeltaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({}, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.5.1"))
    with pytest.raises(MissingDependencyError, match=r"torch 2\.5\.1 can't read .*a\.pt safely"):
        store.commit(tmp_path / "a.pt")


_WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Blocker())
from deltastore.cli.main import main
sys.argv = ["deltastore", *sys.argv[1:]]
main()
"""


def test_without_torch_the_extra_is_named(store: DeltaStore, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    command = [sys.executable, "-c", _WITHOUT_TORCH, "-s", str(tmp_path / "store"), "commit", str(tmp_path / "a.pt")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 1
    assert "PyTorch is needed to read" in run.stderr
    assert "pip install 'deltastore[torch]'" in run.stderr
    assert "Traceback" not in run.stderr


# -- command line -----------------------------------------------------------------------------------------------------


def command(tmp_path: Path, *arguments: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `deltastore commit`."""
    from click.testing import CliRunner

    from deltastore.cli.main import cli

    result = CliRunner().invoke(cli, ["-s", str(tmp_path / "store"), "commit", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_line_commits_them(store: DeltaStore, tmp_path: Path, sharded: Path) -> None:
    torch.save(training_state(), tmp_path / "last.pt")
    code, out, _ = command(tmp_path, tmp_path / "last.pt", "--dry-run", "--json")
    assert code == 0
    plan = json.loads(out)
    code, out, _ = command(tmp_path, tmp_path / "last.pt", "--json", "-m", "training")
    assert code == 0
    snapshot = store.checkout(json.loads(out)["id"])
    assert (plan["tensors"], plan["bytes"]) == (len(snapshot), snapshot.nbytes)
    code, out, _ = command(tmp_path, sharded, "--dry-run")
    assert (code, out.splitlines()[0][:22]) == (0, "would commit 3 tensors")
    code, out, _ = command(tmp_path, sharded, "-q")
    assert code == 0
    assert list(store.checkout(out.strip()).state()) == ["a", "b", "c"]


def test_exit_codes(store: DeltaStore, tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_text("hello")
    torch.save({"a": Bomb(os.system, "true")}, tmp_path / "bomb.pt")
    folder = tmp_path / "two"
    folder.mkdir()
    assert command(tmp_path, folder)[0] == 10
    for name in ("one.pt", "two.pt"):
        torch.save({}, folder / name)
    for path, expected in [(tmp_path / "text.bin", 13), (tmp_path / "bomb.pt", 16), (folder, 2)]:
        for extra in ([], ["--dry-run"]):
            code, _, err = command(tmp_path, path, *extra)
            assert code == expected, err
            assert path.name in err
