"""Finds the inputs in which NaN stands for a missing value, such as those of gradient-boosted trees and of imputers.

Such an input is followed through operators that only move or round its elements. It takes missing values if

1. one operator treats NaN as a value: trees with branches for missing values, ``Imputer``, ``IsNaN``;
2. all others compare, and a comparison with NaN is false.

Any other operator would compute NaN from NaN.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.artifact import Artifact, Format
from penstock.rows.graph import OnnxGraph, OnnxNode, read_graph

_ML = "ai.onnx.ml"
_TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})
_TRACKS = "nodes_missing_value_tracks_true"
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_MOVES = {
    **dict.fromkeys(("Flatten", "Floor", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"), (0,)),
    **dict.fromkeys(("Transpose", "Unsqueeze", "ArrayFeatureExtractor"), (0,)),
    "Where": (1, 2),
}
"""Operators whose outputs have the elements of these inputs."""
_FLOATS = frozenset({1, 10, 11, 16})
"""Numbers of the types to which Cast keeps NaN."""
_SIGNS = (_TRACKS.encode(), b"Imputer", b"IsNaN")


class _Graph(NamedTuple):
    readers: Mapping[str, list[tuple[OnnxNode, int]]]
    writers: Mapping[str, OnnxNode]
    outputs: frozenset[str]


def takes_missing(artifact: Artifact) -> frozenset[str]:
    """The inputs in which NaN stands for a missing value. Empty for models that are not ONNX."""
    if artifact.format is not Format.ONNX or not any(sign in artifact.data for sign in _SIGNS):
        return frozenset()
    try:
        model = read_graph(artifact.data).graph
    except ValueError:
        return frozenset()
    readers: dict[str, list[tuple[OnnxNode, int]]] = defaultdict(list)
    for node in model.nodes:
        for place, name in enumerate(_read(node)):
            readers[name].append((node, place))
    writers = {name: node for node in model.nodes for name in node.outputs}
    graph = _Graph(readers, writers, frozenset(model.outputs))
    return frozenset(name for name in model.inputs if _is_missing(graph, name))


def _read(node: OnnxNode) -> Iterator[str]:
    """The inputs of ``node``, and the names that its subgraphs read."""
    yield from node.inputs
    for body in node.attributes.values():
        if isinstance(body, OnnxGraph):
            for inner in body.nodes:
                yield from _read(inner)
            yield from body.outputs


def _is_missing(graph: _Graph, name: str) -> bool:
    seen, pending, treated = {name}, [name], False
    while pending:
        current = pending.pop()
        if current in graph.outputs:
            return False
        for node, place in graph.readers.get(current, ()):
            if _treats_nan(graph, node, current, place):
                treated = True
            elif _moves(node, place):
                pending += [one for one in node.outputs if one not in seen]
                seen.update(node.outputs)
            elif node.operator not in _COMPARISONS:
                return False
    return treated


def _treats_nan(graph: _Graph, node: OnnxNode, name: str, place: int) -> bool:
    if node.domain == _ML:
        replaced = node.attributes.get("replaced_value_float")
        is_imputer = node.operator == "Imputer" and isinstance(replaced, float) and math.isnan(replaced)
        tracks = node.attributes.get(_TRACKS)
        return is_imputer or (node.operator in _TREES and isinstance(tracks, tuple) and any(tracks))
    if node.operator == "Where" and place == 2:  # Where(IsNaN(x), value, x)
        condition = graph.writers.get(node.inputs[0])
        return condition is not None and condition.operator == "IsNaN" and condition.inputs[0] == name
    return node.operator == "IsNaN"


def _moves(node: OnnxNode, place: int) -> bool:
    if node.domain not in ("", _ML):
        return False
    if node.operator == "Cast":
        return node.attributes.get("to") in _FLOATS
    return node.operator in ("Concat", "FeatureVectorizer") or place in _MOVES.get(node.operator, ())
