"""Fuzzes shared memory: clients register regions, truncate and remove their files, and requests read and write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.errors import PenstockError
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.shared_memory.lease import Lease
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.tensor import DataType
from tests.fuzz.fast_loop import FastLoop
from tests.fuzz.mutator import Seed
from tests.fuzz.planes import touch
from tests.fuzz.target import Script, Target, attempt

_FOLDER = Path("/dev/shm")
_NUMBERS = (0, 1, 8, 63, 64, 65, 4096, 1 << 20, -1, 2**31, 2**63 - 1, 2**63, 2**64)
_TYPES = (DataType.FP32, DataType.BYTES, DataType.BOOL, DataType.UINT8)
_SHAPES: Sequence[Sequence[int]] = ((2,), (16,), (0,), (64,), (1, 1), (2**40, 2**40), (-1,), ())


class RegionTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (b"../x", b"/", b"\0", b".", b"\xff")

    def __init__(self) -> None:
        self._files = [f"penstock_fuzz_{os.getpid()}_{number}" for number in range(2)]
        self.seeds: Sequence[Seed] = [
            tuple(bytes((n * step % 233,)) for n in range(start, start + 60))
            for start in range(4)
            for step in (1, 3, 11)
        ]
        self._loop = FastLoop()

    def run(self, data: bytes) -> None:
        for name in self._files:
            (_FOLDER / name).write_bytes(bytes(range(64)) + bytes(4032))
        self._loop.run_until_complete(self._run(data))
        assert not self._loop.failures, self._loop.failures

    def close(self) -> None:
        for name in self._files:
            (_FOLDER / name).unlink(missing_ok=True)
        self._loop.close()

    async def _run(self, data: bytes) -> None:
        script, budget = Script(data[:400]), ByteBudget(1 << 22)
        memory, leases = SharedMemory(enabled=True, budget=budget), []
        odd = data[:8].decode("latin-1")
        while not script.is_over and len(leases) < 40:
            key, name = script.choice((*self._files, odd)), script.choice(("r", "s", odd))
            offset, size = script.choice(_NUMBERS), script.choice(_NUMBERS)
            match script.number(6):
                case 0 | 1:
                    attempt(lambda: memory.register(name, key, offset, size))  # noqa: B023 - called at once
                case 2:
                    attempt(lambda: memory.forget(name))  # noqa: B023
                case 3 if key in self._files:
                    os.truncate(_FOLDER / key, script.choice((0, 32, 4096, 1 << 20)))
                case 4 if leases:
                    leases[script.number(len(leases))].release()
                case _:
                    leases.append(memory.lease())
                    await self._use(leases[-1], script, name, offset, size)
            attempt(memory.status)
        for lease in leases:
            lease.release()
        memory.close()
        assert budget.used == 0, "bytes of the budget are not given back"
        assert not self._open_files(), "a file is left open"

    def _open_files(self) -> Sequence[str]:
        """Those of our files that this process has open."""
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return [link for link in links if any(name in link for name in self._files)]

    @staticmethod
    async def _use(lease: Lease, script: Script, name: str, offset: int, size: int) -> None:
        try:
            array = lease.array(name, offset, size, script.choice(_TYPES), script.choice(_SHAPES))
            await lease.fill()
            assert touch(array) <= size
            lease.place("y", name, offset, size).write(np.ones(script.choice((1, 8, 100)), np.float32))
        except PenstockError:
            pass
