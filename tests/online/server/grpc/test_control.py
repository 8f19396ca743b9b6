import asyncio
import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import json_format

from calls import FakeCall, invoke
from penstock.clock import SystemClock
from penstock.errors import Code
from penstock.online.server.access.auth import Access
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.access.table import AccessTable
from penstock.online.server.grpc.service import GrpcService
from penstock.protocol import messages
from penstock.telemetry.statistics import BOUNDS_NS, BatchStatistics, Duration, ModelStatistics, ResponseStatistics


class Control:
    """A control plane that records its calls."""

    def __init__(self, *models: ModelStatistics) -> None:
        self.told: list[Any] = []
        self._models = models

    async def load(self, name: str, parameters: Any) -> None:
        self.told.append((name, dict(parameters)))

    async def unload(self, name: str, parameters: Any) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("a bug")

    async def trace_settings(self, model: str = "", update: Any = None) -> dict[str, Any]:
        self.told.append((model, update))
        return {"trace_level": ["TIMESTAMPS"], "trace_rate": "7"}

    async def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        self.told.append((name, version))
        return [model.to_dict() for model in self._models]

    def served_statistics(self) -> list[ModelStatistics]:
        return list(self._models)

    async def repository_index(self, ready: bool = False) -> list[dict[str, Any]]:
        return [{"name": model.name, "version": model.version} for model in self._models]

    async def log_settings(self, update: Any = None) -> dict[str, Any]:
        self.told.append(update)
        return {"log_info": True, "log_verbose_level": 3, "log_file": ""}


def busy(name: str = "m") -> ModelStatistics:
    """The statistics of a model in which every number differs."""
    statistics = ModelStatistics(name=name, version="1")
    numbers = itertools.count(1)
    statistics.stages["execute"] = Duration(1, 2)
    for rows in (1, 3, 8):
        statistics.batches[rows] = BatchStatistics(*itertools.islice(numbers, 4))
    statistics.responses[0] = ResponseStatistics(Duration(*itertools.islice(numbers, 2)))
    for number in range(len(BOUNDS_NS)):
        statistics.request_buckets[number] = next(numbers)
    statistics.success_ns, statistics.queue_ns = itertools.islice(numbers, 2)
    return statistics


LOAD = b"/inference.GRPCInferenceService/RepositoryModelLoad"


def ask(method: str, access: Path | None = None, metadata: Any = None, **fields: Any) -> tuple[Control, Any]:
    """The calls of the control plane, and the response or the error."""
    request = messages.message(f"inference.{method}Request")(**fields)
    return asyncio.run(run(method, request.SerializeToString(), access, metadata))


def made(control: Control, access: Path | None = None) -> GrpcService:
    plane: Any = SimpleNamespace(shared_memory=None, response_limit=ResponseLimit())
    return GrpcService(plane, control, AccessTable(Access(access, SystemClock())), 8)  # type: ignore[arg-type]


async def run(method: str, data: bytes, access: Path | None, metadata: Any) -> tuple[Control, Any]:
    control, call = Control(busy()), FakeCall(metadata)
    invoke(made(control, access).methods[f"/inference.GRPCInferenceService/{method}".encode()], call, data)
    async with asyncio.timeout(20):
        while not call.ended:
            await asyncio.sleep(0)
    if call.error is not None:
        assert not call.sent
        return control, call.error
    (data,) = call.sent
    return control, messages.message(f"inference.{method}Response").FromString(data)


def test_parameters_of_loading_keep_their_kinds() -> None:
    parameters = {
        "config": messages.ModelRepositoryParameter(string_param="{}"),
        "file:1/m.onnx": messages.ModelRepositoryParameter(bytes_param=b"\0"),
        "n": messages.ModelRepositoryParameter(int64_param=-1),
        "flag": messages.ModelRepositoryParameter(bool_param=True),
    }
    control, _ = ask("RepositoryModelLoad", model_name="m", parameters=parameters)
    assert control.told == [("m", {"config": "{}", "file:1/m.onnx": b"\0", "n": -1, "flag": True})]
    control, error = ask("RepositoryModelLoad", model_name="m", parameters={"x": messages.ModelRepositoryParameter()})
    assert (error.code, control.told) == (Code.INVALID_ARGUMENT, [])


def test_settings_go_in_and_out() -> None:
    value = messages.TraceSettingRequest.SettingValue
    given = {
        "trace_level": value(value=["TIMESTAMPS", "TENSORS"]),
        "trace_rate": value(value=["7"]),
        "trace_file": value(),
    }
    control, answer = ask("TraceSetting", model_name="m", settings=given)
    assert control.told == [("m", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "7", "trace_file": None})]
    assert {name: list(setting.value) for name, setting in answer.settings.items()} == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["7"],
    }
    assert ask("TraceSetting")[0].told == [("", None)]
    control, answer = ask(
        "LogSettings", settings={"log_info": messages.LogSettingsRequest.SettingValue(bool_param=True)}
    )
    assert control.told == [{"log_info": True}]
    assert answer.settings["log_info"].bool_param
    assert answer.settings["log_verbose_level"].uint32_param == 3
    assert answer.settings["log_file"].WhichOneof("parameter_choice") == "string_param"


def test_regions_on_gpus_are_not_supported_and_none_is_there_to_forget() -> None:
    _, answer = ask("CudaSharedMemoryStatus")
    assert not answer.regions
    _, error = ask("CudaSharedMemoryStatus", name="r")
    assert (error.code, str(error)) == (Code.NOT_FOUND, "Unable to find cuda shared memory region: 'r'")
    _, error = ask("CudaSharedMemoryRegister", name="r", raw_handle=b"h", device_id=1, byte_size=8)
    assert error.code is Code.UNIMPLEMENTED
    assert "CUDA shared memory is not supported" in str(error)
    assert ask("CudaSharedMemoryUnregister", name="r")[1] == messages.CudaSharedMemoryUnregisterResponse()


def test_a_bug_is_told_as_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        _, error = ask("RepositoryModelUnload", model_name="m")
    assert (error.code, str(error)) == (Code.INTERNAL, "internal error")


def test_control_needs_the_right_to_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[clients.root]\nkey = "root-root-root-root"\nadmin = true\n[clients.bob]\nkey = "bob-bob-bob-bob-bob"\n'
    )
    bob, root = {"x-api-key": "bob-bob-bob-bob-bob"}, {"x-api-key": "root-root-root-root"}
    for method in (
        "RepositoryModelLoad",
        "LogSettings",
        "TraceSetting",
        "CudaSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
    ):
        for metadata, code in (({}, Code.UNAUTHENTICATED), (bob, Code.PERMISSION_DENIED), (root, None)):
            assert getattr(ask(method, keys, metadata)[1], "code", None) is code


def test_large_messages_of_control_are_parsed_off_the_event_loop_and_counted() -> None:
    async def load() -> None:
        control, call = Control(), FakeCall()
        parameters = {"config": messages.ModelRepositoryParameter(string_param="{}" + " " * 100_000)}
        data = messages.message("inference.RepositoryModelLoadRequest")(model_name="m", parameters=parameters)
        invoke(made(control).methods[LOAD], call, data.SerializeToString())
        assert (control.told, call.ended) == ([], False)
        async with asyncio.timeout(20):
            while not call.ended:
                await asyncio.sleep(0)
        assert (call.error, len(control.told)) == (None, 1)
        assert call.reserved >= 300_000

    asyncio.run(load())


def test_parameters_and_fields_are_bounded_in_number() -> None:
    value = messages.LogSettingsRequest.SettingValue(bool_param=True)
    control, error = ask("LogSettings", settings={str(number): value for number in range(1025)})
    assert (error.code, str(error)) == (Code.INVALID_ARGUMENT, "1025 parameters exceed the limit of 1024")
    parameters = {str(number): messages.ModelRepositoryParameter() for number in range(5000)}
    control, error = ask("RepositoryModelLoad", model_name="m", parameters=parameters)
    assert (error.code, str(error)) == (Code.INVALID_ARGUMENT, "the message has more than 4096 fields")
    assert control.told == []


def test_only_inference_and_loading_take_large_messages() -> None:
    methods = made(Control()).methods
    large = {path.decode().rpartition("/")[2] for path, method in methods.items() if method.max_bytes is None}
    assert large == {"ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"}
    assert {method.max_bytes for method in methods.values()} == {None, 64 << 10}


def test_stages_of_python_models_do_not_break_statistics() -> None:
    _, answer = ask("ModelStatistics")
    (one,) = answer.model_stats
    expected = {key: value for key, value in busy().to_dict().items() if key != "stage_stats"}
    assert one == json_format.ParseDict(expected, type(one)())


def spent(method: str, models: int, batch_sizes: int, data: bytes = b"") -> int:
    """The units that a survey of ``models`` models charges."""

    async def survey() -> int:
        served = [ModelStatistics(str(number), "1") for number in range(models)]
        for one in served:
            one.batches = {rows: BatchStatistics() for rows in range(1, batch_sizes + 1)}
        call = FakeCall()
        invoke(made(Control(*served)).methods[f"/inference.GRPCInferenceService/{method}".encode()], call, data)
        async with asyncio.timeout(20):
            while not call.ended:
                await asyncio.sleep(0)
        return call.spent

    return asyncio.run(survey())


@pytest.mark.parametrize("models", [0, 1, 20])
@pytest.mark.parametrize("batch_sizes", [0, 64])
def test_the_charge_for_a_survey_follows_its_length(models: int, batch_sizes: int) -> None:
    named = messages.message("inference.ModelStatisticsRequest")(name="0").SerializeToString()
    padded = b"\x1a\xff\x7f" + bytes(16383)  # an unknown field, which makes the message large
    assert spent("ModelStatistics", models, batch_sizes) == models * (3 + batch_sizes // 2)
    assert spent("ModelStatistics", models, batch_sizes, padded) == models * (3 + batch_sizes // 2)
    assert spent("RepositoryIndex", models, batch_sizes) == models
    if models:
        assert spent("ModelStatistics", models, batch_sizes, named) == models + 2 + batch_sizes // 2


def test_calls_for_statistics_that_wait_hold_no_statistics() -> None:
    async def survey() -> None:
        control, calls = Control(*(busy(str(number)) for number in range(50))), [FakeCall() for _ in range(100)]
        method = made(control).methods[b"/inference.GRPCInferenceService/ModelStatistics"]
        for call in calls:
            invoke(method, call, b"")
        most = 0
        async with asyncio.timeout(20):
            while not all(call.ended for call in calls):
                await asyncio.sleep(0)
                most = max(most, len(control.told) - sum(call.ended for call in calls))
        assert (most, len(control.told)) == (0, len(calls))

    asyncio.run(survey())
