"""What every gRPC transport must do, as tests: a test file of a transport subclasses ``GrpcConformance``.

The clients are those that users have: tritonclient, and grpcio without any generated code of ours.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from tritonclient.utils import InferenceServerException

import models
from gated_grpc import (
    PATIENCE_S,
    GrpcServer,
    MakeTransport,
    floats,
    infer_method,
    request,
    result,
    stream_method,
    tensor,
)
from penstock.protocol import messages
from penstock.tensor import DataType

ALL_FINAL = "triton_final_response"


class Answers:
    """What a stream of tritonclient calls back with."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self._queue.put((result, error))

    def next(self) -> Any:
        """The next result. Raises the error if there is one instead."""
        result, error = self._queue.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return result

    def values(self) -> list[float]:
        return list(self.next().as_numpy("y").ravel().tolist())


def status_of(caught: Any) -> str:
    """The name of the status that a client of either library was given."""
    error = caught.value
    return (
        error.status().removeprefix("StatusCode.") if isinstance(error, InferenceServerException) else error.code().name
    )


class GrpcConformance:
    """Subclass it as ``TestConformance`` with ``make``, the transport."""

    make: ClassVar[MakeTransport]

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls) -> Iterator[GrpcServer]:
        """One server for all tests that change nothing about it."""
        with GrpcServer(cls.make) as server:
            yield server

    @pytest.fixture
    def server(self) -> Iterator[Callable[..., GrpcServer]]:
        """Makes a server of the test's own."""
        started: list[GrpcServer] = []

        def start(**options: Any) -> GrpcServer:
            started.append(GrpcServer(type(self).make, **options).__enter__())
            return started[-1]

        yield start
        for each in started:
            each.__exit__(None, None, None)

    @pytest.fixture
    def client(self, shared: GrpcServer) -> triton.InferenceServerClient:
        return shared.client()

    # Health, metadata, control

    def test_health_and_metadata(self, client: triton.InferenceServerClient) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("linear")
        assert client.is_model_ready("linear", "1")
        assert not client.is_model_ready("absent")
        assert not client.is_model_ready("linear", "2")
        metadata = client.get_server_metadata()
        assert metadata.name == "penstock"
        assert "binary_tensor_data" in metadata.extensions
        metadata = client.get_model_metadata("linear", as_json=True)
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "3"]}]
        assert metadata["versions"] == ["1"]
        config = client.get_model_config("linear").config
        assert (config.name, config.max_batch_size, list(config.input[0].dims)) == ("linear", 8, [3])
        assert client.get_model_config("repeat").config.model_transaction_policy.decoupled

    def test_statistics_count_requests(self, client: triton.InferenceServerClient) -> None:
        before = client.get_inference_statistics("sums").model_stats[0]
        a = tensor(np.ones((2, 2), np.float32), "a")
        client.infer("sums", [a, tensor(np.ones((2, 2), np.float32), "b")])
        after = client.get_inference_statistics("sums", "1").model_stats[0]
        assert after.inference_count - before.inference_count == 2
        assert after.inference_stats.success.count - before.inference_stats.success.count == 1
        assert {"sums", "double"} <= {one.name for one in client.get_inference_statistics().model_stats}
        with pytest.raises(InferenceServerException, match="requested model 'absent' is not available") as caught:
            client.get_inference_statistics("absent")
        assert status_of(caught) == "INVALID_ARGUMENT"

    def test_the_repository_is_listed(self, client: triton.InferenceServerClient) -> None:
        index = client.get_model_repository_index().models
        assert {"linear", "gated"} <= {row.name for row in index}
        assert {(row.version, row.state) for row in index} == {("1", "READY")}

    def test_loading_is_refused(self, client: triton.InferenceServerClient) -> None:
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed") as caught:
            client.load_model("linear", config="{}", files={"file:1/model.onnx": b"x"})
        assert status_of(caught) == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="not allowed"):
            client.unload_model("linear", unload_dependents=True)
        assert client.is_model_ready("linear")

    def test_trace_and_log_settings_are_read_and_changed(self, server: Callable[..., GrpcServer]) -> None:
        client = server().client()
        assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
        changed = client.update_trace_settings("linear", {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"})
        assert list(changed.settings["trace_rate"].value) == ["5"]
        assert list(client.get_trace_settings("linear").settings["trace_level"].value) == ["TIMESTAMPS"]
        cleared = client.update_trace_settings("linear", {"trace_level": None, "trace_rate": None})
        assert list(cleared.settings["trace_rate"].value) == ["1000"]
        assert client.get_log_settings().settings["log_info"].bool_param
        changed = client.update_log_settings({"log_verbose_level": 1, "log_format": "ISO8601", "log_info": False})
        assert changed.settings["log_verbose_level"].uint32_param == 1
        assert changed.settings["log_format"].string_param == "ISO8601"
        assert not changed.settings["log_info"].bool_param

    def test_shared_memory_holds_tensors(self, server: Callable[..., GrpcServer]) -> None:
        from tritonclient.utils import shared_memory  # noqa: PLC0415 - it looks for a compiled part when imported

        client = server().client()
        region = shared_memory.create_shared_memory_region("region", "/penstock_test_grpc", 64)
        try:
            shared_memory.set_shared_memory_region(region, [np.array([[1, 2]], np.float32)])
            client.register_system_shared_memory("region", "/penstock_test_grpc", 64)
            assert client.get_system_shared_memory_status().regions["region"].byte_size == 64
            given, wanted = triton.InferInput("x", [1, 2], "FP32"), triton.InferRequestedOutput("y")
            given.set_shared_memory("region", 8)
            wanted.set_shared_memory("region", 8, 32)
            answer = client.infer("double", [given], outputs=[wanted])
            assert list(answer.get_output("y").shape) == [1, 2]
            found = shared_memory.get_contents_as_numpy(region, np.float32, [1, 2], offset=32)
            np.testing.assert_array_equal(found, [[2, 4]])
            with pytest.raises(InferenceServerException) as caught:
                client.register_system_shared_memory("region", "/penstock_test_grpc", 64)
            assert status_of(caught) == "ALREADY_EXISTS"
            client.unregister_system_shared_memory("region")
            with pytest.raises(InferenceServerException) as caught:
                client.infer("double", [given])
            assert status_of(caught) == "NOT_FOUND"
            with suppress(InferenceServerException):
                client.get_cuda_shared_memory_status()
        finally:
            shared_memory.destroy_shared_memory_region(region)

    # Unary inference

    def test_answers_are_those_of_the_model(self, client: triton.InferenceServerClient) -> None:
        x = np.random.default_rng(0).standard_normal((5, 3), np.float32)
        answer = client.infer("linear", [tensor(x)], request_id="7", model_version="1")
        np.testing.assert_allclose(answer.as_numpy("y"), x @ models.linear_weight(), rtol=1e-5)
        response = answer.get_response()
        assert (response.id, response.model_name, response.model_version) == ("7", "linear", "1")

    def test_outputs_can_be_chosen(self, client: triton.InferenceServerClient) -> None:
        a, b = tensor(np.ones((1, 2), np.float32), "a"), tensor(np.ones((1, 2), np.float32) * 3, "b")
        answer = client.infer("sums", [a, b], outputs=[triton.InferRequestedOutput("difference")])
        assert [output.name for output in answer.get_response().outputs] == ["difference"]
        np.testing.assert_array_equal(answer.as_numpy("difference"), [[-2, -2]])

    @pytest.mark.parametrize("datatype", list(DataType), ids=lambda d: d.value)
    def test_every_datatype_travels(self, client: triton.InferenceServerClient, datatype: DataType) -> None:
        if datatype is DataType.BYTES:
            x = np.array([[b"", "π\0".encode()], [b"a" * 300, b"b"]], object)
        else:
            x = np.array([[0, 1], [1, 100]]).astype(datatype.dtype)
        got = client.infer(f"identity_{datatype.value}", [tensor(x)]).as_numpy("y")
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)

    def test_typed_contents_are_answered_raw(self, shared: GrpcServer) -> None:
        message = messages.ModelInferRequest(model_name="double")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
        assert result(infer_method(shared.channel())(message.SerializeToString())) == [2, 4]

    def test_classes_are_told(self, client: triton.InferenceServerClient) -> None:
        outputs = [triton.InferRequestedOutput("y", class_count=1)]
        answer = client.infer("double", [floats(1, 3)], outputs=outputs)
        assert answer.as_numpy("y").tolist() == [[b"6.000000:1"]]

    def test_large_tensors_travel(self, client: triton.InferenceServerClient) -> None:
        x = np.arange(4_000_000, dtype=np.float32)[None]
        np.testing.assert_array_equal(client.infer("wide", [tensor(x)]).as_numpy("y"), x * 2)

    def test_compressed_requests_are_taken(self, shared: GrpcServer) -> None:
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            call = infer_method(shared.channel(compression=compression))
            data = request("wide", *([1] * 5000)).SerializeToString()
            assert result(call(data)) == [2] * 5000

    def test_many_at_once_get_each_their_own(self, client: triton.InferenceServerClient) -> None:
        answers = [Answers() for _ in range(200)]
        for n, answer in enumerate(answers):
            client.async_infer("double", [floats(n, 0)], answer)
        assert [answer.values() for answer in answers] == [[2 * n, 0] for n in range(200)]

    @pytest.mark.parametrize(
        ("model", "given", "status", "words"),
        [
            ("absent", floats(1, 2), "NOT_FOUND", "Request for unknown model: 'absent' is not found"),
            ("double", tensor(np.zeros((1, 2), np.float32), "z"), "INVALID_ARGUMENT", "unexpected inference input 'z'"),
            ("double", floats(1, 2, 3), "INVALID_ARGUMENT", "unexpected shape for input 'x'"),
            ("double", tensor(np.zeros((1, 2))), "INVALID_ARGUMENT", "data-type is 'FP64'"),
            ("failing", floats(1, 2), "INTERNAL", "the model failed"),
            ("repeat", floats(1, 2), "UNIMPLEMENTED", "decoupled"),
        ],
    )
    def test_what_is_wrong_is_told(
        self, client: triton.InferenceServerClient, model: str, given: triton.InferInput, status: str, words: str
    ) -> None:
        with pytest.raises(InferenceServerException, match=words) as caught:
            client.infer(model, [given])
        assert status_of(caught) == status

    def test_versions_that_are_no_numbers_are_refused(self, client: triton.InferenceServerClient) -> None:
        for ask in (lambda: client.infer("double", [floats(1, 2)], "x"), lambda: client.is_model_ready("double", "x")):
            with pytest.raises(InferenceServerException, match="specified version string 'x'") as caught:
                ask()
            assert status_of(caught) == "INVALID_ARGUMENT"

    def test_messages_that_are_none_are_refused(self, shared: GrpcServer) -> None:
        channel = shared.channel()
        for name in ("ModelInfer", "ModelMetadata", "RepositoryIndex"):
            with pytest.raises(grpc.RpcError, match=f"the message is not a {name}Request") as caught:
                channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(b"\xff\xff")
            assert status_of(caught) == "INVALID_ARGUMENT"
        assert result(infer_method(channel)(request("double", 1, 2).SerializeToString())) == [2, 4]

    def test_unknown_methods_are_refused(self, shared: GrpcServer) -> None:
        for path in ("/inference.GRPCInferenceService/Nothing", "/no.Service/ModelInfer", "/x"):
            with pytest.raises(grpc.RpcError) as caught:
                shared.channel().unary_unary(path)(b"")
            assert status_of(caught) == "UNIMPLEMENTED"

    def test_messages_beyond_the_limit_are_refused(self, server: Callable[..., GrpcServer]) -> None:
        call = infer_method(server(max_request_bytes=10_000).channel())
        with pytest.raises(grpc.RpcError) as caught:
            call(request("wide", *([1] * 5000)).SerializeToString())
        assert status_of(caught) == "RESOURCE_EXHAUSTED"
        assert len(result(call(request("wide", *([1] * 2000)).SerializeToString()))) == 2000

    # Cancelling and deadlines

    def hold(self, server: GrpcServer) -> Any:
        """Close the gate with one request behind it; its future."""
        server.gate.clear()
        held = infer_method(server.channel()).future(request("gated", 1).SerializeToString())
        assert server.entered.acquire(timeout=PATIENCE_S)
        return held

    def let_go(self, server: GrpcServer, held: Any) -> list[float]:
        """Open the gate; the first values of all that the model was given."""
        server.gate.set()
        assert result(held.result(PATIENCE_S)) == [2]
        assert result(infer_method(server.channel())(request("gated", 3).SerializeToString())) == [6]
        return [value for call in server.gated.calls for value in call["x"][:, 0].tolist()]

    def test_cancelling_drops_queued_work(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        queued = infer_method(started.channel()).future(request("gated", 2).SerializeToString())
        started.until(lambda: started.pending("gated") == 2)
        queued.cancel()
        started.until(lambda: started.pending("gated") == 1)
        assert self.let_go(started, held) == [1, 3]

    def test_deadlines_drop_queued_work(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        with pytest.raises(InferenceServerException) as caught:
            started.client().infer("gated", [floats(2)], client_timeout=0.2)
        assert status_of(caught) == "DEADLINE_EXCEEDED"
        started.until(lambda: started.pending("gated") == 1)
        assert self.let_go(started, held) == [1, 3]

    def test_a_client_that_goes_away_drops_queued_work(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        channel = grpc.insecure_channel(started.url, [("grpc.use_local_subchannel_pool", 1)])
        queued = infer_method(channel).future(request("gated", 2).SerializeToString())
        started.until(lambda: started.pending("gated") == 2)
        channel.close()
        started.until(lambda: started.pending("gated") == 1)
        assert queued.code() is grpc.StatusCode.CANCELLED
        assert self.let_go(started, held) == [1, 3]

    def test_a_full_queue_refuses(self, server: Callable[..., GrpcServer]) -> None:
        started = server(max_queue=1)
        held = self.hold(started)
        with pytest.raises(InferenceServerException) as caught:
            started.client().infer("gated", [floats(2)])
        assert status_of(caught) == "UNAVAILABLE"
        assert self.let_go(started, held) == [1, 3]

    # Streams

    def test_a_stream_answers_in_order(self, client: triton.InferenceServerClient) -> None:
        answers = Answers()
        client.start_stream(answers)
        for n in range(100):
            client.async_stream_infer("double", [floats(n, 1)], request_id=str(n))
        found = [answers.next() for _ in range(100)]
        client.stop_stream()
        assert [one.get_response().id for one in found] == [str(n) for n in range(100)]
        assert [one.as_numpy("y")[0, 0] for one in found] == [2 * n for n in range(100)]
        assert ALL_FINAL not in found[0].get_response().parameters

    def test_a_stream_survives_errors(self, shared: GrpcServer) -> None:
        asked = [
            request("double", 1, 2, id="a"),
            request("absent", 1, 2, id="b"),
            request("double", 1, 2, 3, id="c"),
            messages.ModelInferRequest(model_name="double", id="d", outputs=[{"name": "y"}, {"name": "y"}]),
            request("failing", 1, 2, id="e"),
        ]
        data = [message.SerializeToString() for message in asked]
        answers = {}
        for answer in stream_method(shared.channel())(
            iter([*data, b"\xff", request("double", 5, 6).SerializeToString()])
        ):
            message = messages.ModelStreamInferResponse.FromString(answer)
            answers[message.infer_response.id, len(message.infer_response.outputs)] = message.error_message
        assert answers["a", 1] == ""
        assert "'absent' is not found" in answers["b", 0]
        assert "unexpected shape" in answers["c", 0]
        assert "requested twice" in answers["d", 0]
        assert "the model failed" in answers["e", 0]
        assert "not a ModelInferRequest" in answers["", 0]
        assert answers["", 1] == ""

    def test_a_stream_may_ask_for_statuses(self, client: triton.InferenceServerClient) -> None:
        answers = Answers()
        client.start_stream(answers, headers={"triton_grpc_error": "true"})
        client.async_stream_infer("double", [floats(1, 2)])
        assert answers.values() == [2, 4]
        client.async_stream_infer("absent", [floats(1, 2)])
        with pytest.raises(InferenceServerException, match="'absent' is not found") as caught:
            answers.next()
        assert status_of(caught) == "NOT_FOUND"
        client.stop_stream()

    def test_decoupled_models_answer_any_number_of_times(self, client: triton.InferenceServerClient) -> None:
        answers, x = Answers(), np.arange(6, dtype=np.float32).reshape(3, 2)
        client.start_stream(answers)
        client.async_stream_infer("repeat", [tensor(x)], request_id="7", enable_empty_final_response=True)
        found = [answers.next().get_response() for _ in range(4)]
        client.async_stream_infer("repeat", [tensor(x[:1])], request_id="8")
        client.async_stream_infer("repeat", [tensor(x[:1])], request_id="9", enable_empty_final_response=True)
        later = [answers.next().get_response() for _ in range(3)]
        client.stop_stream()
        assert [one.parameters[ALL_FINAL].bool_param for one in found] == [False, False, False, True]
        assert [len(one.outputs) for one in found] == [1, 1, 1, 0]
        assert {one.id for one in found} == {"7"}
        assert np.frombuffer(found[2].raw_output_contents[0], np.float32).tolist() == [8, 10]
        assert [(one.id, len(one.outputs)) for one in later] == [("8", 1), ("9", 1), ("9", 0)]

    def test_closing_half_of_a_stream_delivers_what_is_pending(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        given = [request("gated", n, id=str(n)).SerializeToString() for n in range(3)]
        answers = stream_method(started.channel())(iter(given))
        started.until(lambda: started.pending("gated") == 4)
        started.gate.set()
        found = [messages.ModelStreamInferResponse.FromString(answer).infer_response.id for answer in answers]
        assert found == ["0", "1", "2"]
        assert answers.code() is grpc.StatusCode.OK
        held.result(PATIENCE_S)

    def test_a_stream_is_worked_on_a_few_at_a_time(self, server: Callable[..., GrpcServer]) -> None:
        started = server(max_pipelined=4)
        started.gate.clear()
        given = [request("gated", n).SerializeToString() for n in range(40)]
        answers = stream_method(started.channel())(iter(given))
        started.until(lambda: started.pending("gated") == 4)
        # Every message has been sent long before one that comes by another connection is answered.
        for _ in range(20):
            started.client().is_server_live()
        assert started.pending("gated") == 4
        started.gate.set()
        found = [messages.ModelStreamInferResponse.FromString(answer).infer_response for answer in answers]
        assert [result(one.SerializeToString()) for one in found] == [[2 * n] for n in range(40)]

    def test_cancelling_a_stream_drops_its_work(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        client, answers = started.client(), Answers()
        client.start_stream(answers)
        for n in range(5):
            client.async_stream_infer("gated", [floats(n + 10)])
        started.until(lambda: started.pending("gated") == 6)
        client.stop_stream(cancel_requests=True)
        started.until(lambda: started.pending("gated") == 1)
        assert self.let_go(started, held) == [1, 3]

    def test_a_stream_has_a_deadline(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        client, answers = started.client(), Answers()
        client.start_stream(answers, stream_timeout=0.3)
        client.async_stream_infer("gated", [floats(2)])
        with pytest.raises(InferenceServerException) as caught:
            answers.next()
        if caught.value.status() is None:
            # The request's end was told before that of the stream.
            with pytest.raises(InferenceServerException) as caught:
                answers.next()
        assert status_of(caught) == "DEADLINE_EXCEEDED"
        started.until(lambda: started.pending("gated") == 1)
        client.stop_stream()
        assert self.let_go(started, held) == [1, 3]

    def test_classes_of_a_version_that_is_unloaded_while_it_answers(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        started.gate.clear()
        message = request("gated", 3, 4)
        message.outputs.add(name="y").parameters["classification"].int64_param = 1
        data = message.SerializeToString()
        held = infer_method(started.channel()).future(data)
        streamed = stream_method(started.channel())(iter([data]))
        started.until(lambda: started.pending("gated") == 2)
        handle = started.call(lambda: started.repository.remove("gated", "1"))
        started.gate.set()
        unary = messages.ModelInferResponse.FromString(held.result())
        answer = messages.ModelStreamInferResponse.FromString(next(streamed))
        assert answer.error_message == ""
        for one in (unary, answer.infer_response):
            assert (one.model_version, b"8.000000:1" in one.raw_output_contents[0]) == ("1", True)
        started.call(handle.unload)

    def test_a_client_that_does_not_read_is_cut_off(self, server: Callable[..., GrpcServer]) -> None:
        started = server(max_unsent_bytes=4 << 20)
        answers = stream_method(started.channel())(iter([request("endless", 1).SerializeToString()]))
        started.until(lambda: started.endless.closed == 1)
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
        assert status_of(caught) == "RESOURCE_EXHAUSTED"

    # Health and reflection

    def test_health_is_checked(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        check = started.channel().unary_unary("/grpc.health.v1.Health/Check")

        def status(service: str) -> int:
            asked = messages.HealthCheckRequest(service=service).SerializeToString()
            return int(messages.HealthCheckResponse.FromString(check(asked)).status)

        assert status("") == status("inference.GRPCInferenceService") == 1
        started.call(started.dataplane.close)
        assert status("") == 2
        with pytest.raises(grpc.RpcError) as caught:
            status("absent")
        assert status_of(caught) == "NOT_FOUND"

    def test_health_is_watched(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        watch = started.channel().unary_stream("/grpc.health.v1.Health/Watch")
        states = watch(messages.HealthCheckRequest().SerializeToString())
        unknown = watch(messages.HealthCheckRequest(service="absent").SerializeToString())
        assert messages.HealthCheckResponse.FromString(next(unknown)).status == 3
        unknown.cancel()
        assert messages.HealthCheckResponse.FromString(next(states)).status == 1
        started.call(started.dataplane.close)
        assert messages.HealthCheckResponse.FromString(next(states)).status == 2
        states.cancel()

    @pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
    def test_tools_learn_what_is_offered(self, shared: GrpcServer, package: str) -> None:
        kind = messages.message(f"{package}.ServerReflectionRequest")
        asked = [
            kind(list_services="*"),
            kind(file_containing_symbol="inference.GRPCInferenceService"),
            kind(file_by_filename="health.proto"),
            kind(file_containing_symbol="absent"),
            kind(all_extension_numbers_of_type="inference.ModelConfig"),
            kind(file_containing_extension={"containing_type": "x", "extension_number": 1}),
            kind(),
        ]
        reflect = shared.channel().stream_stream(f"/{package}.ServerReflection/ServerReflectionInfo")
        response = messages.message(f"{package}.ServerReflectionResponse")
        found = [response.FromString(data) for data in reflect(one.SerializeToString() for one in asked)]
        names = [service.name for service in found[0].list_services_response.service]
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health", f"{package}.ServerReflection"} <= set(names)
        pool = DescriptorPool()
        for data in reversed(found[1].file_descriptor_response.file_descriptor_proto):
            pool.Add(FileDescriptorProto.FromString(data))
        service = pool.FindServiceByName("inference.GRPCInferenceService")
        assert "ModelStreamInfer" in service.methods_by_name
        assert len(found[2].file_descriptor_response.file_descriptor_proto) == 1
        assert [one.error_response.error_code for one in found[3:]] == [5, 0, 5, 3]
        assert found[4].all_extension_numbers_response.base_type_name == "inference.ModelConfig"
        assert [one.original_request for one in found] == asked

    # Keys, TLS

    def test_clients_show_keys(self, server: Callable[..., GrpcServer], tmp_path: Any) -> None:
        keys = tmp_path / "keys.toml"
        keys.write_text('[clients.alice]\nkey = "0123456789abcdef"\nmodels = ["double"]\n')
        client = server(access=keys).client()
        assert client.is_server_ready()
        for ask in (
            lambda: client.infer("double", [floats(1, 2)]),
            client.get_server_metadata,
            client.get_log_settings,
        ):
            with pytest.raises(InferenceServerException) as caught:
                ask()
            assert status_of(caught) == "UNAUTHENTICATED"
        headers = {"authorization": "Bearer 0123456789abcdef"}
        assert client.infer("double", [floats(1, 2)], headers=headers).as_numpy("y").tolist() == [[2, 4]]
        assert [row.name for row in client.get_model_repository_index(headers=headers).models] == ["double"]
        for ask in (
            lambda: client.infer("linear", [floats(1, 2, 3)], headers=headers),
            lambda: client.get_model_metadata("linear", headers=headers),
            lambda: client.update_log_settings({"log_info": False}, headers=headers),
        ):
            with pytest.raises(InferenceServerException) as caught:
                ask()
            assert status_of(caught) == "PERMISSION_DENIED"
        answers = Answers()
        client.start_stream(answers, headers=headers)
        client.async_stream_infer("double", [floats(1, 2)])
        assert answers.values() == [2, 4]
        client.stop_stream()
        client.start_stream(answers)
        with pytest.raises(InferenceServerException) as caught:
            answers.next()
        assert status_of(caught) == "UNAUTHENTICATED"
        client.stop_stream()

    def test_tls_and_client_certificates(self, server: Callable[..., GrpcServer], tmp_path: Any) -> None:
        import trustme  # noqa: PLC0415 - of two tests only

        authority = trustme.CA()
        mine, theirs = authority.issue_cert("127.0.0.1"), authority.issue_cert("client@example.org")
        mine.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
        authority.cert_pem.write_to_path(tmp_path / "authority.pem")
        root, key, chain = authority.cert_pem.bytes(), theirs.private_key_pem.bytes(), theirs.cert_chain_pems[0].bytes()
        data = request("double", 1, 2).SerializeToString()
        open_to_all = server(tls_certificate=str(tmp_path / "server.pem"))
        call = infer_method(open_to_all.channel(grpc.ssl_channel_credentials(root)))
        assert result(call(data, timeout=PATIENCE_S)) == [2, 4]
        with pytest.raises(grpc.RpcError):
            infer_method(open_to_all.channel())(data, timeout=PATIENCE_S)
        authorities = str(tmp_path / "authority.pem")
        strict = server(tls_certificate=str(tmp_path / "server.pem"), tls_client_ca=authorities)
        call = infer_method(strict.channel(grpc.ssl_channel_credentials(root, key, chain)))
        assert result(call(data, timeout=PATIENCE_S)) == [2, 4]
        with pytest.raises(grpc.RpcError) as caught:
            infer_method(strict.channel(grpc.ssl_channel_credentials(root)))(data, timeout=PATIENCE_S)
        assert status_of(caught) == "UNAVAILABLE"

    # The end

    def test_draining_answers_what_was_asked_and_no_more(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        idle, client, answers = started.client(), started.client(), Answers()
        idle.start_stream(answers)
        idle.async_stream_infer("double", [floats(1, 2)])
        assert answers.values() == [2, 4]
        watch = started.channel().unary_stream("/grpc.health.v1.Health/Watch")
        states = watch(messages.HealthCheckRequest().SerializeToString())
        next(states)
        assert client.is_server_live()
        drained = started.start(lambda: started.transport.drain(0.0, PATIENCE_S))
        # Streams that wait for nothing are ended, so that nobody waits for them.
        with pytest.raises(InferenceServerException, match="shutting down") as caught:
            answers.next()
        assert status_of(caught) == "UNAVAILABLE"
        with pytest.raises(grpc.RpcError) as caught:
            list(states)
        assert status_of(caught) == "UNAVAILABLE"
        idle.stop_stream()
        with pytest.raises(InferenceServerException) as caught:
            client.infer("double", [floats(1, 2)], client_timeout=PATIENCE_S)
        assert status_of(caught) == "UNAVAILABLE"
        assert not drained.done()
        started.gate.set()
        assert result(held.result(PATIENCE_S)) == [2]
        drained.result(PATIENCE_S)

    def test_draining_ends_after_its_time(self, server: Callable[..., GrpcServer]) -> None:
        started = server()
        held = self.hold(started)
        started.start(lambda: started.transport.drain(0.0, 0.1)).result(PATIENCE_S)
        assert held.exception(PATIENCE_S) is not None
        started.gate.set()

    def test_clients_that_come_and_go_leave_nothing_behind(self, shared: GrpcServer) -> None:
        def ask() -> None:
            with grpc.insecure_channel(shared.url, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                assert result(infer_method(channel)(request("double", 1, 2).SerializeToString())) == [2, 4]

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert shared.pending("double") == 0
        assert not shared.call(lambda: shared.service._streams)
