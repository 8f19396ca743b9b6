"""PyTorch: runs TorchScript (``.pt``) and programs of ``torch.export`` (``.pt2``). Extra ``penstock[torch]``."""

from __future__ import annotations

import dataclasses
import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.export.passes import move_to_device_pass
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import load_pt2
from torch.utils import _pytree as pytree

from penstock.artifact import Artifact, Format
from penstock.engines.base import (
    Finding,
    LoadedModel,
    Options,
    OptionsEngine,
    check_artifact,
    declared_signature,
    refuse_errors,
    typed_options,
)
from penstock.engines.torch_archive import check_kind, check_program, check_script, record_names
from penstock.errors import InvalidConfig, InvalidModel, PenstockError, Unavailable, Unsupported
from penstock.resources import usable_cores
from penstock.tensor import Array, DataType, Signature, TensorSpec

BY_TORCH_TYPE = {getattr(torch, each.dtype.name): each for each in DataType if each is not DataType.BYTES}
"""The datatypes of torch's dtypes."""


# torch fails if two threads read programs at the same time.
_program_lock = threading.Lock()

Program = Callable[[list[torch.Tensor]], Any]
"""Runs the program: takes the inputs in signature order, and returns the outputs nested as in the program."""


class TorchOptions(msgspec.Struct, frozen=True):
    """Options of a loaded program."""

    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Threads within an operator; 0: one per core. It is set in each call, because torch stores it per calling thread."""
    device: Annotated[str, msgspec.Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Device: ``cpu``, ``cuda`` or ``cuda:N``."""
    inputs: tuple[TensorSpec, ...] = ()
    """Declared inputs; TorchScript files do not contain them."""
    outputs: tuple[TensorSpec, ...] = ()
    """Declared outputs."""


class TorchEngine(OptionsEngine):
    """Loads TorchScript and exported programs."""

    name = "torch"
    version: str = torch.__version__.partition("+")[0]
    formats = frozenset({Format.TORCHSCRIPT, Format.EXPORTED_PROGRAM})
    options = TorchOptions
    copies = 3  # the weights as read from the file, as tensors, and as packed by oneDNN
    fixed_bytes = 128 << 20

    def gpus(self) -> int:
        return int(torch.cuda.device_count())

    def validate(self, artifact: Artifact, options: Options) -> list[Finding]:
        declared_signature(options)
        return super().validate(artifact, options)

    def load(self, artifact: Artifact, options: Options) -> LoadedModel:
        typed = typed_options(self.name, options, TorchOptions)
        device = _device(typed.device)
        declared = declared_signature(options)
        refuse_errors(check_artifact(artifact, self.formats))
        load = _load_script if artifact.format is Format.TORCHSCRIPT else _load_program
        try:
            program, signature, output_names, keeps_state = load(artifact.data, device, declared)
        except (InvalidModel, Unsupported):
            raise
        except Exception as error:
            raise InvalidModel(f"PyTorch refuses the model: {reason_of(error)}", "export the model again") from error
        model = TorchModel(program, signature, output_names, device, typed.threads or usable_cores())
        model.keeps_state = keeps_state
        return model


class TorchModel(LoadedModel):
    """One program with its own weights. Only one thread may use it at a time, because a program may write to its buffers.

    ``output_names`` are the program's own names for the outputs in ``signature``, as found by ``_match``.
    """

    def __init__(
        self, program: Program, signature: Signature, output_names: Sequence[str], device: torch.device, threads: int
    ) -> None:
        self.signature = signature
        self._program: Program | None = program
        self._output_names = output_names
        self._device = device
        self._threads = threads

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._program is None:
            raise Unavailable("the model has been unloaded")
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        feeds = [to_tensor(inputs[spec.name]).to(self._device) for spec in self.signature.inputs]
        try:
            with torch.inference_mode():
                found = dict(leaves(self._program(feeds)))
        except Exception as error:
            raise PenstockError(f"the model failed: {reason_of(error)}") from error
        tensors, places = list(found.values()), _match(self._output_names, list(found))
        return {
            spec.name: _checked(tensors[place], spec)
            for spec, place in zip(self.signature.outputs, places, strict=True)
        }

    def unload(self) -> None:
        self._program = None


_Loaded = tuple[Program, Signature, list[str], bool]
"""A program, its signature, and whether it keeps state between calls."""


def _load_script(data: bytes, device: torch.device, declared: Signature | None) -> _Loaded:
    check_script(record_names(data))
    if declared is None:
        raise InvalidModel(
            "a TorchScript file does not contain its inputs and outputs, and none are declared",
            "declare name, data type and dims of each in the model's configuration, or save the model with torch.export.save",
        )
    script = torch.jit.load(io.BytesIO(data), map_location=device).eval()
    keeps_state = _keeps_state(script)
    names, arguments = declared.input_names, script.forward.schema.arguments[1:]
    if len(arguments) == 1 and isinstance(arguments[0].type, torch.DictType):
        return lambda feeds: script(dict(zip(names, feeds, strict=True))), declared, declared.output_names, keeps_state
    own = [argument.name for argument in arguments]
    order = [own[place] for place in _match(names, own)]
    needed = [argument.name for argument in arguments if not argument.has_default_value()]
    if missing := [name for name in needed if name not in order]:
        raise InvalidModel(f"the model needs the inputs {missing}, but only {names} are declared", "declare all inputs")
    return lambda feeds: script(**dict(zip(order, feeds, strict=True))), declared, declared.output_names, keeps_state


def _keeps_state(script: Any) -> bool:
    """True if ``script`` may write to its attributes. Freezing turns all other attributes into constants."""
    try:
        nodes = list(torch.jit.freeze(script, optimize_numerics=False).graph.nodes())
    except Exception:  # a script that cannot be frozen may write to any attribute
        return True
    while nodes:
        node = nodes.pop()
        if node.kind() in ("prim::GetAttr", "prim::SetAttr"):
            return True
        nodes += [inner for block in node.blocks() for inner in block.nodes()]
    return False


def _load_program(data: bytes, device: torch.device, declared: Signature | None) -> _Loaded:
    program = read_program(data)
    if device.type != "cpu":
        program = move_to_device_pass(program, str(device))
    return open_program(program, declared)


def read_program(data: bytes) -> Any:
    """The exported program in the file ``data``. Raises InvalidModel if it may run code other than tensor operations."""
    check_kind(record_names(data))
    # torch's own reader is used, because another reader may see different records in the same archive.
    archive = PT2ArchiveReader(io.BytesIO(data))
    check_program(archive.get_file_names(), archive.read_bytes, _check_pickle)
    with _program_lock:
        return load_pt2(io.BytesIO(data)).exported_programs["model"]


def open_program(program: Any, declared: Signature | None = None) -> _Loaded:
    """Make ``program`` callable with flat tensors. Raises Unsupported if its inputs or outputs are not tensors."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    arguments = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    if strange := [arg.name for arg in arguments if not isinstance(arg, (TensorArgument, ConstantArgument))]:
        raise Unsupported(f"the exported program's inputs {strange} are not tensors", "export it for tensors only")
    inputs = [_spec(arg.name, values[arg.name]) for arg in arguments if isinstance(arg, TensorArgument)]
    results = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    nested = pytree.tree_unflatten([_node_of(result) for result in results], program.call_spec.out_spec)
    outputs = [_spec(name, values[node]) for name, node in leaves(nested)]
    own = [spec.name for spec in outputs]
    if declared:
        inputs = _renamed(inputs, _match(declared.input_names, [spec.name for spec in inputs]), declared.inputs)
        places = _match(declared.output_names, own)
        outputs, own = _renamed(outputs, places, declared.outputs), [own[place] for place in sorted(places)]
    module, in_spec = program.module(), program.call_spec.in_spec

    def run(feeds: list[torch.Tensor]) -> Any:
        left = iter(feeds)
        flat = [next(left) if isinstance(arg, TensorArgument) else arg.value for arg in arguments]
        positional, named = pytree.tree_unflatten(flat, in_spec)
        return module(*positional, **named)

    return run, Signature(tuple(inputs), tuple(outputs)), own, _writes_buffers(program)


def _writes_buffers(program: Any) -> bool:
    """True if ``program`` writes to its buffers, according to its signature or through an in-place operator."""
    signature = program.graph_signature
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments, node.args, strict=False) if schema is not None else ():
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and _origin(value).name in signature.inputs_to_buffers:
                return True
    return bool(signature.buffers_to_mutate)


def _origin(node: Any) -> Any:
    """The node that owns the memory of ``node``. Views and in-place operators share the memory of their first argument."""
    while (schema := getattr(node.target, "_schema", None)) and any(one.alias_info for one in schema.returns):
        node = node.args[0]
    return node


def _node_of(result: Any) -> str | None:
    if isinstance(result, TensorArgument):
        return str(result.name)
    if isinstance(result, ConstantArgument) and result.value is None:
        return None
    raise Unsupported(
        "the exported program returns values that are not tensors", "export it so that it returns tensors only"
    )


def _renamed(specs: list[TensorSpec], places: list[int], declared: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The declared entries of ``specs`` under their declared names, in the order of ``specs``."""
    names = {place: spec.name for place, spec in zip(places, declared, strict=True)}
    return [msgspec.structs.replace(specs[place], name=names[place]) for place in sorted(names)]


def _match(names: Sequence[str], own: Sequence[str]) -> list[int]:
    """The position of each of ``names`` among the program's ``own`` names. Raises InvalidModel if ``names`` do not match.

    Other names match by position: by the numbers at their ends if all names end in ``__`` and a number, otherwise by order.
    """
    if set(names) <= set(own):
        return [own.index(name) for name in names]
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(r".*__(\d{1,9})", name))]
    places = numbers if len(numbers) == len(names) else list(range(len(names)))
    if len(set(places)) < len(places) or max(places) >= len(own):
        raise InvalidModel(
            f"the declared names {list(names)} do not match the model's names {list(own)}",
            "use the model's names, or NAME__0, NAME__1 … by position",
        )
    return places


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All values except None in nested tuples, lists, dictionaries, dataclasses and other containers that torch knows.

    They are named by their keys and fields, or by ``OUTPUT__`` and a position.
    """
    if hasattr(value, "_fields"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}__{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for place, inner in enumerate(value):
            yield from leaves(inner, f"{name or 'OUTPUT'}__{place}")
    elif dataclasses.is_dataclass(value):
        yield from leaves({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, name)
    elif (container := pytree.SUPPORTED_NODES.get(type(value))) is not None:
        yield from leaves(container.flatten_fn(value)[0], name)
    elif value is not None:
        yield name or "OUTPUT__0", value


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(
            f"device '{name}' does not exist: PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs",
            "use device 'cpu', or install PyTorch for this GPU",
        )
    return device


def _spec(name: str, value: torch.Tensor) -> TensorSpec:
    datatype = BY_TORCH_TYPE.get(value.dtype)
    if datatype is None:
        raise Unsupported(f"'{name}' is a {value.dtype} tensor, which has no tensor datatype in the protocol")
    return TensorSpec(name, datatype, tuple(dim if isinstance(dim, int) else -1 for dim in value.shape))


def to_tensor(array: Array) -> torch.Tensor:
    """A copy as a tensor. Not a view, because the caller owns the array and the program may write to its inputs."""
    if array.dtype == DataType.BF16.dtype:
        return torch.from_numpy(np.array(array.view(np.uint16), order="C")).view(torch.bfloat16)
    if array.dtype == np.object_:
        raise Unsupported("PyTorch has no string tensors", "use numbers")
    return torch.from_numpy(np.array(array, order="C"))


def _checked(tensor: Any, spec: TensorSpec) -> Array:
    """``to_array``. Raises PenstockError if ``tensor`` is not what ``spec`` declares."""
    if not isinstance(tensor, torch.Tensor):
        raise PenstockError(
            f"the model returned a {type(tensor).__name__} as output '{spec.name}'", "return tensors only"
        )
    if (datatype := BY_TORCH_TYPE.get(tensor.dtype)) is not spec.datatype:
        raise PenstockError(
            f"the model returned output '{spec.name}' as {tensor.dtype}, but it is declared as {spec.datatype.value}",
            f"declare it as {datatype.value}" if datatype else "",
        )
    return to_array(tensor)


def to_array(tensor: torch.Tensor) -> Array:
    """A copy as an array. Not a view, because the tensor may be an input or part of the program."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return np.array(tensor.view(torch.uint16).numpy()).view(DataType.BF16.dtype)
    return np.array(tensor.numpy())


def _check_pickle(data: bytes) -> None:
    torch.load(io.BytesIO(data), weights_only=True)


def reason_of(error: Exception) -> str:
    """The line of the error that gives the reason: the last line if the error has a TorchScript stack, otherwise the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (lines[-1] if "TorchScript" in lines[0] else lines[0])[:400]
