"""The inputs of an estimator of scikit-learn: one matrix, or one input for each column of a table with columns of several types."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import InvalidArgument, Unavailable
from penstock.offline.convert.base import ConvertOptions
from penstock.tensor import Array, DataType, TensorSpec

_RANGES = (
    ("data_min_", "data_range_", 0.5),
    ("mean_", "scale_", 0.0),
    ("center_", "scale_", 0.0),
    ("statistics_", "", 0.0),
    ("", "max_abs_", 0.0),
    ("", "scale_", 0.0),
)
"""Attributes of scalers and imputers: a place among the values in training, their spread, and how far the middle is
from this place, in proportion to the spread."""


class Column(NamedTuple):
    """One input."""

    name: str
    datatype: DataType = DataType.FP32
    width: int = 1
    known: tuple[Any, ...] = ()
    """Categories or words that the estimator knows."""
    centre: tuple[float, ...] = (0.0,)
    """The middle of the values in training, for each number of the column."""
    spread: tuple[float, ...] = (1.0,)

    def probe(self, rng: np.random.Generator, rows: int) -> Array:
        """Plausible values [rows, width]. Texts consist of known words and unknown ones."""
        if self.datatype is DataType.BYTES:
            words = [str(one) for one in self.known] or [""]
            return np.array([[str(rng.choice(words)).encode()] * self.width for _ in range(rows)], np.object_)
        if self.known:
            return rng.choice(np.array(self.known), (rows, self.width)).astype(self.datatype.dtype)
        values = np.array(self.centre) + np.array(self.spread) * rng.normal(size=(rows, self.width))
        return values.astype(self.datatype.dtype)


class Table(NamedTuple):
    """The inputs, and what the estimator is given."""

    columns: tuple[Column, ...]
    labels: tuple[Any, ...] = ()
    """Labels of the columns of a DataFrame; empty: the estimator takes one array."""
    as_text: bool = False
    """The estimator takes a list of texts."""

    def rows(self, inputs: Mapping[str, Array]) -> Any:
        """What the estimator's methods take, for ``inputs`` in the order of the columns."""
        arrays = [_decoded(array) for array in inputs.values()]
        if self.as_text:
            return arrays[0].reshape(-1).tolist()
        if not self.labels:
            return arrays[0]
        if all(isinstance(label, int) for label in self.labels):
            return np.concatenate([array.astype(np.object_) for array in arrays], axis=1)
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise Unavailable(
                "an estimator with named columns needs the package 'pandas'", "pip install pandas"
            ) from None
        return pandas.DataFrame({label: array[:, 0] for label, array in zip(self.labels, arrays, strict=True)})


def table_of(model: Any) -> Table:
    """The inputs of ``model``, from its first step."""
    first = first_step(model)
    if hasattr(first, "token_pattern"):
        return Table((_column(first, 0, "text"),), as_text=True)
    width = int(getattr(model, "n_features_in_", 0) or getattr(first, "n_features_in_", 0))
    if not hasattr(first, "transformers_"):
        kinds = [_column(first, index, "features") for index in range(width)]
        datatype = kinds[0].datatype if kinds else DataType.FP32
        known = (
            sorted({value for kind in kinds for value in kind.known}) if datatype is DataType.INT64 else kinds[0].known
        )
        centre, spread = _range(first, width)
        return Table((Column("features", datatype, width, tuple(known), centre, spread),))
    labels = list(getattr(first, "feature_names_in_", range(width)))
    columns = [Column(str(label) if isinstance(label, str) else f"x{label}") for label in labels]
    for name, transformer, _ in first.transformers_:
        for place, index in enumerate(first._transformer_to_input_indices.get(name, ())):  # noqa: SLF001
            found = _column(transformer, place, columns[index].name)
            is_known = (
                found.known or found.datatype is not DataType.FP32 or found.spread != (1.0,) or found.centre != (0.0,)
            )
            columns[index] = found if is_known else columns[index]
    if isinstance(labels[0], int) and all(column.datatype is DataType.FP32 for column in columns):
        centre, spread = (
            tuple(value for (value,) in some)
            for some in zip(*((one.centre, one.spread) for one in columns), strict=True)
        )
        return Table((Column("features", DataType.FP32, width, (), centre, spread),))
    return Table(tuple(columns), tuple(labels))


def first_step(model: Any) -> Any:
    """The estimator in ``model`` that sees the inputs first."""
    for attribute in ("best_estimator_", "regressor_"):
        if hasattr(model, attribute):
            return first_step(getattr(model, attribute))
    steps: Any = getattr(model, "steps", None) or getattr(model, "transformer_list", ())
    real = [step for _, step in steps if step is not None and not isinstance(step, str)]
    return first_step(real[0]) if real else model


def _column(transformer: Any, place: int, name: str) -> Column:
    """The type of the column ``place`` of ``transformer``, from the categories or words that it or a later step knows."""
    for step in _steps(transformer):
        if hasattr(step, "token_pattern"):
            return Column(name, DataType.BYTES, known=(*getattr(step, "vocabulary_", ()), "?", ""))
        categories = getattr(step, "categories_", None)
        if categories is not None and len(categories) > place:
            values = np.asarray(categories[place])
            known = tuple(value for value in values.tolist() if value is not None and value == value)  # noqa: PLR0124
            if values.dtype.kind in "OUT" and not all(isinstance(value, int) for value in known):
                return Column(name, DataType.BYTES, known=known)
            return Column(name, DataType.INT64 if values.dtype.kind in "iubO" else DataType.FP32, known=known)
        statistics = getattr(step, "statistics_", None)
        if statistics is not None and np.asarray(statistics).dtype.kind in "OU":
            return Column(name, DataType.BYTES, known=(str(statistics[place]),))
    for step in reversed(list(_steps(transformer))):
        for middle, width, further in _RANGES:
            centre, spread = _at(step, middle, place), _at(step, width, place)
            if centre is not None or (not middle and spread is not None):
                centre = (centre or 0.0) + further * (spread or 0.0)
                return Column(name, centre=(centre,), spread=(spread or max(1.0, abs(centre)),))
    return Column(name)


def _at(step: Any, attribute: str, place: int) -> float | None:
    """The finite number ``place`` of an attribute; None if there is none."""
    values = getattr(step, attribute, None)
    if values is None or np.asarray(values).dtype.kind not in "fiu" or np.ndim(values) != 1 or len(values) <= place:
        return None
    return float(values[place]) if np.isfinite(values[place]) else None


def _range(first: Any, width: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    columns = [_column(first, place, "") for place in range(width)]
    return tuple(one.centre[0] for one in columns), tuple(one.spread[0] for one in columns)


def _steps(transformer: Any) -> Iterator[Any]:
    """``transformer``, or its steps from the last."""
    for _, step in reversed(getattr(transformer, "steps", [("", transformer)])):
        yield step


def declared(table: Table, options: ConvertOptions) -> tuple[TensorSpec, ...]:
    """The inputs, with the types and names that ``options`` declare. Raises InvalidArgument if they do not fit."""
    given = {one.name: (one.datatype, one.shape) for one in options.inputs} or {
        name: (DataType.from_numpy(array.dtype), array.shape) for name, array in options.sample.items()
    }
    specs = {one.name: TensorSpec(one.name, one.datatype, (-1, one.width)) for one in table.columns}
    if len(specs) == 1 == len(given):  # the name is free
        (name,), (spec,) = given, specs.values()
        specs = {name: TensorSpec(name, spec.datatype, spec.shape)}
    hint = "declare " + " ".join(f'--inputs "{one.name}:{_typed(one)}"' for one in specs.values())
    for name, (datatype, shape) in given.items():
        if name not in specs:
            raise InvalidArgument(f"the estimator has no input '{name}'", hint)
        spec = specs[name]
        if shape is not None and (
            len(shape) != 2 or (isinstance(shape[1], int) and shape[1] not in (-1, spec.shape[1]))
        ):
            raise InvalidArgument(
                f"input '{name}' has shape {list(shape)}, but the estimator takes {spec.shape[1]} columns", hint
            )
        if datatype and (datatype is DataType.BYTES) != (spec.datatype is DataType.BYTES):
            raise InvalidArgument(
                f"input '{name}' has type {datatype.value}, but the estimator takes {spec.datatype.value}", hint
            )
        specs[name] = TensorSpec(name, datatype or spec.datatype, spec.shape)
    return tuple(specs.values())


def _typed(spec: TensorSpec) -> str:
    kind = "string" if spec.datatype is DataType.BYTES else np.dtype(spec.datatype.dtype).name
    return f"{kind}[N,{spec.shape[1]}]"


def _decoded(array: Array) -> Array:
    if array.dtype != np.object_:
        return array
    found = np.empty(array.shape, np.object_)
    found.reshape(-1)[:] = [one.decode() if isinstance(one, bytes) else one for one in array.reshape(-1).tolist()]
    return found
