"""The seam of steps: a step is a frozen struct whose fields are its options."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from penstock.errors import InvalidConfig
from penstock.pipeline.value import Value, ValueType


class StepResources(msgspec.Struct, frozen=True):
    """The files of a pipeline that steps may use."""

    labels: Mapping[str, tuple[str, ...]] = {}
    """Names of classes, by the name of the list."""
    files: Mapping[str, bytes] = {}
    """Contents of files, such as ``tokenizer.json``, by their path in the pipeline."""


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step. The first line of a subclass's docstring is its help, and each field's docstring is the help of the option.

    A step keeps no state between calls, and ``run`` is safe to call from several threads.
    """

    inputs: ClassVar[tuple[str, ...]] = ("value",)
    """Names of the values that the step reads, in order."""
    outputs: ClassVar[tuple[str, ...]] = ("value",)
    """Names of the values that the step returns, in order."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Inputs that may be left out."""
    holds_lock: ClassVar[bool] = False
    """True if ``run`` is mostly Python code that holds the interpreter's lock, so that threads do not make it faster."""

    @abstractmethod
    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The types of the outputs for the types of the ``inputs``. Raises InvalidConfig if the step cannot read them."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs for one item. Does not modify ``inputs``. Raises InvalidInput if the values are wrong."""

    def run_many(self, items: Sequence[Mapping[str, Value]]) -> list[dict[str, Value]]:
        """The outputs for each of ``items``, equal to those of ``run``. Steps that gain from it vectorise this."""
        return [self.run(item) for item in items]

    def bound(self, resources: StepResources) -> Step:
        """The step with the files and labels that its options name. Raises InvalidConfig if one is missing."""
        return self


def wrong_type(step: str, name: str, wanted: str, found: ValueType) -> InvalidConfig:
    """The error for an input of the wrong type."""
    return InvalidConfig(f"step '{step}' needs {wanted} as '{name}', but it is {found}")


_BASE64 = re.compile(rb"(data:[^,]{0,200};base64,)?[\w+/=\s-]{16,}")
_SEARCHED = 1024


def is_base64(content: bytes) -> bool:
    """True if ``content``, which should be a file of pictures or sound, is one as text: in base64, or as a data URL."""
    return _BASE64.fullmatch(content[:_SEARCHED]) is not None


BASE64_HINT = "pass the bytes: decode it with base64.b64decode, without the part up to the comma of a data URL"
