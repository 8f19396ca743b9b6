"""Train a tokenizer and a classifier of text: which library's documentation is a sentence from? Real text that is installed here.

pip install 'penstock[text,torch]' scikit-learn
python examples/text_classes/libraries.py --output libraries
penstock infer libraries/libraries.bundle --text "Fit the estimator to the training samples."
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from sentences import MODULES, Sentence, sentences
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.runtime import Pipeline

EXAMPLE = Path(__file__).parent


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A WordPiece tokenizer of 4,000 pieces, without upper case."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=4000, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    return tokenizer


class Classifier(nn.Module):
    """The mean over the tokens of what they mean, alone and beside their neighbours."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.embed, self.beside = nn.Embedding(size, 64, padding_idx=0), nn.Conv1d(64, 64, 3, padding=1)
        self.classify = nn.Sequential(nn.Dropout(0.5), nn.Linear(128, classes))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Map ids and mask [N, length] to logits [N, classes]."""
        embedded, shown = self.embed(ids), mask.float()[..., None]
        near = functional.relu(self.beside((embedded * shown).transpose(1, 2))).transpose(1, 2)
        # As a product of matrices, because ONNX Runtime adds the rows of a single text in another order than those of a batch.
        total = torch.bmm(shown.transpose(1, 2), torch.cat([embedded, near], 2)).squeeze(1)
        logits: Tensor = self.classify(total / shown.sum(1))
        return logits


def train(known: list[Sentence], tokenizer: Tokenizer, epochs: int) -> Classifier:
    """AdamW on batches of 64 sentences. Rare libraries weigh as much as frequent ones."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums have a fixed order, and small layers gain nothing from more threads
    labels = torch.tensor([one.label for one in known])
    weight = len(known) / len(MODULES) / torch.bincount(labels, minlength=len(MODULES))
    model = Classifier(tokenizer.get_vocab_size(), len(MODULES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    for _ in range(epochs):
        for batch in torch.randperm(len(known)).split(64):
            encoded = tokenizer.encode_batch([known[number].text for number in batch.tolist()])
            ids, mask = (torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
            optimizer.zero_grad()
            functional.cross_entropy(model(ids, mask), labels[batch], weight).backward()
            optimizer.step()
    return model.eval()


def write(folder: Path, epochs: int = 3) -> tuple[Path, float]:
    """Train, and write the pipeline and its bundle to ``folder``. Returns the bundle and its accuracy, averaged over the libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    known, held_out = sentences()
    tokenizer = train_tokenizer([one.text for one in known])
    model = train(known, tokenizer, epochs)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "labels.txt").write_text("\n".join(MODULES) + "\n")
    axes = {name: {0: "batch", 1: "length"} for name in ("ids", "mask")}
    names = {
        "input_names": ["ids", "mask"],
        "output_names": ["logits"],
        "dynamic_axes": axes | {"logits": {0: "batch"}},
    }
    example = torch.ones(2, 8, dtype=torch.int64)
    torch.onnx.export(model, (example, example), folder / "model.onnx", opset_version=18, dynamo=False, **names)
    shutil.copyfile(EXAMPLE / "pipeline.yaml", folder / "pipeline.yaml")
    pack_pipeline(folder / "pipeline.yaml", folder / "libraries.bundle", overwrite=True)
    return folder / "libraries.bundle", accuracy(folder / "libraries.bundle", held_out)


def accuracy(bundle: Path, held_out: list[Sentence]) -> float:
    """The mean over the libraries of the share of their sentences that get the right label."""
    with Pipeline.open(bundle) as pipeline:
        best = [answer["labels"][0] for answer in pipeline.stream(one.text for one in held_out)]
    right: list[list[bool]] = [[] for _ in MODULES]
    for one, label in zip(held_out, best, strict=True):
        right[one.label].append(list(MODULES)[one.label] == label)
    return sum(sum(each) / len(each) for each in right) / len(right)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, pack and measure a classifier of sentences.")
    parser.add_argument("--output", type=Path, default=Path("libraries"), help="folder to write to")
    written, found = write(parser.parse_args().output)
    print(
        f"accuracy {found:.1%} on sentences of functions that were kept for the test; chance is {1 / len(MODULES):.0%}"
    )
    print(f"wrote {written}")
