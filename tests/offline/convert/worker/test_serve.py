"""The program in the process: its errors and answers reach the caller."""

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import (
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
)
from penstock.offline.convert.base import UnsupportedOperators

X = {"x": np.array([[1, 2]], np.float32)}


def test_values_without_a_datatype_of_the_protocol_are_left_out(opened):
    assert opened().values(X, ["phase", "name"])["name"].tolist() == [b"a"]


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        ("from penstock.errors import NotFound; raise NotFound('no file', 'check it')", NotFound, "no file (check it)"),
        ("from penstock.errors import PermissionDenied; raise PermissionDenied('no')", PermissionDenied, "no"),
        ("raise ValueError('bad value\\nmore')", PenstockError, "ValueError: bad value (check"),
        ("raise MemoryError", ResourceExhausted, "more memory"),
        ("1 / 0", PenstockError, "ZeroDivisionError: division by zero"),
        ("raise ValueError('\\udcff')", PenstockError, "ValueError: \\udcff"),
        ("from penstock.errors import NotFound; raise NotFound('\\udcff')", NotFound, "\\udcff"),
    ],
)
def test_errors_keep_their_class(opened, raised, kind, message):
    with pytest.raises(kind) as caught:
        opened(raised)
    assert type(caught.value) is kind
    assert message in str(caught.value)


def test_unsupported_operators_are_listed(opened):
    code = """
from penstock.offline.convert.base import UnsupportedOperator, UnsupportedOperators
if call == "export":
    raise UnsupportedOperators.of([UnsupportedOperator("fft", "line 3", "use stft"), UnsupportedOperator("lu", "", "avoid it")])
"""
    with pytest.raises(UnsupportedOperators, match="2 operator") as caught:
        opened(code).export(Path("model.onnx"), 17)
    assert [one.op for one in caught.value.operators] == ["fft", "lu"]
    assert caught.value.hint == "use stft"


def test_an_error_of_one_call_does_not_affect_the_next(opened):
    model = opened("if call == 'forward' and inputs['x'][0, 0] > 1: raise ValueError('too large')")
    with pytest.raises(PenstockError, match="too large"):
        model.forward({"x": X["x"] * 4})
    np.testing.assert_array_equal(model.forward(X)["y"], [[2, 4]])
