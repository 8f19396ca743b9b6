"""Declarations: the texts with which a user describes a source's inputs, ``image:float32[N,3,224,224]`` and ``image:0=batch``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from penstock.errors import InvalidArgument, quoted
from penstock.offline.convert.base import Axis, ConvertOptions, InputSpec
from penstock.tensor import MAX_RANK, DataType, TensorSpec

_WRITE_INPUT = "write it like image:float32[N,3,224,224], with one --inputs for each input"
_WRITE_AXES = "write it like image:0=batch,2=height, with one --dynamic for each input"
_DECLARED = re.compile(r"(?P<name>.*?)(?:\[(?P<shape>[^\[\]]*)\])?", re.DOTALL)
_AXIS = re.compile(r"\s*([0-9]{1,3})\s*(?:=\s*([^\s=,]+)\s*)?")
_SIZE = re.compile(r"[0-9]{1,15}")
_FREE = {"", "?", "*", "-1", "none"}
"""Sizes that stand for a free dimension without a name."""
_MAX_SIZE = 2**31 - 1
_TYPES = {datatype.value.lower(): datatype for datatype in DataType} | {
    str(datatype.dtype): datatype for datatype in DataType if datatype is not DataType.BYTES
}
_TYPES |= {
    "float": DataType.FP32,
    "double": DataType.FP64,
    "half": DataType.FP16,
    "int": DataType.INT32,
    "long": DataType.INT64,
    "string": DataType.BYTES,
    "str": DataType.BYTES,
}


def parse_inputs(texts: Iterable[str | InputSpec]) -> tuple[InputSpec, ...]:
    """Parse the values of ``--inputs``, one for each input. Type and shape may be left out. Raises InvalidArgument."""
    found = tuple(text if isinstance(text, InputSpec) else _input(text) for text in texts)
    names = [spec.name for spec in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"--inputs declares input {quoted(name)} twice", "remove one of them")
    return found


def parse_dynamic(texts: Iterable[str]) -> dict[str, dict[int, str]]:
    """Parse the values of ``--dynamic``: input name -> axis -> name of the dimension. Raises InvalidArgument.

    An axis without a name gets one that no other axis has.
    """
    found: dict[str, dict[int, str]] = {}
    for text in texts:
        name, colon, listed = text.rpartition(":")
        name = name.strip()
        if not colon or not name:
            raise InvalidArgument(f"--dynamic {quoted(text)} does not name an input and its axes", _WRITE_AXES)
        if name in found:
            raise InvalidArgument(f"--dynamic lists the axes of input {quoted(name)} twice", _WRITE_AXES)
        axes = found[name] = {}
        for part in listed.split(","):
            axis, dimension = _axis(part, name)
            if axis in axes:
                raise InvalidArgument(f"--dynamic lists axis {axis} of input {quoted(name)} twice", _WRITE_AXES)
            axes[axis] = dimension
    return found


def check_inputs(options: ConvertOptions, known: Collection[str]) -> None:
    """Raise InvalidArgument if ``options`` name an input that is not ``known``."""
    for name in (*(spec.name for spec in options.inputs), *options.sample, *options.dynamic):
        if name not in known:
            raise InvalidArgument(f"the model has no input '{name}'", f"its inputs are {', '.join(known)}")


def chosen_outputs(options: ConvertOptions, known: Collection[str]) -> list[str]:
    """The outputs to keep, which are all of ``known`` by default. Raises InvalidArgument."""
    for name in options.outputs:
        if name not in known:
            raise InvalidArgument(f"the model has no output '{name}'", f"its outputs are {', '.join(known)}")
    return list(options.outputs or known)


def declared_input(name: str, options: ConvertOptions, known: Sequence[int | str] | None = None) -> InputSpec:
    """Input ``name`` as declared, otherwise as in the sample or of the shape ``known``, with the free dimensions that the user names.

    Type or shape are None if nothing tells them. Raises InvalidArgument.
    """
    spec = next((one for one in options.inputs if one.name == name), InputSpec(name, None, None))
    sample = options.sample.get(name)
    shape = known if sample is None else sample.shape
    datatype = spec.datatype or (None if sample is None else DataType.from_numpy(sample.dtype))
    dims = spec.shape if spec.shape is not None else shape
    if dims is None:
        return InputSpec(name, datatype, None)
    dims = list(dims)
    for axis, dim in options.dynamic.get(name, {}).items():
        if not -len(dims) <= axis < len(dims):
            raise InvalidArgument(f"input '{name}' has no axis {axis}", f"its shape is {dims}")
        dims[axis] = dim
    return InputSpec(name, datatype, tuple(dims))


def check_declared(spec: TensorSpec, options: ConvertOptions) -> None:
    """Raise InvalidArgument if the model's input ``spec`` does not have the sizes and free dimensions that the user declares."""
    shape = next((one.shape for one in options.inputs if one.name == spec.name), None)
    dims: dict[int, int | str] = {**dict(enumerate(shape or ())), **options.dynamic.get(spec.name, {})}
    rank = len(spec.shape)
    if (shape is not None and len(shape) != rank) or max(dims, default=0) >= max(rank, 1):
        declared = max(len(shape or ()), max(dims, default=-1) + 1)
        raise InvalidArgument(
            f"input '{spec.name}' of the model has {rank} dimension(s), but {declared} are declared",
            f"its shape is {list(spec.shape)}, where -1 is a free dimension",
        )
    for axis, dim in dims.items():
        size = spec.shape[axis]
        if dim == size or (size < 0 and isinstance(dim, str)):
            continue
        if size < 0:
            text = f"{spec.name}[{','.join(map(str, [*spec.shape[:axis], dim, *spec.shape[axis + 1 :]]))}]"
            raise InvalidArgument(
                f"axis {axis} of input '{spec.name}' is declared as the size {dim}, but the model leaves it free",
                "write a name in place of the size; the ONNX model can then be given the size with "
                f"`penstock convert MODEL.onnx --inputs '{text}'`",
            )
        wanted = f"the size {dim}" if isinstance(dim, int) else f"free ('{dim}')"
        raise InvalidArgument(
            f"axis {axis} of input '{spec.name}' is declared as {wanted}, but the model fixes its size to {size}",
            f"declare the size {size}, or save the model again with this dimension free",
        )


def free_axes(
    specs: Iterable[TensorSpec], options: ConvertOptions, first: str = "batch"
) -> dict[str, tuple[Axis, ...]]:
    """The free dimensions of each input, with the user's names. Otherwise, axis 0 is called ``first``, and others after the input."""
    found = {}
    for spec in specs:
        names = {
            axis: dim for one in options.inputs if one.name == spec.name for axis, dim in enumerate(one.shape or ())
        }
        names |= options.dynamic.get(spec.name, {})
        free = [axis for axis, size in enumerate(spec.shape) if size < 0]
        own = {axis: f"{spec.name}_{axis}" if axis else first for axis in free}
        found[spec.name] = tuple(
            Axis(axis, name if isinstance(name := names.get(axis), str) else own[axis]) for axis in free
        )
    return found


def input_text(spec: InputSpec) -> str:
    """``spec`` as ``parse_inputs`` reads it, for hints."""
    datatype = "" if spec.datatype is None else ":" + _type_name(spec.datatype)
    shape = "" if spec.shape is None else f"[{','.join(map(str, spec.shape))}]"
    return f"{spec.name}{datatype}{shape}"


def _type_name(datatype: DataType) -> str:
    return "string" if datatype is DataType.BYTES else str(datatype.dtype)


def _input(text: str) -> InputSpec:
    match = _DECLARED.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"--inputs {quoted(text)} is not the declaration of an input", _WRITE_INPUT)
    name, colon, given = match["name"].strip().rpartition(":")
    datatype = _TYPES.get(given.strip().lower()) if colon else None
    if datatype is None:
        if colon and not given.strip().isdecimal():  # otherwise a name of TensorFlow, such as ``image:0``
            known = "float32, float16, float64, int64, int32, uint8, bool or string"
            raise InvalidArgument(f"--inputs {quoted(text)} has the unknown type {quoted(given)}", f"use {known}")
        name = match["name"].strip()
    name = name.strip()
    if not name:
        raise InvalidArgument(f"--inputs {quoted(text)} does not name the input", _WRITE_INPUT)
    return InputSpec(name, datatype, None if match["shape"] is None else _shape(match["shape"], name))


def _shape(text: str, name: str) -> tuple[int | str, ...]:
    sizes = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(sizes) > MAX_RANK:
        raise InvalidArgument(
            f"--inputs gives input {quoted(name)} {len(sizes)} dimensions", f"give at most {MAX_RANK}"
        )
    return tuple(_size(size, name, axis) for axis, size in enumerate(sizes))


def _size(text: str, name: str, axis: int) -> int | str:
    if text.lower() in _FREE:
        return _own_name(name, axis)
    if _SIZE.fullmatch(text) and 0 < int(text) <= _MAX_SIZE:
        return int(text)
    if text[0] in "-0123456789." or not text.isprintable() or " " in text:
        raise InvalidArgument(
            f"--inputs gives axis {axis} of input {quoted(name)} the size {quoted(text)}",
            "give a whole number of at least 1, or a name such as N for a free dimension",
        )
    return text


def _axis(text: str, name: str) -> tuple[int, str]:
    match = _AXIS.fullmatch(text)
    if match is None or int(match[1]) >= MAX_RANK:
        raise InvalidArgument(f"--dynamic gives input {quoted(name)} the axis {quoted(text)}", _WRITE_AXES)
    axis = int(match[1])
    return axis, match[2] or _own_name(name, axis)


def _own_name(name: str, axis: int) -> str:
    """The name of a free dimension for which the user gives none."""
    return f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{axis}"
