import pytest

from row_graphs import keeps_rows, objection, parsed

QUANTISED = "float s = {0.1}, uint8 z = {128}, float[4] s4 = {0.1,0.2,0.3,0.4}, uint8[4] z4 = {1,2,3,4}"


@pytest.mark.parametrize(
    "body",
    [
        "y = Relu(x)",
        "a = Mul(x, x) b = Sub(a, x) y = Clip(b)",
        "c = Constant<value_float = 0.5>() t = Greater(x, c) n = Neg(x) y = Where(t, x, n)",
        "c = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() y = PRelu(x, c)",
        "i = Cast<to = 7>(x) y = CastLike(i, x)",
        "y, mask = Dropout(x)",
        "a, b, c = DynamicQuantizeLinear(s4) d = DequantizeLinear(a, b, c) y = Add(x, d)",
        "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
        "q = QuantizeLinear<axis = 1>(x, s4, z4) y = DequantizeLinear<axis = 1>(q, s4, z4)",
        "q = QuantizeLinear(x, s, z) a = com.microsoft.QLinearAdd(q, s, z, q, s, z, s, z) y = DequantizeLinear(a, s, z)",
        "q = QuantizeLinear(x, s, z) a = com.microsoft.QLinearSigmoid(q, s, z, s, z) y = DequantizeLinear(a, s, z)",
        "y = com.microsoft.FastGelu(x, s4)",
        # Sizes that do not depend on the rows are numbers like others.
        "h = Shape<start = 1>(x) f = Cast<to = 1>(h) r = Sqrt(f) y = Div(x, r)",
    ],
)
def test_each_element_for_itself(body: str) -> None:
    keeps_rows(parsed(body, weights=QUANTISED))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a, b, c = DynamicQuantizeLinear(x) y = DequantizeLinear(a, b, c)", "computes its scale from all rows of a batch"),
        ("q = QuantizeLinear<axis = 0>(x, s4, z4) y = DequantizeLinear(q, s, z)", "mixes the rows"),
        ("n = Shape<end = 1>(x) f = Cast<to = 1>(n) y = Div(x, f)", "computes with the batch size"),
        ("t = Transpose(x) y = Add(x, t)", "combines rows with other rows"),
        ("c = Constant<value_floats = [1.0, 2.0]>() o = Constant<value_ints = [1]>() d = Unsqueeze(c, o) y = Add(x, d)", ""),
        ("r = Constant<value_float = 0.5>() t = Constant<value_int = 1>() b = Cast<to = 9>(t) y, m = Dropout(x, r, b)", "training"),
        ("y = RandomUniformLike(x)", "not known to keep rows apart"),
        ("r = RandomNormalLike(x) y = Add(x, r)", "'r' (RandomNormalLike) is an operator that is not known"),
    ],
)  # fmt: skip
def test_elements_that_meet_other_rows(body: str, reason: str) -> None:
    assert reason in (found := objection(parsed(body, weights=QUANTISED)))
    assert found
