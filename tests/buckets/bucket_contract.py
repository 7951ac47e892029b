"""What every bucket must do. A subclass gives the bucket, and raw access to its objects that bypasses it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from deltastore import layout
from deltastore.buckets import Bucket, ObjectInfo, Upload, open_bucket
from deltastore.errors import AlreadyExistsError, InvalidInputError, StorageError

PACK = layout.pack_key(layout.new_id())


def keys(infos: Sequence[ObjectInfo]) -> list[str]:
    return sorted(info.key for info in infos)


class BucketContract:
    """Subclasses give the fixture `bucket`, and `raw_read` and `raw_write`."""

    def raw_read(self, bucket: Bucket, key: str) -> bytes:
        raise NotImplementedError

    def raw_write(self, bucket: Bucket, key: str, data: bytes) -> None:
        raise NotImplementedError

    # -- put and get --------------------------------------------------------------------------------------------------

    def test_put_joins_the_pieces(self, bucket: Bucket) -> None:
        array = np.arange(7, dtype=np.uint8)
        bucket.put([Upload(PACK, [b"head", memoryview(b"-xx-")[1:3], b"", array, bytearray(b"end")])])  # type: ignore[list-item]
        assert self.raw_read(bucket, PACK) == b"headxx" + array.tobytes() + b"end"

    def test_get_reads_what_is_there(self, bucket: Bucket) -> None:
        self.raw_write(bucket, "store.json", b"{}")
        self.raw_write(bucket, PACK, b"abc")
        assert (bucket.get("store.json"), bucket.get(PACK)) == (b"{}", b"abc")

    def test_put_of_nothing_changes_nothing(self, bucket: Bucket) -> None:
        bucket.put([])
        assert list(bucket.list("")) == []

    def test_free_bytes(self, bucket: Bucket) -> None:
        free = bucket.free_bytes()
        bucket.put([Upload(PACK, [b"x"])])
        assert free is None or free > 0
        assert (bucket.free_bytes() is None) == (free is None)  # known before the first object, or never

    def test_empty_objects(self, bucket: Bucket) -> None:
        bucket.put([Upload(PACK, []), Upload("store.json", [b""])])
        assert bucket.get(PACK) == bucket.get_range(PACK, 0, 0) == b""
        info = bucket.stat([PACK])[PACK]
        assert info is not None
        assert info.size == 0

    def test_many_pieces_and_many_objects(self, bucket: Bucket) -> None:
        pieces = [bytes([number % 256]) * (number % 5) for number in range(5000)]
        uploads = [Upload(layout.log_key(1, number), [b"%d" % number]) for number in range(50)]
        bucket.put([Upload(PACK, pieces), *uploads])
        assert self.raw_read(bucket, PACK) == b"".join(pieces)
        assert [self.raw_read(bucket, each.key) for each in uploads] == [b"%d" % number for number in range(50)]
        assert Upload(PACK, pieces).size == len(b"".join(pieces))

    def test_objects_are_never_rewritten(self, bucket: Bucket) -> None:
        bucket.put([Upload(PACK, [b"first"])])
        for other in (b"other", b"first+", b"firs", b""):
            with pytest.raises(AlreadyExistsError, match=f"{PACK} exists with other content"):
                bucket.put([Upload(PACK, [other])])
            assert self.raw_read(bucket, PACK) == b"first"

    def test_writing_the_same_again_is_a_retry(self, bucket: Bucket) -> None:
        bucket.put([Upload(PACK, [b"fi", b"rst"])])
        before = bucket.stat([PACK])[PACK]
        bucket.put([Upload(PACK, [b"first"]), Upload("store.json", [b"{}"])])
        assert bucket.stat([PACK])[PACK] == before
        assert self.raw_read(bucket, "store.json") == b"{}"

    def test_one_of_many_writers_of_a_key_wins(self, bucket: Bucket) -> None:
        key = layout.log_key(1, 7)
        outcomes: list[str] = []
        barrier = threading.Barrier(8)

        def write(number: int) -> None:
            barrier.wait()
            try:
                bucket.put([Upload(key, [b"writer %d" % number])])
                outcomes.append(f"writer {number}")
            except AlreadyExistsError:
                outcomes.append("lost")

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes)[:7] == ["lost"] * 7
        assert self.raw_read(bucket, key).decode() in outcomes

    # -- ranges -------------------------------------------------------------------------------------------------------

    def test_ranges(self, bucket: Bucket) -> None:
        data = bytes(range(256)) * 10
        self.raw_write(bucket, PACK, data)
        for start, length in [(0, 0), (0, 1), (255, 258), (0, 2560), (2560, 0), (2559, 1)]:
            assert bucket.get_range(PACK, start, length) == data[start : start + length]

    def test_short_reads_are_errors(self, bucket: Bucket) -> None:
        self.raw_write(bucket, PACK, b"0123456789")
        for start, length in [(0, 11), (10, 1), (11, 0), (5, 1 << 50), (1 << 50, 1)]:
            with pytest.raises(StorageError, match=PACK) as caught:
                bucket.get_range(PACK, start, length)
            assert (caught.value.kind, caught.value.key) == ("truncated", PACK)
        for start, length in [(-1, 1), (0, -1)]:
            with pytest.raises(InvalidInputError, match=PACK):
                bucket.get_range(PACK, start, length)

    def test_missing_objects(self, bucket: Bucket) -> None:
        self.raw_write(bucket, PACK, b"x")
        other = layout.pack_key(layout.new_id())
        for read in (lambda: bucket.get(other), lambda: bucket.get_range(other, 0, 1), lambda: bucket.copy(other, PACK)):
            with pytest.raises(StorageError, match=other) as caught:
                read()
            assert (caught.value.kind, caught.value.key) == ("missing", other)

    def test_many_threads_read(self, bucket: Bucket) -> None:
        data = bytes(range(256)) * 100
        self.raw_write(bucket, PACK, data)
        wrong: list[int] = []

        def read(seed: int) -> None:
            for number in range(200):
                start = (seed * 131 + number * 17) % 20_000
                if bucket.get_range(PACK, start, 300) != data[start : start + 300]:
                    wrong.append(start)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    # -- stat, list, copy, delete -------------------------------------------------------------------------------------

    def test_stat(self, bucket: Bucket) -> None:
        before = datetime.now(UTC) - timedelta(seconds=2)
        bucket.put([Upload(PACK, [b"12345"])])
        found = bucket.stat([PACK, "store.json", "epochs/000001.json"])
        info = found.pop(PACK)
        assert info is not None
        assert (info.key, info.size) == (PACK, 5)
        assert before <= info.modified <= datetime.now(UTC) + timedelta(seconds=2)
        assert found == {"store.json": None, "epochs/000001.json": None}

    def test_a_folder_is_no_object(self, bucket: Bucket) -> None:
        bucket.put([Upload(layout.log_key(1, 1), [b"x"])])
        assert bucket.stat(["refs/log", "refs/log/000001"]) == {"refs/log": None, "refs/log/000001": None}
        with pytest.raises(StorageError):
            bucket.get("refs/log")

    def test_list_counts_whole_components(self, bucket: Bucket) -> None:
        names = ["store.json", "packs/aa/1", "packs/aa/2", "packs/ab/1", "packs/a/1", "refs/log/1/2/3", "refs/logs/1", "epochs/1"]
        bucket.put([Upload(name, [name.encode()]) for name in names])
        everything = list(bucket.list(""))
        assert keys(everything) == sorted(names)
        assert all(info.size == len(info.key) for info in everything)
        assert bucket.stat([info.key for info in everything]) == {info.key: info for info in everything}
        assert keys(list(bucket.list("packs"))) == ["packs/a/1", "packs/aa/1", "packs/aa/2", "packs/ab/1"]
        assert keys(list(bucket.list("packs/a"))) == ["packs/a/1"]
        assert keys(list(bucket.list("refs/log"))) == ["refs/log/1/2/3"]
        assert keys(list(bucket.list("packs/aa/1"))) == ["packs/aa/1"]
        assert keys(list(bucket.list("store.json"))) == ["store.json"]
        assert list(bucket.list("manifests")) == []

    def test_list_while_objects_come_and_go(self, bucket: Bucket) -> None:
        bucket.put([Upload(f"packs/aa/{number}", [b""]) for number in range(5)])
        listing = bucket.list("packs")
        first = next(iter(listing)).key
        bucket.delete([info.key for info in bucket.list("packs") if info.key != first])
        assert {info.key for info in listing} <= {f"packs/aa/{number}" for number in range(5)}

    def test_copy(self, bucket: Bucket) -> None:
        target = layout.log_key(1, 1)
        bucket.put([Upload(PACK, [b"content"])])
        bucket.copy(PACK, target)
        bucket.copy(PACK, target)
        assert self.raw_read(bucket, target) == self.raw_read(bucket, PACK) == b"content"
        bucket.put([Upload("store.json", [b"{}"])])
        with pytest.raises(AlreadyExistsError, match=target):
            bucket.copy("store.json", target)

    def test_delete(self, bucket: Bucket) -> None:
        bucket.put([Upload(f"packs/aa/{number}", [b"x"]) for number in range(4)])
        bucket.delete(["packs/aa/1", "packs/bb/none", "packs/aa/2", "packs/aa/1"])
        assert keys(list(bucket.list(""))) == ["packs/aa/0", "packs/aa/3"]
        bucket.put([Upload("packs/aa/1", [b"new"])])
        assert bucket.get("packs/aa/1") == b"new"

    # -- keys and addresses -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/",
            "/etc/passwd",
            "packs",
            "packs/",
            "packs//x",
            "packs/../store.json",
            "packs/./x",
            "../packs/x",
            "packs/a\0b",
            "packs/a\\b",
            "packs/\ud800",
            "packs/" + "x" * 256,
            "packs" + "/x" * 600,
            "packs/" + "ä" * 128,
            "index.sqlite",
            ".staging/x",
            "other/x",
            "store.json/x",
            "PACKS/x",
        ],
    )
    def test_keys_of_no_store_are_refused(self, bucket: Bucket, key: str) -> None:
        bucket.put([Upload("store.json", [b"{}"])])
        calls = (
            lambda: bucket.put([Upload("packs/fine", [b"x"]), Upload(key, [b"x"])]),
            lambda: bucket.get(key),
            lambda: bucket.get_range(key, 0, 0),
            lambda: bucket.stat([key]),
            lambda: bucket.delete([key]),
            lambda: bucket.copy("store.json", key),
            lambda: bucket.copy(key, "packs/x"),
        )
        for call in calls:
            with pytest.raises(InvalidInputError, match="is not the key of an object") as caught:
                call()
            assert len(str(caught.value)) < 500
        assert keys(list(bucket.list(""))) == ["store.json"]

    @pytest.mark.parametrize("prefix", ["/", "..", "packs/", "packs/..", "other", ".staging", "index.sqlite", "\0"])
    def test_prefixes_of_no_store_are_refused(self, bucket: Bucket, prefix: str) -> None:
        with pytest.raises(InvalidInputError):
            list(bucket.list(prefix))

    def test_the_longest_key(self, bucket: Bucket) -> None:
        key = "packs/" + "/".join(["x" * 255] * 3)
        bucket.put([Upload(key, [b"x"])])
        assert bucket.get(key) == b"x"

    def test_the_address_opens_it_again(self, bucket: Bucket) -> None:
        bucket.put([Upload(PACK, [b"content"])])
        again = open_bucket(bucket.url)
        assert again.url == bucket.url
        assert again.get(PACK) == b"content"
        again.close()
        assert bucket.get(PACK) == b"content"
