import numpy as np
import pytest

from penstock.offline.optimize.samples import free_sizes, generate, generate_sizes
from penstock.tensor import DataType, Signature, TensorSpec


def signature(*specs):
    return Signature(tuple(TensorSpec(f"x{i}", *spec) for i, spec in enumerate(specs)), ())


def test_batch_one_and_three_and_awkward_values():
    samples = list(generate(signature((DataType.FP32, (-1, 4))), free_size=8))
    assert [(sample.label, sample["x0"].shape) for sample in samples] == [
        ("normal values of x0 [1, 4]", (1, 4)),
        ("normal values of x0 [3, 4]", (3, 4)),
        ("zeros values of x0 [1, 4]", (1, 4)),
        ("large values of x0 [1, 4]", (1, 4)),
        ("negative values of x0 [1, 4]", (1, 4)),
    ]
    _, _, zeros, large, negative = (sample["x0"] for sample in samples)
    assert not zeros.any()
    assert np.abs(large).max() > 10
    assert (negative < 0).all()


@pytest.mark.parametrize("datatype", list(DataType))
def test_every_datatype_fits_its_spec(datatype):
    specs = signature((datatype, (-1, -1, 3)), (datatype, (2,)))
    for sample in generate(specs, free_size=8):
        specs.check(dict(sample))
        assert sample["x0"].shape[1:] == (8, 3)


def test_integers_stay_in_range_as_indices():
    samples = {sample.label: sample["x0"] for sample in generate(signature((DataType.INT64, (-1, 64))), 8)}
    assert set(samples["normal values of x0 [3, 64]"].reshape(-1)) == {0, 1}
    assert samples["large values of x0 [1, 64]"].max() > 1


def test_the_same_every_time():
    specs = signature((DataType.FP32, (-1, 4)), (DataType.INT32, (3,)))
    for one, other in zip(generate(specs, 8), generate(specs, 8), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_a_fixed_batch_is_not_repeated():
    assert len(list(generate(signature((DataType.FP32, (2, 4))), 8))) == 4


def test_free_sizes_are_tried_only_where_there_are_some():
    assert len(free_sizes(signature((DataType.FP32, (-1, 4))))) == 1
    assert len(free_sizes(signature((DataType.FP32, (-1, 3, -1, -1))))) > 1


def test_sizes_that_take_much_memory_are_not_tried():
    assert free_sizes(signature((DataType.FP32, (-1, 3, -1, -1)))) == (8, 32, 64, 224)
    assert free_sizes(signature((DataType.FP32, (-1, -1, -1, -1)))) == (8, 32, 64)


def test_every_free_dimension_has_many_sizes_also_0_and_1_and_others_than_the_rest():
    specs = signature((DataType.FP32, (-1, -1, 4)), (DataType.INT64, (-1, -1)))
    names = {"x0": ["N", "L", ""], "x1": ["N", "M"]}
    samples = [{name: array.shape for name, array in one.items()} for one in generate_sizes(specs, 8, names)]
    assert {0, 2} <= {shapes["x0"][0] for shapes in samples}
    for name in specs.input_names:
        assert {0, 1, 5, 16, 17} <= {shapes[name][1] for shapes in samples}
    assert all(shapes["x0"][0] == shapes["x1"][0] for shapes in samples)
    assert any(len({shapes["x0"][0], shapes["x0"][1], shapes["x1"][1]}) == 3 for shapes in samples)
    assert all(one.is_odd for one in generate_sizes(specs, 8, names))
    tried = [{name: array.shape for name, array in one.items()} for one in generate(specs, 8)]
    assert not any(shapes in tried for shapes in samples)


def test_a_fixed_shape_has_no_other_sizes():
    assert list(generate_sizes(signature((DataType.FP32, (2, 4))), 8)) == []
