"""Traces of JAX functions: values of equations, their tensors in ONNX, their places in the source, and missing operators."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import onnx
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax2onnx.converter.conversion_api import _activate_plugin_worlds
from jax2onnx.plugins.plugin_system import PLUGIN_REGISTRY

from penstock.offline.convert.base import Link, UnsupportedOperator
from penstock.tensor import Array

_LIBRARIES = ("/jax/", "/jaxlib/", "/flax/", "/jax2onnx/", "/penstock/offline/convert/", "<")


class Trace:
    """The equations of ``function`` as jax2onnx sees them, with the tensors that it wrote for them to ``model``.

    ``calls`` is the record that jax2onnx writes: the equations in the order of conversion, those inside of loops before the loop.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Any], calls: Path, model: onnx.ModelProto
    ) -> None:
        self._function = function
        equations = _named(_patched(function, inputs).jaxpr)
        self._counts = Counter(eqn.primitive for _, eqn in equations)
        self.links = tuple(_links(equations, json.loads(calls.read_bytes()), model))

    def values(self, inputs: Sequence[Array], names: Sequence[str]) -> dict[str, Array]:
        closed = _patched(self._function, inputs)
        equations = _named(closed.jaxpr)
        counts = Counter(eqn.primitive for _, eqn in equations)
        # A trace for fixed sizes can lack equations that compute sizes, so numbers of such primitives differ.
        kept = [one for one in equations if counts[one[1].primitive] == self._counts[one[1].primitive]]
        wanted = [(name, eqn.outvars[0]) for name, eqn in kept if name in names]
        inner = closed.jaxpr.replace(outvars=[variable for _, variable in wanted], debug_info=closed.jaxpr.debug_info)
        results = jaxpr_as_fun(closed.replace(jaxpr=inner))(*inputs)
        return {name: jax.device_get(one) for (name, _), one in zip(wanted, results, strict=True)}


def missing_operators(closed: Any) -> list[UnsupportedOperator]:
    """The primitives in a trace that jax2onnx does not know, or else those that compute with complex numbers."""
    equations = list(_all(closed.jaxpr))
    unknown = [one for one in equations if one[0].primitive.name not in PLUGIN_REGISTRY]
    complex_ones = [one for one in equations if any(out.aval.dtype.kind == "c" for out in one[0].outvars)]
    return [_unsupported(eqn, where) for eqn, where in unknown or complex_ones]


def failed_operator(error: BaseException) -> UnsupportedOperator | None:
    """The equation that jax2onnx converted when it raised ``error``."""
    found, where, step = None, "", error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__", "").startswith("jax2onnx."):
            found = step.tb_frame.f_locals.get("eqn", found)
            where = (found is not None and _where(found)) or where
        step = step.tb_next
    return None if found is None else _unsupported(found, where)


def _unsupported(equation: Any, where: str) -> UnsupportedOperator:
    way_out = "write the computation with other functions of jax.numpy, or update jax2onnx"
    return UnsupportedOperator(equation.primitive.name, where, way_out)


def _patched(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    with _activate_plugin_worlds():
        # The lambda keeps JAX from taking a trace of another world from its cache.
        return jax.make_jaxpr(lambda *arrays: function(*arrays))(*inputs)  # noqa: PLW0108


def _named(jaxpr: Any) -> list[tuple[str, Any]]:
    """The outer equations. Their names are the primitives, numbered."""
    numbers: Counter[str] = Counter()
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        found.append((f"{name} {numbers[name]}", equation))
        numbers[name] += 1
    return found


def _links(equations: Sequence[tuple[str, Any]], calls: Sequence[Any], model: onnx.ModelProto) -> Iterator[Link]:
    """The tensors of the outer equations. A tensor that was optimised away, or into another shape, has none."""
    known = {one.name: one.type.tensor_type for one in (*model.graph.value_info, *model.graph.output)}
    made = {name for node in model.graph.node for name in node.output}
    left = iter(calls)
    for name, equation in equations:
        primitive = equation.primitive.name
        outputs = [[list(map(str, one.aval.shape)), str(one.aval.dtype)] for one in equation.outvars]
        call = next((one for one in left if one["primitive_name"] == primitive and _outputs(one) == outputs), None)
        if call is None:
            return
        tensor = call["outputs_onnx_names"][0] if len(equation.outvars) == 1 else ""
        dims = [dim.dim_param or str(dim.dim_value) for dim in known[tensor].shape.dim] if tensor in known else []
        if tensor in made and tensor in known and dims == outputs[0][0]:
            yield Link(tensor, name, _where(equation))


def _outputs(call: Any) -> list[list[Any]]:
    return [[list(map(str, shape)), str(dtype)] for shape, dtype, *_ in call["outputs_aval"]]


def _all(jaxpr: Any, where: str = "") -> Iterator[tuple[Any, str]]:
    """All equations, also those of loops and branches, with the lines that made them."""
    for equation in jaxpr.eqns:
        place = _where(equation) or where
        if equation.primitive.name not in ("jit", "pjit", "closed_call"):
            yield equation, place
        for inner in jaxprs_in_params(equation.params):
            yield from _all(inner, place)


def _where(equation: Any) -> str:
    """The user's line that made ``equation``, and the layer if it has a name."""
    traceback = equation.source_info.traceback
    layer = str(equation.source_info.name_stack)
    for frame in traceback.frames if traceback is not None else ():
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f"{Path(frame.file_name).name}:{frame.line_num}{f' ({layer})' if layer else ''}"
    return layer
