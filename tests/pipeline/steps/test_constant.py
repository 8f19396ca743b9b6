from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidConfig
from penstock.pipeline.steps.constant import Constant
from penstock.pipeline.value import TEXT, ValueType
from penstock.tensor import DataType


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", TEXT),
        (3, ValueType(datatype=DataType.INT64)),
        ([0.5, 1], ValueType(shape=(2,))),
        ([[1, 2]], ValueType(datatype=DataType.INT64, shape=(1, 2))),
        (True, ValueType(datatype=DataType.BOOL)),
    ],
)
def test_values(value: Any, kind: ValueType) -> None:
    step = Constant(value=value)
    assert step.check({}) == {"value": kind}
    found = step.run({})["value"]
    np.testing.assert_array_equal(found, value)
    if kind != TEXT:
        assert (found.dtype, found.shape) == (kind.datatype.dtype, kind.shape)


@pytest.mark.parametrize("value", [None, {"a": 1}, [[1], [1, 2]], ["a"], [None], 2**70, 1e39, [0, -1e300]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="constant"):
        Constant(value=value).check({})
