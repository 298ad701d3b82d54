"""What a SARIF 2.1.0 log must be: the required properties of the objects that are written here,
from sections 3.13 to 3.58 of the standard, with no other property allowed.

The standard's own schema is used as well where ``AMPSCOPE_SARIF_SCHEMA`` names its file: in CI
that of 2.1.0-rtm.4 (.ci/run), by hand that of https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}
_INDEX = {"type": "integer", "minimum": -1}
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_MESSAGE = _object("text", text=_TEXT)
_PLACE = _object("uri", uri=_TEXT, uriBaseId=_TEXT)
_REGION = _object(
    "startLine", startLine=_COUNT, startColumn=_COUNT, endLine=_COUNT, endColumn=_COUNT
)
_REPLACEMENT = _object("deletedRegion", deletedRegion=_REGION, insertedContent=_MESSAGE)
_CHANGE = _object(
    "artifactLocation replacements",
    artifactLocation=_PLACE,
    replacements={**_list(_REPLACEMENT), "minItems": 1},
)
_RULE = _object(
    "id",
    id=_TEXT,
    name=_TEXT,
    shortDescription=_MESSAGE,
    fullDescription=_MESSAGE,
    help=_MESSAGE,
    defaultConfiguration=_object("", level=_LEVEL),
)
_RESULT = _object(
    "message",
    ruleId=_TEXT,
    ruleIndex=_INDEX,
    level=_LEVEL,
    message=_MESSAGE,
    locations=_list(
        _object("", physicalLocation=_object("", artifactLocation=_PLACE, region=_REGION))
    ),
    fixes=_list(_object("artifactChanges", artifactChanges={**_list(_CHANGE), "minItems": 1})),
)
_RUN = _object(
    "tool",
    tool=_object(
        "driver",
        driver=_object(
            "name", name=_TEXT, version=_TEXT, semanticVersion=_TEXT, rules=_list(_RULE)
        ),
    ),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results=_list(_RESULT),
    invocations=_list(
        _object(
            "executionSuccessful",
            executionSuccessful={"type": "boolean"},
            toolExecutionNotifications=_list(_object("message", level=_LEVEL, message=_MESSAGE)),
        )
    ),
)
LOG = _object(
    "version runs", **{"$schema": _TEXT, "version": {"enum": ["2.1.0"]}, "runs": _list(_RUN)}
)


def check_log(log: object) -> None:
    """Raises jsonschema.ValidationError for what is no SARIF 2.1.0 log."""
    jsonschema.validate(log, LOG)
    if path := os.environ.get("AMPSCOPE_SARIF_SCHEMA"):
        jsonschema.validate(log, json.loads(Path(path).read_text()))
