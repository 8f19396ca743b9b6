"""``penstock config show``: values, origins, and what is kept secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.online.server.config import ServerConfig


def shown(outcome: Any) -> dict[str, tuple[Any, str]]:
    assert outcome.code == 0, outcome.err
    return {row["name"]: (row["value"], row["origin"]) for row in outcome.json["settings"]}


def test_every_setting_with_its_default(penstock) -> None:
    found = shown(penstock("config", "show", "--json"))
    assert list(found) == list(ServerConfig.__struct_fields__)
    assert found["http_port"] == (8000, "default")


def test_every_setting_can_be_set(penstock) -> None:
    values = {name: "" for name in ServerConfig.__struct_fields__ if getattr(ServerConfig(), name) in ("", ())}
    del values["warmup_folder"], values["unix_socket"]
    found = shown(penstock("config", "show", "--json", *(f"--set={name}=" for name in values)))
    assert {name for name, (_, origin) in found.items() if origin == "--set"} == set(values)


def test_each_origin(penstock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "server.toml").write_text(
        "[server]\nhost = '::1'\nmax_queue = 1\nmax_streams = 5\n[models.linear]\nmax_batch_size = 8\n"
    )
    monkeypatch.setenv("PENSTOCK_SERVER_MAX_QUEUE", "2")
    monkeypatch.setenv("PENSTOCK_SERVER_MAX_STREAMS", "2")
    arguments = "--config server.toml --max-queue 3 --set trace_rate=7 --no-allow-grpc --load-model a --load-model b"
    found = shown(penstock("config", "show", *arguments.split(), "--model-control-mode", "explicit", "--json"))
    assert found["host"] == ("::1", "file")
    assert found["max_queue"] == (3, "flag")
    assert found["max_streams"] == (2, "environment PENSTOCK_SERVER_MAX_STREAMS")
    assert found["trace_rate"] == (7, "--set")
    assert found["allow_grpc"] == (False, "flag")
    assert found["load_models"] == (["a", "b"], "flag")
    assert found["models.linear.max_batch_size"] == (8, "file")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["dialects="], []),
        (["dialects=kserve-v1, torchserve"], ["kserve-v1", "torchserve"]),
        (["dialects=kserve-v1", "dialects=torchserve"], ["kserve-v1", "torchserve"]),
        (['dialects=["kserve-v1"]'], ["kserve-v1"]),
    ],
)
def test_lists(penstock, arguments: list[str], value: list[str]) -> None:
    found = shown(penstock("config", "show", "--json", *(f"--set={each}" for each in arguments)))
    assert found["dialects"] == (value, "--set")


def test_secrets_are_hidden(penstock) -> None:
    arguments = ["--set", "cache_redis=redis://:hunter2@h", "--set", "dialects="]
    arguments += ["--set", 'http_restricted_api=["health,trace:key=hunter2"]']
    for json in ([], ["--json"]):
        done = penstock("config", "show", *arguments, *json)
        assert done.code == 0
        assert "hunter2" not in done.out
        assert "(hidden)" in done.out


def test_the_table_is_grouped(penstock) -> None:
    lines = penstock("config", "show", "--max-batch", "8").out.splitlines()
    assert lines[0] == "Network"
    assert any(line.split() == ["max_batch", "8", "(flag)"] for line in lines)
    assert any(line.split() == ["grpc_port", "-", "(default)"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "max_que=1"], "unknown setting 'max_que' in --set\n  fix: did you mean 'max_queue'?"),
        (
            ["--set", "grpc_implementation=h2"],
            "was removed: gRPC always runs on the server's own HTTP/2 (h2)\n  fix: remove it",
        ),
        (["--grpc-implementation", "grpcio"], "setting 'grpc_implementation' in the flag was removed"),
        (["--set", "max_queue"], "--set 'max_queue' has no value"),
        (["--set", "max_queue=0"], "setting 'max_queue' from --set is wrong: Expected `int` >= 1"),
        (["--set", 'dialects=["kserve-v1"'], "setting 'dialects' from --set is wrong"),
        (["--set", "trace_mode=zipkin"], "fix: one of triton, opentelemetry"),
        (["--max-batch", "0"], "setting 'max_batch' from the flag is wrong"),
        (["--set", "warmup_record=1"], "'warmup_record' requires a 'warmup_folder'"),
    ],
)
def test_mistakes(penstock, arguments: list[str], message: str) -> None:
    done = penstock("config", "show", *arguments)
    assert done.code == 2
    assert message in done.err


def test_the_error_about_a_setting_names_its_file(penstock, tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("[server]\nmax_queue = 'many'\n")
    done = penstock("config", "show", "--config", path)
    assert done.code == 2
    assert f"setting 'max_queue' from '{path}' is wrong" in done.err.replace("\n", "")
