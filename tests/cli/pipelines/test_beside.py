"""``penstock convert`` of a Hugging Face folder writes a pipeline that answers as transformers does."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing

import models
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.cli.convert import report, show
from penstock.cli.pipelines.beside import Beside, write_beside
from penstock.offline.convert.convert import Conversion, convert
from penstock.offline.convert.frameworks.huggingface import METADATA
from penstock.runtime import Pipeline

LABELS = {0: "cat", 1: "dog", 2: "owl"}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def picture_folder(path: Path, kind: type) -> None:
    """A model of pictures, with its processor."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=32, patch_size=8, id2label=LABELS, label2id={}, **SIZES)
    kind(config).save_pretrained(path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)


def text_folder(path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=8, max_position_embeddings=32, id2label=LABELS, label2id={}, **SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "water": 4, "flows": 5}
    tokenizer = Tokenizer(WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=16)
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A classifier of pictures. Its source is the folder ``model`` beside the folder of the output; so it is with ``texts``."""
    folder = tmp_path_factory.mktemp("pictures")
    picture_folder(folder / "model", transformers.ViTForImageClassification)
    (folder / "out").mkdir()
    return convert(folder / "model", folder / "out" / "net.onnx")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    folder = tmp_path_factory.mktemp("texts")
    text_folder(folder / "model")
    (folder / "out").mkdir()
    return convert(folder / "model", folder / "out" / "net.onnx")


def source_of(done: Conversion) -> Path:
    assert done.output is not None
    return done.output.parent.parent / "model"


def copied(done: Conversion, folder: Path) -> Conversion:
    """``done`` as if its output were in ``folder``."""
    assert done.output is not None
    folder.mkdir()
    files = [Path(shutil.copy(path, folder)) for path in (done.output, *done.companions)]
    return msgspec.structs.replace(done, output=files[0], companions=tuple(files[1:]))


def pipeline_of(declaration: Path) -> Pipeline:
    pack_pipeline(declaration, Path("net.bundle"))
    return Pipeline.open("net.bundle")


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))


@pytest.mark.parametrize(
    "preprocessing",
    [
        {
            "size": {"height": 32, "width": 32},
            "resample": 2,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.2, 0.25],
        },
        {"size": {"height": 32, "width": 32}, "resample": 3, "do_normalize": False},
    ],
)
def test_pictures(pictures: Conversion, folder: Path, preprocessing: dict[str, object]) -> None:
    transformers.ViTImageProcessor(**preprocessing).save_pretrained(folder / "processor")
    done = copied(pictures, folder / "out")
    shutil.copy("processor/preprocessor_config.json", "out")
    assert write_beside(done).files == (folder / "out" / "pipeline.yaml", folder / "out" / "labels.txt")
    file = io.BytesIO()
    picture().save(file, "PNG")
    with pipeline_of(Path("out/pipeline.yaml")) as pipeline:
        found = pipeline(file.getvalue())
    processor = transformers.ViTImageProcessorPil.from_pretrained("processor")
    model = transformers.ViTForImageClassification.from_pretrained(source_of(pictures)).eval()
    with torch.no_grad():
        logits = model(**processor(picture(), return_tensors="pt")).logits
    expected = torch.softmax(logits[0], -1).numpy()
    assert found["labels"] == [LABELS[index] for index in np.argsort(-expected)]
    np.testing.assert_allclose(found["scores"], np.sort(expected)[::-1], atol=1e-5)


def test_the_command_writes_the_pipeline_of_embeddings(penstock, folder: Path) -> None:
    picture_folder(folder / "model", transformers.ViTModel)
    done = penstock("convert", "model", "-o", "out/net.onnx", "--parents", "--json")
    assert done.code == 0, done.err
    assert done.json["pipeline"] == "out/pipeline.yaml"
    with pipeline_of(Path("out/pipeline.yaml")) as pipeline:
        found = pipeline(np.asarray(picture()))["embedding"]
    processor = transformers.ViTImageProcessorPil.from_pretrained("model")
    model = transformers.ViTModel.from_pretrained("model").eval()
    with torch.no_grad():
        mean = model(**processor(picture(), return_tensors="pt")).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(found, (mean / mean.norm()).numpy(), atol=1e-5)


def test_texts(texts: Conversion, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source_of(texts))
    model = transformers.BertForSequenceClassification.from_pretrained(source_of(texts)).eval()
    (declaration, _) = write_beside(copied(texts, folder / "out")).files
    with pipeline_of(declaration) as pipeline:
        for text in ("water flows", "water " * 40, ""):
            with torch.no_grad():
                logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits
            expected = torch.softmax(logits[0], -1).numpy()
            np.testing.assert_allclose(pipeline(text)["scores"], np.sort(expected)[::-1], atol=1e-5)


def test_several_classes_can_be_true(texts: Conversion, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source_of(texts))
    model = transformers.BertForSequenceClassification.from_pretrained(source_of(texts)).eval()
    with torch.no_grad():
        expected = model(**tokenizer("water flows", return_tensors="pt")).logits[0].sigmoid().numpy()
    done = copied(texts, folder / "out")
    proto = onnx.load("out/net.onnx")
    (about,) = (one for one in proto.metadata_props if one.key == METADATA)
    about.value = json.dumps(json.loads(about.value) | {"problem_type": "multi_label_classification"})
    onnx.save(proto, "out/net.onnx")
    (declaration, _) = write_beside(done).files
    with pipeline_of(declaration) as pipeline:
        found = pipeline("water flows")
    likely = [index for index in np.argsort(-expected) if expected[index] >= 0.5]
    assert found["labels"] == [LABELS[index] for index in likely]
    np.testing.assert_allclose(found["scores"], expected[likely], atol=1e-5)


def test_a_part_without_a_step_is_named(pictures: Conversion, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = copied(pictures, folder / "out")
    config = folder / "out" / "preprocessor_config.json"
    config.write_text(config.read_text().replace('"do_resize"', '"do_pad": true, "do_resize"'))
    beside = write_beside(done)
    show(done, beside)
    assert "no pipeline.yaml was written: the preprocessing has 'do_pad'" in capsys.readouterr().out
    assert report(done, beside)["pipeline"] is None
    assert not (folder / "out" / "pipeline.yaml").exists()


def test_an_existing_declaration_is_kept(texts: Conversion, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = copied(texts, folder / "out")
    (folder / "out" / "pipeline.yaml").write_text("mine")
    show(done, write_beside(done))
    assert "pipeline.yaml' exists, with other content" in capsys.readouterr().out
    assert (folder / "out" / "pipeline.yaml").read_text() == "mine"


def test_the_command_to_type_next_packs_the_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "net.onnx").write_bytes(models.linear(3, 2).data)
    done = convert(folder / "net.onnx", Path("trees.onnx"))
    show(done, Beside((Path("pipeline.yaml"), Path("labels.txt"))))
    assert "next      penstock pack pipeline.yaml -o trees.bundle" in capsys.readouterr().out
    show(done)
    assert "next      penstock inspect trees.onnx" in capsys.readouterr().out
