"""Hugging Face folders: the whole zoo, the parts of models, files beside them, and broken folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

from benchmarks.zoo.huggingface import MODELS, write
from penstock.errors import InvalidArgument, InvalidModel, NotFound, PenstockError, PermissionDenied, Unsupported
from penstock.offline.convert.base import ConvertOptions, FrameworkModel, InputSpec
from penstock.offline.convert.convert import convert
from penstock.offline.convert.frameworks.huggingface import CONVERTER, METADATA
from penstock.tensor import Array, DataType

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
QUICK = ("gpt2_step",)
"""Models that are converted in every run. BERT is converted below."""
SIZES = {
    "batch": 3,
    "image_batch": 2,
    "sequence": 7,
    "past_sequence": 4,
    "past_sequence + sequence": 11,
    "samples": 777,
}


def inputs_of(source: FrameworkModel, sizes: dict[str, int] = SIZES) -> dict[str, Array]:
    """Plausible inputs of other sizes than the exporter saw."""
    rng, found = np.random.default_rng(1), {}
    for spec in source.signature.inputs:
        names = {axis.index: axis.name for axis in source.axes.get(spec.name, ())}
        shape = [sizes.get(names[i], 6) if dim == -1 else dim for i, dim in enumerate(spec.shape)]
        if "mask" in spec.name:
            value = np.ones(shape)
            value[:1, -2:] = 0
        else:
            high = 2 if "type" in spec.name else 20
            value = rng.standard_normal(shape) if spec.datatype.is_float else rng.integers(0, high, shape)
        found[spec.name] = value.astype(spec.datatype.dtype)
    return found


def check_same(source: FrameworkModel, model: Path, inputs: dict[str, Array]) -> None:
    session = onnxruntime.InferenceSession(model)
    assert [one.name for one in session.get_inputs()] == source.signature.input_names
    expected, names = source.forward(inputs), [one.name for one in session.get_outputs()]
    assert names == source.signature.output_names == list(expected)
    for name, got in zip(names, session.run(None, inputs), strict=True):
        assert got.shape == expected[name].shape
        np.testing.assert_allclose(got, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_zoo(name: str, tmp_path: Path) -> None:
    zoo = MODELS[name]
    source = CONVERTER.open(zoo.make(tmp_path), zoo.options)
    try:
        source.export(tmp_path / "model.onnx", 21)
        check_same(source, tmp_path / "model.onnx", inputs_of(source))
    finally:
        source.close()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = MODELS["bert"].make(tmp_path_factory.mktemp("bert"))
    assert isinstance(made, Path)
    return made


@pytest.fixture
def broken(bert: Path, tmp_path: Path) -> Path:
    """A copy of the folder of BERT to break."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in bert.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not None}))


def refused(folder: Path, kind: type[PenstockError], *options: ConvertOptions) -> str:
    """The message and the hint of the error."""
    with pytest.raises(kind) as caught:
        CONVERTER.open(folder, *options or (ConvertOptions(),))
    assert type(caught.value) is kind
    assert caught.value.hint
    return str(caught.value)


def test_tokenizer_goes_along(bert: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "bert", tmp_path / "out"
    shutil.copytree(bert, source)
    change(source, problem_type="multi_label_classification")
    output.mkdir()
    done = convert(source, output / "model.onnx")
    assert done.certificate is not None
    assert done.certificate.holds
    assert done.companions == (output / "tokenizer_config.json", output / "vocab.txt")
    assert {file.name for file in output.iterdir()} == {"model.onnx", "tokenizer_config.json", "vocab.txt"}
    about = {one.key: one.value for one in onnx.load(output / "model.onnx").metadata_props}[METADATA]
    assert json.loads(about) == {
        "architecture": "BertForSequenceClassification",
        "model_type": "bert",
        "problem_type": "multi_label_classification",
        "labels": {"0": "LABEL_0", "1": "LABEL_1"},
        "files": ["tokenizer_config.json", "vocab.txt"],
    }
    assert (output / "vocab.txt").read_bytes() == (bert / "vocab.txt").read_bytes()


def test_limits_of_positions(bert: Path, tmp_path: Path) -> None:
    axes = CONVERTER.open(bert, ConvertOptions()).axes
    assert {axis.name: axis.high for axis in axes["input_ids"]} == {"batch": 0, "sequence": 40}
    roberta = CONVERTER.open(MODELS["roberta"].make(tmp_path), ConvertOptions())
    longest = next(axis.high for axis in roberta.axes["input_ids"] if axis.name == "sequence")
    roberta.forward(inputs_of(roberta, {"sequence": longest}))
    with pytest.raises((PenstockError, IndexError)):
        roberta.forward(inputs_of(roberta, {"sequence": longest + 1}))


def test_steps_give_the_answers_of_the_whole(tmp_path: Path) -> None:
    folder = write(tmp_path, "GPT2LMHeadModel", {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2})
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values")
    step = CONVERTER.open(folder, ConvertOptions(inputs=tuple(InputSpec(name, None, None) for name in names)))
    ids = np.array([[3, 1, 4, 1, 5]])
    whole = CONVERTER.open(folder, ConvertOptions()).forward({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    past = {name: np.zeros((1, 2, 0, 8), np.float32) for name in step.signature.input_names if "past" in name}
    for begin, end in ((0, 3), (3, 5)):
        mask, positions = np.ones((1, end), np.int64), np.arange(begin, end)[None]
        given = {"input_ids": ids[:, begin:end], "attention_mask": mask, "position_ids": positions, **past}
        found = step.forward(given)
        np.testing.assert_allclose(found["logits"], whole["logits"][:, begin:end], rtol=1e-4, atol=1e-6)
        past = {name.replace("present", "past_key_values"): one for name, one in found.items() if name != "logits"}


def test_declared_sizes_are_fixed(bert: Path) -> None:
    spec = InputSpec("input_ids", DataType.INT64, ("batch", 12))
    source = CONVERTER.open(bert, ConvertOptions(inputs=(spec,)))
    assert [(one.name, one.shape) for one in source.signature.inputs] == [("input_ids", (-1, 12))]


def test_object(bert: Path, tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415 - may be missing

    model = transformers.AutoModel.from_pretrained(bert).train()
    caches = model.config.use_cache
    done = convert(model, tmp_path / "model.onnx")
    assert done.certificate is not None
    assert done.certificate.holds
    assert (done.format, done.signature.output_names[0]) == ("huggingface", "last_hidden_state")
    assert model.training
    assert model.config.use_cache == caches
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_inputs_of_an_own_class_are_those_of_the_sample(bert: Path) -> None:
    import transformers  # noqa: PLC0415 - may be missing

    class Weighted(transformers.BertModel):  # type: ignore[name-defined,misc]
        def forward(self, input_ids: Any, weights: Any, **named: Any) -> Any:
            return {"mean": (super().forward(input_ids)[0] * weights[..., None]).mean(1)}

    sample = {"input_ids": np.ones((2, 5), np.int64), "weights": np.ones((2, 5), np.float32)}
    source = CONVERTER.open(Weighted.from_pretrained(bert), ConvertOptions(sample=sample))
    assert source.signature.input_names == ["input_ids", "weights"]
    assert source.signature.output_names == ["mean"]


def test_unknown_input(bert: Path) -> None:
    told = refused(bert, InvalidArgument, ConvertOptions(inputs=(InputSpec("input_id", None, None),)))
    assert "has no input 'input_id'" in told
    assert "input_ids" in told


def test_missing_weights_are_not_made_up(broken: Path) -> None:
    change(broken, num_hidden_layers=3)
    assert "the weights lack" in refused(broken, InvalidModel)


def test_remote_code_is_not_run(broken: Path) -> None:
    (broken / "modeling_mine.py").write_text("raise SystemExit('this code ran')")
    change(broken, architectures=["MyModel"], auto_map={"AutoModel": "modeling_mine.MyModel"}, model_type="mine")
    assert "Penstock does not run it" in refused(broken, Unsupported)
    change(broken, architectures=None)
    assert "this code ran" not in refused(broken, InvalidModel)


@pytest.mark.parametrize("name", ["Trainer", "pipeline", "AutoConfig", "os.system", "", "__class__"])
def test_only_classes_of_models(broken: Path, name: str) -> None:
    change(broken, architectures=[name])
    assert f"has no model class '{name}'" in refused(broken, Unsupported)


def test_pickled_weights_need_trust(broken: Path) -> None:
    import torch  # noqa: PLC0415 - may be missing
    from safetensors.torch import load_file  # noqa: PLC0415

    torch.save(load_file(broken / "model.safetensors"), broken / "pytorch_model.bin")
    (broken / "model.safetensors").unlink()
    assert "--trust-pickle" in refused(broken, PermissionDenied)
    CONVERTER.open(broken, ConvertOptions(trust_pickle=True)).close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b'"text"'])
def test_broken_config(broken: Path, content: bytes) -> None:
    (broken / "config.json").write_bytes(content)
    refused(broken, InvalidModel)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**9},
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"vocab_size": -1},
        {"hidden_act": "none"},
    ],
)
def test_hostile_config(broken: Path, changes: dict[str, Any]) -> None:
    change(broken, **changes)
    refused(broken, InvalidModel)


@pytest.mark.parametrize("size", [0, 4, 8, 100, 2_000, -1])
def test_truncated_weights(broken: Path, size: int) -> None:
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:size])
    refused(broken, InvalidModel)


def test_no_weights(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "model.safetensors" in refused(broken, NotFound)


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", NotFound)


def test_quantised_weights(broken: Path) -> None:
    change(broken, quantization_config={"quant_method": "awq", "bits": 4})
    assert "quantised ('awq')" in refused(broken, Unsupported)
