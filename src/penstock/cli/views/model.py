"""Looks into a model for ``penstock inspect``, and prints what is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from penstock.artifact import Format
from penstock.cli.infer import write_npz
from penstock.offline.convert.certificate import Certificate
from penstock.offline.look.facts import CostFacts, ModelFacts, TensorFacts
from penstock.offline.look.look import Look, Source, look, make_template, next_command
from penstock.rows.proof import advice
from penstock.tensor import Signature

_TITLES = {
    "onnx": "ONNX",
    "torchscript": "TorchScript",
    "exported_program": "exported program",
    "openvino_ir": "OpenVINO",
    "tflite": "TensorFlow Lite",
    "saved_model": "SavedModel",
}


def inspect_model(console: Console, path: Path, template: Path | None, shown: str, *, json: bool) -> None:
    """Print the facts about the model at ``path``, and write samples to ``template``. Raises the errors of ``look``.

    ``shown`` is the path that the user gave, which differs from ``path`` if the model was converted.
    """
    found = look(path, shown)
    facts = found.facts if template is None else _with_template(found, shown, template)
    if json:
        print(msgspec.json.encode(facts).decode())
        return
    show(console, facts)
    if template is not None:
        console.print(f"template  {escape(str(template))}", soft_wrap=True)


def write_template(source: Source, target: Path) -> None:
    """Write samples for a model to the npz file ``target``. Raises Unsupported if none can be made."""
    write_npz(target, make_template(look(source)))


def _with_template(found: Look, shown: str, target: Path) -> ModelFacts:
    """The facts after writing samples to ``target``, which the command to type next then uses."""
    facts = found.facts
    write_npz(target, make_template(found))
    if not facts.has_rows:
        note = (
            f"a sample is a whole call, so the arrays in '{target}' have one more axis, the first, which counts calls"
        )
        facts = msgspec.structs.replace(facts, notes=(*facts.notes, note))
    if facts.next_command:
        command = next_command(Format(facts.format), shown, str(target))
        facts = msgspec.structs.replace(facts, next_command=command)
    return facts


def show(console: Console, facts: ModelFacts) -> None:
    """Print ``facts`` as text."""
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts.opsets.items())
    console.print(
        f"[bold]{escape(facts.model)}[/bold]  {_TITLES.get(facts.format, facts.format)}, {_size(facts.size_bytes)}"
        + (f", opset {escape(opsets)}" if opsets else "")
    )
    for title, text in lines(facts):
        console.print(f"{title:<9} {escape(text)}", soft_wrap=True)


def lines(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """The title and the text of each line."""
    for title, tensors in (("input", facts.inputs), ("output", facts.outputs)):
        for one in tensors:
            yield title, tensor_text(one, facts.axes.get(one.name, ()))
    if facts.operators:
        counted = ", ".join(f"{operator} {count}" for operator, count in facts.operators.items())
        yield "operators", f"{sum(facts.operators.values())}: {counted}"
    if facts.weight_bytes is not None:
        count = "" if facts.parameters is None else f"{facts.parameters:,} parameters, "
        yield "weights", f"{count}{_size(facts.weight_bytes)}"
    yield from _memory(facts)
    for engine in facts.engines:
        yield "engine", f"{engine.name} runs it" if engine.runs else f"{engine.name} does not run it: {engine.reason}"
    if facts.quantised:
        yield "int8", f"already quantised: {facts.quantised}"
    elif facts.format == "onnx":
        yield "int8", _integer(facts.cost)
    yield "rows", _rows(facts)
    if facts.sample_failure:
        yield "sample", f"rejected: {facts.sample_failure}"
    elif facts.sample_shapes and any(engine.runs for engine in facts.engines):
        yield "sample", f"accepted: {shapes_text(facts.sample_shapes)}"
    yield from _remarks(facts)


def _remarks(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    if facts.certificate is not None:
        yield from certificate_lines(facts.certificate)
    for note in facts.notes:
        yield "note", note
    if facts.next_command:
        yield "next", facts.next_command


def certificate_lines(certificate: Certificate) -> Iterator[tuple[str, str]]:
    """What ``certificate`` proves, and what it leaves out."""
    yield "parity", certificate.text
    for one in certificate.proved:
        yield "proof", f"output '{one.output}' is proved by {one.calls} of {one.of} calls"
    for note in certificate.notes:
        yield "note", note


def tensor_text(tensor: TensorFacts, names: Sequence[str]) -> str:
    """``x  FP32[N, 3]  features (3 number(s) per row)``. A free axis has its name, or ``N``."""
    if tensor.shape is None:
        return f"{tensor.name}  {tensor.datatype}[…]"
    known = names if len(names) == len(tensor.shape) else ("",) * len(tensor.shape)
    shape = ", ".join(str(dim) if dim >= 0 else name or "N" for dim, name in zip(tensor.shape, known, strict=True))
    return f"{tensor.name}  {tensor.datatype}[{shape}]" + (f"  {tensor.meaning}" if tensor.meaning else "")


def shapes_text(shapes: dict[str, tuple[int, ...]]) -> str:
    """``x [1, 3], mask [1]``."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _memory(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    parts = [f"at most {_size(one.memory_bytes)} loaded on {one.name}" for one in facts.engines if one.runs]
    if facts.cost.activation_bytes is not None:
        parts.append(f"{_size(facts.cost.activation_bytes)} for the tensors of one call")
    if parts:
        yield "memory", ", ".join(parts)


def _integer(cost: CostFacts) -> str:
    if cost.obstacle:
        return f"nothing would be quantised: {cost.obstacle}"
    work = "" if cost.share_of_work is None else f" and {cost.share_of_work:.0%} of the multiply-adds"
    return (
        f"{cost.quantisable} of {cost.linear} linear operators would be quantised, "
        f"with {cost.share_of_weights:.0%} of the weights{work}"
    )


def _rows(facts: ModelFacts) -> str:
    if not facts.dependent_rows:
        return "independent, so requests can be merged"
    specs = [tuple(spec for one in side if (spec := one.spec) is not None) for side in (facts.inputs, facts.outputs)]
    hint = f"; {advice(Signature(*specs))}" if facts.sample_shapes else ""
    return f"not proven to be independent: {facts.dependent_rows}{hint}"


def _size(size_bytes: int) -> str:
    if size_bytes < 1024:
        return f"{size_bytes} B"
    if size_bytes >= 100 << 20:
        return f"{size_bytes / (1 << 20):,.0f} MiB"
    return f"{size_bytes / (1 << 20):.1f} MiB" if size_bytes >= 1 << 20 else f"{size_bytes / 1024:.1f} KiB"
