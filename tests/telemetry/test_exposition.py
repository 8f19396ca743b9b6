"""The page of metrics, read by Prometheus's parsers, promtool, and Prometheus."""

from __future__ import annotations

import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.telemetry.exposition import CONTENT_TYPE, exposition
from penstock.telemetry.metrics import FAMILIES, ServerFacts
from penstock.telemetry.quantiles import RecentDurations
from penstock.telemetry.statistics import BOUNDS_NS, BatchTimes, Duration, Failure, ModelStatistics, OwnMetric, Reason
from penstock.telemetry.usage import MachineUsage, ProcessUsage
from real import RealProcess, run
from servers import answer, answering, serving_in_thread

US = 1000
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

FACTS = ServerFacts(
    "1.2", 1e9, ProcessUsage(4096, 1.5, 9), 2, 0.25, {"http": 3, "h2": 4}, inflight_bytes=77, dropped_records=6
)
MACHINE = MachineUsage(1000, 600, 0.5)


def a_model(name: str = "m", recent: bool = False) -> ModelStatistics:
    t = time.monotonic_ns()
    model = ModelStatistics(name, "3", load_s=1.25, pending=4, recent=RecentDurations() if recent else None)
    times = BatchTimes(t + 60 * US, t + 61 * US, t + 81 * US, t + 84 * US)
    model.executed([t, t + 10 * US], 5, Reason.IDLE, times, t + 110 * US)
    model.failed(Failure.BACKEND, t, t + 1)
    model.cache_hit(t, 2 * US, t + 5 * US)
    model.cache_miss(3 * US)
    return model


def parsed(page: bytes) -> Samples:
    declared = {family.name for family in FAMILIES}
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            # This parser puts _total behind every counter; Prometheus itself leaves names as they are.
            name = family.name if family.name in declared and family.type == "counter" else sample.name
            key = name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def values(samples: Samples, name: str, **labels: str) -> list[float]:
    wanted = labels.items()
    return [value for (each, given), value in samples.items() if each == name and wanted <= given]


def test_every_number_of_a_model() -> None:
    samples = parsed(exposition([a_model()]))
    labels = {"model": "m", "version": "3"}
    assert {
        name: values(samples, name, **labels)
        for name, given in samples
        if not name.startswith("penstock_") and given == labels.items()
    } == {
        "nv_inference_request_success": [3],
        "nv_inference_count": [5],
        "nv_inference_exec_count": [1],
        "nv_inference_request_duration_us": [215],
        "nv_inference_queue_duration_us": [113],
        "nv_inference_compute_input_duration_us": [2],
        "nv_inference_compute_infer_duration_us": [40],
        "nv_inference_compute_output_duration_us": [6],
        "nv_inference_pending_request_count": [4],
        "nv_cache_num_hits_per_model": [1],
        "nv_cache_num_misses_per_model": [1],
        "nv_cache_hit_duration_per_model": [2],
        "nv_cache_miss_duration_per_model": [3],
        "nv_model_load_duration_secs": [1.25],
    }
    assert values(samples, "nv_inference_request_failure", reason="BACKEND", **labels) == [1]
    assert values(samples, "nv_inference_request_failure") == [0, 0, 1, 0]
    assert values(samples, "penstock_batches_total", reason="idle", **labels) == [1]
    assert sum(values(samples, "penstock_batches_total")) == 1


def test_histograms_are_cumulative_and_end_with_all() -> None:
    samples = parsed(exposition([a_model()]))
    buckets = values(samples, "penstock_request_duration_seconds_bucket")
    assert buckets == [1, 2, 3] + [3] * (len(BOUNDS_NS) - 2)
    assert values(samples, "penstock_request_duration_seconds_bucket", le="5e-05") == [1]
    assert values(samples, "penstock_request_duration_seconds_bucket", le="+Inf") == [3]
    assert values(samples, "penstock_request_duration_seconds_count") == [3]
    assert values(samples, "penstock_request_duration_seconds_sum") == [pytest.approx(215e-6)]
    assert values(samples, "penstock_compute_duration_seconds_sum") == [pytest.approx(48e-6)]
    assert values(samples, "penstock_batch_rows_bucket", le="4") == [0]
    assert values(samples, "penstock_batch_rows_bucket", le="8") == [1]
    assert values(samples, "penstock_batch_rows_sum") == [5]


def test_only_decoupled_models_have_first_responses() -> None:
    model = a_model()
    assert not values(parsed(exposition([model])), "nv_inference_first_response_histogram_ms_count")
    model.decoupled = True
    model.responded_first(0, 300_000_000)
    samples = parsed(exposition([model]))
    assert values(samples, "nv_inference_first_response_histogram_ms_bucket") == [0, 1, 1, 1, 1]
    assert values(samples, "nv_inference_first_response_histogram_ms_bucket", le="500") == [1]
    assert values(samples, "nv_inference_first_response_histogram_ms_sum") == [300]


def test_summaries_only_where_they_are_kept() -> None:
    assert b"summary" not in exposition([a_model()])
    samples = parsed(exposition([a_model(recent=True)]))
    assert values(samples, "nv_inference_request_summary_us", quantile="0.5") == [pytest.approx(100, rel=0.016)]
    assert values(samples, "nv_inference_queue_summary_us", quantile="0.999") == [pytest.approx(60, rel=0.016)]
    assert values(samples, "nv_inference_compute_infer_summary_us_sum") == [40]
    assert values(samples, "nv_inference_compute_infer_summary_us_count") == [2]
    assert values(samples, "nv_cache_miss_summary_us", quantile="0.9") == [pytest.approx(3, rel=0.016)]


def test_a_summary_of_nothing_is_not_a_number() -> None:
    samples = parsed(exposition([ModelStatistics("m", "1", recent=RecentDurations())]))
    assert all(map(math.isnan, values(samples, "nv_inference_request_summary_us")))


def test_server_and_machine() -> None:
    samples = parsed(exposition([], FACTS, MACHINE))
    assert {name: value for (name, labels), value in samples.items() if not labels} == {
        "penstock_start_time_seconds": 1e9,
        "penstock_processes": 2,
        "penstock_process_resident_memory_bytes": 4096,
        "penstock_process_cpu_seconds_total": 1.5,
        "penstock_process_open_fds": 9,
        "penstock_event_loop_lag_seconds": 0.25,
        "penstock_inflight_bytes": 77,
        "penstock_records_dropped_total": 6,
        "nv_cpu_utilization": 0.5,
        "nv_cpu_memory_total_bytes": 1000,
        "nv_cpu_memory_used_bytes": 600,
    }
    assert values(samples, "penstock_build_info", version="1.2") == [1]
    assert values(samples, "penstock_connections", protocol="h2") == [4]


def test_the_series_of_a_model_that_is_gone_are_gone() -> None:
    assert b'model="gone"' in exposition([a_model("gone"), a_model()])
    assert b"gone" not in exposition([a_model()])


def test_metrics_of_a_model_s_own_are_one_family_over_all_models() -> None:
    help_text = 'How "far"\nor \\ not'
    models = [
        ModelStatistics(name, "1", metrics={"own": OwnMetric("counter", help_text, {'a="1"': number, "": 0.5})})
        for number, name in enumerate("mno")
    ]
    text = exposition(models).decode()
    assert text.count("# TYPE own counter\n") == 1
    (family,) = [one for one in text_string_to_metric_families(text) if one.name == "own"]
    assert family.documentation == help_text
    assert {tuple(sample.labels.items()): sample.value for sample in family.samples} == {(("a", "1"),): 3, (): 1.5}


def test_there_is_nothing_without_models_and_server() -> None:
    assert exposition([]) == b""


@given(st.text(), st.text())
def test_any_name_and_tag_comes_back_as_it_is(name: str, tag: str) -> None:
    # The parser splits lines as Python does, at more than the line feed that ends one; the escapes are what is tested.
    name, tag = (" ".join(each.split()) + ("\n" if "\n" in each else "") for each in (name, tag))
    model = ModelStatistics(name, '1"\\\n', tags={"team": tag})
    samples = parsed(exposition([model]))
    assert values(samples, "nv_inference_count", model=name, version='1"\\\n', team=tag) == [0]


@pytest.mark.parametrize(
    "tag", ["model", "le", "reason", "quantile", "__name__", "9lives", "a-b", "", 'x="1",y', "a\n"]
)
def test_a_tag_that_cannot_be_a_label_does_not_spoil_the_page(tag: str) -> None:
    model = ModelStatistics("m", "1", tags={tag: "other", "team": "vision"})
    samples = parsed(exposition([model]))
    assert samples["nv_inference_count", frozenset({"model": "m", "version": "1", "team": "vision"}.items())] == 0


@pytest.mark.real
def test_promtool_finds_nothing_wrong_but_the_names_that_are_tritons() -> None:
    model = a_model('odd "name"\\', recent=True)
    model.decoupled, model.stages = True, {"execute": Duration(1, 5)}
    page = exposition([a_model(recent=True), model], FACTS, MACHINE)
    assert all(f"# TYPE {family.name} {family.kind}\n".encode() in page for family in FAMILIES)
    result = run("promtool", "check", "metrics", input=page)
    assert result.returncode in (0, 3)  # 3: advice about names
    advised = (result.stdout + result.stderr).decode().splitlines()
    assert [line for line in advised if not line.startswith("nv_")] == []


@pytest.fixture
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealProcess]:
    headers = f"Content-Type: {CONTENT_TYPE}\r\n"
    model = a_model()
    model.stages = {"execute": Duration(1, 5)}
    page = exposition([model, a_model('odd "name"\\')], FACTS, MACHINE)
    with serving_in_thread(answering(answer(page, headers=headers))) as address:
        settings = tmp_path_factory.mktemp("prometheus") / "prometheus.yml"
        settings.write_text(
            "global: {scrape_interval: 200ms}\n"
            "scrape_configs:\n"
            f"  - {{job_name: penstock, static_configs: [{{targets: ['{address.host}:{address.port}']}}]}}\n"
        )
        arguments = [
            f"--config.file={settings}",
            "--storage.tsdb.path={folder}",
            "--web.listen-address=127.0.0.1:{port}",
        ]
        with RealProcess(["prometheus", *arguments], is_ready=has_scraped) as process:
            yield process


def query(port: int, text: str) -> list[tuple[dict[str, str], float]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(text)}"
    with urllib.request.urlopen(url, timeout=10) as reply:
        result = json.load(reply)["data"]["result"]
    return [(each["metric"], float(each["value"][1])) for each in result]


def has_scraped(port: int) -> bool:
    try:
        return any(value == 1 for _, value in query(port, "up"))
    except OSError:
        return False


@pytest.mark.real
def test_a_real_prometheus_scrapes_and_answers(prometheus: RealProcess) -> None:
    ((labels, value),) = query(prometheus.port, 'nv_inference_request_success{model="m"}')
    assert value == 3
    assert labels["version"] == "3"
    odd = query(prometheus.port, r'nv_inference_count{model="odd \"name\"\\"}')
    assert [value for _, value in odd] == [5]
    quantile = 'histogram_quantile(0.5, penstock_queue_duration_seconds_bucket{model="m"})'
    ((_, median),) = query(prometheus.port, quantile)
    assert 0 < median <= 50e-6
    scraped = {labels["__name__"] for labels, _ in query(prometheus.port, '{job="penstock"}')}
    expected = {family.name for family in FAMILIES if family.kind not in ("histogram", "summary")}
    assert expected <= scraped
