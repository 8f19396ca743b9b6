"""The layout of an HTTP or gRPC request: everything that stays the same when a client repeats the request with other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.errors import InvalidArgument, quoted, shortened
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.request import Parameters
from penstock.tensor import Array, DataType

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MAX_CACHED = 1024
VARIABLE = -1
"""The size of a BYTES tensor."""
_DATATYPES = {datatype.value: datatype for datatype in DataType}


class BoundedCache(dict[_Key, _Value]):
    """A dictionary of at most ``_MAX_CACHED`` values; it is cleared when it is full."""

    def remember(self, key: _Key, value: _Value) -> _Value:
        if len(self) >= _MAX_CACHED:
            self.clear()
        self[key] = value
        return value


class SharedSlice(NamedTuple):
    """A range of bytes in a shared-memory region, as a request specifies it."""

    region: str
    offset: int
    byte_size: int


class TensorLayout(NamedTuple):
    """An input without its elements."""

    name: str
    datatype: DataType
    shape: Sequence[int]
    size_bytes: int
    """Size of the raw elements; ``VARIABLE`` for BYTES."""


class RequestLayout(msgspec.Struct):
    """A request without its id and raw tensors."""

    arrays: dict[str, Array] = {}
    """Inputs whose elements are in the JSON or the protobuf message."""
    parameters: Parameters = {}
    shared: list[tuple[TensorLayout, SharedSlice]] = []
    """Inputs in shared memory."""
    outputs: tuple[str, ...] = ()
    """Requested outputs; empty if all are requested."""
    placed: list[tuple[str, SharedSlice]] = []
    """Outputs to write into shared memory."""
    form: AnswerForm = TEXT
    """The form of the response. It omits shared memory, because each request has its own lease."""

    def lease(self, memory: SharedMemory, model_name: str, inputs: dict[str, Array]) -> AnswerForm:
        """Add the inputs in shared memory to ``inputs``. Returns the form of the response, which holds the lease.

        Raises NotFound, InvalidArgument, Unavailable, Unsupported.
        """
        if not self.shared and not self.placed:
            return self.form
        lease = memory.lease()
        try:
            for tensor, part in self.shared:
                if tensor.size_bytes not in (VARIABLE, part.byte_size):
                    raise InvalidArgument(
                        f"input byte size mismatch for input {quoted(tensor.name)} for model {quoted(model_name)}. "
                        f"Expected {tensor.size_bytes}, got {part.byte_size} in shared memory"
                    )
                inputs[tensor.name] = lease.array(*part, tensor.datatype, tensor.shape)
            for name, part in self.placed:
                lease.place(name, *part)
        except BaseException:
            lease.release()
            raise
        return AnswerForm(self.form.binary, self.form.classification, lease.placements, lease)

    def note_outputs(self, names: Iterable[str]) -> None:
        """Request the outputs ``names``. Raises InvalidArgument if a name appears twice."""
        self.outputs = tuple(names)
        if len(set(self.outputs)) != len(self.outputs):
            raise InvalidArgument("an output is requested twice")

    def note_place(self, name: str, part: SharedSlice, is_classified: bool) -> None:
        """Write output ``name`` into shared memory. Raises InvalidArgument if it is also classified."""
        if is_classified:
            raise InvalidArgument(f"shared memory can't be used for output {quoted(name)} with classification")
        self.placed.append((name, part))


def find_datatype(name: str, datatype: str) -> DataType:
    """The datatype called ``datatype``. Raises InvalidArgument with the input's ``name`` in the message."""
    found = _DATATYPES.get(datatype)
    if found is None:
        raise InvalidArgument(f"invalid datatype for input {shortened(name)}: {quoted(datatype)}")
    return found


def check_names(names: Iterable[str]) -> None:
    """Raise InvalidArgument if a name appears twice."""
    seen = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"input {quoted(name)} already exists in request")
        seen.add(name)


def read_slice(what: str, parameters: Mapping[str, Any]) -> SharedSlice | None:
    """The shared-memory slice of an input or output, or None. Error messages call the tensor ``what``. Raises InvalidArgument."""
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidArgument(f"{what}: 'shared_memory_region' must be a name, not {region!r:.80}")
    size = whole_number(what, parameters, "shared_memory_byte_size")
    return SharedSlice(region, whole_number(what, parameters, "shared_memory_offset", 0), size)


def whole_number(what: str, parameters: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Parameter ``name``, an integer of at least 0. Error messages call the tensor ``what``. Raises InvalidArgument."""
    number = parameters.get(name, default)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InvalidArgument(f"{what}: {quoted(name)} must be a whole number, not {number!r:.80}")
    return number
