"""Exports a torch model by the first exporter that succeeds: dynamo, TorchScript by tracing, TorchScript by scripting.

1. An exporter's model counts only if ONNX Runtime loads it, and returns the shapes of the torch model for two sizes of each free
   dimension. Tracing can turn a size into a constant.
2. Tracing also turns a decision that depends on values into a constant. A traced model is rejected if dynamo has found one.
3. If all exporters fail, one error lists all operators that cannot be converted, or else the reason of every exporter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass

from penstock.artifact import Artifact
from penstock.engines.custom_ops import TENSORFLOW, CustomOp, OperatorFailed
from penstock.engines.torch import to_array
from penstock.errors import EngineUnavailable, PenstockError, Unsupported, WrongResult
from penstock.offline.apart import NotStarted, apart
from penstock.offline.convert.base import Exported, UnsupportedOperators
from penstock.offline.convert.quiet import quiet
from penstock.offline.convert.torch import attention, links
from penstock.offline.convert.torch.arguments import Flat
from penstock.offline.convert.torch.definitions import (
    WrongDefinition,
    blaming,
    check_definitions,
    check_python,
    in_onnx,
)
from penstock.offline.convert.torch.diagnosis import (
    ExportFailure,
    diagnosis,
    missing_operators,
    with_inner_operators,
)
from penstock.tensor import Array

_LEAST_DYNAMO_OPSET = 18
_MOST_SCRIPT_OPSET = 20
_LARGEST = 1 << 20
"""Largest size of a dimension that is tried."""
_RULES = ((attention.is_masked_attention, attention.decomposition),)
"""Decompositions of operators that torch's exporter writes in a form that gives other values."""
_Made = tuple[Exported, links.Values | None]


@dataclasses.dataclass
class ExportJob:
    """What the exporters need. Either ``module`` or ``program`` is set."""

    inputs: list[str]
    outputs: list[str]
    example: list[torch.Tensor]
    others: list[list[torch.Tensor]]
    """Inputs with other sizes of the free dimensions, as far as the model accepts them."""
    free: list[dict[int, str]]
    """The names of the free dimensions of each input."""
    call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    module: Flat | None = None
    program: Any = None
    all_outputs: Sequence[str] = ()
    """The names of all outputs of ``program``."""
    resized: Callable[[Mapping[str, int]], list[torch.Tensor]] = lambda _: []
    """The example with other sizes of free dimensions, by name."""
    beyond: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    """Inputs of sizes that dynamo's program is not made for, although the module accepts them: a branch depends on the size."""
    sizes_are_known: bool = False
    """True if dynamo has captured the module, so that ``beyond`` covers the decisions that depend on sizes."""
    guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    operators: Sequence[CustomOp] = ()
    warnings: Sequence[str] = ()


_Way = Callable[[ExportJob, Path, int], _Made]


def export(job: ExportJob, target: Path, opset: int) -> _Made:
    """Write the model to ``target``. Raises UnsupportedOperators, Unsupported."""
    failures: list[ExportFailure] = []
    _by_operator(job, "torch")  # an operator that does not exist is the user's mistake, not a failure of an exporter
    for name, way in _ways(job, opset):
        try:
            return _tried(job, target, opset, name, way, failures)
        except (MemoryError, WrongDefinition, OperatorFailed, NotStarted):
            raise
        except Exception as error:  # noqa: BLE001 - exporters raise anything; the diagnosis reports it
            failures.append(ExportFailure(name, error))
            for leftover in (target, target.with_name(target.name + ".data")):
                leftover.unlink(missing_ok=True)
    for name, way in _ways(job, opset):
        if any(one.exporter == name and isinstance(one.error, WrongResult) for one in failures):
            return _tried(job, target, opset, name, way, failures, is_last=True)
    with _quiet([]):
        diagnosed = diagnosis(failures, job.module, job.example)
    raise diagnosed


def _tried(
    job: ExportJob,
    target: Path,
    opset: int,
    name: str,
    way: _Way,
    failures: Sequence[ExportFailure],
    *,
    is_last: bool = False,
) -> _Made:
    """The model that one exporter writes. If ``is_last``, the values are left to the proof that follows."""
    notes: list[str] = []
    with _quiet(notes), job.guard(), torch.no_grad():
        exported, values = way(job, target, opset)
    _refuse_fixed_decisions(job, notes, failures)
    _check(job, target, with_values=not exported.random and not is_last)
    told = (*job.warnings, *exported.warnings, *_told(notes, failures))
    version = torch.__version__.partition("+")[0]
    return msgspec.structs.replace(exported, exporter=f"torch.onnx {name} {version}", warnings=told), values


def _ways(job: ExportJob, opset: int) -> Iterator[tuple[str, _Way]]:
    if job.module is not None and isinstance(job.module.module, torch.jit.ScriptModule):
        yield "scripted", _scripted
        return
    if opset >= _LEAST_DYNAMO_OPSET or job.program is not None:
        yield "dynamo", _dynamo
    if job.module is not None:
        yield "traced", _traced
        yield "scripted", _scripted


def _dynamo(job: ExportJob, target: Path, opset: int) -> _Made:
    program = job.program if job.program is not None else _captured(job)
    if job.module is not None:
        _add_sizes_beyond(job, program)
    definitions, given, python = (_by_operator(job, form) for form in ("onnx", "torch", "python"))
    translations, decompositions = ({key: one.function for key, one in some.items()} for some in (definitions, given))
    translations |= {key: in_onnx(key, one) for key, one in python.items()}
    check_definitions(program, given)
    check_python(program, python)
    for is_meant, rule in _RULES:
        if any(map(is_meant, program.graph.nodes)):
            decompositions = {**rule(), **decompositions}
    if decompositions:
        program = program.run_decompositions(decompositions)
    opset = max(opset, _LEAST_DYNAMO_OPSET)
    try:
        with blaming(definitions):
            made = _translated(job, program, opset, translations)
    except UnsupportedOperators as error:
        if not {one.op for one in error.operators} & {operator.name() for operator in decompositions}:
            raise
        inner = with_inner_operators(program, opset, translations)
        check_definitions(inner, given)
        inner = inner.run_decompositions(decompositions)
        made = _translated(job, inner, opset, translations)
    model = made.model
    _keep_outputs(model, job.outputs)
    _name_dimensions(model, job.free)
    found = links.program_links(model, made.exported_program, list(job.all_outputs or job.outputs))
    random = links.random_operators(model)
    links.remove_folders(model)
    made.save(target)
    called = {f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes()}
    needs = tuple(one.name for one in python.values() if one.name in called)
    return Exported("", found, random, python_ops=needs, has_parts=True), links.ProgramValues(made.exported_program)


def _translated(job: ExportJob, program: Any, opset: int, translations: Mapping[Any, Any]) -> Any:
    """The result of the dynamo exporter. Raises EngineUnavailable, UnsupportedOperators."""
    try:
        return torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=job.inputs,
            output_names=list(job.all_outputs or job.outputs),
            custom_translation_table=translations or None,
        )
    except ImportError as error:
        raise EngineUnavailable("torch's ONNX exporter", "penstock[torch]", str(error)) from error
    except Exception as error:
        if operators := missing_operators(program, opset, translations):
            raise UnsupportedOperators.of(operators) from error
        raise


def _add_sizes_beyond(job: ExportJob, program: Any) -> None:
    """Find the sizes just outside the ranges of the program's dimensions. All exporters are checked with them."""
    job.beyond.clear()
    ranges = {str(symbol): found for symbol, found in program.range_constraints.items()}
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")][-len(job.example) :]
    sizes: dict[Any, tuple[str, int]] = {}
    for value, tensor, free in zip(values, job.example, job.free, strict=True):
        for axis, name in free.items():
            if not isinstance(value, torch.Tensor):
                continue
            for size in _outside(ranges.pop(str(value.shape[axis]), None)):
                _add_beyond(job, {name: size})
            if isinstance(value.shape[axis], torch.SymInt):
                sizes[value.shape[axis].node.expr] = name, tensor.shape[axis]
                guards = value.shape[axis].node.shape_env.guards
    for changed in _violations([guard.expr for guard in guards], sizes) if sizes else ():
        _add_beyond(job, changed)
    job.sizes_are_known = True


def _add_beyond(job: ExportJob, changed: Mapping[str, int]) -> None:
    """Add the example with these sizes, if the module accepts it."""
    with contextlib.suppress(PenstockError):
        tensors = job.resized(changed)
        job.call(tensors)
        job.beyond.append(tensors)


def _violations(guards: Sequence[Any], sizes: Mapping[Any, tuple[str, int]]) -> Iterator[dict[str, int]]:
    """For each condition on several dimensions, the least sizes that violate it. The keys of ``sizes`` are torch's symbols."""
    for guard in guards:
        if len(guard.free_symbols) < 2 or not guard.free_symbols <= sizes.keys():
            continue
        for exponent in range(1, _LARGEST.bit_length()):
            changed = {name: size << exponent for name, size in (sizes[one] for one in guard.free_symbols)}
            if math.prod(changed.values()) > _LARGEST:
                break
            if guard.subs({one: changed[sizes[one][0]] for one in guard.free_symbols}) == False:  # noqa: E712 - sympy's false
                yield changed
                break


def _outside(bounds: Any) -> Iterator[int]:
    """The sizes next to a range, without those that are too small or too large for a call."""
    for side, step in (("lower", -1), ("upper", 1)):
        with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):  # no range, or infinity
            size = int(getattr(bounds, side)) + step
            if 2 <= size <= _LARGEST:
                yield size


def _captured(job: ExportJob) -> Any:
    """The exported program of the module."""
    shapes = (tuple(dict.fromkeys(free, torch.export.Dim.DYNAMIC) for free in job.free),)
    first: Exception | None = None
    for strict in (False, True):
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # torch prints the graph that it could not finish
                return torch.export.export(job.module, tuple(job.example), dynamic_shapes=shapes, strict=strict)
        except Exception as error:  # noqa: BLE001 - torch raises anything; the first attempt explains most
            first = first or error
            if ExportFailure("", error).is_final:
                break
    assert first is not None
    raise first


def _by_operator(job: ExportJob, form: str) -> dict[Any, CustomOp]:
    """The user's definitions of this form. Raises Unsupported if torch does not have one of all operators."""
    ours = (one for one in job.operators if one.domain != TENSORFLOW)
    found = {overload: one for one in ours for overload in _overloads(one.name)}
    return {operator: one for operator, one in found.items() if one.form == form}


def _overloads(name: str) -> list[Any]:
    """The operator that ``namespace::operator.overload`` names, or all overloads of ``namespace::operator``."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
        return [getattr(packet, one) for one in ([overload] if overload else packet.overloads())]
    except AttributeError:
        raise Unsupported(
            f"register_op defines '{name}', but torch has no such operator",
            "import the library that defines it in the file given as --ops",
        ) from None


def _traced(job: ExportJob, target: Path, opset: int) -> _Made:
    assert job.module is not None
    return _by_script(job, job.module, target, opset)


def _scripted(job: ExportJob, target: Path, opset: int) -> _Made:
    """Trace a call of the scripted module; its control flow is preserved."""
    assert job.module is not None
    script = job.module.module
    if not isinstance(script, torch.jit.ScriptModule):
        script = torch.jit.script(script)
    flat = Flat(script, job.module.arguments, job.module.kept)
    return _by_script(job, torch.jit.trace(flat, tuple(job.example), check_trace=False), target, opset)


def _by_script(job: ExportJob, module: Any, target: Path, opset: int) -> _Made:
    torch.onnx.export(
        module,
        tuple(job.example),
        str(target),
        dynamo=False,
        opset_version=min(opset, _MOST_SCRIPT_OPSET),
        input_names=job.inputs,
        output_names=job.outputs,
        dynamic_axes={name: free for name, free in zip(job.inputs, job.free, strict=True) if free},
        training=torch.onnx.TrainingMode.PRESERVE,  # otherwise the exporter folds layers, and names no longer match
    )
    model = onnx_ir.load(target)
    notes = (
        (f"this exporter writes at most opset {_MOST_SCRIPT_OPSET}, so the model has that opset",)
        if opset > _MOST_SCRIPT_OPSET
        else ()
    )
    random = links.random_operators(model)
    if isinstance(module, torch.jit.ScriptModule):
        return Exported("", (), random, notes), None
    return Exported("", links.module_links(model, module), random, notes), links.module_values(module)


def _keep_outputs(model: Any, wanted: Sequence[str]) -> None:
    """Drop the outputs that are not ``wanted``, and order the others."""
    outputs = {value.name: value for value in model.graph.outputs}
    if list(outputs) == list(wanted):
        return
    model.graph.outputs[:] = [outputs[name] for name in wanted]
    RemoveUnusedNodesPass()(model)


def _name_dimensions(model: Any, free: Sequence[Mapping[int, str]]) -> None:
    """Give the free dimensions the user's names instead of torch's symbols."""
    names = {
        str(value.shape[axis].value): name
        for value, axes in zip(model.graph.inputs, free, strict=True)
        for axis, name in axes.items()
        if value.shape is not None and not isinstance(value.shape[axis], int)
    }
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, onnx_ir.SymbolicDim) and dim.value in names and not value.shape.frozen:
                value.shape[axis] = onnx_ir.SymbolicDim(names[dim.value])


def _check(job: ExportJob, target: Path, *, with_values: bool) -> None:
    """Run the model in ONNX Runtime with inputs of several sizes.

    Raises Unsupported if a shape differs from the torch model's, and WrongResult if a value differs by more than rounding explains.
    """
    artifact = Artifact.from_file(target)
    for tensors in (job.example, *job.others, *job.beyond):
        feeds = {name: to_array(tensor) for name, tensor in zip(job.inputs, tensors, strict=True)}
        made: dict[str, Array] = apart.forward(artifact, feeds)
        for name, tensor in zip(job.outputs, job.call(tensors), strict=True):
            wanted, sizes = to_array(tensor), {one: list(array.shape) for one, array in feeds.items()}
            if made[name].shape != wanted.shape:
                raise Unsupported(
                    f"for the inputs {sizes}, the exported model returns '{name}' with the shape {list(made[name].shape)} "
                    f"instead of {list(wanted.shape)}",
                    "declare fixed sizes for these inputs",
                )
            if with_values and tensor.is_floating_point() and not _is_close(made[name], wanted):
                raise WrongResult(f"for the inputs {sizes}, the exported model returns other values as '{name}'")


def _is_close(found: Array, wanted: Array) -> bool:
    scale = float(np.max(np.abs(wanted), initial=0, where=np.isfinite(wanted)))
    return np.allclose(found.astype(float), wanted.astype(float), rtol=0.1, atol=0.1 * scale, equal_nan=True)


def _refuse_fixed_decisions(job: ExportJob, notes: Sequence[str], failures: Sequence[ExportFailure]) -> None:
    """Raise Unsupported if the tracer has fixed a decision, unless dynamo has found the sizes on which decisions depend."""
    if not any("Converting a tensor to a Python" in note for note in notes):
        return
    if not failures or failures[0].depends_on_values:
        raise Unsupported("tracing would turn a decision that depends on values into a constant")
    if not job.sizes_are_known:
        raise Unsupported("tracing would turn a decision that may depend on sizes into a constant")


def _told(notes: Sequence[str], failures: Sequence[ExportFailure]) -> list[str]:
    """Warnings for the user: why an earlier exporter failed, and what the tracer has turned into constants."""
    return [f"the exporter '{one.exporter}' failed: {one.reason}" for one in failures] + [
        note for note in notes if "might cause the trace to be incorrect" in note
    ]


@contextlib.contextmanager
def _quiet(notes: list[str]) -> Iterator[None]:
    """Keep the exporters' messages from the terminal, and add the tracer's warnings about the user's code to ``notes``."""
    with quiet(), warnings.catch_warnings(record=True) as caught, _discarded_output():
        warnings.simplefilter("always", torch.jit.TracerWarning)
        try:
            yield
        finally:
            notes += dict.fromkeys(
                f"{Path(one.filename).name}:{one.lineno}: {str(one.message).partition('. ')[0]}"
                for one in caught
                if issubclass(one.category, torch.jit.TracerWarning) and not one.filename.startswith(links.FOREIGN)
            )


@contextlib.contextmanager
def _discarded_output() -> Iterator[None]:
    """Discard standard output, including what the exporter's code in C++ prints."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
