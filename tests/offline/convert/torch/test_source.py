"""Modules and programs as sources: modes, outputs, and inputs that they reject."""

import typing

import numpy as np
import onnx
import pytest

import penstock
from penstock.errors import InvalidArgument, InvalidInput, Unsupported
from penstock.offline.convert.base import ConvertOptions, InputSpec

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import CONVERTER, Affine, feeds_of, opened, run, torch, x

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


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
    with pytest.raises(InvalidArgument, match="no output 'logits'") as caught:
        opened(Affine(), x("N", 4), outputs=("logits",))
    assert "scores" in caught.value.hint


def test_only_wanted_outputs_of_a_program_are_kept(tmp_path):
    program = torch.export.export(Affine().eval(), (torch.ones(2, 4),))
    source = CONVERTER.open(program, ConvertOptions(outputs=("mean",), inputs=(InputSpec("image", None, None),)))
    source.export(tmp_path / "model.onnx", 21)
    assert source.signature.input_names == ["image"]
    feeds = feeds_of(source, 2, 0)
    np.testing.assert_allclose(run(tmp_path / "model.onnx", feeds)["mean"], source.forward(feeds)["mean"], atol=1e-6)


def program_of_free_rows():
    return torch.export.export(
        Affine().eval(), (torch.ones(2, 4),), dynamic_shapes={"x": {0: torch.export.Dim("rows")}}
    )


@pytest.mark.parametrize("given", [{"dynamic": {"x": {0: "batch"}}}, {"inputs": ["x:float32[batch,4]"]}])
def test_a_free_dimension_of_a_program_has_the_name_that_the_user_gives(given):
    made = penstock.convert(program_of_free_rows(), **given)
    assert (made.axes["x"], made.axes["mean"], made.signature.inputs[0].shape) == (["batch", ""], ["batch"], (-1, 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dynamic": {"x": {1: "width"}}}, "axis 1 of input 'x' is declared as free \\('width'\\), but .* to 4"),
        ({"inputs": ["x:float32[N,width]"]}, "axis 1 of input 'x' is declared as free"),
        ({"inputs": ["x:float32[N,8]"]}, "axis 1 of input 'x' is declared as the size 8, but .* to 4"),
        ({"inputs": ["x:float32[N,4,1]"]}, "2 dimension\\(s\\), but 3 are declared"),
        ({"inputs": ["x:float64[N,4]"]}, "declared as FP64, but the program takes FP32"),
        ({"dynamic": {"x": {3: "width"}}}, "no axis 3"),
    ],
)
def test_what_a_program_fixes_cannot_be_declared_otherwise(given, message):
    with pytest.raises(InvalidArgument, match=message):
        penstock.convert(program_of_free_rows(), **given)


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
    with pytest.raises(InvalidInput, match="wrong shape \\[2, 5\\]"):
        source.forward({"x": np.ones((2, 5), np.float32)})
    with pytest.raises(InvalidInput, match="RuntimeError"):  # Linear rejects a size that the declaration leaves free
        opened(Affine(), x("N", "width"), sample={"x": np.ones((2, 4), np.float32)}).forward(
            {"x": np.ones((2, 5), np.float32)}
        )


class Halves(nn.Module):
    def forward(self, x):
        return x.reshape(2, -1)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_of_a_sample_is_free(batch):
    made = penstock.convert(Affine().eval(), sample={"x": np.ones((batch, 4), np.float32)})
    assert (made.axes["x"], made.axes["mean"], made.warnings) == (["batch", ""], ["batch"], ())


def test_sizes_of_a_sample_that_are_fixed_are_reported_with_the_option_that_frees_them():
    made = penstock.convert(Halves().eval(), sample={"x": np.ones((2, 4), np.float32)})
    assert made.axes["x"] == ["", ""]
    (warning,) = (one for one in made.warnings if "sizes of the sample" in one)
    assert "--dynamic x:0=batch" in warning


class Step(nn.Module):
    def forward(self, x, h):
        return {"y": x + h, "h": h + 1}


def test_an_output_with_the_name_of_an_input_gets_another():
    made = penstock.convert(Step().eval(), inputs=["x:float32[N,4]", "h:float32[N,4]"])
    assert made.signature.output_names == ["y", "h_out"]


class Named(typing.NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Tuples(nn.Module):
    def forward(self, x):
        return Named(x + 1, x + 2)


def test_outputs_have_the_names_of_the_fields():
    assert opened(Tuples(), x("N", 4)).signature.output_names == ["left", "right"]


class Normalised(nn.Module):
    """Half of the values of its weight norm are those of the weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.register_buffer("order", torch.arange(16).flip(0))

    def forward(self, x):
        return self.layer(x[:, self.order])


def test_weights_that_the_module_computes_and_integers_are_proved(tmp_path):
    torch.manual_seed(0)
    penstock.convert(Normalised(), tmp_path / "model.onnx", inputs="x:float32[N,16]")
    source = opened(Normalised(), x("N", 16))
    exported = source.export(tmp_path / "again.onnx", 21)
    assert "order" in {name.rpartition(".")[2] for name in exported.weights}
    assert any(found.shape == (16, 16) for name in exported.computed for found in source.values({}, [name]).values())
