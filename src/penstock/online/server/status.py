"""The errors that clients receive, and the HTTP and gRPC statuses of the canonical error codes."""

from __future__ import annotations

import logging

from penstock.errors import Code, PenstockError

_log = logging.getLogger(__name__)

_STATUSES = {
    Code.INVALID_ARGUMENT: (400, 3),
    Code.NOT_FOUND: (404, 5),
    Code.ALREADY_EXISTS: (400, 6),
    Code.UNAUTHENTICATED: (401, 16),
    Code.PERMISSION_DENIED: (403, 7),
    Code.RESOURCE_EXHAUSTED: (429, 8),
    Code.FAILED_PRECONDITION: (400, 9),
    Code.DEADLINE_EXCEEDED: (504, 4),
    Code.CANCELLED: (400, 1),
    Code.UNAVAILABLE: (503, 14),
    Code.UNIMPLEMENTED: (501, 12),
    Code.DATA_LOSS: (500, 15),
    Code.INTERNAL: (500, 13),
}

HTTP = {code: http for code, (http, _) in _STATUSES.items()}
GRPC = {code: grpc for code, (_, grpc) in _STATUSES.items()}


def as_error(error: Exception) -> PenstockError:
    """The error to show to the client. A PenstockError is unchanged. Any other error is logged, and becomes an internal error.

    The result has no traceback, because the frames of a traceback would keep the received data in memory.
    """
    if isinstance(error, PenstockError):
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error
    _log.error("a request failed", exc_info=error)
    return PenstockError("internal error")
