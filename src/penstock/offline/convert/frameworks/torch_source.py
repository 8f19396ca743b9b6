"""``TorchSource``: a torch module, TorchScript or an exported program that runs on flat arrays, and exports itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from penstock.engines.torch import BY_TORCH_TYPE, leaves, open_program, reason_of, to_array, to_tensor
from penstock.errors import InvalidArgument, InvalidInput, PenstockError, ResourceExhausted, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, Exported
from penstock.offline.convert.custom_ops import custom_ops
from penstock.offline.convert.frameworks.torch_arguments import Arguments, Flat
from penstock.offline.convert.frameworks.torch_example import Declared, declared_inputs, sizes_to_try
from penstock.offline.convert.frameworks.torch_export import Job, export
from penstock.offline.convert.frameworks.torch_links import Values
from penstock.offline.convert.frameworks.torch_state import Buffers
from penstock.tensor import Array, Signature, TensorSpec

Call = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class TorchSource:
    """Runs ``job``'s model with ``call``, which takes and returns flat tensors."""

    def __init__(
        self,
        call: Call,
        job: Job,
        signature: Signature,
        axes: Mapping[str, tuple[Axis, ...]],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.signature, self.axes = signature, axes
        self._call, self._job, self._release = call, job, release
        self._values: Values | None = None

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        results = _run(self._call, self._feeds(inputs))
        return {spec.name: to_array(tensor) for spec, tensor in zip(self.signature.outputs, results, strict=True)}

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        if self._values is None:
            return {}
        with self._job.guard():
            found = _run(self._values, self._feeds(inputs), frozenset(names))
            return {name: to_array(tensor) for name, tensor in found.items() if tensor.dtype in BY_TORCH_TYPE}

    def export(self, target: Path, opset: int) -> Exported:
        exported, self._values = export(self._job, target, opset)
        return exported

    def close(self) -> None:
        self._release()
        self._release = lambda: None
        self._values = None

    def _feeds(self, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
        for spec in self.signature.inputs:
            if spec.name not in inputs:
                raise InvalidInput(f"input '{spec.name}' is missing")
        return [to_tensor(inputs[spec.name]) for spec in self.signature.inputs]


def open_module(module: nn.Module, options: ConvertOptions) -> TorchSource:
    """Open ``module`` in inference mode; ``close`` puts it back into its own mode. Raises InvalidArgument, Unsupported."""
    modes = {one: one.training for one in module.modules()}
    warnings = []
    if any(mode and isinstance(one, _TRAINED) for one, mode in modes.items()):
        warnings.append("the module was in training mode; it is converted in inference mode, as after module.eval()")

    def release() -> None:
        for one, mode in modes.items():
            one.training = mode

    module.eval()
    try:
        return _opened(module, options, warnings, release)
    except BaseException:
        release()
        raise


_TRAINED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention)
"""Layers that compute something else in training mode."""


def _opened(
    module: nn.Module, options: ConvertOptions, warnings: list[str], release: Callable[[], None]
) -> TorchSource:
    operators = custom_ops(options.ops)
    declared = declared_inputs(module, options)
    flat = Flat(module, Arguments(module, [one.name for one in declared]))
    buffers = Buffers(flat, "module.")
    sizes, example, found = _accepted(buffers.guarded(flat.named), declared)
    names = _unique([name for name, _ in found])
    flat.kept = tuple(names.index(name) for name in _kept(names, options.outputs))
    if buffers.changed:
        warnings.append(
            f"the module changes its buffers {buffers.changed}; each call of the ONNX model starts from their present values"
        )
    call = buffers.guarded(lambda tensors: flat(*tensors))
    job = Job(
        inputs=[one.name for one in declared],
        outputs=[names[place] for place in flat.kept],
        example=example,
        free=[{axis.index: axis.name for axis in one.axes} for one in declared],
        larger=[one.example({name: 2 * size for name, size in sizes.items()}, 1) for one in declared],
        call=call,
        module=flat,
        guard=buffers.kept,
        operators=operators,
        warnings=warnings,
    )
    outputs = _outputs(job, [found[place][1] for place in flat.kept])
    axes = {one.name: one.axes for one in declared if one.axes}
    return TorchSource(call, job, Signature(tuple(one.spec for one in declared), outputs), axes, release)


def open_exported(program: Any, options: ConvertOptions) -> TorchSource:
    """Open an exported program, which contains its inputs. Raises Unsupported, InvalidArgument."""
    operators = custom_ops(options.ops)
    run, signature, own, _ = open_program(program)
    axes = _axes(program)
    given = [spec.name for spec in options.inputs] or list(options.sample) or signature.input_names
    if len(given) != len(signature.inputs):
        raise InvalidArgument(f"{len(given)} inputs are declared, but the program takes {signature.input_names}")
    if set(given) != set(signature.input_names):  # the user's names, in the program's order
        axes = {name: axes.get(own_name, ()) for name, own_name in zip(given, signature.input_names, strict=True)}
        specs = zip(signature.inputs, given, strict=True)
        inputs = tuple(msgspec.structs.replace(spec, name=name) for spec, name in specs)
    else:
        inputs = signature.inputs
    kept = _kept(own, options.outputs)
    places = [own.index(name) for name in kept]

    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [value for _, value in leaves(run(list(tensors)))]
        return [found[place] for place in places]

    def example(least: int) -> list[torch.Tensor]:
        sizes = {axis.name: max(axis.low, least) for one in axes.values() for axis in one}
        sizes |= {axis.name: min(sizes[axis.name], axis.high) for one in axes.values() for axis in one if axis.high}
        return [Declared(spec.name, spec.datatype, _named(spec, axes)).example(sizes, least) for spec in inputs]

    job = Job(
        inputs=[spec.name for spec in inputs],
        outputs=kept,
        example=example(2),
        free=[{axis.index: axis.name for axis in axes.get(spec.name, ())} for spec in inputs],
        larger=example(4),
        call=call,
        program=program,
        all_outputs=own,
        operators=operators,
    )
    outputs = tuple(signature.outputs[place] for place in places)
    return TorchSource(call, job, Signature(inputs, outputs), {name: one for name, one in axes.items() if one})


def _accepted(
    named: Callable[[Sequence[torch.Tensor]], list[tuple[str, torch.Tensor]]], declared: Sequence[Declared]
) -> tuple[dict[str, int], list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """The first sizes that the module accepts, the example inputs of these sizes, and the outputs by name."""
    first: PenstockError | None = None
    for sizes in sizes_to_try(declared):
        example = [one.example(sizes, 0) for one in declared]
        try:
            return sizes, example, _run(named, example)
        except Unsupported:
            raise
        except PenstockError as error:
            first = first or error
    assert first is not None
    shapes = ", ".join(f"{one.name}{list(one.shape)}" for one in declared)
    raise InvalidArgument(
        f"the module rejects the inputs {shapes}: {first.message}",
        "correct the names, types and shapes in --inputs, or give --sample with inputs that the module accepts",
    ) from first


def _outputs(job: Job, found: Sequence[torch.Tensor]) -> tuple[TensorSpec, ...]:
    """The outputs ``found`` for the example. A dimension is free if it differs for larger inputs."""
    if not found:
        raise Unsupported("the module returns no tensors", "return the results from forward")
    others: Sequence[torch.Tensor] = found
    try:
        others = _run(job.call, job.larger)
    except PenstockError:
        job.larger = []
    specs = []
    for name, tensor, other in zip(job.outputs, found, others, strict=True):
        if tensor.dtype not in BY_TORCH_TYPE:
            hint = (
                "return torch.view_as_real(output)" if tensor.is_complex() else "convert it to another type in forward"
            )
            raise Unsupported(f"the module returns '{name}' as {tensor.dtype}, which ONNX models cannot return", hint)
        same = tensor.dim() == other.dim()
        shape = tuple(size if same and size == other.shape[axis] else -1 for axis, size in enumerate(tensor.shape))
        specs.append(TensorSpec(name, BY_TORCH_TYPE[tensor.dtype], shape))
    return tuple(specs)


def _run(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        with torch.no_grad():
            return call(*arguments)
    except PenstockError:
        raise
    except MemoryError as error:
        raise ResourceExhausted("there is not enough memory to run the module") from error
    except Exception as error:  # noqa: BLE001 - a module can raise anything
        if "can't allocate memory" in str(error):
            raise ResourceExhausted("there is not enough memory to run the module") from error
        raise InvalidInput(f"{type(error).__name__}: {reason_of(error)}") from error


def _unique(names: Sequence[str]) -> list[str]:
    """``names``, with a number behind names that occur before."""
    found: list[str] = []
    for name in names:
        found.append(name if name not in found else f"{name}__{found.count(name)}_{len(found)}")
    return found


def _kept(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    if unknown := [name for name in wanted if name not in names]:
        raise InvalidArgument(f"the model has no outputs {unknown}", f"its outputs are {list(names)}")
    return list(wanted) or list(names)


def _named(spec: TensorSpec, axes: Mapping[str, Sequence[Axis]]) -> tuple[int | str, ...]:
    names = {axis.index: axis.name for axis in axes.get(spec.name, ())}
    return tuple(names.get(index, size) for index, size in enumerate(spec.shape))


def _axes(program: Any) -> dict[str, tuple[Axis, ...]]:
    """The free dimensions of the inputs. Dimensions of one symbol have the name of the first."""
    ranges = {str(symbol): found for symbol, found in program.range_constraints.items()}
    names: dict[str, str] = {}
    axes: dict[str, tuple[Axis, ...]] = {}
    user_inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name not in user_inputs or not isinstance(value, torch.Tensor):
            continue
        found = []
        for index, dim in enumerate(value.shape):
            if not isinstance(dim, int):
                bounds = ranges.get(str(dim))
                name = names.setdefault(str(dim), f"{node.name}_{index}")
                found.append(Axis(index, name, _bound(bounds, "lower", 1), _bound(bounds, "upper", 0)))
        axes[node.name] = tuple(found)
    return axes


def _bound(bounds: Any, side: str, default: int) -> int:
    try:
        return max(int(getattr(bounds, side)), default)
    except (AttributeError, TypeError, ValueError, OverflowError):  # no bounds, or infinity
        return default
