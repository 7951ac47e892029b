from __future__ import annotations


class Traffic:
    """What passes between a folder and the library: (key, start, length) of reads, keys of writes."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.writes: list[str] = []

    def read_keys(self, kind: str) -> list[str]:
        return [key for key, _, _ in self.reads if key.startswith(kind)]

    def read_bytes(self, kind: str) -> int:
        return sum(length for key, _, length in self.reads if key.startswith(kind))

    def written(self, kind: str) -> list[str]:
        return [key for key in self.writes if key.startswith(kind)]

    def clear(self) -> None:
        self.reads.clear()
        self.writes.clear()
