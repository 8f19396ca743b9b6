"""What the fuzz targets of the offline half share: messages are the genes of random models (``tests/random_models.py``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidInput, PenstockError, Unsupported, WrongResult
from penstock.offline.compress.explained import check_explained
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.optimize.verify import compare
from penstock.offline.sessions import loaded
from penstock.tensor import Array
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import pieces
from tests.fuzz.target import Target
from tests.random_models import GENE, RandomModel, described, make_genes

_SEEDS = 64
_MAX_GENES = 16
TOLERANCES = {np.dtype(np.float32): 1e-3, np.dtype(np.float64): 1e-5}
LOOSE = 8e-2
"""Tolerances by float type; the last is for types of 16 bits."""


class ModelTarget(Target):
    """A part of the offline half that is given a random model. What ``check`` raises, apart from a refusal, is a finding."""

    peak_factor = 4  # the largest sizes at which models are verified take over 100 MiB
    growth_factor = 32  # the libraries import modules and keep memory on demand
    slice_runs = 40
    slice_seed = 7

    def __init__(self) -> None:
        self.seeds: Sequence[Seed] = [pieces(make_genes(seed), GENE) for seed in range(_SEEDS)]
        for seed in self.seeds[:2]:
            # `run` skips genes that make no valid model. If none did, it would find nothing.
            RandomModel(b"".join(seed)).artifact()
            self.run(b"".join(seed))

    def split(self, data: bytes) -> Seed:
        return pieces(data, GENE)

    def run(self, data: bytes) -> None:
        model = RandomModel(data[: GENE * _MAX_GENES])
        try:
            artifact = model.artifact()
        except Exception:  # noqa: BLE001 - the genes make no valid model
            return
        try:
            self.check(artifact, model)
        except PenstockError as error:
            if not self.refuses(error):
                raise AssertionError(f"{error}\n{described(artifact.data)}") from error
        except Exception as error:
            raise type(error)(f"{error}\n{described(artifact.data)}") from error

    @abstractmethod
    def check(self, artifact: Artifact, model: RandomModel) -> None:
        """Raises for a wrong result."""

    def refuses(self, error: PenstockError) -> bool:
        """Whether ``error`` may be the answer to a valid model: it is not supported, or does not take a number of rows."""
        if isinstance(error, Unsupported | InvalidInput):
            return True
        return type(error) is PenstockError and "the model failed" in error.message


def data_of(model: RandomModel, artifact: Artifact, count: int = 30) -> Dataset:
    """Rows for ``artifact``."""
    inputs = onnx.load_model_from_string(artifact.data).graph.input
    return make_dataset(dict(zip((value.name for value in inputs), model.rows(count).values(), strict=False)), None)


def check_compressed(original: Artifact, made: Artifact, data: Dataset) -> None:
    """``check_explained``, which rightly refuses a model if its shapes depend on values, and other values give other shapes."""
    try:
        check_explained(original, made, data)
    except WrongResult as error:
        if "another type or shape" not in error.message or "NonZero" not in operators(original):
            raise


def optimized(artifact: Artifact) -> Artifact:
    return optimize(artifact)[0]


def agree(original: Artifact, made: Artifact, model: RandomModel, tolerance: float | None = None) -> None:
    """Assert that both models give the same outputs on rows that no method has seen."""
    tolerance = tolerance or TOLERANCES.get(np.dtype(model.float), LOOSE)
    counts = [model.fixed_rows] if model.fixed_rows else [1, 2, 7]
    for count in counts:
        inputs = data_of(model, original, count).inputs
        try:
            want = answers(original, inputs)
        except PenstockError:
            continue  # a number of rows that the model does not take
        got = answers(made, inputs)
        for name, array in want.items():
            error, reason = compare(array, got.get(name), 1.0)
            assert error <= tolerance, f"output {name} at {count} rows: {reason}"


def answers(artifact: Artifact, inputs: dict[str, Array]) -> dict[str, Array]:
    with loaded(artifact, as_written=True) as running:
        return running.forward(inputs)


def operators(artifact: Artifact) -> set[str]:
    return {node.op_type for node in onnx.load_model_from_string(artifact.data).graph.node}
