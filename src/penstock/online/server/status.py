"""What an error's code is called by the protocols: the one table from codes to HTTP and gRPC statuses."""

from __future__ import annotations

from penstock.errors import Code

HTTP = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.CANCELLED: 400,
    Code.UNAVAILABLE: 503,
    Code.UNIMPLEMENTED: 501,
    Code.DATA_LOSS: 500,
    Code.INTERNAL: 500,
}

GRPC = {
    Code.CANCELLED: 1,
    Code.INVALID_ARGUMENT: 3,
    Code.DEADLINE_EXCEEDED: 4,
    Code.NOT_FOUND: 5,
    Code.ALREADY_EXISTS: 6,
    Code.PERMISSION_DENIED: 7,
    Code.RESOURCE_EXHAUSTED: 8,
    Code.FAILED_PRECONDITION: 9,
    Code.UNIMPLEMENTED: 12,
    Code.INTERNAL: 13,
    Code.UNAVAILABLE: 14,
    Code.DATA_LOSS: 15,
    Code.UNAUTHENTICATED: 16,
}
