import pickle
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from networks import Network, attention, cnn, images, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument, PenstockError, Unsupported, WrongResult
from penstock.offline.compress.explained import Difference, check_explained, distance
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.pruning.n_m import prune_n_m
from penstock.offline.compress.ptq import qdq_writer
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.sessions import loaded, signature_of
from penstock.tensor import DataType
from tests.faults import edited, faults
from tests.fuzz.offline import data_of
from tests.random_models import RandomModel, make_genes

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
_ROUGH = 1e-4
"""Far below the error of any method, and far above that of another order of summation."""


def rows(shape: tuple[int, ...], count: int = 48) -> Dataset:
    return make_dataset({"x": np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)}, None)


NETWORKS = {
    "cnn": (cnn(8), make_dataset({"x": images(48)}, None)),
    "mlp": (mlp(32), rows((16,))),
    "attention": (attention(16), rows((5, 16))),
}


def int8(artifact: Artifact, data: Dataset, placement=QdqPlacement.LINEAR, method=RangeMethod.MIN_MAX) -> Artifact:
    return quantize(artifact, ranges(collect(artifact, data), method, SCHEME), SCHEME, placement)


METHODS: dict[str, Callable[[Artifact, Dataset], Artifact]] = {
    "linear": int8,
    "wide": lambda a, d: int8(a, d, QdqPlacement.WIDE, RangeMethod.MSE),
    "recipe": lambda a, d: quantize_with(PtqRecipe(), a, d, SCHEME),
    "int4-awq": lambda a, d: quantize_weights(a, d, WeightOnlyOptions(4, 16, "nearest", least_weights=1)),
    "int4-gptq": lambda a, d: quantize_weights(a, d, WeightOnlyOptions(4, 16, least_weights=1)),
    "dynamic": lambda a, d: quantize_dynamic(a, d, DynamicOptions(least_weights=1)),
    "int8-weights": lambda a, _: quantize_weights(a, None, WeightOnlyOptions(8, 16, least_weights=1)),
    "int4-weights": lambda a, _: quantize_weights(a, None, WeightOnlyOptions(4, 16, least_weights=1)),
    "fp16-weights": lambda a, _: halve_weights(a, HalfOptions("fp16", least_weights=1)),
    "bf16-weights": lambda a, _: halve_weights(a, HalfOptions("bf16", least_weights=1)),
    "prune": lambda a, _: prune(a, PruneOptions(GlobalRule(0.5))),
    "n-m": lambda a, _: prune_n_m(a),
    "share": lambda a, _: share(a, ShareOptions(fc_bits=4, conv_bits=4, bias_bits=3)),
    "low-rank": lambda a, d: factorize(a, d, FactorizeOptions(rank=4, min_ms=0)),
}


def against_original(found: Sequence[Difference]) -> Difference:
    (one,) = (one for one in found if one.reason.startswith("its error at other sizes"))
    return one


def inner(proto: onnx.ModelProto) -> str:
    """The tensor that was the output, which gets another name."""
    node = next(node for node in proto.graph.node if node.output[0] == "y")
    node.output[0] = "inner"
    return "inner"


def without_its_change(found: Sequence[Difference]) -> float:
    """The error after undoing the method's change; 0 if the result is the very model that the method was given."""
    return max((one.error for one in found if one.reason.startswith("without its own change")), default=0.0)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("placement", QdqPlacement)
@pytest.mark.parametrize("method", RangeMethod)
def test_int8_without_rounding_is_the_original(name, placement, method):
    artifact, data = NETWORKS[name]
    assert without_its_change(check_explained(artifact, int8(artifact, data, placement, method), data)) < _ROUGH


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_data", [False, True])
def test_a_model_without_its_change_is_the_original(name, method, has_data):
    artifact, data = NETWORKS[name]
    found = check_explained(artifact, METHODS[method](artifact, data), data if has_data else None)
    assert without_its_change(found) < _ROUGH
    is_run = any(one.reason.startswith("without its own change") for one in found)
    assert is_run or method in ("prune", "n-m", "share", "fp16-weights", "bf16-weights")
    assert any(one.error > _ROUGH for one in found)


def answers(artifact: Artifact, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with loaded(artifact) as model:
        return model.forward(inputs)


def missed(artifact: Artifact, made: Artifact, data: Dataset, most: int) -> tuple[int, list[str]]:
    """The number of faults of ``made`` that change its outputs by more than its own error, and those that are not found."""
    signature = signature_of(artifact)
    inputs = dict(data.pick_evenly(16 if signature.batchable else signature.smallest_batch).inputs)
    want, got = answers(artifact, inputs), answers(made, inputs)
    least = max(1e-3, *(distance(want[name], got[name]) for name in want))
    known = list(faults(made))
    np.random.default_rng(0).shuffle(known)  # type: ignore[arg-type]
    count, left = 0, []
    for what, faulty in known[:most]:
        try:
            changed = answers(faulty, inputs)
            large = max(distance(got[name], changed[name]) for name in want) > least
        except PenstockError:
            large = True
        try:
            check_explained(artifact, faulty, data)
        except WrongResult:
            count += large
        else:
            count, left = count + large, [*left, what] if large else left
    return count, left


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_faults_are_found(name, method):
    artifact, data = NETWORKS[name]
    count, left = missed(artifact, METHODS[method](artifact, data), data, 10)
    assert count
    assert not left


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_of_random_models_are_found():
    total, models, left = 0, 0, []
    for seed in range(60):
        model = RandomModel(make_genes(seed))
        if model.float is not np.float32:
            continue
        artifact, _ = optimize(model.artifact())
        data, names = data_of(model, artifact), random.Random(seed).sample(list(METHODS), 3)
        for name in names:
            try:
                made = METHODS[name](artifact, data)
            except (Unsupported, InvalidArgument):
                continue
            check_explained(artifact, made, data)
            count, found = missed(artifact, made, data, 20)
            total, models, left = total + count, models + 1, left + [f"{seed} {name} {what}" for what in found]
    assert models > 20
    assert total > 200
    assert len(left) <= 0.05 * total, left


def test_a_model_that_is_right_at_one_length_only_is_found():
    n = Network()
    n.op("MatMul", "x", n.normal(8, 8), name="y")
    artifact = n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})
    data = rows((5, 8))

    def freeze(proto: onnx.ModelProto) -> None:
        """Cut all samples to the length of the data's."""
        graph = proto.graph
        for name, number in (("zero", 0), ("five", 5), ("one", 1)):
            graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
        graph.node.append(helper.make_node("Slice", [inner(proto), "zero", "five", "one"], ["y"]))

    check_explained(artifact, int8(artifact, data), data)
    with pytest.raises(WrongResult, match=r"on inputs x \[2, 17, 8\], has another type or shape"):
        check_explained(artifact, edited(int8(artifact, data), freeze), data)
    with pytest.raises(WrongResult, match="has another type or shape"):
        check_explained(artifact, edited(artifact, freeze))


def test_a_model_that_does_not_take_a_size_that_the_original_takes_is_found():
    artifact, data = NETWORKS["mlp"]

    def fix_batch(proto: onnx.ModelProto) -> None:
        proto.graph.initializer.append(numpy_helper.from_array(np.array([16, 4]), "all"))
        proto.graph.node.append(helper.make_node("Reshape", [inner(proto), "all"], ["y"]))

    with pytest.raises(WrongResult, match=r"does not run on inputs x \[1, 16\], but the original does"):
        check_explained(artifact, edited(artifact, fix_batch), data)


def test_a_model_that_does_not_load_is_found():
    artifact, data = NETWORKS["mlp"]
    with pytest.raises(WrongResult, match="does not load"):
        check_explained(artifact, edited(artifact, lambda proto: proto.graph.node.pop(0) and None), data)


def test_a_trained_model_may_have_any_finite_outputs():
    artifact, data = NETWORKS["mlp"]
    made = prune(artifact, PruneOptions(GlobalRule(0.9)))
    trained = artifact.derive(made.data, "recover", {}, {})
    check_explained(artifact, trained, data)

    def spoil(proto: onnx.ModelProto) -> None:
        tensor = proto.graph.initializer[0]
        tensor.CopyFrom(numpy_helper.from_array(np.full(tuple(tensor.dims), np.nan, np.float32), tensor.name))

    with pytest.raises(WrongResult, match="NaN or infinities"):
        check_explained(artifact, artifact.derive(edited(made, spoil).data, "recover", {}, {}), data)


def test_distance_of_what_is_no_float():
    assert distance(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    assert distance(np.array(["a"], object), np.array(["b"], object)) == 1.0
    assert distance(np.ones(2, np.float32), np.ones(2, np.float64)) == np.inf
    assert distance(np.ones((0, 2), np.float32), np.ones((0, 2), np.float32)) == 0.0


def test_distance_is_relative_to_the_original():
    assert distance(np.array([3.0, 4.0]), np.array([3.0, 5.0])) == pytest.approx(0.2)
    assert distance(np.array([3.0, 4.0]), np.array([-3.0, -4.0])) == pytest.approx(2.0)
    assert distance(np.zeros(4), np.full(4, 0.1), 0.04) == pytest.approx(0.5)
    assert distance(np.ones(4), np.full(4, 1.1), 0.04) == pytest.approx(0.1)
    assert distance(np.zeros(4), np.zeros(4)) == 0.0
    assert distance(np.zeros(4), np.full(4, 1e-3)) == 1.0


def test_an_output_may_be_zero_on_all_data():
    n = Network()
    n.op("MatMul", "x", n.weight(np.float32([[0.25], [0.25], [0.25], [-0.75]])), name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 1]})
    # The products of a row sum to zero, but not in INT8.
    alike = np.repeat(np.random.default_rng(0).integers(1, 9, (48, 1)), 4, axis=1)
    data = make_dataset({"x": alike.astype(np.float32)}, None)
    made = int8(artifact, data)
    assert against_original(check_explained(artifact, made, data)).error == pytest.approx(1.0)
    for what, faulty in faults(made):
        if "other sign" in what:
            with pytest.raises(WrongResult):
                check_explained(artifact, faulty, data)


def test_distance_compares_what_is_finite():
    want = np.array([np.nan, np.inf, -np.inf, 2.0])
    assert distance(want, np.array([np.nan, np.inf, -np.inf, 3.0])) == pytest.approx(0.5)
    for place, other in ((0, 1.0), (1, -np.inf), (2, np.nan), (3, np.inf), (3, np.nan)):
        got = want.copy()
        got[place] = other
        assert distance(want, got) == np.inf
    assert distance(np.ones(3), np.ones((3, 1))) == np.inf


def lengthwise(error: float, other: float) -> tuple[Artifact, Artifact, Dataset]:
    """A model, another one that is off by ``error`` at length 5 and by ``other`` at other lengths, and data of length 5."""
    n = Network()
    n.op("Mul", "x", n.weight(np.float32(1)), name="y")
    original = n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})
    n = Network()
    is_five = n.op("Equal", n.op("Shape", "x", start=1, end=2), n.weight(np.array([5])))
    factor = n.op("Where", is_five, n.weight(np.float32([1 + error])), n.weight(np.float32([1 + other])))
    n.op("Mul", "x", factor, name="y")
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (48, 5, 8))
    return original, n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]}), make_dataset({"x": signs}, None)


@pytest.mark.parametrize(("error", "other", "bound"), [(0.01, 0.49, 0.5), (0.1, 0.98, 1.0)])
def test_without_rounding_the_error_at_the_datas_sizes_bounds_that_at_others(error, other, bound):
    original, made, data = lengthwise(error, other)
    found = against_original(check_explained(original, made, data))
    assert (found.error, found.bound) == (pytest.approx(other, rel=1e-3), pytest.approx(bound, rel=1e-3))
    assert found.sizes == "x [2, 1, 8]"
    original, made, data = lengthwise(error, bound + 0.02)
    with pytest.raises(WrongResult, match="its error at other sizes explains at most") as wrong:
        check_explained(original, made, data)
    assert f"is off by {bound + 0.02:.2%}" in wrong.value.message


def test_the_datas_own_size_has_no_bound_but_must_be_finite():
    original, made, data = lengthwise(30.0, 30.0)
    found = against_original(check_explained(original, made, data))
    assert found.error == pytest.approx(30.0)
    with pytest.raises(WrongResult, match=r"on inputs x \[16, 5, 8\], has another type or shape, or NaN"):
        check_explained(original, lengthwise(np.inf, 0.0)[1], data)


@pytest.mark.parametrize("batch", [1, 4, 16, 24])
def test_a_model_of_a_fixed_batch_is_checked_too(batch):
    artifact, data = cnn(8, batch=batch), make_dataset({"x": images(48)}, None)
    made = int8(artifact, data)
    assert {one.sizes for one in check_explained(artifact, made, data)} == {f"x [{batch}, 3, 12, 12]"}
    with pytest.raises(WrongResult):
        check_explained(artifact, next(one for what, one in faults(made) if what.startswith("lost bias")), data)


def test_steps_from_the_original_on_are_undone_one_by_one():
    artifact, data = NETWORKS["mlp"]
    pruned = METHODS["prune"](artifact, data)
    shared = METHODS["share"](pruned, data)
    made = int8(shared, data)
    assert without_its_change(check_explained(artifact, made, data)) < _ROUGH
    for what, faulty in faults(pruned):
        if "other sign" in what:
            with pytest.raises(WrongResult, match="is not the original's with some elements set to zero"):
                check_explained(artifact, int8(METHODS["share"](faulty, data), data), data)


def test_without_its_source_a_step_is_not_undone():
    artifact, data = NETWORKS["mlp"]
    made = pickle.loads(pickle.dumps(int8(artifact, data)))
    assert made.source is None
    assert {one.reason.split()[0] for one in check_explained(artifact, made, data)} == {"its", "between"}


@pytest.mark.parametrize("factor", [20, 300])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_method_that_rounds_a_channel_too_coarsely_is_found(name, factor, monkeypatch):
    artifact, data = NETWORKS[name]
    scales = qdq_writer.weight_scales

    def coarse(*given):
        found = scales(*given)
        found[0] *= np.float32(factor)
        return found

    monkeypatch.setattr(qdq_writer, "weight_scales", coarse)
    made = int8(artifact, data)
    with pytest.raises(WrongResult, match="the steps of weight .* are too large for its values"):
        check_explained(artifact, made, data)


def test_corrected_biases_may_not_cause_a_larger_error():
    artifact, data = NETWORKS["cnn"]
    made = METHODS["recipe"](artifact, data)
    assert made.provenance[-1].name == "correct-biases"
    check_explained(artifact, made, data)
    (wrong,) = (one for what, one in faults(made) if what == "lost bias Conv_2_bias_folded")
    with pytest.raises(WrongResult, match="the error without corrected biases explains at most"):
        check_explained(artifact, wrong, data)


def wrong_at(*shape: int) -> Artifact:
    """A model that multiplies by four if the input has this shape, otherwise by one."""
    n = Network()
    same = n.op("Cast", n.op("Equal", n.op("Shape", "x"), n.weight(np.array(shape))), to=7)
    factor = n.op("Where", n.op("Cast", n.op("ReduceMin", same, keepdims=0), to=9), n.weight(np.float32(4)), "one")
    n.weights.append(numpy_helper.from_array(np.float32(1), "one"))
    n.op("Mul", "x", factor, name="y")
    return n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (3, 5), (2, 1), (2, 5), (2, 17)])
def test_an_error_at_any_of_the_sizes_is_found(batch, length):
    original, _, data = lengthwise(0.0, 0.0)
    with pytest.raises(WrongResult, match=rf"on inputs x \[{batch}, {length}, 8\], is off by 300"):
        check_explained(original, wrong_at(batch, length, 8), data)


@pytest.mark.parametrize(("axis", "sizes"), [(0, "[0, 5, 8]"), (1, "[1, 0, 8]")])
def test_a_model_that_fails_on_nothing_is_found(axis, sizes):
    original, _, data = lengthwise(0.0, 0.0)
    n = Network()
    one = n.op("Div", n.op("Shape", "x", start=axis, end=axis + 1), n.op("Shape", "x", start=axis, end=axis + 1))
    n.op("Mul", "x", n.op("Cast", one, to=1), name="y")
    made = n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})
    with pytest.raises(WrongResult, match=f"does not run on inputs x {re.escape(sizes)}"):
        check_explained(original, made, data)


def test_a_model_that_ends_its_process_cannot_be_used():
    n = Network()
    n.op("Mul", "x", "x", name="y")
    original = n.artifact({"x": ["N", 3]}, {"y": ["N", 3]})
    n = Network()
    found = n.op("Cast", n.op("NonZero", "x"), to=1)
    square = n.op(
        "Mul", n.op("Unsqueeze", found, n.weight(np.array([2]))), n.op("Unsqueeze", found, n.weight(np.array([1])))
    )
    n.op("Einsum", square, square, name="y", equation="ia...,ja...->ij...")
    made = n.artifact({"x": ["N", 3]}, {"y": ["N", "P", "Q"]})
    zeros = make_dataset({"x": np.zeros((16, 3), np.float32)}, None)
    with pytest.raises(WrongResult, match="cannot be used: ONNX Runtime crashes when running it"):
        check_explained(original, made, zeros)


def test_an_output_that_is_missing_is_found():
    n = Network()
    n.op("Mul", "x", "x", name="y")
    n.op("Neg", "x", name="z")
    original = n.artifact({"x": ["N", 8]}, {"y": ["N", 8], "z": ["N", 8]})
    made = edited(original, lambda proto: proto.graph.output.pop() and None)
    with pytest.raises(WrongResult, match="has no output 'z'"):
        check_explained(original, made, rows((8,)))


def test_the_largest_error_of_each_output_is_reported_with_its_sizes():
    original, made, data = lengthwise(0.3, 0.2)
    found = against_original(check_explained(original, made, data))
    assert (found.output, found.sizes, found.error) == ("y", "x [16, 5, 8]", pytest.approx(0.3))


def test_a_first_step_that_trains_has_no_bound_at_other_sizes():
    original, made, data = lengthwise(0.0, 3.0)
    found = against_original(check_explained(original, original.derive(made.data, "recover", {}, {}), data))
    assert found.error == pytest.approx(3.0)


def test_without_rounding_both_ways_to_run_a_model_agree_closely():
    original, made, data = lengthwise(0.1, 0.1)
    (one,) = (one for one in check_explained(original, made, data) if one.reason.startswith("between"))
    assert one.bound < 0.01


def test_sizes_that_the_original_does_not_take_are_left_out():
    n = Network()
    n.op("MatMul", n.op("Reshape", "x", n.weight(np.array([-1, 40]))), n.normal(40, 4), name="y")
    original = n.artifact({"x": ["N", "L", 8]}, {"y": ["M", 4]})
    sizes = {
        one.sizes for one in check_explained(original, original.derive(original.data, "recover", {}, {}), rows((5, 8)))
    }
    assert sizes == {"x [16, 5, 8]"}
