"""Token ids equal those of the fast tokenizers of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step, StepResources
from penstock.pipeline.steps.text.tokenise import Tokenise
from penstock.pipeline.value import FILE, TEXT

CORPUS = [
    "The pump moved forty litres of water through the pipe.",
    "Was it the valve, or was it the pump? Nobody knew!",
    "Übergröße, naïve café, 東京都 and Ελλάδα: 1,234.5 %",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "water",
    "unknown 🐟 fish\twith\nlines",
    "[SEP] in the text",
    "pump " * 40,
    "é" * 300,
    "x" * 2000,
]


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=specials, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 1)]
    )
    return tokenizer


KINDS = {"wordpiece": (_wordpiece(), "[PAD]"), "bpe": (_bpe(), "<pad>"), "unigram": (_unigram(), "<pad>")}


def _bound(tokenizer: Tokenizer, **options: Any) -> Step:
    return Tokenise(**options).bound(StepResources(files={"tokenizer.json": tokenizer.to_str().encode()}))


def _reference(tokenizer: Tokenizer, pad: str, options: dict[str, Any]) -> Any:
    """The call of transformers with ``options``, for a batch of one text or pair: alone, it takes an empty second text for none."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
        pad_token=pad,
        padding_side=options.get("padding_side", "right"),
        truncation_side=options.get("truncation_side", "right"),
        model_input_names=list(Tokenise.outputs),
    )

    def encode(*texts: str) -> dict[str, list[int]]:
        found = fast(
            *([text] for text in texts),
            max_length=options["max_length"],
            truncation=options.get("truncation", "longest_first"),
            padding="max_length" if options.get("padding") == "fixed" else "longest",
            pad_to_multiple_of=options.get("multiple_of"),
        )
        return {name: rows[0] for name, rows in found.items()}

    return encode


OPTIONS: list[dict[str, Any]] = [
    {"max_length": 16},
    {"max_length": 16, "padding": "fixed"},
    {"max_length": 24, "padding": "fixed", "padding_side": "left", "truncation_side": "left"},
    {"max_length": 64, "multiple_of": 8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_those_of_transformers(kind: str, options: dict[str, Any]) -> None:
    tokenizer, pad = KINDS[kind]
    step, reference = _bound(tokenizer, **options), _reference(tokenizer, pad, options)
    pairs: list[tuple[str, ...]] = [(text,) for text in TEXTS] + [(one, two) for one in TEXTS[:4] for two in TEXTS[:4]]
    items = [dict(zip(("text", "pair"), texts, strict=False)) for texts in pairs]
    for texts, item, many in zip(pairs, items, step.run_many(items), strict=True):
        expected, found = reference(*texts), step.run(item)
        for name in Tokenise.outputs:
            assert found[name].dtype == np.int64
            assert found[name].tolist() == expected[name] == many[name].tolist()


@pytest.mark.parametrize("truncation", ["only_first", "only_second"])
def test_one_text_of_a_pair_is_truncated(truncation: str) -> None:
    tokenizer, pad = KINDS["wordpiece"]
    options = {"max_length": 24, "truncation": truncation}
    short, long = "the pump", CORPUS[1]
    texts = (long, short) if truncation == "only_first" else (short, long)
    found = _bound(tokenizer, **options).run({"text": texts[0], "pair": texts[1]})
    assert found["input_ids"].tolist() == _reference(tokenizer, pad, options)(*texts)["input_ids"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=4), st.sampled_from(sorted(KINDS)))
def test_an_item_does_not_depend_on_the_others(texts: list[str], kind: str) -> None:
    tokenizer, pad = KINDS[kind]
    options = {"max_length": 12}
    step, reference = _bound(tokenizer, **options), _reference(tokenizer, pad, options)
    texts = [text.replace("\ud800", "") for text in texts if text.isprintable()]
    for text, found in zip(texts, step.run_many([{"text": text} for text in texts]), strict=True):
        assert found["input_ids"].tolist() == reference(text)["input_ids"]


def test_long_and_broken_texts_are_refused() -> None:
    step = _bound(KINDS["wordpiece"][0], max_bytes=10)
    assert len(step.run({"text": "é" * 5})["input_ids"])
    with pytest.raises(InvalidInput, match="has 11 bytes, the limit is 10"):
        step.run({"text": "é" * 5 + "a"})
    with pytest.raises(InvalidInput, match="has 11 bytes"):
        step.run({"text": "a", "pair": "a" * 11})
    with pytest.raises(InvalidInput, match="too much to truncate both"):
        _bound(KINDS["wordpiece"][0], max_length=8).run({"text": "a " * 2000, "pair": "a " * 2000})
    with pytest.raises(InvalidInput, match="unpaired surrogate at character 1"):
        step.run({"text": "a\ud800"})
    with pytest.raises(InvalidInput, match="tokens, the limit is 8"):
        _bound(KINDS["wordpiece"][0], max_length=8, truncation="none").run({"text": CORPUS[0]})


def test_a_megabyte_is_tokenised() -> None:
    for tokenizer, _ in KINDS.values():
        step = _bound(tokenizer, max_length=128)
        for text in ("pump " * 200_000, "x" * 1_000_000):
            assert len(step.run({"text": text})["input_ids"]) <= 128


def test_a_text_without_tokens_is_refused() -> None:
    step = _bound(KINDS["wordpiece"][0], special_tokens=False, padding="fixed")
    with pytest.raises(InvalidInput, match="has no tokens"):
        step.run({"text": " "})
    assert _bound(KINDS["wordpiece"][0]).run({"text": ""})["input_ids"].tolist() == [2, 3]


def test_types_are_checked() -> None:
    step = Tokenise(max_length=16, padding="fixed")
    assert step.check({"text": TEXT})["input_ids"].shape == (16,)
    assert Tokenise().check({"text": TEXT, "pair": TEXT})["input_ids"].shape == (-1,)
    with pytest.raises(InvalidConfig, match="needs a text as 'text', but it is file"):
        step.check({"text": FILE})
    with pytest.raises(InvalidConfig, match="max_length 510, which is no multiple of 'multiple_of: 8'"):
        Tokenise(max_length=510, multiple_of=8).check({"text": TEXT})
    with pytest.raises(InvalidConfig, match="has no input 'pair'"):
        Tokenise(truncation="only_second").check({"text": TEXT})


def test_files_are_checked() -> None:
    with pytest.raises(InvalidConfig, match="no tokenizer file 'tokenizer.json'"):
        Tokenise().bound(StepResources(files={"tokeniser.json": b"{}"}))
    with pytest.raises(InvalidConfig, match="'tokenizer.json' is not a tokenizer"):
        Tokenise().bound(StepResources(files={"tokenizer.json": b"{}"}))
    with pytest.raises(InvalidConfig, match="has no token '<none>'"):
        _bound(KINDS["bpe"][0], pad_token="<none>")
    with pytest.raises(InvalidConfig, match="max_length is 3, but the tokenizer adds 3 special tokens"):
        _bound(KINDS["wordpiece"][0], max_length=3)
    bare = Tokenizer(models.BPE())
    with pytest.raises(InvalidConfig, match="does not name a padding token"):
        _bound(bare, padding="fixed")


def test_the_padding_of_the_file_is_used() -> None:
    tokenizer = Tokenizer.from_str(KINDS["wordpiece"][0].to_str())
    tokenizer.enable_padding(length=512, pad_id=7, pad_type_id=1)
    tokenizer.enable_truncation(3)
    found = _bound(tokenizer, max_length=8, padding="fixed").run({"text": ""})
    assert found["input_ids"].tolist() == [2, 3] + [7] * 6
    assert found["token_type_ids"].tolist() == [0, 0] + [1] * 6
    assert found["attention_mask"].tolist() == [1, 1] + [0] * 6
