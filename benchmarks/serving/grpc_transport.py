"""Our own HTTP/2 compared with grpcio. Both carry the same gRPC service with a model that returns its input. There are 64 streams,
16 per connection.
"""

from __future__ import annotations

from benchmarks.in_process import NULL_INPUTS
from benchmarks.results import Row
from benchmarks.rounds import grpc_side, measure, throughput_claim
from benchmarks.servers import serving, split_cores


def run(quick: bool) -> list[Row]:
    """Return the row of this part."""
    rounds, seconds = (2, 0.5) if quick else (7, 1.0)
    cores, _ = split_cores()
    module = ["-m", "benchmarks.grpcio_server"]
    with serving([*module, "h2"], cores) as ours, serving([*module, "grpcio"], cores) as theirs:
        sides = {name: grpc_side(server, "m", [NULL_INPUTS]) for name, server in (("ours", ours), ("theirs", theirs))}
        found = measure(sides, 64, rounds, seconds)
    return [throughput_claim("requests/s ratio to grpcio, gRPC, 64 streams", found["ours"], found["theirs"], 2.5)]
