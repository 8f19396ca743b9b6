"""Telemetry of ``penstock serve``, read with operators' tools."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import models
from processes import ServerProcess
from real import RealProcess
from traces import PARENT_ID, TRACE_ID

TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear().data)
    return path


def start(*targets: Path, **settings: object) -> ServerProcess:
    return ServerProcess(*targets, arguments=("--json",), **settings)


def addresses(server: ServerProcess) -> dict[str, str]:
    found: dict[str, str] = json.loads(server.line)
    return found


def ask(address: str, count: int = 1, headers: dict[str, str] | None = None) -> None:
    tensor = tritonclient.http.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 3), np.float32))
    with tritonclient.http.InferenceServerClient(address) as client:
        for _ in range(count):
            client.infer("linear", [tensor], headers=dict(headers or {}))  # it adds to what it is given


def ask_grpc(address: str, headers: dict[str, str]) -> None:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3])
    request = service_pb2.ModelInferRequest(model_name="linear", inputs=[tensor], raw_input_contents=[bytes(12)])
    with grpc.insecure_channel(address) as channel:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, metadata=tuple(headers.items()))


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_statistics_and_metrics_agree_with_what_was_asked(model: Path) -> None:
    with start(model) as server:
        found = addresses(server)
        ask(found["http"], 5)
        with tritonclient.http.InferenceServerClient(found["http"]) as client:
            wrong = tritonclient.http.InferInput("x", [1, 9], "FP32").set_data_from_numpy(np.ones((1, 9), np.float32))
            with pytest.raises(InferenceServerException, match="shape"):
                client.infer("linear", [wrong])
            (shown,) = client.get_inference_statistics("linear")["model_stats"]
        samples = scrape(found["metrics"])
    labels = '{model="linear",version="1"}'
    durations = shown["inference_stats"]
    assert (shown["inference_count"], shown["execution_count"], durations["success"]["count"]) == (5, 5, 5)
    assert durations["fail"]["count"] == 1
    assert samples[f"nv_inference_request_success{labels}"] == 5
    assert samples[f"nv_inference_request_duration_us{labels}"] == durations["success"]["ns"] // 1000
    assert samples[f"nv_inference_pending_request_count{labels}"] == 0
    assert samples[f"penstock_request_duration_seconds_count{labels}"] == 5
    assert samples[f"nv_model_load_duration_secs{labels}"] > 0
    assert f'nv_inference_request_summary_us{{{labels[1:-1]},quantile="0.5"}}' not in samples


def test_access_log_and_trace_file_know_the_callers_trace_over_both_protocols(model: Path, tmp_path: Path) -> None:
    log, trace = tmp_path / "access.log", tmp_path / "trace.json"
    with start(model, access_log=log, trace_file=trace, trace_level="TIMESTAMPS") as server:
        ask(addresses(server)["http"], headers=TRACEPARENT)
        ask(addresses(server)["http"])
        ask_grpc(addresses(server)["grpc"], TRACEPARENT)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["trace_id"] for line in lines] == [TRACE_ID, "", TRACE_ID]
    assert [(line["model"], line["status"], line["bytes_in"], line["bytes_out"]) for line in lines] == [
        ("linear", "OK", 12, 8)
    ] * 3
    about = json.loads(trace.read_text())[::2]
    assert [entry["model_name"] for entry in about] == ["linear"] * 2


def test_tritons_client_switches_traces_on_and_off(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with start(model, trace_file=trace) as server:
        http, grpc = addresses(server)["http"], addresses(server)["grpc"]
        ask(http, headers=TRACEPARENT)
        with (
            tritonclient.http.InferenceServerClient(http) as client,
            tritonclient.grpc.InferenceServerClient(grpc) as other,
        ):
            settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
            assert client.update_trace_settings("linear", settings)["trace_rate"] == "1"
            assert other.get_trace_settings("linear").settings["trace_level"].value == ["TIMESTAMPS"]
            ask(http, 3)
            assert other.update_trace_settings("linear", {"trace_level": None}).settings["trace_level"].value == ["OFF"]
            assert client.get_trace_settings("linear")["trace_level"] == ["OFF"]
            ask(http)
            with pytest.raises(InferenceServerException, match="can not be updated through network protocol"):
                client.update_trace_settings(settings={"trace_file": "/tmp/elsewhere"})
    assert len(json.loads(trace.read_text())) == 2 * 3


def test_tritons_client_reads_and_changes_the_log_settings(model: Path) -> None:
    with start(model) as server:
        with tritonclient.http.InferenceServerClient(addresses(server)["http"]) as client:
            assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
            assert client.update_log_settings(client.get_log_settings())["log_format"] == "default"
        with tritonclient.grpc.InferenceServerClient(addresses(server)["grpc"]) as other:
            assert other.get_log_settings().settings["log_verbose_level"].uint32_param == 1


@pytest.mark.real
def test_a_real_prometheus_scrapes_a_live_server(model: Path, tmp_path: Path) -> None:
    with start(model) as server:
        ask(addresses(server)["http"], 7)
        target = addresses(server)["metrics"]
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 200ms}\n"
            f"scrape_configs: [{{job_name: penstock, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        arguments = [f"--config.file={config}", "--storage.tsdb.path={folder}", "--web.listen-address=127.0.0.1:{port}"]
        with RealProcess(["prometheus", *arguments], is_ready=lambda port: query(port, "up") == [1]) as prometheus:
            assert query(prometheus.port, 'nv_inference_request_success{model="linear"}') == [7]
            assert query(prometheus.port, "sum(penstock_batches_total)") == [7]
            (p99,) = query(prometheus.port, "histogram_quantile(0.99, penstock_request_duration_seconds_bucket)")
            assert p99 > 0


def query(port: int, text: str) -> list[float]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(text)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return [float(each["value"][1]) for each in json.load(reply)["data"]["result"]]
    except OSError:
        return []
