# ruff: noqa: E501 - a model is easier to read in one line
import numpy as np
import pytest

from row_graphs import keeps_rows, objection, parsed

W = (
    "float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4] b = {1,2,3,4}, float s = {0.1}, float[4] s4 = {0.1,0.2,0.3,0.4}, "
    "uint8 z = {128}, int8[4,4] q = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, int8 o = {0}, int8[4] o4 = {0,0,0,0}, "
    "int64[1] one = {1}, int64[3] cube = {0,2,2}, int64[2] flat = {0,-1}"
)


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(x, w)",
        "y = Gemm<transB = 1>(x, w, b)",
        "t = Transpose(x) a = MatMul(w, t) y = Transpose(a)",
        "a = Reshape(x, cube) t = Transpose<perm = [0, 2, 1]>(a) m = MatMul(a, t) y = Reshape(m, flat)",
        "t = Transpose(x) y = Gemm<transA = 1, transB = 1>(t, w, b)",
        "y = com.microsoft.FusedMatMul<transB = 1>(x, w)",
        "u = QuantizeLinear(x, s, z) i = MatMulInteger(u, q, z, o4) y = Cast<to = 1>(i)",
        "u = QuantizeLinear(x, s, z) i = QLinearMatMul(u, s, z, q, s4, o4, s, z) y = DequantizeLinear(i, s, z)",
        "u = QuantizeLinear(x, s, z) i = com.microsoft.QGemm(u, s, z, q, s4, o4, , s, z) y = DequantizeLinear(i, s, z)",
        'y = Einsum<equation = "ij,jk->ik">(x, w)',
        'a = Reshape(x, cube) e = Einsum<equation = "nij,nkj->nik">(a, a) y = Reshape(e, flat)',
    ],
)
def test_products(body: str) -> None:
    keeps_rows(parsed(body, weights=W))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("t = Transpose(x) g = MatMul(t, x) y = MatMul(x, g)", "mixes the rows"),
        ("t = Transpose(x) g = MatMul(x, t) p = Softmax(g) y = MatMul(p, x)", "not have one row for each input row"),
        ('y = Einsum<equation = "ij,kj->ikj">(x, x)', "not have one row for each input row"),
        ('y = Einsum<equation = "ij,ik->jk">(x, x)', "mixes the rows"),
        ("r = ReduceSum(x) y = Gemm(x, w, r)", "mixes the rows"),
        ('c = Constant<value = float[2,4] {1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0}>() y = Gemm(x, w, c)', "combines rows"),
        ("y = com.microsoft.DynamicQuantizeMatMul(x, q, s4)", "(DynamicQuantizeMatMul) is an operator that is not known"),
    ],
)  # fmt: skip
def test_products_of_rows_with_rows(body: str, reason: str) -> None:
    assert reason in objection(parsed(body, outputs="y", weights=W))


IMAGE = "float[N,2,8,8] x"


@pytest.mark.parametrize(
    "body",
    [
        "a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(x, w) y = Reshape(a, k4)",
        'a = Conv<auto_pad = "SAME_UPPER", strides = [3, 3]>(x, w) y = Reshape(a, k3)',
        "a = ConvTranspose<strides = [2, 2]>(x, w) y = Reshape(a, k17)",
        "a = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) y = Reshape(a, k4)",
        "a = AveragePool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(x) y = Flatten(a)",
        "a = GlobalMaxPool(x) y = Reshape(a, k1)",
        "u = QuantizeLinear(x, s, z) a = QLinearConv(u, s, z, q, s, o, s, z) d = DequantizeLinear(a, s, z) y = Flatten(d)",
        "u = QuantizeLinear(x, s, z) a = ConvInteger(u, q, z) d = Cast<to = 1>(a) y = Flatten(d)",
        'a = com.microsoft.FusedConv<activation = "Relu">(x, w) y = Flatten(a)',
    ],
)
def test_windows_stay_in_their_image(body: str) -> None:
    values = ",".join(str(each % 7) for each in range(36))
    shapes = ", ".join(f"int64[2] k{side} = {{-1,{2 * side * side}}}" for side in (1, 3, 4, 17))
    weights = f"float[2,2,3,3] w = {{{values}}}, int8[2,2,3,3] q = {{{values}}}, float s = {{0.1}}, uint8 z = {{9}}, int8 o = {{0}}"
    keeps_rows(parsed(body, IMAGE, "float[N,M] y", f"{weights}, {shapes}"))


def test_an_index_counted_from_the_beginning_of_the_batch_is_not_used() -> None:
    body = "a, i = MaxPool<kernel_shape = [2, 2]>(x) y = Cast<to = 1>(i)"
    assert "'i', which is not known" in objection(parsed(body, IMAGE, "y"))


def cell(kind: str, gates: int, layout: int, extra: str = "", more: str = "") -> str:
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 3 * gates, 4), "r": (1, 3 * gates, 3)}
    weights = ", ".join(
        f"float[{','.join(map(str, shape))}] {name} = {{{','.join(f'{v:.3f}' for v in rng.standard_normal(shape).ravel())}}}"
        for name, shape in shapes.items()
    )
    given = "x" if layout else "t"
    return f"{weights}|t = Transpose<perm = [1, 0, 2]>(x) {more} a, h = {kind}<hidden_size = 3, layout = {layout}>({given}, w, r{extra})"


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_steps_of_a_sequence_follow_one_another(kind: str, gates: int) -> None:
    weights, body = cell(kind, gates, 0).split("|")
    keeps_rows(parsed(f"{body} y = Transpose<perm = [1, 0, 2]>(h)", "float[N,T,4] x", "float[N,D,3] y", weights))
    with_lengths = cell(kind, gates, 0, ", , n").split("|")[1]
    body = f"{with_lengths} s = Squeeze(a, one) y = Transpose<perm = [1, 0, 2]>(s)"
    keeps_rows(parsed(body, "float[N,4,4] x, int32[N] n", "float[N,T,3] y", f"{weights}, int64[1] one = {{1}}"))
    transposed = body.replace("t = Transpose<perm = [1, 0, 2]>(x)", "t = Identity(x)")
    reason = objection(parsed(transposed, "float[N,4,4] x, int32[N] n", "y", f"{weights}, int64[1] one = {{1}}"))
    assert f"({kind}) mixes the rows" in reason


def test_a_state_for_each_row_from_a_constant() -> None:
    weights, body = cell("GRU", 3, 0, ", , , start").split("|")
    weights += ", float[1,2,3] start = {1,2,3,4,5,6}"
    reason = objection(parsed(f"{body} y = Transpose<perm = [1, 0, 2]>(h)", "float[N,4,4] x", "y", weights))
    assert "(GRU) takes its input 'start' from a constant" in reason
