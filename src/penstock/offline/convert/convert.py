"""Convert: the story of one conversion, from a source to an ONNX model with its certificate.

::

    source ─ resolve ─ open ─ export ─ repair ─ check ─ compare ─ certificate ─ write

Files are opened in a process of their own, because loading some formats runs code. Objects, and functions that the user names, are
opened in this process. Everything is made in a temporary folder, so an interrupted conversion leaves nothing.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import msgspec

from penstock.artifact import Artifact, ProvenanceStep
from penstock.engines.custom_ops import custom_ops
from penstock.errors import (
    Code,
    InvalidArgument,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unsupported,
    WrongResult,
    prefixed,
)
from penstock.offline.apart import NotStarted, apart
from penstock.offline.convert.base import ConvertOptions, Exported, FrameworkModel, InputSpec
from penstock.offline.convert.certificate import Certificate, attach
from penstock.offline.convert.declarations import check_declared, parse_dynamic, parse_inputs
from penstock.offline.convert.parity.parity import certify
from penstock.offline.convert.registry import FORMATS, SHAPELESS, WITH_OPS, get_converter
from penstock.offline.convert.repairs import repair
from penstock.offline.convert.repairs.graphs import opset_of
from penstock.offline.convert.source import CUSTOM, ResolvedSource, read_sample, resolve
from penstock.offline.convert.worker.environments import environment
from penstock.offline.convert.worker.remote import open_remote
from penstock.offline.convert.writing import check_companions, check_output, check_room, kept, write, write_companions
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.verify import dimension_names
from penstock.offline.sessions import signature_of
from penstock.tensor import Signature
from penstock.version import __version__

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, the work done, and the total work."""

_MIN_OPSET, _MAX_OPSET = 7, 24
_SHOWN_NODES = 400
"""Characters of the nodes in a message; the certificate lists all."""


class ConvertKeywords(TypedDict, total=False):
    """The options of ``convert``, which are those of ``penstock convert``."""

    format: str
    """Format of the source; a key of ``FORMATS``. Without it, the format is detected."""
    inputs: str | Sequence[str | InputSpec]
    """Declarations of inputs, such as ``image:float32[N,3,224,224]``."""
    sample: str | os.PathLike[str] | Mapping[str, Any]
    """The inputs of one call: arrays or tensors by name, or an npz file."""
    dynamic: str | Sequence[str] | Mapping[str, Mapping[int, str]]
    """Free dimensions: ``{"image": {0: "batch"}}``, or texts such as ``image:0=batch``."""
    opset: int
    outputs: str | Sequence[str]
    """Outputs to keep. Without it, all are kept."""
    weights: str | os.PathLike[str]
    """File with the weights, for sources that keep them apart."""
    signature: str
    """Signature of a SavedModel. Without it, ``serving_default`` or else the first one is taken."""
    trust_pickle: bool
    """Load formats that can run code. Even then, only names on an allow-list are unpickled."""
    isolated: bool
    """Convert in an environment that has only the packages of the source's framework."""
    ops: str | os.PathLike[str]
    """Python file with ``@penstock.register_op`` definitions."""
    keep_failed: bool
    """Return and write the model even if its outputs differ from the source's."""
    parity: bool
    """False: do not compare the outputs, and give no certificate."""
    seed: int
    """Seed of the compared inputs."""


class Conversion(msgspec.Struct, frozen=True):
    """The result of a conversion."""

    artifact: Artifact
    """The ONNX model, with the certificate in it."""
    format: str
    exporter: str
    opset: int
    signature: Signature
    certificate: Certificate | None
    """None if the outputs were not compared."""
    warnings: tuple[str, ...] = ()
    output: Path | None = None
    """The written file; None if there is none."""
    companions: tuple[Path, ...] = ()
    """Files of the source that were copied beside ``output``, such as those of a tokenizer."""

    @property
    def axes(self) -> dict[str, list[str]]:
        """The names of the dimensions of each input and output. A dimension without a name has the name ""."""
        return dimension_names(read_proto(self.artifact))

    def __repr__(self) -> str:
        told = self.certificate.text if self.certificate else "not compared"
        return f"<Conversion of {self.format}: {self.signature.input_names} to {self.signature.output_names}, {told}>"


class _Opened(NamedTuple):
    """A loaded source, the name and version of its framework, and warnings."""

    model: FrameworkModel
    framework: str
    notes: tuple[str, ...] = ()


class ParityFailed(WrongResult):
    """The ONNX model's outputs differ from the source's. ``conversion`` has the model and the failed certificate."""

    code = Code.FAILED_PRECONDITION
    conversion: Conversion | None = None


def convert(
    source: Any,
    output: str | os.PathLike[str] | None = None,
    on_progress: OnProgress = lambda *_: None,
    **keywords: Unpack[ConvertKeywords],
) -> Conversion:
    """Convert ``source`` to ONNX, compare the outputs of both, and write the model with its certificate to ``output``.

    ``source`` is a file, a folder, ``module:function`` or an object of a framework. Raises NotFound, InvalidArgument, InvalidModel,
    Unavailable if a package is missing, PermissionDenied if loading can run code, UnsupportedOperators, ResourceExhausted, and
    ParityFailed if the outputs differ.
    """
    options, target = _options(keywords), Path(output) if output is not None else None
    on_progress("open", 0, 1)
    found = resolve(source, keywords.get("format", ""), options.weights)
    _check(found, options, target)
    if not (batch := _batch_of_sample(found, options)):
        return _convert(found, target, on_progress, options, keywords)
    try:
        return _convert(
            found, target, on_progress, msgspec.structs.replace(options, dynamic=batch), keywords, is_guess=True
        )
    except (InvalidArgument, ParityFailed, Unsupported) as error:  # the dimension is no batch, or is fixed
        fixed = _convert(found, target, on_progress, options, keywords)
        flags = " ".join(f"--dynamic {name}:0=batch" for name in batch)
        told = f"all inputs have the sizes of the sample ({error.message}); {flags} makes the first dimension free"
        return msgspec.structs.replace(fixed, warnings=(*fixed.warnings, told))


def _batch_of_sample(source: ResolvedSource, options: ConvertOptions) -> dict[str, dict[int, str]]:
    """``dynamic`` for a batch dimension in inputs that only the sample describes. Empty if the user or the source describes them."""
    if options.inputs or options.dynamic or source.format not in SHAPELESS:
        return {}
    sizes = {name: array.shape[0] for name, array in options.sample.items() if array.ndim > 1}
    batch = next(iter(sizes.values()), 0)
    return {name: {0: "batch"} for name, size in sizes.items() if size == batch}


def _convert(
    found: ResolvedSource,
    target: Path | None,
    on_progress: OnProgress,
    options: ConvertOptions,
    keywords: ConvertKeywords,
    *,
    is_guess: bool = False,
) -> Conversion:
    """Convert with these ``options``. If ``is_guess``, raises Unsupported unless all inputs and outputs have a batch dimension."""
    with tempfile.TemporaryDirectory(prefix="penstock-convert-", ignore_cleanup_errors=True) as folder:
        python = _environment(found, on_progress) if keywords.get("isolated", False) else None
        with _opened(found, options, python) as opened:
            model = opened.model
            _check_axes(options, model.signature)
            if is_guess and not model.signature.batchable:
                raise Unsupported("not all inputs and outputs have a batch dimension")
            on_progress("export", 0, 1)
            with _explained(found, "be exported"):
                exported = model.export(Path(folder, "model.onnx"), options.opset)
            needs = _needs(exported, options, is_remote=bool(found.files))
            artifact, repaired = _valid(Path(folder, "model.onnx"), exported)
            certificate = None
            if keywords.get("parity", True):
                on_progress("compare", 0, 1)
                certificate = certify(artifact, model, exported, options, seed=keywords.get("seed", 0))
                certificate = msgspec.structs.replace(certificate, notes=(*needs, *certificate.notes))
            signature = model.signature
        made = Conversion(
            kept(artifact),
            found.format,
            exported.exporter,
            opset_of(read_proto(artifact)),
            signature,
            certificate and _completed(certificate, found, opened.framework, exported, opset_of(read_proto(artifact))),
            (*opened.notes, *(() if certificate else needs), *exported.warnings, *repaired),
        )
        return _finished(made, found, target, options, keep_failed=keywords.get("keep_failed", False))


def _options(keywords: ConvertKeywords) -> ConvertOptions:
    """The options for the converter. Raises InvalidArgument, InvalidData, NotFound."""
    dynamic, opset = keywords.get("dynamic", {}), keywords.get("opset", ConvertOptions().opset)
    if not _MIN_OPSET <= opset <= _MAX_OPSET:
        raise InvalidArgument(
            f"--opset must be from {_MIN_OPSET} to {_MAX_OPSET}, got {opset}", "leave it out, or use 21"
        )
    ops = keywords.get("ops")
    if ops is not None and not Path(ops).is_file():
        raise InvalidArgument(f"no Python file '{ops}' with operators", "check --ops")
    inputs = parse_inputs(_several(keywords.get("inputs", ())))
    sample = read_sample(keywords["sample"]) if keywords.get("sample") is not None else {}
    weights = keywords.get("weights")
    return ConvertOptions(
        inputs=inputs,
        sample=sample,
        dynamic=dynamic if isinstance(dynamic, Mapping) else parse_dynamic(_several(dynamic)),
        opset=opset,
        outputs=tuple(_several(keywords.get("outputs", ()))),
        weights=Path(weights) if weights is not None else None,
        signature=keywords.get("signature", ""),
        trust_pickle=keywords.get("trust_pickle", False),
        ops=Path(ops) if ops is not None else None,
    )


def _several(given: Any) -> Any:
    """``given``, a sequence or one text."""
    return (given,) if isinstance(given, str) else given


def _check(source: ResolvedSource, options: ConvertOptions, output: Path | None) -> None:
    """Raise an error before any long work if the conversion cannot end well."""
    if source.files and FORMATS[source.format].runs_code and not options.trust_pickle:
        raise PermissionDenied(
            f"'{source.name}' is a {FORMATS[source.format].title}, and loading it can run code",
            "if you trust its author, add --trust-pickle (in Python: trust_pickle=True)",
        )
    if options.signature and source.format != "saved_model":
        raise InvalidArgument(
            f"--signature is '{options.signature}', but '{source.name}' is no SavedModel", "leave out --signature"
        )
    if options.ops is not None and source.format not in WITH_OPS:
        title = FORMATS[source.format].title if source.format in FORMATS else "FrameworkModel"
        raise InvalidArgument(
            f"--ops is '{options.ops}', but '{source.name}' is of the kind {title}, whose operators cannot be defined",
            f"leave out --ops; only these formats take it: {', '.join(sorted(WITH_OPS))}",
        )
    for spec in options.inputs:
        array = options.sample.get(spec.name)
        if array is not None and spec.shape is not None and array.ndim != len(spec.shape):
            raise InvalidArgument(
                f"--inputs gives input '{spec.name}' {len(spec.shape)} dimensions, but the sample has {array.ndim}",
                "leave out one of them",
            )
        for axis in options.dynamic.get(spec.name, {}):
            if spec.shape is not None and axis >= len(spec.shape):
                raise InvalidArgument(
                    f"--dynamic lists axis {axis} of input '{spec.name}', which has {len(spec.shape)} dimension(s)",
                    "axes count from 0",
                )
    if output is not None:
        check_output(output, source.files)
        check_companions(source.companions, output)
    check_room(source.size_bytes, output)


def _environment(source: ResolvedSource, on_progress: OnProgress) -> Path:
    """The interpreter of the isolated environment for the source's format."""
    if not source.files:
        raise InvalidArgument(
            f"'{source.name}' is an object of this process, which cannot be isolated",
            "save the model to a file, and give that",
        )
    return environment(FORMATS[source.format], lambda _: on_progress("install", 0, 1))


@contextmanager
def _opened(source: ResolvedSource, options: ConvertOptions, python: Path | None) -> Iterator[_Opened]:
    """The loaded source. Files are loaded in another process, with the interpreter ``python`` of another environment if given."""
    if source.format == CUSTOM:  # the caller closes its own model
        yield _Opened(source.given, source.name)
        return
    with _explained(source, "be loaded"):
        if source.files:
            remote = open_remote(source.format, source.given, options, python)
            opened = _Opened(remote, f"{remote.framework} {remote.version}", remote.notes)
        else:
            converter = get_converter(source.format)
            opened = _Opened(converter.open(source.given, options), f"{converter.name} {converter.version}")
    try:
        yield opened
    finally:
        opened.model.close()


@contextmanager
def _explained(source: ResolvedSource, action: str) -> Iterator[None]:
    """Turn any exception of a framework into an error that names the source."""
    try:
        yield
    except PenstockError as error:
        if type(error) is PenstockError:  # an exception of a framework in the other process
            raise prefixed(f"'{source.name}' cannot {action}: ", error) from error
        raise
    except MemoryError:
        raise ResourceExhausted(
            f"there is not enough memory to convert '{source.name}'", "use a larger machine"
        ) from None
    except Exception as error:
        told = str(error).strip().partition("\n")[0][:400]
        raise PenstockError(
            f"'{source.name}' cannot {action}: {type(error).__name__}: {told}",
            "check that the framework itself runs the model",
        ) from error


def _check_axes(options: ConvertOptions, signature: Signature) -> None:
    for name in options.dynamic:
        if name not in signature.input_names:
            raise InvalidArgument(
                f"--dynamic names input '{name}', which the model does not have",
                f"its inputs are {signature.input_names}",
            )
    for spec in signature.inputs:
        check_declared(spec, options)


def _needs(exported: Exported, options: ConvertOptions, *, is_remote: bool) -> tuple[str, ...]:
    """Says which operators in Python the model needs. If another process exported it, runs their file, because this one lacks them."""
    if not exported.python_ops:
        return ()
    files = {one.name: one.file for one in custom_ops(options.ops if is_remote else None)}
    listed = ", ".join(f"{name} of '{files.get(name, '')}'" for name in exported.python_ops)
    return (
        f"the model is a prototype: it runs only where --ops names the file with its operators in Python, {listed}",
    )


def _valid(path: Path, exported: Exported) -> tuple[Artifact, tuple[str, ...]]:
    """The exported model after the repairs, and a text for each repair. Raises WrongResult if the model is still invalid."""
    try:
        artifact, warnings = repair(Artifact.from_file(path))
        read_proto(artifact)
        apart.call(signature_of, artifact)
    except NotStarted:
        raise
    except PenstockError as error:
        raise WrongResult(
            f"{exported.exporter} wrote an invalid model: {error.message}", "try another --opset, or a newer exporter"
        ) from error
    return artifact, warnings


def _completed(
    certificate: Certificate, source: ResolvedSource, framework: str, exported: Exported, opset: int
) -> Certificate:
    return msgspec.structs.replace(
        certificate,
        format=source.format,
        framework=framework,
        exporter=exported.exporter,
        opset=opset,
        source_digest=source.digest(),
        penstock=__version__,
    )


def _finished(
    made: Conversion, source: ResolvedSource, output: Path | None, options: ConvertOptions, *, keep_failed: bool
) -> Conversion:
    """Attach the certificate, and write the model. Raises ParityFailed."""
    failed = made.certificate is not None and not made.certificate.holds
    artifact = made.artifact
    if output is not None and not (failed and not keep_failed):
        artifact = write(artifact, made.certificate, output)
        companions = write_companions(source.companions, output)
        made = msgspec.structs.replace(made, output=output, companions=companions)
    elif made.certificate is not None:
        artifact = attach(artifact, made.certificate)
    step = provenance(made.certificate) if made.certificate else ()
    made = msgspec.structs.replace(made, artifact=msgspec.structs.replace(artifact, provenance=step))
    if failed and not keep_failed:
        error = ParityFailed(*_difference(made.certificate, source))
        error.conversion = made
        raise error
    return made


def provenance(certificate: Certificate) -> tuple[ProvenanceStep, ...]:
    """The conversion as the first step of an artifact's provenance."""
    options = {"format": certificate.format, "exporter": certificate.exporter, "opset": certificate.opset}
    facts = {"parity": certificate.text, "certificate": msgspec.to_builtins(certificate)}
    return (ProvenanceStep("convert", certificate.source_digest, options, facts),)


def _difference(certificate: Certificate | None, source: ResolvedSource) -> tuple[str, str]:
    """Message and hint of a failed comparison."""
    assert certificate is not None
    first = certificate.first_divergent
    if first is None:
        reasons = [note for note in certificate.notes if "prove" in note] or list(certificate.notes)
        return (
            f"the outputs of the ONNX model are not proved to be those of '{source.name}': {'; '.join(reasons)}",
            "no difference was found; give a call with --sample on which the outputs do not depend on rounding, or --keep-failed",
        )
    told = (
        f"the ONNX model does not give the outputs of '{source.name}': the error is {certificate.max_error:.3g}, and rounding "
        f"explains {certificate.tolerance:.3g}"
    )
    place = ", ".join(filter(None, (first.source, first.where)))
    nodes = textwrap.shorten(first.node, _SHOWN_NODES, placeholder=" ...")
    told += f"; node '{nodes}'{place and f' ({place})'} differs"
    told += " first" if first.is_first else "; the nodes before it could not be compared"
    return told, "try another --opset or a newer exporter; --keep-failed writes the model nevertheless"
