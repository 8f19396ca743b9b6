from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import models
import networks
import stored_models
from machines import PLAIN, VNNI
from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidData, Unsupported, WrongResult
from penstock.measurement import Interval
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.versions import versions, ways
from penstock.offline.compress.versions.versions import affordable, derived_versions
from penstock.offline.compress.versions.ways import IntegerChoice
from penstock.offline.deadline import BuildDeadline
from penstock.offline.sessions import signature_of
from penstock.resources import INTEGER_DOT_PRODUCT
from penstock.rows.proof import unproven
from penstock.tensor import DataType


@pytest.fixture(scope="module")
def cnn() -> Artifact:
    return networks.cnn(8)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return make_dataset({"x": networks.images(24)}, None)


def test_a_version_for_each_method_and_placement_that_differs(cnn: Artifact, data: Dataset) -> None:
    stages: list[str] = []
    methods = (RangeMethod.MIN_MAX, RangeMethod.MSE)
    found, notes = derived_versions(cnn, data, IntegerChoice(methods), VNNI, lambda stage, *_: stages.append(stage))
    names = [version.calibration for version in found]
    assert names == ["mse-linear", "best-linear", "best-wide", "mse-wide", "min-max-linear", "min-max-wide"]
    assert len({version.artifact.digest for version in found}) == len(found)
    assert {version.requires for version in found} == {(INTEGER_DOT_PRODUCT,)}
    assert notes[0].startswith("INT8 on this CPU")
    assert {"calibrate", "quantize"} == set(stages)


def test_a_plain_chain_has_one_placement() -> None:
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    found, _ = derived_versions(
        networks.mlp(), make_dataset({"x": x}, None), IntegerChoice((RangeMethod.MIN_MAX,)), VNNI
    )
    names = [version.calibration for version in found]
    assert names == ["min-max-linear", "best-linear", "best-linear-per-tensor", "best-linear-symmetric"]


def test_models_of_matrix_products_have_versions_for_their_kernels(data: Dataset) -> None:
    x = make_dataset({"x": np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}, None)
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True)
    found = {version.calibration: version for version in derived_versions(networks.mlp(256), x, choice, PLAIN)[0]}
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
        found, _ = derived_versions(model, x, choice, VNNI, look=look)
        made = {version.precision: version for version in found if version.precision != "int8"}
        assert list(made) == (["int8-weights", "int4-weights"] if speed == 1.5 and not engines else [])
        for version in made.values():
            assert (version.engines, version.requires, version.mixes_rows) == (("onnxruntime",), (), False)
            assert [step.name for step in version.artifact.provenance] == ["quantize_weights", "reconstruct"]


def test_attention_has_versions_with_symmetric_activations() -> None:
    x = np.random.default_rng(0).standard_normal((32, 5, 32)).astype(np.float32)
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, engines=("openvino",))
    found, _ = derived_versions(networks.attention(), make_dataset({"x": x}, None), choice, PLAIN)
    names = [version.calibration for version in found]
    assert names == ["mse-linear", "mse-wide", *(f"mse-{place}-symmetric" for place in ("linear", "attention", "wide"))]
    graph = onnx.load_model_from_string(found[3].artifact.data).graph
    zeros = {node.input[2] for node in graph.node if node.op_type == "QuantizeLinear"}
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert {(arrays[name].dtype.name, arrays[name].item()) for name in zeros} == {("int8", 0)}


def test_convolutions_have_no_versions_for_products(cnn: Artifact, data: Dataset) -> None:
    found, _ = derived_versions(cnn, data, IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True), VNNI)
    assert [version.calibration for version in found] == ["mse-linear", "mse-wide"]


def _weight_scales(model: Artifact) -> set[int]:
    """The numbers of scales of the 8-bit constants."""
    graph = onnx.load_model_from_string(model.data).graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in arrays]
    return {arrays[node.input[1]].size for node in nodes if arrays[node.input[0]].dtype == np.int8}


def test_what_runs_anywhere_needs_nothing(cnn: Artifact, data: Dataset) -> None:
    for machine in (VNNI, PLAIN):
        found, _ = derived_versions(cnn, data, IntegerChoice((RangeMethod.MIN_MAX,), False, smallest=True), machine)
        assert {version.requires for version in found} == {()}


@pytest.mark.parametrize("failure", [RuntimeError("a defect"), InvalidData("a defect"), Unsupported("a defect")])
def test_a_version_that_fails_does_not_end_the_others(
    cnn: Artifact, data: Dataset, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Artifact:
        raise failure

    monkeypatch.setattr(ways, "quantize_with", fail)
    found, notes = derived_versions(cnn, data, IntegerChoice((RangeMethod.MIN_MAX,)), VNNI)
    assert [version.calibration for version in found] == ["min-max-linear", "min-max-wide"]
    lost = [note for note in notes if "was not tried" in note]
    assert [note.partition(" was not")[0] for note in lost] == [
        "INT8 (tuned ranges)",
        "INT8 (tuned ranges, more operators)",
    ]
    assert all("a defect" in note for note in lost)


def test_a_check_that_fails_drops_one_version(cnn: Artifact, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Artifact] = []

    def fail(fp32: Artifact, made: Artifact, data: Dataset) -> None:
        calls.append(made)
        if len(calls) == 1:
            raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(versions, "check_explained", fail)
    methods = (RangeMethod.MIN_MAX, RangeMethod.MSE)
    found, notes = derived_versions(cnn, data, IntegerChoice(methods, careful=False), VNNI)
    assert len(calls) == len(found) + 1
    assert calls[0] not in [version.artifact for version in found]
    assert any(
        note.endswith("was dropped: internal error: ZeroDivisionError: float division by zero") for note in notes
    )


def test_why_there_are_none(cnn: Artifact, data: Dataset) -> None:
    def note(*arguments: object) -> str:
        found, (only,) = derived_versions(*arguments)  # type: ignore[arg-type]
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
    found, _ = derived_versions(model, make_dataset({"x": x}, None), IntegerChoice((RangeMethod.MIN_MAX,)), VNNI)
    assert found
    n = networks.Network()
    n.gemm(n.op("Log", n.gemm("x", 16, 8), name="logs"), 8, 4, name="y")
    model = n.artifact({"x": ["N", 16]}, {"y": ["N", 4]})
    with pytest.raises(InvalidData, match=r"'logs' becomes NaN or infinite in sample"):
        derived_versions(model, make_dataset({"x": x}, None), IntegerChoice((RangeMethod.MIN_MAX,)), VNNI)


def test_what_is_slower_in_an_engine_is_not_calibrated_for_it(cnn: Artifact, data: Dataset) -> None:
    speeds = iter(({"onnxruntime": 0.5, "openvino": 2.0}, {"onnxruntime": 0.6, "openvino": 0.7}))

    def look(fp32: Artifact, int8: Artifact, engines: tuple[str, ...]) -> dict[str, Interval]:
        assert (fp32, engines) == (cnn, ())
        return {name: Interval(value, 0.9 * value, 1.1 * value) for name, value in next(speeds).items()}

    choice = IntegerChoice((RangeMethod.MIN_MAX,), careful=False)
    found, notes = derived_versions(cnn, data, choice, VNNI, look=look)
    assert [(one.calibration, one.engines) for one in found] == [("min-max-linear", ("openvino",))]
    assert [note for note in notes if "slower than FP32" in note] == [
        f"INT8{place} was not calibrated for {engine}, because it is slower than FP32 there: {shown}"
        for place, engine, shown in (
            ("", "onnxruntime", "0.50x (0.45 … 0.55)"),
            (" (more operators)", "onnxruntime", "0.60x (0.54 … 0.66)"),
            (" (more operators)", "openvino", "0.70x (0.63 … 0.77)"),
        )
    ]


def test_if_nothing_is_faster_nothing_is_calibrated(
    cnn: Artifact, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated = []
    monkeypatch.setattr(ways, "quantize_with", lambda *_: calibrated.append(1))
    found, notes = derived_versions(
        cnn, data, IntegerChoice(), VNNI, look=lambda *_: {"onnxruntime": Interval(0.5, 0.4, 0.6)}
    )
    assert (found, calibrated) == ([], [])
    assert len(notes) == 2


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_when_time_is_short_only_a_quick_method_is_tried(share: float, cnn: Artifact, data: Dataset) -> None:
    clock = ManualClock()
    deadline = BuildDeadline(1.0, clock)
    clock.advance(share)
    found, notes = derived_versions(cnn, data, IntegerChoice((RangeMethod.MIN_MAX,)), VNNI, deadline=deadline)
    assert [version.calibration for version in found] == ["min-max-linear"]
    assert notes[-1].endswith("were not tried: there was no time within --budget")


def test_when_time_is_short_each_engine_has_a_quick_version_of_its_fastest_layout() -> None:
    clock = ManualClock()
    deadline = BuildDeadline(1.0, clock)
    speeds = {"linear": 1.1, "per-tensor": 1.5, "symmetric": 1.3}

    def look(_fp32: Artifact, model: Artifact, only: tuple[str, ...]) -> dict[str, Interval]:
        clock.advance(0.1)
        kind = {("onnxruntime",): "per-tensor", ("openvino",): "symmetric"}.get(only, "linear")
        return {engine: Interval(speeds[kind], 1.05, 1.6) for engine in only or ("onnxruntime", "openvino")}

    x = make_dataset({"x": np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}, None)
    choice = IntegerChoice((RangeMethod.MSE,), engines=("onnxruntime", "openvino"))
    found, notes = derived_versions(networks.mlp(256), x, choice, VNNI, look=look, deadline=deadline)
    assert {version.calibration: version.engines for version in found} == {
        "mse-linear-per-tensor": ("onnxruntime",),
        "mse-linear-symmetric": ("openvino",),
    }
    assert "INT8 (tuned ranges, per-tensor scales)" in notes[-1]


def test_when_time_is_short_and_the_first_method_fails_no_other_is_tried(
    cnn: Artifact, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise WrongResult("wrong", "")

    monkeypatch.setattr(versions, "check_explained", wrong)
    clock = ManualClock()
    deadline = BuildDeadline(1.0, clock)
    clock.advance(0.6)
    found, notes = derived_versions(cnn, data, IntegerChoice((RangeMethod.MIN_MAX,)), VNNI, deadline=deadline)
    assert found == []
    assert sum("was dropped" in note for note in notes) == 1


def test_when_time_is_short_fewer_layouts_are_timed(cnn: Artifact, data: Dataset) -> None:
    clock = ManualClock()
    deadline = BuildDeadline(100.0, clock)

    def look(*_: object) -> dict[str, Interval]:
        clock.advance(30.0)
        return {"onnxruntime": Interval(2.0, 1.9, 2.1)}

    choice = IntegerChoice((RangeMethod.MIN_MAX,), careful=False)
    found, notes = derived_versions(cnn, data, choice, VNNI, look=look, deadline=deadline)
    assert [version.calibration for version in found] == ["min-max-linear"]
    assert "INT8 (more operators) was not tried: there was no time within --budget" in notes


class Running(ManualClock):
    """A clock that advances by a second whenever it is read."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


@pytest.mark.parametrize(("budget_s", "count"), [(1e6, 160), (1000.0, 80), (60.0, 8)])
def test_calibration_takes_as_many_samples_as_the_budget_allows(cnn: Artifact, budget_s: float, count: int) -> None:
    data = make_dataset({"x": networks.images(160)}, None)
    _, some, notes = affordable(cnn, data, BuildDeadline(budget_s, Running()))
    assert some.count == count
    assert [note.partition(" samples")[0] for note in notes] == (
        [f"calibrated on {count} of 160"] if count < 160 else []
    )


def test_a_model_that_is_too_slow_for_the_budget_is_not_calibrated(cnn: Artifact) -> None:
    data = make_dataset({"x": networks.images(160)}, None)
    with pytest.raises(Unsupported, match=r"1\.0 s per sample, too long for --budget 50s"):
        affordable(cnn, data, BuildDeadline(50.0, Running()))


def test_a_layout_that_cannot_be_timed_is_still_tried(cnn: Artifact, data: Dataset) -> None:
    choice = IntegerChoice((RangeMethod.MIN_MAX,), careful=False)
    speeds = iter(({}, {"onnxruntime": Interval(2.0, 1.9, 2.1)}))
    found, _ = derived_versions(cnn, data, choice, VNNI, look=lambda *_: next(speeds))
    assert [version.calibration for version in found] == ["min-max-wide", "min-max-linear"]


def sequences(features: int = 12, hidden: int = 32) -> tuple[Artifact, Dataset]:
    """x (N, T, features) to y (N, 4): an LSTM over time, then a Gemm of its last state."""
    n = networks.Network()
    x = n.op("Transpose", "x", perm=[1, 0, 2])
    weights = [n.normal(1, 4 * hidden, size, fan_in=size) for size in (features, hidden)]
    n.nodes.append(onnx.helper.make_node("LSTM", [x, *weights], ["", "last"], hidden_size=hidden))
    n.gemm(n.op("Squeeze", "last", n.weight(np.array([0]))), hidden, 4, name="y")
    rows = np.random.default_rng(0).standard_normal((32, 6, features)).astype(np.float32)
    return n.artifact({"x": ["N", "T", features]}, {"y": ["N", 4]}), make_dataset({"x": rows}, None)


def operators(model: Artifact) -> set[str]:
    return {node.op_type for node in onnx.load_model_from_string(model.data).graph.node}


def test_recurrent_layers_have_versions_beside_calibrated_ones() -> None:
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True)
    made = {version.calibration: version for version in derived_versions(*sequences(), choice, VNNI)[0]}
    assert [name for name in made if name.endswith("-lstm")] == ["mse-linear-lstm", "mse-linear-per-tensor-lstm"]
    for name, version in made.items():
        recurrent = name == "dynamic" or name.endswith("-lstm")
        assert version.mixes_rows == recurrent == ("DynamicQuantizeLSTM" in operators(version.artifact))
        assert version.engines == (("onnxruntime",) if recurrent or "per-tensor" in name else version.engines)
    assert {"QuantizeLinear", "LSTM"} <= operators(made["mse-linear"].artifact)
    assert "dynamic" in made
    for lacking in (
        IntegerChoice((RangeMethod.MSE,), careful=False),
        IntegerChoice(choice.methods, False, True, engines=("openvino",)),
    ):
        found, _ = derived_versions(*sequences(), lacking, VNNI)
        assert not any(version.mixes_rows for version in found)


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_recurrent_layers_are_quantised_even_if_time_is_short(share: float) -> None:
    clock = ManualClock()
    deadline = BuildDeadline(1.0, clock)
    clock.advance(share)
    choice = IntegerChoice((RangeMethod.MSE,), dynamic=True)
    found, notes = derived_versions(*sequences(), choice, VNNI, deadline=deadline)
    names = [version.calibration for version in found]
    assert names[:2] == ["mse-linear", "mse-linear-lstm"]
    assert ("best-linear-per-tensor-lstm" in names) == (share < 0.25)
    late = notes[-1].removesuffix(" were not tried: there was no time within --budget")
    assert ("INT8 (tuned ranges, per-tensor scales, LSTM with ranges at run time)" in late) == (share > 0.25)


def test_a_model_of_only_recurrent_layers_has_a_dynamic_version() -> None:
    layer = stored_models.recurrent(inputs=32, hidden=32, direction="forward")
    data = make_dataset(stored_models.recurrent_inputs(layer, 24, 1), None)
    found, _ = derived_versions(layer, data, IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True), VNNI)
    assert [version.calibration for version in found] == ["dynamic"]


def test_a_quantised_model_with_recurrent_layers_is_left_alone() -> None:
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True)
    model, data = sequences()
    int8 = derived_versions(model, data, choice, VNNI)[0][0].artifact
    found, notes = derived_versions(int8, data, choice, VNNI)
    assert found == []
    assert "already quantised" in notes[-1]


@pytest.fixture(scope="module")
def encoder() -> tuple[Artifact, Dataset]:
    table = stored_models.embedding(stored_models.table(600, 32), outputs=16)
    return table, make_dataset({"ids": np.random.default_rng(0).integers(0, 600, (32, 4))}, None)


@pytest.mark.parametrize("smallest", [False, True])
def test_int8_versions_store_large_tables_in_int8(encoder: tuple[Artifact, Dataset], smallest: bool) -> None:
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, dynamic=True, smallest=smallest)
    found, notes = derived_versions(*encoder, choice, VNNI)
    int8 = [version for version in found if version.precision == "int8"]
    assert int8
    for version in int8:
        assert version.artifact.size_bytes < 0.4 * encoder[0].size_bytes
        assert version.artifact.provenance[-1].name == "store_weights"
    assert "INT8 versions store embedding tables, 97% of the model, in INT8" in notes


@pytest.mark.parametrize(("speed", "is_stored"), [(0.8, False), (0.97, True), (1.2, True)])
def test_tables_are_stored_unless_this_is_slower(
    encoder: tuple[Artifact, Dataset], speed: float, is_stored: bool
) -> None:
    def look(one: Artifact, other: Artifact, engines: tuple[str, ...]) -> dict[str, Interval]:
        value = 2.0 if one is encoder[0] else speed
        return {"onnxruntime": Interval(value, 0.95 * value, 1.05 * value)}

    choice = IntegerChoice((RangeMethod.MSE,), careful=False)
    found, notes = derived_versions(*encoder, choice, VNNI, look=look)
    assert {version.artifact.provenance[-1].name == "store_weights" for version in found} == {is_stored}
    assert any("INT8 tables are slower: 0.80x (0.76 … 0.84) on onnxruntime" in note for note in notes) != is_stored


def test_small_tables_stay(cnn: Artifact, data: Dataset) -> None:
    found, notes = derived_versions(cnn, data, IntegerChoice((RangeMethod.MSE,), careful=False), VNNI)
    assert all(version.artifact.provenance[-1].name != "store_weights" for version in found)
    assert not any("tables" in note for note in notes)


def test_the_smallest_models_also_only_store_weights(encoder: tuple[Artifact, Dataset]) -> None:
    choice = IntegerChoice((RangeMethod.MSE,), careful=False, smallest=True)
    found, _ = derived_versions(*encoder, choice, VNNI)
    stored = {version.precision: version for version in found if version.precision != "int8"}
    sizes = {name: version.artifact.size_bytes for name, version in stored.items()}
    assert sizes["int4-weights"] < sizes["int8-weights"] < sizes["fp16-weights"] < 0.6 * encoder[0].size_bytes
    assert not any(version.calibration or version.requires or version.mixes_rows for version in stored.values())
    fewer, _ = derived_versions(encoder[0], None, choice, VNNI)
    assert {version.precision for version in fewer} == stored.keys()
    small, notes = derived_versions(networks.mlp(8), None, choice, VNNI)
    assert small == []
    assert [note.split()[0] for note in notes[1:]] == ["int8-weights", "fp16-weights", "int4-weights"]
    assert all(version.precision == "int8" for version in derived_versions(*encoder, IntegerChoice(), VNNI)[0])
