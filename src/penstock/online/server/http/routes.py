"""Routes: map URLs to resources, each with an access guard and a handler per method."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import httptools

from penstock.online.server.access.table import Guard
from penstock.online.server.request_layout import BoundedCache

_PLACEHOLDER = re.compile(r"([^{]*)\{(\w+)\}(.*)")
_MAX_URL_BYTES = 4 << 10
"""Longer URLs have no route. Parsing a URL is not charged to a client, so it must take little time. No name is that long."""
_MAX_KNOWN_BYTES = 512
"""Maximum number of cached URLs."""
_VERSIONED = "/versions/{version}"


class Route(NamedTuple):
    """A parsed URL. Parts that are missing in the URL are empty."""

    handlers: Mapping[bytes, Handler]
    """The handler of each method; empty if no resource has the URL."""
    guard: Guard | None = None
    """Checks whether a client may use the resource; None if all clients may."""
    model: str = ""
    version: str = ""
    name: str = ""
    """A shared-memory region, a repository or a version label."""
    error: ErrorBody | None = None
    """Encodes the errors of this resource; None for the form of the Open Inference Protocol."""
    body: str = ""
    """The OpenAPI schema of the body."""


Handler = Callable[[Any, Route], None]
"""Answers an ``Exchange``. The type is ``Any`` because the module of ``Exchange`` imports this module."""
ErrorBody = Callable[[int, str], bytes]
"""Returns the body of an error response for a status and a message."""


class Resource(NamedTuple):
    """A path with a handler per method. Segments of the path may be ``{model}``, ``{version}`` or ``{name}``.

    A ``versioned`` path also exists with ``/versions/{version}`` after the model's name. ``access/table.py`` defines which clients
    may use the resource.
    """

    path: str
    handlers: Mapping[bytes, Handler]
    """The handler of each method. The first line of a handler's docstring is its summary in OpenAPI."""
    versioned: bool = False
    error: ErrorBody | None = None
    answer: str = ""
    """The OpenAPI schema of responses; empty if responses have no body."""
    body: str = ""
    """The OpenAPI schema of POST and PUT bodies; empty if there is no body."""

    @property
    def paths(self) -> list[str]:
        """The path and its versioned form."""
        return [self.path, self.path.replace("{model}", "{model}" + _VERSIONED)] if self.versioned else [self.path]


class Routes(BoundedCache[bytes, Route]):
    """``routes[url]`` is the route of a request target.

    The first resource whose path matches wins. Names in the URL are percent-decoded. Parsed URLs are cached, because clients use
    only a small number of different URLs.
    """

    def __init__(self, resources: Iterable[Resource], guard_of: Callable[[str], Guard | None]) -> None:
        """``guard_of`` returns the guard of a resource's path."""
        super().__init__()
        guarded = [(resource, guard_of(resource.path)) for resource in resources]
        self._resources = [(_pattern(path), *pair) for pair in guarded for path in pair[0].paths]

    def __missing__(self, url: bytes) -> Route:
        route = self._parse(url)
        return self.remember(url, route) if len(url) <= _MAX_KNOWN_BYTES else route

    def _parse(self, url: bytes) -> Route:
        if len(url) > _MAX_URL_BYTES:
            return NOWHERE
        path = url.partition(b"?")[0]
        if not path.startswith(b"/"):
            # The URL has the absolute form, which proxies send.
            try:
                path = httptools.parse_url(url).path or b""
            except httptools.HttpParserInvalidURLError:
                return NOWHERE
        segments = path.split(b"/")
        for pattern, resource, guard in self._resources:
            if (found := pattern.match(segments)) is not None:
                try:
                    names = {name: unquote_to_bytes(value).decode() for name, value in found.items()}
                except UnicodeDecodeError:
                    return NOWHERE
                return Route(_with_head(resource.handlers), guard, error=resource.error, body=resource.body, **names)
        return NOWHERE


NOWHERE = Route({})
"""The route of a URL that has no resource."""


def _with_head(handlers: Mapping[bytes, Handler]) -> Mapping[bytes, Handler]:
    """Use the handler of GET also for HEAD. The connection omits the body of the response."""
    return {**handlers, b"HEAD": handlers[b"GET"]} if b"GET" in handlers else handlers


class _Placeholder(NamedTuple):
    """A segment with a name between ``before`` and ``after``."""

    name: str
    before: bytes
    after: bytes

    def find(self, segment: bytes) -> bytes:
        """The name in ``segment``; empty if the segment does not match."""
        if not (segment.startswith(self.before) and segment.endswith(self.after)):
            return b""
        value = segment[len(self.before) : len(segment) - len(self.after)]
        return b"" if self.name == "version" and not value.isdigit() else value


class _Pattern(NamedTuple):
    """A path: its literal segments and its other segments, by position, and the number of all segments."""

    size: int
    literals: dict[int, bytes]
    placeholders: dict[int, _Placeholder]

    def match(self, segments: Sequence[bytes]) -> dict[str, bytes] | None:
        """The names in ``segments``; None if ``segments`` do not match the path."""
        if len(segments) != self.size or any(segments[place] != text for place, text in self.literals.items()):
            return None
        found = {one.name: one.find(segments[place]) for place, one in self.placeholders.items()}
        return found if all(found.values()) else None


def _pattern(path: str) -> _Pattern:
    segments = path.split("/")
    matches = {place: _PLACEHOLDER.fullmatch(segment) for place, segment in enumerate(segments)}
    return _Pattern(
        len(segments),
        {place: segments[place].encode() for place, match in matches.items() if match is None},
        {
            place: _Placeholder(match[2], match[1].encode(), match[3].encode())
            for place, match in matches.items()
            if match is not None
        },
    )
