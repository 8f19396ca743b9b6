"""The data of a build: given by the user, held out, or made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidData, InvalidInput, PenstockError
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.metric_table import METRICS
from penstock.offline.judge.overlap import check_distinct
from penstock.offline.sessions import coupling_of, hints_of, signature_of
from penstock.offline.synthetic import check_synthetic, synthetic_data
from penstock.samples.open import Data, open_data

_HELD_OUT = 0.2


def read_data(
    original: Artifact,
    calibrate: Data | None,
    evaluate: Data | None,
    contract: Contract,
    synthetic: int | None = None,
    seed: int = 0,
) -> tuple[Dataset | None, Dataset]:
    """The calibration data, and the evaluation data, which by default are a fifth of the former.

    With ``synthetic``, both are made; see ``Recipe.synthetic``. Raises InvalidData, InvalidArgument, InvalidModel, NotFound.
    """
    if synthetic is not None:
        check_synthetic(calibrate is not None or evaluate is not None, contract.prove_accuracy)
        calibrate, evaluate = synthetic_data(original, synthetic or None)
    signature = signature_of(original)
    independent = signature.batchable and not coupling_of(original, signature)
    with hints_of(original) as hints:
        calibration, evaluation = (
            None if data is None else open_data(data, signature, independent=independent, hints=hints)
            for data in (calibrate, evaluate)
        )
    if evaluation is None and calibration is None:
        raise InvalidData(
            "there is no data to judge accuracy on",
            "give --evaluate DATA, and --calibrate DATA for INT8; or --synthetic, which measures fidelity to the original",
        )
    if evaluation is None:
        assert calibration is not None
        calibration, evaluation = calibration.split_shuffled(_HELD_OUT, signature.smallest_batch, seed)
    if contract.prove_accuracy:
        known = METRICS.get(contract.metric)
        check_distinct(evaluation, labelled=known is None or known.labels)
    return calibration, evaluation


@contextmanager
def blaming(data: Data | None) -> Iterator[None]:
    """Report errors of running a model as InvalidData. A model that has loaded can fail only because of its inputs."""
    try:
        yield
    except PenstockError as error:
        if type(error) not in (PenstockError, InvalidInput):
            raise
        name = f"'{data}'" if isinstance(data, str | Path) else "the data"
        raise InvalidData(
            f"{error.message}, on samples of {name}", "check that the values are valid inputs of the model"
        ) from error
