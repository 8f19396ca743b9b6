"""SavedModels, Keras models and frozen graphs: ONNX Runtime gives the outputs of TensorFlow."""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

pytest.importorskip("tf2onnx")
tf = pytest.importorskip("tensorflow")
import keras  # noqa: E402

from benchmarks.zoo.tensorflow import MODELS  # noqa: E402
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, PenstockError, PermissionDenied, Unsupported  # noqa: E402
from penstock.offline.convert.base import ConvertOptions, FrameworkModel, InputSpec, UnsupportedOperators  # noqa: E402
from penstock.offline.convert.frameworks.tensorflow import CONVERTER  # noqa: E402
from penstock.tensor import DataType, Signature  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

_WORDS = np.array(["cat", "zebra", "bird"], object)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def opened(name: str, folder: Path, **options: Any) -> FrameworkModel:
    model = MODELS[name]
    place = folder / name
    place.mkdir(exist_ok=True)
    source: Any = model.make(place)
    if isinstance(source, str):
        module, _, made = source.partition(":")
        source = getattr(importlib.import_module(module), made)()
    return CONVERTER.open(source, ConvertOptions(**options) if options else model.options)


def inputs_for(signature: Signature, rows: int = 3, size: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {}
    for spec in signature.inputs:
        shape = [dim if dim >= 0 else size if axis else rows for axis, dim in enumerate(spec.shape)]
        if spec.datatype is DataType.BYTES:
            made[spec.name] = np.resize(_WORDS, shape)
        elif spec.datatype.is_float:
            made[spec.name] = rng.normal(size=shape).astype(spec.datatype.dtype)
        else:
            made[spec.name] = rng.integers(0, 4, shape).astype(spec.datatype.dtype)
    return made


def run(path: Path | bytes, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    read = {one.name for one in session.get_inputs()}
    values = session.run(None, {name: array for name, array in inputs.items() if name in read})
    return dict(zip([one.name for one in session.get_outputs()], values, strict=True))


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.diagnosis])
def test_the_outputs_and_linked_values_are_those_of_tensorflow(name: str, folder: Path) -> None:
    model = opened(name, folder)
    target = folder / f"{name}.onnx"
    exported = model.export(target, 21)
    written = onnx.load(target)
    onnx.checker.check_model(written, full_check=True)
    assert next(one.version for one in written.opset_import if not one.domain) == 21
    assert [one.name for one in written.graph.input] == model.signature.input_names
    assert [one.name for one in written.graph.output] == model.signature.output_names
    random = {"noisy"} if exported.random else set()
    for rows, size in ((1, 9), (4, 6)):
        inputs = inputs_for(model.signature, rows, size)
        want, got = model.forward(inputs), run(target, inputs)
        assert want.keys() == got.keys()
        for output in want.keys() - random:
            np.testing.assert_allclose(got[output], want[output], rtol=1e-4, atol=1e-5)
    if exported.links and not random:
        _check_links(model, written, exported.links, inputs)


def _check_links(model: FrameworkModel, written: onnx.ModelProto, links: Any, inputs: Mapping[str, np.ndarray]) -> None:
    del written.graph.output[:]
    written.graph.output.extend(onnx.ValueInfoProto(name=link.tensor) for link in links)
    ours, theirs = run(written.SerializeToString(), inputs), model.values(inputs, [link.source for link in links])
    assert len(theirs) == len({link.source for link in links})
    for link in links:
        np.testing.assert_allclose(ours[link.tensor], theirs[link.source], rtol=1e-3, atol=1e-4, err_msg=link.tensor)


def test_unsupported_operators_are_listed_all_at_once(folder: Path) -> None:
    model = opened("saved_unsupported", folder)
    with pytest.raises(UnsupportedOperators) as caught:
        model.export(folder / "unsupported.onnx", 21)
    assert {one.op for one in caught.value.operators} == {"Svd", "BesselI0e"}
    assert not (folder / "unsupported.onnx").exists()


def test_an_operator_from_the_users_file_is_used(folder: Path, tmp_path: Path) -> None:
    ops = tmp_path / "my_ops.py"
    ops.write_text(
        "from tf2onnx.handler import tf_op\n"
        "@tf_op(['Svd', 'BesselI0e'])\n"
        "class Handler:\n"
        "    @classmethod\n"
        "    def version_1(cls, ctx, node, **kwargs):\n"
        "        node.type = 'Identity'\n"
        "        for name in list(node.attr):\n"
        "            del node.attr[name]\n"
    )
    model = opened("saved_unsupported", folder, ops=ops, outputs=("root",))
    model.export(tmp_path / "model.onnx", 21)
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node] == ["Identity"]


def test_a_broken_file_of_operators_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text("1 / 0\n")
    with pytest.raises(InvalidArgument, match=r"'my_ops.py' fails: ZeroDivisionError"):
        opened("saved_linear", folder, ops=tmp_path / "my_ops.py")


def test_random_operators_are_named(folder: Path) -> None:
    exported = opened("saved_random", folder).export(folder / "random.onnx", 21)
    assert exported.random == ("RandomStandardNormal at random_normal/RandomStandardNormal",)


def test_lambda_layers_need_trust(folder: Path) -> None:
    with pytest.raises(PermissionDenied, match="Lambda layer 'twice'"):
        opened("keras_lambda", folder)
    model = opened("keras_lambda", folder, trust_pickle=True)
    (got,) = model.forward({"x": np.ones((1, 4), np.float32)}).values()
    assert got.tolist() == [[2.0, 2.0, 2.0, 2.0]]


def test_the_part_of_a_polyglot_that_keras_loads_is_scanned(tmp_path: Path) -> None:
    """HDF5 with an archive appended: the suffix decides which of them Keras loads."""
    harmless = tmp_path / "harmless.h5"
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save(harmless)
    hostile = tmp_path / "hostile.h5"
    shape = {"output_shape": (3,)}
    hostile_model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x, name="evil", **shape)])
    hostile_model.save(hostile)
    hostile_model.save(tmp_path / "hostile.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save(tmp_path / "harmless.keras")
    for suffix, first, second in ((".h5", hostile, "harmless.keras"), (".keras", harmless, "hostile.keras")):
        polyglot = tmp_path / f"polyglot{suffix}"
        polyglot.write_bytes(first.read_bytes() + (tmp_path / second).read_bytes())
        with pytest.raises(PermissionDenied, match="Lambda layer 'evil'"):
            CONVERTER.open(polyglot, ConvertOptions())


def test_classes_outside_keras_need_trust(folder: Path, tmp_path: Path) -> None:
    opened("keras_signal", folder)
    hostile = tmp_path / "hostile.keras"
    with zipfile.ZipFile(folder / "keras_signal" / "model.keras") as source, zipfile.ZipFile(hostile, "w") as made:
        for name in source.namelist():
            data = source.read(name)
            if name == "config.json":
                config = json.loads(data)
                config["config"]["layers"][1] |= {"module": "subprocess", "class_name": "Popen"}
                data = json.dumps(config).encode()
            made.writestr(name, data)
    with pytest.raises(PermissionDenied, match="class subprocess.Popen"):
        CONVERTER.open(hostile, ConvertOptions())
    with pytest.raises(PenstockError, match="cannot load|does not have"):
        CONVERTER.open(hostile, ConvertOptions(trust_pickle=True))


def test_inputs_can_be_fixed_and_named(folder: Path, tmp_path: Path) -> None:
    inputs = (InputSpec("image", DataType.FP32, ("n", 12, 12, 3)),)
    model = opened("keras_cnn", folder, inputs=inputs)
    assert model.signature.inputs[0].shape == (-1, 12, 12, 3)
    assert [axis.name for axis in model.axes["image"]] == ["n"]
    model.export(tmp_path / "model.onnx", 18)
    (image,) = onnx.load(tmp_path / "model.onnx").graph.input
    assert [dim.dim_param or dim.dim_value for dim in image.type.tensor_type.shape.dim] == ["n", 12, 12, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": (InputSpec("picture", None, None),)}, "no input 'picture'"),
        ({"inputs": (InputSpec("image", DataType.INT64, None),)}, "type float32 in the model, not INT64"),
        ({"inputs": (InputSpec("image", None, (1, 8, 8, 4)),)}, r"shape \(None, None, None, 3\) in the model"),
        ({"inputs": (InputSpec("image", None, (1, 8)),)}, r"but \(1, 8\) was declared"),
        ({"dynamic": {"image": {3: "channels"}}}, "dimension 3 of the input 'image' cannot be free"),
        ({"dynamic": {"image": {9: "x"}}}, "dimension 9 of the input 'image' cannot be free"),
        ({"outputs": ("mask",)}, "no output 'mask'"),
    ],
)
def test_options_that_contradict_the_model_are_rejected(options: Any, message: str, folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        opened("keras_cnn", folder, **options)


def test_a_subclassed_model_needs_its_inputs(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not tell its inputs") as caught:
        CONVERTER.open(importlib.import_module("benchmarks.zoo.tensorflow").subclassed(), ConvertOptions())
    assert '--inputs "features:float32' in caught.value.hint


def test_outputs_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    model = opened("keras_two_inputs", folder, outputs=("score",))
    model.export(tmp_path / "model.onnx", 21)
    assert [one.name for one in onnx.load(tmp_path / "model.onnx").graph.output] == ["score"]


def test_inputs_that_the_model_rejects_are_reported_as_such(folder: Path) -> None:
    model = opened("keras_two_inputs", folder)
    with pytest.raises(InvalidInput):
        model.forward({"ids": np.zeros((2, 6), np.int32), "price": np.zeros((3, 1), np.float32)})


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04", b"\x08\x01\x12\xff\xff\xff\xff\x0f"]
)
@pytest.mark.parametrize("suffix", [".pb", ".keras", ".h5"])
def test_broken_files_are_rejected(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises((InvalidModel, Unsupported)):
        CONVERTER.open(path, ConvertOptions())


@pytest.mark.parametrize("name", ["keras_cnn", "keras_h5", "saved_linear", "graph_cond"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.98])
def test_truncated_models_are_rejected(name: str, share: float, folder: Path, tmp_path: Path) -> None:
    (folder / name).mkdir(exist_ok=True)
    path = Path(str(MODELS[name].make(folder / name)))
    cut = path / "saved_model.pb" if path.is_dir() else path
    data = cut.read_bytes()
    try:
        cut.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(PenstockError):
            CONVERTER.open(path, ConvertOptions())
    finally:
        cut.write_bytes(data)


def test_a_graph_with_variables_is_not_frozen(tmp_path: Path) -> None:
    with tf.compat.v1.Graph().as_default() as graph:
        tf.compat.v1.get_variable("weight", [2], use_resource=True)
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    with pytest.raises(InvalidModel, match="not frozen: it has 1 variables, such as 'weight'"):
        CONVERTER.open(tmp_path / "model.pb", ConvertOptions())


def test_the_outputs_of_a_graph_can_be_named(folder: Path, tmp_path: Path) -> None:
    model = opened("graph_cnn", folder, outputs=("Relu6",))
    model.export(tmp_path / "model.onnx", 21)
    assert model.signature.output_names == ["Relu6"]
    with pytest.raises(InvalidArgument, match="no tensor of this name"):
        opened("graph_cnn", folder, outputs=("nothing",))


def test_functions_of_the_user_are_converted(tmp_path: Path) -> None:
    inputs = (InputSpec("x", DataType.FP32, ("n", 3)), InputSpec("scale", DataType.FP32, ()))
    model = CONVERTER.open(
        lambda x, scale: {"log": tf.math.log1p(x) * scale, "exp": tf.math.expm1(x)}, ConvertOptions(inputs=inputs)
    )
    model.export(tmp_path / "model.onnx", 21)
    x = np.array([[1e-8, 0.0, 3.0], [-1.0, np.inf, 1e-3], [-1e-9, 80.0, -0.5]], np.float32)
    call = {"x": x, "scale": np.array(1.0, np.float32)}
    want, got = model.forward(call), run(tmp_path / "model.onnx", call)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


def test_old_opsets_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="opset 9"):
        opened("saved_linear", folder).export(tmp_path / "model.onnx", 9)
