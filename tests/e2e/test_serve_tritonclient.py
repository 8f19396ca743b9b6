"""A real server process, used with Triton's client library."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import models
from penstock.tensor import DataType
from processes import ServerProcess


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    folder = tmp_path_factory.mktemp("models")
    named = {
        "linear": models.linear(),
        "two words": models.sum_and_difference(),
        "half": models.identity(DataType.FP16),
        "text": models.identity(DataType.BYTES),
    }
    for name, artifact in named.items():
        (folder / f"{name}.onnx").write_bytes(artifact.data)
    with ServerProcess(*sorted(folder.iterdir()), arguments=("--max-batch", "16"), max_request_rows=16) as server:
        client = triton.InferenceServerClient("{}:{}".format(*server.address), concurrency=8)
        yield client
        client.close()


def make_input(name: str, array: np.ndarray, datatype: str, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear")
    assert client.is_model_ready("two words", "1")
    assert not client.is_model_ready("absent")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("linear")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert metadata["versions"] == ["1"]


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_infer_in_json_and_binary(client: triton.InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    x = np.random.default_rng(0).standard_normal((5, 3), np.float32)
    outputs = [triton.InferRequestedOutput("y", binary_data=binary_out)]
    answer = client.infer("linear", [make_input("x", x, "FP32", binary_in)], outputs=outputs, request_id="7")
    np.testing.assert_allclose(answer.as_numpy("y"), x @ models.linear_weight(), rtol=1e-5)
    assert answer.get_response()["id"] == "7"


def test_several_inputs_and_chosen_outputs(client: triton.InferenceServerClient) -> None:
    a, b = np.ones((1, 2), np.float32), np.full((1, 2), 3, np.float32)
    inputs = [make_input("a", a, "FP32"), make_input("b", b, "FP32", binary=False)]
    answer = client.infer("two words", inputs)
    np.testing.assert_array_equal(answer.as_numpy("sum"), a + b)
    np.testing.assert_array_equal(answer.as_numpy("difference"), a - b)
    answer = client.infer("two words", inputs, outputs=[triton.InferRequestedOutput("difference")])
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["difference"]


def test_halves_and_text(client: triton.InferenceServerClient) -> None:
    half = np.array([[0.5, -2]], np.float16)
    np.testing.assert_array_equal(client.infer("half", [make_input("x", half, "FP16")]).as_numpy("y"), half)
    text = np.array([["one", "zwölf"]], object)
    for binary in (False, True):
        answer = client.infer("text", [make_input("x", text, "BYTES", binary)])
        assert [element.decode() for element in answer.as_numpy("y").ravel()] == ["one", "zwölf"]


@pytest.mark.parametrize(
    ("name", "tensor", "status", "message"),
    [
        ("absent", make_input("x", np.zeros((1, 3), np.float32), "FP32"), "404", "'absent' is not found"),
        ("linear", make_input("z", np.zeros((1, 3), np.float32), "FP32"), "400", "unexpected inference input 'z'"),
        ("linear", make_input("x", np.zeros((1, 4), np.float32), "FP32"), "400", "unexpected shape for input 'x'"),
        ("linear", make_input("x", np.zeros((1, 3), np.int32), "INT32"), "400", "data-type is 'INT32'"),
        ("linear", make_input("x", np.zeros((17, 3), np.float32), "FP32"), "400", "batch-size must be <= 16"),
    ],
)
def test_what_is_wrong_is_told(
    client: triton.InferenceServerClient, name: str, tensor: triton.InferInput, status: str, message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(name, [tensor])
    assert caught.value.status() == status


def test_many_at_once_get_each_their_own(client: triton.InferenceServerClient) -> None:
    arrays = [np.full((n % 4 + 1, 3), n, np.float32) for n in range(200)]
    pending = [client.async_infer("linear", [make_input("x", x, "FP32")]) for x in arrays]
    for x, answer in zip(arrays, pending, strict=True):
        np.testing.assert_allclose(answer.get_result().as_numpy("y"), x @ models.linear_weight(), rtol=1e-5)


def test_the_digits_example_is_recognised() -> None:
    model = Path(__file__).parents[2] / "examples/digits/model.onnx"
    data = np.load(model.with_name("evaluate.npz"))
    with ServerProcess(model) as server, triton.InferenceServerClient("{}:{}".format(*server.address)) as client:
        (name,) = [spec["name"] for spec in client.get_model_metadata("model")["inputs"]]
        answer = client.infer("model", [make_input(name, data[name][:32], "FP32")])
        found = answer.as_numpy(answer.get_response()["outputs"][0]["name"]).argmax(axis=1)
    assert (found == data["labels"][:32]).mean() > 0.9
