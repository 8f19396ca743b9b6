"""Links between the tensors of an exported ONNX model and the values of the torch model, and the lines of code that make them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from penstock.offline.convert.base import RANDOM, TensorLink
from penstock.offline.convert.torch.attention import is_masked_attention

Values = Callable[[Sequence[torch.Tensor], frozenset[str]], dict[str, torch.Tensor]]
"""Runs the model on flat tensors, and returns the values of the given names."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+(?:\n\s+(?!File)(.*))?')
FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders whose code is not the user's."""
_MOVING = frozenset(
    {operator.getitem, torch.ops.aten.clone.default, torch.ops.aten.cat.default, torch.ops.aten.stack.default}
    | {torch.ops.aten.split_with_sizes.default, torch.ops.aten.split.Tensor, torch.ops.aten.chunk.default}
)
"""Operators that move values, beside those that return views."""
_FOLDERS = re.compile(r'(File ")[^"]*[/\\]')
_TRACE = "pkg.torch.onnx.stack_trace"


def where(node: fx.Node) -> str:
    """The layer and the user's line of code that make the value of ``node``."""
    layers = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    layer = str(layers[-1]).removeprefix("module").removeprefix(".") if layers else ""
    return ", ".join(filter(None, (line_of(node.meta.get("stack_trace") or ""), layer and f"layer '{layer}'")))


def line_of(trace: str) -> str:
    """The last line of the user's own code in a stack trace; empty if there is none."""
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith((*FOREIGN, "<"))]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}: {frames[-1][2].strip()}".rstrip(": ") if frames else ""


def remove_folders(model: Any) -> None:
    """Shorten the stack traces in an ONNX IR model to the names of the files, because folders can contain the user's name."""
    for node in _nodes(model):
        if _TRACE in node.metadata_props:
            node.metadata_props[_TRACE] = _FOLDERS.sub(r"\1", node.metadata_props[_TRACE])


def program_links(model: Any, program: Any, outputs: Sequence[str]) -> tuple[TensorLink, ...]:
    """The links of an ONNX IR model that the dynamo exporter made. It names tensors after the nodes of the program."""
    nodes = {node.name: node for node in program.graph.nodes if _is_tensor(node)}
    named = dict(zip(outputs, program.graph_signature.user_outputs, strict=False))
    tensors = [value.name for node in model.graph for value in node.outputs]
    found = ((name, nodes.get(named.get(name, name))) for name in tensors)
    return tuple(TensorLink(name, node.name, where(node)) for name, node in found if node is not None)


class ProgramValues:
    """Evaluates the nodes of ``program``."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self._nodes = {node.name: node for node in program.graph.nodes}

    def __call__(self, tensors: Sequence[torch.Tensor], names: frozenset[str]) -> dict[str, torch.Tensor]:
        watcher = _Watcher(self._program.graph_module, names)
        watcher.run(*_placeholders(self._program, tensors))
        return watcher.found

    def fixed(self) -> tuple[list[str], list[str]]:
        """The names of the tensors that depend on no input: those that only move the values of weights, and those that compute."""
        moved = {spec.arg.name for spec in self._program.graph_signature.input_specs if _is_stored(spec)}
        known, found = set(moved), (list[str](), list[str]())
        for node in self._program.graph.nodes:
            inputs = {one.name for one in node.all_input_nodes}
            if node.op == "call_function" and inputs <= known and not _draws(node):
                known.add(node.name)
                is_moved = bool(inputs) and inputs <= moved and _moves(node)
                if is_moved:
                    moved.add(node.name)
                if _is_tensor(node):
                    found[not is_moved].append(node.name)
        return found

    def part(
        self, tensors: Sequence[torch.Tensor | None], given: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """The values ``names``, computed from the values ``given`` and from the inputs, of which some may be missing.

        Empty unless the program needs all of ``given``.
        """
        interpreter = fx.Interpreter(self._program.graph_module, garbage_collect_values=False)
        places = self._program.graph.find_nodes(op="placeholder")
        known = dict(zip(places, _placeholders(self._program, tensors), strict=True))
        used: set[str] = set()

        def value(node: fx.Node) -> Any:
            if node.name in given:
                used.add(node.name)
                return given[node.name]
            if node not in known:
                arguments, options = fx.node.map_arg((node.args, node.kwargs), value)
                known[node] = getattr(interpreter, node.op)(node.target, arguments, options)
            return known[node]

        found = {name: value(self._nodes[name]) for name in names}
        return found if used == given.keys() else {}


def module_links(model: Any, module: nn.Module) -> tuple[TensorLink, ...]:
    """The links of an ONNX IR model that the TorchScript exporter made. It names nodes after layers: ``/module/conv/Conv``.

    A layer without inner layers is linked if exactly one tensor of its nodes is used by other nodes.
    """
    by_scope: dict[str, list[str]] = {}
    for node in model.graph:
        scope = _scope(node.name)
        seen = [
            value.name
            for value in node.outputs
            if value.is_graph_output() or any(_scope(use.node.name) != scope for use in value.uses())
        ]
        by_scope.setdefault(scope, []).extend(seen if node.op_type != "Constant" else [])
    layers = {f"/{path.replace('.', '/')}": path for path, one in module.named_modules() if not list(one.children())}
    return tuple(
        TensorLink(tensors[0], layers[scope], f"layer '{layers[scope].removeprefix('module.')}'")
        for scope, tensors in by_scope.items()
        if scope in layers and len(tensors) == 1
    )


def module_values(module: nn.Module) -> Values:
    """Records the outputs of layers. Layers that are called more than once are left out."""

    def values(tensors: Sequence[torch.Tensor], names: frozenset[str]) -> dict[str, torch.Tensor]:
        calls: dict[str, list[Any]] = {name: [] for name in names}

        def hook(name: str) -> Callable[..., None]:
            return lambda _module, _arguments, result: calls[name].append(result)

        handles = [one.register_forward_hook(hook(path)) for path, one in module.named_modules() if path in names]
        try:
            module(*tensors)
        finally:
            for handle in handles:
                handle.remove()
        return {
            name: found[0].clone()
            for name, found in calls.items()
            if len(found) == 1 and isinstance(found[0], torch.Tensor)
        }

    return values


def random_operators(model: Any) -> tuple[str, ...]:
    """The operators of an ONNX IR model that give random results, with the line of code or the node."""
    return tuple(
        f"{node.op_type} at {line_of(node.metadata_props.get(_TRACE, '')) or node.name}"
        for node in _nodes(model)
        if node.op_type in RANDOM or (node.op_type == "Dropout" and _trains(node))
    )


def _nodes(model: Any) -> Iterator[Any]:
    for graph in (model.graph, *model.functions.values()):
        yield from graph.all_nodes()


def _trains(node: Any) -> bool:
    """True if the third input of a Dropout node, which activates it, is not the constant False."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and (mode.const_value is None or bool(mode.const_value.numpy()))


class _Watcher(fx.Interpreter):  # type: ignore[misc]
    """Keeps the tensors of the nodes ``names``."""

    def __init__(self, module: fx.GraphModule, names: frozenset[str]) -> None:
        super().__init__(module)
        self.found: dict[str, torch.Tensor] = {}
        self._names = names

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self._names and isinstance(value, torch.Tensor):
            self.found[n.name] = value
        return value


def _placeholders(program: Any, tensors: Sequence[torch.Tensor | None]) -> Iterator[Any]:
    """The arguments of the program's graph: parameters, buffers, constants and ``tensors``."""
    left = iter(tensors)
    stored: Mapping[str, Any] = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        if _is_stored(spec):
            yield stored[spec.target]
        elif hasattr(spec.arg, "value"):
            yield spec.arg.value
        else:
            yield next(left)


def _is_stored(spec: Any) -> bool:
    """True for parameters, buffers and constants."""
    return spec.kind is not InputKind.USER_INPUT


def _is_tensor(node: fx.Node) -> bool:
    """True if the ONNX model has the value of ``node``. It corrects masked attention afterwards."""
    value = node.meta.get("val")
    is_real = isinstance(value, torch.Tensor) and not value.is_complex()
    return node.op == "call_function" and is_real and not is_masked_attention(node)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _moves(node: fx.Node) -> bool:
    """True if ``node`` gives values of its inputs unchanged."""
    return node.target in _MOVING or getattr(node.target, "is_view", False)


def _scope(name: str) -> str:
    return name.rpartition("/")[0]
