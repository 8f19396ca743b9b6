"""The functions of operators that tf2onnx lacks, computed by ONNX Runtime."""

import math

import numpy as np
import onnx
import onnxruntime
import pytest

from penstock.offline.convert.tensorflow.functions import DOMAIN, OPERATORS, inlined

X = np.array([0.0, 1e-8, -1e-9, 0.3, -0.5, 2.0, 40.0], np.float32)
WANTED = {
    "Erfc": lambda x: [math.erfc(one) for one in x],
    "Expm1": np.expm1,
    "GeluErf": lambda x: [one * 0.5 * (1 + math.erf(one / math.sqrt(2))) for one in x],
    "GeluTanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "L2Loss": lambda x: np.sum(x * x) / 2,
    "Log1p": np.log1p,
    "MulNoNan": lambda x, y: np.where(y == 0, 0, x * np.where(y == 0, 1, y)),
    "TruncateMod": np.fmod,
    "Xdivy": lambda x, y: np.where(x == 0, 0, x / y),
    "Xlogy": lambda x, y: np.where(x == 0, 0, x * np.log(y)),
}


def computed(operator: str, *inputs: np.ndarray) -> np.ndarray:
    names = ["x", "y"][: len(inputs)]
    node = onnx.helper.make_node(operator, names, ["z"], domain=DOMAIN)
    given = [onnx.helper.make_tensor_value_info(name, 1, one.shape) for name, one in zip(names, inputs, strict=True)]
    graph = onnx.helper.make_graph([node], "g", given, [onnx.helper.make_tensor_value_info("z", 1, None)])
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = inlined(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10))
    assert not model.functions
    assert [one.domain for one in model.opset_import] == [""]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, dict(zip(names, inputs, strict=True)))[0]


@pytest.mark.parametrize("operator", WANTED)
def test_functions_are_accurate_also_near_0(operator):
    inputs = [X] if operator in ("Erfc", "Expm1", "GeluErf", "GeluTanh", "L2Loss", "Log1p") else [X, X[::-1].copy()]
    if operator == "TruncateMod":
        inputs = [X, np.full_like(X, 0.75)]
    if operator == "Xlogy":
        inputs[1] = np.abs(inputs[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        want = np.asarray(WANTED[operator](*(one.astype(np.float64) for one in inputs)))
    if operator == "Expm1":
        want = want.astype(np.float32)
    np.testing.assert_allclose(computed(operator, *inputs), want, rtol=2e-6, atol=1e-30 if operator != "Erfc" else 1e-7)


def test_every_operator_has_a_function():
    assert OPERATORS - {"TFL_GELU"} <= set(WANTED)


def test_rows_are_quantised_to_255_steps():
    x = np.array([[-1.0, 0.0, 0.501, 1.55], [0, 0, 0, 0]], np.float32)
    found = computed("QuantisedRows", x)
    assert np.abs(found - x).max() <= 0.011 / 2
    assert np.unique(np.round(found[0] / np.float32(0.01), 3) % 1).tolist() == [0]
    assert not found[1].any()
