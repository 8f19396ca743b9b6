"""Fuzzes the file of clients and their keys."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import InvalidConfig
from penstock.online.server.access.auth import credential, read_keys
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import tokens
from tests.fuzz.target import DecoderTarget

_MESSAGES = (
    b'[clients.alice]\nkey = "0123456789abcdef"\nmodels = ["resnet*", "[a-c]?"]\nadmin = true\n',
    b'[clients.bob]\nkey_sha256 = ["' + b"a" * 64 + b'"]\nrequests_per_second = 0.5\nburst = 3\nmax_concurrent = 1\n',
    b'clients = { c = { key = "another key of c!", highest_priority = 2 } }\n',
)


class KeysTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"[" * 400,
        b"a." * 400,
        b"{x=" * 300,
        b'"[!"',
        b'"[z-a]*"',
        b"nan",
        b"inf",
        b"1e999",
        b"\r",
        b"'''",
        b"\xff",
    )

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name, "keys.toml")
        super().__init__([self.split(message) for message in _MESSAGES])

    def split(self, data: bytes) -> Seed:
        return tokens(data)

    def decode(self, data: bytes) -> object:
        assert credential(data[:100], data[100:]) != b" "
        self._path.write_bytes(data)
        try:
            keys = read_keys(self._path)
        except InvalidConfig as error:
            return str(error)
        found = []
        for name, client in keys.clients.items():
            assert not client.key or keys.name_of(client.key.encode()) == name
            found.append((name, keys.opens(name, "resnet50"), keys.opens(name, data.decode("latin-1"))))
        assert keys.name_of(b"") is None
        return found

    def close(self) -> None:
        self._folder.cleanup()
