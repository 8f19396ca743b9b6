"""A real browser, headless, and a site for it: the site serves one page, takes its report, and passes everything else to a server.

To the browser the server behind the site has the site's name, as after DNS rebinding.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from queue import Queue
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from real import require

PATIENCE_S = 45
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-popup-blocking",
    "--proxy-server=direct://",
    "--host-resolver-rules=MAP *.example 127.0.0.1",
)


class Browser:
    """Chromium with an empty profile in ``folder``. Every name below ``.example`` means 127.0.0.1. Skips where it is not installed."""

    def __init__(self, folder: Path, url: str) -> None:
        self._command = [require("chromium"), *_FLAGS, f"--user-data-dir={folder / 'profile'}", url]
        self._environment = os.environ | {"HOME": str(folder)}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)


class Site:
    """Listens on a free port of the loopback. Use as a context manager."""

    def __init__(self, server: tuple[str, int] | None, page: str = "") -> None:
        """``page`` is the HTML at the path ``/page``; other requests go to ``server``, unchanged, or are refused if it is None."""
        self._server, self._page = server, page.encode()
        self._listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handle)
        self._listener.daemon_threads = True
        self.port: int = self._listener.server_address[1]
        self.reports: Queue[Any] = Queue()
        """What the page has posted to ``/report``."""
        self._statuses: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def answers(self, names: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
        """Method and status of the requests with the parameter ``attack`` in their URL, by its value, once all ``names`` have one."""
        wanted = set(names)
        with self._changed:
            assert self._changed.wait_for(lambda: wanted <= self._statuses.keys(), PATIENCE_S), (
                wanted - self._statuses.keys()
            )
            return {name: list(statuses) for name, statuses in self._statuses.items()}

    def _handle(self, client: socket.socket, address: Any, listener: Any) -> None:
        with client.makefile("rb") as reader:
            lines = [line for line in iter(reader.readline, b"\r\n") if line]
            if not lines:
                return  # a connection that the browser opened in advance
            fields = dict(line.decode("latin-1").lower().split(":", 1) for line in lines[1:])
            body = reader.read(int(fields.get("content-length", 0)))
            method, target, _ = lines[0].decode("latin-1").split(" ", 2)
            url = urlsplit(target)
            if url.path == "/page":
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n" + self._page)
            elif url.path == "/report":
                client.sendall(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
                self.reports.put(json.loads(body))
            else:
                answer = self._ask(lines, body)
                client.sendall(answer)
                with self._changed:
                    for name in parse_qs(url.query).get("attack", ()):
                        self._statuses[name].append((method, int(answer.split(b" ", 2)[1])))
                    self._changed.notify_all()

    def _ask(self, lines: list[bytes], body: bytes) -> bytes:
        if self._server is None:
            return b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n"
        kept = [line for line in lines if not line.lower().startswith(b"connection:")]
        with socket.create_connection(self._server, PATIENCE_S) as server, server.makefile("rb") as reader:
            server.sendall(b"".join(kept) + b"Connection: close\r\n\r\n" + body)
            return reader.read()
