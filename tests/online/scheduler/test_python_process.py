from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.engines.base import RequestModel
from python_models import Processes, ask, request


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


IDENTITY = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(one, "x").as_numpy())])
        for one in requests
    ]
"""


def test_requests_are_answered_each_by_itself(processes: Processes) -> None:
    model = processes.load(IDENTITY)
    assert isinstance(model, RequestModel)
    assert model.max_batch == 8
    first, second = ask(model, [request(1), request(2, 3)])
    np.testing.assert_array_equal(first["y"], [[1, 1]])
    np.testing.assert_array_equal(second["y"], [[2, 2], [3, 3]])
