"""Certificate: the evidence that an ONNX model gives the same outputs as its source. It is stored in the ONNX file.

The certificate contains a digest of everything in the model that determines its outputs. If another tool changes the model, the
certificate no longer applies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import inf

import msgspec

from penstock.artifact import Artifact, Format, digest_of_all, sha256
from penstock.protocol.varint import read_fields, write_varint

METADATA_KEY = "penstock.certificate"
"""Key of the certificate in ``metadata_props`` of the ONNX model."""
# Fields of ModelProto.
_IR_VERSION, _GRAPH, _OPSET, _METADATA, _FUNCTIONS = 1, 7, 8, 14, 25
_DETERMINING = (_IR_VERSION, _OPSET, _FUNCTIONS, _GRAPH)
_KEY, _VALUE = 1, 2
"""Fields of an entry of ``metadata_props``."""
_VARINT, _LENGTH = 0, 2


class Divergence(msgspec.Struct, frozen=True):
    """The first value of the ONNX model that differs from the source."""

    node: str
    """The node that computes the value; all nodes of the part, if the source has no values between them."""
    source: str
    """Name of the value in the source; empty if the source does not name it."""
    error: float = inf
    """Difference from the source, in the measure of ``Certificate.max_error``; infinite if shapes or types differ."""
    where: str = ""
    """The layer, or the line of the user's code, that computes the value; empty if unknown."""
    expected: str = ""
    """Shape, range and mean of the value in the source."""
    found: str = ""
    """The same in the ONNX model."""
    is_first: bool = True
    """False if an earlier node may differ, because the source gives no values before this one."""


class Proof(msgspec.Struct, frozen=True):
    """The calls that prove one output."""

    output: str
    calls: int
    """Number of calls in which the comparison says something: the output is not empty, and rounding explains a small part of it."""
    of: int
    """Number of calls in which the output was compared."""


class Certificate(msgspec.Struct, frozen=True):
    """The result of comparing a source with its ONNX model."""

    holds: bool
    cases: int
    """Number of calls that were compared."""
    max_error: float
    """Largest difference of an output, relative to the output's scale; infinite if shapes, types or special values differ."""
    tolerance: float
    """Difference that rounding explains, for the output with the largest difference."""
    first_divergent: Divergence | None = None
    not_compared: tuple[str, ...] = ()
    """Outputs that are random in the source."""
    not_proved: tuple[str, ...] = ()
    """Outputs whose comparison says nothing in most calls, because they are empty or rounding could change them completely."""
    proved: tuple[Proof, ...] = ()
    """For each output that was compared, the calls that prove it."""
    trees: int = 0
    """Number of trees whose nodes and leaves all equal those of the source."""
    notes: tuple[str, ...] = ()
    format: str = ""
    """Format of the source; a key of ``FORMATS``."""
    framework: str = ""
    """The framework that ran the source, with its version."""
    exporter: str = ""
    """The exporter that made the ONNX model, with its version."""
    opset: int = 0
    source_digest: str = ""
    """SHA-256 of the source's files; empty for objects in memory."""
    penstock: str = ""
    """Version of Penstock."""
    graph_digest: str = ""
    """``digest_of_graph`` of the ONNX model. ``attach`` sets it."""

    @property
    def text(self) -> str:
        """The result in one line."""
        result = (
            "holds" if self.holds else "does not hold" if self.first_divergent else "proves nothing about some outputs"
        )
        left_out = f"; not compared, because random: {', '.join(self.not_compared)}" if self.not_compared else ""
        trees = f"; {self.trees} trees equal the source's" if self.trees else ""
        return (
            f"{result} in {self.cases} calls against {self.framework or 'the source'}: the largest error is {self.max_error:.2g}, "
            f"and rounding explains {self.tolerance:.2g}{trees}{left_out}"
        )


def attach(artifact: Artifact, certificate: Certificate) -> Artifact:
    """``artifact`` with ``certificate`` in its metadata, in place of an earlier certificate. Raises ValueError for broken protobuf."""
    certificate = msgspec.structs.replace(certificate, graph_digest=digest_of_graph(artifact))
    entry = _field(_KEY, METADATA_KEY.encode()) + _field(_VALUE, msgspec.json.encode(certificate))
    parts = [
        _field(number, value) for number, value in read_fields(artifact.data) if not _is_certificate(number, value)
    ]
    data = b"".join((*parts, _field(_METADATA, entry)))
    return _with_main_file(artifact, data)


def certificate_of(artifact: Artifact) -> Certificate | None:
    """The certificate in ``artifact``; None if there is none, or if the model was changed after it was certified."""
    found = stored_certificate(artifact)
    return found if found is not None and found.graph_digest == digest_of_graph(artifact) else None


def is_outdated(artifact: Artifact) -> bool:
    """True if ``artifact`` has a certificate, but was changed after it was certified."""
    return stored_certificate(artifact) is not None and certificate_of(artifact) is None


def stored_certificate(artifact: Artifact) -> Certificate | None:
    """The certificate in ``artifact``, even if the model was changed since. None if there is no readable certificate."""
    if artifact.format is not Format.ONNX:
        return None
    try:
        for number, value in read_fields(artifact.data):
            if _is_certificate(number, value):
                assert isinstance(value, memoryview)
                return _decoded(bytes(dict(_texts(value)).get(_VALUE, b"")))
    except (ValueError, msgspec.ValidationError):
        return None
    return None


def digest_of_graph(artifact: Artifact) -> str:
    """SHA-256 of the IR version, opsets, functions, graph and external files. Raises ValueError for broken protobuf."""
    digest = hashlib.sha256()
    fields = [(number, value) for number, value in read_fields(artifact.data) if number in _DETERMINING]
    # The order of fields is up to the program that wrote the file; elements of a repeated field keep their order.
    for number, value in sorted(fields, key=lambda field: _DETERMINING.index(field[0])):
        content = write_varint(value) if isinstance(value, int) else value
        digest.update(b"%d %d " % (number, len(content)))
        digest.update(content)
    for entry in artifact.beside:
        digest.update(f"{entry.path} {entry.sha256} ".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _decoded(text: bytes) -> Certificate:
    """Read a certificate. JSON has no infinity, so null stands for it."""
    plain = msgspec.json.decode(text, type=dict[str, object])
    divergence = plain.get("first_divergent")
    for numbers, names in ((plain, ("max_error", "tolerance")), (divergence, ("error",))):
        for name in names:
            if isinstance(numbers, dict) and numbers.get(name, 0) is None:
                numbers[name] = inf
    return msgspec.convert(plain, Certificate)


def _is_certificate(number: int, value: int | memoryview) -> bool:
    if number != _METADATA or not isinstance(value, memoryview):
        return False
    return bytes(dict(_texts(value)).get(_KEY, b"")) == METADATA_KEY.encode()


def _texts(entry: memoryview) -> Iterator[tuple[int, memoryview]]:
    return ((number, value) for number, value in read_fields(entry) if isinstance(value, memoryview))


def _field(number: int, value: int | bytes | memoryview) -> bytes:
    if isinstance(value, int):
        return write_varint(number << 3 | _VARINT) + write_varint(value)
    return b"".join((write_varint(number << 3 | _LENGTH), write_varint(len(value)), value))


def _with_main_file(artifact: Artifact, data: bytes) -> Artifact:
    """``artifact`` with another main file, in memory; the other files stay where they are."""
    if artifact.beside:
        return msgspec.structs.replace(
            artifact, data=data, digest=digest_of_all(artifact.file_name, sha256(data), artifact.beside)
        )
    return msgspec.structs.replace(artifact, data=data, digest=sha256(data), path=None)
