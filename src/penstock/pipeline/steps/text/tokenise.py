"""Tokenisation with the ``tokenizers`` library, which is imported only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, InvalidInput, Unsupported, printable
from penstock.pipeline.steps.base import Step, StepResources
from penstock.pipeline.steps.text.limits import MAX_BYTES, check_is_text, checked
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, DataType

try:
    from tokenizers import Encoding, Tokenizer
except ImportError as missing:
    raise Unsupported("step 'tokenise' needs tokenizers", "pip install 'penstock[text]'") from missing

_PADS = ("[PAD]", "<pad>")
"""Special tokens that pad, if ``tokenizer.json`` does not declare its padding."""
_PAIR_SHARE = 1 << 20
"""Maximum product of the lengths of two texts, as a multiple of ``max_length``. The library joins every part that it cuts from one
text with every part that it cuts from the other, which would take gigabytes of memory."""


class Tokenise(Step, frozen=True, kw_only=True):
    """Turn a text, or a pair of texts, into token ids with the ``tokenizer.json`` of Hugging Face.

    The ids equal those of the fast tokenizers of ``transformers``. An empty text gives the special tokens only. An empty ``pair``
    is a second text without tokens, as in a batch of ``transformers``. A text without any token is refused, because a model has no
    answer for it.
    """

    inputs: ClassVar = ("text", "pair")
    outputs: ClassVar = ("input_ids", "attention_mask", "token_type_ids")
    optional: ClassVar = frozenset({"pair"})

    tokenizer: str = "tokenizer.json"
    """The tokenizer's file, by its path in the pipeline."""
    max_length: Annotated[int, Meta(ge=1)] = 512
    """Maximum number of tokens, with the special tokens."""
    truncation: Literal["longest_first", "only_first", "only_second", "none"] = "longest_first"
    """Which text of a pair loses tokens if there are more than ``max_length``. ``none`` refuses such texts."""
    truncation_side: Literal["right", "left"] = "right"
    """The side on which tokens are removed."""
    padding: Literal["longest", "fixed"] = "longest"
    """``fixed`` pads to ``max_length``. ``longest`` keeps the text's own length, rounded up to ``multiple_of``: an item of a
    pipeline is one text, and its tokens never depend on other items."""
    multiple_of: Annotated[int, Meta(ge=1)] = 1
    """Pad to a multiple of this number of tokens, so that more texts have equal lengths and can be batched. ``max_length`` must be a
    multiple of it, too."""
    padding_side: Literal["right", "left"] = "right"
    """The side on which padding is added."""
    pad_token: str = ""
    """The token that pads. By default the one that ``tokenizer.json`` declares, or its special token [PAD] or <pad>."""
    special_tokens: bool = True
    """Add the model's special tokens, such as [CLS] and [SEP]."""
    max_bytes: Annotated[int, Meta(ge=1)] = MAX_BYTES
    """Maximum size of each text as UTF-8. A longer text is refused."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Three INT64 vectors of one length. Raises InvalidConfig unless the inputs are texts, and the options fit."""
        for name in inputs:
            check_is_text("tokenise", name, inputs)
        if self.padding == "longest" and self.max_length % self.multiple_of:
            raise InvalidConfig(
                f"step 'tokenise' has max_length {self.max_length}, which is no multiple of 'multiple_of: {self.multiple_of}'",
                "otherwise, the longest texts would be padded to more than max_length tokens",
            )
        if self.truncation == "only_second" and "pair" not in inputs:
            raise InvalidConfig("step 'tokenise' truncates 'only_second', but has no input 'pair'")
        length = self.max_length if self.padding == "fixed" else -1
        ids = ValueType(datatype=DataType.INT64, shape=(length,))
        return dict.fromkeys(self.outputs, ids)

    def bound(self, resources: StepResources) -> Step:
        """The step with its tokenizer loaded. Raises InvalidConfig if the file is missing or is not a tokenizer."""
        if self.tokenizer not in resources.files:
            hint = did_you_mean(self.tokenizer, resources.files) or "place it beside the pipeline"
            raise InvalidConfig(f"step 'tokenise' has no tokenizer file '{self.tokenizer}'", hint)
        try:
            encoder = Tokenizer.from_buffer(resources.files[self.tokenizer])
        except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
            raise InvalidConfig(
                f"'{self.tokenizer}' is not a tokenizer: {printable(str(error))}",
                "give the tokenizer.json that a fast tokenizer of transformers saves",
            ) from None
        pad_id, pad_type = self._padding(encoder)
        added = encoder.num_special_tokens_to_add(True) if self.special_tokens else 0
        if self.max_length <= added:
            raise InvalidConfig(f"max_length is {self.max_length}, but the tokenizer adds {added} special tokens")
        encoder.no_padding()
        encoder.no_truncation()
        if self.truncation != "none":
            encoder.enable_truncation(self.max_length, strategy=self.truncation, direction=self.truncation_side)
        options = {name: getattr(self, name) for name in Tokenise.__struct_fields__}
        return _Loaded(**options, encoder=encoder, pad_id=pad_id, pad_type=pad_type)

    def _padding(self, encoder: Tokenizer) -> tuple[int, int]:
        """The id and the type id of the token that pads."""
        declared = encoder.padding or {}
        if self.pad_token:
            found = encoder.token_to_id(self.pad_token)
            if found is None:
                raise InvalidConfig(f"the tokenizer has no token '{self.pad_token}'", "correct the step's pad_token")
            return found, declared.get("pad_type_id", 0)
        if declared:
            return declared["pad_id"], declared["pad_type_id"]
        specials = {token.content: number for number, token in encoder.get_added_tokens_decoder().items()}
        for token in _PADS:
            if token in specials:
                return specials[token], 0
        if self.padding == "fixed" or self.multiple_of > 1:
            raise InvalidConfig(f"'{self.tokenizer}' does not name a padding token", "give the step's pad_token")
        return 0, 0

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Raises InvalidConfig: only a bound step has a tokenizer."""
        raise InvalidConfig("step 'tokenise' has no tokenizer yet", "bind it to the pipeline's files first")


class _Loaded(Tokenise, frozen=True, kw_only=True):
    encoder: Any
    pad_id: int
    pad_type: int

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return self.run_many([inputs])[0]

    def run_many(self, items: Sequence[Mapping[str, Value]]) -> list[dict[str, Value]]:
        texts = [self._texts(item) for item in items]
        try:
            # The interpreter's lock is released only for batches.
            encodings = self.encoder.encode_batch_fast(texts, add_special_tokens=self.special_tokens)
        except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
            raise InvalidInput(f"the text cannot be tokenised: {printable(str(error))}") from None
        return [self._arrays(encoding) for encoding in encodings]

    def _texts(self, item: Mapping[str, Value]) -> str | tuple[str, str]:
        text = checked(item["text"], self.max_bytes)
        if "pair" not in item:
            return text
        pair = checked(item["pair"], self.max_bytes)
        if self.truncation == "longest_first" and len(text) * len(pair) > _PAIR_SHARE * self.max_length:
            raise InvalidInput(
                f"the texts have {len(text)} and {len(pair)} characters, which is too much to truncate both",
                "shorten one of them, or set the step's truncation to only_first or only_second",
            )
        return text, pair

    def _arrays(self, encoding: Encoding) -> dict[str, Value]:
        count = len(encoding.ids)
        if count > self.max_length:
            raise InvalidInput(
                f"the text has {count} tokens, the limit is {self.max_length}",
                "shorten it, or set the step's truncation",
            )
        if not count:
            raise InvalidInput("the text has no tokens", "send a text that is not empty")
        length = self.max_length if self.padding == "fixed" else -(-count // self.multiple_of) * self.multiple_of
        used = slice(0, count) if self.padding_side == "right" else slice(length - count, length)
        columns = zip(
            self.outputs,
            (encoding.ids, encoding.attention_mask, encoding.type_ids),
            (self.pad_id, 0, self.pad_type),
            strict=True,
        )
        return {name: _padded(values, length, used, pad) for name, values, pad in columns}


def _padded(values: list[int], length: int, used: slice, pad: int) -> Array:
    if len(values) == length:
        return np.array(values, np.int64)
    found = np.full(length, pad, np.int64)
    found[used] = values
    return found
