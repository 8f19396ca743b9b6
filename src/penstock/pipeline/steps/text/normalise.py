"""Normalisation of text."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.text.limits import MAX_BYTES, check_is_text, checked
from penstock.pipeline.value import TEXT, Value, ValueType


class NormaliseText(Step, frozen=True, kw_only=True):
    """Normalise a text: Unicode form, accents, case and whitespace, in this order. Normalising twice changes nothing."""

    form: Literal["none", "NFC", "NFD", "NFKC", "NFKD"] = "NFC"
    """Unicode normalization form."""
    strip_accents: bool = False
    """Remove accents: decompose the text and drop all nonspacing marks (category Mn), as BERT does."""
    lower: bool = False
    """Convert the text to lower case."""
    whitespace: bool = False
    """Replace each run of whitespace by one space, and remove it at both ends."""
    max_bytes: Annotated[int, Meta(ge=1)] = MAX_BYTES
    """Maximum size of the text as UTF-8. A longer text is refused."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A text. Raises InvalidConfig unless the input is one."""
        check_is_text("normalise_text", "value", inputs)
        return {"value": TEXT}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The normalised text. Raises InvalidInput if it is too long or is not valid Unicode."""
        text = self._formed(checked(inputs["value"], self.max_bytes))
        if self.strip_accents:
            parts = unicodedata.normalize("NFD", text)
            text = self._formed("".join(each for each in parts if unicodedata.category(each) != "Mn"))
        if self.lower:
            text = self._formed(text.lower())  # a letter in lower case may be written as two
        return {"value": " ".join(text.split()) if self.whitespace else text}

    def _formed(self, text: str) -> str:
        return text if self.form == "none" else unicodedata.normalize(self.form, text)
