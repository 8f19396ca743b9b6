"""Routes: which URL is what resource, and who answers each of its methods. Knows no particular resource."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes

import httptools

if TYPE_CHECKING:
    from penstock.online.server.http.exchange import Exchange

_MAX_CACHED = 1024
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_VERSIONED = "/versions/{version}"


class Needs(enum.Enum):
    """What a caller has to show, where the server knows its clients."""

    NOTHING = enum.auto()
    KEY = enum.auto()
    """A key, and the right to the model if the URL names one."""
    ADMIN = enum.auto()
    """The key of one who may control the server."""


class Route(NamedTuple):
    """A URL understood; what it does not name is empty."""

    handlers: Mapping[bytes, Handler]
    """By method; empty if the URL means nothing."""
    needs: Needs = Needs.KEY
    model: str = ""
    version: str = ""
    name: str = ""
    """Of a region of shared memory, of a repository, or a version's label."""
    error: ErrorBody | None = None
    """How this resource writes errors; None: as the Open Inference Protocol does."""


Handler = Callable[["Exchange", Route], None]
ErrorBody = Callable[[int, str], bytes]
"""The body for a status and a message."""


class Resource(NamedTuple):
    """What has a URL: a path with ``{model}``, ``{version}`` or ``{name}`` in place of a segment, and a handler per method.

    A ``versioned`` path exists with ``/versions/{version}`` after the model's name as well.
    """

    path: str
    handlers: Mapping[bytes, Handler]
    versioned: bool = False
    needs: Needs = Needs.KEY
    error: ErrorBody | None = None

    @property
    def paths(self) -> list[str]:
        """All its paths."""
        return [self.path, self.path.replace("{model}", "{model}" + _VERSIONED)] if self.versioned else [self.path]


class Routes(dict[bytes, Route]):
    """``routes[url]`` is the route of a request's target; paths match whole and literally, names are percent-decoded.

    The first resource that matches has it. Each URL is parsed once, since clients ask for a few over and over. The memory
    of them is bounded.
    """

    def __init__(self, resources: Iterable[Resource]) -> None:
        super().__init__()
        self._resources = [(_pattern(path), resource) for resource in resources for path in resource.paths]

    def __missing__(self, url: bytes) -> Route:
        if len(self) >= _MAX_CACHED:
            self.clear()
        route = self[url] = self._parse(url)
        return route

    def _parse(self, url: bytes) -> Route:
        path = url.partition(b"?")[0]
        if not path.startswith(b"/"):
            # The absolute form, as proxies send it.
            try:
                parsed = httptools.parse_url(url)
            except httptools.HttpParserInvalidURLError:
                return NOWHERE
            path = parsed.path or b""
        for pattern, resource in self._resources:
            if match := pattern.fullmatch(path):
                try:
                    names = {name: unquote_to_bytes(value).decode() for name, value in match.groupdict().items()}
                except UnicodeDecodeError:
                    return NOWHERE
                return Route(resource.handlers, resource.needs, error=resource.error, **names)
        return NOWHERE


NOWHERE = Route({})
"""What a URL that means nothing leads to."""


def _pattern(path: str) -> re.Pattern[bytes]:
    def segment(match: re.Match[str]) -> str:
        return f"(?P<{match[1]}>{'[0-9]+' if match[1] == 'version' else '[^/]+'})"

    return re.compile(_PLACEHOLDER.sub(segment, path).encode())
