"""Export an architecture to ONNX as users do: by either exporter of torch, or by the library's own converter."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import Any

import onnx

from penstock.tensor import Array
from tests.exporters.architecture import Architecture
from tests.exporters.libraries import installed

ROWS = 4
"""The batch of models with a fixed one."""


def ways(architecture: Architecture) -> list[tuple[str, str]]:
    """The exporters that can be tried, with free and fixed batch."""
    if architecture.library not in ("torch", "torchvision", "timm", "transformers"):
        return [("converter", "free"), ("converter", "fixed")]
    exporters = ["torchscript", "dynamo"] if installed("onnxscript") else ["torchscript"]
    return [(exporter, batch) for exporter in exporters for batch in ("free", "fixed")]


def export(architecture: Architecture, made: Any, exporter: str, batch: str) -> bytes:
    """The ONNX model. Raises whatever the exporter raises."""
    if exporter == "converter":
        return made if batch == "free" else with_rows(made, ROWS)
    import torch

    example = {name: torch.from_numpy(array) for name, array in architecture.rows(ROWS, 0).items()}
    module = made.eval()
    written = io.BytesIO()
    common: dict[str, Any] = {"input_names": list(example), "opset_version": architecture.opset}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            results = module(*example.values())
            count = len(results) if isinstance(results, tuple) else 1
            common["output_names"] = [f"out{number}" for number in range(count)]
            free = {name: {0: "N"} for name in (*example, *common["output_names"])}
            common["dynamic_axes"] = free if batch == "free" else None
            # TorchScript's exporter cannot write the fused encoder layers that torch runs in evaluation.
            is_fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                torch.onnx.export(module, tuple(example.values()), written, dynamo=False, **common)
            finally:
                torch.backends.mha.set_fastpath_enabled(is_fast)
            return written.getvalue()
        rows = torch.export.Dim("N", min=1, max=1024)
        shapes = tuple({0: rows} for _ in example) if batch == "free" else None
        common["opset_version"] = 18
        program = torch.onnx.export(
            module,
            tuple(example.values()),
            dynamo=True,
            dynamic_shapes=_shapes(module, shapes),
            verbose=False,
            **common,
        )
        program.save(written)
        return written.getvalue()


def _shapes(module: Any, shapes: tuple[Any, ...] | None) -> Any:
    """A module whose inputs are ``*inputs`` takes the shapes as one value."""
    import inspect

    kinds = [one.kind for one in inspect.signature(module.forward).parameters.values()]
    return (shapes,) if shapes is not None and inspect.Parameter.VAR_POSITIONAL in kinds else shapes


def with_rows(data: bytes, count: int) -> bytes:
    """The model for ``count`` rows only."""
    model = onnx.load_model_from_string(data)
    initial = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in initial and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].ClearField("dim_param")
            value.type.tensor_type.shape.dim[0].dim_value = count
    for value in model.graph.output:
        if value.type.HasField("tensor_type") and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].ClearField("dim_param")
            value.type.tensor_type.shape.dim[0].ClearField("dim_value")
    return bytes(model.SerializeToString())


def fitting(rows: Mapping[str, Array], data: bytes) -> dict[str, Array]:
    """``rows`` under the names of the model's inputs, which some exporters change."""
    model = onnx.load_model_from_string(data)
    initial = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in initial]
    return rows if set(names) <= rows.keys() else dict(zip(names, rows.values(), strict=True))  # type: ignore[return-value]
