"""Where the private copy is that commits are compared with: memory, a file that outlives the process, or nowhere."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import raw, same
from store_traffic import Traffic

import deltastore.baseline
import deltastore.baseline_file
from deltastore import DeltaStore
from deltastore.errors import InvalidInputError, StoreFullError


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**16, count, np.uint16).view(np.int16)).view(torch.bfloat16)


def open_store(folder: Path, cache: Path, baseline: Any = "disk") -> DeltaStore:
    return DeltaStore.create(folder, exist_ok=True, baseline=baseline, cache_dir=cache)


def bump(tensor: torch.Tensor, start: int = 0) -> None:
    """Change every thousandth element by a unit in the last place."""
    tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)[start::1000] += 1


def slots(cache: Path) -> list[Path]:
    return sorted(cache.glob("stores/*/baseline/*"))


def table(slot: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((slot / "table.json").read_text())
    return found


def payload_bytes_read(traffic: Traffic) -> int:
    """Bytes of packs that were read; the heads of the small packs here are a few hundred bytes each."""
    return sum(size for key, _, size in traffic.reads if key.startswith("packs/"))


def test_a_restarted_run_goes_on_from_the_file(folder: Path, cache: Path, traffic: Traffic) -> None:
    state = {"a": noise(1_500_000), "b": noise(3000), "c": torch.zeros(5, dtype=torch.int8), "e": torch.empty(0)}
    with open_store(folder, cache) as store:
        store.commit(state, files={"large": bytes(range(256)) * 50})
        bump(state["a"])
        head = store.commit(state, files={"large": bytes(range(256)) * 50})
    (slot,) = slots(cache)
    assert table(slot)["clean"] is True
    assert table(slot)["commit"] == head.id
    with open_store(folder, cache) as store:
        bump(state["a"], 7)
        traffic.clear()
        store.commit(state, files={"large": bytes(range(256)) * 50})
        assert payload_bytes_read(traffic) < 3000  # heads only
        assert table(slot)["clean"] is False  # while it is in use
        assert store.diff("main~1", "main").changed_elements == 1500
        assert same(store.checkout().load()["a"], state["a"])
        assert store.verify(read_data=True)
    assert slots(cache) == [slot]


def test_without_the_file_the_next_process_reads_the_store(folder: Path, cache: Path, traffic: Traffic) -> None:
    """The control of the test above."""
    tensor = noise(1_500_000)
    for start in (0, 7):
        bump(tensor, start)
        with open_store(folder, cache, "ram") as store:
            traffic.clear()
            store.commit({"a": tensor})
    assert payload_bytes_read(traffic) > 1_000_000
    assert slots(cache) == []


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), 9)", "pass"])
def test_only_a_file_closed_in_good_order_is_used(ending: str, folder: Path, cache: Path, traffic: Traffic) -> None:
    """At a normal end of the process the file is closed, also by a script that never closes its store."""
    script = f"""
        import os, torch
        from deltastore import DeltaStore
        store = DeltaStore.create({str(folder)!r}, baseline="disk", cache_dir={str(cache)!r})
        tensor = torch.arange(1_500_000, dtype=torch.float32)
        store.commit({{"a": tensor}})
        tensor[5] = 0
        store.commit({{"a": tensor}})
        {ending}
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(script)], check=ending != "os.kill(os.getpid(), 9)")
    clean = ending == "pass"
    assert table(slots(cache)[0])["clean"] is clean
    with open_store(folder, cache) as store:
        tensor = torch.arange(1_500_000, dtype=torch.float32)
        tensor[5], tensor[9] = 0, 1
        traffic.clear()
        store.commit({"a": tensor})
        assert (payload_bytes_read(traffic) < 3000) is clean
        assert store.diff("main~1", "main").changed_elements == 1
        assert same(store.checkout().load()["a"], tensor)


def test_every_chunk_of_the_file_is_hashed_before_it_is_trusted(folder: Path, cache: Path) -> None:
    tensor = noise(1_500_000)
    with open_store(folder, cache) as store:
        store.commit({"a": tensor})
    data = slots(cache)[0] / "data"
    body = bytearray(data.read_bytes())
    body[12345] ^= 1
    data.write_bytes(body)
    with open_store(folder, cache) as store:
        bump(tensor)
        store.commit({"a": tensor})
        assert store.diff("main~1", "main").changed_elements == 1500
        assert same(store.checkout().load()["a"], tensor)
        assert store.verify(read_data=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: b"",
        lambda table: b"[]",
        lambda table: b"\xff{",
        lambda table: json.dumps(table | {"format": 2}).encode(),
        lambda table: json.dumps(table | {"blocks": [1 << 60]}).encode(),
        lambda table: json.dumps(table | {"blocks": ["x"]}).encode(),
        lambda table: json.dumps(table | {"tensors": [["[]", 0, 0, 1 << 60, 4096, ""]]}).encode(),
        lambda table: json.dumps(table | {"tensors": [["[]", 7, 0, 1, 4096, ""]]}).encode(),
        lambda table: json.dumps(table | {"tensors": [["[]", 0, -8, 4, 4096, ""]]}).encode(),
        lambda table: json.dumps(table | {"tensors": [["[]", 0, 0, 4, 4096, "no base64"]]}).encode(),
        lambda table: json.dumps(table | {"tensors": [[*row[:5], row[5][:-8]] for row in table["tensors"]]}).encode(),
    ],
)
def test_a_damaged_table_is_no_error(damage: Any, folder: Path, cache: Path) -> None:
    tensor = noise(1_500_000)
    with open_store(folder, cache) as store:
        store.commit({"a": tensor})
    path = slots(cache)[0] / "table.json"
    path.write_bytes(damage(json.loads(path.read_text())))
    with open_store(folder, cache) as store:
        bump(tensor)
        store.commit({"a": tensor})
        assert same(store.checkout().load()["a"], tensor)
        assert store.diff("main~1", "main").changed_elements == 1500


def test_two_writers_have_a_file_each(folder: Path, cache: Path, traffic: Traffic) -> None:
    one, two = noise(1_500_000), noise(1_400_000)
    with open_store(folder, cache) as first, open_store(folder, cache) as second:
        first.commit({"w": one}, branch="one")
        second.commit({"w": two}, branch="two")
    assert [table(slot)["clean"] for slot in slots(cache)] == [True, True]
    with open_store(folder, cache) as again:  # finds the file of the branch that it goes on with
        bump(two)
        traffic.clear()
        again.commit({"w": two}, branch="two")
        assert payload_bytes_read(traffic) < 3000
        assert same(again.checkout("two").load()["w"], two)
        assert same(again.checkout("one").load()["w"], one)


def test_other_tensors_frozen_ones_and_other_shapes(folder: Path, cache: Path) -> None:
    frozen = torch.nn.Parameter(torch.randn(70_000), requires_grad=False)
    states = [
        {"w": noise(900_000), "frozen": frozen},
        {"w": noise(1_100_000), "x": noise(5)},
        {"x": noise(5), "w": noise(300).float(), "frozen": frozen},
    ]
    for state in [*states, *states]:
        with open_store(folder, cache) as store:
            store.commit(state)
            store.commit(state)
            loaded = store.checkout().load()
            assert {name: raw(value) for name, value in loaded.items()} == {name: raw(value) for name, value in state.items()}
    with open_store(folder, cache) as store:
        assert store.verify(read_data=True)
        assert len(store.list_commits()) == 12


def _no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_room_for_the_file(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = noise(5000)
    with open_store(folder, cache, "disk") as store:
        with monkeypatch.context() as patched:
            patched.setattr(deltastore.baseline_file, "_reserve", _no_room)
            with pytest.raises(StoreFullError, match="no room for a baseline"):
                store.commit({"w": tensor})
        store.commit({"w": tensor})
        assert same(store.checkout().load()["w"], tensor)


def test_auto_takes_memory_while_there_is_room(folder: Path, cache: Path) -> None:
    with open_store(folder, cache, "auto") as store:
        store.commit({"w": noise(5000)})
        assert store._open_committer()._baseline.place == "ram"
    assert slots(cache) == []


def test_auto_says_when_it_takes_the_disk(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.baseline, "available_memory", lambda: 1 << 20)
    tensor = noise(1_200_000)
    with open_store(folder, cache, "auto") as store:
        with pytest.warns(UserWarning, match="kept on disk"):
            store.commit({"w": tensor})
        bump(tensor)
        store.commit({"w": tensor})
        assert store.diff("main~1", "main").changed_elements == 1200
        assert len(slots(cache)) == 1


def test_auto_without_room_anywhere_keeps_no_copy(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.baseline, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(deltastore.baseline_file, "_reserve", _no_room)
    tensor = noise(1_200_000)
    with open_store(folder, cache, "auto") as store:
        with pytest.warns(UserWarning, match="kept on disk"), pytest.warns(UserWarning, match="no room"):
            store.commit({"w": tensor})
        bump(tensor)
        store.commit({"w": tensor})
        assert store.diff("main~1", "main").changed_elements == 1200
        assert store._open_committer()._baseline.nbytes() == 0


def test_a_stream_decides_tensor_by_tensor(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.baseline, "available_memory", lambda: 3 << 20)
    tensors = {"a": noise(100), "b": noise(1_200_000)}
    with open_store(folder, cache, "auto") as store:
        with pytest.warns(UserWarning, match="kept on disk"):
            store.commit(iter(tensors.items()))
        bump(tensors["b"])
        store.commit(iter(tensors.items()))
        assert store.diff("main~1", "main").changed_elements == 1200


def test_no_baseline_finds_unchanged_chunks_by_their_fingerprint(folder: Path, cache: Path, traffic: Traffic) -> None:
    tensor = noise(2_500_000)
    with open_store(folder, cache, "none") as store:
        store.commit({"w": tensor})
        tensor[5] += 1
        traffic.clear()
        store.commit({"w": tensor})
        assert payload_bytes_read(traffic) < 3_000_000  # one chunk of three
        assert same(store.checkout().load()["w"], tensor)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_leaves_the_file_alone(folder: Path, cache: Path) -> None:
    tensor = noise(1_200_000)
    with open_store(folder, cache) as store:
        store.commit({"w": tensor})
        child = os.fork()
        if child == 0:
            status = 1
            try:
                bump(tensor, 3)
                store.commit({"w": tensor}, branch="child")
                store.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        bump(tensor)
        store.commit({"w": tensor})
        assert store.diff("main~1", "main").changed_elements == 1200
        assert store.diff("main~1", "child").changed_elements == 1200
        assert store.verify(read_data=True)
    assert sorted(table(slot)["clean"] for slot in slots(cache)) == [True, True]


def test_an_unknown_place_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="baseline='tape'"):
        DeltaStore.create(folder, baseline="tape")
