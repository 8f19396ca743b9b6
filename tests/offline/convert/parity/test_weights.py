"""Weights of the model that are almost those of the source are found, and those that an exporter has changed on purpose are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.onnx_source import OnnxSource
from penstock.offline.convert.base import Exported
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.weights import altered_weight
from penstock.tensor import Array
from tests.compared import artifact, parsed

_RNG = np.random.default_rng(0)
WEIGHT = _RNG.standard_normal((8, 6)).astype(np.float32)
SPARSE = np.where(_RNG.random((8, 6)) < 0.8, 0, WEIGHT).astype(np.float32)
FACTORS = np.linspace(0.5, 2.0, 8, dtype=np.float32)[:, None]


def found(theirs: Mapping[str, Array], ours: Mapping[str, Array], computed: tuple[str, ...] | None = None) -> str:
    """The name of the source's weight that is altered in a model with the constants ``ours``."""
    models = []
    for constants in (theirs, ours):
        models.append(parsed("g (float[N,6] x) => (float[N,6] y) { y = Abs(x) }"))
        models[-1].graph.initializer.extend(onnx.numpy_helper.from_array(one, name) for name, one in constants.items())
    divergence = altered_weight(
        Nodes(models[1]),
        OnnxSource(artifact(models[0]), models[0]),
        Exported("", weights=tuple(name for name in theirs if name not in (computed or ())), computed=computed),
    )
    return divergence.source if divergence else ""


def one_changed(array: Array) -> Array:
    changed = array.copy()
    changed[3, 3] *= np.float32(1.0001)
    return changed


@pytest.mark.parametrize("layout", [np.copy, np.transpose, lambda array: array.reshape(4, 12)])
@pytest.mark.parametrize("name", ["layer.weight", "val_1"])
def test_one_changed_value_is_found_in_any_layout(layout: Callable[[Array], Array], name: str) -> None:
    weights = {"layer.weight": WEIGHT, "other.weight": WEIGHT + 1}
    assert found(weights, {name: np.ascontiguousarray(layout(one_changed(WEIGHT)))}) == "layer.weight"
    assert not found(weights, {name: np.ascontiguousarray(layout(WEIGHT))})


@pytest.mark.parametrize("change", [lambda one: one * np.float32(1.02), lambda one: one[::-1] * FACTORS, np.zeros_like])
def test_a_tensor_with_the_name_of_a_weight_is_this_weight(change: Callable[[Array], Array]) -> None:
    assert found({"layer.weight": WEIGHT}, {"layer.weight": change(WEIGHT)}) == "layer.weight"
    assert not found({"layer.weight": WEIGHT}, {"folded": change(WEIGHT)})


@pytest.mark.parametrize("kind", ["int64", "uint8", "bool"])
def test_one_changed_integer_is_found_by_its_name(kind: str) -> None:
    table = (np.arange(5000) % 2).astype(kind)
    changed = table.copy()
    changed[4320] = 1
    assert found({"table": table}, {"table": changed}) == "table"
    assert not found({"table": table}, {"table": table})
    assert not found({"table": table}, {"val_1": changed})


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8"])
def test_one_changed_integer_of_a_folded_table_is_found_if_all_computed_values_are_known(kind: str) -> None:
    table = (np.random.default_rng(1).permutation(5000) % 200).astype(kind)
    changed = table.copy()
    changed[4320] += 1
    for computed in ((), ("table",)):
        assert found({"table": table, "other": WEIGHT}, {"val_1": changed}, computed) == "table"
        assert not found({"table": table, "other": WEIGHT}, {"val_1": table}, computed)


def test_integers_that_an_exporter_makes_are_no_change() -> None:
    """A shape can be like another one, and an index that wraps around like the one that does not."""
    shape, index = np.array([2, 3, 16, 16, 5, 7, 9]), np.arange(-50, 50)
    theirs = {"shape": shape, "index": index, "other": WEIGHT}
    assert not found(theirs, {"val_1": np.array([2, 3, 16, 16, 5, 7, -1]), "val_2": index % 100}, ())


NORM = {
    "norm.weight": np.linspace(0.5, 2, 8, dtype=np.float32) * np.array([1, -1, 1, 1, 1, 1, 1, 1], np.float32),
    "norm.bias": np.linspace(-1, 2, 8, dtype=np.float32),
    "norm.running_mean": np.linspace(3, -1, 8, dtype=np.float32),
    "norm.running_var": np.linspace(0.1, 4, 8, dtype=np.float32),
}
SCALES = {
    epsilon: NORM["norm.weight"] / np.sqrt(NORM["norm.running_var"] + np.float32(epsilon))
    for epsilon in (1e-5, 1e-3, 0.02)
}
LAYERS = {
    "Conv": ("float[N,6,1] x, float[8,6,1] w, float[8] b", "Conv", "float[N,8,1]"),
    "Gemm": ("float[N,6] x, float[8,6] w, float[8] b", "Gemm<transB=1>", "float[N,8]"),
}


def folded(layer: str, changed: Mapping[str, Array], theirs: Mapping[str, Array]) -> bool:
    """True if a weight of a layer, "w", or its bias, "b", is altered."""
    inputs, call, outputs = LAYERS[layer]
    models = [parsed(f"g ({inputs}) => ({outputs} y) {{ y = {call}(x, w, b) }}")]
    models.append(onnx.ModelProto())
    models[1].CopyFrom(models[0])
    for model, constants in zip(models, (theirs, {**theirs, **changed}), strict=True):
        del model.graph.input[1:]
        model.graph.initializer.extend(onnx.numpy_helper.from_array(one, name) for name, one in constants.items())
    source = OnnxSource(artifact(models[0]), models[0])
    return altered_weight(Nodes(models[1]), source, Exported("", weights=tuple(theirs), computed=())) is not None


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("epsilon", SCALES)
def test_a_folded_batch_normalisation_is_no_change(layer: str, epsilon: float) -> None:
    """ε is unknown; a channel can be of zeros; and nothing but the source's numbers explains a factor."""
    scales = SCALES[epsilon]
    weight = SPARSE if layer == "Gemm" else WEIGHT[..., None]
    theirs = {"w": weight, "b": WEIGHT[:, 0], **NORM}
    made = weight * scales.reshape(8, *[1] * (weight.ndim - 1))
    bias = (theirs["b"] - NORM["norm.running_mean"]) * scales + NORM["norm.bias"]
    assert not folded(layer, {"w": made, "b": bias}, theirs)
    for factor in (0.0, -1.0, 1.0001):
        wrong, wrong_bias = made.copy(), bias.copy()
        wrong[4] *= np.float32(factor)
        wrong_bias[4] *= np.float32(factor)
        assert folded(layer, {"w": wrong, "b": bias}, theirs)
        assert folded(layer, {"w": made, "b": wrong_bias}, theirs)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.0001])
def test_a_row_of_a_weight_is_no_batch_normalisation(factor: float) -> None:
    """The source has one, but it was not folded into this weight."""
    weight = WEIGHT.copy()
    weight[4] *= np.float32(factor)
    assert folded("Gemm", {"w": weight}, {"w": WEIGHT, "b": WEIGHT[:, 0], **NORM})


def test_the_bias_of_a_layer_without_a_batch_normalisation_is_compared() -> None:
    theirs = {"w": WEIGHT, "b": WEIGHT[:, 0], **NORM}
    assert folded("Gemm", {"b": WEIGHT[:, 0] + np.eye(8, dtype=np.float32)[3]}, theirs)


def test_two_batch_normalisations_in_sequence_are_no_change() -> None:
    theirs = {"w": WEIGHT, "b": WEIGHT[:, 0], **NORM, "next.running_var": FACTORS[:, 0]}
    made = WEIGHT * (SCALES[1e-3] / np.sqrt(FACTORS[:, 0] + np.float32(1e-5)))[:, None]
    assert not folded("Gemm", {"w": made}, theirs)


def test_a_table_takes_no_batch_normalisation() -> None:
    theirs = {"table": WEIGHT, **NORM}
    assert found(theirs, {"table": WEIGHT * SCALES[1e-5][:, None]}) == "table"


@pytest.mark.parametrize(
    "made",
    [
        np.where(np.abs(WEIGHT) < 0.3, 0, WEIGHT),
        np.clip(WEIGHT, -1, 1),
        np.concatenate([WEIGHT[4:], WEIGHT[:4]]),
        WEIGHT.astype(np.float16),
        np.ones_like(WEIGHT) + np.eye(8, 6, dtype=np.float32) / 1000,
    ],
    ids=["pruned", "clipped", "reordered", "half", "unrelated"],
)
def test_a_tensor_that_is_made_from_a_weight_is_no_change(made: Array) -> None:
    assert not found({"layer.weight": WEIGHT, "ones": np.ones_like(WEIGHT)}, {"val_1": made})


class Computing(OnnxSource):
    """A source that computes one value from its weights."""

    computed: Array

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        found = super().values(inputs, [one for one in names if one != "computed"])
        return found | ({"computed": self.computed} if "computed" in names else {})


@pytest.mark.parametrize(("change", "is_found"), [(1 + 1e-7, False), (1.0001, True)])
def test_a_tensor_that_the_source_computes_is_no_change(change: float, is_found: bool) -> None:
    """Half of the values of a weight normalisation can be those of the weight."""
    computed = WEIGHT * np.array([1, 1, 1, 1, 1, 1.005, 1.005, 1.005], np.float32)[:, None]
    models = [parsed("g (float[N,6] x) => (float[N,6] y) { y = Abs(x) }") for _ in range(2)]
    changed = computed.copy()
    changed[1, 2] *= np.float32(change)
    for model, name, one in zip(models, ("weight", "val_1"), (WEIGHT, changed.T), strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(one, name))
    source = Computing(artifact(models[0]), models[0])
    source.computed = computed
    for names, wanted in (("computed",), is_found), ((), True):
        exported = Exported("", weights=("weight",), computed=names)
        assert bool(altered_weight(Nodes(models[1]), source, exported)) is wanted


@pytest.mark.parametrize("groups", [1, 2])
def test_a_batch_normalisation_folded_into_a_grouped_transposed_convolution(groups: int) -> None:
    weight, factors = WEIGHT.reshape(4, 4, 3), SCALES[1e-5].reshape(2, 1, 4, 1)
    made = (weight.reshape(2, 2, 4, 3) * factors).reshape(4, 4, 3)
    weights = {"up.weight": weight, **NORM}
    models = [
        parsed(f"g (float[N,4,5] x, float[4,4,3] w) => (float[N,C,L] y) {{ y = ConvTranspose<group={groups}>(x, w) }}")
        for _ in range(2)
    ]
    for model, constants in zip(models, (weights, weights | {"up.weight": made}), strict=True):
        model.graph.node[0].input[1] = "up.weight"
        del model.graph.input[1]
        model.graph.initializer.extend(onnx.numpy_helper.from_array(one, name) for name, one in constants.items())
    source = OnnxSource(artifact(models[0]), models[0])
    is_found = altered_weight(Nodes(models[1]), source, Exported("", weights=tuple(weights))) is not None
    assert is_found is (groups == 1)


def test_a_source_without_weights() -> None:
    assert not found({}, {"val_1": WEIGHT})


def exchanged(array: Array) -> Array:
    changed = array.copy()
    changed[[0, 5]] = changed[[5, 0]]
    return changed


def with_another_row(array: Array) -> Array:
    changed = array.copy()
    changed[6] = changed[6] + 1
    return changed


CHANGES = [one_changed, exchanged, with_another_row]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", [np.copy, np.transpose, lambda array: array.reshape(2, 4, 6).transpose(2, 0, 1)])
def test_a_wrong_row_is_found_if_all_computed_values_are_known(
    change: Callable[[Array], Array], layout: Callable[[Array], Array]
) -> None:
    weights = {"layer.weight": WEIGHT.reshape(2, 4, 6) if layout(WEIGHT).ndim == 3 else WEIGHT}
    assert not found(weights, {"val_1": np.ascontiguousarray(layout(WEIGHT))}, ())
    assert found(weights, {"val_1": np.ascontiguousarray(layout(change(WEIGHT)))}, ()) == "layer.weight"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_wrong_row_of_a_folded_constant_is_found(change: Callable[[Array], Array], kind: Any) -> None:
    """Folding may round otherwise than the source."""
    folded = (WEIGHT.astype(np.float64) * FACTORS).astype(kind)
    source, rounded = {"weight": WEIGHT, "mul": folded}, folded * kind(1 + 3e-7)
    for name in ("mul", "val_1"):
        assert not found(source, {name: rounded}, ("mul",))
        assert found(source, {name: change(rounded)}, ("mul",)) == "mul"


def test_a_table_whose_rounding_grows_along_its_rows_is_not_altered() -> None:
    angles = np.arange(4096, dtype=np.float32)[:, None] * np.geomspace(1, 1e-3, 8, dtype=np.float32)
    table, other = np.cos(angles), np.cos(angles * np.float32(1 + 1e-7))
    assert np.abs(table - other).max() > 1e-5
    assert not found({"weight": WEIGHT, "cos": table}, {"cos": other}, ("cos",))
    other[4000] = other[0]
    assert found({"weight": WEIGHT, "cos": table}, {"cos": other}, ("cos",)) == "cos"


def test_constants_of_nodes_are_compared() -> None:
    models = [parsed("g (float[N,6] x) => (float[N,6] y) { y = Abs(x) }") for _ in range(2)]
    models[0].graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "weight"))
    for change, wanted in ((np.copy, False), (exchanged, True)):
        value = onnx.numpy_helper.from_array(change(WEIGHT))
        models[1].graph.node.insert(0, onnx.helper.make_node("Constant", [], ["val_1"], value=value))
        exported = Exported("", weights=("weight",), computed=())
        assert (
            altered_weight(Nodes(models[1]), OnnxSource(artifact(models[0]), models[0]), exported) is not None
        ) is wanted
        del models[1].graph.node[0]
