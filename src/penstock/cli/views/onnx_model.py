"""Reads and prints the contents of an ONNX file for ``penstock inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from rich.console import Console
from rich.markup import escape

from penstock.artifact import Artifact, Format
from penstock.engines.registry import engines_for, get_engine
from penstock.errors import InvalidModel
from penstock.rows.graph import OnnxGraph, read_graph
from penstock.rows.proof import advice, unproven
from penstock.tensor import Signature, TensorSpec


class OnnxFacts(msgspec.Struct):
    """The contents of an ONNX model. The JSON output has the same fields."""

    model: str
    size_bytes: int
    opsets: dict[str, int]
    """Opset version by domain. The default domain is named ``ai.onnx``."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, tuple[str, ...]]
    """The names of the axes of each input and output. A name is empty if the axis has a fixed size or no name."""
    operators: dict[str, int]
    """Number of nodes by operator, subgraphs included."""
    dependent_rows: str
    """Why requests cannot be merged; empty if the rows are proven to be independent."""


def read(artifact: Artifact) -> OnnxFacts:
    """Read an ONNX model. Raises InvalidModel."""
    try:
        model = read_graph(artifact.data)
    except ValueError as error:
        raise InvalidModel(f"'{artifact.name}' is not an ONNX model: {error}") from None
    loaded = get_engine(engines_for(Format.ONNX)[0]).load(artifact, {})
    signature: Signature = loaded.signature
    loaded.unload()
    operators = Counter(_operators([model.graph, *(function.body for function in model.functions.values())]))
    return OnnxFacts(
        artifact.name,
        artifact.size_bytes,
        {domain or "ai.onnx": version for domain, version in model.opsets.items()},
        signature.inputs,
        signature.outputs,
        _axes(artifact.data),
        dict(sorted(operators.items(), key=lambda pair: (-pair[1], pair[0]))),
        unproven(artifact, signature),
    )


def show(console: Console, facts: OnnxFacts) -> None:
    """Print ``facts`` as text."""
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts.opsets.items())
    console.print(
        f"[bold]{escape(facts.model)}[/bold]  ONNX, {facts.size_bytes / 1024:.1f} KiB, opset {escape(opsets)}"
    )
    for kind, specs in (("input", facts.inputs), ("output", facts.outputs)):
        for spec in specs:
            names = facts.axes.get(spec.name, ())
            names = names if len(names) == len(spec.shape) else ("",) * len(spec.shape)
            shape = ", ".join(
                str(dim) if dim >= 0 else name or "N" for dim, name in zip(spec.shape, names, strict=True)
            )
            console.print(f"{kind:<9} {escape(spec.name)}  {spec.datatype.value}{escape(f'[{shape}]')}")
    counted = ", ".join(f"{operator} {count}" for operator, count in facts.operators.items())
    console.print(f"operators {sum(facts.operators.values())}: {escape(counted)}", soft_wrap=True)
    reason = (
        f"not proven to be independent: {facts.dependent_rows}; {advice(Signature(facts.inputs, facts.outputs))}"
        if facts.dependent_rows
        else "independent"
    )
    console.print(
        f"rows      {escape(reason)}" + ("" if facts.dependent_rows else ", so requests can be merged"), soft_wrap=True
    )


def _axes(data: bytes) -> dict[str, tuple[str, ...]]:
    import onnx  # noqa: PLC0415 - takes long, and bundles do not need it

    graph = onnx.load_model_from_string(data).graph
    return {
        value.name: tuple(
            axis.dim_param if axis.dim_param.isprintable() else "" for axis in value.type.tensor_type.shape.dim
        )
        for value in (*graph.input, *graph.output)
    }


def _operators(graphs: Iterable[OnnxGraph]) -> Iterator[str]:
    pending = list(graphs)
    while pending:
        for node in pending.pop().nodes:
            yield f"{node.domain}.{node.operator}" if node.domain not in ("", "ai.onnx") else node.operator
            pending += (value for value in node.attributes.values() if isinstance(value, OnnxGraph))
