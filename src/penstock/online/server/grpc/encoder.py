"""Encodes responses as ``ModelInferResponse`` of the Open Inference Protocol. Independent of sockets.

The message is written in parts, without the protobuf class, so that large tensors are not copied. The message always has one entry
of ``raw_output_contents`` per output, as clients expect.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PenstockError, bounded
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.request_layout import BoundedCache
from penstock.protocol import messages
from penstock.protocol.varint import write_varint
from penstock.request import InferResponse, Parameters
from penstock.tensor import Array, Buffer, DataType, to_wire

_SMALL_BYTES = 4096
_INLINE_ELEMENTS = 256
"""Maximum number of elements of a BYTES output that is encoded on the event loop."""

# Tags: the field number times eight, plus two for a length-delimited field.
_ID = b"\x1a"
_OUTPUT = b"\x2a"
_RAW = b"\x32"
_STREAMED = b"\x12"
_NOTHING = b"\x32\x00"


class GrpcAnswerEncoder:
    """Encodes responses. Caches the parts that recur. Used only on the event loop."""

    def __init__(self, limit: ResponseLimit = ResponseLimit()) -> None:  # noqa: B008 - immutable
        self._limit = limit
        self._heads = BoundedCache[tuple[str, str], bytes]()
        self._described = BoundedCache[tuple[str, int, tuple[int, ...]], bytes]()

    def __call__(self, response: InferResponse, form: AnswerForm, inline: bool = False) -> list[Buffer] | None:
        """Encode ``response`` as a message in parts. Outputs that the client wants in shared memory are written to shared memory.

        With ``inline``, returns None if a large output would have to be copied or converted. Raises InvalidArgument, and
        ResourceExhausted if an output cannot be written to shared memory, or if the response is too large.
        """
        text = self._head(response)
        raw: list[Buffer] = []
        small = b""
        for name, array in response.outputs.items():
            text += self._described.get((name, array.dtype.num, array.shape)) or self._describe(name, array)
            if name in form.placements:
                form.placements[name].write(array)
                small += _NOTHING
                continue
            size = array.nbytes
            if size < _SMALL_BYTES and array.dtype.kind not in "OSU" and array.dtype.isnative:
                small += _RAW + write_varint(size) + array.tobytes()
            elif inline and (
                array.size > _INLINE_ELEMENTS if array.dtype.kind in "OSU" else not array.flags.c_contiguous
            ):
                return None
            else:
                data = to_wire(array)
                raw += (small + _RAW + write_varint(len(data)), data)
                small = b""
        if not raw:
            return [text + small]
        raw[0] = text + bytes(raw[0])
        if small:
            raw.append(small)
        self._limit.check(response.outputs, raw)
        return raw

    def _head(self, response: InferResponse) -> bytes:
        """The part of the message before the outputs."""
        key = (response.model_name, response.model_version)
        head = self._heads.get(key)
        if head is None:
            message = messages.ModelInferResponse(model_name=key[0], model_version=key[1])
            head = self._heads.remember(key, bytes(message.SerializeToString()))
        if response.id:
            identity = response.id.encode()
            head += _ID + write_varint(len(identity)) + identity
        return head + encode_parameters(response.parameters) if response.parameters else head

    def _describe(self, name: str, array: Array) -> bytes:
        """The description of an output: all its fields except the elements."""
        datatype = DataType.from_numpy(array.dtype).value
        output = messages.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=array.shape)
        data = output.SerializeToString()
        return self._described.remember((name, array.dtype.num, array.shape), _OUTPUT + write_varint(len(data)) + data)


def streamed(parts: Sequence[Buffer]) -> list[Buffer]:
    """The ModelStreamInferResponse that contains a ModelInferResponse."""
    return [_STREAMED + write_varint(sum(map(len, parts))), *parts]


def streamed_error(error: PenstockError, identity: str) -> bytes:
    """The ModelStreamInferResponse that rejects the request with the id ``identity``."""
    answer = messages.ModelInferResponse(id=identity)
    response = messages.ModelStreamInferResponse(error_message=bounded(str(error)), infer_response=answer)
    return bytes(response.SerializeToString())


def encode_parameters(parameters: Parameters) -> bytes:
    """The field ``parameters`` of a response. Values that are not bool, int, float or str become text."""
    message = messages.ModelInferResponse()
    for name, value in parameters.items():
        parameter = message.parameters[name]
        match value:
            case bool():
                parameter.bool_param = value
            case int() if -(1 << 63) <= value < 1 << 63:
                parameter.int64_param = value
            case int() if 0 <= value < 1 << 64:
                parameter.uint64_param = value
            case float():
                parameter.double_param = value
            case _:
                parameter.string_param = str(value)
    return bytes(message.SerializeToString(deterministic=True))
