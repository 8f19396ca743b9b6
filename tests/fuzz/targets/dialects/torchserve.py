"""Fuzzes the bodies of TorchServe: the content type in the first line, then JSON, raw elements or a form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.online.server.http.dialects import torchserve
from penstock.online.server.to_thread import finish
from penstock.tensor import DataType, TensorSpec
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import lines
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, attempt, contents

_X = TensorSpec("x", DataType.FP32, (-1, 2))
_SPECS: Sequence[Sequence[TensorSpec]] = (
    (_X,),
    (TensorSpec("data", DataType.BYTES, (-1, 1)),),
    (_X, TensorSpec("i", DataType.INT64, (-1,))),
)
_FORM = (
    b"multipart/form-data; boundary=XX\n",
    b"--XX\r\n",
    b'Content-Disposition: form-data; name="x"\r\n',
    b"Content-Type: application/json\r\n\r\n",
    b"[[1,2]]",
    b"\r\n--XX\r\n",
    b'Content-Disposition: form-data; filename="a"; name="i"\r\n\r\n',
    b"[3]",
    b"\r\n--XX--\r\n",
)


class TorchserveTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\r\n--XX\r\n" * 9,
        b"\r\n--XX--",
        b"; ; ;" * 99,
        b'name="',
        b"boundary=",
        b"text/plain\n",
        b"[" * 300,
    )

    def __init__(self) -> None:
        super().__init__(
            [
                (b"application/json\n", *b"[ [ 1 , 2 ] ]".split()),
                (b"\n", *b'{ "x" : [ 1 , 2 ] , "i" : [ 3 ] }'.split()),
                (b"application/octet-stream\n", bytes(8)),
                (b"text/plain; charset=utf-8\n", b"some text"),
                (b"image/png\n", b"\x89PNG"),
                (b"application/json\n", b'{"data": [[1, 2], [3, 4]]}'),
                _FORM,
            ]
        )

    def split(self, data: bytes) -> Seed:
        return lines(data)

    def decode(self, data: bytes) -> object:
        kind, _, body = data.partition(b"\n")
        return [attempt(partial(self._read, kind, body, specs)) for specs in _SPECS]

    def _read(self, kind: bytes, body: bytes, specs: Sequence[TensorSpec]) -> object:
        arrays = finish(torchserve.read(kind, body, specs))
        assert sum(map(touch, arrays.values())) <= 64 * len(body) + 1024
        assert set(arrays) <= {spec.name for spec in specs}
        return sorted((name, contents(array)) for name, array in arrays.items())
