"""Which files of a folder are its weights, and what the index of a sharded checkpoint says. Opens no weight file.

Safetensors come first: where there are any, files of `torch.save` beside them are other files, such as a trainer's state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from deltastore.canonical import show
from deltastore.checkpoint_writer import INDEX_NAME, MAX_HEADER_BYTES, WEIGHTS_NAME
from deltastore.errors import FormatError, InvalidInputError, NotFoundError

__all__ = ["PICKLED_SUFFIXES", "Weights", "find_weights", "merge_shards", "unique_object"]

PICKLED_SUFFIXES = (".pt", ".pth", ".bin")

# What trainers save beside the weights with `torch.save`.
_TRAINER_STATE = re.compile(r"(optimizer|scheduler|scaler|sampler|training_args|rng_state|random_states)([_.-].*)?\.(pt|pth|bin)")

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight files of a folder, by name.

    Attributes:
        shards: one or more files, in the order of the index.
        index: the name of the index, and `weight_map` from tensor names to shards; None and empty for one file.
        pickled: files of `torch.save`, not safetensors.
    """

    folder: Path
    shards: tuple[str, ...]
    pickled: bool
    index: str | None
    weight_map: dict[str, str]

    @property
    def path(self) -> Path:
        """The one file, or the index of several; for messages."""
        return self.folder / (self.shards[0] if self.index is None else self.index)

    @property
    def names(self) -> set[str]:
        """All these files, with the index."""
        return {*self.shards, *([] if self.index is None else [self.index])}


@dataclass(frozen=True, slots=True)
class _Kind:
    pickled: bool
    suffixes: tuple[str, ...]
    preferred: tuple[str, ...]  # of several files, the first of these that is there
    index: str

    @property
    def described(self) -> str:
        return " or ".join(self.suffixes)


_KINDS = (
    _Kind(False, (".safetensors",), (WEIGHTS_NAME,), INDEX_NAME),
    _Kind(True, PICKLED_SUFFIXES, ("pytorch_model.bin", "adapter_model.bin"), "pytorch_model.bin.index.json"),
)


def find_weights(folder: Path) -> Weights:
    """The weights of a folder.

    Raises NotFoundError when there are none, InvalidInputError when they are ambiguous, FormatError for a malformed index, or
    one that names files that are not there.
    """
    names = sorted(entry.name for entry in folder.iterdir() if not entry.is_dir())
    for kind in _KINDS:
        weights = [name for name in names if name.endswith(kind.suffixes)]
        if kind.pickled:
            weights = [name for name in weights if not _TRAINER_STATE.fullmatch(name)]
        indexes = [name for name in names if name.endswith(tuple(f"{suffix}.index.json" for suffix in kind.suffixes))]
        if weights or indexes:
            return _choose(folder, kind, weights, indexes)
    raise NotFoundError(
        f"{folder} holds no .safetensors file, and no {_KINDS[1].described} file with weights; save the model there with "
        "`save_pretrained`, or name a file"
    )


def _choose(folder: Path, kind: _Kind, weights: list[str], indexes: list[str]) -> Weights:
    preferred = next((name for name in kind.preferred if name in weights), None)
    index = kind.index if kind.index in indexes else indexes[0] if len(indexes) == 1 else None
    if index is not None:
        weight_map = _read_index(folder / index, kind)
        shards = tuple(dict.fromkeys(weight_map.values()))
        if preferred is not None and preferred not in shards:
            raise InvalidInputError(f"{folder} has {preferred} and {index}, which names other files; remove the stale one")
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise FormatError(f"{folder}: {index} names {show(missing)}, which are not there; fetch or save the checkpoint again")
        return Weights(folder, shards, kind.pickled, index, weight_map)
    chosen = preferred or (weights[0] if len(weights) == 1 else None)
    if chosen is None:
        raise InvalidInputError(
            f"{folder} holds {len(weights)} {kind.described} files and no {kind.index}; name one of {show(weights)}"
        )
    return Weights(folder, (chosen,), kind.pickled, None, {})


def _read_index(path: Path, kind: _Kind) -> dict[str, str]:
    if not path.is_file() or path.stat().st_size > MAX_HEADER_BYTES:
        raise FormatError(f"{path} is no index of {kind.described} files: expected a file of at most {MAX_HEADER_BYTES} bytes")
    try:
        index = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique_object)
    except (ValueError, RecursionError, FormatError) as error:
        raise FormatError(f"{path}: {str(error)[:200]}") from None
    weight_map = index.get("weight_map") if type(index) is dict else None
    if type(weight_map) is not dict or not all(type(shard) is str for shard in weight_map.values()):
        raise FormatError(f"{path}: expected an object `weight_map` from tensor names to file names")
    for shard in set(weight_map.values()):
        if not shard.endswith(kind.suffixes) or PurePosixPath(shard).name != shard or "\\" in shard or "\0" in shard:
            raise FormatError(f"{path}: {show(shard)} is no name of a {kind.described} file beside it")
    return weight_map


def merge_shards(weights: Weights, opened: Mapping[str, Mapping[str, Leaf]]) -> dict[str, Leaf]:
    """The content of all shards in the order of the index. Raises FormatError when it is not what the index says."""
    merged: dict[str, Leaf] = {}
    for name, shard in weights.weight_map.items():
        if name not in opened[shard]:
            where = f"which {weights.index} says is there"
            raise FormatError(f"{weights.folder / shard} has no tensor {show(name)}, {where}; save it again")
        merged[name] = opened[shard][name]
    for shard, content in opened.items():
        for name in content:
            said = weights.weight_map.get(name)
            if said != shard:
                where = "does not name" if said is None else f"says is in {said}"
                found = f"has a tensor {show(name)}, which {weights.index} {where}"
                raise FormatError(f"{weights.folder / shard} {found}; save it again")
    return merged


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs, for `object_pairs_hook`. Raises FormatError when a name comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise FormatError(f"the name {show(name)} comes twice in the header")
    return result
