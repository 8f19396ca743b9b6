"""Fuzzes the bodies of TensorFlow Serving and KServe v1: rows, columns, and examples, read and written again."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.online.server.http.dialects import examples, predictions
from penstock.online.server.to_thread import finish
from penstock.tensor import DataType, TensorSpec
from tests.fuzz.parts import json_words
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, contents

_X = TensorSpec("x", DataType.FP32, (-1, 2))
_SPECS: Sequence[Sequence[TensorSpec]] = (
    (_X,),
    (TensorSpec("t", DataType.BYTES, (-1,)),),
    (_X, TensorSpec("i", DataType.INT64, (-1, 1)), TensorSpec("b", DataType.BOOL, (-1, -1))),
    (TensorSpec("h", DataType.FP16, (-1, -1)),),
)
_MESSAGES = (
    {"instances": [[1, 2], [3, 4.5]]},
    {"instances": [{"x": [1, 2], "i": [1], "b": [True]}, {"x": [3, 4], "i": [2], "b": [False]}]},
    {"inputs": {"x": [[1, 2]], "i": [[7]], "b": [[True, False]]}},
    {"inputs": [[1, 2]], "signature_name": "serving_default"},
    {"instances": ["a", {"b64": "YWI="}, "é"]},
    {
        "examples": [{"x": [1, 2], "i": 3, "b": True, "t": "a"}, {"x": [3, 4], "i": 4, "b": False}],
        "context": {"t": "c"},
    },
    {"instances": [[[0.1, 0.2], [65504, -1]]]},
)


class PredictionsTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"NaN",
        b"Infinity",
        b"1e39",
        b"null",
        b"[]",
        b"{}",
        b'{"b64":"!"}',
        b'{"b64":1}',
        b"[" * 500,
        b"1e999",
    )

    def __init__(self) -> None:
        super().__init__([json_words(message) for message in _MESSAGES])

    def decode(self, data: bytes) -> object:
        return [self._read(data, specs, is_batchable) for specs in _SPECS for is_batchable in (True, False)]

    def _read(self, data: bytes, specs: Sequence[TensorSpec], is_batchable: bool) -> object:
        try:
            arrays, form = finish(predictions.read(data, specs, is_batchable))
            found: dict[str, object] = {"form": form.name}
        except PenstockError as error:
            try:
                arrays = finish(examples.read(data, specs))
            except PenstockError as other:
                return str(error), str(other)
            form, found = predictions.PredictionForm.COLUMNS, {}
        assert sum(map(touch, arrays.values())) <= 64 * len(data) + 1024
        for name, array in arrays.items():
            assert array.dtype == next(spec.datatype.dtype for spec in specs if spec.name == name)
            found[name] = contents(array)
        try:
            written = predictions.write(arrays, form)
        except PenstockError as error:
            return found, str(error)
        assert written.startswith(b"{")
        return found, written
