import pytest

from row_graphs import keeps_rows, objection, parsed

W = (
    "int64[2] flat = {0,-1}, int64[2] pairs = {-1,2}, int64[3] split = {0,2,2}, int64[1] two = {2}, int64[1] zero = {0}, "
    "int64[1] rest = {-1}, int64[2] once = {1,2}, int64[2] twice = {2,1}, int64[1] axis = {1}, int64[3] thrice = {1,3,1}, "
    "int64[2] parts = {1,2}, float number = {2}, float[1,1] cell = {2}, float[2,2] square = {1,2,3,4}"
)
SIZE = "h = Shape(x) n = Gather(h, zero) "


@pytest.mark.parametrize(
    "body",
    [
        "a = Reshape(x, split) b = Relu(a) y = Reshape(b, flat)",
        "a = Reshape(x, pairs) b = Softmax(a) c = Constant<value_ints = [-1, 4]>() y = Reshape(b, c)",
        SIZE + "s = Concat<axis = 0>(n, rest) y = Reshape(x, s)",
        SIZE
        + "m = Mul(n, two) s = Concat<axis = 0>(m, two) a = Reshape(x, s) t = Concat<axis = 0>(n, rest) y = Reshape(a, t)",
        SIZE + "s = Concat<axis = 0>(rest, two) a = Reshape(x, s) f = Shape(x) y = Reshape(a, f)",
        "a = Flatten(x) y = Flatten<axis = -1>(a)",
        "t = Transpose(x) a = Reshape(t, split) y = Transpose<perm = [1, 0]>(t)",
        "a = Unsqueeze(x, axis) b = Tile(a, thrice) c, d = Split<axis = 1>(b, parts) y = Squeeze(c, axis)",
        "a = Tile(x, once) b, c = Split<axis = 1>(a) y = Add(b, c)",
        "h = Shape(x) z = ConstantOfShape(h) y = Add(x, z)",
        SIZE + "s = Concat<axis = 0>(n, axis) z = Expand(number, s) y = Add(x, z)",
        SIZE + "s = Concat<axis = 0>(n, axis) z = Tile(cell, s) y = Add(x, z)",
        "a = Concat<axis = 1>(x, x) s, t = Split<axis = 1>(a) y = Sub(s, t)",
        # As torch writes ``expand``: sizes of -1 are replaced by the tensor's own.
        SIZE + "w = Concat<axis = 0>(n, rest) e = Shape(w) o = ConstantOfShape<value = int64[1] {1}>(e) "
        "g = Mul(o, rest) q = Equal(w, g) s = Where(q, o, w) v = Expand(x, s) y = Identity(v)",
        # As torch writes ``x.view(n, -1, 2)`` with sizes that are computed.
        SIZE
        + "f = Gather(h, axis) d = Div(f, two) s = Concat<axis = 0>(n, d, two) a = Reshape(x, s) y = Reshape(a, h)",
        # As torch writes multi-head attention: time goes before the batch, and both become one axis.
        (
            "a = Reshape(x, split) t = Transpose<perm = [1, 0, 2]>(a) f = Reshape(t, pairs) m = MatMul(f, square) h = Shape(t) "
            "b = Reshape(m, h) u = Transpose<perm = [1, 0, 2]>(b) y = Reshape(u, flat)"
        ),
    ],
)
def test_rows_stay_whole(body: str) -> None:
    keeps_rows(parsed(body, weights=W))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a = Constant<value_ints = [-1, 3]>() b = Reshape(x, a) y = Identity(b)", "not proven to keep rows whole"),
        ("h = Shape(x) t = Transpose(x) y = Reshape(t, h)", "not proven to keep rows whole"),
        ("t = Transpose(x) y = Reshape(t, rest)", "does not have one row for each row"),
        ("t = Transpose(x) y = Flatten<axis = 0>(t)", "does not have one row for each row"),
        ("y = Tile(x, twice)", "repeats the rows"),
        ("y = Concat<axis = 0>(x, x)", "mixes the rows"),
        ("y = Squeeze(x)", "removes axes that depend on the request"),
        ("y = Squeeze(x, zero)", "mixes the rows"),
        ("y = Transpose(x)", "output 'y' does not have one row for each row"),
        ("h = Shape(x) f = Cast<to = 1>(h) s = ReduceMax<keepdims = 0>(f) y = Mul(x, s)", "computes with the batch size"),
        (SIZE + "e = Concat<axis = 0>(n, n) z = ConstantOfShape(e) y = MatMul(z, x)", "batch size"),
        (SIZE + "d = Add(n, axis) s = Concat<axis = 0>(d, rest) z = ConstantOfShape(d) y = Identity(z)", "batch size"),
        # A computed size of -1 asks for what is left.
        (SIZE + "m = Sub(zero, axis) q = Mul(n, m) s = Concat<axis = 0>(q, two) y = Reshape(x, s)", "batch size"),
    ],
)  # fmt: skip
def test_rows_that_are_torn_joined_or_repeated(body: str, reason: str) -> None:
    assert reason in (found := objection(parsed(body, outputs="y", weights=W)))
    assert found
