import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import mlp
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
