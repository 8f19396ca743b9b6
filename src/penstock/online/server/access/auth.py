"""Who asks, and what they may: clients with keys, from a file that is read again when it changes.

[clients.alice]
key_sha256 = "…"                # of the key; or a list of them, while a key is being replaced
models = ["resnet*", "digits"]  # patterns of model names; left out: all
admin = false                   # may load and unload models, change settings, and register shared memory
requests_per_second = 100       # with up to ``burst`` at once; left out: any number
max_concurrent = 16             # requests unanswered at one time; left out: any number
highest_priority = 2            # most urgent level to ask for; 1, the default, is the most urgent that there is
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.clock import Clock
from penstock.errors import InvalidConfig, PermissionDenied, Unauthenticated

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
    """SHA-256 of the key's UTF-8, in hexadecimal; a list accepts each."""
    key: _Key = ""
    """The key itself, where that must be. At least 16 characters."""
    models: tuple[str, ...] = ("*",)
    """Models that it may ask, as patterns with ``*``, ``?`` and ``[…]``."""
    admin: bool = False
    """Whether it may use the control plane."""
    requests_per_second: _Rate | None = None
    """Most inference requests per second in the long run."""
    burst: _Count | None = None
    """Most at once; not given: one second's."""
    max_concurrent: _Count | None = None
    """Most that are accepted and not yet answered."""
    highest_priority: _Count = 1
    """The most urgent priority level that it may ask for; 1 is the most urgent."""

    def digests(self) -> list[bytes]:
        """SHA-256 of each of its keys."""
        given = [self.key_sha256] if isinstance(self.key_sha256, str) else self.key_sha256
        found = [bytes.fromhex(digest) for digest in given]
        return [*found, hashlib.sha256(self.key.encode()).digest()] if self.key else found


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    clients: dict[_Name, Client]


class Keys:
    """What a keys file says. Immutable.

    Keys are looked up by a hash that is keyed with a secret of this process, so that the time of a comparison reveals nothing:
    a caller cannot know which of two wrong keys has the hash that is closer to a right one's.
    """

    def __init__(self, clients: dict[str, Client]) -> None:
        """Raises InvalidConfig for a client without a key, and for two with the same."""
        self.clients = clients
        self._secret = secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}
        self._models = {name: _compile(client.models) for name, client in clients.items()}
        for name, client in clients.items():
            digests = client.digests()
            if not digests:
                raise InvalidConfig(f"client '{name}' has no key", "give it 'key_sha256'")
            for digest in digests:
                if self._names.setdefault(self._blind(digest), name) != name:
                    raise InvalidConfig(f"client '{name}' has the key of another", "each key must be of one client")

    def name_of(self, credential: bytes) -> str | None:
        """The client whose key is ``credential``."""
        return self._names.get(self._blind(hashlib.sha256(credential).digest()))

    def opens(self, client: str, model: str) -> bool:
        pattern = self._models.get(client)
        return pattern is not None and pattern.match(model) is not None

    def _blind(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def read_keys(path: Path) -> Keys:
    """Raises InvalidConfig."""
    try:
        text = path.read_text(encoding="utf-8")
        file = msgspec.convert(tomllib.loads(text), _File)
    except OSError as error:
        raise InvalidConfig(f"cannot read the keys file '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"the keys file '{path}' is not UTF-8") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidConfig(f"the keys file '{path}' is wrong: {error}") from None
    for name, client in file.clients.items():
        if client.key:
            _log.warning("keys file: the key of client '%s' is there in clear text; 'key_sha256' is safer", name)
    return Keys(file.clients)


def credential(authorization: str | bytes | None, api_key: str | bytes | None = None) -> bytes | None:
    """The key in a header ``Authorization: Bearer KEY``, or else in ``X-API-Key: KEY``; None if neither holds one."""
    if authorization is not None:
        scheme, _, key = _bytes(authorization).partition(b" ")
        if scheme.lower() == b"bearer" and key:
            return key.strip()
    if api_key:
        return _bytes(api_key)
    return None


class Access:
    """Answers who asks and what they may. Without a file everybody may do everything. Belongs to the event loop.

    The file is looked at once a second at most, when somebody asks. While a changed file is wrong, or gone, the last good one counts,
    and the log says so once.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Raises InvalidConfig if the file is not right."""
        self.enabled = path is not None
        """Whether keys are asked for; if not, all clients are called ``""``."""
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
            raise Unauthenticated("this server asks for a key", _HINT)
        name = self._keys.name_of(credential)
        if name is None:
            raise Unauthenticated("the key is not one that this server knows", _HINT)
        return name

    def client(self, name: str) -> Client:
        """What the keys file says of a client that was identified. Raises Unauthenticated if it has been removed since."""
        try:
            return self._keys.clients[name]
        except KeyError:
            raise Unauthenticated(f"client '{name}' is not known any more", _HINT) from None

    def may(self, client: str, model: str) -> bool:
        """Whether ``client`` may ask ``model``."""
        return not self.enabled or self._keys.opens(client, model)

    def check(self, client: str, model: str) -> None:
        """Raise PermissionDenied unless ``client`` may ask ``model``; whether there is such a model makes no difference."""
        if not self.may(client, model):
            raise PermissionDenied(f"client '{client}' may not use model '{model}'")

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
            _log.error("%s; the keys read before stay in force", error)
        else:
            _log.info("the keys file was read again: %d clients", len(self._keys.clients))

    def _look(self) -> tuple[int, ...]:
        """What changes when the file does."""
        try:
            status = os.stat(self._path) if self._path is not None else None
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status is not None else ()


def _bytes(value: str | bytes) -> bytes:
    return (value.encode(errors="replace") if isinstance(value, str) else value).strip()


def _compile(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)")
