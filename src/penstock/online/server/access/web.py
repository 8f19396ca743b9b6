"""Decides which web pages may use the server.

A browser sends the requests of all pages from the user's machine. Any site's page could therefore use a server that listens only on
this machine. Browsers identify the page in ``Origin`` and ``Sec-Fetch-Site``. A site may give its own name the address 127.0.0.1
(DNS rebinding). The browser then regards the server as part of that site, and only ``Host`` shows the site's name. Of these
headers, clients that are not browsers send only ``Host``.

A server that other machines can reach may be reached under unknown names, such as the name of a load balancer. Such a server
therefore checks ``Host`` only in requests of browsers over plain HTTP, where rebinding is possible. A request of this kind has
``Accept-Language`` or ``Origin``, and lacks ``Sec-Fetch-*``. Browsers send ``Sec-Fetch-*`` only over HTTPS and to loopback
addresses. Pages cannot change these headers. A name is safe if public DNS cannot contain it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

import msgspec

from penstock.errors import InvalidArgument, PermissionDenied, quoted
from penstock.online.server.config import ServerConfig, is_loopback

_PRIVATE = ("local", "internal", "localhost", "home.arpa")
"""Domains that public DNS does not contain (RFC 6761, RFC 6762, RFC 8375)."""
_HOST = re.compile(rb"(?:[\w.~%!$&'()*+,;=-]*|\[[\w.:]+\])(?::[0-9]*)?")


class Sender(msgspec.Struct, gc=False):
    """The headers that identify the origin of a request; empty if they are missing."""

    host: bytes | None = None
    """The header ``Host``; None if an HTTP/1.0 request lacks it."""
    origin: bytes = b""
    fetch_site: bytes = b""
    fetch_mode: bytes = b""
    language: bytes = b""
    is_preflight: bool = False
    """True for a CORS preflight request, in which a browser asks what a page may send."""

    @property
    def is_plain_browser(self) -> bool:
        """True for a browser's request over plain HTTP to an address that is not a loopback address."""
        return bool(self.origin or self.language) and not (self.fetch_site or self.fetch_mode)

    def read(self, name: bytes, value: bytes) -> None:
        """Read one header. ``name`` is in lower case. Ignores headers that do not identify the sender. Raises InvalidArgument."""
        match name:
            case b"host":
                if self.host is not None or not _HOST.fullmatch(value):
                    raise InvalidArgument(
                        "the header Host is repeated or malformed", "send it once, as name or name:port"
                    )
                self.host = value
            case b"origin":
                self.origin = value
            case b"sec-fetch-site":
                self.fetch_site = value
            case b"sec-fetch-mode":
                self.fetch_mode = value
            case b"accept-language":
                self.language = value
            case b"access-control-request-method":
                self.is_preflight = True


class WebAccess:
    """Decides which senders may use the server. Pure."""

    def __init__(
        self, origins: Iterable[str] = (), hosts: Iterable[str] | None = None, is_exposed: bool = False
    ) -> None:
        """``origins`` are the origins whose pages may send requests. ``*`` allows all origins. ``hosts`` are the names that clients
        may use for the server, in addition to loopback names. None allows every name. With ``is_exposed``, names are checked only
        for browsers over plain HTTP. Addresses, and names that public DNS cannot contain, are then also allowed.
        """
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = None if hosts is None else frozenset(host.lower().removesuffix(".") for host in hosts)
        self._is_exposed = is_exposed

    @classmethod
    def of(cls, config: ServerConfig, host: str) -> WebAccess:
        """The rules of ``config`` for a port that listens on ``host``."""
        # If clients need keys, DNS rebinding does not help an attacker.
        if "*" in config.allow_host or (config.keys_file and not config.allow_host):
            return cls(config.allow_origin)
        is_exposed = not config.allow_host and not is_loopback(host)
        return cls(config.allow_origin, (host, socket.gethostname(), *config.allow_host), is_exposed)

    def check(self, method: bytes, sender: Sender) -> None:
        """Raise PermissionDenied if ``sender`` may not send a request with ``method``."""
        if sender.host is not None and not self._knows(sender.host, sender):
            raise PermissionDenied(
                f"this server does not answer to the name {quoted(host_name(sender.host))}",
                "use localhost or 127.0.0.1, or start the server with '--set allow_host=NAME'",
            )
        if not self._may_ask(method, sender):
            page = f"a page of {quoted(sender.origin.decode('latin-1'))}" if sender.origin else "another site's page"
            hint = "start the server with '--allow-origin ORIGIN' to allow it"
            if sender.origin == b"null":
                hint = "open the page from a web server, since files and sandboxed frames have no origin of their own"
            raise PermissionDenied(f"{page} may not use this server", hint)

    def headers(self, origin: bytes) -> bytes:
        """The CORS header lines that let a page of ``origin`` read the response; empty if the page may not read it."""
        if not self._origins or (origin and not self._allows(origin)):
            return b""
        if not origin:
            return b"Vary: Origin\r\n"
        allowed = origin if origin in self._origins else b"*"
        return b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Expose-Headers: *\r\nVary: Origin\r\n" % allowed

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins

    def _knows(self, host: bytes, sender: Sender) -> bool:
        if self._hosts is None or (self._is_exposed and not sender.is_plain_browser):
            return True
        name = host_name(host).lower().removesuffix(".")
        return is_loopback(name) or name in self._hosts or (self._is_exposed and is_private(name))

    def _may_ask(self, method: bytes, sender: Sender) -> bool:
        if b"*" in self._origins or sender.origin in self._origins:
            return True
        if site := sender.fetch_site.lower():
            # If a user follows a link, only the user sees the response; the page with the link does not.
            is_visit = method in (b"GET", b"HEAD") and sender.fetch_mode.lower() == b"navigate"
            return site in (b"same-origin", b"none") or is_visit
        # The scheme may differ, since a proxy may have decrypted the request.
        own = (sender.host or b"").lower()
        return not sender.origin or sender.origin.lower().partition(b"://")[1:] == (b"://", own)


def is_private(name: str) -> bool:
    """True if ``name`` is an address, or a name in lower case that public DNS cannot contain."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(tuple(f".{domain}" for domain in _PRIVATE))
    return True


def host_name(host: bytes) -> str:
    """The name or address in a ``Host`` header, without port and brackets."""
    text = host.decode("latin-1")
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
