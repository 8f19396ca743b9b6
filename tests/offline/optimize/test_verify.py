import ml_dtypes
import numpy as np
import onnx
import pytest

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.optimize.verify import Verifier, compare

TEXT = """agraph (float[N, 3] x) => (float[N, 3] y) {
    a = MatMul(x, w)
    b = Relu(a)
    y = Add(b, k)
}"""


@pytest.fixture
def original(parse, weights):
    return parse(TEXT, w=weights(3, 3), k=weights(3))


def changed(artifact, edit):
    proto = onnx.load_model_from_string(artifact.data)
    edit(proto)
    return proto.SerializeToString()


def test_the_same_model_agrees_exactly(original):
    verdict = Verifier(original).check(original)
    assert verdict.failure == ""
    assert verdict.max_relative_error == 0.0


def test_rounding_is_measured_and_accepted(original):
    def nudge(proto):
        array = onnx.numpy_helper.to_array(proto.graph.initializer[0]) * np.float32(1 + 1e-6)
        proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "w"))

    verdict = Verifier(original).check(Artifact.from_bytes(changed(original, nudge)))
    assert verdict.failure == ""
    assert 1e-8 < verdict.max_relative_error < 1e-5


def normalised(parse, scale: float):
    """Convolutions with a following normalisation, which ONNX Runtime folds; ``scale`` multiplies the last result."""
    rng = np.random.default_rng(3)
    weights = {f"w{n}": rng.standard_normal((4, 4, 3, 3)).astype(np.float32) for n in range(4)}
    weights |= {f"s{n}": rng.uniform(0.1, 3, 4).astype(np.float32) for n in range(4)}
    weights |= {"m": rng.standard_normal(4).astype(np.float32), "v": rng.uniform(0.1, 2, 4).astype(np.float32)}
    lines = [
        f"c{n} = Conv<pads=[1, 1, 1, 1]>(a{n}, w{n}) b{n} = BatchNormalization(c{n}, s{n}, m, m, v) a{n + 1} = Relu(b{n})"
        for n in range(4)
    ]
    body = "\n".join(["a0 = Identity(x)", *lines, "y = Mul(a4, k)"])
    return parse(
        f"agraph (float[N, 4, 8, 8] x) => (float[N, 4, 8, 8] y) {{ {body} }}", k=np.float32([scale]), **weights
    )


@pytest.mark.parametrize(("change", "accepted"), [(5e-7, True), (1e-5, False)])
def test_rounding_that_the_model_amplifies_is_accepted_up_to_a_bound(parse, change, accepted):
    original, other = normalised(parse, 1.0), normalised(parse, 1.0 + change)
    assert Verifier(original, tolerance=1e-4).check(other).failure == ""
    verdict = Verifier(original, tolerance=2e-7).check(other)
    assert verdict.max_relative_error > 2e-7
    assert (verdict.failure == "") == accepted


def test_a_model_without_rounding_has_no_more_than_the_tolerance(parse):
    text = "agraph (float[N, 3] x) => (float[N, 3] y) { y = Mul(x, k) }"
    exact, off = (parse(text, k=np.float32([value])) for value in (2.0, 2.0 + 1e-6))
    assert Verifier(exact, tolerance=1e-6).check(off).failure == ""
    assert Verifier(exact, tolerance=2e-7).check(off).failure


def test_names_output_error_sample_and_first_divergent_tensor(original):
    def replace(proto):
        proto.graph.node[1].op_type = "Elu"

    verdict = Verifier(original).check(Artifact.from_bytes(changed(original, replace)))
    assert verdict.failure.startswith("output 'y': relative error ")
    assert "on normal values of x [1, 3]" in verdict.failure
    assert verdict.failure.endswith("first divergent tensor: 'b' (Elu)")
    assert verdict.max_relative_error > 1e-4


def test_a_model_that_does_not_run_fails(original):
    def rename(proto):
        proto.graph.input[0].name = "z"
        proto.graph.node[0].input[0] = "z"

    assert "does not run" in Verifier(original).check(Artifact.from_bytes(changed(original, rename))).failure
    assert "does not run" in Verifier(original).check(Artifact.from_bytes(b"rubbish")).failure


def test_a_difference_at_batch_three_only_is_found(original):
    def freeze_batch(proto):
        proto.graph.node[2].input[0] = "frozen"
        proto.graph.node.insert(2, onnx.helper.make_node("Reshape", ["b", "one"], ["frozen"]))
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 3]), "one"))

    assert "does not run" in Verifier(original).check(Artifact.from_bytes(changed(original, freeze_batch))).failure


def test_the_callers_samples_count(parse):
    text = "agraph (float[N, 3] x) => (float[N, 3] y) { y = Clip(x, low, high) }"
    wide, narrow = (
        parse(text, low=np.array(-high, np.float32), high=np.array(high, np.float32)) for high in (1e6, 1e4)
    )
    assert Verifier(wide).check(narrow).failure == ""
    sample = {"x": np.full((1, 3), 1e5, np.float32)}
    assert "on sample 0" in Verifier(wide, [sample]).check(narrow).failure


def test_a_sample_that_does_not_fit_is_refused(original):
    with pytest.raises(InvalidArgument, match="data-type"):
        Verifier(original, [{"x": np.zeros((1, 3))}])


def test_a_model_that_fails_on_generated_inputs_is_checked_on_the_callers(parse):
    # Only 5 columns reshape to this, and the size is not in the signature.
    text = "agraph (float[A, B] x) => (float[C, D] y) { r = Reshape(x, s)\n y = Mul(r, k) }"
    artifact = parse(text, s=np.array([7, 5]), k=np.array(2, np.float32))
    other = parse(text, s=np.array([7, 5]), k=np.array(3, np.float32))
    sample = {"x": np.ones((5, 7), np.float32)}
    assert Verifier(artifact, [sample]).check(artifact).failure == ""
    assert "relative error 0.5" in Verifier(artifact, [sample]).check(other).failure
    verdict = Verifier(artifact).check(artifact)
    assert verdict.failure.startswith("unverifiable: the original model fails on every input")
    assert verdict.max_relative_error is None


def test_larger_free_sizes_are_tried_where_small_ones_fail(parse, weights):
    text = "agraph (float[N, 1, H, W] x) => (float[N, 1, A, B] y) { y = Conv(x, w) }"
    assert Verifier(parse(text, w=weights(1, 1, 20, 20))).obstacle == ""


def test_an_operator_that_the_engine_lacks_is_an_obstacle(parse):
    artifact = parse("agraph (float[N, 3] x) => (float[N, 3] y) { y = custom.Unknown(x) }")
    assert "unverifiable" in Verifier(artifact).check(artifact).failure


def test_verifies_indices_in_range(parse, weights):
    text = "agraph (int64[N, S] ids) => (float[N, S, 4] y) { y = Gather(table, ids) }"
    assert Verifier(parse(text, table=weights(2, 4))).obstacle == ""


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float32, 1e-4), (np.float16, 1e-2), (ml_dtypes.bfloat16, 5e-2), (np.float64, 1e-6)]
)
def test_tolerance_follows_the_narrowest_type(parse, dtype, tolerance):
    name = {"float32": "float"}.get(np.dtype(dtype).name, np.dtype(dtype).name.replace("float64", "double"))
    text = f"agraph ({name}[N, 3] x) => ({name}[N, 3] y) {{ y = Identity(x) }}"
    assert Verifier(parse(text)).tolerance == tolerance


FLOATS = np.array([1.0, -4.0, 2.0], np.float32)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (None, "is missing"),
        (FLOATS.astype(np.float64), "is float64, was float32"),
        (FLOATS.reshape(3, 1), "has shape [3, 1], had [3]"),
        (np.array([np.nan, -4, 2], np.float32), "NaN or infinite"),
        (np.array([np.inf, -4, 2], np.float32), "NaN or infinite"),
    ],
)
def test_compare_finds_differences_of_kind(new, reason):
    error, found = compare(FLOATS, new)
    assert error == np.inf
    assert reason in found


def test_compare_measures_against_the_largest_magnitude():
    error, _ = compare(FLOATS, FLOATS + np.array([0.4, 0, 0], np.float32))
    assert error == pytest.approx(0.1)


def test_compare_takes_nan_and_infinity_in_the_same_places_as_equal():
    awkward = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert compare(awkward, awkward.copy()) == (0.0, "")
    assert compare(awkward, -awkward)[0] == np.inf


def test_compare_wants_integers_booleans_and_text_equal():
    assert compare(np.array([1, 2]), np.array([1, 3])) == (np.inf, "1 of 2 values differ")
    assert compare(np.array([True]), np.array([True])) == (0.0, "")
    assert compare(np.array(["a"], object), np.array(["b"], object))[0] == np.inf


def test_compare_forgives_rounding_of_what_is_zero():
    zeros, nearly = np.zeros(3, np.float32), np.full(3, 1e-9, np.float32)
    assert compare(zeros, nearly)[0] == np.inf
    assert compare(zeros, nearly, magnitude=1.0)[0] < 1e-5


def test_compare_of_nothing():
    assert compare(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)) == (0.0, "")


MUL = "agraph (float[N, 3] x) => (float[N, 3] y) { y = Mul(x, k) }"


def factors(parse, *numbers, text=MUL):
    return [parse(text, k=np.array(number, np.float32)) for number in numbers]


@pytest.mark.parametrize("given", [None, 1e-2])
def test_an_error_up_to_the_tolerance_and_no_further_is_accepted(parse, given):
    limit = given or 1e-4
    original, near, far = factors(parse, 1, 1 + 0.95 * limit, 1 + 1.05 * limit)
    verifier = Verifier(original, tolerance=given)
    accepted = verifier.check(near)
    assert accepted.failure == ""
    assert accepted.max_relative_error == pytest.approx(0.95 * limit, rel=0.01)
    assert "relative error" in verifier.check(far).failure


def test_the_error_of_small_values_is_relative_to_a_thousandth_of_the_largest_on_any_sample(parse):
    text = "agraph (float[N, 3] x) => (float[N, 3] y) { y = Add(x, k) }"
    original, near, far = factors(parse, 0, 0.95e-3, 1.05e-3, text=text)
    verifier = Verifier(original, [{"x": np.full((1, 3), -1e4, np.float32)}])
    assert verifier.check(near).failure == ""
    assert "on normal values" in verifier.check(far).failure


def test_the_largest_error_of_all_samples_and_outputs_is_reported(parse):
    text = """agraph (float[N, 3] x) => (float[N, 3] a, float[N, 3] b, float[N, 3] c) {
        a = Mul(x, j)\n b = Mul(x, k)\n c = Mul(x, j)
    }"""
    original, changed = (parse(text, j=np.float32(1), k=np.float32(k)) for k in (1, 1 + 5e-5))
    assert Verifier(original).check(changed).max_relative_error == pytest.approx(5e-5, rel=0.01)


def test_an_output_that_is_missing_is_found(parse, weights):
    text = "agraph (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { y = Relu(x)\n z = Neg(x) }"

    def drop(proto):
        del proto.graph.output[1:]

    assert (
        "output 'z': is missing" in Verifier(parse(text)).check(Artifact.from_bytes(changed(parse(text), drop))).failure
    )


def test_the_first_eight_of_the_callers_samples_count(parse):
    text = "agraph (float[N, 3] x) => (float[N, 3] y) { y = Clip(x, low, high) }"
    wide, narrow = (
        parse(text, low=np.array(-high, np.float32), high=np.array(high, np.float32)) for high in (1e6, 1e4)
    )
    samples = [{"x": np.full((1, 3), 1e5 if place == 7 else 1, np.float32)} for place in range(9)]
    assert "on sample 7, x [1, 3]" in Verifier(wide, samples).check(narrow).failure
    assert Verifier(wide, samples[:7] + samples[8:] + samples[7:8]).check(narrow).failure == ""


TYPES = {
    "weight": ("agraph (float[N, 3] x) => (float[N, 3] y) { c = Cast<to = 1>(k)\n y = Mul(x, c) }", 1e-2),
    "input": ("agraph (float16[N, 3] x) => (float[N, 3] y) { y = Cast<to = 1>(x) }", 1e-2),
    "output": ("agraph (double[N, 3] x) => (float16[N, 3] y) { y = Cast<to = 10>(x) }", 1e-2),
    "none": ("agraph (int64[N, 3] x) => (int64[N, 3] y) { y = Abs(x) }", 1e-4),
}


@pytest.mark.parametrize("where", TYPES)
def test_the_narrowest_type_of_weights_inputs_and_outputs_counts(parse, where):
    text, tolerance = TYPES[where]
    given = {"k": np.array(2, np.float16)} if where == "weight" else {}
    assert Verifier(parse(text, **given)).tolerance == tolerance


def test_compare_takes_a_thousandth_of_the_magnitude_for_small_values():
    zeros, near = np.zeros(3, np.float32), np.full(3, 1e-6, np.float32)
    assert compare(zeros, near, magnitude=1.0)[0] == pytest.approx(1e-3)
    assert compare(np.full(3, 1e-2), np.full(3, 1.1e-2), magnitude=1.0)[0] == pytest.approx(0.1)


def test_compare_measures_finite_values_beside_others():
    old, new = np.array([np.inf, 2.0, np.nan]), np.array([np.inf, 3.0, np.nan])
    assert compare(old, new) == (0.5, "relative error 0.5")
    assert compare(np.array([1.0, 2.0]), np.array([1.0, np.inf]))[0] == np.inf


def test_a_divergence_inside_the_model_is_named_only_beyond_the_tolerance(parse):
    text = "agraph (float[N, 3] x) => (float[N, 3] y) { a = Mul(x, j)\n b = Mul(a, k)\n y = Neg(b) }"
    original, other = (parse(text, j=np.float32(j), k=np.float32(k)) for j, k in ((1, 1), (1 + 5e-5, 1.5)))
    assert Verifier(original).check(other).failure.endswith("first divergent tensor: 'b' (Mul)")


RIGHT_AT_8 = {
    "a length": ("s = Shape<start = 1>(x) \n y = Expand(one, s)", "y = Expand(one, eight)"),
    "a mean": ("y = ReduceMean<axes = [1]>(x)", "t = ReduceSum(x, axis) \n y = Div(t, of8)"),
    "a transposition": ("s = Shape(x) \n y = Expand(one, s)", "t = Transpose(x) \n s = Shape(t) \n y = Expand(one, s)"),
    "a shape": (
        "s = Shape<start = 1>(x) \n t = Concat<axis = 0>(rest, s) \n y = Reshape(x, t)",
        "y = Reshape(x, of_8)",
    ),
}
CONSTANTS = {
    "one": np.ones(1, np.float32),
    "eight": np.array([8]),
    "axis": np.array([1]),
    "of8": np.float32(8),
    "rest": np.array([-1]),
    "of_8": np.array([-1, 8]),
}


@pytest.mark.parametrize("what", RIGHT_AT_8)
def test_a_rewrite_that_is_right_only_at_size_8_is_found(parse, what):
    right, wrong = (
        parse(f"agraph (float[8, B] x) => (float y) {{ {body} }}", **CONSTANTS) for body in RIGHT_AT_8[what]
    )
    assert "of x [8, 2]" in Verifier(right).check(wrong).failure


def test_sizes_are_tried_even_if_the_model_refuses_some(parse):
    """Rows are added to two others, which works for one and two rows but not for three."""
    shape, at_8 = (
        parse(
            f"agraph (float[N, B] x) => (float y, float[C, B] z) {{ z = Add(x, rows)\n {body} }}",
            rows=np.ones((2, 1), np.float32),
            **{name: CONSTANTS[name] for name in used},
        )
        for body, used in (
            ("s = Shape<start = 1>(x)\n y = Expand(one, s)", ["one"]),
            ("y = Expand(one, eight)", ["one", "eight"]),
        )
    )
    assert "has shape [8]" in Verifier(shape).check(at_8).failure


ENDS = """agraph (float[N, 3] x) => (float[N, M, K] y) {{
    {indices}
    t = Cast<to = 1>(n)
    a = Unsqueeze(t, last)
    b = Unsqueeze(t, middle)
    square = Mul(a, b)
    y = Einsum<equation = "ia...,ja...->ij...">(square, square)
}}"""
"""A contraction over as many elements as are not zero, for which ONNX Runtime 1.31 ends its process if there are none."""
BRANCHES = """n = If (flag) <
        then_branch = t () => (int64[A, B] n1) { n1 = NonZero(x) },
        else_branch = e () => (int64[A, B] n2) { n2 = NonZero(x) }
    >"""


@pytest.mark.parametrize("indices", ["n = NonZero(x)", BRANCHES], ids=["NonZero", "NonZero in a branch"])
def test_a_model_that_some_values_end_does_not_end_the_verifier(parse, indices):
    constants = {"last": np.array([2]), "middle": np.array([1])} | (
        {"flag": np.array(True)} if "flag" in indices else {}
    )
    artifact = parse(ENDS.format(indices=indices), **constants)
    verifier = Verifier(artifact)
    assert verifier.obstacle == ""
    assert verifier.check(artifact).failure == ""


def test_a_model_that_some_sizes_end_does_not_end_the_verifier(parse):
    artifact = parse("""agraph (float[N, M, K] x) => (float[N, P, Q] y) {
        y = Einsum<equation = "ia...,ja...->ij...">(x, x)
    }""")
    assert Verifier(artifact).check(artifact).failure == ""


def test_both_models_run_as_written(parse, weights):
    """ONNX Runtime would merge the two factors, whose product with a large value overflows, into one."""
    text = "agraph (float[N, 3] x) => (float[N, 4] y) { a = Mul(x, up)\n b = MatMul(a, w)\n y = Mul(b, down) }"
    plain = "agraph (float[N, 3] x) => (float[N, 4] y) { y = MatMul(x, w) }"
    w = weights(3, 4)
    written = parse(text, w=w, up=np.float32(2.0**126), down=np.float32(2.0**-126))
    merged = parse(plain, w=w)
    for one, other in ((written, merged), (merged, written)):
        assert "NaN or infinite values are in other places" in Verifier(one).check(other).failure


def test_outputs_of_small_numbers_count_too(parse):
    original, other = factors(parse, 1e-20, 1.5e-20)
    assert "relative error 0.5" in Verifier(original).check(other).failure
    assert Verifier(original, tolerance=0.51).check(other).failure == ""


def test_an_error_equal_to_the_tolerance_is_accepted(parse):
    original, other = factors(parse, 1, 2)
    verdict = Verifier(original, tolerance=1.0).check(other)
    assert (verdict.failure, verdict.max_relative_error) == ("", 1.0)


def test_compare_of_equal_text():
    assert compare(np.array(["a"], object), np.array(["a"], object)) == (0.0, "")


def test_the_divergent_tensor_is_one_of_both_models(parse):
    original = parse("agraph (float[N, 3] x) => (float[N, 3] y) { a = Neg(x)\n y = Neg(a) }")
    other = parse("agraph (float[N, 3] x) => (float[N, 3] y) { a = Neg(x)\n new = Relu(a)\n y = Neg(new) }")
    for tolerance in (None, 0.0):
        failure = Verifier(original, tolerance=tolerance).check(other).failure
        assert failure.endswith("first divergent tensor: 'y' (Neg)")


def test_an_omitted_output_is_no_divergent_tensor(parse, weights):
    text = """agraph (float[N, M, 3] x) => (float[A, B, 1] h, float[N, M, 3] y) {{
        all, h = LSTM<hidden_size = 1>(x, w, r)
        y = {}(x)
    }}"""

    def omit(proto):
        proto.graph.node[0].output[0] = ""

    given = {"w": weights(1, 4, 3), "r": weights(1, 4, 1)}
    original, other = (changed(parse(text.format(name), **given), omit) for name in ("Neg", "Abs"))
    failure = Verifier(Artifact.from_bytes(original)).check(Artifact.from_bytes(other)).failure
    assert failure.endswith("first divergent tensor: 'y' (Abs)")
