"""gRPC's standard reflection service, which lists the services and the files that describe them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from penstock.errors import Code, InvalidArgument, PenstockError
from penstock.online.server import status
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.control import parse
from penstock.protocol import messages
from penstock.protocol.messages import Message
from penstock.tensor import Buffer

VERSIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
"""The packages that contain the service. Older tools know only the second package."""

_MAX_BYTES = 1024
"""Maximum size of a request, since the response repeats it."""


class Reflection:
    """One call of either version of the service. Answers each message immediately, in order."""

    def __init__(self, call: GrpcCall, package: str, services: list[str], ended: Callable[[Reflection], None]) -> None:
        self._call = call
        self._request = messages.message(f"{package}.ServerReflectionRequest")
        self._response = messages.message(f"{package}.ServerReflectionResponse")
        self._services = services
        self._ended = ended
        call.on_cancel = lambda: ended(self)

    def admit(self, data: Buffer | None) -> bool:
        return True

    def message(self, data: Buffer) -> None:
        try:
            if len(data) > _MAX_BYTES:
                raise InvalidArgument(f"a reflection request of {len(data)} bytes exceeds the limit of {_MAX_BYTES}")
            request = parse(self._request, data)
        except PenstockError as error:
            self.drain(error)
            return
        response = self._response(valid_host=request.host, original_request=request)
        self._fill(request, response)
        self._call.send(response.SerializeToString())

    def half_close(self) -> None:
        self.drain(None)

    def drain(self, error: PenstockError | None) -> None:
        """End the call immediately. No response is pending, because each message is answered when it arrives."""
        self._ended(self)
        self._call.finish(error)

    def _fill(self, request: Message, response: Message) -> None:
        kind = request.WhichOneof("message_request")
        try:
            if kind == "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            elif kind == "file_by_filename":
                _add_files(response, messages.POOL.FindFileByName(request.file_by_filename))
            elif kind == "file_containing_symbol":
                _add_files(response, messages.POOL.FindFileContainingSymbol(request.file_containing_symbol))
            elif kind == "all_extension_numbers_of_type":
                name = request.all_extension_numbers_of_type
                messages.POOL.FindMessageTypeByName(name)
                # proto3 has no extensions.
                response.all_extension_numbers_response.base_type_name = name
            else:
                _fail(response, Code.NOT_FOUND if kind else Code.INVALID_ARGUMENT, "no such extension")
        except KeyError:
            _fail(response, Code.NOT_FOUND, f"'{getattr(request, kind)}' is not known")


def _add_files(response: Message, file: Any) -> None:
    """Add ``file`` and then its dependencies, direct and indirect."""
    response.file_descriptor_response.file_descriptor_proto.extend(_serialized(file.name))


@functools.cache
def _serialized(name: str) -> list[bytes]:
    """The file ``name`` of the descriptor pool, and its dependencies."""
    found = {name: messages.POOL.FindFileByName(name)}
    waiting = list(found.values())
    while waiting:
        for needed in waiting.pop().dependencies:
            if needed.name not in found:
                found[needed.name] = needed
                waiting.append(needed)
    return [each.serialized_pb for each in found.values()]


def _fail(response: Message, code: Code, message: str) -> None:
    response.error_response.error_code = status.GRPC[code]
    response.error_response.error_message = message
