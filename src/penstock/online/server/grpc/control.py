"""All methods of the inference service except inference: health, metadata, statistics, and control of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unsupported, quoted
from penstock.online.repository.triton.schema import to_message
from penstock.online.server import to_thread
from penstock.online.server.access.auth import Access
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.decoder import INLINE_BYTES, check_version, parameter_values
from penstock.online.server.grpc.request_wire import check_fields
from penstock.online.server.shared_memory.registry import NO_CUDA
from penstock.protocol import messages
from penstock.protocol.messages import Message
from penstock.tensor import Buffer

_log = logging.getLogger(__name__)

_VERSION_UNITS = 1
"""Units per served model version in every survey, and in addition the units per listed version."""
_LISTED_UNITS = 2
_BATCHES_A_UNIT = 2
"""Entries of batch sizes per unit."""
_COPIES = 3
"""Number of copies of a large message in memory while it is parsed: as bytes, in the protobuf class, and as values."""

Unary = Callable[[GrpcCall, Buffer], None]
Weigh = Callable[[Message], int]
"""Takes a request, and returns the units of ``Turns`` that its response costs because it lists models."""
Answer = Callable[[Message, str], Message | Awaitable[Message]]
"""Takes a request and the client's name, and returns the response. Raises PenstockError."""


def parse(kind: Any, data: Buffer) -> Message:
    """Parse a message of class ``kind``. Only its top-level fields may be lists. Raises InvalidArgument."""
    if len(data) > INLINE_BYTES:
        check_fields(data)
    try:
        return kind.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidArgument(f"the message is not a {kind.DESCRIPTOR.name}: {error}") from None


class GrpcControl:
    """All unary methods except ModelInfer. Used only on the event loop."""

    def __init__(self, dataplane: DataPlane, control: ControlPlane, access: Access) -> None:
        self._dataplane = dataplane
        self._control = control
        self._access = access
        self._tasks: set[asyncio.Task[None]] = set()

    def methods(self) -> dict[str, Unary]:
        """The methods by name."""
        answers: dict[str, Answer] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
            "SystemSharedMemoryStatus": self._system_status,
            "SystemSharedMemoryRegister": self._system_register,
            "SystemSharedMemoryUnregister": self._system_unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }
        surveys: dict[str, Weigh] = {"ModelStatistics": self._statistics_units, "RepositoryIndex": self._index_units}
        return {name: self._unary(name, answer, surveys.get(name)) for name, answer in answers.items()}

    def _unary(self, name: str, answer: Answer, weigh: Weigh | None) -> Unary:
        kind = messages.message(f"inference.{name}Request")

        def run(call: GrpcCall, data: Buffer) -> None:
            if len(data) > INLINE_BYTES:
                if weigh is not None:
                    call.spend(weigh(kind()))  # an empty request selects all models
                self._start(call, self._parse_and_answer(call, kind, data, answer))
                return
            try:
                request = parse(kind, data)
                if weigh is not None:
                    call.spend(weigh(request))
                reply = answer(request, call.client)
            except PenstockError as error:
                call.finish(error)
                return
            if isinstance(reply, Coroutine):
                self._start(call, reply)
            else:
                _reply(call, reply)

        return run

    def _start(self, call: GrpcCall, reply: Coroutine[Any, Any, Message]) -> None:
        """Answer with the result of ``reply``. ``reply`` runs to completion even if the client cancels the call."""
        task = asyncio.get_running_loop().create_task(_reply_later(call, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _parse_and_answer(self, call: GrpcCall, kind: Any, data: Buffer, answer: Answer) -> Message:
        call.reserve(_COPIES * len(data))
        reply = answer(await to_thread.run(partial(parse, kind, data)), call.client)
        return await reply if isinstance(reply, Awaitable) else reply

    # Health and metadata

    def _server_live(self, request: Message, client: str) -> Message:
        return messages.ServerLiveResponse(live=True)

    def _server_ready(self, request: Message, client: str) -> Message:
        return messages.ServerReadyResponse(ready=self._dataplane.server_ready)

    def _model_ready(self, request: Message, client: str) -> Message:
        name, version = self._named(request, client)
        return messages.ModelReadyResponse(ready=self._dataplane.model_ready(name, version))

    def _server_metadata(self, request: Message, client: str) -> Message:
        return messages.ServerMetadataResponse(**self._dataplane.server_metadata())

    def _model_metadata(self, request: Message, client: str) -> Message:
        return messages.ModelMetadataResponse(**self._dataplane.model_metadata(*self._named(request, client)))

    def _model_config(self, request: Message, client: str) -> Message:
        return messages.ModelConfigResponse(
            config=to_message(self._dataplane.model_config(*self._named(request, client)))
        )

    async def _model_statistics(self, request: Message, client: str) -> Message:
        name, version = self._named(request, client) if request.name else ("", "")
        statistics = await self._control.statistics(name, version)
        if not name:
            statistics = [one for one in statistics if self._access.may(client, one["name"])]
        # The protocol has no field for the stages of a Python model.
        rows = [{key: one[key] for key in one if key != "stage_stats"} for one in statistics]
        # Not on another thread: the rows of all waiting calls would then be in memory at once.
        return messages.ModelStatisticsResponse(model_stats=rows)

    def _statistics_units(self, request: Message) -> int:
        served = self._control.served_statistics()
        listed = [one for one in served if request.name in ("", one.name)]
        batches = sum(len(one.batches) for one in listed)
        return _VERSION_UNITS * len(served) + _LISTED_UNITS * len(listed) + batches // _BATCHES_A_UNIT

    def _index_units(self, request: Message) -> int:
        return _VERSION_UNITS * len(self._control.served_statistics())

    def _named(self, request: Message, client: str) -> tuple[str, str]:
        """The model name and version in ``request``. Raises InvalidArgument, PermissionDenied."""
        self._access.check(client, request.name)
        return request.name, check_version(request.name, request.version)

    # The repository

    async def _repository_index(self, request: Message, client: str) -> Message:
        index = await self._control.repository_index(request.ready)
        known = messages.RepositoryIndexResponse.ModelIndex.DESCRIPTOR.fields_by_name
        rows = [
            {key: row[key] for key in row if key in known} for row in index if self._access.may(client, row["name"])
        ]
        return messages.RepositoryIndexResponse(models=rows)

    async def _load(self, request: Message, client: str) -> Message:
        await self._control.load(request.model_name, await to_thread.run(partial(parameter_values, request.parameters)))
        return messages.RepositoryModelLoadResponse()

    async def _unload(self, request: Message, client: str) -> Message:
        await self._control.unload(request.model_name, parameter_values(request.parameters))
        return messages.RepositoryModelUnloadResponse()

    # Shared memory

    async def _system_status(self, request: Message, client: str) -> Message:
        response = messages.SystemSharedMemoryStatusResponse()
        for region in await self._control.shared_memory_status(request.name):
            for field, value in region.items():
                setattr(response.regions[region["name"]], field, value)
        return response

    async def _system_register(self, request: Message, client: str) -> Message:
        await self._control.register_shared_memory(request.name, request.key, request.offset, request.byte_size)
        return messages.SystemSharedMemoryRegisterResponse()

    async def _system_unregister(self, request: Message, client: str) -> Message:
        await self._control.unregister_shared_memory(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    def _cuda_status(self, request: Message, client: str) -> Message:
        if request.name:
            raise NotFound(f"Unable to find cuda shared memory region: {quoted(request.name)}")
        return messages.CudaSharedMemoryStatusResponse()

    def _cuda_register(self, request: Message, client: str) -> Message:
        raise Unsupported(NO_CUDA, "register system shared memory")

    def _cuda_unregister(self, request: Message, client: str) -> Message:
        """Do nothing. This succeeds, because clients unregister both kinds of regions before they register their own."""
        return messages.CudaSharedMemoryUnregisterResponse()

    # Settings

    async def _trace_setting(self, request: Message, client: str) -> Message:
        update = {name: _trace_value(list(setting.value)) for name, setting in request.settings.items()}
        settings = await self._control.trace_settings(request.model_name, update or None)
        response = messages.TraceSettingResponse()
        for name, value in settings.items():
            response.settings[name].value.extend(value if isinstance(value, list) else [str(value)])
        return response

    async def _log_settings(self, request: Message, client: str) -> Message:
        settings = await self._control.log_settings(parameter_values(request.settings) or None)
        response = messages.LogSettingsResponse()
        for name, value in settings.items():
            setting = response.settings[name]
            match value:
                case bool():
                    setting.bool_param = value
                case int():
                    setting.uint32_param = value
                case _:
                    setting.string_param = str(value)
        return response


def _reply(call: GrpcCall, message: Message) -> None:
    call.send(message.SerializeToString())
    call.finish()


async def _reply_later(call: GrpcCall, reply: Awaitable[Message]) -> None:
    try:
        _reply(call, await reply)
    except PenstockError as error:
        call.finish(error)
    except Exception:  # noqa: BLE001 - the client needs an answer
        _log.exception("a call failed")
        call.finish(PenstockError("internal error"))


def _trace_value(values: list[str]) -> Any:
    """The value of a setting. A list of one value becomes the value. An empty list becomes None, which clears the setting."""
    if not values:
        return None
    return values[0] if len(values) == 1 else values
