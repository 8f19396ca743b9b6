"""The OpenAPI 3.1 description of the HTTP API, served at ``/openapi.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson

from penstock.online.server.http.routes import Handler, Resource
from penstock.tensor import DataType
from penstock.version import __version__

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_FLAG: _Schema = {"type": "boolean"}
_OBJECT: _Schema = {"type": "object"}
_PARAMETERS: _Schema = {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean", "number"]}}
_STATUSES = {
    400: "invalid request; for readiness: not ready",
    401: "missing or unknown key",
    403: "the key does not permit this",
    404: "unknown model, version, region or URL",
    405: "the resource does not have this method",
    408: "the request was not received in time",
    413: "the body is too large",
    415: "unsupported media type of the body",
    429: "too many requests, or a resource is exhausted",
    431: "the headers are too large",
    500: "the model or the server failed",
    501: "valid, but not supported by this server",
    503: "unavailable: starting, overloaded, shutting down, or not allowed in this mode",
    504: "the deadline has passed",
}


def _object(required: list[str], **properties: _Schema) -> _Schema:
    return {"type": "object", "required": required, "properties": properties}


def _list(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_DATATYPE: _Schema = {"type": "string", "enum": [datatype.value for datatype in DataType]}
_SHAPE = _list(_COUNT)
_SPEC = _object(["name", "datatype", "shape"], name=_TEXT, datatype=_DATATYPE, shape=_list({"type": "integer"}))
_DURATION = _object(["count", "ns"], count=_COUNT, ns=_COUNT)
_DURATIONS = dict.fromkeys(
    ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"),
    _DURATION,
)
_TENSOR = {"name": _TEXT, "shape": _SHAPE, "datatype": _DATATYPE, "parameters": _PARAMETERS, "data": {"type": "array"}}

_SCHEMAS: dict[str, _Schema] = {
    "Error": _object(["error"], error=_TEXT),
    "TorchServeError": _object([], code=_COUNT, type=_TEXT, message=_TEXT),
    "Anything": {"description": "Any JSON value"},
    "Live": _object(["live"], live=_FLAG),
    "Ready": _object(["ready"], ready=_FLAG),
    "ModelReady": _object(["name", "ready"], name=_TEXT, ready=_FLAG),
    "ServerMetadata": _object(["name", "version", "extensions"], name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
    "ModelMetadata": _object(
        ["name", "versions", "platform", "inputs", "outputs"],
        name=_TEXT,
        versions=_list(_TEXT),
        platform=_TEXT,
        inputs=_list(_SPEC),
        outputs=_list(_SPEC),
    ),
    "ModelConfig": {"description": "`inference.ModelConfig` with the names of its fields", **_OBJECT},
    "Statistics": _object(
        ["model_stats"],
        model_stats=_list(
            _object(
                ["name", "version", "inference_count", "execution_count", "inference_stats", "batch_stats"],
                name=_TEXT,
                version=_TEXT,
                last_inference=_COUNT,
                inference_count=_COUNT,
                execution_count=_COUNT,
                inference_stats=_object(list(_DURATIONS), **_DURATIONS),
                batch_stats=_list(_OBJECT),
            )
        ),
    ),
    "InferRequest": _object(
        ["inputs"],
        id=_TEXT,
        parameters=_PARAMETERS,
        inputs=_list({**_object(["name", "shape", "datatype"], **_TENSOR)}),
        outputs=_list(_object(["name"], name=_TEXT, parameters=_PARAMETERS)),
    ),
    "InferResponse": _object(
        ["model_name", "model_version", "outputs"],
        id=_TEXT,
        model_name=_TEXT,
        model_version=_TEXT,
        parameters=_PARAMETERS,
        outputs=_list(_object(["name", "shape", "datatype"], **_TENSOR)),
    ),
    "GenerateRequest": {
        "description": "Members named like an input are inputs; all others are parameters",
        **_object([], id=_TEXT, parameters=_PARAMETERS),
    },
    "GenerateResponse": _object(["model_name", "model_version"], id=_TEXT, model_name=_TEXT, model_version=_TEXT),
    "RunRequest": {"description": "An input each: text, a file in base64, or nested lists of numbers", **_OBJECT},
    "RunResponse": {"description": "An output each: text, a file in base64, or nested lists of numbers", **_OBJECT},
    "Settings": {"type": "object", "additionalProperties": True},
    "Index": _list(_object(["name"], name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT)),
    "IndexRequest": _object([], ready=_FLAG),
    "LoadRequest": _object(
        [], parameters={"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}}
    ),
    "Regions": _list(
        _object(["name", "key", "offset", "byte_size"], name=_TEXT, key=_TEXT, offset=_COUNT, byte_size=_COUNT)
    ),
    "Region": _object(["key", "byte_size"], key=_TEXT, offset=_COUNT, byte_size=_COUNT),
}

_BINARY_HEADER: _Schema = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Size of the JSON part of a body with raw tensors, in bytes. 0: the body is the raw tensor of the only input",
    "schema": _COUNT,
}
_RAW = "application/octet-stream"
_NAMES = re.compile(r"\{(\w+)\}")


def _path_parameter(name: str) -> _Schema:
    schema = {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _operation(resource: Resource, method: str, handler: Handler) -> _Schema:
    """The description of one method; its summary is the first line of the handler's docstring."""
    error = "Error" if resource.error is None else "TorchServeError"
    responses: _Schema = {
        str(status): {"description": text, "content": {"application/json": {"schema": _ref(error)}}}
        for status, text in _STATUSES.items()
    }
    if resource.answer == "Ready":
        responses["400"]["content"]["application/json"]["schema"] = _ref("Ready")
    responses["200"] = {"description": "done"}
    if kind := _media_type(resource):
        schema = _TEXT if kind.startswith("text/") else _ref(resource.answer)
        responses["200"]["content"] = {kind: {"schema": schema}}
    operation: _Schema = {"summary": (handler.__doc__ or "").partition("\n")[0].rstrip("."), "responses": responses}
    if resource.body and method in ("post", "put"):
        operation["requestBody"] = {
            "required": bool(_SCHEMAS[resource.body].get("required")),
            "content": {"application/json": {"schema": _ref(resource.body)}},
        }
    if resource.body == "RunRequest":
        binary = {"schema": {"type": "string", "format": "binary"}}
        form = {"type": "object", "additionalProperties": binary["schema"]}
        kinds = ("image/*", "audio/*", "text/plain", _RAW)
        operation["requestBody"]["content"] |= {"multipart/form-data": {"schema": form}, **dict.fromkeys(kinds, binary)}
    if resource.answer == "InferResponse":
        binary = {"schema": {"type": "string", "format": "binary"}}
        operation["parameters"] = [_BINARY_HEADER]
        operation["requestBody"]["content"][_RAW] = binary
        responses["200"]["content"][_RAW] = binary
    return operation


def _media_type(resource: Resource) -> str:
    """The media type of responses; empty if responses have no body."""
    if resource.path.endswith("/metrics"):
        return "text/plain"
    if resource.path.endswith("/generate_stream"):
        return "text/event-stream"
    return "application/json" if resource.answer else ""


def document(resources: Iterable[Resource]) -> bytes:
    """The OpenAPI document of ``resources``, as JSON."""
    paths: dict[str, Any] = {}
    for resource in resources:
        for path in resource.paths:
            paths[path] = {
                method.decode().lower(): _operation(resource, method.decode().lower(), handler)
                for method, handler in resource.handlers.items()
            }
            if names := _NAMES.findall(path):
                paths[path]["parameters"] = [_path_parameter(name) for name in names]
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Penstock",
                "version": __version__,
                "description": "The Open Inference Protocol (KServe v2) with its extensions, and the protocols of other servers",
            },
            "paths": paths,
            "components": {
                "schemas": _SCHEMAS,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )
