"""The description of all that HTTP answers, in OpenAPI 3.1, as served at ``/openapi.json``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from penstock.online.server.config import Dialect
from penstock.online.server.http.dialects.registry import dialect_resources
from penstock.tensor import DataType
from penstock.version import __version__

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_FLAG: _Schema = {"type": "boolean"}
_OBJECT: _Schema = {"type": "object"}
_ANY_SETTING: _Schema = {"type": "object", "additionalProperties": True}
_PARAMETERS: _Schema = {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean", "number"]}}
_STATUSES = {
    400: "the request is wrong; for readiness: not ready",
    401: "no key, or a wrong one",
    403: "the key does not open this",
    404: "there is no such model, version, region or URL",
    405: "another method than the resource has",
    408: "the request took too long to arrive",
    413: "the body is too large",
    415: "a body of a kind that is not read here",
    429: "too many requests, or nothing left of what there is",
    431: "the headers are too large",
    500: "the model failed, or the server",
    501: "valid, but not something this server does",
    503: "not now: starting, overloaded, shutting down or not allowed in this mode",
    504: "too late to be of use",
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
    "Anything": {"description": "As the dialect has it"},
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
        "description": "Members named as inputs become these, all others parameters",
        **_object([], id=_TEXT, parameters=_PARAMETERS),
    },
    "GenerateResponse": _object(["model_name", "model_version"], id=_TEXT, model_name=_TEXT, model_version=_TEXT),
    "Settings": _ANY_SETTING,
    "Index": _list(_object(["name"], name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT)),
    "IndexRequest": _object([], ready=_FLAG),
    "LoadRequest": _object(
        [], parameters={"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}}
    ),
    "SystemRegions": _list(
        _object(["name", "key", "offset", "byte_size"], name=_TEXT, key=_TEXT, offset=_COUNT, byte_size=_COUNT)
    ),
    "SystemRegion": _object(["key", "byte_size"], key=_TEXT, offset=_COUNT, byte_size=_COUNT),
    "CudaRegions": _list(_OBJECT),
    "CudaRegion": _ANY_SETTING,
}

_BINARY_HEADER: _Schema = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Bytes of the JSON part of a body with raw tensors; 0: the body is the only input",
    "schema": _COUNT,
}
_RAW = "application/octet-stream"
_NAMES = re.compile(r"\{(\w+)\}")


def _path_parameter(name: str) -> _Schema:
    schema = {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _operation(
    summary: str, answer: str | None = None, body: str | None = None, needs_body: bool = False, error: str = "Error"
) -> _Schema:
    """``answer``, ``body`` and ``error`` are names of schemas; without ``answer`` the answer is empty."""
    content: _Schema = {}
    if answer is not None:
        content = {"application/json": {"schema": _ref(answer)}}
    failure = {"application/json": {"schema": _ref(error)}}
    responses: _Schema = {"200": {"description": "done"} | ({"content": content} if content else {})}
    responses |= {str(status): {"description": text, "content": failure} for status, text in _STATUSES.items()}
    operation: _Schema = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {
            "required": needs_body,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return operation


def _infer() -> _Schema:
    operation = _operation("Inference", "InferResponse", "InferRequest", needs_body=True)
    binary = {"schema": {"type": "string", "format": "binary"}}
    operation["parameters"] = [_BINARY_HEADER]
    operation["requestBody"]["content"][_RAW] = binary
    operation["responses"]["200"]["content"][_RAW] = binary
    return operation


def _stream() -> _Schema:
    operation = _operation("Generate, each answer as an event as soon as it is there", None, "GenerateRequest", True)
    operation["responses"]["200"]["content"] = {"text/event-stream": {"schema": _TEXT}}
    return operation


def _health(summary: str) -> _Schema:
    operation = _operation(summary)
    del operation["responses"]["400"]["content"]
    return operation


def _of_models() -> dict[str, dict[str, _Schema]]:
    """Paths that exist with and without a version."""
    return {
        "": {"get": _operation("What goes in and comes out", "ModelMetadata")},
        "/ready": {"get": _operation("Whether the model can be asked: 200 or 400")},
        "/config": {"get": _operation("The model's configuration", "ModelConfig")},
        "/stats": {"get": _operation("Counts and durations", "Statistics")},
        "/infer": {"post": _infer()},
        "/generate": {
            "post": _operation("Inference in plain JSON", "GenerateResponse", "GenerateRequest", needs_body=True)
        },
        "/generate_stream": {"post": _stream()},
    }


def _of_regions(kind: str, title: str) -> dict[str, dict[str, _Schema]]:
    base = f"/v2/{kind}sharedmemory"
    regions, region = f"{title}Regions", f"{title}Region"
    return {
        f"{base}/status": {"get": _operation("All registered regions", regions)},
        f"{base}/region/{{name}}/status": {"get": _operation("One registered region", regions)},
        f"{base}/region/{{name}}/register": {"post": _operation("Register a region", None, region, needs_body=True)},
        f"{base}/unregister": {"post": _operation("Forget all regions")},
        f"{base}/region/{{name}}/unregister": {"post": _operation("Forget a region")},
    }


def _paths() -> dict[str, dict[str, _Schema]]:
    settings = {
        "get": _operation("Settings in force", "Settings"),
        "post": _operation("Change settings", "Settings", "Settings", needs_body=True),
    }
    index = {"post": _operation("All models", "Index", "IndexRequest")}
    load = {"post": _operation("Load a model, or load it again", None, "LoadRequest")}
    unload = {"post": _operation("Unload a model", None, "LoadRequest")}
    paths: dict[str, dict[str, _Schema]] = {
        "/v2": {"get": _operation("Name, version and extensions", "ServerMetadata")},
        "/v2/health/live": {"get": _health("200 while the process answers")},
        "/v2/health/ready": {"get": _health("200 when all models are loaded, else 400")},
        "/v2/models/stats": {"get": _operation("Counts and durations of all models", "Statistics")},
        "/v2/models/{model}/trace/setting": settings,
        "/v2/trace/setting": settings,
        "/v2/logging": settings,
        "/v2/repository/index": index,
        "/v2/repository/{name}/index": index,
        "/v2/repository/models/{model}/load": load,
        "/v2/repository/models/{model}/unload": unload,
        "/v2/repository/{name}/models/{model}/load": load,
        "/v2/repository/{name}/models/{model}/unload": unload,
        "/openapi.json": {"get": _operation("This description", "Settings")},
    }
    for suffix, operations in _of_models().items():
        paths["/v2/models/{model}" + suffix] = operations
        paths["/v2/models/{model}/versions/{version}" + suffix] = operations
    return paths | _of_regions("system", "System") | _of_regions("cuda", "Cuda")


def _of_dialects(dialects: Iterable[Dialect]) -> dict[str, dict[str, _Schema]]:
    """As the resources tell it themselves, with the first lines of their handlers' docstrings."""
    paths: dict[str, dict[str, _Schema]] = {}
    for resource in dialect_resources(dialects):
        error = "Error" if resource.error is None else "TorchServeError"
        for path in resource.paths:
            operations = paths[path] = {}
            for method, handler in resource.handlers.items():
                summary = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
                body = "Anything" if method in (b"POST", b"PUT") else None
                operation = operations[method.decode().lower()] = _operation(summary, "Anything", body, error=error)
                if path.endswith("/metrics"):
                    operation["responses"]["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    return paths


@functools.cache
def document(dialects: Sequence[Dialect] = ()) -> bytes:
    """The description as JSON, with the dialects that are switched on."""
    paths: dict[str, Any] = {}
    for path, operations in (_paths() | _of_dialects(dialects)).items():
        names = _NAMES.findall(path)
        paths[path] = operations | ({"parameters": [_path_parameter(name) for name in names]} if names else {})
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Penstock",
                "version": __version__,
                "description": "The Open Inference Protocol (KServe v2) with its extensions, and dialects of other servers",
            },
            "paths": paths,
            "components": {
                "schemas": _SCHEMAS,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )
