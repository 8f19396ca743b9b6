import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.clock import ManualClock
from penstock.errors import InvalidConfig, PermissionDenied, Unauthenticated
from penstock.online.server.access.auth import Access, credential

ALICE, BOB = "alice's key 0123", "bob's key 0123456"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


FILE = f"""
[clients.alice]
key_sha256 = "{digest(ALICE)}"
models = ["resnet*", "digits"]

[clients.bob]
key_sha256 = ["{digest(BOB).upper()}", "{digest("bob's next key 01")}"]
admin = true
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def access(path: Path, clock: ManualClock) -> Access:
    return Access(path, clock)


@pytest.fixture
def change(path: Path, clock: ManualClock) -> Callable[[str], None]:
    """Replaces the keys file as an editor does, and advances the clock so that the change is noticed."""

    def change(text: str) -> None:
        new = path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, path)
        clock.advance(1)

    return change


@pytest.mark.parametrize(
    ("authorization", "api_key", "expected"),
    [
        ("Bearer abc", None, b"abc"),
        (b"bearer  abc ", None, b"abc"),
        ("BEARER abc", "other", b"abc"),
        (None, "abc", b"abc"),
        (None, b" abc", b"abc"),
        ("Basic abc", "key", b"key"),
        ("Basic abc", None, None),
        ("Bearer", None, None),
        ("Bearer ", None, None),
        ("abc", None, None),
        ("", "", None),
        ("Bearer \udcff", None, b"?"),
        (None, None, None),
    ],
)
def test_where_a_key_is_found(
    authorization: str | bytes | None, api_key: str | bytes | None, expected: bytes | None
) -> None:
    assert credential(authorization, api_key) == expected


def test_each_key_is_its_client_s(access: Access) -> None:
    assert access.enabled
    assert [access.identify(key.encode()) for key in (ALICE, BOB, "bob's next key 01")] == ["alice", "bob", "bob"]


@pytest.mark.parametrize("key", [None, b"", b"wrong", digest(ALICE).encode(), ALICE.encode() + b" ", b"\xff\x00"])
def test_any_other_key_is_nobody_s_and_is_not_repeated(access: Access, key: bytes | None) -> None:
    with pytest.raises(Unauthenticated, match="Authorization: Bearer") as caught:
        access.identify(key)
    if key:
        assert key.decode("latin-1") not in str(caught.value)


def test_models_of_a_client(access: Access) -> None:
    for model in ("resnet", "resnet50", "digits"):
        access.check("alice", model)
        access.check("bob", model)
    for model in ("digits2", "my-resnet", "Digits", "", "x\nresnet"):
        assert not access.may("alice", model)
        with pytest.raises(PermissionDenied):
            access.check("alice", model)


def test_only_an_admin_controls(access: Access) -> None:
    access.require_admin("bob")
    with pytest.raises(PermissionDenied):
        access.require_admin("alice")
    with pytest.raises(Unauthenticated):
        access.require_admin("nobody")


def test_without_a_file_everybody_may_everything(clock: ManualClock) -> None:
    access = Access(None, clock)
    assert not access.enabled
    assert access.identify(None) == access.identify(b"whatever") == ""
    access.check("", "m")
    access.require_admin("")


def test_a_changed_file_is_read_within_a_second(
    access: Access, clock: ManualClock, change: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    change(f'[clients.carol]\nkey_sha256 = "{digest(ALICE)}"')
    assert access.identify(ALICE.encode()) == "carol"
    with pytest.raises(Unauthenticated):
        access.identify(BOB.encode())
    with pytest.raises(Unauthenticated):
        access.client("bob")  # identified earlier, and removed since
    assert [record.message for record in caplog.records] == ["the keys file was reloaded: 1 clients"]


def test_it_is_looked_at_once_a_second_only(access: Access, path: Path, clock: ManualClock) -> None:
    path.write_text("")
    clock.advance(0.9)
    assert access.identify(ALICE.encode()) == "alice"


@pytest.mark.parametrize("text", ["clients = ", f"[clients.x]\nkey_sha256 = '{digest('')}'\nadmim = true", ""])
def test_a_broken_file_leaves_the_old_in_force_and_is_told_once(
    access: Access, clock: ManualClock, change: Callable[[str], None], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    change(text)
    for _ in range(3):
        assert access.identify(ALICE.encode()) == "alice"
        clock.advance(1)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "keys.toml" in record.message
    assert "stay in force" in record.message
    change(FILE.replace("alice", "carol"))
    assert access.identify(ALICE.encode()) == "carol"


def test_a_file_that_is_gone_leaves_the_old_in_force(
    access: Access, path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    for _ in range(3):
        clock.advance(1)
        assert access.identify(ALICE.encode()) == "alice"
    assert "No such file" in caplog.text
    assert len(caplog.records) == 1
    path.write_text(FILE.replace("alice", "carol"))
    clock.advance(1)
    assert access.identify(ALICE.encode()) == "carol"


def test_a_key_in_clear_text_is_taken_with_a_warning_that_does_not_show_it(
    path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(f'[clients.dave]\nkey = "{ALICE}"')
    assert Access(path, clock).identify(ALICE.encode()) == "dave"
    assert "'dave' is in clear text" in caplog.text
    assert ALICE not in caplog.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[clients.a]", "no key"),
        ("[clients.a]\nkey_sha256 = []", "no key"),
        ("[clients.a]\nkey = 'short'", "length >= 16"),
        ("[clients.a]\nkey_sha256 = '12'", "matching regex"),
        (f"[clients.'a b']\nkey = '{ALICE[:5]}0123456789abcdef'", "matching regex"),
        (f"[clients.a]\nkey_sha256 = '{digest('x')}'\nburst = 0", "burst"),
        (f"[clients.a]\nkey_sha256 = '{digest('x')}'\nrequests_per_second = 0", "requests_per_second"),
        (
            f"[clients.a]\nkey_sha256 = '{digest('x')}'\n[clients.b]\nkey_sha256 = '{digest('x')}'",
            "shares a key with another",
        ),
        (f"[client.a]\nkey_sha256 = '{digest('x')}'", r"unknown section 'client' .* \(did you mean 'clients'\?\)"),
        (f"[users.a]\nkey_sha256 = '{digest('x')}'", r"unknown section 'users' .* \(use one of: clients\)"),
        (
            f"[clients.good]\nkey_sha256 = '{digest('x')}'\n[clients.bad]\nkey_sha256 = '12'",
            "client 'bad' .* is wrong: .*64",
        ),
        ("[clients.good]\nkeys = '12'", "client 'good' .* is wrong: .*unknown field `keys`"),
        ("clients = 1", r"has no clients \(describe each in a section \[clients.NAME\]\)"),
        ("clients.a = 1", "client 'a' .* is wrong: Expected `object`"),
        ("", "has no clients"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_file_that_is_wrong_keeps_the_server_from_starting(
    path: Path, clock: ManualClock, text: str, told: str
) -> None:
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidConfig, match=told):
        Access(path, clock)


def test_a_file_that_is_not_there_keeps_the_server_from_starting(tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        Access(tmp_path / "none.toml", clock)
