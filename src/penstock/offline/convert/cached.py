"""Models of any format for the commands that need ONNX: a source is converted once, and kept under the user's cache folder.

The key is a digest of the source's files and of all versions that influence the result. Functions, ``module:function``, are converted
each time, because the code that they run is not known.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from penstock.artifact import Artifact, Format, format_of, local_path, sha256
from penstock.errors import PenstockError
from penstock.offline.convert.certificate import certificate_of
from penstock.offline.convert.convert import OnProgress, convert, provenance
from penstock.offline.convert.registry import FORMATS
from penstock.offline.convert.source import ResolvedSource, resolve
from penstock.offline.convert.worker.environments import cache_folder
from penstock.samples.user_code import apart_from_output
from penstock.version import __version__

_PACKAGES = (
    *("onnx", "onnxruntime", "onnxscript", "numpy", "scipy", "torch", "torchvision", "timm", "transformers"),
    *("safetensors", "tensorflow", "tensorflow-cpu", "tf2onnx", "keras", "tf-keras", "h5py", "ai-edge-litert"),
    *("jax", "jaxlib", "jax2onnx", "flax", "scikit-learn", "skl2onnx", "skops", "joblib", "xgboost"),
    *("lightgbm", "catboost", "paddlepaddle", "paddlepaddle-gpu", "paddle2onnx"),
)
"""Packages that can influence the result of a conversion, by the names of their distributions."""
_OPTIONS = {
    "--dynamic": "INPUT:AXIS=NAME",
    "--from": "FORMAT",
    "--inputs": "DECLARATION",
    "--isolated": "",
    "--keep-failed": "",
    "--ops": "FILE.py",
    "--opset": "VERSION",
    "--outputs": "NAME",
    "--sample": "FILE.npz",
    "--signature": "NAME",
    "--trust-pickle": "",
    "--weights": "FILE",
}
"""Options of ``penstock convert``, with the values to show where a hint leaves them out."""
_OPTION = rf"""(?P<name>{"|".join(_OPTIONS)})\b(?: (?P<value>"[^"]+"|'[^']+'|[\w.]*[\[:=][^\s,;]*))?"""
_SOME_OPTIONS = re.compile(rf"(?:{re.sub('P<[a-z]+>', ':', _OPTION)} ?)+")


def read_model(model: str | Path | Artifact, on_progress: OnProgress = lambda *_: None) -> Artifact:
    """``model`` as an ONNX artifact. A source of another format is converted, unless the cache has the result.

    A valid certificate becomes the first step of the artifact's provenance. Raises the errors of ``Artifact.from_file`` and
    ``convert``.
    """
    if isinstance(model, Artifact):
        return model
    artifact = Artifact.from_file(onnx_file(model, on_progress))
    certificate = certificate_of(artifact)
    return artifact if certificate is None else msgspec.structs.replace(artifact, provenance=provenance(certificate))


def onnx_file(model: str | Path, on_progress: OnProgress = lambda *_: None) -> Path:
    """The path of ``model`` if it is an ONNX file; otherwise, the path of the ONNX file made from it, with the same stem."""
    if format_of(local := local_path(model)) is Format.ONNX:
        return local
    with _naming_convert(model):
        return _converted(model, on_progress)


def _converted(model: str | Path, on_progress: OnProgress) -> Path:
    source = resolve(model)
    folder = cache_folder("converted") / _key(source)
    target = folder / f"{_stem(source)}.onnx"
    if source.files and target.is_file() and _is_result(target, source.digest()):
        return target
    folder.mkdir(exist_ok=True)
    with apart_from_output():  # what frameworks print is no result of the command
        convert(model, target, on_progress)
    return target


@contextlib.contextmanager
def _naming_convert(model: str | Path) -> Iterator[None]:
    """Replace options of ``penstock convert`` in the hint of an error by the whole command, because other commands lack them."""
    try:
        yield
    except PenstockError as error:
        found = _SOME_OPTIONS.search(error.hint)
        if found and "penstock convert" not in error.hint:
            options = re.finditer(_OPTION, found[0])
            given = " ".join(f"{one['name']} {one['value'] or _OPTIONS[one['name']]}".rstrip() for one in options)
            made = f"{Path(model).stem.rpartition(':')[2]}.onnx"
            command = f"penstock convert {shlex.quote(str(model))} {given} -o {made}"
            error.hint = f"run `{command}` first, and give {made}; {error.hint}"
        raise


def _is_result(target: Path, digest: str) -> bool:
    """True if the file ``target`` has a certificate that holds, for the source with this ``digest``."""
    certificate = certificate_of(Artifact.from_file(target))
    return certificate is not None and certificate.holds and certificate.source_digest == digest


def _key(source: ResolvedSource) -> str:
    versions = {"penstock": __version__, "format": source.format}
    for name in (*_PACKAGES, FORMATS[source.format].package):
        with contextlib.suppress(PackageNotFoundError, ValueError):
            versions[name] = version(name)
    described: Any = [source.digest() or source.name, sorted(versions.items())]
    return sha256(msgspec.json.encode(described))[:32]


def _stem(source: ResolvedSource) -> str:
    """The name of the model, as the server derives it from a path."""
    return source.name.rpartition(":")[2] if not source.files else Path(source.name).stem
