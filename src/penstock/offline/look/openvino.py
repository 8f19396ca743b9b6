"""What an OpenVINO model file says: a list of layers in XML. OpenVINO itself is not needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.look.facts import FileFacts, TensorFacts, sorted_counts
from penstock.tensor import DataType

_TYPES = {
    "f64": "FP64", "f32": "FP32", "f16": "FP16", "bf16": "BF16", "boolean": "BOOL", "string": "BYTES",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("i", "INT"), ("u", "UINT")) for bits in (8, 16, 32, 64)},
}  # fmt: skip
_BITS = {"i4": 4, "u4": 4, "nf4": 4, "u1": 1, "i2": 2, "u2": 2}
_NO_WEIGHTS = ("i64", "i32", "boolean", "string")


def read(artifact: Artifact) -> FileFacts:
    """Read the file. Raises InvalidModel."""
    try:
        root = ET.fromstring(artifact.data)  # noqa: S314 - expat limits the expansion of entities
    except ET.ParseError as error:
        raise InvalidModel(f"the file is not an OpenVINO model: {error}", "save it with openvino.save_model") from None
    layers = root.findall("./layers/layer")
    constants = [(layer, data) for layer in layers if layer.get("type") == "Const" for data in layer.findall("data")]
    shapes = [(data.get("element_type", ""), _shape(data.get("shape"))) for _, data in constants]
    counts = Counter(
        layer.get("type", "") for layer in layers if layer.get("type") not in ("Const", "Parameter", "Result")
    )
    return FileFacts(
        tuple(_parameters(layers)),
        tuple(_results(root, layers)),
        opsets={
            str(name): 1 for name in sorted({layer.get("version", "") for layer in layers}) if name.startswith("opset")
        },
        operators=sorted_counts(counts),
        parameters=sum(math.prod(shape) for kind, shape in shapes if kind not in _NO_WEIGHTS and shape is not None),
        weight_bytes=sum(math.prod(shape) * _bits(kind) // 8 for kind, shape in shapes if shape is not None),
        quantised=f"{counts['FakeQuantize']} FakeQuantize" if counts["FakeQuantize"] else "",
    )


def _parameters(layers: list[ET.Element]) -> Iterator[TensorFacts]:
    for layer in layers:
        data = layer.find("data")
        if layer.get("type") == "Parameter" and data is not None:
            kind = data.get("element_type", "")
            port = layer.find("./output/port")
            name = _first_name("" if port is None else port.get("names", "")) or layer.get("name", "")
            yield TensorFacts(name, _TYPES.get(kind, kind), _shape(data.get("shape")))


def _results(root: ET.Element, layers: list[ET.Element]) -> Iterator[TensorFacts]:
    """The outputs: each Result layer reads a port of another layer, which has the name and the type."""
    ports = {(layer.get("id"), port.get("id")): port for layer in layers for port in layer.findall("./output/port")}
    sources = {edge.get("to-layer"): (edge.get("from-layer"), edge.get("from-port")) for edge in root.iter("edge")}
    for layer in layers:
        if layer.get("type") != "Result":
            continue
        port = ports.get(sources.get(layer.get("id"), (None, None)))
        if port is not None:
            kind = port.get("precision", "").lower()
            name = _first_name(port.get("names", "")) or layer.get("name", "")
            yield TensorFacts(name, _TYPES.get(_precision(kind), kind), _dims(port))


def _precision(kind: str) -> str:
    return {"fp32": "f32", "fp16": "f16", "fp64": "f64", "bool": "boolean"}.get(kind, kind)


def _dims(port: ET.Element) -> tuple[int, ...]:
    return tuple(_size(dim.text or "") for dim in port.findall("dim"))


def _shape(text: str | None) -> tuple[int, ...] | None:
    """The shape in ``1,3,?,..32``; None if the rank is unknown."""
    if text is None or text == "...":
        return None
    return tuple(map(_size, text.split(","))) if text else ()


def _size(text: str) -> int:
    return int(text) if text.strip().isdigit() else -1


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    name = _TYPES.get(kind)
    return 8 * (DataType(name).itemsize if name else 1)


def _first_name(names: str) -> str:
    """The first of several names of a tensor; ``\\,`` is a comma inside a name."""
    return names.replace("\\,", "\0").split(",")[0].replace("\0", ",")
