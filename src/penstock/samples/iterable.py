"""Samples from Python: an iterable of mappings, or a function that returns one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.dataset import Dataset
from penstock.errors import InvalidData, PenstockError
from penstock.samples.gather import Gathering
from penstock.samples.hints import InputHints
from penstock.samples.sequences import SEQUENCE
from penstock.samples.spool import Spool
from penstock.tensor import Signature

Sample = Mapping[str, Any]
"""The inputs of one call by name, and optionally ``labels``: arrays, numbers, text, or nested lists."""


def gather(
    samples: Iterable[Any],
    signature: Signature,
    what: str,
    *,
    independent: bool = False,
    hints: InputHints | None = None,
) -> Dataset:
    """Read ``samples`` once, into a temporary file. ``what`` names the data in errors. A list of samples is a sequence, if the model
    has states.

    Raises InvalidData, ResourceExhausted.
    """
    gathering, spool = Gathering(signature, independent=independent, hints=hints), Spool()
    found = _each(samples, what)
    for number, sample in enumerate(_flat(found) if hints and hints.states else found):
        place = f"sample {number} of {what}"
        if not isinstance(sample, Mapping):
            raise InvalidData(
                f"{place} is of type {type(sample).__name__}", "a sample is a mapping from input names to arrays"
            )
        spool.add(gathering.add(sample, place))
    return gathering.finish(spool.read, what)


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    """The samples, also those in lists or tuples, which get the number of their list as that of their sequence."""
    for number, found in enumerate(samples):
        if not isinstance(found, list | tuple):
            yield found
            continue
        for sample in found:
            yield {**sample, SEQUENCE: number} if isinstance(sample, Mapping) else sample


def _each(samples: Iterable[Any], what: str) -> Iterator[Any]:
    """The elements of ``samples``. Exceptions of the user's code are raised as InvalidData."""
    number = 0
    try:
        for sample in samples:
            yield sample
            number += 1
    except (PenstockError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # the user's code may raise SystemExit
        raise InvalidData(
            f"{what} failed at sample {number}: {type(error).__name__}: {error}",
            "repair the data, or the code that makes them",
        ) from error
