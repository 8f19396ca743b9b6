"""Fuzzes the scan of pickles and the unpickler with an allow-list."""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import joblib
import numpy as np

from penstock.offline.convert.tables.pickles import BASIC, load_trusted, names_in
from tests.fuzz.parts import pieces
from tests.fuzz.target import DecoderTarget, attempt

_OBJECT = {
    "list": [1, 2.5, None, True, b"bytes", "text", (1, 2), {3}],
    "ordered": OrderedDict(a=1),
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "objects": np.array(["a", None], object),
    "records": np.array([(1, 2.5)], [("a", np.int8), ("b", np.float64)]),
}


class TrustedPickleTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"cos\nsystem\n",
        b"cnumpy\nndarray\n",
        b"cnumpy\ndtype\n",
        b"\x8c\x06system\x8c\x02os\x93",
        b"(S'true'\nios\nsystem\n",
        b"R",
        b"b",
        b"\x81",
        b"O8",
        b"|O",
    )
    peak_factor = 4

    def __init__(self) -> None:
        joblibs = io.BytesIO()
        joblib.dump(_OBJECT, joblibs)
        dumped = [pickle.dumps(_OBJECT, protocol) for protocol in (0, 2, 4)] + [joblibs.getvalue()]
        super().__init__([pieces(data, 12) for data in dumped])

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = bytearray(b"".join(parts))
        if data[2:3] == b"\x95" and random.random() < 0.8:  # the length of a frame
            data[3:11] = max(0, len(data) - 11).to_bytes(8, "little")
        return bytes(data)

    def decode(self, data: bytes) -> object:
        with warnings.catch_warnings(action="ignore"):  # numpy warns about damaged types
            names = attempt(lambda: names_in(data))
            found = attempt(lambda: repr(load_trusted(data, BASIC)))
        return names, found
