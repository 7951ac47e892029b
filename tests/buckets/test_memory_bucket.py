from __future__ import annotations

from datetime import UTC, datetime

import pytest
from bucket_contract import BucketContract

from deltastore.buckets import Bucket, FolderBucket, MemoryBucket, Upload, open_bucket
from deltastore.errors import InvalidInputError
from deltastore.layout import new_id


class TestMemoryBucket(BucketContract):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return open_bucket(f"memory://{new_id()}")

    def raw_read(self, bucket: Bucket, key: str) -> bytes:
        assert isinstance(bucket, MemoryBucket)
        return bucket._objects[key][0]

    def raw_write(self, bucket: Bucket, key: str, data: bytes) -> None:
        assert isinstance(bucket, MemoryBucket)
        bucket._objects[key] = data, datetime.now(UTC)


def test_buckets_without_a_name_are_apart() -> None:
    first, second = MemoryBucket(), MemoryBucket()
    first.put([Upload("store.json", [b"{}"])])
    assert second.stat(["store.json"]) == {"store.json": None}


def test_names_are_shared_by_the_process() -> None:
    name = new_id()
    assert open_bucket(f"memory://{name}") is open_bucket(f"memory://{name}")
    assert open_bucket(f"memory://{name}") is not open_bucket(f"memory://{name}x")


def test_capabilities() -> None:
    assert not MemoryBucket.capabilities.persistent
    assert FolderBucket.capabilities.persistent
    assert MemoryBucket().free_bytes() is None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "not the address"),
        ("a\0b", "not the address"),
        ("hf://buckets/acme/run", "hf:// is not in this version"),
        ("s3://bucket/x", "s3:// is not in this version"),
        ("gs://bucket/x", "unknown kind of address"),
        ("memory://", "write memory://name"),
        ("memory://a/b", "write memory://name"),
        ("file://host/path", "not the address of a folder here"),
        ("file://", "not the address of a folder here"),
    ],
)
def test_addresses_of_no_bucket(address: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_bucket(address)
