"""PaddlePaddle: models of ``paddle.jit.save`` and ``save_inference_model``, through paddle2onnx.

paddle2onnx names the results of the n-th operator of a kind ``p2o.<kind>.<n>.<result>``, which links them with the program's values.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import paddle
import paddle2onnx
from paddle2onnx.paddle2onnx_cpp2py_export import get_all_supported_operators_pir

from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, Unsupported, printable
from penstock.offline.convert.base import (
    ConvertOptions,
    Exported,
    TensorLink,
    UnsupportedOperator,
    UnsupportedOperators,
)
from penstock.offline.convert.declarations import free_axes
from penstock.tensor import Array, DataType, Signature, TensorSpec

_MAX_OPSET = 19
_FAULTS = (OSError, RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)
_EXPORT = """
import sys, paddle2onnx
model, weights, target, opset = sys.argv[1:]
paddle2onnx.export(model, weights, target, opset_version=int(opset), optimize_tool="none")
"""
"""Runs in a process of its own, because paddle2onnx ends its process if an operator fails."""
_RENAMED = (
    "subtract",
    "multiply",
    "divide",
    "remainder",
    "floor_divide",
    "maximum",
    "minimum",
    "nonzero",
    "if",
    "while",
)
"""Supported operators that paddle2onnx lists under older names."""
_WAY_OUT = "write the layer with other operators of Paddle, and save the model again"


class PaddleConverter:
    name = "paddle"
    version = paddle.__version__

    def open(self, source: Any, options: ConvertOptions) -> PaddleModel:
        if not isinstance(source, (str, Path)):
            raise InvalidArgument(
                f"{type(source).__name__} is not a path", "save the model with paddle.jit.save, and give the path"
            )
        return PaddleModel(_program(Path(source)), options)


CONVERTER = PaddleConverter()


class PaddleModel:
    """The ``FrameworkModel`` of a saved program."""

    def __init__(self, program: Path, options: ConvertOptions) -> None:
        paddle.enable_static()
        self._path = program
        self._executor = paddle.static.Executor(paddle.CPUPlace())
        try:
            self._program, _, _ = paddle.static.load_inference_model(str(program.with_suffix("")), self._executor)
            block = self._program.global_block()
            operators = list(block.ops)
        except _FAULTS as error:
            raise InvalidModel(
                f"'{program.name}' is not a model of Paddle: {_reason(error)}", "save it again"
            ) from error
        fetches = [one for one in operators if one.name() == "pd_op.fetch"]
        self._fetched = [one.operand_source(0) for one in fetches]
        inputs = [(str(one.attrs()["name"]), one.result(0)) for one in operators if one.name() == "pd_op.data"]
        outputs = [(str(one.attrs()["name"]), value) for one, value in zip(fetches, self._fetched, strict=True)]
        self.signature = Signature(
            *(tuple(_spec(name, value) for name, value in values) for values in (inputs, outputs))
        )
        self.axes = free_axes(self.signature.inputs, options, "N")
        for one in fetches:  # the executor adds its own, and cannot run a program with two groups of them
            block.remove_op(one)
        self._values, self._where = _named(block.ops)
        scope = paddle.static.global_scope()
        stored = [str(one.attrs()["parameter_name"]) for one in operators if one.name() == "builtin.parameter"]
        self._weights = {name: scope.find_var(name) for name in stored if scope.find_var(name) is not None}

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.signature.check(inputs)
        return dict(zip(self.signature.output_names, self._run(inputs, self._fetched), strict=True))

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        found = {name: np.asarray(self._weights[name].get_tensor()) for name in names if name in self._weights}
        known = [name for name in names if name in self._values]
        values = self._run(inputs, [self._values[name] for name in known]) if known and inputs else []
        return found | dict(zip(known, values, strict=False))

    def export(self, target: Path, opset: int) -> Exported:
        weights = self._path.with_suffix(".pdiparams")
        command = [sys.executable, "-c", _EXPORT, *map(str, (self._path, weights, target, min(opset, _MAX_OPSET)))]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
        if done.returncode or not target.exists():
            self._explain(done.stdout + done.stderr, done.returncode)
        made = {name for node in onnx.load(target, load_external_data=False).graph.node for name in node.output}
        links = tuple(TensorLink(name, name, where) for name, where in self._where.items() if name in made)
        # Without an optimising tool, paddle2onnx folds nothing.
        return Exported(f"paddle2onnx {paddle2onnx.__version__}", links, weights=tuple(self._weights), computed=())

    def close(self) -> None:
        self._executor.close()

    def _run(self, inputs: Mapping[str, Array], fetched: list[Any]) -> list[Array]:
        try:
            return [np.asarray(one) for one in self._executor.run(self._program, feed=dict(inputs), fetch_list=fetched)]
        except _FAULTS as error:
            raise InvalidInput(f"Paddle rejects the input: {_reason(error)}") from error

    def _explain(self, told: str, code: int) -> NoReturn:
        """Raise the error for the log ``told`` of a failed export."""
        if "unsupported operators" in told:  # without their names
            known = [name.replace("_", "") for name in get_all_supported_operators_pir()]
            kinds = {name: name[len("p2o.pd_op.") :].rsplit(".", 2)[0] for name in self._where}
            new = {name: kind for name, kind in kinds.items() if kind.removesuffix("_") not in _RENAMED}
            missing = [
                UnsupportedOperator(kind, self._where[name], _WAY_OUT)
                for name, kind in new.items()
                if not any(kind.replace("_", "") in one for one in known)
            ]
            if missing:
                raise UnsupportedOperators.of(missing)
        lines = [line for line in told.splitlines() if "Failed" in line or "[ERROR]" in line]
        reason = lines[0].partition("model: ")[2] or lines[0] if lines else f"it ended with code {code}"
        raise Unsupported(f"paddle2onnx cannot convert the model: {printable(reason)}", _WAY_OUT)


def _program(path: Path) -> Path:
    """The file with the program of the model at ``path``, a file or a folder."""
    if not path.is_dir():
        return path
    found = [
        file
        for suffix in (".json", ".pdmodel")
        for file in sorted(path.glob(f"*{suffix}"))
        if file.with_suffix(".pdiparams").exists()
    ]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise InvalidModel(
            f"the folder '{path.name}' must have one program with a .pdiparams file, found {names}", "give the file"
        )
    return found[0]


def _named(operators: Sequence[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a program, and the layer that makes each, by the name of the tensor in ONNX."""
    counts: Counter[str] = Counter()
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    for one in operators:
        kind = one.name()
        name = f"p2o.{kind}.{counts[kind]}.0"
        counts[kind] += 1
        if kind.startswith("pd_op.") and kind not in ("pd_op.data", "pd_op.full_int_array", "pd_op.full"):
            values[name], where[name] = one.result(0), str(one.attrs().get("struct_name", ""))
    return values, where


def _spec(name: str, value: Any) -> TensorSpec:
    return TensorSpec(name, DataType.from_numpy(np.dtype(str(value.dtype).removeprefix("paddle."))), tuple(value.shape))


def _reason(error: Exception) -> str:
    """The sentence of Paddle's error that states the reason, without its trace in C++."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "Error:" in line or line.startswith("(")),
        lines[-1] if lines else type(error).__name__,
    )
