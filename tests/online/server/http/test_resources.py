from http_servers import GatedServer, get
from penstock.online.server.http.resources import merge
from penstock.online.server.http.routes import Resource, Route


def one(exchange: object, route: Route) -> None:
    """Handles nothing."""


def other(exchange: object, route: Route) -> None:
    """Handles nothing."""


def test_dialects_share_resources_and_verbs_come_first() -> None:
    first = [Resource("/v1/{model}", {b"GET": one}), Resource("/", {b"GET": one})]
    second = [Resource("/v1/{model}:predict", {b"POST": one}), Resource("/", {b"GET": other, b"OPTIONS": other})]
    found = merge([first, second])
    assert [resource.path for resource in found] == ["/v1/{model}:predict", "/v1/{model}", "/"]
    assert found[2].handlers == {b"GET": one, b"OPTIONS": other}


def test_dialects_that_are_not_named_are_not_there() -> None:
    with GatedServer(dialects=("kserve-v1",)) as server:
        client = server.connect()
        assert client.ask(get("/v1/models/m")).status == 200
        assert client.ask(get("/ping")).status == 404
        assert client.ask(get("/v2/models/m")).status == 200
