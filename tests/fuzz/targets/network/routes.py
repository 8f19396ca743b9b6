"""Fuzzes what a request says about itself: its URL, and where it comes from (``Host``, ``Origin``, ``Sec-Fetch-Site``).

A message is a request line and header lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InvalidArgument, PermissionDenied
from penstock.online.server.access.table import Guard
from penstock.online.server.access.web import Sender, WebAccess, host_name
from penstock.online.server.config import is_loopback
from penstock.online.server.http.resources import make_resources
from penstock.online.server.http.routes import NOWHERE, Routes
from tests.fuzz.fast_loop import FastLoop
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import tokens
from tests.fuzz.planes import Planes
from tests.fuzz.target import DecoderTarget

_OWN = "own.example"
_ALLOWED = b"https://allowed.example"
_MESSAGES = (
    b"GET /v2/models/m%20%C3%A9/versions/3/config?a=b\nHost: localhost:8000\n",
    b"POST http://127.0.0.1:8000/v2/repository/models/a/load\nHost: 127.0.0.1\nSec-Fetch-Site: same-origin\n",
    b"POST /v1/models/m/labels/stable:predict\nHost: [::1]:8000\nOrigin: http://[::1]:8000\n",
    b"OPTIONS /v2\nHost: own.example\nOrigin: https://allowed.example\nAccess-Control-Request-Method: POST\n",
    b"GET /\nHost: evil.example\nOrigin: null\nSec-Fetch-Site: cross-site\nSec-Fetch-Mode: navigate\n",
    b"POST /v2/models/m/infer\nHost: localhost\nOrigin: https://evil.example\n",
)


class RoutesTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"%2F",
        b"%2e%2e",
        b"%00",
        b"%ff",
        b"//",
        b"..",
        b"Origin: null\n",
        b"Host: \n",
        b"@",
        b".",
        b"localhost.",
        b"?",
    )

    def __init__(self) -> None:
        loop = FastLoop()
        planes = loop.run_until_complete(self._make(loop))
        planes.shared_memory.close()
        loop.close()
        resources = make_resources(planes.dataplane, planes.control, planes.access, planes.config)
        self._routes = Routes(resources, planes.table.of_path)
        self._fresh = Routes(resources, planes.table.of_path)
        self._web = WebAccess([_ALLOWED.decode()], [_OWN])
        super().__init__([self.split(message) for message in _MESSAGES])

    def split(self, data: bytes) -> Seed:
        return tokens(data)

    def decode(self, data: bytes) -> object:
        line, *headers = data.split(b"\n")
        method, _, url = line.partition(b" ")
        return self._find(url), self._judge(method, headers)

    def _find(self, url: bytes) -> object:
        route = self._routes[url]
        self._fresh.clear()
        assert self._fresh[url] == route, "the remembered route is another"
        if route is not NOWHERE:
            assert route.handlers
            assert not route.version or route.version.isdecimal()
            assert isinstance(route.guard, Guard | None)
        return route.model, route.version, route.name

    def _judge(self, method: bytes, headers: Sequence[bytes]) -> object:
        sender = Sender()
        for header in headers:
            name, _, value = header.partition(b":")
            try:
                sender.read(name.lower(), value.strip())
            except InvalidArgument:
                return "malformed"
        allowed = self._web.headers(sender.origin)
        assert b"Access-Control-Allow-Origin" not in allowed or sender.origin == _ALLOWED
        assert allowed.count(b"\n") <= 3
        try:
            self._web.check(method, sender)
        except PermissionDenied:
            return "refused"
        if sender.host is not None:
            name = host_name(sender.host).lower().removesuffix(".")
            assert name == _OWN or is_loopback(name), "it answers to another name"
        if sender.origin and method == b"POST" and not sender.fetch_site:
            own = sender.origin.lower().partition(b"://")[2]
            assert sender.origin == _ALLOWED or own == (sender.host or b"").lower(), "another site may post"
        return "allowed"

    @staticmethod
    async def _make(loop: FastLoop) -> Planes:
        return Planes(loop)
