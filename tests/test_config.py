from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from penstock.config import Flag, Secret, did_you_mean, read_file, resolve, settings, write_text
from penstock.errors import InvalidConfig, NotFound


class ServerConfig(msgspec.Struct, frozen=True):
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    host: str = "127.0.0.1"
    drain: bool = True
    log: Literal["text", "json"] = "text"
    limit_ms: float | None = None
    ports: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.host == "0.0.0.0" and self.port == 0:
            raise ValueError("a free port on every interface is asking for trouble")


def test_each_source_beats_those_before_it_and_is_remembered() -> None:
    resolved = resolve(
        ServerConfig,
        "server",
        file={"port": 1, "host": "file", "log": "json"},
        environment={"PENSTOCK_SERVER_PORT": "2", "PENSTOCK_SERVER_HOST": "environment", "HOME": "/root"},
        flags={"port": 3, "drain": None},
    )
    assert resolved.config == ServerConfig(port=3, host="environment", log="json")
    assert resolved.explain() == [
        ("port", 3, "flag"),
        ("host", "environment", "environment PENSTOCK_SERVER_HOST"),
        ("drain", True, "default"),
        ("log", "json", "file"),
        ("limit_ms", None, "default"),
        ("ports", (), "default"),
    ]


def test_nothing_given_is_the_defaults() -> None:
    resolved = resolve(ServerConfig, "server")
    assert resolved.config == ServerConfig()
    assert set(resolved.origins.values()) == {"default"}


def test_a_flag_may_be_false_or_zero() -> None:
    config = resolve(ServerConfig, "server", flags={"drain": False, "port": 0}).config
    assert (config.drain, config.port) == (False, 0)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False), ("False", False)]
)
def test_the_environment_is_text_read_as_the_field(text: str, value: bool) -> None:
    assert resolve(ServerConfig, "server", environment={"PENSTOCK_SERVER_DRAIN": text}).config.drain is value


@pytest.mark.parametrize(("text", "value"), [("", ()), ("80", (80,)), ("80, 443,", (80, 443))])
def test_a_list_in_the_environment_stands_between_commas(text: str, value: tuple[int, ...]) -> None:
    assert resolve(ServerConfig, "server", environment={"PENSTOCK_SERVER_PORTS": text}).config.ports == value


def test_assignments_beat_flags_and_lists_grow() -> None:
    resolved = resolve(ServerConfig, "server", flags={"port": 1}, assignments=["port=2", "ports=80", "ports=[443]"])
    assert (resolved.config.port, resolved.config.ports) == (2, (80, 443))
    assert resolved.origins["port"] == "--set"


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (True, "true"), (("a", "b"), "a,b"), (2.0, "2"), (0.5, "0.5"), ("x", "x")]
)
def test_write_text(value: object, text: str) -> None:
    assert write_text(value) == text


class Explained(msgspec.Struct, frozen=True):
    port: Flag[Annotated[int, msgspec.Meta(ge=0, le=65535)]] = 8000
    """Port to
    listen on."""
    limit: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Limit."""
    password: Secret[str] = ""
    """Password."""


def test_settings_describe_the_fields() -> None:
    port, limit, password = settings(Explained)
    assert (port.name, port.kind, port.bounds, port.default) == ("port", int, "0 to 65535", 8000)
    assert (port.help, port.is_flag, port.is_secret) == ("Port to listen on.", True, False)
    assert (limit.kind, limit.bounds, limit.is_flag) == (float, "more than 0", False)
    assert password.is_secret


def test_environment_of_other_sections_is_not_ours() -> None:
    assert (
        resolve(ServerConfig, "server", environment={"PENSTOCK_SERVE_PORT": "1", "PENSTOCK_X": ""}).config.port == 8000
    )


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"file": {"prot": 1}}, r"unknown setting 'prot' in the file \(did you mean 'port'\?\)"),
        (
            {"environment": {"PENSTOCK_SERVER_HOSTS": "x"}},
            r"unknown setting 'PENSTOCK_SERVER_HOSTS' in the environment \(did you mean 'host'\?\)",
        ),
        (
            {"flags": {"zzz": 1}},
            r"unknown setting 'zzz' in the flag \(use one of: port, host, drain, log, limit_ms, ports\)",
        ),
        ({"environment": {"PENSTOCK_SERVER_PORT": "http"}}, "setting 'port' from the environment is wrong: .*int"),
        ({"environment": {"PENSTOCK_SERVER_PORT": "70000"}}, "setting 'port' from the environment is wrong: .*65535"),
        ({"environment": {"PENSTOCK_SERVER_DRAIN": "maybe"}}, "setting 'drain' from the environment is wrong"),
        ({"file": {"port": "8000"}}, "setting 'port' from the file is wrong: .*str"),
        ({"file": {"port": "8000"}, "path": Path("a/b.toml")}, "setting 'port' from 'a/b.toml' is wrong: .*str"),
        ({"file": {"prot": 1}, "path": Path("b.toml")}, "unknown setting 'prot' in 'b.toml'"),
        ({"environment": {"PENSTOCK_SERVER_PORT": "x"}, "path": Path("b.toml")}, "from the environment is wrong"),
        ({"file": {"log": "xml"}}, r"setting 'log' from the file is wrong: .*xml.*\(one of "),
        ({"flags": {"limit_ms": []}}, "setting 'limit_ms' from the flag is wrong"),
        ({"flags": {"host": "0.0.0.0", "port": 0}}, "bad server configuration: .*asking for trouble"),
    ],
)
def test_mistakes_name_setting_source_and_fix(sources: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolve(ServerConfig, "server", **sources)  # type: ignore[arg-type]


def test_read_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('[server]\nport = 9000\nhost = "höst"\n', encoding="utf-8")
    assert read_file(path, ["server", "model"]) == {"server": {"port": 9000, "host": "höst"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[server\n", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"[sever]\n", r"unknown section 'sever'.*did you mean 'server'\?"),
        (b"server = 1\n", r"'server' in .* must be a table.*below \[server\]"),
    ],
)
def test_bad_file(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_bytes(content)
    with pytest.raises(InvalidConfig, match=message):
        read_file(tmp_path / "penstock.toml", ["server"])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no configuration file"):
        read_file(tmp_path / "penstock.toml", ["server"])
    with pytest.raises(InvalidConfig, match="cannot read configuration file"):
        read_file(tmp_path, ["server"])


def test_did_you_mean_lists_all_when_nothing_is_near() -> None:
    assert did_you_mean("thread", ["threads", "arena"]) == "did you mean 'threads'?"
    assert did_you_mean("xyz", ["threads", "arena"]) == "use one of: threads, arena"
