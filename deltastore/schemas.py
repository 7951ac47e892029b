"""JSON Schemas of the documents of format 1, made from `deltastore.formats`.

`python -m deltastore.schemas schemas/v1` writes them; a test compares what is checked in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deltastore.formats import DOCUMENTS


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a kind of document. All fields are required."""
    body = DOCUMENTS[kind].model_json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:deltastore:schema:1:{kind}",
        **body,
    }


def schema_files() -> dict[str, str]:
    """File name and text of every schema."""
    return {
        f"{kind}.schema.json": json.dumps(schema(kind), indent=2, sort_keys=True, ensure_ascii=False) + "\n" for kind in DOCUMENTS
    }


def main(arguments: list[str]) -> int:
    """Write all schemas into a folder."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m deltastore.schemas FOLDER\n")
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
