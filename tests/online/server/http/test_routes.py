import pytest

from penstock.clock import ManualClock
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import Guard, Needs
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.routes import Resource, Route, Routes


def one(exchange: Exchange, route: Route) -> None:
    """Handles nothing."""


def other(exchange: Exchange, route: Route) -> None:
    """Handles nothing."""


def encode(status: int, message: str) -> bytes:
    return b"%d" % status + message.encode()


GUARD = Guard(Needs.ADMIN, Access(None, ManualClock()))
GET, POST = {b"GET": one, b"HEAD": one}, {b"POST": other}
RESOURCES = [
    Resource("/v2", {b"GET": one}),
    Resource("/v2/models/stats", POST),
    Resource("/v2/models/{model}", GET, versioned=True),
    Resource("/v2/models/{model}/infer", POST, versioned=True),
    Resource("/v2/region/{name}/status", GET),
    Resource("/v1/models/{model}:predict", POST, versioned=True, error=encode),
    Resource("/v1/models/{model}", GET),
]


def make_routes() -> Routes:
    """Regions are guarded."""
    return Routes(RESOURCES, lambda path: GUARD if "region" in path else None)


@pytest.mark.parametrize(
    ("url", "route"),
    [
        (b"/v2", Route(GET)),
        (b"/v2?verbose=1", Route(GET)),
        (b"/v2/models/m", Route(GET, None, "m")),
        (b"/v2/models/m/versions/2", Route(GET, None, "m", "2")),
        (b"/v2/models/stats", Route(POST)),
        (b"/v2/models/stats/infer", Route(POST, None, "stats")),
        (b"/v2/models/a%20b%2Fc/infer", Route(POST, None, "a b/c")),
        (b"/v2/models/m/versions/10/infer", Route(POST, None, "m", "10")),
        (b"http://host:8000/v2/models/m/infer", Route(POST, None, "m")),
        (b"http://host:8000/v2/models/m?a=b", Route(GET, None, "m")),
        (b"/v2/region/r.1/status", Route(GET, GUARD, name="r.1")),
        (b"/v1/models/m:predict", Route(POST, None, "m", error=encode)),
        (b"/v1/models/a:b:predict", Route(POST, None, "a:b", error=encode)),
        (b"/v1/models/m/versions/3:predict", Route(POST, None, "m", "3", error=encode)),
        (b"/v1/models/m:other", Route(GET, None, "m:other")),
    ],
)
def test_what_a_url_means(url: bytes, route: Route) -> None:
    assert make_routes()[url] == route


@pytest.mark.parametrize(
    "url",
    [
        b"",
        b"*",
        b"/",
        b"/v2/",
        b"/v1/models",
        b"/v1/models/m/versions/3:other",
        b"/v2/models/m/",
        b"/v2/models//infer",
        b"/v2/models/m/infer/",
        b"/v2/models/m/versions/x",
        b"/v2/models/m/versions/-1/infer",
        b"/v2/models/%ff/infer",
        b"http://",
    ],
)
def test_anything_else_leads_nowhere(url: bytes) -> None:
    assert not make_routes()[url].handlers


def test_the_memory_of_urls_is_bounded() -> None:
    routes = make_routes()
    for number in range(5000):
        assert routes[b"/v2/models/%d" % number].model == str(number)
    assert len(routes) <= 1024


def test_long_urls_are_not_kept_and_longer_ones_lead_nowhere() -> None:
    routes = make_routes()
    name = "%41" * 1300
    assert routes[f"/v2/models/{name}/infer".encode()].model == "A" * 1300
    assert not routes
    assert routes[b"/v2/models/m?" + b"a" * 9000] == Route({})
    assert not routes
