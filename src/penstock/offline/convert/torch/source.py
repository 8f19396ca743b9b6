"""``TorchSource``: a torch module, TorchScript or an exported program that runs on flat arrays, and exports itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from penstock.engines.custom_ops import custom_ops
from penstock.engines.torch import BY_TORCH_TYPE, leaves, open_program, reason_of, to_array, to_tensor
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, PenstockError, ResourceExhausted, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, Probes
from penstock.offline.convert.declarations import chosen_outputs, declared_input
from penstock.offline.convert.quiet import quiet
from penstock.offline.convert.torch.arguments import Arguments, Flat
from penstock.offline.convert.torch.example import Declared, declared_inputs, sizes_to_try
from penstock.offline.convert.torch.export import ExportJob, export
from penstock.offline.convert.torch.links import ProgramValues, Values
from penstock.offline.convert.torch.state import Buffers
from penstock.tensor import Array, Signature, TensorSpec

_MISSING_OPERATOR = re.compile(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'")


class TorchSource:
    """The model that ``job`` exports."""

    def __init__(
        self,
        job: ExportJob,
        signature: Signature,
        axes: Mapping[str, tuple[Axis, ...]],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.signature, self.axes = signature, axes
        self._job, self._release = job, release
        self._values: Values | None = None

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        results = self._job.call(self._feeds(inputs))
        return {spec.name: to_array(tensor) for spec, tensor in zip(self.signature.outputs, results, strict=True)}

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        with self._job.guard():
            found: dict[str, torch.Tensor] = {}
            if not inputs:
                weights = self._weights()
                found = {name: weights[name] for name in names if name in weights}
                if isinstance(self._values, ProgramValues) and (left := [one for one in names if one not in weights]):
                    found |= _run(self._values.part, [None] * len(self._job.inputs), {}, left)
            elif self._values is not None and set(inputs) == set(self._job.inputs):
                found = _run(self._values, self._feeds(inputs), frozenset(names))
            elif isinstance(self._values, ProgramValues):
                given = {name: to_tensor(array) for name, array in inputs.items()}
                tensors = [given.pop(name, None) for name in self._job.inputs]
                found = _run(self._values.part, tensors, given, names)
            return {name: to_array(tensor) for name, tensor in found.items() if tensor.dtype in BY_TORCH_TYPE}

    def export(self, target: Path, opset: int) -> Exported:
        exported, self._values = export(self._job, target, opset)
        weights = tuple(self._weights())
        if not isinstance(self._values, ProgramValues):
            return msgspec.structs.replace(exported, weights=weights)
        moved, computed = self._values.fixed()
        return msgspec.structs.replace(exported, weights=(*weights, *moved), computed=tuple(computed))

    def close(self) -> None:
        self._release()
        self._release = lambda: None
        self._values = None

    def probes(self, seed: int, *, brief: bool = False) -> Probes:
        """Calls of the sizes for which a branch of the module may differ. They are known after ``export``."""
        calls = (dict(zip(self._job.inputs, map(to_array, tensors), strict=True)) for tensors in self._job.beyond)
        return Probes(tuple(calls))

    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights by their names in the ONNX model."""
        job = self._job
        state = job.program.state_dict if job.module is None else job.module.state_dict()
        return {name: tensor for name, tensor in state.items() if tensor.numel() > 1}

    def _feeds(self, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
        for spec in self.signature.inputs:
            if spec.name not in inputs:
                raise InvalidInput(f"input '{spec.name}' is missing")
            if not spec.admits(inputs[spec.name].shape):
                raise InvalidInput(f"input '{spec.name}' has the wrong shape {list(inputs[spec.name].shape)}")
        return [to_tensor(inputs[spec.name]) for spec in self.signature.inputs]


def open_module(module: nn.Module, options: ConvertOptions) -> TorchSource:
    """Open ``module`` in inference mode; ``close`` puts it back into its own mode. Raises InvalidArgument, Unsupported."""
    modes = {one: one.training for one in module.modules()}
    warnings = []
    if module.training:
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


def _opened(
    module: nn.Module, options: ConvertOptions, warnings: list[str], release: Callable[[], None]
) -> TorchSource:
    operators = custom_ops(options.ops)
    declared = declared_inputs(module, options)
    flat = Flat(module, Arguments(module, [one.name for one in declared]))
    buffers = Buffers(flat, "module.")
    sizes, example, found = _accepted(buffers.guarded(flat.named), declared)
    names = _distinct([name for name, _ in found], [one.name for one in declared])
    flat.kept = tuple(names.index(name) for name in chosen_outputs(options, names))
    warnings += buffers.warning()
    call = buffers.guarded(lambda tensors: flat(*tensors))
    job = ExportJob(
        inputs=[one.name for one in declared],
        outputs=[names[place] for place in flat.kept],
        example=example,
        free=[{axis.index: axis.name for axis in one.axes} for one in declared],
        others=[_sized(declared, sizes, factor, seed) for factor, seed in ((2, 1), (0, 2))],
        call=partial(_run, call),
        resized=lambda changed: [one.example({**sizes, **changed}, 3) for one in declared],
        module=flat,
        guard=buffers.kept,
        operators=operators,
        warnings=warnings,
    )
    outputs = _outputs(job, [found[place][1] for place in flat.kept])
    axes = {one.name: one.axes for one in declared}
    return TorchSource(job, Signature(tuple(one.spec for one in declared), outputs), axes, release)


def open_exported(program: Any, options: ConvertOptions) -> TorchSource:
    """Open an exported program, which contains its inputs. Raises Unsupported, InvalidArgument, InvalidModel."""
    try:
        run, signature, own, _ = open_program(program)
    except PenstockError:
        raise
    except Exception as error:  # the file is damaged, or another version of torch wrote it
        raise InvalidModel(
            f"PyTorch cannot open the exported program: {reason_of(error)}", "save it again with torch.export.save"
        ) from error
    names = _own_names(signature, options)
    own = _distinct(own, list(names.values()))
    inputs = tuple(msgspec.structs.replace(spec, name=names[spec.name]) for spec in signature.inputs)
    axes = _as_declared({names[name]: found for name, found in _axes(program).items()}, inputs, options)
    declared = [Declared(spec.name, spec.datatype, _shape(spec, axes.get(spec.name, ()))) for spec in inputs]
    kept = chosen_outputs(options, own)
    places = [own.index(name) for name in kept]

    def kept_outputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [value for _, value in leaves(run(list(tensors)))]
        return [found[place] for place in places]

    def example(least: int) -> list[torch.Tensor]:
        sizes = {axis.name: max(axis.low, min(least, axis.high or least)) for one in axes.values() for axis in one}
        return [one.example(sizes, least) for one in declared]

    buffers = Buffers(program.module())  # all modules of one program share its buffers
    call = buffers.guarded(kept_outputs)
    job = ExportJob(
        inputs=[spec.name for spec in inputs],
        outputs=kept,
        example=example(2),
        others=[example(4), example(1)],
        free=[{axis.index: axis.name for axis in one.axes} for one in declared],
        call=partial(_run, call),
        program=program,
        all_outputs=own,
        guard=buffers.kept,
        operators=custom_ops(options.ops),
    )
    job.others = [tensors for tensors in job.others if _fits(job, tensors)]
    job.warnings = buffers.warning()
    outputs = (msgspec.structs.replace(signature.outputs[place], name=own[place]) for place in places)
    return TorchSource(job, Signature(inputs, tuple(outputs)), axes)


def _distinct(outputs: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """The names of ``outputs``, with ``_out`` after names of ``inputs``, because a tensor of an ONNX model has only one name."""
    found: list[str] = []
    for given in outputs:
        name = given
        while name in inputs or name in found:
            name += "_out"
        found.append(name)
    return found


def _own_names(signature: Signature, options: ConvertOptions) -> dict[str, str]:
    """The user's name of each input. Other names than the program's are taken in order. Raises InvalidArgument."""
    own = signature.input_names
    given = [spec.name for spec in options.inputs] or list(options.sample) or own
    if len(given) != len(own):
        raise InvalidArgument(f"{len(given)} inputs are declared, but the program takes {own}")
    return dict(zip(own, own if set(given) == set(own) else given, strict=True))


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
    if missing := _MISSING_OPERATOR.search(first.message):
        raise InvalidArgument(
            f"the module calls '{missing[1]}::{missing[2]}', but torch has no such operator",
            "define it with torch.library.custom_op, or import the library that does, in the module's file or in the file of --ops; "
            "penstock.register_op alone defines it only for ONNX",
        ) from first
    shapes = ", ".join(f"{one.name}{list(one.shape)}" for one in declared)
    raise InvalidArgument(
        f"the module rejects the inputs {shapes}: {first.message}",
        "correct the names, types and shapes in --inputs, or give --sample with inputs that the module accepts",
    ) from first


def _outputs(job: ExportJob, found: Sequence[torch.Tensor]) -> tuple[TensorSpec, ...]:
    """The outputs ``found`` for the example. A dimension is free if it differs for larger inputs."""
    if not found:
        raise Unsupported("the module returns no tensors", "return the results from forward")
    job.others = [tensors for tensors in job.others if _fits(job, tensors)]
    other = job.call(job.others[0]) if job.others else found
    specs = []
    for name, tensor, second in zip(job.outputs, found, other, strict=True):
        if tensor.dtype not in BY_TORCH_TYPE:
            hint = (
                "return torch.view_as_real(output)" if tensor.is_complex() else "convert it to another type in forward"
            )
            raise Unsupported(f"the module returns '{name}' as {tensor.dtype}, which ONNX models cannot return", hint)
        same = tensor.dim() == second.dim()
        shape = tuple(size if same and size == second.shape[axis] else -1 for axis, size in enumerate(tensor.shape))
        specs.append(TensorSpec(name, BY_TORCH_TYPE[tensor.dtype], shape))
    return tuple(specs)


def _sized(declared: Sequence[Declared], sizes: Mapping[str, int], factor: int, seed: int) -> list[torch.Tensor]:
    """Inputs whose free dimensions are multiples of ``sizes``; with factor 0, they are 1."""
    return [one.example({name: max(1, factor * size) for name, size in sizes.items()}, seed) for one in declared]


def _fits(job: ExportJob, tensors: Sequence[torch.Tensor]) -> bool:
    try:
        job.call(tensors)
    except PenstockError:
        return False
    return True


def _run(call: Callable[..., Any], *arguments: Any) -> Any:
    is_fast = torch.backends.mha.get_fastpath_enabled()
    try:
        # The fast path, which no exporter takes, gives NaN where the other path gives 0.
        torch.backends.mha.set_fastpath_enabled(False)
        with quiet(), torch.no_grad():
            return call(*arguments)
    except PenstockError:
        raise
    except MemoryError as error:
        raise ResourceExhausted("there is not enough memory to run the module") from error
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise ResourceExhausted("there is not enough memory to run the module") from error
        raise InvalidInput(f"{type(error).__name__}: {reason_of(error)}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


def _shape(spec: TensorSpec, axes: Sequence[Axis]) -> tuple[int | str, ...]:
    names = {axis.index: axis.name for axis in axes}
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


def _as_declared(
    axes: Mapping[str, tuple[Axis, ...]], inputs: Sequence[TensorSpec], options: ConvertOptions
) -> dict[str, tuple[Axis, ...]]:
    """``axes`` with the user's names. A name that the user gives to one dimension holds for all dimensions of its symbol.

    Raises InvalidArgument if the user declares an input of another type than the program's.
    """
    chosen: dict[str, str] = {}
    for spec in inputs:
        declared = declared_input(spec.name, options, spec.shape)
        if declared.datatype not in (None, spec.datatype):
            raise InvalidArgument(
                f"input '{spec.name}' is declared as {declared.datatype.value}, but the program takes {spec.datatype.value}",
                f"declare {spec.datatype.value}, or export the program again with this type",
            )
        dims = declared.shape or ()
        for axis in axes.get(spec.name, ()):
            if axis.index < len(dims) and isinstance(dim := dims[axis.index], str):
                chosen.setdefault(axis.name, dim)
    return {
        name: tuple(msgspec.structs.replace(axis, name=chosen.get(axis.name, axis.name)) for axis in found)
        for name, found in axes.items()
    }


def _bound(bounds: Any, side: str, default: int) -> int:
    try:
        return max(int(getattr(bounds, side)), default)
    except (AttributeError, TypeError, ValueError, OverflowError):  # no bounds, or infinity
        return default
