"""The process that runs the attackers. Its last line on stdout is a JSON object with their counts."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import orjson

from benchmarks.attacks.catalog import ATTACKS
from benchmarks.attacks.site import Site, besiege
from penstock.perf.http_client import Address

_NICE = 10
_MOST_S = 600.0
_MOST_ATTACKERS = 256


def main() -> int:
    """Run the attack for the duration on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attacks", description="Attack a server on this machine."
    )
    parser.add_argument("name", choices=sorted(ATTACKS))
    parser.add_argument("--http", required=True, help="HOST:PORT of a loopback address")
    parser.add_argument("--grpc", required=True, help="HOST:PORT of a loopback address")
    parser.add_argument("--key", default="", help="the attackers' key; without it, they are unknown clients")
    parser.add_argument("--attackers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    if not 0 < arguments.seconds <= _MOST_S or not 0 < arguments.attackers <= _MOST_ATTACKERS:
        parser.error(f"at most {_MOST_ATTACKERS} attackers, for at most {_MOST_S:g} seconds")
    os.nice(_NICE)
    with suppress(OSError):  # if sessions share the CPU equally, niceness works only within a session
        Path("/proc/self/autogroup").write_text(str(_NICE))
    site = asyncio.run(attack(arguments))
    print(orjson.dumps({"cpu_s": time.process_time(), "counts": dict(site.counts)}).decode())
    return 0


async def attack(arguments: argparse.Namespace) -> Site:
    """Run the attack, and print ``attacking`` once its first bytes have been sent."""
    site = Site(Address.parse(arguments.http), Address.parse(arguments.grpc), arguments.key)
    siege = asyncio.create_task(besiege(ATTACKS[arguments.name], site, arguments.attackers, arguments.seconds))
    begun = asyncio.create_task(site.begun.wait())
    await asyncio.wait((siege, begun), return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    print("attacking", flush=True)
    await siege
    return site


if __name__ == "__main__":
    sys.exit(main())
