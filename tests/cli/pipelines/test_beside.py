"""``penstock convert`` of a Hugging Face folder writes a pipeline that answers as transformers does."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
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
from penstock.cli.convert import show
from penstock.cli.pipelines.beside import Beside
from penstock.offline.convert.convert import convert
from penstock.runtime import Pipeline

LABELS = {0: "cat", 1: "dog", 2: "owl"}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def picture_folder(path: Path, kind: type = transformers.ViTForImageClassification, **preprocessing: object) -> None:
    """A model of pictures, with the processor that ``preprocessing`` describes."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=32, patch_size=8, id2label=LABELS, label2id={}, **SIZES)
    kind(config).save_pretrained(path)
    transformers.ViTImageProcessor(**preprocessing).save_pretrained(path)


def text_folder(path: Path, kind: type) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=8, max_position_embeddings=32, id2label=LABELS, label2id={}, **SIZES)
    kind(config).save_pretrained(path)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "water": 4, "flows": 5}
    tokenizer = Tokenizer(WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=16)
    fast.save_pretrained(path)


def converted(penstock, source: str) -> Pipeline:
    done = penstock("convert", source, "-o", "out/net.onnx", "--parents", "--json")
    assert done.code == 0, done.err
    assert done.json["pipeline"] == "out/pipeline.yaml"
    pack_pipeline(Path("out/pipeline.yaml"), Path("net.bundle"))
    return Pipeline.open("net.bundle")


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
def test_pictures(penstock, folder: Path, preprocessing: dict[str, object]) -> None:
    picture_folder(folder / "model", **preprocessing)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))
    file = io.BytesIO()
    picture.save(file, "PNG")
    with converted(penstock, "model") as pipeline:
        found = pipeline(file.getvalue())
    processor = transformers.ViTImageProcessorPil.from_pretrained("model")
    model = transformers.ViTForImageClassification.from_pretrained("model").eval()
    with torch.no_grad():
        logits = model(**processor(picture, return_tensors="pt")).logits
    expected = torch.softmax(logits[0], -1).numpy()
    assert found["labels"] == [LABELS[index] for index in np.argsort(-expected)]
    np.testing.assert_allclose(found["scores"], np.sort(expected)[::-1], atol=1e-5)


def test_embeddings_of_pictures(penstock, folder: Path) -> None:
    picture_folder(folder / "model", transformers.ViTModel, size={"height": 32, "width": 32})
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))
    with converted(penstock, "model") as pipeline:
        found = pipeline(np.asarray(picture))["embedding"]
    processor = transformers.ViTImageProcessorPil.from_pretrained("model")
    model = transformers.ViTModel.from_pretrained("model").eval()
    with torch.no_grad():
        mean = model(**processor(picture, return_tensors="pt")).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(found, (mean / mean.norm()).numpy(), atol=1e-5)


def test_texts(penstock, folder: Path) -> None:
    text_folder(folder / "model", transformers.BertForSequenceClassification)
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    model = transformers.BertForSequenceClassification.from_pretrained("model").eval()
    with converted(penstock, "model") as pipeline:
        for text in ("water flows", "water " * 40, ""):
            with torch.no_grad():
                logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits
            expected = torch.softmax(logits[0], -1).numpy()
            np.testing.assert_allclose(pipeline(text)["scores"], np.sort(expected)[::-1], atol=1e-5)


def test_several_classes_can_be_true(penstock, folder: Path) -> None:
    text_folder(folder / "model", transformers.BertForSequenceClassification)
    config = folder / "model" / "config.json"
    config.write_text(config.read_text().replace("{", '{"problem_type": "multi_label_classification",', 1))
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    model = transformers.BertForSequenceClassification.from_pretrained("model").eval()
    with torch.no_grad():
        expected = model(**tokenizer("water flows", return_tensors="pt")).logits[0].sigmoid().numpy()
    with converted(penstock, "model") as pipeline:
        found = pipeline("water flows")
    likely = [index for index in np.argsort(-expected) if expected[index] >= 0.5]
    assert found["labels"] == [LABELS[index] for index in likely]
    np.testing.assert_allclose(found["scores"], expected[likely], atol=1e-5)


def test_a_part_without_a_step_is_named(penstock, folder: Path) -> None:
    picture_folder(folder / "model", size={"height": 32, "width": 32})
    config = folder / "model" / "preprocessor_config.json"
    config.write_text(config.read_text().replace('"do_resize"', '"do_pad": true, "do_resize"'))
    done = penstock("convert", "model", "-o", "net.onnx")
    assert done.code == 0
    assert "no pipeline.yaml was written: the preprocessing has 'do_pad'" in done.out
    assert not (folder / "pipeline.yaml").exists()


def test_an_existing_declaration_is_kept(penstock, folder: Path) -> None:
    text_folder(folder / "model", transformers.BertForSequenceClassification)
    (folder / "pipeline.yaml").write_text("mine")
    done = penstock("convert", "model", "-o", "net.onnx")
    assert done.code == 0
    assert "'pipeline.yaml' exists, with other content" in done.out
    assert (folder / "pipeline.yaml").read_text() == "mine"


def test_the_command_to_type_next_packs_the_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "net.onnx").write_bytes(models.linear(3, 2).data)
    done = convert(folder / "net.onnx", Path("trees.onnx"))
    show(done, Beside((Path("pipeline.yaml"), Path("labels.txt"))))
    assert "next      penstock pack pipeline.yaml -o trees.bundle" in capsys.readouterr().out
    show(done)
    assert "next      penstock inspect trees.onnx" in capsys.readouterr().out
