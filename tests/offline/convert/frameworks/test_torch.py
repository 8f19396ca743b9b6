"""The PyTorch converter: ONNX models give the outputs, and the intermediate values, of the torch models."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.zoo.torch import MODELS
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidInput, PenstockError, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, InputSpec, UnsupportedOperators
from penstock.offline.sessions import loaded
from penstock.tensor import DataType

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
nn = torch.nn

from penstock.offline.convert.frameworks.torch import CONVERTER  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)

QUICK = ("decision", "structured", "nested", "noisy", "script_decision", "program_counter")
"""Models that are converted in every run; they show one feature each."""
LEFT_OUT = {"noisy": ["OUTPUT__0"]}
"""Outputs that are random."""


def x(*shape: int | str, name: str = "x", datatype: DataType = DataType.FP32) -> InputSpec:
    return InputSpec(name, datatype, shape)


def opened(module, *inputs: InputSpec, **options):
    return CONVERTER.open(module, ConvertOptions(inputs=inputs, **options))


def feeds_of(source, size: int, seed: int) -> dict[str, np.ndarray]:
    """Plausible inputs whose free dimensions have ``size``."""
    generator, feeds = np.random.default_rng(seed), {}
    for spec in source.signature.inputs:
        low = {axis.index: axis.low for axis in source.axes.get(spec.name, ())}
        shape = [max(size, low[axis]) if dim < 0 else dim for axis, dim in enumerate(spec.shape)]
        made = generator.normal(size=shape) if spec.datatype.is_float else generator.integers(0, min(size, 2), shape)
        feeds[spec.name] = np.asarray(made, spec.datatype.dtype)
    return feeds


def run(path: Path, feeds: dict[str, np.ndarray], tensors: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The outputs of the ONNX model, and its inner ``tensors``."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    known = {value.name for value in model.graph.output}
    for tensor in dict.fromkeys(tensors):
        if tensor not in known:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(tensor))
    model = onnx.shape_inference.infer_shapes(model)
    types = {value.name: value for value in model.graph.value_info}
    for place, value in enumerate(model.graph.output):
        if value.name in types:
            model.graph.output[place].CopyFrom(types[value.name])
    with loaded(Artifact.from_bytes(model.SerializeToString()), as_written=True) as session:
        return session.forward(feeds)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name, model in MODELS.items()
        if not model.diagnosis
    ],
)
def test_zoo(name, tmp_path):
    model, target = MODELS[name], tmp_path / "model.onnx"
    source = CONVERTER.open(model.make(tmp_path), model.options)
    exported = source.export(target, 21)
    for size in (1, 2, 5) if "image" not in source.signature.input_names else (8, 16):
        feeds = feeds_of(source, size, seed=size)
        if (size, name) == (1, "norms"):
            continue  # torch normalises no instance of one value
        wanted, tensors = source.forward(feeds), tuple(link.tensor for link in exported.links)
        found = run(target, feeds, tensors)
        values = source.values(feeds, [link.source for link in exported.links])
        pairs = [(output, found[output], wanted[output]) for output in wanted if output not in LEFT_OUT.get(name, ())]
        pairs += [
            (link.tensor, found[link.tensor], values[link.source]) for link in exported.links if link.source in values
        ]
        for tensor, got, want in pairs:
            if name != "noisy" or tensor == "OUTPUT__1":
                np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=f"{tensor} for size {size}")
    source.close()


def test_every_operator_without_a_conversion_is_listed_with_its_line(tmp_path):
    model = MODELS["unconvertible"]
    source = CONVERTER.open(model.make(tmp_path), model.options)
    with pytest.raises(UnsupportedOperators, match="2 operator") as caught:
        source.export(tmp_path / "model.onnx", 21)
    assert [one.op for one in caught.value.operators] == ["aten::_linalg_svd", "aten::special_i1"]
    assert all("torch_modules.py" in one.where and "register_op" in one.way_out for one in caught.value.operators)
    assert not list(tmp_path.iterdir())


class Affine(nn.Module):
    """Is in training mode, and behaves differently there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return {"scores": self.norm(self.layer(x)), "mean": x.mean(1)}


def test_links_name_layers_and_lines(tmp_path):
    source = opened(Affine(), x("N", 4))
    exported = source.export(tmp_path / "model.onnx", 21)
    assert exported.exporter.startswith("torch.onnx dynamo 2")
    assert any("layer 'norm'" in link.where and "test_torch.py:" in link.where for link in exported.links)


def test_free_dimensions_have_the_users_names(tmp_path):
    source = opened(Affine(), x("batch", 4))
    source.export(tmp_path / "model.onnx", 21)
    assert source.axes == {"x": (Axis(0, "batch"),)}
    assert [spec.shape for spec in source.signature.outputs] == [(-1, 3), (-1,)]
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in (*graph.input, *graph.output)] == ["batch"] * 3


def test_a_module_in_training_mode_is_converted_in_inference_mode(tmp_path):
    module = Affine().train()
    source = opened(module, x("N", 4))
    exported = source.export(tmp_path / "model.onnx", 21)
    assert "training mode" in exported.warnings[0]
    feeds = feeds_of(source, 2, 0)
    np.testing.assert_allclose(
        run(tmp_path / "model.onnx", feeds)["scores"], source.forward(feeds)["scores"], atol=1e-5
    )
    source.close()
    assert module.training
    assert module.norm.training
    assert module.norm.num_batches_tracked == 0


def test_only_wanted_outputs_are_kept(tmp_path):
    source = opened(Affine(), x("N", 4), outputs=("mean",))
    source.export(tmp_path / "model.onnx", 21)
    assert source.signature.output_names == ["mean"]
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node] == ["ReduceMean"]
    with pytest.raises(InvalidArgument, match="no outputs") as caught:
        opened(Affine(), x("N", 4), outputs=("logits",))
    assert "scores" in caught.value.hint


def test_only_wanted_outputs_of_a_program_are_kept(tmp_path):
    program = torch.export.export(Affine().eval(), (torch.ones(2, 4),))
    source = CONVERTER.open(program, ConvertOptions(outputs=("mean",), inputs=(InputSpec("image", None, None),)))
    source.export(tmp_path / "model.onnx", 21)
    assert source.signature.input_names == ["image"]
    feeds = feeds_of(source, 2, 0)
    np.testing.assert_allclose(run(tmp_path / "model.onnx", feeds)["mean"], source.forward(feeds)["mean"], atol=1e-6)


def test_calls_do_not_depend_on_earlier_calls(tmp_path):
    source = CONVERTER.open(MODELS["counter"].make(tmp_path), MODELS["counter"].options)
    feeds = feeds_of(source, 2, 0)
    first, second = source.forward(feeds), source.forward(feeds)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert "['calls', 'mean']" in source.export(tmp_path / "model.onnx", 21).warnings[0]


def test_a_sample_of_one_row_with_a_free_axis(tmp_path):
    sample = {"x": np.ones((1, 4), np.float32)}
    source = CONVERTER.open(Affine(), ConvertOptions(sample=sample, dynamic={"x": {0: "N"}}))
    source.export(tmp_path / "model.onnx", 21)
    assert run(tmp_path / "model.onnx", {"x": np.ones((3, 4), np.float32)})["mean"].shape == (3,)


def test_an_old_opset_is_written_by_torchscript(tmp_path):
    source = opened(Affine(), x("N", 4))
    exported = source.export(tmp_path / "model.onnx", 15)
    assert exported.exporter.startswith("torch.onnx traced")
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 15
    feeds = feeds_of(source, 3, 0)
    values = source.values(feeds, [link.source for link in exported.links])
    found = run(tmp_path / "model.onnx", feeds, tuple(link.tensor for link in exported.links))
    assert len(values) == 2
    for link in exported.links:
        np.testing.assert_allclose(found[link.tensor], values[link.source], atol=1e-5)


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None = None


class Packed(nn.Module):
    def forward(self, pair: Pair, rest: list[torch.Tensor], scale: float = 2.0):
        assert isinstance(pair, Pair)
        assert isinstance(rest, list)
        return pair.left * scale + rest[0] - rest[1], None, {"size": pair.left.shape[0]}


def test_arguments_are_nested_as_annotated(tmp_path):
    names = ("pair__left", "rest__0", "rest__1")
    source = opened(Packed(), *(x("N", 2, name=name) for name in names))
    source.export(tmp_path / "model.onnx", 21)
    assert source.signature.output_names == ["OUTPUT__0", "OUTPUT__2__size"]
    feeds = feeds_of(source, 3, 0)
    found = run(tmp_path / "model.onnx", feeds)
    np.testing.assert_allclose(found["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"])
    assert found["OUTPUT__2__size"] == 3


def test_functions_and_functions_that_make_modules(tmp_path):
    for given in (lambda x: x.relu() + 1, Affine, functools.partial(Affine), torch.jit.script(Affine())):
        source = opened(given, x("N", 4))
        source.export(tmp_path / "model.onnx", 21)
        assert source.forward(feeds_of(source, 2, 0))


@pytest.mark.parametrize(
    ("inputs", "message", "hint"),
    [
        ((), "does not say which inputs", '--inputs "x:float32'),
        ((x("N", 4, name="a"), x("N", 4, name="b")), "takes 1", ""),
        ((x("N", 5),), "rejects the inputs", "--sample"),
        ((InputSpec("x", None, None),), "shape of input 'x' is unknown", "[N,4]"),
        ((x("N", 4, datatype=DataType.BYTES),), "strings", ""),
        ((x("N", 4, datatype=DataType.INT64),), "rejects the inputs", "--inputs"),
    ],
)
def test_wrong_inputs(inputs, message, hint):
    module = nn.Sequential(Affine()) if not inputs else Affine()
    with pytest.raises(InvalidArgument, match=message) as caught:
        opened(module, *inputs)
    assert (hint.replace("x:", "input:") if not inputs else hint) in caught.value.hint


def test_missing_inputs_are_named():
    with pytest.raises(InvalidArgument, match="needs the inputs \\['rest'\\]"):
        opened(Packed(), x("N", 2, name="pair__left"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: None, "returns no tensors"),
        (lambda x: "text", "returns a str"),
        (torch.fft.fft, "complex64"),
    ],
)
def test_outputs_that_onnx_cannot_return(function, message):
    with pytest.raises(Unsupported, match=message):
        opened(function, x("N", 4))


def test_inputs_that_the_module_rejects():
    source = opened(Affine(), x("N", 4))
    with pytest.raises(InvalidInput):
        source.forward({})
    with pytest.raises(InvalidInput, match="RuntimeError"):
        source.forward({"x": np.ones((2, 5), np.float32)})


def test_a_decision_on_values_that_cannot_be_scripted_is_diagnosed(tmp_path):
    def decide(x):
        return x * 2 if x.sum().item() > 0 and [].__class__ else x

    source = opened(decide, x("N", 4))
    with pytest.raises(PenstockError, match="depends on the values of a tensor") as caught:
        source.export(tmp_path / "model.onnx", 21)
    assert "test_torch.py" in caught.value.message
    assert "torch.cond" in caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("datatype", [DataType.BOOL, DataType.FP32])
def test_queries_without_keys_give_0(datatype, tmp_path):
    def attend(q, mask):
        return nn.functional.scaled_dot_product_attention(q, q, q, mask)

    source = opened(attend, x("N", 2, "L", 4, name="q"), x("N", 1, 1, "L", name="mask", datatype=datatype))
    source.export(tmp_path / "model.onnx", 21)
    kept = np.array([[0, 0, 0], [1, 0, 1]], bool).reshape(2, 1, 1, 3)
    mask = kept if datatype is DataType.BOOL else np.where(kept, 0, -np.inf).astype(np.float32)
    feeds = {"q": np.ones((2, 2, 3, 4), np.float32), "mask": mask}
    found, wanted = run(tmp_path / "model.onnx", feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"]
    assert not found[0].any()
    np.testing.assert_allclose(found, wanted)


def test_a_decision_on_a_size_holds_for_small_sizes(tmp_path):
    class Short(nn.Module):
        def forward(self, x):
            if x.shape[1] > 4:
                return x * 2
            return x + 10

    source = opened(Short(), x("N", "L"))
    exported = source.export(tmp_path / "model.onnx", 21)
    assert exported.exporter.startswith("torch.onnx scripted")
    for size in (1, 3, 4, 5, 40):
        feeds = {"x": np.ones((2, size), np.float32)}
        np.testing.assert_allclose(run(tmp_path / "model.onnx", feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"])


def test_nothing_is_printed(tmp_path, capfd):
    source = CONVERTER.open(MODELS["decision"].make(tmp_path), MODELS["decision"].options)
    source.export(tmp_path / "model.onnx", 21)
    unconvertible = MODELS["unconvertible"]
    with pytest.raises(UnsupportedOperators):
        CONVERTER.open(unconvertible.make(tmp_path), unconvertible.options).export(tmp_path / "model.onnx", 21)
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("always")
def test_warnings_of_torch_are_not_shown(tmp_path, recwarn):
    class Warning(nn.Module):
        def forward(self, x):
            return nn.functional.softmax(x) * nn.functional.mse_loss(x, x[:1])

    source = opened(Warning(), x("N", 4))
    source.export(tmp_path / "model.onnx", 21)
    source.forward({"x": np.ones((3, 4), np.float32)})
    assert [str(one.message) for one in recwarn] == []


def test_group_normalisation_of_a_blank_image(tmp_path):
    source = opened(nn.GroupNorm(2, 4), x("N", 4, "H", "W"))
    source.export(tmp_path / "model.onnx", 21)
    generator = np.random.default_rng(0)
    for image in (np.full((1, 4, 64, 64), 7.7), generator.normal(size=(2, 4, 8, 8))):
        feeds = {"x": image.astype(np.float32)}
        found = run(tmp_path / "model.onnx", feeds)["OUTPUT__0"]
        np.testing.assert_allclose(found, source.forward(feeds)["OUTPUT__0"], atol=0.5 if len(image) == 1 else 1e-5)
