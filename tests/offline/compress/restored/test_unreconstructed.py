import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import Network, cnn, images
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import WrongResult
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.reconstruct.reconstruction import reconstruct
from penstock.offline.compress.restored.unreconstructed import unreconstructed
from penstock.tensor import DataType
from tests.faults import edited

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")


def product() -> tuple[Artifact, Dataset]:
    n = Network()
    n.op("Gemm", "x", n.normal(50, 8), n.normal(8), name="y")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 6)) @ rng.standard_normal((6, 50))
    return n.artifact({"x": ["N", 50]}, {"y": ["N", 8]}), make_dataset({"x": x.astype(np.float32)}, None)


def made(kind: str) -> tuple[Artifact, Dataset, Artifact]:
    if kind == "int8":
        original, data = cnn(8), make_dataset({"x": images(64)}, None)
        found = ranges(collect(original, data), RangeMethod.MIN_MAX, SCHEME)
        return original, data, reconstruct(original, quantize(original, found, SCHEME), data)
    original, data = product()
    bits = 4 if kind == "int4-weights" else 8
    return original, data, quantize_weights(original, data, WeightOnlyOptions(bits, 16, least_weights=1))


KINDS = ["int8", "int8-weights", "int4-weights"]


def constants(artifact: Artifact) -> dict[str, np.ndarray]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def with_constant(artifact: Artifact, name: str, array: np.ndarray) -> Artifact:
    def put(proto: onnx.ModelProto) -> None:
        tensor = next(one for one in proto.graph.initializer if one.name == name)
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return edited(artifact, put)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_the_source(kind):
    original, data, artifact = made(kind)
    assert artifact.provenance[-1].name == "reconstruct"
    assert artifact.source is not None
    assert artifact.data != artifact.source.data
    found = unreconstructed(onnx.load_model_from_string(artifact.data), artifact.source)
    assert found.SerializeToString(deterministic=True) == artifact.source.data
    check_explained(original, artifact, data)


@pytest.mark.parametrize("kind", KINDS)
def test_an_integer_more_than_one_step_away_is_found(kind):
    original, data, artifact = made(kind)
    known, (name, *_) = constants(artifact.source), artifact.provenance[-1].facts["changed"]
    for place in (0, 7):
        for by in (2, -2):
            array, nearest = constants(artifact)[name].copy(), known[name].reshape(-1)[place]
            low = int(nearest) & 15 if kind == "int4-weights" else int(nearest)
            wanted = low + by if (0 <= low + by < 16 or kind != "int4-weights") else low - by
            array.reshape(-1)[place] = (int(nearest) & 0xF0) | wanted if kind == "int4-weights" else wanted
            with pytest.raises(WrongResult, match=f"the integers of weight '{name}' are not those of"):
                check_explained(original, with_constant(artifact, name, array), data)


def test_an_integer_beyond_the_range_in_which_products_are_exact_is_found():
    original, data, artifact = made("int8")
    name = artifact.provenance[-1].facts["changed"][0]
    array = constants(artifact)[name].copy()
    assert np.abs(constants(artifact.source)[name]).max() == np.abs(array).max() == 64
    place = np.flatnonzero(constants(artifact.source)[name] == 64)[0]
    array.reshape(-1)[place] = 65
    with pytest.raises(WrongResult, match="are not those of the weight rounded up or down"):
        check_explained(original, with_constant(artifact, name, array), data)


def test_other_integers_are_not_put_back():
    original, data, artifact = made("int8")
    zeros = {name: one for name, one in constants(artifact).items() if name.endswith("_zero_point") and not one.ndim}
    name, zero = next((name, zero) for name, zero in zeros.items() if zero)
    changed = [with_constant(artifact, name, np.asarray(zero + 1, zero.dtype))]
    biases = [(name, one) for name, one in constants(artifact).items() if one.dtype == np.int32]
    changed += [with_constant(artifact, name, bias + np.int32(1)) for name, bias in biases]
    for one in changed:
        with pytest.raises(WrongResult, match="changed more than the integers of weights"):
            check_explained(original, one, data)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_that_raise_the_error_are_found(kind):
    """Each integer is within one step, but the direction is arbitrary."""
    original, data, artifact = made(kind)
    worse = artifact
    for name in artifact.provenance[-1].facts["changed"]:
        nearest = constants(artifact.source)[name]
        if kind == "int4-weights":
            halves = np.stack([nearest & 15, nearest >> 4])
            halves = np.clip(halves.astype(int) + 1, halves.min(), halves.max()).astype(np.uint8)
            array = halves[0] | (halves[1] << 4)
        else:
            array = np.clip(nearest.astype(int) + 1, nearest.min(), nearest.max()).astype(nearest.dtype)
        worse = with_constant(worse, name, array)
    with pytest.raises(WrongResult, match="the error without reconstructed weights explains at most"):
        check_explained(original, worse, data)
