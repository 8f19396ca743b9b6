"""Fuzzes the bodies of ``/run``: the content type in the first line, then a form, the content of the only input, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.online.server.http.dialects import run
from penstock.online.server.to_thread import finish
from penstock.pipeline.function import Function
from penstock.pipeline.wire import signature_of, to_values
from penstock.tensor import DataType
from pipelines import function
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import lines
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, attempt, contents

_TEXT = "name: t\ninputs: {text: {media: text}}\nsteps: [{step: normalise_text, in: text, out: y}]\noutputs: [y]\n"
_ALL = """\
name: all
inputs:
  picture: {media: image}
  text: {media: text}
  x: {media: tensor, shape: [-1, 2]}
steps:
  - {step: softmax, in: x, out: p}
outputs: [p, text, picture]
"""
_FORM = (
    b"multipart/form-data; boundary=XX\n",
    b"--XX\r\n",
    b'Content-Disposition: form-data; name="x"\r\n',
    b"Content-Type: application/json\r\n\r\n",
    b"[[1,2]]",
    b"\r\n--XX\r\n",
    b'Content-Disposition: form-data; name="picture"; filename="a"\r\n',
    b"Content-Type: image/png\r\n\r\n",
    b"\x89PNG",
    b"\r\n--XX--\r\n",
)


class RunTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (b"\r\n--XX\r\n" * 9, b"\r\n--XX--", b'name="', b";base64,", b"NaN", b"[" * 300)

    def __init__(self) -> None:
        self._functions = [function(_TEXT), function(_ALL)]
        super().__init__(
            [
                (b"application/json\n", *b'{ "text" : "a" }'.split()),
                (b"application/json\n", *b'{ "x" : [ [ 1 , 2 ] ] , "picture" : "AAEC" , "text" : "a" }'.split()),
                (b"text/plain; charset=utf-8\n", b"some text"),
                (b"image/png\n", b"\x89PNG"),
                (b"\n", b"bytes"),
                _FORM,
            ]
        )

    def split(self, data: bytes) -> Seed:
        return lines(data)

    def decode(self, data: bytes) -> object:
        kind, _, body = data.partition(b"\n")
        return [attempt(partial(self._read, kind, body, one)) for one in self._functions]

    def _read(self, kind: bytes, body: bytes, function: Function) -> object:
        specs = signature_of(function).inputs
        arrays = finish(run.read(kind, body, function, specs))
        assert sum(map(touch, arrays.values())) <= 64 * len(body) + 1024
        assert set(arrays) <= {spec.name for spec in specs}
        files = {name: array for name, array in arrays.items() if array.dtype == DataType.BYTES.dtype}
        attempt(partial(to_values, function, files))
        return sorted((name, contents(array)) for name, array in arrays.items())
