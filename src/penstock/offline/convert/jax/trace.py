"""Traces of JAX functions: values of equations, their tensors in ONNX, their places in the source, and missing operators."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax2onnx
import jaxlib
import numpy as np
import onnx
from jax.extend.core import Literal, jaxpr_as_fun, jaxprs_in_params
from jax2onnx.converter.conversion_api import _activate_plugin_worlds
from jax2onnx.plugins.plugin_system import PLUGIN_REGISTRY

from penstock.offline.convert.base import TensorLink, UnsupportedOperator
from penstock.tensor import Array

_LIBRARIES = (
    *(str(Path(str(one.__file__)).parent) for one in (jax, jaxlib, flax, jax2onnx)),
    str(Path(__file__).parents[1]),
    "<",
)
"""Folders whose code is not the user's."""
_UNLINKED = {"broadcast_in_dim", "jit", "pjit", "closed_call"}
_PATCHED = {"jax.numpy": jax.numpy, "jax.nn": jax.nn}


_MOVING = frozenset({"concatenate", "copy", "expand_dims", "reshape", "slice", "split", "squeeze", "transpose"})
"""Primitives that give values of their operands unchanged."""
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call"})
"""Primitives that only call a function."""


class JaxTrace:
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
        counts = Counter(eqn.primitive for eqn in closed.jaxpr.eqns)
        # A trace for fixed sizes can lack equations that compute sizes, so the numbers of such primitives differ.
        return {
            name: jax.device_get(value)
            for name, eqn, value in _run(closed, inputs)
            if name in names and counts[eqn.primitive] == self._counts[eqn.primitive]
        }


def fixed(closed: Any) -> tuple[dict[str, Array], dict[str, Array]]:
    """The values in a trace that depend on no input: constants and parts of them, and values that are computed."""
    known = {one: (value, True) for one, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    found: tuple[dict[str, Array], dict[str, Array]] = {}, {}
    for number, (value, is_stored) in enumerate([*known.values(), *_computed(closed, known)]):
        array = np.asarray(value)
        if array.size > 1 and array.dtype.kind == "f":
            found[not is_stored][f"constant {number}"] = array
    return found


def _computed(closed: Any, known: dict[Any, tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """The values of the equations all of whose operands are known, also those of called functions, and whether they are only moved."""
    for equation in closed.jaxpr.eqns:
        name = equation.primitive.name
        variables = list(dict.fromkeys(one for one in equation.invars if not isinstance(one, Literal)))
        inner = next(jaxprs_in_params(equation.params), None) if name in _CALLS else None
        if inner is not None and len(inner.invars) == len(equation.invars):
            pairs = zip(inner.invars, equation.invars, strict=True)
            within = {one: known[other] for one, other in pairs if not isinstance(other, Literal) and other in known}
            if within:
                yield from _computed(closed.replace(jaxpr=inner, consts=[]), within)
                results = zip(equation.outvars, inner.outvars, strict=True)
                known |= {
                    one: within[other] for one, other in results if not isinstance(other, Literal) and other in within
                }
        elif variables and all(one in known for one in variables) and not name.startswith("random"):
            with contextlib.suppress(Exception):  # some primitives are not meant to run alone
                made = _evaluated(closed, equation, variables, [known[one][0] for one in variables])
                is_stored = name in _MOVING and all(known[one][1] for one in variables)
                known |= {one: (value, is_stored) for one, value in zip(equation.outvars, made, strict=True)}
                yield from ((value, is_stored) for value in made)


def missing_operators(closed: Any) -> list[UnsupportedOperator]:
    """The primitives in a trace that jax2onnx does not know, or else those that compute with complex numbers."""
    equations = list(_all(closed.jaxpr))
    unknown = [one for one in equations if one[0].primitive.name not in PLUGIN_REGISTRY]
    complex_ones = [one for one in equations if any(out.aval.dtype.kind == "c" for out in one[0].outvars)]
    way_out = "write the computation with other functions of jax.numpy, or update jax2onnx"
    return [UnsupportedOperator(eqn.primitive.name, where, way_out) for eqn, where in unknown or complex_ones]


def failed_operator(error: BaseException) -> UnsupportedOperator | None:
    """The equation that jax2onnx converted when it raised ``error``."""
    found, where, step = None, "", error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__", "").startswith("jax2onnx."):
            found = step.tb_frame.f_locals.get("eqn", found)
            where = (found is not None and _where(found)) or where
        step = step.tb_next
    reason = next(iter(str(error).splitlines()), "")[:200]
    way_out = f"write it with other functions of jax.numpy, or give free dimensions a size; jax2onnx reports: {reason}"
    return None if found is None else UnsupportedOperator(found.primitive.name, where, way_out)


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


def _links(equations: Sequence[tuple[str, Any]], calls: Sequence[Any], model: onnx.ModelProto) -> Iterator[TensorLink]:
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
        # jax2onnx leaves broadcasting to the operators that follow, and records a function within a function under the same name.
        if primitive not in _UNLINKED and tensor in made and tensor in known and dims == outputs[0][0]:
            yield TensorLink(tensor, name, _where(equation))


def _outputs(call: Any) -> list[list[Any]]:
    return [[list(map(str, shape)), str(dtype)] for shape, dtype, *_ in call["outputs_aval"]]


def _run(closed: Any, inputs: Sequence[Array]) -> Iterator[tuple[str, Any, Any]]:
    """The value of each outer equation with one output. Equations that cannot run, and those that need them, are left out."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))
    for name, equation in _named(jaxpr):
        variables = list(dict.fromkeys(one for one in equation.invars if not isinstance(one, Literal)))
        if not all(one in values for one in variables):
            continue
        try:
            results = _evaluated(closed, equation, variables, [values[one] for one in variables])
        except Exception:  # noqa: BLE001, S112 - some primitives of jax2onnx are not meant to run
            continue
        values |= dict(zip(equation.outvars, results, strict=True))
        if len(results) == 1:
            yield name, equation, results[0]


def _evaluated(closed: Any, equation: Any, variables: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
    package, _, function = equation.primitive.name.rpartition(".")
    if package in _PATCHED and not equation.primitive.multiple_results:
        feeds = dict(zip(variables, given, strict=True))
        operands = [one.val if isinstance(one, Literal) else feeds[one] for one in equation.invars]
        if function == "einsum":
            return [jax.numpy.einsum(equation.params["equation"], *operands)]
        if not equation.params:  # what jax2onnx put in place of the function
            return [getattr(_PATCHED[package], function)(*operands)]
    single = closed.jaxpr.replace(eqns=[equation], constvars=[], invars=variables, outvars=equation.outvars)
    return jaxpr_as_fun(closed.replace(jaxpr=single, consts=[]))(*given)  # type: ignore[no-any-return]


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
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{Path(frame.file_name).name}:{frame.line_num}{f' ({layer})' if layer else ''}"
    return layer
