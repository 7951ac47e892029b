from __future__ import annotations

import os
import threading
import time
import uuid

import pytest

from deltastore import layout
from deltastore.errors import InvalidInputError

ID = "0198f1c2-7a10-7b3c-9d4e-5f607182934a"
COMMIT = "0123456789abcdef" * 4


def test_ids_are_uuid7_of_now_that_rise_strictly() -> None:
    before = time.time_ns() // 1_000_000
    ids = [layout.new_id() for _ in range(5000)]
    assert ids == sorted(set(ids))
    for text in (ids[0], ids[-1]):
        parsed = uuid.UUID(text)
        assert (parsed.version, parsed.variant, str(parsed)) == (7, uuid.RFC_4122, text)
        # more than 4096 ids in a millisecond borrow from the next ones
        assert before <= parsed.int >> 80 <= time.time_ns() // 1_000_000 + 5
    assert len({text[-2:] for text in ids}) == 256  # the folders that they are spread over


def test_ids_of_many_threads_differ() -> None:
    made: list[list[str]] = [[] for _ in range(8)]

    def make(into: list[str]) -> None:
        into.extend(layout.new_id() for _ in range(2000))

    threads = [threading.Thread(target=make, args=(each,)) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set().union(*made)) == 16000
    assert all(each == sorted(each) for each in made)


def test_ids_after_a_fork_differ() -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, "".join(layout.new_id() for _ in range(100)).encode())
        os._exit(0)
    mine = {layout.new_id() for _ in range(100)}
    os.waitpid(child, 0)
    text = os.read(read_end, 1 << 16).decode()
    os.close(read_end)
    os.close(write_end)
    theirs = {text[at : at + 36] for at in range(0, len(text), 36)}
    assert len(mine | theirs) == 200


def test_keys() -> None:
    assert layout.pack_key(ID) == f"packs/4a/{ID}"
    assert layout.manifest_key(ID) == f"manifests/4a/{ID}"
    assert layout.structure_key(ID) == f"structures/4a/{ID}"
    assert layout.pack_id(layout.pack_key(ID)) == ID
    assert layout.commit_key(COMMIT, ID) == f"commits/01/{COMMIT}.{ID}.json"
    assert layout.log_key(3, 1_234_567) == "refs/log/000003/000001234/000001234567.json"
    assert layout.snapshot_key(3, 512) == "refs/snapshot/000003/000000000512.json"
    assert layout.epoch_key(12) == "epochs/000012.json"


def test_keys_are_read_back() -> None:
    assert layout.parse_commit_key(layout.commit_key(COMMIT, ID)) == (COMMIT, ID)
    assert layout.parse_log_key(layout.log_key(3, 1_234_567)) == (3, 1_234_567)
    assert layout.parse_snapshot_key(layout.snapshot_key(layout.MAX_EPOCH, layout.MAX_SEQ)) == (999999, 999999999999)
    assert layout.parse_epoch_key(layout.epoch_key(0)) == 0
    assert layout.parse_log_key("refs/log/000003/000000000/000001234567.json") is None  # in the folder of another thousand
    assert layout.parse_commit_key(f"commits/ff/{COMMIT}.{ID}.json") is None


def test_log_keys_sort_like_their_numbers() -> None:
    numbers = [(1, 0), (1, 9), (1, 10), (1, 999), (1, 1000), (1, 123_456), (2, 0), (10, 5)]
    keys = [layout.log_key(*each) for each in numbers]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (f"packs/4a/{ID}", "pack"),
        (f"manifests/4a/{ID}", "manifest"),
        (f"structures/4a/{ID}", "structure"),
        (f"commits/01/{COMMIT}.{ID}.json", "commit"),
        ("refs/log/000001/000000000/000000000007.json", "log"),
        ("refs/snapshot/000001/000000000256.json", "snapshot"),
        ("epochs/000001.json", "epoch"),
        ("store.json", "store"),
        (f"packs/4b/{ID}", None),
        (f"packs/4a/{ID}\n", None),
        (f"packs/4a/../4a/{ID}", None),
        ("index.sqlite", None),
        ("refs/log/1/0/7.json", None),
        ("refs/log/٠٠٠٠٠١/000000000/000000000007.json", None),  # digits of another script
        ("", None),
    ],
)
def test_kind_of_a_key(key: str, kind: str | None) -> None:
    assert layout.object_kind(key) == kind


@pytest.mark.parametrize("text", ["", "x", ID.upper(), ID + "\n", str(uuid.UUID(int=0)), "../" + ID, "a" * 100_000])
def test_other_ids_have_no_key(text: str) -> None:
    for make in (layout.pack_key, layout.manifest_key, layout.structure_key):
        with pytest.raises(InvalidInputError, match="not a uuid7") as caught:
            make(text)
        assert len(str(caught.value)) < 300
    with pytest.raises(InvalidInputError, match="not a uuid7"):
        layout.commit_key(COMMIT, text)
    with pytest.raises(InvalidInputError, match="64 hex digits"):
        layout.commit_key(text, ID)
    with pytest.raises(InvalidInputError, match="not the key of a pack"):
        layout.pack_id(f"packs/4a/{text}")


def test_numbers_without_a_key() -> None:
    for make in (layout.log_key, layout.snapshot_key):
        for epoch, seq in [(-1, 0), (10**6, 0), (0, -1), (0, 10**12)]:
            with pytest.raises(InvalidInputError, match="outside"):
                make(epoch, seq)
    with pytest.raises(InvalidInputError, match="outside"):
        layout.epoch_key(10**6)
