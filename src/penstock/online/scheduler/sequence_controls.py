"""Inputs that tell a model about the sequences in its batch: Triton's ``control_input``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.scheduler.sequence_slots import SequenceId, Step
from penstock.tensor import Array, DataType


class Kind(enum.Enum):
    """What a control tells of a row, by the schema's names."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


class Control(msgspec.Struct, frozen=True):
    """One control input of a model; ``shape`` is that of one row, all ones."""

    name: str
    kind: Kind
    datatype: DataType
    shape: tuple[int, ...] = (1,)
    false: float = 0
    """The values of a flag; CORRID has none."""
    true: float = 1

    def check(self, identity: SequenceId, model: str) -> None:
        """Raise InvalidArgument if the control, of kind CORRID, cannot tell ``identity``."""
        is_text = isinstance(identity, str)
        if is_text != (self.datatype is DataType.BYTES):
            got = DataType.BYTES if is_text else DataType.UINT64
            raise InvalidArgument(
                f"sequence batching control '{self.name}' data-type is '{got.value}', "
                f"but model '{model}' expects '{self.datatype.value}'"
            )
        if not is_text and int(identity) > np.iinfo(self.datatype.dtype).max:
            raise InvalidArgument(
                f"sequence id {identity} is more than control '{self.name}' of model '{model}' can tell, "
                f"which is '{self.datatype.value}'"
            )

    def of(self, rows: Sequence[Step | None]) -> Array:
        """Its value; a row is None if there is no request for it."""
        if self.kind is not Kind.CORRID:
            flag = _FLAGS[self.kind]
            values: list[Any] = [self.true if row is not None and flag(row) else self.false for row in rows]
        elif self.datatype is DataType.BYTES:
            values = [str(_id(row)).encode() if row is not None else b"" for row in rows]
        else:
            values = [_id(row) if row is not None else 0 for row in rows]
        return np.array(values, self.datatype.dtype).reshape(len(rows), *self.shape)


_FLAGS: dict[Kind, Callable[[Step], bool]] = {
    Kind.START: lambda step: step.start,
    Kind.READY: lambda _: True,
    Kind.END: lambda step: step.end,
}


def _id(step: Step) -> SequenceId:
    return step.request.sequence_id
