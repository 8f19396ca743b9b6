import pytest

from penstock.online.server.routes import Action, Route, Routes


@pytest.mark.parametrize(
    ("url", "route"),
    [
        (b"/v2", Route(Action.SERVER_METADATA)),
        (b"/v2/health/live", Route(Action.LIVE)),
        (b"/v2/health/ready?verbose=1", Route(Action.READY)),
        (b"/v2/models/m", Route(Action.MODEL_METADATA, b"GET", "m")),
        (b"/v2/models/m/versions/2", Route(Action.MODEL_METADATA, b"GET", "m", "2")),
        (b"/v2/models/m/ready", Route(Action.MODEL_READY, b"GET", "m")),
        (b"/v2/models/a%20b%2Fc/infer", Route(Action.INFER, b"POST", "a b/c")),
        (b"/v2/models/m/versions/10/infer", Route(Action.INFER, b"POST", "m", "10")),
        (b"http://host:8000/v2/models/m/infer", Route(Action.INFER, b"POST", "m")),
    ],
)
def test_what_a_url_means(url: bytes, route: Route) -> None:
    assert Routes()[url] == route


@pytest.mark.parametrize(
    "url",
    [
        b"",
        b"*",
        b"/",
        b"/v2/",
        b"/v1/models/m",
        b"/v2/models/m/",
        b"/v2/models//infer",
        b"/v2/models/m/infer/",
        b"/v2/models/m/versions/x",
        b"/v2/models/m/versions/-1/infer",
        b"/v2/models/%ff/infer",
        b"http://",
    ],
)
def test_anything_else_is_unknown(url: bytes) -> None:
    assert Routes()[url].action is Action.UNKNOWN


def test_the_memory_of_urls_is_bounded() -> None:
    routes = Routes()
    for number in range(5000):
        assert routes[b"/v2/models/%d" % number].model == str(number)
    assert len(routes) <= 1024
