from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deltastore import formats, layout, schemas
from deltastore.canonical import dumps
from deltastore.errors import FormatError, UnsupportedFormatError

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = ROOT / "schemas" / "v1"
EXAMPLES = ROOT / "schemas" / "examples" / "documents"
VALID = sorted((EXAMPLES / "valid").iterdir())
INVALID = sorted((EXAMPLES / "invalid").iterdir())

PARSERS: dict[str, Callable[[bytes, str], Any]] = {
    "store": formats.parse_store,
    "epoch": formats.parse_epoch,
    "commit": formats.parse_commit,
    "structure": formats.parse_structure,
    "ref": formats.parse_log_entry,
    "snapshot": formats.parse_snapshot,
}
KEY = "some/object.json"


def kind_of(path: Path) -> str:
    return path.name.split(".")[0]


def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def example(name: str) -> dict[str, Any]:
    value = json.loads((EXAMPLES / "valid" / f"{name}.json").read_bytes())
    assert isinstance(value, dict)
    return value


def parse(kind: str, value: object) -> Any:
    return PARSERS[kind](dumps(value), KEY)


# -- schemas and examples ---------------------------------------------------------------------------------------------


def test_schemas_are_what_the_classes_say(tmp_path: Path) -> None:
    assert schemas.main([str(tmp_path)]) == 0
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in SCHEMAS.iterdir()}
    assert made == kept, "schemas/v1 is not what deltastore/formats.py says: run `python -m deltastore.schemas schemas/v1`"


def test_schemas_need_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert schemas.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_every_kind_has_examples() -> None:
    assert {kind_of(path) for path in VALID} == {kind_of(path) for path in INVALID} == set(formats.DOCUMENTS)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_examples(path: Path) -> None:
    data = path.read_bytes()
    validator(kind_of(path)).validate(json.loads(data))
    document = PARSERS[kind_of(path)](data, path.name)
    assert formats.to_bytes(document) == data  # canonical, and nothing is lost
    assert PARSERS[kind_of(path)](formats.to_bytes(document), path.name) == document


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_examples(path: Path) -> None:
    data = path.read_bytes()
    with pytest.raises(FormatError) as caught:
        PARSERS[kind_of(path)](data, path.name)
    assert path.name in str(caught.value)
    assert not validator(kind_of(path)).is_valid(json.loads(data))


def test_every_field_is_required() -> None:
    for path in VALID:
        value = json.loads(path.read_bytes())
        schema = validator(kind_of(path))
        for name in value:
            damaged = {key: each for key, each in value.items() if key != name}
            with pytest.raises(FormatError):
                parse(kind_of(path), damaged)
            assert not schema.is_valid(damaged), f"{path.name}: {name}"


# -- what documents may hold ------------------------------------------------------------------------------------------


def test_commit_id_is_that_of_the_identity() -> None:
    value = example("commit")
    first = parse("commit", value)
    value["placement"]["height"] += 1
    value["publish"]["ref"] = "other"
    assert parse("commit", value).commit_id() == first.commit_id()
    value["identity"]["message"] += "."
    assert parse("commit", value).commit_id() != first.commit_id()


def test_long_and_strange_names_survive() -> None:
    names = ["x" * 100_000, "a\0b", "", "\U0001f600", "e\u0301", "\u00e9", "../../etc/passwd", "\n"]
    structure = formats.StructureDocument(
        tree={"d": [[name, {"x": number}] for number, name in enumerate(names)]},
        tensors=tuple(formats.StoredTensor("bfloat16", (number, 3), 0, number) for number in range(len(names))),
        files=tuple(formats.StoredFile(name=name, size=1, data=b"\xff", tensor=None) for name in names),
    )
    parsed = formats.parse_structure(formats.to_bytes(structure), KEY)
    assert parsed == structure
    assert [file.name for file in parsed.files] == names
    assert parsed.files[0].data == b"\xff"
    assert parsed.tensors[2].shape == (2, 3)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.text(alphabet=st.characters(exclude_categories=["Cs"]))
        | st.builds(lambda number: {"i": str(number)}, st.integers()),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["d", "t", "b"]), inner, max_size=2),
        max_leaves=10,
    )
)
@settings(max_examples=50, deadline=None)
def test_raw_values_are_kept_as_they_are(value: Any) -> None:
    document = example("commit")
    document["identity"]["metadata"] = {"key": value}
    document["placement"]["values"] = [value]
    parsed = parse("commit", document)
    assert parsed.identity["metadata"] == {"key": value}
    assert parsed.placement.values == [value]
    assert formats.to_bytes(parsed) == dumps(document)


def test_a_document_does_not_share_what_it_was_made_from() -> None:
    value = example("commit")
    document = formats.CommitDocument(
        identity=value["identity"],
        placement=formats.Placement.model_validate(value["placement"]),
        publish=formats.Publish.model_validate(value["publish"]),
    )
    before = document.commit_id()
    value["identity"]["parents"] = []
    assert document.commit_id() == before
    with pytest.raises(ValidationError, match="frozen"):
        document.publish = None  # type: ignore[misc, assignment]


def test_deep_trees() -> None:
    tree: Any = {"x": 0}
    for _ in range(60):
        tree = {"d": [["k", tree]]}
    value = example("structure")
    value["tree"] = tree
    assert parse("structure", value).tree == tree
    with pytest.raises(FormatError, match=KEY):
        formats.parse_structure(b"[" * 100_000 + b"]" * 100_000, KEY)


def test_a_steady_commit_document_stays_small() -> None:
    value = example("commit")
    ids = [layout.new_id() for _ in range(22)]
    value["placement"].update(
        pack_table=ids[:20],
        manifests=[
            {"key": layout.manifest_key(ids[20]), "size": 123_456, "rows": 4000, "packs": list(range(20))},
            {"key": layout.manifest_key(ids[21]), "size": 123_456, "rows": 2700, "packs": list(range(20))},
        ],
        packs=[{"key": layout.pack_key(ids[0]), "size": 12_345_678, "head": 464_000, "span": 1, "rows": 6700}],
        values=[],
    )
    assert len(formats.to_bytes(parse("commit", value))) <= 2560


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("commit", lambda d: d["placement"]["manifests"][0].update(packs=[2]), "beyond the pack_table of 2"),
        ("commit", lambda d: d["placement"].update(pack_table=[d["placement"]["pack_table"][0]] * 2), "twice"),
        ("commit", lambda d: d["placement"]["packs"][0].update(key="packs/00/" + layout.new_id()[:-2] + "4a"), "packs.0.key"),
        ("commit", lambda d: d["placement"].update(values={"tensor": -1}), "values"),
        ("commit", lambda d: d["identity"].update(time="2026-01-02T03:04:05Z"), "identity.time"),
        ("structure", lambda d: d["tensors"].__setitem__(0, ["bfloat16", [2**40, 2**40], 0, 0]), "more elements"),
        ("structure", lambda d: d["files"][1].update(tensor=3), "not there"),
        ("structure", lambda d: d["files"][1].update(tensor=1), "not its bytes"),
        ("structure", lambda d: d["files"][1].update(data=""), "either data or tensor"),
        ("structure", lambda d: d["files"][0].update(data=None), "either data or tensor"),
        ("structure", lambda d: d["files"][0].update(size=3), "its data has 2 bytes"),
        ("structure", lambda d: d["files"][0].update(data="e31="), "base64"),
        ("structure", lambda d: d["files"][0].update(data="A" * 8192, size=6144), "files.0.data"),
        ("structure", lambda d: d["files"][1].update(name="config.json"), "same name"),
        ("ref", lambda d: d.update(action="create"), "create with old"),
        ("ref", lambda d: d.update(name="a" * 256), "name"),
        ("snapshot", lambda d: d.update(format="1"), "no format number"),
        ("snapshot", lambda d: d.update(format=True), "no format number"),
        ("snapshot", lambda d: d.update(kind="commit"), "kind 'commit', expected 'snapshot'"),
    ],
)
def test_what_does_not_fit_together(kind: str, change: Callable[[Any], None], message: str) -> None:
    value = example("ref.move" if kind == "ref" else kind)
    change(value)
    with pytest.raises(FormatError, match=message) as caught:
        parse(kind, value)
    assert KEY in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b'{"format":1,"format":1}',
        b'{"format":1.0}',
        b'{"format":NaN}',
        b'{"format":1e400}',
        b'{"format":' + b"9" * 5000 + b"}",
        b'{"format":1,"kind":"\\ud800"}',
        b'{"format":1,"kind":{"a":"\\uDFFF"}}',
        b'{"format":1} {}',
        b'\xef\xbb\xbf{"format":1}',
    ],
)
def test_strange_json_is_refused(data: bytes) -> None:
    for parser in PARSERS.values():
        with pytest.raises(FormatError, match=KEY):
            parser(data, KEY)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_damaged_documents_give_a_format_error_or_a_document(path: Path) -> None:
    data = path.read_bytes()
    for end in range(len(data)):
        with pytest.raises(FormatError, match=KEY):
            PARSERS[kind_of(path)](data[:end], KEY)
    refused = 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            PARSERS[kind_of(path)](bytes(damaged), KEY)
        except FormatError:
            refused += 1
    assert refused > len(data) // 3


def test_newer_formats_ask_for_an_upgrade() -> None:
    for path in VALID:
        value = json.loads(path.read_bytes())
        value["format"] = 2
        with pytest.raises(UnsupportedFormatError, match=r"format 2.*upgrade deltastore"):
            parse(kind_of(path), value)


@pytest.mark.parametrize("feature", ["pieces", "external", "from-the-future", "x" * 10_000])
def test_stores_with_unknown_features_are_refused_by_name(feature: str) -> None:
    value = example("store")
    value["features"] = [feature]
    with pytest.raises(UnsupportedFormatError, match=feature[:50]) as caught:
        parse("store", value)
    assert "upgrade" in str(caught.value)
    assert len(str(caught.value)) < 500


# -- log entries ------------------------------------------------------------------------------------------------------


def test_the_log_entry_of_a_commit_is_its_document() -> None:
    data = (EXAMPLES / "valid" / "commit.json").read_bytes()
    assert formats.parse_log_entry(data, KEY) == formats.parse_commit(data, KEY)


def test_unknown_log_entries() -> None:
    optional = {"format": 1, "kind": "note", "optional": True, "anything": ["goes", {"here": None}]}
    assert formats.parse_log_entry(dumps(optional), KEY) is None
    for kind in ("forget", "repack", "sweep", "note"):
        with pytest.raises(UnsupportedFormatError, match=kind):
            formats.parse_log_entry(dumps({"format": 1, "kind": kind, "optional": False}), KEY)
    for broken in ({"format": 1, "kind": "note"}, {"format": 1, "optional": True}, {"format": 1, "kind": "note", "optional": 1}):
        with pytest.raises(FormatError, match="without kind and optional"):
            formats.parse_log_entry(dumps(broken), KEY)
