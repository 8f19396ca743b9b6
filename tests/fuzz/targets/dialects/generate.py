"""Fuzzes the bodies of the generate extension, and writes what was understood as a response."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from penstock.errors import PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.server.http.generate import read_request, write_response
from penstock.online.server.to_thread import finish
from penstock.request import InferResponse
from penstock.tensor import DataType, Signature, TensorSpec
from tests.fuzz.parts import json_words
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, contents

_SIGNATURE = Signature(
    (
        TensorSpec("x", DataType.FP32, (-1, 2)),
        TensorSpec("t", DataType.BYTES, (1,)),
        TensorSpec("n", DataType.INT64, ()),
    ),
    (),
)
_MESSAGES: Sequence[dict[str, Any]] = (
    {"x": [1, 2], "t": "hello", "n": 5, "id": "7"},
    {"x": [[1, 2], [3, 4]], "parameters": {"temperature": 0.5, "stream": False, "t": ["a"]}},
    {"t": ["é\u0000"], "max_tokens": 20},
    {"n": -(2**63), "x": []},
)


class GenerateTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"null",
        b"[]",
        b"[[]]",
        b"1e39",
        b"1e999",
        b'"\\ud800"',
        b"[" * 400,
        b'{"":0}',
        b'"id":1',
        b"[{}]",
    )

    def __init__(self) -> None:
        self._handle = cast(Handle, SimpleNamespace(name="m", version="1", signature=_SIGNATURE))
        super().__init__([json_words(message) for message in _MESSAGES])

    def decode(self, data: bytes) -> object:
        request = finish(read_request(self._handle, data))
        assert sum(map(touch, request.inputs.values())) <= 64 * len(data) + 1024
        found = [(name, contents(array)) for name, array in request.inputs.items()]
        try:
            written = write_response(InferResponse("m", "1", request.inputs, request.id))
        except PenstockError as error:
            return found, str(error)
        return found, repr(sorted(request.parameters.items())), written
