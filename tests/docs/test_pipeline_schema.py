"""The published JSON Schema is current, and accepts what the parser accepts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import jsonschema_rs

DOCS = Path(__file__).parent.parent.parent / "docs"
SCRIPT = runpy.run_path(str(DOCS / "pipeline_schema.py"))
GOOD = {
    "name": "digits",
    "inputs": {"image": {"media": "image"}},
    "steps": [
        {"step": "softmax", "in": "image", "out": {"value": "p"}, "axis": -1},
        {
            "map": "crops",
            "as": "crop",
            "out": ["texts"],
            "steps": [{"model": "net", "in": {"x": "crop"}, "out": "texts"}],
        },
    ],
    "outputs": ["p"],
}


def test_the_schema_is_current() -> None:
    assert (DOCS / "reference/pipeline.schema.json").read_text() == SCRIPT["text"](), (
        "run: python docs/pipeline_schema.py"
    )


def test_editors_can_use_it() -> None:
    validator = jsonschema_rs.Draft202012Validator(json.loads(SCRIPT["text"]()))
    assert validator.is_valid(GOOD)
    wrong = {**GOOD, "steps": [{"step": "softmax", "out": "p", "axes": 1}]}
    for broken in ({**GOOD, "stepz": []}, wrong, {**GOOD, "steps": []}):
        assert not validator.is_valid(broken)
