"""``Net``: a Caffe network in its test phase, without its data and loss layers."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, ResourceExhausted
from penstock.offline.convert.base import UnsupportedOperator, UnsupportedOperators
from penstock.offline.convert.caffe import detection, elementwise, linear, shape, windows
from penstock.offline.convert.caffe.layer import Layer, Shape, Writer, check_size
from penstock.offline.convert.caffe.prototxt import TextMessage
from penstock.tensor import Array

_LAYERS = {
    kind.lower(): (kind, made)
    for table in (detection.LAYERS, elementwise.LAYERS, linear.LAYERS, shape.LAYERS, windows.LAYERS)
    for kind, made in table.items()
}
_SOURCES = re.compile(r"(.*data|input)$")
"""The types of layers that give the network's inputs."""
_TRAINING = re.compile(r"(.*loss|accuracy|silence|detectionevaluate)$")
"""The types of layers that only training and tests need."""
_WAYS_OUT = "remove the layer from the .prototxt, or write it with the layers of docs/convert/caffe.md"
_FAILURES = (ArithmeticError, LookupError, TypeError, ValueError)


class LayerStep(NamedTuple):
    """A layer in the order of execution. Several layers may write the same blob one after the other, so each result has a name."""

    layer: Layer
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]


class Net:
    """The layers that inference needs. ``inputs`` are the names of the inputs, with their shapes as far as the file says them."""

    def __init__(
        self, fields: TextMessage, weights: Mapping[str, Sequence[Array]], outputs: Sequence[str] = ()
    ) -> None:
        """``outputs`` are the tensors to compute; by default, all that no layer reads. Raises InvalidModel, UnsupportedOperators."""
        self.inputs = _declared(fields)
        self.left_out: list[str] = []
        """Names of the layers that only training needs."""
        layers: list[Layer] = []
        unsupported: list[UnsupportedOperator] = []
        for one in _in_test(fields):
            kind = re.sub("[^a-z0-9]", "", one.get("type", "").lower()).replace("withloss", "loss")
            if _SOURCES.fullmatch(kind):
                self.inputs |= dict.fromkeys(one.all("top", str)) | _given(one)
            elif _TRAINING.fullmatch(kind):
                self.left_out.append(one.get("name", kind))
            elif kind not in _LAYERS:
                title = one.get("type", "") or "layer without type"
                unsupported.append(
                    UnsupportedOperator(title, f"layer '{one.get('name', '')}', line {one.line}", _WAYS_OUT)
                )
            else:
                title, made = _LAYERS[kind]
                layers.append(made(one, title, weights.get(one.get("name", ""), ())))
                if reason := layers[-1].refusal():
                    unsupported.append(UnsupportedOperator(f"{title} with {reason}", layers[-1].where, _WAYS_OUT))
        if unsupported:
            raise UnsupportedOperators.of(unsupported)
        if not layers:
            raise InvalidModel("the network has no layer", "give the .prototxt of the network, not of the solver")
        self.steps = _connected(layers, self.inputs)
        read = {bottom for step in self.steps for bottom in step.bottoms}
        written = [top for step in self.steps for top in step.tops]
        for name in outputs:
            if name not in written:
                raise InvalidArgument(
                    f"no layer writes the output '{name}'", f"choose from {', '.join(written[-9:])}, …"
                )
        self.outputs = list(outputs) or [top for top in written if top not in read]
        self.steps = _needed(self.steps, self.outputs)
        used = {bottom for step in self.steps for bottom in step.bottoms}
        self.inputs = {name: shape for name, shape in self.inputs.items() if name in used}  # labels are for losses

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Every tensor of one call. Raises InvalidInput if a layer rejects the shapes or values, ResourceExhausted."""
        found = dict(inputs)
        for layer, bottoms, tops in self.steps:
            with _blamed(layer), np.errstate(all="ignore"):
                results = layer.run(*(found[bottom] for bottom in bottoms))
                results = results if isinstance(results, list) else [results]
                for top, result in zip(tops, results, strict=True):
                    found[top] = np.asarray(result, np.float32)
                    check_size(result.shape)
        return found

    def write(self, to: Writer, shapes: Mapping[str, Shape]) -> Iterator[LayerStep]:
        """Write the nodes of one layer after the other. ``shapes`` are those of all tensors in one call."""
        for step in self.steps:
            to.layer = step.layer.name
            with _blamed(step.layer), np.errstate(all="ignore"):
                first = len(to.nodes)
                found = step.layer.write(to, list(step.bottoms), [shapes[bottom] for bottom in step.bottoms])
                names = found if isinstance(found, list) else [found]
                written = {name: node for node in to.nodes[first:] for name in node.output}
                for name, top in zip(names, step.tops, strict=True):
                    node = written.get(name) or to.copy(name)
                    node.output[list(node.output).index(name) if name in written else 0] = top
            yield step


def _connected(layers: Sequence[Layer], inputs: Iterable[str]) -> list[LayerStep]:
    """The steps. The last layer that writes a blob gives its tensor the blob's name; earlier ones add their own."""
    left = Counter(top for layer in layers for top in layer.tops)
    current = {name: name for name in inputs}
    taken = {*inputs, *left}
    steps: list[LayerStep] = []
    for layer in layers:
        with _blamed(layer):
            if missing := [bottom for bottom in layer.bottoms if bottom not in current]:
                raise InvalidModel(f"no earlier layer writes its input '{missing[0]}'")
            if len(set(layer.tops)) < len(layer.tops) or not layer.tops or "" in layer.tops:
                raise InvalidModel(f"it must have different outputs, got {layer.tops}")
        bottoms = tuple(current[bottom] for bottom in layer.bottoms)
        for top in layer.tops:
            left[top] -= 1
            current[top] = top
            if left[top] or top in inputs:
                name = f"{top}/{layer.name}"
                current[top] = f"{name}_{len(steps)}" if name in taken else name  # several layers may have one name
                taken.add(current[top])
        steps.append(LayerStep(layer, bottoms, tuple(current[top] for top in layer.tops)))
    return steps


def _needed(steps: Sequence[LayerStep], outputs: Iterable[str]) -> list[LayerStep]:
    """The steps that ``outputs`` depend on."""
    wanted, found = set(outputs), []
    for step in reversed(steps):
        if wanted.intersection(step.tops):
            wanted.update(step.bottoms)
            found.append(step)
    return found[::-1]


@contextlib.contextmanager
def _blamed(layer: Layer) -> Iterator[None]:
    """Say in an error of the block which layer it comes from."""
    try:
        yield
    except InvalidModel as error:
        raise InvalidModel(f"{layer.where}: {error.message}", error.hint or "correct the .prototxt") from None
    except MemoryError:
        raise ResourceExhausted(f"{layer.where} needs more memory than there is", "use smaller inputs") from None
    except _FAILURES as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise InvalidInput(
            f"{layer.where} rejects its inputs: {reason}", "check its parameters and the shapes"
        ) from None


def _in_test(fields: TextMessage) -> Iterator[TextMessage]:
    """The layers that exist in the test phase, of both forms of the format."""
    for layer in (*fields.messages("layer"), *fields.messages("layers")):
        if "layer" in layer:
            raise InvalidModel(
                f"line {layer.line}: the network has the format V0 of 2013", "convert it with 'upgrade_net_proto_text'"
            )
        included, excluded = layer.messages("include"), layer.messages("exclude")
        is_in = any(map(_holds, included)) if included else not any(map(_holds, excluded))
        if is_in and layer.get("phase", "TEST") == "TEST":
            yield layer


def _holds(rule: TextMessage) -> bool:
    """True if ``rule`` admits the test phase at level 0 without stages."""
    is_level = rule.get("min_level", 0) <= 0 <= rule.get("max_level", 0)
    return rule.get("phase", "TEST") == "TEST" and is_level and "stage" not in rule


def _declared(fields: TextMessage) -> dict[str, Shape | None]:
    """The inputs that the network names itself, with their shapes."""
    names, dims = fields.all("input", str), fields.all("input_dim", int)
    shapes: list[Shape] = [tuple(one.all("dim", int)) for one in fields.messages("input_shape")]
    shapes = shapes or [tuple(dims[first : first + 4]) for first in range(0, len(dims), 4)]
    if shapes and len(shapes) != len(names):
        raise InvalidModel(f"the network has {len(names)} input(s), but {len(shapes)} shape(s)")
    return dict(zip(names, shapes, strict=True)) if shapes else dict.fromkeys(names)


def _given(layer: TextMessage) -> dict[str, Shape | None]:
    """The shapes that an input layer says."""
    tops = layer.all("top", str)
    for name in ("input_param", "dummy_data_param"):
        shapes: list[Shape] = [tuple(one.all("dim", int)) for one in layer.message(name).messages("shape")]
        if shapes and len(shapes) in (1, len(tops)):
            return dict(zip(tops, shapes * len(tops) if len(shapes) == 1 else shapes, strict=True))
    memory = layer.message("memory_data_param")
    sizes = [memory.get(name, 0) for name in ("batch_size", "channels", "height", "width")]
    return {tops[0]: tuple(sizes)} if tops and math.prod(sizes) > 0 else {}
