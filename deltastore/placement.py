"""Where the parts of a version go: new manifests and structure, what is reused of the parent, and who keeps whom alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltastore import layout
from deltastore.buckets.base import Upload
from deltastore.chunk_reader import ChunkReader
from deltastore.chunk_writer import WrittenPack
from deltastore.depths import Depths, chain_packs
from deltastore.formats import ManifestPlace, ObjectPlace, PackPlace, Placement, StructureDocument, to_bytes
from deltastore.index.records import ObjectKind
from deltastore.manifests import ChunkRow, Manifest
from deltastore.scanner import Content
from deltastore.versions import Version


@dataclass(frozen=True, slots=True)
class NewObject:
    """An object that is to be sent: its kind, its size in bytes, and its bytes."""

    kind: ObjectKind
    size: int
    upload: Upload

    @property
    def key(self) -> str:
        """Its key in the bucket."""
        return self.upload.key


@dataclass(frozen=True, slots=True)
class Placed:
    """A content with a place for each of its parts; the same for every parent that a rebase may give it.

    Attributes:
        placement: for the commit document, but for its height.
        manifests: of the version, in the order of the placement.
        new: structure and manifests that are not in the bucket yet.
        edges: (manifest key, pack key) of the new manifests.
    """

    placement: Placement
    manifests: tuple[Manifest, ...]
    new: tuple[NewObject, ...]
    edges: tuple[tuple[str, str], ...]

    def targets(self) -> Iterator[str]:
        """Keys that the commit document itself keeps alive: structure, manifests, and the packs that it brought."""
        yield self.placement.structure.key
        yield from (place.key for place in self.placement.manifests)
        yield from (place.key for place in self.placement.packs)

    def reused(self) -> set[str]:
        """Keys of earlier commits that this one needs."""
        own = {each.key for each in self.new} | {pack.key for pack in self.placement.packs}
        return ({target for _, target in self.edges} | set(self.targets())) - own


def place(content: Content, packs: Sequence[WrittenPack], parent: Version | None, depths: Depths, reader: ChunkReader) -> Placed:
    """Build the manifests and the structure that differ from the parent version's."""
    new: list[NewObject] = []
    structure = _place_structure(content.structure, parent, new)
    shards: dict[int, list[ChunkRow]] = {}
    for stored, rows in zip(content.structure.tensors, content.rows, strict=True):
        if rows:
            shards.setdefault(stored.shard, []).extend(rows)
    manifests: list[Manifest] = []
    places: list[ManifestPlace] = []
    tables: list[tuple[str, Manifest]] = []  # of new manifests, by key
    for shard in range(len(shards)):
        known = _unchanged(shard, shards[shard], parent)
        if known is not None:
            manifest, where = known
        else:
            rows = shards[shard]
            manifest = Manifest.from_rows([reader.pack_ref(pack) for pack in chain_packs(depths, rows)], rows)
            body = manifest.build()
            key = layout.manifest_key(layout.new_id())
            new.append(NewObject("manifest", len(body), Upload(key, [body])))
            where = ManifestPlace(key=key, size=len(body), rows=len(rows), packs=None)
            tables.append((key, manifest))
        manifests.append(manifest)
        places.append(where)
    table = sorted({ref.pack_id for _, manifest in tables for ref in manifest.packs})
    numbers = {pack_id: number for number, pack_id in enumerate(table)}
    own = {key: tuple(numbers[ref.pack_id] for ref in manifest.packs) for key, manifest in tables}
    placement = Placement(
        height=0,
        structure=structure,
        manifests=tuple(each.model_copy(update={"packs": own.get(each.key)}) for each in places),
        pack_table=tuple(table),
        packs=tuple(PackPlace(key=p.key, size=p.size, head=p.head, span=p.span, rows=p.rows) for p in packs),
        values=content.values,
    )
    edges = tuple((key, layout.pack_key(ref.pack_id)) for key, manifest in tables for ref in manifest.packs)
    return Placed(placement, tuple(manifests), tuple(new), edges)


def _place_structure(structure: StructureDocument, parent: Version | None, new: list[NewObject]) -> ObjectPlace:
    if parent is not None and parent.structure == structure:
        return parent.document.placement.structure
    body = to_bytes(structure)
    key = layout.structure_key(layout.new_id())
    new.append(NewObject("structure", len(body), Upload(key, [body])))
    return ObjectPlace(key=key, size=len(body))


def _unchanged(shard: int, rows: list[ChunkRow], parent: Version | None) -> tuple[Manifest, ManifestPlace] | None:
    """The parent's manifest of this number when it holds exactly these rows."""
    if parent is None or shard >= len(parent.document.placement.manifests):
        return None
    manifest = parent.manifest(shard)
    if manifest.rows(0, len(manifest)) != rows:
        return None
    return manifest, parent.document.placement.manifests[shard]
