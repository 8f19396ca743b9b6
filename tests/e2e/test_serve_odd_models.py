"""``penstock serve`` with valid models that reject generated inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import models
from http_servers import Client, get, post
from penstock.artifact import Artifact
from processes import ServerProcess

INT64, FP32 = TensorProto.INT64, TensorProto.FLOAT
PAIR = [("a", INT64, ["N"]), ("x", INT64, ["N"])]


def ask(server: ServerProcess, path: str, *tensors: dict[str, Any]) -> Any:
    host, _, port = json.loads(server.line)["http"].rpartition(":")
    with Client((host, int(port))) as client:
        answer = client.ask(post(json.dumps({"inputs": tensors}).encode(), path=path) if tensors else get(path))
    return answer.status, json.loads(answer.body or b"{}")


def tensor(name: str, values: list[Any], datatype: str) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": datatype, "data": values}


ONE, VECTOR = [1], ["N"]


def odd_models() -> dict[str, tuple[Artifact, list[dict[str, Any]], list[Any], bool]]:
    """For each name: a model, a valid request, its response, and whether the model rejects zeros."""
    table = {"table": np.arange(10, 14, dtype=np.int64)}
    bounds = {"start": np.array(3), "end": np.array(8)}
    hot = {"depth": np.array(3), "values": np.array([0, 1])}
    pair = [tensor("a", [7, 9], "INT64"), tensor("x", [2, 5], "INT64")]
    return {
        "Div": (models.artifact([("Div", ["a", "x"], ["y"])], PAIR, [("y", INT64, VECTOR)]), pair, [3, 1], True),
        "Mod": (models.artifact([("Mod", ["a", "x"], ["y"])], PAIR, [("y", INT64, VECTOR)]), pair, [1, 4], True),
        "Range": (
            # Its step must not be zero.
            models.artifact(
                [
                    ("Squeeze", ["x"], ["step"]),
                    ("Range", ["start", "end", "step"], ["all"]),
                    ("ReduceMax", ["all"], ["y"]),
                ],
                [("x", INT64, ONE)],
                [("y", INT64, ONE)],
                bounds,
            ),
            [tensor("x", [2], "INT64")],
            [7],
            True,
        ),
        "Gather": (
            models.artifact(
                [("Sub", ["x", "base"], ["at"]), ("Gather", ["table", "at"], ["y"])],
                [("x", INT64, VECTOR)],
                [("y", INT64, VECTOR)],
                {**table, "base": np.array(100)},
            ),
            [tensor("x", [102, 103], "INT64")],
            [12, 13],
            True,
        ),
        "OneHot": (
            models.artifact(
                [("OneHot", ["x", "depth", "values"], ["y"])], [("x", INT64, VECTOR)], [("y", INT64, ["N", 3])], hot
            ),
            [tensor("x", [2], "INT64")],
            [0, 0, 1],
            False,
        ),
        "Reshape": (
            models.artifact(
                [("Reshape", ["a", "x"], ["y"])], [("a", INT64, [4]), ("x", INT64, [2])], [("y", INT64, ["A", "B"])]
            ),
            [tensor("a", [1, 2, 3, 4], "INT64"), tensor("x", [2, 2], "INT64")],
            [1, 2, 3, 4],
            True,
        ),
    }


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_models_that_refuse_zeros_are_served(tmp_path: Path, isolation: str) -> None:
    cases = odd_models()
    for name, (artifact, *_) in cases.items():
        (tmp_path / f"{name}.onnx").write_bytes(artifact.data)
    with ServerProcess(*sorted(tmp_path.iterdir()), arguments=("--json",), isolation=isolation) as server:
        for name, (_, inputs, expected, _) in cases.items():
            status, answer = ask(server, f"/v2/models/{name}/infer", *inputs)
            assert (status, answer["outputs"][0]["data"]) == (200, expected), (name, answer)
    _, errors = server.end()
    for name, (*_, refuses_zeros) in cases.items():
        assert (
            errors.count(f"model '{name}' is served without warm-up: it rejects a guessed batch of 1 zero rows")
            == refuses_zeros
        )
    assert "describe a valid request in 'model_warmup'" in errors
    assert "Traceback" not in errors


def test_a_default_may_be_replaced(tmp_path: Path) -> None:
    inputs = [("x", FP32, ["N", 2]), ("w", FP32, [2])]
    artifact = models.artifact(
        [("Mul", ["x", "w"], ["y"])], inputs, [("y", FP32, ["N", 2])], {"w": np.array([2, 3], np.float32)}
    )
    (tmp_path / "scale.onnx").write_bytes(artifact.data)
    with ServerProcess(tmp_path / "scale.onnx", arguments=("--json",)) as server:
        x = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}
        for more, expected in (((), [2, 3]), ((tensor("w", [5, 7], "FP32"),), [5, 7])):
            status, answer = ask(server, "/v2/models/scale/infer", x, *more)
            assert (status, answer["outputs"][0]["data"]) == (200, expected)
        status, answer = ask(server, "/v2/models/scale/infer", x, tensor("w", [5], "FP32"))
        assert status == 400
        assert "input 'w' of model 'scale' must be FP32 [2], got FP32 [1]" in answer["error"]


def test_a_tensor_of_unknown_rank_takes_any_shape_or_the_one_that_is_given(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "neg",
        [helper.make_tensor_value_info("x", FP32, None)],
        [helper.make_tensor_value_info("y", FP32, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    for name in ("any", "given"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_bytes(model)
    (tmp_path / "given" / "config.pbtxt").write_text('input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] }')
    with ServerProcess(arguments=("--json", "--model-repository", str(tmp_path))) as server:
        for shape, expected in (([], 200), ([2], 400), ([1, 2], 200), ([2, 1, 1], 400)):
            x = {"name": "x", "shape": shape, "datatype": "FP32", "data": [1.0] * int(np.prod(shape))}
            status, answer = ask(server, "/v2/models/any/infer", x)
            assert (status, answer["outputs"][0]["shape"]) == (200, shape)
            status, answer = ask(server, "/v2/models/given/infer", x)
            assert status == (expected if shape else 400)
        assert ask(server, "/v2/models/given")[1]["inputs"][0]["shape"] == [-1, 2]
