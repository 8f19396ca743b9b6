"""TensorFlow Serving's REST API and related APIs: ``/v1/models``.

KServe v1 is almost a subset of TensorFlow Serving's API. OpenVINO Model Server spells some names differently, uses version 0 for
the default version, and also has ``/v1/config``.

A model's configuration may label its versions: ``parameters {key: "version_labels" value {string_value:
"stable:1,canary:2"}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.errors import InvalidArgument, NotFound, Unsupported, quoted, shortened
from penstock.online.repository.handle import Handle
from penstock.online.repository.state import Row
from penstock.online.server.access.auth import Access
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.dialects import examples, predictions
from penstock.online.server.http.exchange import Exchange, later
from penstock.online.server.http.inference import Write, ask
from penstock.online.server.http.routes import Handler, Resource, Route
from penstock.online.server.to_thread import Steps
from penstock.tensor import Array, Buffer, TensorSpec

_LABELS = "version_labels"
_STATES = {"READY": "AVAILABLE", "LOADING": "LOADING", "UNLOADING": "UNLOADING"}
"""TensorFlow Serving's name of each state in the repository index. All other states are END."""
_DEFAULT_VERSION = "0"
"""The version with which ``ovmsclient`` requests the default version. No model has a version 0."""
_WITHOUT_FAULT = ("", "unloaded")
_DTYPES = {"FP16": "HALF", "BF16": "BFLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BYTES": "STRING"}
"""TensorFlow's names of datatypes. Datatypes that are not listed have the same name in both protocols."""


class TensorFlowServing:
    """Handlers of TensorFlow Serving and KServe v1. Used only on the event loop."""

    def __init__(
        self, dataplane: DataPlane, control: ControlPlane, access: Access, metrics: Handler | None = None
    ) -> None:
        """``metrics`` answers with the metrics page. It is None if metrics are disabled."""
        self._dataplane = dataplane
        self._control = control
        self._access = access
        self._metrics = metrics

    def resources(self) -> list[Resource]:
        """TensorFlow Serving's resources. Paths with a verb come first, because other paths would match the verb as a name."""
        return [
            *_of_models(":predict", b"POST", self.predict),
            *_of_models(":classify", b"POST", self.classify),
            *_of_models(":regress", b"POST", self.regress),
            *_of_models("/metadata", b"GET", self.metadata),
            *_of_models("", b"GET", self.status),
            Resource("/v1/config", {b"GET": self.states}, answer="Anything"),
            Resource("/monitoring/prometheus/metrics", {b"GET": self.metrics}, answer="Anything"),
        ]

    def kserve_resources(self) -> list[Resource]:
        """The resources of KServe v1."""
        return [
            *_of_models(":predict", b"POST", self.predict),
            Resource("/v1/models/{model}:explain", {b"POST": self.explain}, answer="Anything", body="Anything"),
            *_of_models("", b"GET", self.status),
            Resource("/v1/models", {b"GET": self.models}, answer="Anything"),
        ]

    def predict(self, exchange: Exchange, route: Route) -> None:
        """Inference on rows or columns."""

        def read(handle: Handle, body: Buffer) -> Steps[tuple[Mapping[str, Array], Write]]:
            arrays, form = yield from predictions.read(body, handle.signature.inputs, handle.config.batchable)
            return arrays, partial(predictions.write, form=form)

        ask(self._dataplane, exchange, partial(self._acquire, exchange, route), read)

    def classify(self, exchange: Exchange, route: Route) -> None:
        """Labels and scores of examples."""
        self._ask_examples(exchange, route, lambda handle: partial(examples.write_classes, labels=handle.labels))

    def regress(self, exchange: Exchange, route: Route) -> None:
        """A number for each example."""
        self._ask_examples(exchange, route, lambda _: examples.write_values)

    def _ask_examples(self, exchange: Exchange, route: Route, writer: Callable[[Handle], Write]) -> None:
        def read(handle: Handle, body: Buffer) -> Steps[tuple[Mapping[str, Array], Write]]:
            return (yield from examples.read(body, handle.signature.inputs)), writer(handle)

        ask(self._dataplane, exchange, partial(self._acquire, exchange, route), read)

    def explain(self, exchange: Exchange, route: Route) -> None:
        """Not supported: models have no explainer."""
        raise Unsupported(f"model {quoted(route.model)} has no explainer", "use ':predict'")

    @later
    async def status(self, exchange: Exchange, route: Route) -> dict[str, Any]:
        """States of a model's versions, and whether the model is ready."""
        version = self._version(exchange, route)
        rows = [row for row in await self._versions() if row["name"] == route.model and version in ("", row["version"])]
        if not rows:
            which = f"version {version}" if version else "any versions"
            raise NotFound(f"Could not find {which} of model {shortened(route.model)}")
        return {
            "model_version_status": [_state(row) for row in rows],
            "name": route.model,
            "ready": self._dataplane.model_ready(route.model, version),
        }

    @later
    async def models(self, exchange: Exchange, route: Route) -> dict[str, Any]:
        """Names of the models that are ready."""
        names = dict.fromkeys(row["name"] for row in await self._control.repository_index(ready=True))
        return {"models": [name for name in names if self._access.may(exchange.client, name)]}

    @later
    async def states(self, exchange: Exchange, route: Route) -> dict[str, Any]:
        """States of the versions of all models, as OpenVINO Model Server reports them."""
        found: dict[str, dict[str, list[Any]]] = {}
        for row in await self._versions():
            if self._access.may(exchange.client, row["name"]):
                found.setdefault(row["name"], {"model_version_status": []})["model_version_status"].append(_state(row))
        return found

    async def _versions(self) -> list[Row]:
        """The rows of the index that have a version."""
        return [row for row in await self._control.repository_index() if row.get("version")]

    def metadata(self, exchange: Exchange, route: Route) -> None:
        """Signature of a model."""
        handle = self._acquire(exchange, route)
        signature = {
            "inputs": {spec.name: _tensor_info(spec) for spec in handle.signature.inputs},
            "outputs": {spec.name: _tensor_info(spec) for spec in handle.signature.outputs},
            "method_name": "tensorflow/serving/predict",
        }
        spec = {"name": handle.name, "signature_name": "", "version": handle.version}
        signatures = {"signature_def": _in_both_spellings("signature_def", {predictions.SIGNATURE: signature})}
        exchange.reply_json({**_in_both_spellings("model_spec", spec), "metadata": signatures})

    def alive(self, exchange: Exchange, route: Route) -> None:
        """200 while the process answers."""
        exchange.reply_json({"status": "alive"})

    def metrics(self, exchange: Exchange, route: Route) -> None:
        """Metrics of all models, for Prometheus."""
        if self._metrics is None:
            raise NotFound("metrics are disabled", "set 'allow_metrics' to true")
        self._metrics(exchange, route)

    def _acquire(self, exchange: Exchange, route: Route) -> Handle:
        """The model version in the URL. Raises NotFound, InvalidArgument, Unavailable."""
        return self._dataplane.acquire(route.model, self._version(exchange, route), exchange.client)

    def _version(self, exchange: Exchange, route: Route) -> str:
        """The version of the number or label in the URL; empty if the URL has neither. Raises NotFound, InvalidArgument."""
        if not route.name:
            return "" if route.version == _DEFAULT_VERSION else route.version
        config = self._dataplane.acquire(route.model, "", exchange.client).config
        text = config.parameters.get(_LABELS, "")
        versions = {
            label.strip(): version.strip() for label, _, version in (one.partition(":") for one in text.split(","))
        }
        version = versions.get(route.name)
        if not version:
            hint = f"add it to the parameter '{_LABELS}' of the model's configuration"
            raise InvalidArgument(f"Unrecognized servable version label: {shortened(route.name)}", hint)
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
    dims = [{"size": str(size), "name": ""} for size in spec.shape]
    return {
        "dtype": f"DT_{_DTYPES.get(datatype, datatype)}",
        "name": spec.name,
    } | _in_both_spellings("tensor_shape", {"dim": dims, "unknown_rank": False})


def _in_both_spellings(name: str, value: Any) -> dict[str, Any]:
    """The member ``name`` of TensorFlow Serving, and a copy under the name that OpenVINO Model Server uses."""
    first, *others = name.split("_")
    return {name: value, first + "".join(map(str.capitalize, others)): value}


def _of_models(what: str, method: bytes, handler: Handler) -> list[Resource]:
    """Three resources: with a version in the path, with a label, and without both."""
    handlers = {method: handler}
    body = "Anything" if method == b"POST" else ""
    return [
        Resource(f"/v1/models/{{model}}{what}", handlers, versioned=True, answer="Anything", body=body),
        Resource(f"/v1/models/{{model}}/labels/{{name}}{what}", handlers, answer="Anything", body=body),
    ]
