"""Routes: which URL is what resource, who may use it, and who answers each of its methods. Knows no particular resource."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import httptools

from penstock.online.server.access.table import Guard

_MAX_CACHED = 1024
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_VERSIONED = "/versions/{version}"


class Route(NamedTuple):
    """A URL understood; what it does not name is empty."""

    handlers: Mapping[bytes, Handler]
    """By method; empty if the URL leads nowhere."""
    guard: Guard | None = None
    """Admits callers; None if everyone may use the resource."""
    model: str = ""
    version: str = ""
    name: str = ""
    """Of a region of shared memory, of a repository, or a version's label."""
    error: ErrorBody | None = None
    """How this resource writes errors; None: as the Open Inference Protocol does."""


Handler = Callable[[Any, Route], None]
"""Answers an ``Exchange``, which knows its route, so that its type cannot be named here."""
ErrorBody = Callable[[int, str], bytes]
"""The body for a status and a message."""


class Resource(NamedTuple):
    """What has a URL: a path with ``{model}``, ``{version}`` or ``{name}`` in place of a segment, and a handler per method.

    A ``versioned`` path exists with ``/versions/{version}`` after the model's name as well. ``access/table.py`` says who may
    use it.
    """

    path: str
    handlers: Mapping[bytes, Handler]
    """By method. The first line of a handler's docstring describes it in OpenAPI."""
    versioned: bool = False
    error: ErrorBody | None = None
    answer: str = ""
    """The OpenAPI schema of its answers; empty if they have no body."""
    body: str = ""
    """The OpenAPI schema of the body that POST and PUT take; empty if they take none."""

    @property
    def paths(self) -> list[str]:
        """All its paths."""
        return [self.path, self.path.replace("{model}", "{model}" + _VERSIONED)] if self.versioned else [self.path]


class Routes(dict[bytes, Route]):
    """``routes[url]`` is the route of a request's target; paths match whole and literally, names are percent-decoded.

    The first resource that matches has it. Each URL is parsed once, since clients ask for a few over and over. The memory
    of them is bounded.
    """

    def __init__(self, resources: Iterable[Resource], guard_of: Callable[[str], Guard | None]) -> None:
        """``guard_of`` makes the guard of a resource's path."""
        super().__init__()
        guarded = [(resource, guard_of(resource.path)) for resource in resources]
        self._resources = [(_pattern(path), *pair) for pair in guarded for path in pair[0].paths]

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
                path = httptools.parse_url(url).path or b""
            except httptools.HttpParserInvalidURLError:
                return NOWHERE
        for pattern, resource, guard in self._resources:
            if match := pattern.fullmatch(path):
                try:
                    names = {name: unquote_to_bytes(value).decode() for name, value in match.groupdict().items()}
                except UnicodeDecodeError:
                    return NOWHERE
                return Route(resource.handlers, guard, error=resource.error, **names)
        return NOWHERE


NOWHERE = Route({})
"""The route of a URL that leads nowhere."""


def _pattern(path: str) -> re.Pattern[bytes]:
    def segment(match: re.Match[str]) -> str:
        return f"(?P<{match[1]}>{'[0-9]+' if match[1] == 'version' else '[^/]+'})"

    return re.compile(_PLACEHOLDER.sub(segment, path).encode())
