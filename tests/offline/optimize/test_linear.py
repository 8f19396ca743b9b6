import numpy as np
import onnx_ir as ir
import pytest

from penstock.offline.optimize.linear import form_of, linear_form, read_linear


def node(op_type, *arrays, **attributes):
    inputs = [ir.val("x", ir.DataType.FLOAT)]
    for index, array in enumerate(arrays):
        inputs.append(ir.val(f"w{index}", const_value=ir.tensor(array)))
    made = ir.node(op_type, inputs, attributes)
    ir.Graph(inputs[:1], made.outputs, nodes=[made], initializers=inputs[1:])
    return made


@pytest.mark.parametrize(
    ("op_type", "shape", "attributes", "channels"),
    [
        ("Conv", (6, 2, 3, 3), {"group": 2}, 6),
        ("ConvTranspose", (4, 3, 2, 2), {"group": 2}, 6),
        ("Gemm", (3, 5), {}, 5),
        ("Gemm", (5, 3), {"transB": 1}, 5),
    ],
)
def test_channels_of_each_operator(op_type, shape, attributes, channels):
    assert read_linear(node(op_type, np.ones(shape, np.float32), **attributes)).channels == channels


def test_beta_is_in_the_bias():
    made = node("Gemm", np.ones((3, 2), np.float32), np.array([[1, 2]], np.float32), beta=0.5)
    np.testing.assert_array_equal(read_linear(made).bias, [0.5, 1.0])


def test_other_operators_and_types_are_not_linear():
    assert read_linear(None) is None
    assert read_linear(node("MatMul", np.ones((3, 2), np.float32))) is None
    assert read_linear(node("Gemm", np.ones((3, 2), np.int32))) is None


def test_weights_that_leave_the_range_are_not_folded():
    made = node("Gemm", np.full((3, 2), 6e4, np.float16))
    follower = ir.node("Mul", [made.outputs[0], ir.val("k")])
    made.graph.append(follower)
    assert not read_linear(made).fold(follower, np.full(2, 10.0), np.zeros(2))
    assert [each.op_type for each in made.graph] == ["Gemm", "Mul"]


@pytest.mark.parametrize(
    ("op_type", "attributes", "axes", "is_plain"),
    [
        ("Conv", {}, (1, 0), True),
        ("Conv", {"group": 2}, (1, 0), False),
        ("ConvTranspose", {}, (0, 1), True),
        ("MatMul", {}, (0, 1), True),
        ("Gemm", {}, (0, 1), True),
        ("Gemm", {"transB": 1}, (1, 0), True),
        ("Gemm", {"transA": 1}, (0, 1), False),
        ("Gemm", {"alpha": 0.5}, (0, 1), False),
        ("Gemm", {"beta": 2.0}, (0, 1), False),
    ],
)
def test_the_form_says_which_axes_a_layer_sums_over_and_writes(
    op_type: str, attributes: dict[str, float], axes: tuple[int, int], is_plain: bool
) -> None:
    form = form_of(node(op_type, np.ones((2, 2), np.float32), **attributes))
    assert form is not None
    assert (form.inputs, form.outputs) == axes
    assert form.is_plain == is_plain
    assert linear_form(op_type, attributes.get) == form


def test_other_operators_have_no_linear_form() -> None:
    assert linear_form("Add", {}.get) is None
