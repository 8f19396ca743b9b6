"""Converts a model as a user does, builds it, serves it, and compares Triton's client with the framework."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as triton

from benchmarks.zoo.model import ZooModel, keywords
from commands import Command
from penstock.errors import PenstockError
from penstock.inputs.meanings import meanings_of
from penstock.offline.convert.base import ConvertOptions, FrameworkModel
from penstock.offline.convert.convert import Conversion, convert
from penstock.offline.convert.parity.cases import Maker
from penstock.offline.convert.registry import get_converter
from penstock.offline.convert.worker.remote import open_remote
from penstock.tensor import Array, Signature
from processes import ServerProcess

_NAME = "converted"


def assert_served(penstock: Command, zoo: ZooModel, given: Any, folder: Path, python: Path | None = None) -> Conversion:
    """Convert ``given``, a model of ``zoo``, in ``folder``, and assert that a server gives the framework's answers for it.

    ``python`` is the interpreter of the isolated environment.
    """
    file, bundle = folder / "converted.onnx", folder / "converted.bundle"
    conversion = convert(given, file, **(keywords(zoo.options) | {"isolated": python is not None}))
    assert conversion.format == zoo.format
    assert conversion.certificate is not None
    assert conversion.certificate.holds, conversion.certificate.text
    outcome = penstock(
        *("build", file, "--synthetic", "16", "--method", "none", "--budget", "10s"),
        *("--name", _NAME, "--output", bundle),
    )
    assert outcome.code == 0, outcome.err
    source = _opened(zoo, given, python)
    try:
        inputs = _inputs(zoo.options, source)
        wanted, signature = source.forward(inputs), source.signature
    finally:
        source.close()
    with ServerProcess(bundle) as server:
        found = _asked(server, signature, inputs)
    for name, array in wanted.items():
        _assert_close(found[name], array, name)
    return conversion


def _opened(zoo: ZooModel, given: Any, python: Path | None) -> FrameworkModel:
    if isinstance(given, Path):
        return open_remote(zoo.format, given, zoo.options, python)
    return get_converter(zoo.format).open(given, zoo.options)


def _inputs(options: ConvertOptions, source: FrameworkModel) -> dict[str, Array]:
    """The sample, or plausible inputs that the source accepts."""
    if options.sample:
        return dict(options.sample)
    maker = Maker(source.signature, source.axes, meanings_of(source.signature), 5)
    for shapes in maker.shapes():
        inputs = maker.plausible(shapes).inputs
        with contextlib.suppress(PenstockError):
            source.forward(inputs)
            return inputs
    raise AssertionError("the source accepts none of the plausible inputs")


def _asked(server: ServerProcess, signature: Signature, inputs: Mapping[str, Array]) -> dict[str, Array]:
    tensors = []
    for spec in signature.inputs:
        tensor = triton.InferInput(spec.name, inputs[spec.name].shape, spec.datatype.value)
        tensor.set_data_from_numpy(inputs[spec.name])
        tensors.append(tensor)
    with triton.InferenceServerClient("{}:{}".format(*server.address)) as client:
        answer = client.infer(_NAME, tensors)
        return {spec.name: answer.as_numpy(spec.name) for spec in signature.outputs}


def _assert_close(found: Array, wanted: Array, name: str) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if wanted.dtype.kind == "f":
        scale = float(np.abs(wanted).max(initial=0.0))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * scale, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)
