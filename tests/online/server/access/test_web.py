"""Which senders may use the server, according to the headers that browsers send."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, PermissionDenied
from penstock.online.server.access.web import Sender, WebAccess, host_name
from penstock.online.server.config import ServerConfig

LOCAL = WebAccess.of(ServerConfig(), "127.0.0.1")
APP = WebAccess(["https://app.example"])


EXPOSED = WebAccess.of(ServerConfig(), "0.0.0.0")


def admits(web: WebAccess, host: bytes = b"localhost:8000", method: bytes = b"POST", **sender: bytes) -> bool:
    try:
        web.check(method, Sender(host, **sender))
    except PermissionDenied:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LOCALHOST:8000", b"localhost.", b"a.localhost:1", b"127.0.0.1:8000", b"127.9.9.9", b"[::1]:8000"],
)
def test_a_server_on_loopback_answers_to_its_own_names(host: bytes) -> None:
    assert admits(LOCAL, host)


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example:8000",
        b"localhost.evil.example",
        b"127.0.0.1.evil.example",
        b"evillocalhost",
        b"10.0.0.1",
        b"0.0.0.0",
        b"[::2]",
        b"",
        b"::1",
        b"[::ffff:10.0.0.1]",
    ],
)
def test_a_server_on_loopback_answers_to_no_other_name(host: bytes) -> None:
    assert not admits(LOCAL, host)
    assert admits(WebAccess(), host)


@pytest.mark.parametrize(
    ("settings", "host", "other_is_known"),
    [
        ({}, "127.0.0.1", False),
        ({}, "localhost", False),
        ({}, "::1", False),
        ({}, "0.0.0.0", True),
        ({}, "10.0.0.7", True),
        ({"keys_file": "keys.toml"}, "127.0.0.1", True),
        ({"allow_host": ("*",)}, "127.0.0.1", True),
        ({"allow_host": ("api.example",)}, "127.0.0.1", False),
        ({"allow_host": ("api.example",)}, "0.0.0.0", False),
        ({"allow_host": ("api.example",), "keys_file": "keys.toml"}, "0.0.0.0", False),
    ],
)
def test_names_matter_on_loopback_without_keys_and_where_they_are_listed(
    settings: dict[str, object], host: str, other_is_known: bool
) -> None:
    web = WebAccess.of(ServerConfig(**settings), host)  # type: ignore[arg-type]
    assert admits(web, b"evil.example") is other_is_known
    assert admits(web, b"localhost:8000")
    assert admits(web, host.encode() if ":" not in host else b"[%b]:80" % host.encode())
    if settings.get("allow_host"):
        assert admits(web, b"API.example:8000")


REBOUND = ({"language": b"en"}, {"language": b"*"}, {"origin": b"http://evil.example:8000"})
"""What a browser sends over plain HTTP for a page of the name that it asks."""


@pytest.mark.parametrize("sender", REBOUND)
def test_a_rebound_page_does_not_reach_a_server_on_the_network(sender: dict[str, bytes]) -> None:
    host = b"evil.example:8000"
    assert not admits(EXPOSED, host, **sender)
    assert not admits(EXPOSED, host, b"GET", **sender)
    assert not admits(EXPOSED, b"local.evil.example:8000", language=b"en")
    assert not admits(EXPOSED, b"evilinternal.example", language=b"en")
    for settings in ({"allow_host": ("evil.example",)}, {"keys_file": "keys.toml"}):
        assert admits(WebAccess.of(ServerConfig(**settings), "0.0.0.0"), host, **sender)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sender",
    [
        {},  # curl, client libraries, probes of load balancers
        {"language": b"*", "fetch_mode": b"cors"},  # fetch of Node.js
        {"language": b"en", "fetch_site": b"same-origin"},  # a page behind a proxy with TLS
        {"language": b"en", "fetch_site": b"none", "fetch_mode": b"navigate"},
    ],
)
@pytest.mark.parametrize("host", [b"penstock.default:8000", b"models.example.com", b""])
def test_other_clients_reach_a_server_on_the_network_by_any_name(host: bytes, sender: dict[str, bytes]) -> None:
    assert admits(EXPOSED, host, **sender)


@pytest.mark.parametrize(
    "host",
    [
        b"gpu-box:8000",
        b"GPU.Local.",
        b"penstock.default.svc.cluster.local",
        b"penstock.corp.internal:80",
        b"10.0.0.7:8000",
        b"[fd00::7]:8000",
        b"localhost",
        socket.gethostname().encode(),
    ],
)
def test_a_browser_reaches_a_server_on_the_network_by_names_that_no_stranger_can_own(host: bytes) -> None:
    assert admits(EXPOSED, host, b"GET", language=b"en")
    assert admits(EXPOSED, host, origin=b"http://" + host, language=b"en")


@pytest.mark.parametrize(
    ("sender", "is_admitted"),
    [
        ({}, True),
        ({"origin": b"http://localhost:8000"}, True),
        ({"origin": b"https://localhost:8000"}, True),
        ({"origin": b"http://localhost:3000"}, False),
        ({"origin": b"http://evil.example"}, False),
        ({"origin": b"null"}, False),
        ({"origin": b"localhost:8000"}, False),
        ({"fetch_site": b"same-origin"}, True),
        ({"fetch_site": b"none"}, True),
        ({"fetch_site": b"same-site"}, False),
        ({"fetch_site": b"cross-site"}, False),
        ({"fetch_site": b"Cross-Site", "fetch_mode": b"navigate"}, False),
        ({"fetch_site": b"what else"}, False),
        ({"fetch_site": b"same-origin", "origin": b"https://behind.a.proxy"}, True),
    ],
)
def test_pages_of_other_origins_may_not_ask(sender: dict[str, bytes], is_admitted: bool) -> None:
    assert admits(LOCAL, **sender) is is_admitted
    assert admits(WebAccess(), **sender) is is_admitted
    assert admits(WebAccess(["*"]), **sender)
    if "origin" in sender:
        assert not admits(WebAccess(), b"", origin=sender["origin"]) or "fetch_site" in sender


@pytest.mark.parametrize(
    ("method", "is_admitted"), [(b"GET", True), (b"HEAD", True), (b"POST", False), (b"OPTIONS", False)]
)
def test_a_link_may_be_followed(method: bytes, is_admitted: bool) -> None:
    assert admits(LOCAL, method=method, fetch_site=b"cross-site", fetch_mode=b"navigate") is is_admitted
    assert not admits(LOCAL, method=method, fetch_site=b"cross-site", fetch_mode=b"no-cors")


def test_pages_of_allowed_origins_may_ask_and_read() -> None:
    assert admits(APP, origin=b"https://app.example", fetch_site=b"cross-site")
    assert not admits(APP, origin=b"http://app.example", fetch_site=b"cross-site")
    assert not admits(APP, fetch_site=b"cross-site")
    assert b"Access-Control-Allow-Origin: https://app.example\r\n" in APP.headers(b"https://app.example")
    assert b"Access-Control-Allow-Origin: *\r\n" in WebAccess(["*"]).headers(b"https://any.example")
    assert APP.headers(b"https://evil.example") == b""
    assert APP.headers(b"") == b"Vary: Origin\r\n"
    assert WebAccess().headers(b"https://app.example") == b""


@pytest.mark.parametrize("host", [b"a b", b"a/b", b"user@name", b"name:port", b"[::1]x", b"caf\xe9", b"[zz", b"a:1:2"])
def test_a_malformed_name_is_refused(host: bytes) -> None:
    with pytest.raises(InvalidArgument, match="malformed"):
        Sender().read(b"host", host)


@given(st.binary())
def test_any_name_is_read_or_refused(host: bytes) -> None:
    sender = Sender()
    try:
        sender.read(b"host", host)
    except InvalidArgument:
        return
    assert sender.host == host
    assert isinstance(host_name(host), str)
    with pytest.raises(InvalidArgument, match="repeated"):
        sender.read(b"host", host)


@pytest.mark.parametrize(("origin", "hint"), [(b"null", "from a web server"), (b"https://a.example", "--allow-origin")])
def test_the_hint_names_an_option_only_if_it_admits_the_origin(origin: bytes, hint: str) -> None:
    with pytest.raises(PermissionDenied) as caught:
        LOCAL.check(b"POST", Sender(b"localhost:8000", origin=origin))
    assert hint in caught.value.hint
    assert ("--allow-origin" in caught.value.hint) == (origin != b"null")
