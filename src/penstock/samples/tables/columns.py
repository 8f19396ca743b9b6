"""Decides which columns of a table become which inputs. A row of the table is a sample."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from penstock.dataset import LABELS
from penstock.errors import InvalidData
from penstock.samples.sequences import SEQUENCE
from penstock.tensor import Signature, TensorSpec

_log = logging.getLogger(__name__)

_LIKE_LABELS = frozenset({"label", "labels", "target", "targets", "y", "class"})
"""Names of columns that are probably labels."""


class Columns:
    """The columns of a table for a model. Either each input takes the value in the column of its name, or the model has one input,
    which takes the values of all columns except ``labels``, in order. The ``states`` of a model may have no column.
    """

    def __init__(self, what: str, names: list[str], signature: Signature, states: Collection[str] = ()) -> None:
        """``what`` names the table in messages. Raises InvalidData if the columns do not suit the model."""
        places = {name: place for place, name in enumerate(names)}
        if len(places) < len(names):
            raise InvalidData(f"{what} has two columns of the same name: {names}", "name every column differently")
        specs = [spec for spec in signature.inputs if spec.name in places or spec.name not in states]
        special = [LABELS, *([SEQUENCE] if states else [])]
        self._special = {name: places[name] for name in special if name in places and name not in signature.input_names}
        self._own = [(spec, places[spec.name]) for spec in specs if spec.name in places]
        self._all: tuple[TensorSpec, list[int]] | None = None
        if len(self._own) < len(specs):
            features = {name: place for name, place in places.items() if name not in self._special}
            _check_features(what, names, specs, list(features))
            self._all = specs[0], list(features.values())

    def sample(self, value: Callable[[TensorSpec | None, int], Any]) -> dict[str, Any]:
        """The sample in a row. ``value`` returns the value in a column for an input, or for labels and the number of a sequence."""
        special = {name: value(None, place) for name, place in self._special.items()}
        if self._all is not None:
            spec, places = self._all
            return {spec.name: [value(spec, place) for place in places], **special}
        return {spec.name: _shaped(spec, value(spec, place)) for spec, place in self._own} | special


def _check_features(what: str, names: list[str], specs: list[TensorSpec], features: list[str]) -> None:
    """Raise InvalidData unless the only input takes all columns of ``features``, none of which may be labels."""
    wanted = specs[0].shape[-1] if len(specs) == 1 and specs[0].shape else 0
    like = [name for name in features if name.strip(" _").lower() in _LIKE_LABELS]
    if like and (wanted == -1 or wanted == len(features) - len(like)):
        raise InvalidData(
            f"column '{like[0]}' of {what} may be labels or a feature",
            f"rename it to '{LABELS}' if it has labels, otherwise to a name like 'feature_{like[0]}'; or remove it",
        )
    if not features or wanted not in (-1, len(features)):
        raise InvalidData(
            f"{what} has the columns {names}, but the model has the inputs {[spec.name for spec in specs]}",
            f"name a column after each input, or give {wanted} columns of features besides '{LABELS}'"
            if wanted > 0
            else "name a column after each input",
        )
    if like:
        _log.warning("column '%s' of %s counts as a feature, because the model takes %d", like[0], what, wanted)


def _shaped(spec: TensorSpec, value: Any) -> Any:
    """``value`` as the only element of a row or call of the input. A list is a row already."""
    for _ in spec.shape[1:] if not isinstance(value, list) else ():
        value = [value]
    return value
