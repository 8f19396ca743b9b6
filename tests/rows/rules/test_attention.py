import pytest

from row_graphs import keeps_rows, objection, parsed

QUERY = "float[N,3,8] x"


def words(rows: int, width: int) -> str:
    return ",".join(f"{each % 5 / 10}" for each in range(rows * width))


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("y = Attention<q_num_heads = 2, kv_num_heads = 2>(x, x, x)", QUERY),
        ("y = Attention<q_num_heads = 2, kv_num_heads = 2, is_causal = 1>(x, x, x, square)", QUERY),
        ("y = Attention<q_num_heads = 2, kv_num_heads = 2>(x, x, x, m)", f"{QUERY}, float[N,1,3,3] m"),
        ("y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x)", QUERY),
        ("y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x, , m)", f"{QUERY}, int32[N,3] m"),
        ("y = com.microsoft.Attention<num_heads = 2>(x, w, b)", QUERY),
        ("y = com.microsoft.Attention<num_heads = 2>(x, w, b, m)", f"{QUERY}, int32[N,3] m"),
        ("y, n = com.microsoft.EmbedLayerNormalization(i, i, table, table, table, g, g)", "int32[N,3] i"),
    ],
)
def test_each_row_attends_to_itself(body: str, inputs: str) -> None:
    weights = (
        f"float[8,24] w = {{{words(8, 24)}}}, float[24] b = {{{words(1, 24)}}}, float[3,3] square = {{{words(3, 3)}}}, "
        f"float[4,8] table = {{{words(4, 8)}}}, float[8] g = {{{words(1, 8)}}}"
    )
    keeps_rows(parsed(body, inputs, "float[N,3,8] y", weights, opset=23))


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        # The first axis of a transposed query is time, so the batch is what it attends over.
        ("t = Transpose<perm = [1, 0, 2]>(x) y = Attention<q_num_heads = 2, kv_num_heads = 2>(t, t, t)", QUERY),
        ("y = Attention<q_num_heads = 2, kv_num_heads = 2>(x, x, x, c)", QUERY),
        # With one axis it is lengths for all rows, or ends and then starts: 2N or 3N + 2 numbers.
        ("y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x, , m)", f"{QUERY}, int32[N] m"),
    ],
)
def test_rows_that_attend_to_others_or_may(body: str, inputs: str) -> None:
    weights = f"float[2,1,3,3] c = {{{words(2, 9)}}}"
    assert "Attention)" in objection(parsed(body, inputs, "y", weights, opset=23))
