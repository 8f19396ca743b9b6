import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
import python_models
import sequences
from penstock.artifact import Artifact
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import PenstockError
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.loader import load
from penstock.online.repository.loading.recorded_requests import encode, folder_of
from penstock.online.repository.loading.warm_up import prepare
from penstock.online.repository.resolved_version import LoadOptions, ResolvedVersion, find
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import DOUBLER, FakeModel, FakeStreamingModel

ROW = np.float32([[1, 2, 3]])
RAGGED = """max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "x" } ]
"""
RESHAPED = """max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 1 ] reshape { shape: [ 3 ] } } ]
"""
SEQUENCE = """max_batch_size: 4
sequence_batching {
  control_input [ { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } ]
  state [ { input_name: "state_in" output_name: "state_out" data_type: TYPE_FP32 dims: [ 1 ] } ]
}
"""
COUNTING = """
def initialize(self, args):
    self.count = 0

def execute(self, requests):
    self.count += len(requests)
    if any(request.inputs()[0].as_numpy()[0, 0] == 13 for request in requests):
        raise pb_utils.TritonModelException("unlucky")
    ys = [request.inputs()[0].as_numpy() * 0 + self.count for request in requests]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in ys]
"""
PYTHON = """backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def sample(name: str = "w", more: str = "zero_data: true", dims: str = "3", rows: int = 1, key: str = "x") -> str:
    tensor = f'inputs {{ key: "{key}" value {{ data_type: TYPE_FP32 dims: [ {dims} ] {more} }} }}'
    return f'model_warmup {{ name: "{name}" batch_size: {rows} {tensor} }}\n'


def resolve(root: Path, config: str, artifact: Artifact | None = None, **load_options: Any) -> ResolvedVersion:
    folder = root / "m"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    if "python" not in config:
        (folder / "1" / "model.onnx").write_bytes((artifact or models.linear()).data)
    layout = Layout((root,), "", False, {})
    return find(layout.define("m"), "1", LoadOptions(**load_options))


def seen_by(resolved: ResolvedVersion, signature: Signature | None = None) -> FakeModel:
    """Warm up the model of the source, or a fake with ``signature``, and return it with its inputs."""
    if signature is not None:
        model = FakeModel(signature, lambda _: {})
    else:
        own = OnnxRuntimeEngine().load(resolved.artifact, {"threads": 1})
        model = FakeModel(own.signature, own.forward)
    model.rows = prepare(resolved, [model]).max_batch_size  # type: ignore[attr-defined]
    return model


def shapes(model: FakeModel) -> list[tuple[int, ...]]:
    return [call["x"].shape for call in model.calls]


def test_samples_are_merged_and_repeated(tmp_path: Path) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "row").write_bytes(ROW.tobytes())
    samples = sample(rows=3) + sample("f", 'input_data_file: "row"', rows=2) + sample("r", "random_data: true")
    model = seen_by(resolve(tmp_path, "max_batch_size: 4\n" + samples.replace('"f"', '"f" count: 2')))
    assert shapes(model) == [(3, 3), (2, 3), (2, 3), (1, 3)]
    assert not model.calls[0]["x"].any()
    np.testing.assert_array_equal(model.calls[1]["x"], np.repeat(ROW, 2, axis=0))
    assert model.calls[3]["x"].any()


def test_one_row_and_the_largest_batch_are_run(tmp_path: Path) -> None:
    assert shapes(seen_by(resolve(tmp_path / "a", ""))) == [(1, 3), (64, 3)]
    assert shapes(seen_by(resolve(tmp_path / "b", "max_batch_size: 4"))) == [(1, 3), (4, 3)]
    assert seen_by(resolve(tmp_path / "c", "max_batch_size: 4")).rows == 4  # type: ignore[attr-defined]
    assert shapes(seen_by(resolve(tmp_path / "d", sample())))[-1] == (1, 3)


def test_every_instance_is_warmed_up_and_a_shared_one_once(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, "max_batch_size: 4\n" + sample())
    one, two = (FakeModel(Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), DOUBLER.outputs)) for _ in range(2))
    assert prepare(resolved, [one, two, one]).max_batch_size == 4
    assert (len(one.calls), len(two.calls)) == (1, 1)


def test_without_a_batch_the_dims_are_whole(tmp_path: Path) -> None:
    fixed = models.fixed_batch()
    spec = OnnxRuntimeEngine().load(fixed, {}).signature.inputs[0]
    dims = ", ".join(map(str, spec.shape))
    text = f"max_batch_size: 0 {sample(dims=dims)}".replace('"x"', f'"{spec.name}"')
    model = seen_by(resolve(tmp_path, text, fixed))
    assert [call[spec.name].shape for call in model.calls] == [spec.shape]


def test_layouts_apply(tmp_path: Path) -> None:
    assert shapes(seen_by(resolve(tmp_path / "a", RESHAPED + sample(dims="3, 1", rows=2)))) == [(2, 3)]
    vectors = Signature(
        (TensorSpec("x", DataType.FP32, (-1,)), TensorSpec("ends", DataType.FP32, (-1,))),
        (TensorSpec("y", DataType.FP32, (-1, 1)),),
    )
    model = seen_by(resolve(tmp_path / "b", RAGGED + sample(dims="5", rows=2)), vectors)
    assert shapes(model) == [(10,)]
    assert model.calls[0]["ends"].tolist() == [5, 10]
    assert shapes(seen_by(resolve(tmp_path / "c", RAGGED), vectors)) == [], "nobody can guess these"


def test_sequences_are_given_their_controls_and_initial_states(tmp_path: Path) -> None:
    accumulator = sequences.implicit_accumulator()
    model = seen_by(resolve(tmp_path / "a", SEQUENCE + sample(dims="1", rows=2), accumulator))
    (call,) = model.calls
    assert call["START"].tolist() == [[1], [1]]
    assert call["state_in"].tolist() == [[0], [0]]
    # As Triton's users write them; the server's own take their place.
    also = sample(dims="1").replace(
        "} }\n", '} inputs { key: "START" value { data_type: TYPE_INT32 dims: 1 zero_data: true } } }'
    )
    (call,) = seen_by(resolve(tmp_path / "b", SEQUENCE + also, accumulator)).calls
    assert call["START"].tolist() == [[1]]
    assert shapes(seen_by(resolve(tmp_path / "c", SEQUENCE, accumulator))) == []


def test_a_stream_is_drained(tmp_path: Path) -> None:
    text = "max_batch_size: 4 model_transaction_policy { decoupled: true }\n" + sample(dims="2", rows=2)
    model = FakeStreamingModel()
    assert prepare(resolve(tmp_path, text), [model]).max_batch_size == 4
    assert (len(model.calls), model.closed) == (2, 2)


def test_text_is_empty_random_or_in_its_wire_form(tmp_path: Path) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "text").write_bytes(b"\x01\x00\x00\x00a\x00\x00\x00\x00")
    parts = [
        sample(more=more, dims="2") for more in ("zero_data: true", 'input_data_file: "text"', "random_data: true")
    ]
    text = "max_batch_size: 4\n" + "".join(
        part.replace("TYPE_FP32", "TYPE_STRING").replace('"w"', f'"{n}"') for n, part in enumerate(parts)
    )
    model = seen_by(resolve(tmp_path, text, models.identity(DataType.BYTES)))
    assert [call["x"].tolist() for call in model.calls[:2]] == [[[b"", b""]], [[b"a", b""]]]
    assert all(model.calls[2]["x"].flat)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (sample(dims="4"), "sample 'w': .*unexpected shape for input 'x'.*Expected \\[-1, 3\\], got \\[1, 4\\]"),
        (sample(more='input_data_file: "absent"'), "sample 'w': input 'x': there is no file 'absent'"),
        (
            sample(more='input_data_file: "long"'),
            "sample 'w': input 'x': .* takes 12 bytes, but 13 bytes were given",
        ),
        (sample(more='input_data_file: "short"'), "takes 12 bytes, but 3 bytes were given"),
        (sample(more='input_data_file: "out"'), "is outside the model's folder 'warmup'"),
        (sample(dims="3000000000"), "take more than 1073741824 bytes"),
    ],
    ids=["shape", "no-file", "long-file", "short-file", "link", "size"],
)
def test_a_sample_that_cannot_be_fails_the_load(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "long").write_bytes(bytes(13))
    (tmp_path / "m" / "warmup" / "short").write_bytes(bytes(3))
    (tmp_path / "m" / "warmup" / "out").symlink_to("/etc/passwd")
    with pytest.raises(PenstockError, match=f"^model 'm': failed to run warmup .*{reason}"):
        load(resolve(tmp_path, "max_batch_size: 4\n" + config))


def test_more_rows_than_are_merged(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="sample 'w': 'batch_size' is 65, but at most 64 rows are merged"):
        load(resolve(tmp_path, sample(rows=65)))


def test_a_model_that_refuses_a_sample_is_not_served(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, "max_batch_size: 4\n" + sample(rows=3), models.fails_on_odd_batch())
    with pytest.raises(PenstockError, match="^model 'm': failed to run warmup sample 'w': "):
        load(resolved)


def asked(model: Any, value: float) -> list[Any]:
    answers: list[Any] = []
    model.execute(
        [InferRequest("m", {"x": np.full((1, 2), value, np.float32)})], lambda _, out, __: bool(answers.append(out))
    )
    return answers


def test_a_python_model_runs_its_samples_and_nothing_else(tmp_path: Path) -> None:
    for number, (config, count) in enumerate([(PYTHON, 1), (PYTHON + sample(dims="2", rows=3), 4)]):
        python_models.write(tmp_path / str(number) / "m", COUNTING)
        loaded = load(resolve(tmp_path / str(number), config))
        try:
            assert asked(loaded.models[0], 0)[0]["y"].tolist() == [[count, count]]
        finally:
            loaded.drop()


def test_a_python_model_that_refuses_a_sample(tmp_path: Path) -> None:
    python_models.write(tmp_path / "m", COUNTING)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "13").write_bytes(np.float32([13, 13]).tobytes())
    with pytest.raises(PenstockError, match="failed to run warmup sample 'w': .*unlucky"):
        load(resolve(tmp_path, PYTHON + sample(more='input_data_file: "13"', dims="2")))


ECHO_START = """
def initialize(self, args):
    self.seen = []

def execute(self, requests):
    answers = []
    for request in requests:
        self.seen.append(tuple(int(request_input.as_numpy()[0, 0]) for request_input in request.inputs()[1:]))
        y = request.inputs()[0].as_numpy() * 0 + len([one for one in self.seen if one == (1, 7)])
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
    return answers
"""


def test_a_python_model_of_sequences_is_told_that_they_start(tmp_path: Path) -> None:
    python_models.write(tmp_path / "m", ECHO_START)
    controls = """sequence_batching { control_input [
      { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
      { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 7 ] } } ] }
    """
    loaded = load(resolve(tmp_path, PYTHON + controls + sample(dims="2", rows=3)))
    try:
        x, flag = np.zeros((1, 2), np.float32), np.zeros((1, 1), np.int32)
        answers: list[Any] = []
        request = InferRequest("m", {"x": x, "START": flag, "READY": flag})
        loaded.models[0].execute([request], lambda _, outputs, __: bool(answers.append(outputs)))  # type: ignore[union-attr]
        assert answers[0]["y"].tolist() == [[3, 3]]
    finally:
        loaded.drop()


def record(root: Path, name: str, inputs: Mapping[str, Array]) -> None:
    folder = folder_of(str(root), "m")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.request").write_bytes(encode(InferRequest("m", dict(inputs))))


def test_recorded_requests_are_run_and_those_that_do_not_fit_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = tmp_path / "recorded"
    for rows in (1, 2, 70):
        record(recorded, str(rows), {"x": np.ones((rows, 3), np.float32)})
    record(recorded, "other", {"z": np.ones((1, 3), np.float32)})
    (folder_of(str(recorded), "m") / "torn.request").write_bytes(b"Inference-Header")
    with caplog.at_level(logging.INFO):
        model = seen_by(resolve(tmp_path, "max_batch_size: 4", warmup_folder=str(recorded)))
    assert sorted(shapes(model)[2:]) == [(1, 3), (2, 3), (70, 3)]
    assert "model 'm' warmed up with 3 recorded requests" in caplog.text
    assert "model 'm': recorded request 'other.request' is skipped: " in caplog.text
    assert "model 'm': recorded request 'torn.request' is skipped: it must begin with" in caplog.text


def test_a_recorded_request_that_the_model_refuses_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python_models.write(tmp_path / "m", COUNTING)
    recorded = tmp_path / "recorded"
    record(recorded, "bad", {"x": np.full((1, 2), 13, np.float32)})
    record(recorded, "good", {"x": np.zeros((1, 2), np.float32)})
    with caplog.at_level(logging.INFO):
        loaded = load(resolve(tmp_path, PYTHON, warmup_folder=str(recorded)))
    try:
        assert asked(loaded.models[0], 0)[0]["y"].tolist() == [[3, 3]]
    finally:
        loaded.drop()
    assert "'bad.request' is skipped: " in caplog.text
    assert "warmed up with 1 recorded requests" in caplog.text


def test_a_decoupled_python_model_of_sequences_needs_no_slots(tmp_path: Path) -> None:
    config = PYTHON + "sequence_batching { direct {} } model_transaction_policy { decoupled: true }\n"
    python_models.write(
        tmp_path / "m", "def execute(self, requests):\n    requests[0].get_response_sender().send(flags=1)\n"
    )
    load(resolve(tmp_path, config + sample(dims="2"))).drop()
