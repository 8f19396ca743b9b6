"""TensorFlow Serving's REST, and KServe v1, which is nearly a part of it: ``/v1/models``.

Versions have labels if the model's configuration says so: ``parameters {key: "version_labels" value {string_value:
"stable:1,canary:2"}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidArgument, NotFound, Unsupported
from penstock.online.repository.handle import Handle
from penstock.online.server.http.api import metrics
from penstock.online.server.http.dialects import examples, predictions
from penstock.online.server.http.dialects.inference import ask
from penstock.online.server.http.exchange import Exchange, later
from penstock.online.server.http.routes import Handler, Needs, Resource, Route
from penstock.request import InferRequest
from penstock.tensor import TensorSpec

_LABELS = "version_labels"
_STATES = {"READY": "AVAILABLE", "LOADING": "LOADING", "UNLOADING": "UNLOADING"}
"""Of the index; all others mean END."""
_WITHOUT_FAULT = ("", "unloaded")
_DTYPES = {"FP16": "HALF", "BF16": "BFLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BYTES": "STRING"}
"""All others are called as here."""


def _predict(exchange: Exchange, route: Route) -> None:
    """Inference of rows or columns."""
    handle = _acquire(exchange, route)
    arrays, form = predictions.read(exchange.body, handle.signature.inputs, handle.config.max_batch_size > 0)
    request = InferRequest(handle.name, arrays, handle.version)
    ask(exchange, handle, request, lambda outputs: predictions.write(outputs, form))


def _classify(exchange: Exchange, route: Route) -> None:
    """Labels and scores of examples."""
    handle = _acquire(exchange, route)
    ask(
        exchange,
        handle,
        _read_examples(exchange, handle),
        lambda outputs: examples.write_classes(outputs, handle.labels),
    )


def _regress(exchange: Exchange, route: Route) -> None:
    """A number for each example."""
    handle = _acquire(exchange, route)
    ask(exchange, handle, _read_examples(exchange, handle), examples.write_values)


def _explain(exchange: Exchange, route: Route) -> None:
    """Not answered: models have no explainer."""
    raise Unsupported(f"model '{route.model}' has no explainer", "ask with ':predict'")


def _read_examples(exchange: Exchange, handle: Handle) -> InferRequest:
    return InferRequest(handle.name, examples.read(exchange.body, handle.signature.inputs), handle.version)


async def _status(exchange: Exchange, route: Route) -> dict[str, Any]:
    """States of a model's versions; whether it is ready."""
    shared, version = exchange.line.shared, _version(exchange, route)
    rows = [
        row
        for row in await shared.control.repository_index()
        if row["name"] == route.model and row.get("version") and version in ("", row["version"])
    ]
    if not rows:
        which = f"version {version}" if version else "any versions"
        raise NotFound(f"Could not find {which} of model {route.model}")
    return {
        "model_version_status": [_state(row) for row in rows],
        "name": route.model,
        "ready": shared.dataplane.model_ready(route.model, version),
    }


async def _models(exchange: Exchange, route: Route) -> dict[str, Any]:
    """Names of the models that are ready."""
    rows = await exchange.line.shared.control.repository_index(ready=True)
    return {"models": [name for name in dict.fromkeys(row["name"] for row in rows) if exchange.may_use(name)]}


def _metadata(exchange: Exchange, route: Route) -> None:
    """What goes into a model and what comes out."""
    handle = _acquire(exchange, route)
    signature = {
        "inputs": {spec.name: _tensor_info(spec) for spec in handle.signature.inputs},
        "outputs": {spec.name: _tensor_info(spec) for spec in handle.signature.outputs},
        "method_name": "tensorflow/serving/predict",
    }
    spec = {"name": handle.name, "signature_name": "", "version": handle.version}
    signatures = {"signature_def": {"signature_def": {predictions.SIGNATURE: signature}}}
    exchange.reply_json({"model_spec": spec, "metadata": signatures})


def _alive(exchange: Exchange, route: Route) -> None:
    """Whether the process answers."""
    exchange.reply_json({"status": "alive"})


def _metrics(exchange: Exchange, route: Route) -> None:
    """Metrics for Prometheus, of all models."""
    if not exchange.line.shared.config.allow_metrics:
        raise NotFound("metrics are switched off", "start the server with 'allow_metrics'")
    metrics(exchange, route)


def _acquire(exchange: Exchange, route: Route) -> Handle:
    """The model version that the URL names. Raises NotFound, InvalidArgument, Unavailable."""
    return exchange.line.shared.dataplane.acquire(route.model, _version(exchange, route), exchange.client)


def _version(exchange: Exchange, route: Route) -> str:
    """The version that the URL names, by number or label; empty without. Raises NotFound, InvalidArgument."""
    if not route.name:
        return route.version
    config = exchange.line.shared.dataplane.acquire(route.model, "", exchange.client).config
    text = config.parameters[_LABELS].string_value if _LABELS in config.parameters else ""
    versions = {label.strip(): version.strip() for label, _, version in (one.partition(":") for one in text.split(","))}
    version = versions.get(route.name)
    if not version:
        hint = f"name it in the parameter '{_LABELS}' of the model's configuration"
        raise InvalidArgument(f"Unrecognized servable version label: {route.name}", hint)
    return version


def _state(row: Mapping[str, str]) -> dict[str, Any]:
    reason = row.get("reason", "")
    fault = "" if reason in _WITHOUT_FAULT else reason
    return {
        "version": row["version"],
        "state": _STATES.get(row["state"], "END"),
        "status": {"error_code": "UNKNOWN" if fault else "OK", "error_message": fault},
    }


def _tensor_info(spec: TensorSpec) -> dict[str, Any]:
    datatype = spec.datatype.value
    return {
        "dtype": f"DT_{_DTYPES.get(datatype, datatype)}",
        "tensor_shape": {"dim": [{"size": str(size), "name": ""} for size in spec.shape], "unknown_rank": False},
        "name": spec.name,
    }


def _of_models(what: str, method: bytes, handler: Handler) -> list[Resource]:
    """With a version, with a label, and without."""
    handlers = {method: handler}
    return [
        Resource(f"/v1/models/{{model}}{what}", handlers, versioned=True),
        Resource(f"/v1/models/{{model}}/labels/{{name}}{what}", handlers),
    ]


_PREDICT, _STATUS = _of_models(":predict", b"POST", _predict), _of_models("", b"GET", later(_status))

# In both what has a verb comes first: it would be a model's name in the others.
TENSORFLOW_SERVING = [
    *_PREDICT,
    *_of_models(":classify", b"POST", _classify),
    *_of_models(":regress", b"POST", _regress),
    *_of_models("/metadata", b"GET", _metadata),
    *_STATUS,
    Resource("/monitoring/prometheus/metrics", {b"GET": _metrics}, needs=Needs.ADMIN),
]
KSERVE_V1 = [
    *_PREDICT,
    Resource("/v1/models/{model}:explain", {b"POST": _explain}),
    *_STATUS,
    Resource("/v1/models", {b"GET": later(_models)}),
    Resource("/", {b"GET": _alive}, needs=Needs.NOTHING),
]
