# ruff: noqa: E501 - a model is easier to read in one line
import pytest

from row_graphs import keeps_rows, objection, parsed

W = "float[4] w = {1,2,3,4}, int64[1] one = {1}, int64[1] zero = {0}, int64[1] two = {2}, float[2] s2 = {1,2}, int64[3] cube = {0,2,2}, int64[2] flat = {0,-1}, int64[4] image = {0,1,2,2}"


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (17, "m = ReduceMean<axes = [1]>(x) y = Sub(x, m)"),
        (18, "m = ReduceMax(x, one) y = Sub(x, m)"),
        (18, "y = ReduceMax<noop_with_empty_axes = 1>(x)"),
        (17, "s = Softmax(x) y = LogSoftmax<axis = 1>(s)"),
        (11, "y = Softmax(x)"),
        (17, "a = ArgMax<axis = -1>(x) f = Cast<to = 1>(a) y = Add(x, f)"),
        (17, "v, i = TopK(x, two) f = Cast<to = 1>(i) y = Add(v, f)"),
        (17, "y = LayerNormalization(x, w, w)"),
        (17, "y = com.microsoft.SkipLayerNormalization(x, x, w)"),
        (17, "y = BatchNormalization(x, w, w, w, w)"),
        (17, "y = CumSum(x, one)"),
        (17, "y = LpNormalization<axis = 1>(x)"),
        (17, "a = Reshape(x, image) n = LRN<size = 3>(a) y = Reshape(n, flat)"),
        (17, "a = Reshape(x, cube) n = InstanceNormalization(a, s2, s2) y = Reshape(n, flat)"),
        (17, "a = Reshape(x, image) n = MeanVarianceNormalization<axes = [2, 3]>(a) y = Reshape(n, flat)"),
        (17, "a = Reshape(x, image) f = Constant<value_floats = [1.0, 1.0, 2.0, 1.5]>() r = Resize(a, , f) y = Flatten(r)"),
        (17, ("a = Reshape(x, image) h = Shape(a) p = Slice(h, zero, two) t = Constant<value_ints = [5, 6]>() "
         "z = Concat<axis = 0>(p, t) r = Resize(a, , , z) y = Flatten(r)")),
    ],
)  # fmt: skip
def test_axes_beside_the_rows(opset: int, body: str) -> None:
    keeps_rows(parsed(body, outputs="float[N,M] y", weights=W, opset=opset))


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (17, "m = ReduceMean<axes = [0]>(x) y = Sub(x, m)"),
        (18, "m = ReduceMax(x, zero) y = Sub(x, m)"),
        (17, "m = ReduceMax(x) y = Sub(x, m)"),
        (17, "y = Softmax<axis = 0>(x)"),
        # Before version 13 Softmax goes over all axes from the given one on.
        (11, "y = Softmax<axis = 0>(x)"),
        (11, "t = Transpose(x) s = Softmax<axis = 0>(t) y = Transpose(s)"),
        (17, "a = ArgMax<axis = 0>(x) f = Cast<to = 1>(a) y = Add(x, f)"),
        (17, "v, i = TopK<axis = 0>(x, one) y = Sub(x, v)"),
        (17, "y = LayerNormalization<axis = 0>(x, w)"),
        (17, "y = CumSum(x, zero)"),
        (17, "y = LpNormalization<axis = 0>(x)"),
        (17, "a = Reshape(x, image) n = MeanVarianceNormalization(a) y = Reshape(n, flat)"),
        (17, "t = Transpose(x) n = InstanceNormalization(t, w, w) y = Transpose(n)"),
    ],
)
def test_the_axis_of_the_rows(opset: int, body: str) -> None:
    assert objection(parsed(body, outputs="y", weights=W, opset=opset)).endswith(("mixes the rows of a batch", "batch"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y, m, v = BatchNormalization<training_mode = 1>(x, w, w, w, w)", "is in training mode"),
        ("a = Reshape(x, image) f = Constant<value_floats = [2.0, 1.0, 1.0, 1.0]>() y = Resize(a, , f)", "resizes the batch axis"),
        # NaN and infinities of one row reach the next by the weight 0.
        ("f = Constant<value_floats = [1.0, 2.0]>() y = Resize<mode = \"linear\">(x, , f)", "interpolates along the batch axis"),
        ("a = Reshape(x, cube) f = Constant<value_floats = [1.0, 1.0, 2.0]>() y = Resize<mode = \"linear\">(a, , f)", "interpolates along the batch axis"),
    ],
)  # fmt: skip
def test_statistics_and_sizes_of_the_batch(body: str, reason: str) -> None:
    assert reason in objection(parsed(body, outputs="y", weights=W))


def test_sequences_are_reversed_by_their_own_length() -> None:
    body = "y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, n)"
    keeps_rows(parsed(body, "float[N,4] x, int64[N] n"))
    turned = "t = Transpose(x) y = ReverseSequence<batch_axis = 0, time_axis = 1>(t, n)"
    assert objection(parsed(turned, "float[N,4] x, int64[N] n", "y"))
