"""Fuzzes the decoder of JSON and binary inference requests, and writes what it understood as an answer.

A message begins with a line that holds the header ``Inference-Header-Content-Length``, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import cast

import msgspec

from penstock.errors import PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.server.answer_form import ALL, NONE, AnswerForm
from penstock.online.server.http.codec.decoder import HttpRequestDecoder
from penstock.online.server.http.codec.encoder import HttpAnswerEncoder
from penstock.online.server.http.codec.large_json import LARGE_BYTES
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.online.server.to_thread import finish
from penstock.request import InferRequest, InferResponse
from penstock.tensor import DataType, Signature, TensorSpec, to_wire
from tests.fuzz.answers import Meaning, meaning
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import json_words, words
from tests.fuzz.target import Target

_PADDING = b" " * LARGE_BYTES
_VALUES = {DataType.BOOL: [True, False], DataType.BYTES: ["a", "é"]}
_SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, 2)),), ())
_HANDLE = cast(Handle, SimpleNamespace(name="m", version="1", signature=_SIGNATURE))
"""As much of a handle as a decoder looks at."""


def _seeds() -> list[Seed]:
    seeds: list[Seed] = []
    for datatype in DataType:
        values = _VALUES.get(datatype, [1, 2])
        about = {"name": "x", "shape": [1, 2], "datatype": datatype.value}
        seeds.append(_plain({"inputs": [about | {"data": values}]}))
        size = datatype.itemsize * 2 or 11
        raw = b"\x01\0\0\0a\x02\0\0\0bc" if not datatype.itemsize else bytes(size)
        seeds.append(_binary({"inputs": [about | {"parameters": {"binary_data_size": size}}]}, raw))
    x = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [-3e-7, 1e38]]}
    two = [x, {"name": "i", "shape": [2], "datatype": "INT64", "data": [-(2**63), 2**63 - 1]}]
    outputs = [{"name": "y", "parameters": {"classification": 2}}, {"name": "z", "parameters": {"binary_data": True}}]
    seeds.append(_plain({"id": "1", "inputs": two, "outputs": outputs, "parameters": {"priority": 1, "f": 0.5}}))
    shared = {"shared_memory_region": "r", "shared_memory_offset": 0, "shared_memory_byte_size": 16}
    seeds.append(_plain({"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "parameters": shared}]}))
    seeds.append(_plain({"inputs": [x], "outputs": [{"name": "y", "parameters": shared}]}))
    seeds.append((b"0\n", bytes(16)))
    return seeds


def _plain(about: object) -> Seed:
    return (b"\n", *json_words(about))


def _binary(about: object, *tensors: bytes) -> Seed:
    text = json.dumps(about).encode()
    return (b"%d\n" % len(text), *words(text), *tensors)


class OipTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"null",
        b"true",
        b"1e999",
        b"-1",
        b"1.5",
        b"NaN",
        b'"FP16"',
        b'"BYTES"',
        b'"FP32"',
        b'"\\u0000"',
        b'"\\ud800"',
        b"\xff",
        b"[" * 3000,
        b"[]",
        b"[[]]",
        b"{}",
        b'"data":',
        b'"shape":[0,1099511627776]',
        b'"shape":[4294967296,4294967296,0]',
        b'"parameters":{"binary_data_size":8}',
        b'"binary_data_output":true',
        b'"shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]',
    )

    def __init__(self) -> None:
        self.seeds = _seeds()
        self._memory = SharedMemory(enabled=True)
        self._decode = self._make()
        self._encode = HttpAnswerEncoder()
        self._valid = [b"".join(seed) for seed in self.seeds]
        self._meant = [self._understand(data)[0] for data in self._valid]
        self._turn = 0

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        line, _, body = data.partition(b"\n")
        if line.isdigit() and random.random() < 0.6:
            end = body.rfind(b"}") + 1
            data = b"%d\n%b" % (end, body)
        return data

    def split(self, data: bytes) -> Seed:
        line, end, body = data.partition(b"\n")
        return (line + end, *words(body))

    def run(self, data: bytes) -> None:
        meant, request = self._understand(data)
        _, json_length, body = _open(data)
        again, _ = meaning(lambda: self._make()(_HANDLE, body, json_length), len(data))
        assert meant == again, f"remembered as {meant}, but it is {again}"
        if json_length != 0:
            self._compare_large(meant, body, json_length)
        if request is not None:
            for binary in (ALL, NONE):
                try:
                    headers, text, tensors = self._encode(
                        InferResponse("m", "1", request.inputs, request.id), AnswerForm(binary)
                    )
                except PenstockError:
                    continue  # bytes that are no text, and datatypes that JSON has not
                assert headers
                assert text
                if tensors and not request.id:
                    assert b"".join(tensors) == b"".join(map(to_wire, request.inputs.values()))
        self._turn = (self._turn + 1) % len(self._valid)
        meant, _ = self._understand(self._valid[self._turn])
        assert meant == self._meant[self._turn], "what is valid is not understood any more"

    def _compare_large(self, meant: Meaning, body: bytes, json_length: int | None) -> None:
        """The decoder of large bodies must agree; spaces make ``body`` one."""
        size = min(len(body), len(body) if json_length is None else json_length)
        padded = body[:size] + _PADDING + body[size:]
        length = None if json_length is None else json_length + len(_PADDING)
        decoder = self._make()

        def decode() -> tuple[InferRequest, AnswerForm]:
            return decoder.complete(_HANDLE, *finish(decoder.in_steps(_HANDLE, length, padded)))

        large, _ = meaning(decode, len(padded))
        # It ignores repeated members, but not what is wrong in members that have no meaning.
        assert len(meant) == 2 or meant == large or not _is_json(padded[: size + len(_PADDING)]), (
            f"{meant} for a small body, {large} for a large one"
        )

    def _make(self) -> HttpRequestDecoder:
        return HttpRequestDecoder(self._memory)

    def close(self) -> None:
        self._memory.close()

    def _understand(self, data: bytes) -> tuple[Meaning, InferRequest | None]:
        _, json_length, body = _open(data)
        return meaning(lambda: self._decode(_HANDLE, body, json_length), len(data))


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _open(data: bytes) -> tuple[bytes, int | None, bytes]:
    line, _, body = data.partition(b"\n")
    return line, int(line) if line.isdigit() and len(line) <= 18 else None, body
