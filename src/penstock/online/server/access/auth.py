"""Authentication of clients by keys. The keys file is reloaded when it changes.

[clients.alice]
key_sha256 = "…"                # SHA-256 of the key; a list while a key is being replaced
models = ["resnet*", "digits"]  # patterns of model names; default: all
admin = false                   # may load and unload models, change settings, and register shared memory
requests_per_second = 100       # with up to ``burst`` at once; default: no limit
max_concurrent = 16             # requests in flight; default: no limit
highest_priority = 2            # highest priority to request; 1, the default, is the highest of all
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.clock import Clock
from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, PermissionDenied, Unauthenticated, quoted

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_HINT = "send a key as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"

_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
_Key = Annotated[str, msgspec.Meta(min_length=16)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client of the keys file."""

    key_sha256: _Digest | list[_Digest] = []
    """SHA-256 of the key in UTF-8, as hexadecimal digits. A list accepts several keys."""
    key: _Key = ""
    """The key in clear text, at least 16 characters long. Prefer ``key_sha256``, which is safer."""
    models: tuple[str, ...] = ("*",)
    """Models that the client may use, as patterns with ``*``, ``?`` and ``[…]``."""
    admin: bool = False
    """True if the client may use the control plane."""
    requests_per_second: _Rate | None = None
    """Maximum sustained rate of inference requests, per second."""
    burst: _Count | None = None
    """Maximum requests that the client may send at once. Defaults to the number allowed per second."""
    max_concurrent: _Count | None = None
    """Maximum number of requests in flight."""
    highest_priority: _Count = 1
    """The highest priority level that the client may request. Level 1 is the highest of all."""

    def digests(self) -> list[bytes]:
        """The SHA-256 of each key."""
        given = [self.key_sha256] if isinstance(self.key_sha256, str) else self.key_sha256
        found = [bytes.fromhex(digest) for digest in given]
        return [*found, hashlib.sha256(self.key.encode()).digest()] if self.key else found


class Keys:
    """The content of a keys file. Immutable.

    Keys are looked up by a hash that depends on a secret of this process. The duration of a look-up therefore does not reveal how
    close a guess is to the hash of a valid key.
    """

    def __init__(self, clients: dict[str, Client]) -> None:
        """Raises InvalidConfig if a client has no key, or two clients have the same key."""
        self.clients = clients
        self._secret = secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}
        self._models = {
            name: re.compile("|".join(map(fnmatch.translate, client.models)) or r"(?!)")
            for name, client in clients.items()
        }
        for name, client in clients.items():
            digests = client.digests()
            if not digests:
                raise InvalidConfig(f"client '{name}' has no key", "give it 'key_sha256'")
            for digest in digests:
                if self._names.setdefault(self._blind(digest), name) != name:
                    raise InvalidConfig(
                        f"client '{name}' shares a key with another client", "give each client its own key"
                    )

    def name_of(self, credential: bytes) -> str | None:
        """The client with the key ``credential``; None if the key is unknown."""
        return self._names.get(self._blind(hashlib.sha256(credential).digest()))

    def opens(self, client: str, model: str) -> bool:
        pattern = self._models.get(client)
        return pattern is not None and pattern.match(model) is not None

    def _blind(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def read_keys(path: Path) -> Keys:
    """Read the keys file ``path``. Raises InvalidConfig."""
    try:
        clients = _clients(path, tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidConfig(f"cannot read the keys file '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"the keys file '{path}' is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"invalid keys file '{path}': {error}") from None
    for name, client in clients.items():
        if client.key:
            _log.warning("keys file: the key of client '%s' is in clear text; 'key_sha256' is safer", name)
    return Keys(clients)


def _clients(path: Path, tables: dict[str, Any]) -> dict[str, Client]:
    """The clients in the tables of the keys file ``path``. Raises InvalidConfig, which names the client."""
    for section in tables:
        if section != "clients":
            raise InvalidConfig(
                f"unknown section {quoted(section)} in the keys file '{path}'", did_you_mean(section, ("clients",))
            )
    given = tables.get("clients")
    if not isinstance(given, dict):
        raise InvalidConfig(f"the keys file '{path}' has no clients", "describe each in a section [clients.NAME]")
    found = {}
    for name, table in given.items():
        try:
            found[msgspec.convert(name, _Name)] = msgspec.convert(table, Client)
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"client {quoted(name)} in the keys file '{path}' is wrong: {error}") from None
    return found


def credential(authorization: str | bytes | None, api_key: str | bytes | None = None) -> bytes | None:
    """The key in the header ``Authorization: Bearer KEY``, or else in ``X-API-Key: KEY``. None if both headers are missing."""
    if authorization is not None:
        scheme, _, key = _bytes(authorization).partition(b" ")
        if scheme.lower() == b"bearer" and key:
            return key.strip()
    if api_key:
        return _bytes(api_key)
    return None


class Access:
    """Identifies clients and checks their rights. Without a keys file, every client may do everything. Used only on the event loop.

    When requests arrive, the file is checked for changes at most once a second. If the file becomes invalid or disappears, its
    last valid content stays in force, and the log reports the problem once.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Raises InvalidConfig if the file is invalid."""
        self.enabled = path is not None
        """True if clients need keys. If False, the name of every client is ``""``."""
        self._path = path
        self._clock = clock
        self._stamp = self._look()
        self._next_look = clock.now() + _LOOK_S
        self._keys = read_keys(path) if path is not None else Keys({})

    def identify(self, credential: bytes | None) -> str:
        """The name of the client with this key. Raises Unauthenticated."""
        if not self.enabled:
            return ""
        if self._clock.now() >= self._next_look:
            self._refresh()
        if credential is None:
            raise Unauthenticated("this server requires a key", _HINT)
        name = self._keys.name_of(credential)
        if name is None:
            raise Unauthenticated("unknown key", _HINT)
        return name

    def client(self, name: str) -> Client:
        """The settings of an identified client. Raises Unauthenticated if the client has been removed from the file."""
        try:
            return self._keys.clients[name]
        except KeyError:
            raise Unauthenticated(f"client '{name}' has been removed", _HINT) from None

    def may(self, client: str, model: str) -> bool:
        """True if ``client`` may use ``model``."""
        return not self.enabled or self._keys.opens(client, model)

    def check(self, client: str, model: str) -> None:
        """Raise PermissionDenied unless ``client`` may use ``model``. The model need not exist."""
        if not self.may(client, model):
            raise PermissionDenied(f"client '{client}' may not use model {quoted(model)}")

    def require_admin(self, client: str) -> None:
        """Raise PermissionDenied unless ``client`` may use the control plane."""
        if self.enabled and not self.client(client).admin:
            raise PermissionDenied(f"client '{client}' may not control this server")

    def _refresh(self) -> None:
        self._next_look = self._clock.now() + _LOOK_S
        stamp = self._look()
        if stamp == self._stamp or self._path is None:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except InvalidConfig as error:
            _log.error("%s; the previous keys stay in force", error)
        else:
            _log.info("the keys file was reloaded: %d clients", len(self._keys.clients))

    def _look(self) -> tuple[int, ...]:
        """Metadata of the file that changes whenever its content changes; empty if the file cannot be read."""
        try:
            status = os.stat(self._path) if self._path is not None else None
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status is not None else ()


def _bytes(value: str | bytes) -> bytes:
    return (value.encode(errors="replace") if isinstance(value, str) else value).strip()
