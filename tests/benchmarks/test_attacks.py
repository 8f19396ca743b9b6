"""Each attack does to a real server what its name says, and it keeps to this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.attacks.catalog import ATTACKS, EXPENSIVE
from benchmarks.attacks.process import Attackers, Outcome, attacking
from benchmarks.attacks.site import Attack, Site, besiege
from benchmarks.attacks.strikes import Strikes
from benchmarks.attacks.targets import KEY, make_models, targets
from benchmarks.innocents import innocents
from benchmarks.servers import Server
from penstock.perf.http_client import Address

PATIENCE_S = 120.0

Evidence = Callable[[Site], bool]


def counted(name: str, number: int = 1) -> Evidence:
    return lambda site: site.counts[name] >= number


def flood(site: Site) -> bool:
    """The server has disconnected the attacker, who had sent more than one buffer."""
    return site.counts["GOAWAY ENHANCE_YOUR_CALM"] > 0 and site.counts["bytes sent"] >= 1 << 16


EVIDENCE: dict[str, Evidence] = {
    "gzip-tensor": counted("HTTP 200"),
    "gzip-json": counted("HTTP 200"),
    "gzip-oversized": counted("HTTP 413"),
    "gzip-message": counted("gRPC status 0"),
    "json": counted("HTTP 200"),
    "json-oversized": counted("HTTP 413"),
    "typed-contents": counted("gRPC status 0"),
    "gzip-typed": counted("gRPC status 0"),
    "generate": counted("HTTP 200"),
    "logging": counted("HTTP 400"),
    "gzip-logging": counted("HTTP 413"),
    "settings": flood,
    "ping": lambda site: flood(site) and site.counts["PING answered"] > 0,
    "priority": flood,
    "window-update": flood,
    "empty-data": flood,
    "continuation": flood,
    "empty-messages": flood,
    "pipelining": counted("HTTP 200", 257),
    "control-calls": counted("gRPC status 0", 101),
    "connections": counted("HTTP 200", 3),
    "reload": counted("HTTP 503", 3),  # the server has no explicit mode
    "unread-http": counted("requests sent", 20),
    "unread-grpc": counted("calls sent", 20),
    "slow-headers": counted("bytes trickled", 128),
    "slow-body": counted("bytes trickled", 128),
    "rapid-reset": counted("calls reset", 100),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with targets(tmp_path_factory.mktemp("open"), 1) as (server,):
        yield server


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with targets(tmp_path_factory.mktemp("keys"), 1, keys=True) as (server,):
        yield server


def attack(server: Server, name: str, evidence: Evidence, key: str = "") -> Site:
    """Let one attacker work until there is ``evidence``."""
    assert server.grpc is not None
    site = Site(server.address, server.grpc, key)

    async def work() -> None:
        siege = asyncio.ensure_future(besiege(ATTACKS[name], site, 1, PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while not evidence(site):
                await asyncio.wait((siege,), timeout=0.01)
                assert not siege.done(), site.counts
        siege.cancel()
        await asyncio.gather(siege, return_exceptions=True)

    asyncio.run(work())
    return site


def test_every_attack_has_evidence() -> None:
    assert set(EVIDENCE) == set(ATTACKS)
    assert set(EXPENSIVE) <= set(ATTACKS)


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_does_what_its_name_says(server: Server, name: str) -> None:
    attack(server, name, EVIDENCE[name])


@pytest.mark.parametrize("name", EXPENSIVE)
def test_an_unknown_client_is_refused(closed: Server, name: str) -> None:
    refusals = {"HTTP 401", "gRPC status 16"}
    site = attack(closed, name, lambda site: bool(refusals & set(site.counts)))
    assert not {"HTTP 200", "gRPC status 0"} & set(site.counts)


def test_a_known_attacker_is_served(closed: Server) -> None:
    site = attack(closed, "pipelining", counted("HTTP 200"), KEY)
    assert not site.counts["HTTP 401"]


def test_innocents_compare_their_answers(server: Server) -> None:
    with innocents(server) as clients:
        first, second = clients.round(0.5), clients.round(0.5)
    for one in (first, second):
        assert one.requests > 0
        assert one.failed == {}
        assert 0 < one.p50_ms <= one.p99_ms <= one.max_ms


def test_innocents_notice_what_is_wrong(closed: Server) -> None:
    with innocents(closed) as strangers:
        found = strangers.round(0.5)
    assert sum(found.failed.values()) == found.requests > 0
    assert found.p99_ms == 10_000
    assert {kind.partition(":")[0] for kind in found.failed} == {"HTTP", "gRPC"}


def test_the_process_ends_by_itself_and_says_what_it_did(server: Server) -> None:
    with attacking("connections", server, 0.2, attackers=2) as attackers:
        outcome = attackers.finish(0.2)
    assert outcome.counts["HTTP 200"] > 0
    assert "HTTP 200" in str(outcome)


def test_the_report_is_read_even_if_it_arrives_with_the_first_line() -> None:
    lines = 'print(\'attacking\'); print(\'{"cpu_s": 1.5, "counts": {"HTTP 200": 3}}\')'
    with subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.wait(PATIENCE_S)
        assert process.stdout.readline() == "attacking\n"
        assert Attackers(process).finish(0.1) == Outcome(1.5, {"HTTP 200": 3})


def test_strikes_take_turns(server: Server) -> None:
    names = ["connections", "ping"]
    strikes = Strikes(server, names)

    async def work() -> set[str]:
        return {await strikes.strike(0.1) for _ in names}

    assert asyncio.run(work()) == set(names)
    assert strikes.done == dict.fromkeys(names, 1)


@pytest.mark.parametrize("host", ["192.0.2.1", "8.8.8.8", "::"])
def test_other_machines_cannot_be_attacked(host: str) -> None:
    with pytest.raises(ValueError, match="not a loopback address"):
        Site(Address("127.0.0.1", 1), Address(host, 1))


def test_an_error_of_an_attack_is_raised() -> None:
    async def fail(site: Site) -> None:
        raise ZeroDivisionError

    site = Site(Address("127.0.0.1", 1), Address("127.0.0.1", 1))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(besiege(Attack("", fail), site, 2, PATIENCE_S))


def test_models_are_made_in_the_folder(tmp_path: Path) -> None:
    assert {path.name for path in make_models(tmp_path).iterdir()} == {"identity", "wide", "widen", "reloaded"}
