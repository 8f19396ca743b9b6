from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import models
import networks
from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidData, Unsupported
from penstock.measurement import Interval
from penstock.offline.compress import versions
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.versions import IntegerChoice, integer_versions
from penstock.offline.deadline import BuildDeadline
from penstock.offline.sessions import signature_of
from penstock.resources import INTEGER_DOT_PRODUCT, MachineFacts
from penstock.rows.proof import unproven
from penstock.tensor import DataType

VNNI = MachineFacts("a CPU", "x86_64", ("avx2", "avx512_vnni"), 2, 1 << 34, 1, "Linux", "3")
PLAIN = MachineFacts("a CPU", "x86_64", ("avx2",), 2, 1 << 34, 1, "Linux", "3")


@pytest.fixture(scope="module")
def cnn() -> Artifact:
    return networks.cnn(8)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return make_dataset({"x": networks.images(24)}, None)


def test_a_version_for_each_method_and_placement_that_differs(cnn: Artifact, data: Dataset) -> None:
    stages: list[str] = []
    methods = (RangeMethod.MIN_MAX, RangeMethod.MSE)
    found, notes = integer_versions(cnn, data, IntegerChoice(methods), VNNI, lambda stage, *_: stages.append(stage))
    names = [version.calibration for version in found]
    assert names == [f"{way}-{place}" for way in ("best", "mse", "min-max") for place in ("linear", "wide")]
    assert len({version.artifact.digest for version in found}) == len(found)
    assert {version.requires for version in found} == {(INTEGER_DOT_PRODUCT,)}
    assert notes[0].startswith("INT8 on this CPU")
    assert {"calibrate", "quantize"} == set(stages)


def test_a_plain_chain_has_one_placement() -> None:
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    found, _ = integer_versions(
        networks.mlp(), make_dataset({"x": x}, None), IntegerChoice((RangeMethod.MIN_MAX,)), VNNI
    )
    names = [version.calibration for version in found]
    assert names == ["best-linear", "best-linear-per-tensor", "best-linear-symmetric", "min-max-linear"]


def test_models_of_matrix_products_have_versions_for_their_kernels(data: Dataset) -> None:
    x = make_dataset({"x": np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}, None)
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True)
    found = {version.calibration: version for version in integer_versions(networks.mlp(256), x, choice, PLAIN)[0]}
    assert list(found) == ["mse-linear", "mse-linear-per-tensor", "mse-linear-symmetric", "dynamic"]
    assert [version.engines for version in found.values()] == [(), ("onnxruntime",), ("openvino",), ("onnxruntime",)]
    for version in found.values():
        mixes = bool(unproven(version.artifact, signature_of(version.artifact)))
        assert version.mixes_rows == mixes == (version.calibration == "dynamic")
        assert not version.requires
    scales = [_weight_scales(found[name].artifact) for name in ("mse-linear", "mse-linear-per-tensor")]
    assert scales == [{256, 4}, {1}]


@pytest.mark.parametrize("speed", [1.5, 0.5, None])
def test_large_products_have_versions_with_weights_in_blocks_if_these_may_be_faster(speed: float | None) -> None:
    rows = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    model, x = networks.mlp(256), make_dataset({"x": rows}, None)

    def look(fp32: Artifact, made: Artifact, engines: tuple[str, ...]) -> dict[str, Interval]:
        is_block = any(node.op_type == "MatMulNBits" for node in onnx.load_model_from_string(made.data).graph.node)
        assert not is_block or engines == ("onnxruntime",)
        value = 1.5 if not is_block else speed
        return {} if value is None else {"onnxruntime": Interval(value, value - 0.1, value + 0.1)}

    for engines in ((), ("openvino",)):
        choice = IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True, engines=engines)
        found, _ = integer_versions(model, x, choice, VNNI, look=look)
        made = {version.precision: version for version in found if version.precision != "int8"}
        assert list(made) == (["int8-weights", "int4-weights"] if speed == 1.5 and not engines else [])
        for version in made.values():
            assert (version.engines, version.requires, version.mixes_rows) == (("onnxruntime",), (), False)
            assert [step.name for step in version.artifact.provenance] == ["quantize_weights", "reconstruct"]


def test_attention_has_versions_with_symmetric_activations() -> None:
    x = np.random.default_rng(0).standard_normal((32, 5, 32)).astype(np.float32)
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, engines=("openvino",))
    found, _ = integer_versions(networks.attention(), make_dataset({"x": x}, None), choice, PLAIN)
    names = [version.calibration for version in found]
    assert names == ["mse-linear", "mse-wide", *(f"mse-{place}-symmetric" for place in ("linear", "attention", "wide"))]
    graph = onnx.load_model_from_string(found[3].artifact.data).graph
    zeros = {node.input[2] for node in graph.node if node.op_type == "QuantizeLinear"}
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert {(arrays[name].dtype.name, arrays[name].item()) for name in zeros} == {("int8", 0)}


def test_convolutions_have_no_versions_for_products(cnn: Artifact, data: Dataset) -> None:
    found, _ = integer_versions(cnn, data, IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True), VNNI)
    assert [version.calibration for version in found] == ["mse-linear", "mse-wide"]


def _weight_scales(model: Artifact) -> set[int]:
    """The numbers of scales of the 8-bit constants."""
    graph = onnx.load_model_from_string(model.data).graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in arrays]
    return {arrays[node.input[1]].size for node in nodes if arrays[node.input[0]].dtype == np.int8}


def test_what_runs_anywhere_needs_nothing(cnn: Artifact, data: Dataset) -> None:
    for machine in (VNNI, PLAIN):
        found, _ = integer_versions(cnn, data, IntegerChoice((RangeMethod.MIN_MAX,), False, anywhere=True), machine)
        assert {version.requires for version in found} == {()}


@pytest.mark.parametrize("failure", [RuntimeError("a defect"), InvalidData("a defect"), Unsupported("a defect")])
def test_a_version_that_fails_does_not_end_the_others(
    cnn: Artifact, data: Dataset, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Artifact:
        raise failure

    monkeypatch.setattr(versions, "quantize_with", fail)
    found, notes = integer_versions(cnn, data, IntegerChoice((RangeMethod.MIN_MAX,)), VNNI)
    assert [version.calibration for version in found] == ["min-max-linear", "min-max-wide"]
    lost = [note for note in notes if "was not tried" in note]
    assert [note.split()[2] for note in lost] == ["best-linear", "best-wide"]
    assert all("a defect" in note for note in lost)


def test_a_check_that_fails_drops_one_version(cnn: Artifact, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Artifact] = []

    def fail(fp32: Artifact, made: Artifact, data: Dataset) -> None:
        calls.append(made)
        if len(calls) == 1:
            raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(versions, "check_explained", fail)
    methods = (RangeMethod.MIN_MAX, RangeMethod.MSE)
    found, notes = integer_versions(cnn, data, IntegerChoice(methods, careful=False), VNNI)
    assert len(calls) == len(found) + 1
    assert calls[0] not in [version.artifact for version in found]
    assert any(
        note.endswith("was dropped: internal error: ZeroDivisionError: float division by zero") for note in notes
    )


def test_why_there_are_none(cnn: Artifact, data: Dataset) -> None:
    def note(*arguments: object) -> str:
        found, (only,) = integer_versions(*arguments)  # type: ignore[arg-type]
        assert found == []
        return only

    assert "no calibration data" in note(cnn, None, IntegerChoice(), VNNI)
    assert "no calibration method" in note(cnn, data, IntegerChoice((), careful=False), VNNI)
    nothing = make_dataset({"x": np.zeros((4, 3), np.float32)}, None)
    assert "INT8 was not tried: " in note(models.identity(DataType.FP32), nothing, IntegerChoice(), VNNI)


def test_activations_that_are_constant_or_not_numbers() -> None:
    n = networks.Network()
    constant = n.op("Relu", n.op("Sub", n.gemm("x", 16, 8), n.weight(np.float32(1e6))), name="dead")
    n.gemm(constant, 8, 4, name="y")
    model = n.artifact({"x": ["N", 16]}, {"y": ["N", 4]})
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    found, _ = integer_versions(model, make_dataset({"x": x}, None), IntegerChoice((RangeMethod.MIN_MAX,)), VNNI)
    assert found
    n = networks.Network()
    n.gemm(n.op("Log", n.gemm("x", 16, 8), name="logs"), 8, 4, name="y")
    model = n.artifact({"x": ["N", 16]}, {"y": ["N", 4]})
    with pytest.raises(InvalidData, match=r"'logs' becomes NaN or infinite in sample"):
        integer_versions(model, make_dataset({"x": x}, None), IntegerChoice((RangeMethod.MIN_MAX,)), VNNI)


def test_what_is_slower_in_an_engine_is_not_calibrated_for_it(cnn: Artifact, data: Dataset) -> None:
    speeds = iter(({"onnxruntime": 0.5, "openvino": 2.0}, {"onnxruntime": 0.6, "openvino": 0.7}))

    def look(fp32: Artifact, int8: Artifact, engines: tuple[str, ...]) -> dict[str, Interval]:
        assert (fp32, engines) == (cnn, ())
        return {name: Interval(value, 0.9 * value, 1.1 * value) for name, value in next(speeds).items()}

    choice = IntegerChoice((RangeMethod.MIN_MAX,), careful=False)
    found, notes = integer_versions(cnn, data, choice, VNNI, look=look)
    assert [(one.calibration, one.engines) for one in found] == [("min-max-linear", ("openvino",))]
    assert [note for note in notes if "slower than FP32" in note] == [
        f"INT8 ({place}) was not calibrated for {engine}, because it is slower than FP32 there: {shown}"
        for place, engine, shown in (
            ("linear", "onnxruntime", "0.50x (0.45 … 0.55)"),
            ("wide", "onnxruntime", "0.60x (0.54 … 0.66)"),
            ("wide", "openvino", "0.70x (0.63 … 0.77)"),
        )
    ]


def test_if_nothing_is_faster_nothing_is_calibrated(
    cnn: Artifact, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated = []
    monkeypatch.setattr(versions, "quantize_with", lambda *_: calibrated.append(1))
    found, notes = integer_versions(
        cnn, data, IntegerChoice(), VNNI, look=lambda *_: {"onnxruntime": Interval(0.5, 0.4, 0.6)}
    )
    assert (found, calibrated) == ([], [])
    assert len(notes) == 2


@pytest.mark.parametrize(("share", "names"), [(0.3, ["best-linear", "best-wide"]), (0.6, ["best-linear"])])
def test_when_time_is_short_the_first_method_comes_first(
    share: float, names: list[str], cnn: Artifact, data: Dataset
) -> None:
    clock = ManualClock()
    deadline = BuildDeadline(1.0, clock)
    clock.advance(share)
    found, notes = integer_versions(cnn, data, IntegerChoice((RangeMethod.MIN_MAX,)), VNNI, deadline=deadline)
    assert [version.calibration for version in found] == names
    assert notes[-1].endswith("was not tried: there was no time within --budget")


def test_a_layout_that_cannot_be_timed_is_still_tried(cnn: Artifact, data: Dataset) -> None:
    choice = IntegerChoice((RangeMethod.MIN_MAX,), careful=False)
    speeds = iter(({}, {"onnxruntime": Interval(2.0, 1.9, 2.1)}))
    found, _ = integer_versions(cnn, data, choice, VNNI, look=lambda *_: next(speeds))
    assert [version.calibration for version in found] == ["min-max-wide", "min-max-linear"]
