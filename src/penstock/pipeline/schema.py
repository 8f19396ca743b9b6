"""The JSON Schema of declarations, for editors: completion, checks and help while writing ``pipeline.yaml``."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config import field_docs
from penstock.pipeline.declaration import KEY_TYPES, MAX_STEPS, NAME, Declaration, DeclaredInput, DeclaredStep
from penstock.pipeline.steps.registry import NAMES, step_class

_TEXT = {"type": "string"}
_NAME = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_NAMED = ("inputs", "models", "labels", "constants")
"""Keys whose values have names as keys."""
_WIRING = {
    "description": "One value, several in the step's own order, or a map from the step's own names to values.",
    "oneOf": [
        _NAME,
        {"type": "array", "items": _NAME},
        {"type": "object", "additionalProperties": _NAME},
    ],
}
_IN_OUT = {"$ref": "#/$defs/wiring"}
_STEPS = {"type": "array", "minItems": 1, "maxItems": MAX_STEPS, "items": {"$ref": "#/$defs/step"}}


def schema() -> dict[str, Any]:
    """The schema of a declaration, with all standard steps."""
    docs = field_docs(Declaration)
    kinds: dict[str, Any] = {name: msgspec.json.schema(kind) for name, kind in KEY_TYPES.items()}
    kinds["inputs"] = {"type": "object", "additionalProperties": {"$ref": "#/$defs/DeclaredInput"}}
    for key in _NAMED:
        kinds[key]["propertyNames"] = {"pattern": _NAME["pattern"]}
    kinds["steps"] = _STEPS
    properties = {name: kind | ({"description": docs[name]} if name in docs else {}) for name, kind in kinds.items()}
    steps = {name: _standard(name) for name in NAMES}
    _, defined = msgspec.json.schema_components([DeclaredInput], ref_template="#/$defs/{name}")
    everything = [*steps.values(), *_others()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Penstock pipeline",
        "type": "object",
        "required": ["name", "inputs", "steps", "outputs"],
        "additionalProperties": False,
        "properties": properties,
        "$defs": {**defined, "wiring": _WIRING, "step": {"oneOf": everything}},
    }


def _standard(name: str) -> dict[str, Any]:
    """The schema of a standard step: its options, and the keys of every step."""
    cls = step_class(name)
    _, defined = msgspec.json.schema_components([cls], ref_template="#/$defs/{name}")
    own, docs = defined[cls.__name__], field_docs(cls)
    options = {key: {**kind, "description": docs.get(key, "")} for key, kind in own.get("properties", {}).items()}
    summary = (cls.__doc__ or "").strip().partition("\n\n")[0]
    return _step("step", {"const": name}, options, ["out", *own.get("required", [])], " ".join(summary.split()))


def _others() -> list[dict[str, Any]]:
    colour = {"enum": ["rgb", "bgr", "grey", "rgba"], "description": "Order of the channels that the model needs."}
    batch = {"type": "boolean", "description": "False if the tensors of the model have no batch axis."}
    return [
        _step("model", _TEXT, {"colour": colour, "batch": batch}, ["out"], "Run a model."),
        _step(
            "map",
            _TEXT,
            {"as": _NAME, "steps": _STEPS},
            ["out", "as", "steps"],
            "Run steps for each element of a list.",
        ),
        _step("python", _TEXT, {}, ["out"], "Run a function in Python, FILE.py:FUNCTION."),
    ]


def _step(kind: str, target: dict[str, Any], own: dict[str, Any], required: list[str], summary: str) -> dict[str, Any]:
    docs = field_docs(DeclaredStep)
    common = {
        "name": {**_NAME, "description": docs["name"]},
        "in": {**_IN_OUT, "description": docs["inputs"]},
        "out": {**_IN_OUT, "description": docs["outputs"]},
        "when": {**_TEXT, "description": docs["when"]},
        "description": msgspec.json.schema(KEY_TYPES["description"]),
    }
    if kind == "map":
        del common["in"]
    return {
        "title": target.get("const", kind),
        "description": summary,
        "type": "object",
        "required": [kind, *required],
        "additionalProperties": False,
        "properties": {kind: target, **common, **own},
    }
