"""The settings that result from Triton's flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.flags.triton_flags import DEFAULTS, FLAGS, translate
from penstock.config import resolve
from penstock.errors import InvalidArgument, InvalidConfig
from penstock.online.server.config import ServerConfig

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "triton-flags.md"
TLS = ["--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"]


def settings(*arguments: str) -> dict[str, Any]:
    return translate(arguments)[0]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("--model-repository=/a --model-store /b", {"model_repository": ("/a", "/b")}),
        ("--model-repo /a", {"model_repository": ("/a",)}),
        (
            "--allow-http=false --log-info OFF --allow-metrics=0",
            dict.fromkeys(("allow_http", "log_info", "allow_metrics"), False),
        ),
        (
            "--allow-http --exit-on-error --strict-readiness=1",
            dict.fromkeys(("allow_http", "exit_on_error", "strict_readiness"), True),
        ),
        (
            "--http-port 9000 --grpc-port=9001 --metrics-port=9002",
            {"http_port": 9000, "grpc_port": 9001, "metrics_port": 9002},
        ),
        ("--http-address=a --grpc-address=b --metrics-address=c", {"host": "a", "grpc_host": "b", "metrics_host": "c"}),
        (
            "--model-control-mode=EXPLICIT --load-model=a --load-model=*",
            {"model_control_mode": "explicit", "load_models": ("a", "*")},
        ),
        (
            "--model-control-mode=poll --repository-poll-secs=3",
            {"model_control_mode": "poll", "repository_poll_secs": 3.0},
        ),
        ("--repository-poll-secs=0", {}),
        ("--log-verbose=true", {"log_verbose_level": 1}),
        ("--log-verbose 2 --log-format iso8601", {"log_verbose_level": 2, "log_format": "ISO8601"}),
        ("--cache-config=local,size=1048576", {"cache_bytes": 1048576}),
        (
            "--cache-config=redis,host=h --cache-config=redis,password=p@ss",
            {"cache_bytes": 64 << 20, "cache_redis": "redis://:p%40ss@h:6379/0"},
        ),
        (
            "--cache-config=redis,host=::1 --cache-config=redis,tls_enabled=true",
            {"cache_bytes": 64 << 20, "cache_redis": "rediss://[::1]:6379/0"},
        ),
        ("--response-cache-byte-size=5", {"cache_bytes": 5}),
        (
            "--rate-limit=execution_count --rate-limit-resource=R:4 --rate-limit-resource=S:1:0",
            {"rate_limit": "execution_count", "rate_limit_resource": ("R:4", "S:1:0")},
        ),
        ("--http-restricted-api=health,trace:k=v=w", {"http_restricted_api": ("health,trace:k=v=w",)}),
        (
            "--trace-config level=TIMESTAMPS --trace-config=triton,file=t.json --trace-config rate=5",
            {"trace_level": "TIMESTAMPS", "trace_file": "t.json", "trace_rate": 5},
        ),
        (
            "--trace-config mode=opentelemetry --trace-config opentelemetry,url=h:4318/v1/traces",
            {"trace_mode": "opentelemetry", "trace_endpoint": "http://h:4318/v1/traces"},
        ),
        ("--metrics-config=summary_latencies=true", {"metrics_summaries": True}),
        ("--allow-client-shm=1", {"allow_client_shm": "true"}),
        ("--id=me --exit-timeout-secs=3", {"server_name": "me", "drain_timeout_s": 3.0}),
        ("--reuse-http-port=false --allow-sagemaker=0 --http-header-forward-pattern=", {}),
    ],
)
def test_what_flags_come_to(arguments: str, wanted: dict[str, Any]) -> None:
    found, notes = translate(arguments.split())
    assert (found, notes) == (wanted, [])
    resolve(ServerConfig, "server", DEFAULTS, {}, found)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (TLS, {}),
        (["--grpc-use-ssl=false", *TLS], {}),
        (["--grpc-use-ssl", *TLS], {"tls_client_ca": ""}),
        (["--grpc-use-ssl-mutual=true", *TLS], {"tls_client_ca": "r"}),
    ],
)
def test_tls_is_for_grpc_alone(arguments: list[str], wanted: dict[str, str]) -> None:
    always = {"tls_certificate": "c", "tls_key": "k", "http_tls": False}
    assert settings(*arguments) == (always | wanted if wanted else {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--http-prt=1", "unknown flag '--http-prt'.*did you mean 'http-port'"),
        ("--", "unknown flag"),
        ("--http-=1", "unknown flag '--http-'"),
        ("models", "expected a flag, got 'models'"),
        ("--http-port", "--http-port requires a value"),
        ("--http-port --grpc-port=1", "--http-port requires a value"),
        ("--http-port=a", "--http-port: Expected `int"),
        ("--http-port=70000", "--http-port: "),
        ("--allow-http=maybe", "--allow-http: Expected `bool`"),
        ("--model-repository=", "--model-repository: the value must not be empty"),
        ("--cache-config=size=1", "write local,size=<bytes>"),
        ("--cache-config=local,size=-1", "--cache-config: "),
        ("--trace-config=level", "write <name>,<setting>=<value>"),
        ("--reuse-grpc-port=true", "PENSTOCK_SERVER_PROCESSES"),
        ("--allow-vertex-ai", "does not implement this front end"),
        ("--grpc-header-forward-pattern=x-.*", "headers are not forwarded to models"),
        ("--grpc-use-ssl=1", "TLS requires a certificate file"),
        ("--grpc-use-ssl-mutual=1 --grpc-server-cert=c", "TLS requires a certificate file"),
    ],
)
def test_flags_that_are_wrong(arguments: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        translate(arguments.split())
    assert re.search(message, str(caught.value))


def test_passwords_are_not_repeated() -> None:
    with pytest.raises(InvalidArgument) as caught:
        translate(["--cache-config=rediss,password=hunter2"])
    assert "hunter2" not in str(caught.value)


def test_what_has_no_effect_is_told_once_with_the_reason() -> None:
    found, notes = translate(["--http-thread-count=8", "--http-thread-count", "9", "--backend-config=python,a=b"])
    assert found == {}
    assert [note.partition(":")[0] for note in notes] == [
        "--http-thread-count has no effect here",
        "--backend-config has no effect here",
    ]
    _, (note,) = translate(["--cache-config=redis,pool_size=3"])
    assert "'pool_size'" in note


def test_models_to_load_need_control() -> None:
    with pytest.raises(InvalidConfig, match="'load_models' requires 'model_control_mode' explicit"):
        resolve(ServerConfig, "server", DEFAULTS, {}, settings("--load-model=a"))


def test_every_flag_is_documented() -> None:
    cells = re.findall(r"^\| (`--.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    documented = [name for cell in cells for name in re.findall(r"`--([\w-]+)`", cell)]
    assert len(documented) == len(set(documented))
    assert set(documented) - {"help"} == set(FLAGS)


@given(st.lists(st.one_of(st.sampled_from([f"--{name}" for name in FLAGS]), st.text(max_size=20)), max_size=6))
def test_any_words_are_settings_or_an_error(arguments: list[str]) -> None:
    try:
        found, _ = translate(arguments)
    except InvalidArgument:
        return
    assert set(found) <= set(ServerConfig.__struct_fields__)


@given(st.sampled_from(sorted(FLAGS)), st.text(max_size=30))
def test_both_spellings_say_the_same(name: str, value: str) -> None:
    def outcome(*arguments: str) -> object:
        try:
            return translate(arguments)
        except InvalidArgument as error:
            return str(error)

    if not value.startswith("--"):
        assert outcome(f"--{name}={value}") == outcome(f"--{name}", value)
