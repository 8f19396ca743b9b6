"""Fuzzes a port that speaks both protocols: it passes a connection on to HTTP/1.1 or HTTP/2 by its first bytes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from penstock.online.server.h2.connection import H2Connection, H2Context
from penstock.online.server.http.connection import Http1Connection
from penstock.online.server.network.sniffer import PREFACE, Sniffer
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Target
from tests.fuzz.targets.network.h2 import H2Target
from tests.fuzz.targets.network.http import HttpTarget

_TIMEOUT_S = 10.0
_GRPC_ANSWER = np.array([[2, 4]], np.float32).tobytes()
_HTTP_ANSWER = b'"data":[2.0,4.0]}]}'


class SnifferTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (PREFACE, PREFACE[:5], b"PRI * HTTP/1.1\r\n\r\n", b"\r\n")

    def __init__(self) -> None:
        self._http, self._h2 = HttpTarget(), H2Target()
        self._lab = self._http._lab
        planes = self._lab.planes
        self._shared = H2Context(planes.service.methods, planes.config, planes.connections, self._lab.loop)
        self.seeds: Sequence[Seed] = [
            *self._http.seeds[::4],
            *self._h2.seeds[::4],
            (PREFACE,),
            (PREFACE[:9], PREFACE[9:]),
        ]

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        return random.choice((self._http, self._h2)).join(parts, random)

    def run(self, data: bytes) -> None:
        self._lab.try_out(self._connect, data)
        assert self._lab.ask(self._connect, self._http._valid).endswith(_HTTP_ANSWER)
        assert _GRPC_ANSWER in self._lab.ask(self._connect, self._h2._valid)

    def close(self) -> None:
        self._h2.close()
        self._http.close()

    def _connect(self) -> Sniffer:
        return Sniffer(self._lab.planes.connections, self._connect_http, self._connect_h2, _TIMEOUT_S)

    def _connect_http(self) -> Http1Connection:
        return self._http._connect()

    def _connect_h2(self) -> H2Connection:
        return H2Connection(self._shared)
