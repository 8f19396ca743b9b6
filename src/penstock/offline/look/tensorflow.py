"""What a SavedModel's main file says, read from the protobuf wire format. TensorFlow itself is not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.look.facts import FileFacts, TensorFacts, sorted_counts
from penstock.protocol.varint import read_fields

_TYPES = {
    1: "FP32", 2: "FP64", 3: "INT32", 4: "UINT8", 5: "INT16", 6: "INT8", 7: "BYTES", 9: "INT64", 10: "BOOL", 14: "BF16",
    17: "UINT16", 19: "FP16", 22: "UINT32", 23: "UINT64",
}  # fmt: skip
_META_GRAPH, _GRAPH, _SIGNATURES = 2, 2, 5
_NODE, _LIBRARY, _FUNCTION, _FUNCTION_NODE, _OPERATOR = 1, 2, 1, 3, 2
_KEY, _VALUE = 1, 2
_SERVED = "serving_default"
_VARIABLES = "variables/variables.data"


def read(artifact: Artifact) -> FileFacts:
    """Read the file. Raises InvalidModel."""
    try:
        return _read(artifact)
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidModel(f"the file is not a SavedModel: {error}", "save the model again") from None


def _read(artifact: Artifact) -> FileFacts:
    meta = next(_all(artifact.data, _META_GRAPH), memoryview(b""))
    nodes = [node for graph in _all(meta, _GRAPH) for node in _all(graph, _NODE)]
    for graph in _all(meta, _GRAPH):
        for library in _all(graph, _LIBRARY):
            nodes += [node for function in _all(library, _FUNCTION) for node in _all(function, _FUNCTION_NODE)]
    operators = Counter(_text(next(_all(node, _OPERATOR), memoryview(b""))) for node in nodes)
    signatures = {
        _text(next(_all(entry, _KEY), memoryview(b""))): next(_all(entry, _VALUE), memoryview(b""))
        for entry in _all(meta, _SIGNATURES)
    }
    served = signatures.get(_SERVED, memoryview(b""))
    others = sorted(name for name in signatures if name not in (_SERVED, "__saved_model_init_op"))
    return FileFacts(
        _tensors(served, 1),
        _tensors(served, 2),
        operators=sorted_counts(operators),
        weight_bytes=sum(one.size_bytes for one in artifact.beside if one.path.startswith(_VARIABLES)),
        notes=(f"other signatures: {', '.join(others)}",) if others else (),
    )


def _tensors(signature: memoryview, part: int) -> tuple[TensorFacts, ...]:
    """The tensors in one map of the signature, sorted by name, as the engine orders them."""
    found = []
    for entry in _all(signature, part):
        name = _text(next(_all(entry, _KEY), memoryview(b"")))
        info = dict(read_fields(next(_all(entry, _VALUE), memoryview(b""))))
        number, shape = info.get(2, 0), info.get(3)
        kind = _TYPES.get(number, f"type {number}") if isinstance(number, int) else "unknown"
        found.append(TensorFacts(name, kind, _shape(shape) if isinstance(shape, memoryview) else None))
    return tuple(sorted(found, key=lambda one: one.name))


def _shape(message: memoryview) -> tuple[int, ...] | None:
    """The shape; None if the rank is unknown."""
    if any(number == 3 and value for number, value in read_fields(message)):
        return None
    sizes = []
    for dim in _all(message, 2):
        size = dict(read_fields(dim)).get(1, 0)
        sizes.append(-1 if not isinstance(size, int) or size >= 1 << 63 else size)
    return tuple(sizes)


def _all(message: bytes | memoryview, wanted: int) -> Iterator[memoryview]:
    return (value for number, value in read_fields(message) if number == wanted and isinstance(value, memoryview))


def _text(value: memoryview) -> str:
    return bytes(value).decode()
