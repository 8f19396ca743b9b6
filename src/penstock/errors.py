"""The errors that Penstock raises.

The tree (one canonical code per class; transports map codes to statuses, the CLI to exit codes)::

    PenstockError                 INTERNAL             a bug in Penstock, or a failed engine
    ├── InvalidArgument           INVALID_ARGUMENT     the client must change the request
    │   ├── InvalidModel          INVALID_ARGUMENT     a model file is corrupt or has unsupported content
    │   ├── InvalidData           INVALID_ARGUMENT     a data set is empty, or its names, shapes or values are wrong
    │   ├── InvalidInput          INVALID_ARGUMENT     an operator of the model rejects values or sizes of a request
    │   └── InvalidConfig         INVALID_ARGUMENT     a configuration key or value is wrong
    ├── NotFound                  NOT_FOUND            the model, version or file does not exist
    ├── AlreadyExists             ALREADY_EXISTS       the target exists and may not be overwritten
    ├── Unauthenticated           UNAUTHENTICATED      the key is missing or unknown
    ├── PermissionDenied          PERMISSION_DENIED    the key does not permit this
    ├── ResourceExhausted         RESOURCE_EXHAUSTED   a queue, a limit or a disk is full
    ├── DeadlineExceeded          DEADLINE_EXCEEDED    the deadline has passed
    ├── Cancelled                 CANCELLED            the client has disconnected or cancelled
    ├── Unavailable               UNAVAILABLE          temporary: starting, draining, port in use
    │   └── EngineUnavailable     UNAVAILABLE          an optional engine is not installed
    ├── Unsupported               UNIMPLEMENTED        valid, but not supported by Penstock
    ├── WrongResult               INTERNAL             a compressed model's outputs are wrong
    ├── ContractUnmet             FAILED_PRECONDITION  no candidate meets the accuracy and latency contract
    └── IntegrityError            DATA_LOSS            a bundle differs from its digests

The message states the cause, and ``hint`` states how to fix it. Messages are safe to show to clients: they contain no server paths,
secrets or tracebacks. ``quoted`` puts a client's text into a message, and ``bounded`` limits a message that leaves the server.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

_QUOTED = 80
_SHOWN_BYTES = 960


class Code(enum.Enum):
    """Canonical error codes, independent of the transport. The names are gRPC's."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    DATA_LOSS = "DATA_LOSS"
    INTERNAL = "INTERNAL"


class PenstockError(Exception):
    """Base class of all errors. ``message`` states what is wrong, and ``hint`` how to fix it.

    ``retry_after_s`` (>= 0) is the time that the client should wait before a retry, if known.
    """

    code: ClassVar[Code] = Code.INTERNAL
    facts: Mapping[str, Any] = {}
    """More about the error, as plain data. With ``--json``, commands print it beside the error."""

    def __init__(self, message: str, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidArgument(PenstockError):
    code = Code.INVALID_ARGUMENT


class InvalidModel(InvalidArgument):
    pass


class InvalidData(InvalidArgument):
    pass


class InvalidInput(InvalidArgument):
    pass


class InvalidConfig(InvalidArgument):
    pass


class NotFound(PenstockError):
    code = Code.NOT_FOUND


class AlreadyExists(PenstockError):
    code = Code.ALREADY_EXISTS


class Unauthenticated(PenstockError):
    code = Code.UNAUTHENTICATED


class PermissionDenied(PenstockError):
    code = Code.PERMISSION_DENIED


class ResourceExhausted(PenstockError):
    code = Code.RESOURCE_EXHAUSTED


class DeadlineExceeded(PenstockError):
    code = Code.DEADLINE_EXCEEDED


class Cancelled(PenstockError):
    code = Code.CANCELLED


class Unavailable(PenstockError):
    code = Code.UNAVAILABLE


class EngineUnavailable(Unavailable):
    """An engine cannot be used because its package is not installed. ``install`` is the argument to ``pip install``."""

    def __init__(self, engine: str, install: str, reason: str = "") -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"engine '{engine}' is not available{because}", hint=f"pip install '{install}'")
        self.engine = engine
        self.install = install


class Unsupported(PenstockError):
    code = Code.UNIMPLEMENTED


class WrongResult(PenstockError):
    """The outputs of a compressed model are wrong. The model is not written."""


class ContractUnmet(PenstockError):
    """No candidate meets the contract. ``candidates`` are the records of all candidates, as plain data."""

    code = Code.FAILED_PRECONDITION
    candidates: tuple[dict[str, Any], ...] = ()


class IntegrityError(PenstockError):
    code = Code.DATA_LOSS


def revive(kind: str, message: str, hint: str) -> PenstockError:
    """Recreate an error that another process reported by class name. If the constructor of the class differs, use the base class."""
    found = globals().get(kind)
    return _anew(
        found if isinstance(found, type) and issubclass(found, PenstockError) else PenstockError, message, hint
    )


def prefixed(prefix: str, error: PenstockError) -> PenstockError:
    """A copy of ``error`` with ``prefix`` in front of its message."""
    return _anew(type(error), prefix + error.message, error.hint, error.retry_after_s)


def printable(text: str) -> str:
    """Escape all characters of ``text`` that control a terminal, end a line or are invisible."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def shortened(text: str, limit: int = _QUOTED) -> str:
    """A client's ``text`` for use in a message: printable, and truncated after ``limit`` characters."""
    shown = printable(text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[:limit]}…"


def quoted(text: str) -> str:
    """``shortened(text)`` in quotes."""
    return f"'{shortened(text)}'"


def bounded(text: str, limit: int = _SHOWN_BYTES) -> str:
    """Make ``text`` printable, except for line ends. If it takes more than ``limit`` bytes as JSON, cut out its middle."""
    kept = limit
    while True:
        part = text if len(text) <= kept else f"{text[: kept * 2 // 3]} … {text[-(kept // 3) :]}"
        shown = "\n".join(map(printable, part.split("\n")))
        if len(shown.encode()) + sum(map(shown.count, '"\\\n')) <= limit:
            return shown
        kept = kept * 3 // 4


def _anew(cls: Any, *told: Any) -> PenstockError:
    while cls.__init__ is not PenstockError.__init__:
        cls = cls.__base__
    found: PenstockError = cls(*told)
    return found
