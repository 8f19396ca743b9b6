"""Routes of the Open Inference Protocol: which URL means what."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import httptools

_MAX_CACHED = 1024
_MODEL = re.compile(rb"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(ready|infer))?")


class Action(enum.Enum):
    """What is asked for."""

    UNKNOWN = enum.auto()
    SERVER_METADATA = enum.auto()
    LIVE = enum.auto()
    READY = enum.auto()
    MODEL_METADATA = enum.auto()
    MODEL_READY = enum.auto()
    INFER = enum.auto()


class Route(NamedTuple):
    """A URL understood; ``model`` and ``version`` are empty where it names none."""

    action: Action
    method: bytes = b"GET"
    model: str = ""
    version: str = ""


_FIXED = {
    b"/v2": Route(Action.SERVER_METADATA),
    b"/v2/health/live": Route(Action.LIVE),
    b"/v2/health/ready": Route(Action.READY),
}
_UNKNOWN = Route(Action.UNKNOWN)
_OF_MODEL = {None: Action.MODEL_METADATA, b"ready": Action.MODEL_READY, b"infer": Action.INFER}


class Routes(dict[bytes, Route]):
    """``routes[url]`` is the route of a request's target; paths match whole and literally, model names are percent-decoded.

    Each URL is parsed once, since clients ask for a few over and over. The memory of them is bounded.
    """

    def __missing__(self, url: bytes) -> Route:
        if len(self) >= _MAX_CACHED:
            self.clear()
        route = self[url] = _parse(url)
        return route


def _parse(url: bytes) -> Route:
    path = url.partition(b"?")[0]
    if not path.startswith(b"/"):
        # The absolute form, as proxies send it.
        try:
            path = httptools.parse_url(url).path or b""
        except httptools.HttpParserInvalidURLError:
            return _UNKNOWN
    if path in _FIXED:
        return _FIXED[path]
    match = _MODEL.fullmatch(path)
    if match is None:
        return _UNKNOWN
    try:
        name = unquote_to_bytes(match[1]).decode()
    except UnicodeDecodeError:
        return _UNKNOWN
    action = _OF_MODEL[match[3]]
    return Route(action, b"POST" if action is Action.INFER else b"GET", name, (match[2] or b"").decode())
