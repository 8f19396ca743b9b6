"""JAX: functions, and modules of Flax (nnx, and linen with its variables), through jax2onnx. Extra ``penstock[jax]``.

Two ways are tried. The first that gives the source's outputs for one call, without random operators, is taken:

1. ``patched``: jax2onnx replaces functions such as ``softmax`` by primitives of its own, so that the ONNX model keeps them whole.
2. ``primitives``: the function is traced before, so that jax2onnx sees only the primitives of ``lax``.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import onnx
import onnxruntime
from flax import linen, nnx
from jax.extend.core import jaxpr_as_fun
from jax2onnx import to_onnx

from penstock.errors import InvalidArgument, InvalidInput, PenstockError, Unsupported, WrongResult
from penstock.offline.convert.base import RANDOM, Axis, ConvertOptions, Exported, InputSpec, UnsupportedOperators
from penstock.offline.convert.declarations import chosen_outputs, declared_input
from penstock.offline.convert.jax.trace import JaxTrace, failed_operator, fixed, missing_operators
from penstock.offline.convert.quiet import quiet
from penstock.tensor import Array, DataType, Signature, TensorSpec

_ERRORS = 3
"""The level of logging at which ONNX Runtime shows no warnings."""
_WIDE = (DataType.INT64, DataType.UINT64, DataType.FP64)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Written(NamedTuple):
    """The result of one way."""

    way: str
    proto: onnx.ModelProto
    random: tuple[str, ...]
    is_close: bool
    """True if the outputs are like the source's for one call."""


class JaxConverter:
    name = "jax"
    version = jax.__version__

    def open(self, source: Any, options: ConvertOptions) -> JaxModel:
        return JaxModel(_function(source), options)


CONVERTER = JaxConverter()


class JaxModel:
    """A function of arrays. Its positional parameters are the inputs."""

    def __init__(self, function: Callable[..., Any], options: ConvertOptions) -> None:
        self._specs, self._sample = _specs(function, options), options.sample
        declared = {spec.name for spec in options.inputs if spec.datatype is DataType.FP64}
        self._double = any(
            spec.datatype is DataType.FP64 and (spec.name in declared or jax.config.jax_enable_x64)
            for spec in self._specs
        )
        if not self._double and (wide := [spec for spec in self._specs if spec.datatype in _WIDE]):
            dtype = str(_type(wide[0]).dtype)
            raise InvalidArgument(
                f"input '{wide[0].name}' is {dtype}, but JAX computes with 32 bits by default",
                f"use {dtype.replace('64', '32')} in the sample or in --inputs",
            )
        self._function = function
        self._trace: JaxTrace | None = None
        self._fixed: Mapping[str, Array] = {}
        outputs = self._outputs()
        self._names = [one.name for one in outputs]
        kept = chosen_outputs(options, self._names)
        self.axes: Mapping[str, tuple[Axis, ...]] = {
            spec.name: tuple(Axis(i, dim) for i, dim in enumerate(spec.shape or ()) if isinstance(dim, str))
            for spec in self._specs
        }
        self.signature = Signature(
            tuple(
                TensorSpec(one.name, _type(one), tuple(-1 if isinstance(dim, str) else dim for dim in one.shape or ()))
                for one in self._specs
            ),
            tuple(one for one in outputs if one.name in kept),
        )
        self._compiled = jax.jit(self._flat)

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for spec in self.signature.inputs:
            if spec.name in inputs and not spec.admits(inputs[spec.name].shape):
                raise InvalidInput(f"input '{spec.name}' has the wrong shape {list(inputs[spec.name].shape)}")
        try:
            with jax.enable_x64(self._double):
                found = self._compiled(*(inputs[spec.name] for spec in self._specs))
        except Exception as error:
            raise InvalidInput(f"the function fails: {_told(error)}") from error
        kept = self.signature.output_names
        return {name: np.asarray(one) for name, one in zip(self._names, found, strict=True) if name in kept}

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        found = {name: self._fixed[name] for name in names if name in self._fixed}
        if self._trace is None or not inputs:
            return found
        with jax.enable_x64(self._double):
            return self._trace.values([inputs[spec.name] for spec in self._specs], names)

    def export(self, target: Path, opset: int) -> Exported:
        symbolic, failures, found = self._symbolic(), list[Exception](), list[_Written]()
        with quiet(), tempfile.TemporaryDirectory() as folder, jax.enable_x64(self._double):
            calls = Path(folder, "calls.json")
            for way in ("patched", "primitives"):
                try:
                    found.append(self._written(way, symbolic, opset, calls))
                except Exception as error:  # noqa: BLE001 - jax2onnx raises anything
                    failures.append(error)
                if found and found[-1].is_close and not found[-1].random:
                    break
            if not found:
                raise self._diagnosis(failures)
            best = min(found, key=lambda one: (len(one.random), not one.is_close))
            self._trace = JaxTrace(self._flat, symbolic, calls, best.proto) if best.way == "patched" else None
        onnx.save(best.proto, target)
        links = self._trace.links if self._trace else ()
        with jax.enable_x64(self._double):
            weights, computed = fixed(jax.make_jaxpr(self._flat)(*self._arrays(2)))
        self._fixed = weights | computed
        way = f"jax2onnx {version('jax2onnx')} {best.way}"
        return Exported(way, links, best.random, weights=tuple(weights), computed=tuple(computed))

    def close(self) -> None:
        self._trace, self._fixed = None, {}
        self._compiled.clear_cache()

    def _flat(self, *arrays: Any) -> list[Any]:
        return list(jax.tree.leaves(self._function(*arrays)))

    def _written(self, way: str, symbolic: Sequence[Any], opset: int, calls: Path) -> _Written:
        is_patched = way == "patched"
        function = self._flat if is_patched else jaxpr_as_fun(jax.make_jaxpr(self._flat)(*symbolic))
        proto = to_onnx(
            function,
            symbolic,
            model_name="model",
            opset=opset,
            enable_double_precision=self._double,
            record_primitive_calls_file=str(calls) if is_patched else None,
            input_names=[spec.name for spec in self._specs],
        )
        self._name_outputs(proto)
        sample = dict(zip(self.signature.input_names, self._arrays(2), strict=True)) | dict(self._sample)
        random = tuple(f"{one.op_type} ({one.name})" for one in proto.graph.node if one.op_type in RANDOM)
        return _Written(way, proto, random, _is_close(proto, sample, self.forward(sample)))

    def _name_outputs(self, proto: onnx.ModelProto) -> None:
        # jax2onnx fails to name an output that is an input or another output, so Identity nodes give the names.
        results = list(proto.graph.output)
        del proto.graph.output[:]
        specs = {spec.name: spec for spec in self.signature.outputs}
        for result, name in zip(results, self._names, strict=True):
            if name in specs:
                dims = [one.dim_param for one in result.type.tensor_type.shape.dim]
                dims = dims if len(dims) == len(specs[name].shape) else [""] * len(specs[name].shape)
                shape = [
                    free or None if size == -1 else size for free, size in zip(dims, specs[name].shape, strict=True)
                ]
                proto.graph.node.append(onnx.helper.make_node("Identity", [result.name], [name], name=f"output_{name}"))
                proto.graph.output.append(onnx.helper.make_tensor_value_info(name, specs[name].datatype.onnx, shape))

    def _diagnosis(self, failures: Sequence[Exception]) -> PenstockError:
        """The error that lists all operators that neither way converts."""
        missing = missing_operators(jax.make_jaxpr(self._flat)(*self._arrays(2)))
        failed = [one for one in map(failed_operator, failures) if one is not None]
        if operators := missing or failed[:1]:
            return UnsupportedOperators.of(list(dict.fromkeys(operators)))
        needs_size = any("Inconclusive" in type(error).__name__ for error in failures)
        return Unsupported(
            f"jax2onnx {version('jax2onnx')} cannot convert the function: {_told(failures[-1])}",
            "give the dimension a size in --inputs" if needs_size else "write the function with other operators",
        )

    def _arrays(self, least: int) -> list[Array]:
        """An array for each input. The free dimensions have different sizes, from ``least`` on."""
        sizes = {name: least + i for i, name in enumerate(self._dims())}
        rng, found = np.random.default_rng(0), []
        for spec in self._specs:
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape or ()]
            value = rng.standard_normal(shape) if _type(spec).is_float else np.ones(shape)
            found.append(value.astype(_type(spec).dtype))
        return found

    def _dims(self) -> list[str]:
        return list(dict.fromkeys(dim for spec in self._specs for dim in spec.shape or () if isinstance(dim, str)))

    def _symbolic(self) -> list[jax.ShapeDtypeStruct]:
        """The inputs, with symbols for the free dimensions."""
        scope = jax.export.SymbolicScope()
        symbols = {dim: _symbol(dim, i, scope) for i, dim in enumerate(self._dims())}
        shapes = [
            tuple(symbols[dim] if isinstance(dim, str) else dim for dim in one.shape or ()) for one in self._specs
        ]
        return [jax.ShapeDtypeStruct(shape, _type(one).dtype) for shape, one in zip(shapes, self._specs, strict=True)]

    def _outputs(self) -> list[TensorSpec]:
        """The outputs. A dimension is free if it has another size when the free dimensions of the inputs have."""
        try:
            with jax.enable_x64(self._double):
                small, large = (jax.eval_shape(self._function, *self._arrays(least)) for least in (2, 5))
        except jax.errors.ConcretizationTypeError as error:
            raise Unsupported(
                f"the function's course depends on the values of its inputs: {_told(error)}",
                "use jax.lax.cond, jax.lax.while_loop or jax.numpy.where",
            ) from error
        except Exception as error:
            declared = ", ".join(f"{spec.name}{list(spec.shape or ())}" for spec in self._specs)
            raise InvalidArgument(
                f"the function rejects the inputs {declared}: {_told(error)}", "correct --inputs, or the function"
            ) from error
        found = []
        for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(small), jax.tree.leaves(large), strict=True):
            shape = tuple(a if a == b else -1 for a, b in zip(one.shape, other.shape, strict=True))
            found.append(TensorSpec(_name(path), DataType.from_numpy(one.dtype), shape))
        return found


def _function(source: Any) -> Callable[..., Any]:
    """``source`` as a function of arrays, in inference mode. Raises InvalidArgument."""
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], linen.Module):
        return source[0].bind(source[1])  # type: ignore[no-any-return]
    if isinstance(source, linen.Module) and source.scope is None:
        raise InvalidArgument(
            f"{type(source).__name__} is a module of linen without its variables", "return module.bind(variables)"
        )
    if isinstance(source, nnx.Module):
        inner = nnx.clone(source)
        inner.eval()
        graph, state = nnx.split(inner)

        def function(*arrays: Any) -> Any:
            # A module cannot change its counters of random numbers inside of a trace, but a new one can.
            return nnx.merge(graph, state)(*arrays)

        function.__signature__ = inspect.signature(source)  # type: ignore[attr-defined]
        return function
    if not callable(source):
        raise InvalidArgument(f"{type(source).__name__} is not a function of arrays", "return a function or a module")
    return source  # type: ignore[no-any-return]


def _specs(function: Callable[..., Any], options: ConvertOptions) -> list[InputSpec]:
    """Name, type and shape of each parameter, in the order of the parameters. Raises InvalidArgument."""
    found = {}
    for name in dict.fromkeys((*(spec.name for spec in options.inputs), *options.sample)):
        spec = declared_input(name, options)
        if spec.shape is None or spec.datatype is DataType.BYTES:
            raise InvalidArgument(f"input '{name}' needs a shape of numbers", f"write --inputs '{name}:float32[N,…]'")
        found[name] = InputSpec(name, spec.datatype or DataType.FP32, spec.shape)
    known = _parameters(function)
    needed = [one.name for one in known if one.default is inspect.Parameter.empty]
    names = [one.name for one in known][: max(len(found), len(needed))]
    # Names that no parameter has are taken in order.
    order = names if set(found) & set(names) else list(found)
    if not found or set(order) != set(found) or len(found) < len(needed):
        hint = " ".join(f'--inputs "{name}:float32[N,…]"' for name in needed or ["x"])
        raise InvalidArgument(
            f"the function takes {names or 'other inputs'}, but {list(found) or 'no inputs'} are declared",
            f"write {hint}",
        )
    return [found[name] for name in order]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The positional parameters; empty if they are not known."""
    try:
        return [one for one in inspect.signature(function).parameters.values() if one.kind in _POSITIONAL]
    except (TypeError, ValueError):
        return []


def _type(spec: InputSpec) -> DataType:
    assert spec.datatype is not None
    return spec.datatype


def _symbol(name: str, number: int, scope: Any) -> Any:
    """A symbol for a free dimension. JAX reads other names than identifiers as formulas."""
    return jax.export.symbolic_shape(name if name.isidentifier() else f"size_{number}", scope=scope)[0]


def _name(path: Sequence[Any]) -> str:
    """The name of an output: its keys, with ``OUTPUT`` before a position."""
    parts = [str(next(getattr(key, part) for part in ("key", "name", "idx") if hasattr(key, part))) for key in path]
    if not parts or hasattr(path[0], "idx"):
        parts = ["OUTPUT", *(parts or ["0"])]
    return "__".join(parts)


def _is_close(proto: onnx.ModelProto, sample: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """True if ONNX Runtime gives about the ``expected`` outputs for ``sample``. Raises WrongResult for other types or shapes.

    This only decides between the ways. The comparison of the conversion comes later, and is strict.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS
    # Some optimisations end the process, in FP16.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    taken = {one.name: sample[one.name] for one in session.get_inputs()}
    for (name, want), got in zip(expected.items(), session.run(list(expected), taken), strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise WrongResult(f"output '{name}' is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}")
        if not np.allclose(got.astype(np.float64), want.astype(np.float64), 1e-2, 1e-2, equal_nan=True):
            return False
    return True


def _told(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
