from collections import Counter

import numpy as np
import onnx
import pytest

from penstock.artifact import Artifact
from penstock.errors import InvalidModel, Unsupported
from penstock.offline.optimize.model import from_proto, load_model, read_proto, to_artifact, to_proto

TEXT = "agraph (float[N, 2] x) => (float[N, 2] y) { a = Relu(x)\n b = Relu(a)\n y = Add(b, k) }"


@pytest.fixture
def artifact(parse, weights):
    return parse(TEXT, k=weights(2))


@pytest.fixture
def external(artifact, tmp_path):
    """Save the model with its weights in ``weights.bin``, and with ``location`` as their recorded location."""

    def save(location="weights.bin", written=True):
        folder = tmp_path / "model"
        folder.mkdir()
        proto = onnx.load_model_from_string(artifact.data)
        (tensor,) = proto.graph.initializer
        if written:
            (folder / location).write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
        return Artifact.from_file(folder / "model.onnx")

    return save


def test_reads_and_writes_the_same_model(artifact):
    model = load_model(artifact)
    assert Counter(node.op_type for node in model.graph.all_nodes()) == {"Add": 1, "Relu": 2}
    assert to_artifact(load_model(to_artifact(model))) == to_artifact(model)


@pytest.mark.parametrize("data", [b"no model at all", bytes(range(256)), b""], ids=["text", "binary", "nothing"])
def test_refuses_what_is_no_model(data):
    with pytest.raises(InvalidModel) as caught:
        load_model(Artifact.from_bytes(data))
    assert caught.value.hint


def test_refuses_every_truncation(artifact):
    for length in range(0, len(artifact.data) - 1, 7):
        with pytest.raises(InvalidModel):
            load_model(Artifact.from_bytes(artifact.data[:length]))


def test_refuses_what_the_checker_refuses(artifact):
    proto = onnx.load_model_from_string(artifact.data)
    proto.graph.node[0].op_type = "Rleu"
    with pytest.raises(InvalidModel, match=r"onnx.checker rejects.*Rleu"):
        load_model(Artifact.from_bytes(proto.SerializeToString()))


def test_embeds_external_data(external, artifact):
    model = load_model(external())
    want = load_model(artifact).graph.initializers["k"].const_value.numpy()
    np.testing.assert_array_equal(model.graph.initializers["k"].const_value.numpy(), want)


def test_embeds_external_data_of_attributes(tmp_path, parse):
    text = "agraph (float[2] x) => (float[2] y) { k = Constant<value = float[2] {1.0, 2.0}>()\n y = Mul(x, k) }"
    proto = onnx.load_model_from_string(parse(text).data)
    tensor = proto.graph.node[0].attribute[0].t
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="k.bin")
    (tmp_path / "k.bin").write_bytes(np.array([3, 4], np.float32).tobytes())
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    model = load_model(Artifact.from_file(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(model.graph.node(0).attributes["value"].as_tensor().numpy(), [3, 4])


def test_external_data_must_lie_in_the_models_folder(external, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(8))
    with pytest.raises(InvalidModel, match="outside the model's folder"):
        load_model(external("../secret", written=False))


def test_external_data_may_not_leave_by_a_link(external, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(8))
    artifact = external("link", written=False)
    (tmp_path / "model" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidModel, match="outside the model's folder"):
        load_model(artifact)


def test_external_data_that_is_missing_or_short(external, tmp_path):
    artifact = external(written=False)
    with pytest.raises(InvalidModel, match=r"'weights.bin' of 'k' is missing"):
        load_model(artifact)
    (tmp_path / "model" / "weights.bin").write_bytes(b"123")
    with pytest.raises(InvalidModel):
        load_model(artifact)


def test_external_data_of_bytes_without_a_path(external):
    with pytest.raises(InvalidModel, match="path is not known"):
        load_model(Artifact.from_bytes(external().data))


def test_an_external_file_of_another_size_is_invalid(external, tmp_path):
    artifact = external()
    with (tmp_path / "model" / "weights.bin").open("wb") as file:
        file.truncate(3 << 30)  # sparse: takes no room on the disk
    with pytest.raises(InvalidModel, match="but 'weights.bin' has 3221225472 at byte 0"):
        load_model(artifact)


def test_sparse_initialisers_are_unsupported(artifact):
    proto = onnx.load_model_from_string(artifact.data)
    proto.graph.sparse_initializer.add()
    with pytest.raises(Unsupported, match="sparse"):
        load_model(Artifact.from_bytes(proto.SerializeToString()))


def test_weights_that_old_models_list_as_inputs_are_no_inputs(artifact):
    proto = onnx.load_model_from_string(artifact.data)
    proto.ir_version = 3
    proto.graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info("k", onnx.TensorProto.FLOAT, [2]))
    model = load_model(Artifact.from_bytes(proto.SerializeToString()))
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert model.ir_version == 4


def test_counts_nodes_of_subgraphs(parse):
    text = """agraph (float[N, 3] x, bool flag) => (float[N, 3] y) {
        y = If (flag) <
            then_branch = t () => (float[N, 3] t1) { t1 = Relu(x) },
            else_branch = e () => (float[N, 3] e1) { e1 = Neg(x) }
        >
    }"""
    nodes = load_model(parse(text)).graph.all_nodes()
    assert Counter(node.op_type for node in nodes) == {"If": 1, "Neg": 1, "Relu": 1}


def zipped(kind: onnx.TypeProto) -> Artifact:
    """A classifier whose probabilities are an output of type ``kind``, one map per row."""
    maps = onnx.helper.make_node("ZipMap", ["x"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[7, 3])
    relu = onnx.helper.make_node("Relu", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["N", 2]) for name in "xy")
    graph = onnx.helper.make_graph([relu, maps], "g", [x], [y, onnx.helper.make_value_info("maps", kind)])
    sets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    made = onnx.helper.make_model(graph, opset_imports=sets, ir_version=8)
    return Artifact.from_bytes(made.SerializeToString())


def test_keeps_the_type_of_an_output_of_maps():
    row = onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(1, []))
    proto = read_proto(zipped(onnx.helper.make_sequence_type_proto(row)))
    before = proto.SerializeToString(deterministic=True)
    made = to_proto(from_proto(proto))
    assert list(made.graph.output) == list(proto.graph.output)
    onnx.checker.check_model(made)
    assert proto.SerializeToString(deterministic=True) == before


def test_says_why_a_model_cannot_be_read(artifact, monkeypatch):
    def fail(proto):
        try:
            raise NotImplementedError("no such type")
        except NotImplementedError as error:
            raise RuntimeError("Error calling f with: 1234") from error

    monkeypatch.setattr("onnx_ir.from_proto", fail)
    with pytest.raises(InvalidModel, match="the model cannot be read: no such type"):
        load_model(artifact)
