"""Inputs that describe the sequences in a batch: Triton's ``control_input``."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.scheduler.sequences.slots import SequenceId, SequenceStep
from penstock.tensor import Array, DataType


class ControlKind(enum.Enum):
    """The kinds of controls, with the names of Triton's schema."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


class Control(msgspec.Struct, frozen=True):
    """One control input of a model. ``shape`` is the shape of one row."""

    name: str
    kind: ControlKind
    datatype: DataType
    shape: tuple[int, ...] = (1,)
    false: float = 0
    true: float = 1

    def check(self, identity: SequenceId, model: str) -> None:
        """Raise InvalidArgument if this control of kind CORRID cannot represent ``identity``."""
        asked = DataType.BYTES if isinstance(identity, str) else DataType.UINT64
        if (asked is DataType.BYTES) != (self.datatype is DataType.BYTES):
            raise InvalidArgument(
                f"sequence batching control '{self.name}' data-type is '{asked.value}', "
                f"but model '{model}' expects '{self.datatype.value}'"
            )
        if isinstance(identity, int) and identity > np.iinfo(self.datatype.dtype).max:
            raise InvalidArgument(
                f"sequence id {identity} is too large for control '{self.name}' of model '{model}', "
                f"which has data-type '{self.datatype.value}'"
            )

    def of(self, rows: Sequence[SequenceStep | None]) -> Array:
        """The control's value for a batch. A row is None if it has no request."""
        return np.array([self._value(row) for row in rows], self.datatype.dtype).reshape(len(rows), *self.shape)

    def _value(self, row: SequenceStep | None) -> int | float | bytes:
        if self.kind is ControlKind.CORRID:
            identity = row.sequence.id if row is not None else "" if self.datatype is DataType.BYTES else 0
            return identity.encode() if isinstance(identity, str) else identity
        if row is None:
            return self.false
        is_set = {ControlKind.START: row.start, ControlKind.END: row.end, ControlKind.READY: True}[self.kind]
        return self.true if is_set else self.false
