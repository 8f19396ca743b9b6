"""One diagnosis for all exporters that failed: every operator that cannot be converted, or the user's line and a way out."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from penstock.engines.torch import reason_of
from penstock.errors import EngineUnavailable, PenstockError, Unsupported
from penstock.offline.convert.base import UnsupportedOperator, UnsupportedOperators
from penstock.offline.convert.torch.links import line_of, where

_INTERNAL = "torch.onnx._internal.exporter"
_MODULES = ("_core", "_dispatching", "_registration")
_REGISTER = "define it with @penstock.register_op('{}') in a file given as --ops"
_RULES = (
    (
        r"data-dependent|GuardOnDataDependent|vmap.*item",
        "the path through the code depends on the values of a tensor",
        "use torch.where or torch.cond instead of `if`, or write the module so that torch.jit.script accepts it",
    ),
    (
        r"specialized it to be a constant|ConstraintViolation|Constraints violated|marked .* as dynamic",
        "the code fixes a dimension that is declared as free",
        "declare a fixed size for this dimension, or use tensor.shape instead of Python numbers",
    ),
    (
        r"no attribute 'onnxscript'|No module named 'onnxscript'",
        "the exporter needs onnxscript",
        "pip install onnxscript",
    ),
)


class ExportFailure(msgspec.Struct):
    """An exporter that failed."""

    exporter: str
    error: Any

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    @property
    def depends_on_values(self) -> bool:
        return re.search(_RULES[0][0], self.text) is not None

    @property
    def is_final(self) -> bool:
        """True if another way to capture the module would fail too."""
        return any(re.search(pattern, self.text) for pattern, _, _ in _RULES)

    @property
    def reason(self) -> str:
        """One line: the cause, and the user's line of code if torch reports it."""
        if isinstance(self.error, PenstockError):
            return self.error.message
        rule = next((cause for pattern, cause, _ in _RULES if re.search(pattern, self.text)), "")
        line = line_of(str(self.error)) or line_of("".join(traceback.format_tb(self.error.__traceback__)))
        return (rule or f"{type(self.error).__name__}: {reason_of(self.error)}") + (f" ({line})" if line else "")

    @property
    def hint(self) -> str:
        return next((hint for pattern, _, hint in _RULES if re.search(pattern, self.text)), "")


def diagnosis(failures: Sequence[ExportFailure], module: Any, example: Sequence[torch.Tensor]) -> PenstockError:
    """The error that explains why no exporter converts the model."""
    for failure in failures:
        if isinstance(failure.error, (EngineUnavailable, UnsupportedOperators)):
            return failure.error
    if module is not None and (found := _script_operators(module, example)):
        return UnsupportedOperators.of(found)
    told = "; ".join(f"{one.exporter}: {one.reason}" for one in failures)
    hint = next((one.hint for one in failures if one.hint), "")
    return Unsupported(
        f"no exporter of PyTorch converts the model: {told}",
        hint or "save it with torch.export, or define the operator with @penstock.register_op",
    )


def missing_operators(program: Any, opset: int, translations: Mapping[Any, Any]) -> list[UnsupportedOperator]:
    """All operators of ``program`` that the dynamo exporter cannot translate. Uses internals of torch; empty if they have changed."""
    try:
        core, dispatching, registration = (importlib.import_module(f"{_INTERNAL}.{name}") for name in _MODULES)
        registry = registration.ONNXRegistry.from_torchlib(opset_version=opset)
        for operator, function in translations.items():
            registry.register_op(operator, function)
        prepare = core._prepare_exported_program_for_export  # noqa: SLF001 - torch offers no public way
        graph = prepare(program, registry=registry).graph
        nodes = [
            node
            for node in graph.nodes
            if node.op == "call_function"
            and hasattr(node.target, "_schema")
            and dispatching.dispatch(node, registry)[0] is None
        ]
    except Exception:  # noqa: BLE001 - internals of torch can change
        return []
    return _listed([(_origin(node), where(node), _is_complex(node)) for node in nodes])


def _listed(found: Sequence[tuple[str, str, bool]]) -> list[UnsupportedOperator]:
    """Each operator once, with its first place."""
    first: dict[str, UnsupportedOperator] = {}
    for name, place, is_complex in found:
        if is_complex:
            way_out = "compute with real tensors, as torch.view_as_real gives them"
        elif name.startswith(("aten::_linalg", "aten::linalg")):
            way_out = f"ONNX has no such operator: compute it outside the model, or {_REGISTER.format(name)}"
        else:
            way_out = _REGISTER.format(name)
        first.setdefault(name, UnsupportedOperator(name, place, way_out))
    return list(first.values())


def _script_operators(module: Any, example: Sequence[torch.Tensor]) -> list[UnsupportedOperator]:
    """The operators that the TorchScript exporter cannot convert."""
    try:
        graph, kinds = torch.onnx.utils.unconvertible_ops(module, tuple(example), opset_version=20)
        nodes = [node for kind in kinds for node in graph.findAllNodes(kind)]
    except Exception:  # noqa: BLE001 - some modules cannot be traced
        return []
    return _listed([(node.kind(), _source_line(node.sourceRange()), False) for node in nodes])


def _source_line(text: str) -> str:
    found = re.search(r'"?([^"\s(]+\.py)"?[(:](?:, line )?(\d+)', text)
    return f"{found[1].rpartition('/')[2]}:{found[2]}" if found else ""


def _origin(node: Any) -> str:
    """The operator of the user's module that was decomposed into ``node``."""
    return str((node.meta.get("original_aten") or node.target).name())


def _is_complex(node: Any) -> bool:
    values = [getattr(one, "meta", {}).get("val") for one in (node, *node.args)]
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)
