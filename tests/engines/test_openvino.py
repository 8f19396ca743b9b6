from __future__ import annotations

import msgspec
import numpy as np
import pytest

pytest.importorskip("openvino", reason="the extra penstock[openvino] is not installed")

from pathlib import Path

import openvino

import models
import openvino_models
from conformance.engines import EngineConformance, OnnxConformance, in_memory
from penstock.artifact import Artifact
from penstock.engines.base import Severity
from penstock.engines.openvino import OpenVinoEngine, OpenVinoModel, capabilities
from penstock.errors import InvalidArgument, InvalidConfig, InvalidModel, Unsupported
from penstock.resources import machine_facts
from penstock.tensor import DataType

_32_BITS = "the CPU plug-in computes in 32 bits; the engine refuses such inputs"


class TestConformance(OnnxConformance):
    engine = OpenVinoEngine()
    rejects = True
    excluded = {
        "test_carries_every_datatype[BYTES]": "string tensors are left to ONNX Runtime",
        "test_integers_beyond_32_bits": _32_BITS,
        "test_64_bit_floats_keep_their_precision": "the CPU plug-in computes FP64 in FP32",
        "test_input_that_no_node_reads": "OpenVINO drops such an input, from the signature too",
    }


class TestIntermediateRepresentation(EngineConformance):
    engine = OpenVinoEngine()
    zoo = openvino_models
    rejects = True
    excluded = TestConformance.excluded

    def test_loads_from_memory_in_a_process_of_its_own(self) -> None:
        self.loads_apart(in_memory(self.zoo.linear()))


def test_an_ir_needs_its_weights_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "m.xml"
    path.write_bytes(openvino_models.linear().data)
    with pytest.raises(InvalidModel, match=r"'m\.bin' is missing.*put it in the model's folder"):
        OpenVinoEngine().load(Artifact.from_file(path), {})


def test_a_file_that_is_no_ir_is_not_tried_as_something_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.bin").touch()
    for data in (models.linear().data, b"node { name: 'x' }"):
        (tmp_path / "m.xml").write_bytes(data)
        with pytest.raises(InvalidModel, match=r"'m\.xml' is not an OpenVINO model"):
            OpenVinoEngine().load(Artifact.from_file(tmp_path / "m.xml"), {})
    (tmp_path / "m.xml").write_bytes(b"<net")
    with pytest.raises(InvalidModel) as caught:
        OpenVinoEngine().load(Artifact.from_file(tmp_path / "m.xml"), {})
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("datatype", [DataType.INT64, DataType.UINT64, DataType.UINT32], ids=lambda d: d.value)
def test_integers_that_would_be_cut_off_are_refused(datatype: DataType) -> None:
    model = OpenVinoEngine().load(models.increment(datatype), {})
    np.testing.assert_array_equal(model.forward({"x": np.array([5, 2**31 - 2], datatype.dtype)})["y"], [6, 2**31 - 1])
    with pytest.raises(InvalidArgument, match="input 'x' contains integers beyond 32 bits"):
        model.forward({"x": np.array([2**31], datatype.dtype)})


def test_string_tensors_name_the_engine_that_takes_them() -> None:
    with pytest.raises(Unsupported, match="'x' is a string tensor.*use the onnxruntime engine"):
        OpenVinoEngine().load(models.identity(DataType.BYTES), {})


def test_bfloat16_tensors_are_computed_on_not_only_passed_through() -> None:
    x = np.array([1.5, -3.25, 1000]).astype(DataType.BF16.dtype)
    y = OpenVinoEngine().load(models.increment(DataType.BF16), {}).forward({"x": x})["y"]
    assert y.dtype == DataType.BF16.dtype
    np.testing.assert_allclose(y.astype(np.float32), x.astype(np.float32) + 1, rtol=2**-8)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_precision_that_this_cpu_lacks_is_a_warning(precision: str) -> None:
    findings = OpenVinoEngine().validate(models.linear(), {"precision": precision})
    if precision.upper() in capabilities():
        assert findings == []
    else:
        assert [finding.severity for finding in findings] == [Severity.WARNING]
        assert precision in findings[0].message


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "f16"}], ids=str)
def test_options_change_answers_by_rounding_only(options: dict[str, object]) -> None:
    model = OpenVinoEngine().load(models.linear(), options)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(model.forward({"x": x})["y"], x @ models.linear_weight(), rtol=0.02, atol=0.02)


def test_streams_are_no_option_since_there_is_one_request() -> None:
    with pytest.raises(InvalidConfig, match="unknown option.*hint.*use one of: threads, precision"):
        OpenVinoEngine().load(models.linear(), {"hint": "throughput"})


WITHOUT_DOT_PRODUCT = msgspec.structs.replace(machine_facts(), isa=())


@pytest.mark.parametrize(("weight", "as_integers"), [(64, True), (127, False)])
def test_weights_of_7_bits_are_multiplied_as_integers_on_every_cpu(weight: int, as_integers: bool) -> None:
    model = OpenVinoEngine(WITHOUT_DOT_PRODUCT).load(models.product_of_bytes(weight), {"threads": 1})
    assert isinstance(model, OpenVinoModel)
    nodes = model._request.get_compiled_model().get_runtime_model().get_ops()  # type: ignore[union-attr]
    (product,) = [node.get_rt_info() for node in nodes if node.get_friendly_name() == "y"]
    assert (product["runtimePrecision"].astype(str) == "u8") is as_integers


def test_weights_that_openvino_itself_rounds_do_not_saturate(tmp_path: Path) -> None:
    op, rng = openvino.opset13, np.random.default_rng(0)
    x, ends, weight_ends = op.parameter([-1, 64], np.float32, name="x"), np.float32([0, 2.55]), np.float32([-1, 1])
    weight = rng.choice([-1.0, 1.0], (64, 8), p=[0.1, 0.9]).astype(np.float32)
    rounded = op.fake_quantize(op.constant(weight), *weight_ends, *weight_ends, 255)
    product = op.matmul(op.fake_quantize(x, *ends, *ends, 256), rounded, False, False)
    product.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([product], [x]), tmp_path / "m.xml")
    model = OpenVinoEngine(WITHOUT_DOT_PRODUCT).load(Artifact.from_file(tmp_path / "m.xml"), {"threads": 1})
    inputs = (rng.integers(128, 256, (16, 64)) / 100).astype(np.float32)
    np.testing.assert_allclose(model.forward({"x": inputs})["y"], inputs @ weight, rtol=1e-5)
