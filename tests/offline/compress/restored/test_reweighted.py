import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network, mlp
from penstock.artifact import Artifact
from penstock.errors import WrongResult
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.pruning.n_m import prune_n_m
from penstock.offline.compress.restored.reweighted import unpruned, unshared
from penstock.offline.compress.sharing.share import ShareOptions, share

ORIGINAL = mlp(32)
PRUNED = prune(ORIGINAL, PruneOptions(GlobalRule(0.5)))
SHARED = share(ORIGINAL, ShareOptions(fc_bits=4, bias_bits=3))


def proto(artifact: Artifact) -> onnx.ModelProto:
    return onnx.load_model_from_string(artifact.data)


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}


def changed(artifact: Artifact, name: str, array: np.ndarray) -> onnx.ModelProto:
    model = proto(artifact)
    tensor = next(one for one in model.graph.initializer if one.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return model


def facts(artifact: Artifact) -> dict:
    return artifact.provenance[-1].facts["layers"]


@pytest.mark.parametrize("made", [PRUNED, SHARED, prune_n_m(ORIGINAL)], ids=["prune", "share", "n-m"])
def test_the_original_weights_are_put_back(made):
    step = made.provenance[-1].name
    found = (
        unshared(proto(made), ORIGINAL, facts(made))
        if step == "share"
        else unpruned(proto(made), ORIGINAL, facts(made), by_magnitude=step == "prune")
    )
    want = arrays(proto(ORIGINAL))
    assert {name: array.tobytes() for name, array in arrays(found).items()} == {
        name: array.tobytes() for name, array in want.items()
    }


def test_only_pruned_weights_are_put_back():
    wrong = changed(PRUNED, "w1", np.zeros(32, np.float32))  # a bias
    assert not arrays(unpruned(wrong, ORIGINAL, facts(PRUNED)))["w1"].any()


def test_one_changed_element_of_a_pruned_weight_is_found():
    array = arrays(proto(PRUNED))["w0"]
    kept, zeros = np.argwhere(array), np.argwhere(array == 0)
    for change in (0.0, -array[tuple(kept[0])], array[tuple(kept[0])] * 1.001):
        wrong = array.copy()
        wrong[tuple(kept[0])] = change
        with pytest.raises(WrongResult, match="is not the original's with some elements set to zero"):
            unpruned(changed(PRUNED, "w0", wrong), ORIGINAL, facts(PRUNED))
    # As many zeros, but in other places.
    old = arrays(proto(ORIGINAL))["w0"]
    wrong = array.copy()
    wrong[tuple(kept[0])], wrong[tuple(zeros[0])] = 0, old[tuple(zeros[0])]
    with pytest.raises(WrongResult, match="removed large elements"):
        unpruned(changed(PRUNED, "w0", wrong), ORIGINAL, facts(PRUNED))
    unpruned(changed(PRUNED, "w0", wrong), ORIGINAL, facts(PRUNED), by_magnitude=False)


@pytest.mark.parametrize("name", ["w0", "w1"])
def test_an_element_that_has_not_the_nearest_value_is_found(name):
    array = arrays(proto(SHARED))[name]
    values = np.unique(array)
    rng = np.random.default_rng(0)
    for _ in range(5):
        wrong = array.copy()
        place = rng.integers(array.size)
        at = np.searchsorted(values, array.reshape(-1)[place])
        wrong.reshape(-1)[place] = values[at - 1 if at else 1]
        with pytest.raises(WrongResult, match="do not have the nearest shared value"):
            unshared(changed(SHARED, name, wrong), ORIGINAL, facts(SHARED))


def test_values_that_are_worse_than_stated_are_found():
    for wrong in (np.zeros(32, np.float32), np.full(32, 0.5, np.float32)):
        with pytest.raises(WrongResult):
            unshared(changed(SHARED, "w1", wrong), ORIGINAL, facts(SHARED))


def test_zeros_stay_zeros():
    made = share(PRUNED, ShareOptions(fc_bits=4))
    unshared(proto(made), PRUNED, facts(made))
    array = arrays(proto(made))["w0"]
    array[tuple(np.argwhere(array == 0)[0])] = np.unique(array[array > 0])[0]
    with pytest.raises(WrongResult):
        unshared(changed(made, "w0", array), PRUNED, facts(made))


def single(array: np.ndarray) -> Artifact:
    """A model with ``array`` as its only weight, w0."""
    n = Network()
    n.op("MatMul", "x", n.weight(array), name="y")
    return n.artifact({"x": ["N", len(array)]}, {"y": ["N", array.shape[1]]})


@pytest.mark.parametrize("kept", [0, 3, 6])
def test_elements_of_one_magnitude_may_be_removed_in_any_number(kept):
    array = np.float32([[2, -2], [2, 2], [-2, 2]])
    after = np.where(np.arange(6).reshape(3, 2) < kept, array, 0).astype(np.float32)
    found = unpruned(proto(single(after)), single(array), {"w0": {"nonzero": kept}})
    assert (arrays(found)["w0"] == array).all()


def test_a_weight_of_another_type_or_shape_is_not_put_back():
    made = single(np.zeros((2, 4), np.float32))
    assert arrays(unpruned(proto(made), single(np.ones((4, 2), np.float32)), {"w0": {"nonzero": 0}}))["w0"].shape == (
        2,
        4,
    )


NUMBERS = st.integers(-50, 50).filter(bool)


@given(st.lists(NUMBERS, min_size=4, max_size=10), st.sets(NUMBERS, min_size=1, max_size=5), st.data())
@pytest.mark.parametrize("size", [1.0, 2.0**-30, 2.0**30])
def test_exactly_the_nearest_values_are_accepted(size, numbers, values, data):
    old = np.array([numbers, numbers[::-1]])
    choice = np.array(sorted(values))
    nearest = choice[np.abs(old[..., None] - choice).argmin(-1)]
    used = np.unique(nearest)
    other = nearest.copy()
    other[0, 0] = data.draw(st.sampled_from(used.tolist()))
    for new in (nearest, other):
        left = np.unique(new)  # a value that no element has is unknown
        is_right = (np.abs(new - old) == np.abs(old[..., None] - left).min(-1)).all()
        original, made = (single((size * one).astype(np.float32)) for one in (old, new))
        facts = {"w0": {"relative_error": 100.0}}
        if is_right:
            assert (arrays(unshared(proto(made), original, facts))["w0"] == size * old).all()
        else:
            with pytest.raises(WrongResult, match="do not have the nearest shared value"):
                unshared(proto(made), original, facts)


@pytest.mark.parametrize(("stated", "fits"), [(1.0, True), (0.9, False)])
def test_the_error_is_at_most_the_stated_one(stated, fits):
    old = np.float32([[1, 2, 3], [4, 5, 6]])
    new = np.where(old < 4, 2, 5).astype(np.float32)
    facts = {"w0": {"relative_error": stated * float(np.linalg.norm(new - old) / np.linalg.norm(old))}}
    if fits:
        unshared(proto(single(new)), single(old), facts)
    else:
        with pytest.raises(WrongResult):
            unshared(proto(single(new)), single(old), facts)


def test_zeros_stay_zeros_within_any_error():
    zeros, old = np.zeros((2, 3), np.float32), np.float32([[0, 2, 3], [4, 5, 6]])
    unshared(proto(single(zeros)), single(zeros), {"w0": {"relative_error": 0.0}})
    new = np.float32([[2, 2, 2], [5, 5, 5]])
    with pytest.raises(WrongResult):
        unshared(proto(single(new)), single(old), {"w0": {"relative_error": 1.0}})


@pytest.mark.parametrize(("stated", "fits"), [(1.0, True), (0.9, False)])
def test_the_error_of_integers_is_relative_to_their_distance_from_zero(stated, fits):
    def model(array: np.ndarray) -> Artifact:
        n = Network()
        weight = n.op("DequantizeLinear", n.weight(array), n.weight(np.float32(1)), n.weight(np.int8(100)))
        n.op("MatMul", "x", weight, name="y")
        return n.artifact({"x": ["N", 2]}, {"y": ["N", 3]})

    old, new = np.int8([[101, 102, 103], [104, 105, 106]]), np.int8([[102, 102, 102], [105, 105, 105]])
    error = float(np.linalg.norm(1.0 * new - old) / np.linalg.norm(1.0 * old - 100))
    facts = {"w0": {"relative_error": stated * error}}
    if fits:
        assert (arrays(unshared(proto(model(new)), model(old), facts))["w0"] == old).all()
    else:
        with pytest.raises(WrongResult):
            unshared(proto(model(new)), model(old), facts)
