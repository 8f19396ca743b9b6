import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.online.scheduler.sequences.controls import Control, ControlKind
from penstock.online.scheduler.sequences.slots import Sequence, SequenceStep
from penstock.tensor import DataType
from sequences import make_request


def make_step(identity: int | str = 7, start: bool = False, end: bool = False) -> SequenceStep:
    owner = list[SequenceStep]().append
    return SequenceStep(owner, Sequence(identity), make_request(0, identity), None, None, 0, start, end)


ROWS = [make_step(start=True), None, make_step(end=True)]


@pytest.mark.parametrize(
    ("kind", "datatype", "expected"),
    [
        (ControlKind.START, DataType.INT32, [5, 3, 3]),
        (ControlKind.END, DataType.FP32, [3, 3, 5]),
        (ControlKind.READY, DataType.INT32, [5, 3, 5]),
        (ControlKind.CORRID, DataType.UINT64, [7, 0, 7]),
        (ControlKind.CORRID, DataType.INT32, [7, 0, 7]),
    ],
    ids=["start", "end", "ready", "uint64", "int32"],
)
def test_a_control_has_a_value_for_each_row(kind: ControlKind, datatype: DataType, expected: list[int]) -> None:
    array = Control("c", kind, datatype, (1,), 3, 5).of(ROWS)
    assert array.dtype == datatype.dtype
    np.testing.assert_array_equal(array, np.array(expected)[:, None])


def test_flags_may_be_bools_and_rows_scalars() -> None:
    array = Control("c", ControlKind.START, DataType.BOOL, ()).of(ROWS)
    assert array.dtype == bool
    assert array.tolist() == [True, False, False]


def test_an_id_may_be_text() -> None:
    control = Control("c", ControlKind.CORRID, DataType.BYTES)
    control.check("zwölf", "m")
    assert control.of([make_step("zwölf"), None]).tolist() == [["zwölf".encode()], [b""]]


@pytest.mark.parametrize(
    ("datatype", "identity", "message"),
    [
        (DataType.UINT64, "a", "data-type is 'BYTES', but model 'm' expects 'UINT64'"),
        (DataType.BYTES, 1, "data-type is 'UINT64', but model 'm' expects 'BYTES'"),
        (DataType.INT32, 2**31, "is too large for control 'c' of model 'm', which has data-type 'INT32'"),
        (DataType.INT64, 2**63, "which has data-type 'INT64'"),
    ],
    ids=["text", "number", "int32", "int64"],
)
def test_an_id_that_a_control_cannot_tell_is_refused(datatype: DataType, identity: int | str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Control("c", ControlKind.CORRID, datatype).check(identity, "m")


def test_the_greatest_ids_are_told() -> None:
    for datatype, greatest in ((DataType.UINT64, 2**64 - 1), (DataType.INT32, 2**31 - 1)):
        control = Control("c", ControlKind.CORRID, datatype)
        control.check(greatest, "m")
        assert control.of([make_step(greatest)]).tolist() == [[greatest]]
